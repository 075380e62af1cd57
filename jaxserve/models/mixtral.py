"""Mixtral (arXiv 2401.04088): a llama with eight experts in place of each MLP. In GGUF its architecture is llama.

Agrees with transformers' modeling_mixtral.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.layers.moe import Routing
from jaxserve.models import decoder, llama
from jaxserve.models.decoder import DecoderConfig, MoeConfig
from jaxserve.models.file_names import hf_names
from jaxserve.models.model import FileLayout, Model, reading

_EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of model_type mixtral. Raises CheckpointError, UnsupportedCheckpoint."""
    config = llama.config_from_hf(hf)
    with reading("config.json", "mixtral"):
        moe = MoeConfig(
            routing=Routing(num_chosen=hf.get("num_experts_per_tok", 2)),
            num_experts=hf.get("num_local_experts", 8),
            expert_size=config.ffn_size,
        )
        return dataclasses.replace(config, moe=moe)


MODEL = Model(
    hf_architectures=("MixtralForCausalLM",),
    gguf_architectures=(),
    config_from_hf=config_from_hf,
    config_from_gguf=llama.config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(
        names=hf_names(
            moe__router="block_sparse_moe.gate.weight",
            **{f"moe__experts__{p}": f"block_sparse_moe.experts.{{expert}}.{w}.weight" for p, w in _EXPERTS.items()},
        )
    ),
    gguf_layout=llama.MODEL.gguf_layout,
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
