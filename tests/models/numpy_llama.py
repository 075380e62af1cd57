"""A llama forward pass in float64 numpy, written apart from the product: every token at once, no cache."""

import numpy as np


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, inverse_frequencies: np.ndarray, factor: float) -> np.ndarray:
    """x [T, N, H] with pairs (i, i + H/2) turned by position."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None, None] * inverse_frequencies[None, None]
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def logits(weights: dict[str, np.ndarray], ids: list[int], sizes: dict[str, float]) -> np.ndarray:
    """Logits [T, V] from tensors under HF's names (q and k in halves, not interleaved)."""
    x = weights["embed"][ids]
    heads, kv_heads, size = (int(sizes[n]) for n in ("heads", "kv_heads", "head_size"))
    inverse = sizes["theta"] ** -(np.arange(0, size, 2) / size)
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    for layer in range(int(sizes["layers"])):

        def w(name: str, layer: int = layer) -> np.ndarray:
            return weights[f"{layer}.{name}"]

        h = rms(x, w("attn_norm"), sizes["eps"])
        q = rotate((h @ w("q").T).reshape(len(ids), heads, size), inverse, 1.0)
        k = rotate((h @ w("k").T).reshape(len(ids), kv_heads, size), inverse, 1.0)
        v = (h @ w("v").T).reshape(len(ids), kv_heads, size)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.where(causal, np.einsum("tnh,snh->nts", q, k) * size**-0.5, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + np.einsum("nts,snh->tnh", scores, v).reshape(len(ids), -1) @ w("o").T
        h = rms(x, w("ffn_norm"), sizes["eps"])
        gate = h @ w("gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w("up").T)) @ w("down").T
    return rms(x, weights["norm"], sizes["eps"]) @ weights["embed"].T


def from_gguf(path: str) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Weights and sizes of a tied llama GGUF, read and dequantized by the `gguf` package."""
    import gguf

    reader = gguf.GGUFReader(path)

    def number(key: str) -> float:
        field = reader.fields[f"llama.{key}"]
        return float(field.parts[field.data[0]][0])

    sizes = {
        "layers": number("block_count"),
        "heads": number("attention.head_count"),
        "kv_heads": number("attention.head_count_kv"),
        "head_size": number("embedding_length") / number("attention.head_count"),
        "eps": number("attention.layer_norm_rms_epsilon"),
        "theta": number("rope.freq_base"),
    }
    weights = {}
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        parts = tensor.name.split(".")
        name = {"token_embd": "embed", "output_norm": "norm"}.get(parts[0])
        if name is None:
            kind = parts[2]
            name = f"{parts[1]}.{kind.removeprefix('ffn_') if kind != 'ffn_norm' else kind}"
            short = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}.get(kind)
            name = f"{parts[1]}.{short}" if short else name
            if kind in ("attn_q", "attn_k"):  # GGUF interleaves the halves
                num = int(sizes["heads" if kind == "attn_q" else "kv_heads"])
                value = value.reshape(num, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        weights[name] = value
    return weights, sizes
