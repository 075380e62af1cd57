"""The names under which most files keep the parameters of the shared decoder; a family adds or replaces a few."""

from checkpoints.names import NameMap

_HF_LAYER = "model.layers.{layer}"
_HF_MTP = {
    "projection": "eh_proj.weight",
    "embed_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "head_norm": "shared_head.norm.weight",
}
_GGUF_ATTENTION = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
_GGUF_MTP = {
    "projection": "nextn.eh_proj.weight",
    "embed_norm": "nextn.enorm.weight",
    "hidden_norm": "nextn.hnorm.weight",
    "head_norm": "nextn.shared_head_norm.weight",
}
_MLP = ("gate", "up", "down")


def hf_names(**of_layer: str) -> NameMap:
    """Hugging Face's names. of_layer: rules within a layer, "__" for a dot in ours: moe__router="mlp.gate.weight"."""
    rules = {
        "attention_norm": "input_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        **{f"attention.{p}": f"self_attn.{p}_proj.weight" for p in "qkvo"},
        **{f"attention.{p}_bias": f"self_attn.{p}_proj.bias" for p in "qkvo"},
        **{f"attention.{p}_norm": f"self_attn.{p}_norm.weight" for p in "qk"},
        **{f"mlp.{p}": f"mlp.{p}_proj.weight" for p in _MLP},
        **{f"mlp.{p}_bias": f"mlp.{p}_proj.bias" for p in _MLP},
        **{f"moe.experts.{p}": f"mlp.experts.{{expert}}.{p}_proj.weight" for p in _MLP},
        "moe.router": "mlp.gate.weight",
        "moe.correction": "mlp.gate.e_score_correction_bias",
        **{f"moe.shared.{p}": f"mlp.shared_experts.{p}_proj.weight" for p in _MLP},
    }
    rules |= {ours.replace("__", "."): theirs for ours, theirs in of_layer.items()}
    return NameMap(
        rules={
            "embed": "model.embed_tokens.weight",
            "norm": "model.norm.weight",
            "unembed": "lm_head.weight",
            **{f"layers.{{layer}}.{ours}": f"{_HF_LAYER}.{theirs}" for ours, theirs in rules.items()},
            **{f"mtp.{{layer}}.{ours}": f"{_HF_LAYER}.{theirs}" for ours, theirs in (_HF_MTP | rules).items()},
        }
    )


def gguf_names(**of_layer: str) -> NameMap:
    """GGUF's names (llama.cpp's gguf-py/gguf/constants.py). of_layer: as for `hf_names`."""
    rules = {
        "attention_norm": "attn_norm.weight",
        "mlp_norm": "ffn_norm.weight",
        **{f"attention.{p}": f"{t}.weight" for p, t in _GGUF_ATTENTION.items()},
        **{f"attention.{p}_bias": f"{t}.bias" for p, t in _GGUF_ATTENTION.items()},
        **{f"attention.{p}_norm": f"attn_{p}_norm.weight" for p in "qk"},
        "attention.sinks": "attn_sinks.weight",
        **{f"mlp.{p}": f"ffn_{p}.weight" for p in _MLP},
        **{f"moe.experts.{p}": f"ffn_{p}_exps.weight" for p in _MLP},
        **{f"moe.experts.{p}_bias": f"ffn_{p}_exps.bias" for p in _MLP},
        "moe.router": "ffn_gate_inp.weight",
        "moe.router_bias": "ffn_gate_inp.bias",
        "moe.correction": "exp_probs_b.bias",
        **{f"moe.shared.{p}": f"ffn_{p}_shexp.weight" for p in _MLP},
        "moe.shared_gate": "ffn_gate_inp_shexp.weight",
    }
    rules |= {ours.replace("__", "."): theirs for ours, theirs in of_layer.items()}
    return NameMap(
        rules={
            "embed": "token_embd.weight",
            "norm": "output_norm.weight",
            "unembed": "output.weight",
            **{f"layers.{{layer}}.{ours}": f"blk.{{layer}}.{theirs}" for ours, theirs in rules.items()},
            **{f"mtp.{{layer}}.{ours}": f"blk.{{layer}}.{theirs}" for ours, theirs in (_GGUF_MTP | rules).items()},
        }
    )
