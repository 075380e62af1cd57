"""A Gemma 3 forward pass in numpy, written apart from the product: every token at once, no cache."""

import gguf
import numpy as np
from numpy_llama import rms, rotate

LOCAL_THETA, PATTERN = 10_000.0, 6  # constants of the architecture, not in the file


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class Checkpoint:
    """A GGUF of architecture gemma3, read and dequantized by the `gguf` package, in float64."""

    def __init__(self, path: str) -> None:
        reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.fields = {name.removeprefix("gemma3."): field for name, field in reader.fields.items()}

    def number(self, key: str) -> float:
        field = self.fields[key]
        return float(field.parts[field.data[0]][0])

    def rows(self, name: str, rows: slice | list[int] = slice(None)) -> np.ndarray:
        tensor = self.tensors[name]
        return gguf.dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float64)


def last_logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    """Logits [V] behind the last token."""
    width, eps = checkpoint.number("embedding_length"), checkpoint.number("attention.layer_norm_rms_epsilon")
    x = checkpoint.rows("token_embd.weight", ids) * np.sqrt(width)
    for layer in range(int(checkpoint.number("block_count"))):

        def w(name: str, layer: int = layer) -> np.ndarray:
            return checkpoint.rows(f"blk.{layer}.{name}.weight")

        out = attention(checkpoint, rms(x, w("attn_norm"), eps), w, is_local=(layer + 1) % PATTERN != 0)
        x = x + rms(out, w("post_attention_norm"), eps)
        h = rms(x, w("ffn_norm"), eps)
        out = (gelu(h @ w("ffn_gate").T) * (h @ w("ffn_up").T)) @ w("ffn_down").T
        x = x + rms(out, w("post_ffw_norm"), eps)
    last = rms(x[-1:], checkpoint.rows("output_norm.weight"), eps)[0]
    size = checkpoint.tensors["token_embd.weight"].data.shape[0]
    chunks = [slice(start, start + 16384) for start in range(0, size, 16384)]
    return np.concatenate([checkpoint.rows("token_embd.weight", chunk) @ last for chunk in chunks])


def attention(checkpoint: Checkpoint, h: np.ndarray, w, *, is_local: bool) -> np.ndarray:
    heads, kv_heads = (int(checkpoint.number(f"attention.{key}")) for key in ("head_count", "head_count_kv"))
    size, eps = int(checkpoint.number("attention.key_length")), checkpoint.number("attention.layer_norm_rms_epsilon")
    theta = LOCAL_THETA if is_local else checkpoint.number("rope.freq_base")
    inverse = theta ** -(np.arange(0, size, 2) / size)
    q = rotate(rms((h @ w("attn_q").T).reshape(len(h), heads, size), w("attn_q_norm"), eps), inverse, 1.0)
    k = rotate(rms((h @ w("attn_k").T).reshape(len(h), kv_heads, size), w("attn_k_norm"), eps), inverse, 1.0)
    v = (h @ w("attn_v").T).reshape(len(h), kv_heads, size)
    k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
    distance = np.arange(len(h))[:, None] - np.arange(len(h))[None]
    seen = distance >= 0
    if is_local:
        seen &= distance < checkpoint.number("attention.sliding_window")
    scores = np.where(seen, np.einsum("tnh,snh->nts", q, k) * size**-0.5, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", scores, v).reshape(len(h), -1) @ w("attn_output").T
