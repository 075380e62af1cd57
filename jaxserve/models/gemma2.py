"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): Gemma 3's forward pass with soft caps, one rope and no norm on q and k.

Every other layer has a sliding window. Agrees with transformers' modeling_gemma2.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from checkpoints.load import WeightSource
from jaxserve.layers.rope import make_rope
from jaxserve.models import gemma3
from jaxserve.models.gemma3 import GemmaConfig
from jaxserve.models.model import FileLayout, Model, check_values, gguf_value, reading

_PATTERN = 2
_THETA = 10_000.0
_LAYERS_OF_27B = 46  # the one size whose queries are not scaled by the head size; a GGUF does not say


def config_from_hf(hf: Mapping[str, Any]) -> GemmaConfig:
    """From a config.json of model_type gemma2. Raises CheckpointError, UnsupportedCheckpoint.

    Defaults are those of transformers' Gemma2Config.
    """
    with reading("config.json", "gemma2"):
        check_values(hf, gemma3.COMPUTED)
        head_size, max_position = hf.get("head_dim", 256), hf.get("max_position_embeddings", 8192)
        scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        theta = scaling.get("rope_theta") or hf.get("rope_theta", _THETA)
        rope = make_rope(head_size, theta, scaling, max_position)
        return GemmaConfig(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_size=hf["intermediate_size"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf["num_key_value_heads"],
            head_size=head_size,
            vocab_size=hf["vocab_size"],
            max_position=max_position,
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            query_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
            window=hf.get("sliding_window", 4096),
            layer_kinds=gemma3.layer_kinds_of(hf["num_hidden_layers"], hf, _PATTERN),
            local_rope=rope,
            global_rope=rope,
            is_tied=hf.get("tie_word_embeddings", True),
            has_qk_norm=False,
            attention_soft_cap=hf.get("attn_logit_softcapping", 50.0),
            final_soft_cap=hf.get("final_logit_softcapping", 30.0),
        )


def config_from_gguf(source: WeightSource) -> GemmaConfig:
    """From a GGUF of architecture gemma2; constants that such files leave out are the architecture's."""
    meta = source.metadata

    need = partial(gguf_value, source)
    num_layers, heads, hidden = need("block_count"), need("attention.head_count"), need("embedding_length")
    with reading(str(source.path), "gemma2"):
        head_size = meta.get("gemma2.attention.key_length", 256)
        rope = make_rope(head_size, meta.get("gemma2.rope.freq_base", _THETA), None, need("context_length"))
        return GemmaConfig(
            num_layers=num_layers,
            hidden_size=hidden,
            ffn_size=need("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=meta.get("gemma2.attention.head_count_kv") or heads,
            head_size=head_size,
            vocab_size=source.info("token_embd.weight").shape[0],
            max_position=need("context_length"),
            norm_eps=need("attention.layer_norm_rms_epsilon"),
            query_scale=(hidden // heads if num_layers == _LAYERS_OF_27B else head_size) ** -0.5,
            window=meta.get("gemma2.attention.sliding_window", 4096),
            layer_kinds=gemma3.repeated_kinds(num_layers, _PATTERN),
            local_rope=rope,
            global_rope=rope,
            is_tied="output.weight" not in source.names(),
            has_qk_norm=False,
            attention_soft_cap=meta.get("gemma2.attn_logit_softcapping", 50.0),
            final_soft_cap=meta.get("gemma2.final_logit_softcapping", 30.0),
        )


MODEL = Model(
    hf_architectures=("Gemma2ForCausalLM",),
    gguf_architectures=("gemma2",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=gemma3.param_specs,
    hf_layout=gemma3.HF_LAYOUT,
    gguf_layout=FileLayout(names=gemma3.GGUF_NAMES),
    forward=gemma3.forward,
    unembed=gemma3.logits,
)
