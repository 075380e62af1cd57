"""Multi-head latent attention of a ragged batch over a paged cache of latents, and the write of new latents into it.

The absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1): all query heads share one key, the token's latent and
its rotated part side by side, and one value, the latent. reference.py defines the result.
"""
