"""The schemes this version reads, by the name that config.json gives them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from jaxserve.quant.schemes import settings
from jaxserve.quant.schemes.awq import awq_scheme
from jaxserve.quant.schemes.compressed_tensors import compressed_tensors_scheme
from jaxserve.quant.schemes.fp8 import fp8_scheme
from jaxserve.quant.schemes.gptq import gptq_scheme
from jaxserve.quant.schemes.mxfp4 import mxfp4_scheme
from jaxserve.quant.schemes.scheme import Scheme

SCHEMES: dict[str, Callable[[Mapping[str, Any], Collection[str]], Scheme]] = {
    "gptq": gptq_scheme,
    "awq": awq_scheme,
    "compressed-tensors": compressed_tensors_scheme,
    "fp8": fp8_scheme,
    "mxfp4": mxfp4_scheme,
}
_SIGNS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", "_blocks")


def scheme_of(config: Mapping[str, Any], names: Collection[str]) -> Scheme | None:
    """The scheme of a model with this config.json and tensors of these names; None where nothing is quantized.

    Raises UnsupportedCheckpoint for a scheme or a variant that this version does not read, naming those that it does.
    """
    quantization = _quantization_config(config)
    if quantization is None:
        sign = next((name for name in sorted(names) if name.endswith(_SIGNS)), None)
        if sign is not None:
            raise CheckpointError(f"config.json: has no quantization_config, and the file has {sign!r}")
        return None
    method = quantization.get("quant_method") or ("compressed-tensors" if "config_groups" in quantization else None)
    if not isinstance(method, str) or method not in SCHEMES:
        raise UnsupportedCheckpoint(
            f"{settings.WHERE}: quant_method is {method!r:.80}; this version reads {', '.join(SCHEMES)}: "
            "use a checkpoint in one of these, one that is not quantized, or a GGUF file"
        )
    return SCHEMES[method](quantization, frozenset(names))


def _quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table, under its present or former name, of the model or of its text part."""
    text = config.get("text_config")
    for owner in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if owner.get(key) is not None:
                return settings.table(owner[key], key, "config.json")
    return None
