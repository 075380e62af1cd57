"""Rotary position embedding and the ways models stretch it to longer contexts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class GrowingTheta:
    """Base theta that grows with the length of a sequence beyond the `original` positions (NTK-aware scaling)."""

    theta: float
    factor: float
    original: int
    rotated_size: int

    def inverse_frequencies(self, length: int) -> tuple[float, ...]:
        grown = self.factor * length / self.original - (self.factor - 1)
        base = self.theta * grown ** (self.rotated_size / (self.rotated_size - 2))
        return tuple(_inverse_frequencies(self.rotated_size, base))


@dataclass(frozen=True, kw_only=True)
class LongFrequencies:
    """Other frequencies for sequences of more than `original` tokens."""

    original: int
    frequencies: tuple[float, ...]

    def inverse_frequencies(self, length: int) -> tuple[float, ...]:
        return self.frequencies


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Inverse frequency per rotated pair (radians per position), and a factor on cos and sin (yarn's and longrope's).

    beyond: what holds instead for sequences longer than the model was first trained on. Keys in the cache are rotated,
    so one choice holds for all tokens of an engine: see `for_context`.
    """

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    beyond: GrowingTheta | LongFrequencies | None = None

    def for_context(self, max_model_len: int) -> "Rope":
        """The rope of sequences that may grow to so many tokens."""
        if self.beyond is None or max_model_len <= self.beyond.original:
            return self
        return replace(self, inverse_frequencies=self.beyond.inverse_frequencies(max_model_len), beyond=None)


def make_rope(rotated_size: int, theta: float, scaling: Mapping[str, Any] | None, max_position: int) -> Rope:
    """Frequencies for one of the SUPPORTED kinds, named as in HF's `rope_scaling` / `rope_parameters`.

    rotated_size: values of a head that are rotated, all of them in most models. longrope also wants
    `original_max_position_embeddings` among its parameters.

    Agrees with transformers' modeling_rope_utils. Raises ValueError for a kind that is not supported.
    """
    scaling = dict(scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    inverse = _inverse_frequencies(rotated_size, theta)
    if kind == "default":
        return Rope(inverse_frequencies=tuple(inverse))
    if kind == "linear":
        return Rope(inverse_frequencies=tuple(inverse / scaling["factor"]))
    if kind == "llama3":
        return Rope(inverse_frequencies=tuple(_llama3(inverse, scaling)))
    if kind == "yarn":
        return _yarn(inverse, rotated_size, theta, scaling, max_position)
    if kind == "dynamic":
        beyond = GrowingTheta(theta=theta, factor=scaling["factor"], original=max_position, rotated_size=rotated_size)
        return Rope(inverse_frequencies=tuple(inverse), beyond=beyond)
    if kind in ("longrope", "su"):  # the second is its first name
        return _longrope(inverse, scaling, max_position)
    raise ValueError(f"rope type {kind!r} is not supported; this version knows {', '.join(SUPPORTED)}")


def _inverse_frequencies(rotated_size: int, theta: float) -> np.ndarray:
    return theta ** -(np.arange(0, rotated_size, 2, dtype=np.float64) / rotated_size)


def _llama3(inverse: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth ramp between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return keep * inverse + (1 - keep) * inverse / scaling["factor"]


def _yarn(inverse: np.ndarray, head_size: int, theta: float, scaling: Mapping[str, Any], max_position: int) -> Rope:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), with transformers' default and mscale forms of the factor."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or max_position

    def pair_of(rotations: float) -> float:
        return head_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(float(scaling.get("beta_fast") or 32)), pair_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    ramp = np.clip((np.arange(head_size // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return Rope(
        inverse_frequencies=tuple(inverse / factor * ramp + inverse * (1 - ramp)),
        attention_factor=_yarn_attention_factor(float(factor), scaling),
    )


def _longrope(inverse: np.ndarray, scaling: Mapping[str, Any], max_position: int) -> Rope:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a factor for each frequency, others for long sequences."""
    original = scaling.get("original_max_position_embeddings") or max_position
    short, long = (np.asarray(scaling[name], np.float64) for name in ("short_factor", "long_factor"))
    if short.shape != inverse.shape or long.shape != inverse.shape:
        raise ValueError(f"longrope has {short.size} short and {long.size} long factors for {inverse.size} frequencies")
    stretch = max_position / original
    factor = scaling.get("attention_factor")
    if factor is None:
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return Rope(
        inverse_frequencies=tuple(inverse / short),
        attention_factor=float(factor),
        beyond=LongFrequencies(original=original, frequencies=tuple(inverse / long)),
    )


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(float(scaling["mscale"])) / scale(float(scaling["mscale_all_dim"]))
    return scale(1.0)


def rope_angles(rope: Rope, positions: Int32[Array, "T"]) -> tuple[Float32[Array, "T h"], Float32[Array, "T h"]]:
    """cos and sin of every rotated pair, times the attention factor; h = H/2."""
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(rope.inverse_frequencies, jnp.float32)[None]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
