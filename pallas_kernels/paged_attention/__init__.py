"""Causal attention of a ragged batch over a paged KV cache, and the write of new keys and values into it.

reference.py defines the result; xla.py computes it fast from plain XLA operations on any device.
"""
