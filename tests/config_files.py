"""The other spellings of a `config.json` than the one that `ModelConfig.to_dict` writes."""

from typing import Any

from m31jax.config import ModelConfig

SPARSE_TO_FLAT = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}


def to_flat(config: ModelConfig) -> dict[str, Any]:
    """The file that a newer writer makes: flat, without the keys that it does not know.

    Says the same as `config` if that has init_blocks 0, a routing bias and Gemma norms.
    """
    released = config.to_dict()
    text = released.pop("text_config")
    for key in ("use_gemma_norm", "use_routing_bias", "scoring_func", "use_qk_norm"):
        del text[key]
    for key in ("qk_norm_type", "attention_output_gate", "n_shared_experts", "swiglu_beta"):
        del text[key]
    text["hidden_act"] = "silu"
    text["num_experts"] = text.pop("num_local_experts")
    text["swiglu_beta"] = config.swiglu_beta
    text["mlp_layer_types"] = ["sparse" if moe else "dense" for moe in text.pop("moe_layer_freq")]
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "partial_rotary_factor": text.pop("rotary_dim") / config.head_dim,
    }
    sparse = text.pop("sparse_attention_config", None)
    if sparse is not None:
        text |= {flat: sparse[key] for key, flat in SPARSE_TO_FLAT.items()}
    words = {True: "minimax_m3_sparse", False: "full_attention"}
    text["layer_types"] = [words[is_sparse] for is_sparse in config.sparse_layers]
    return released | text | {"architectures": ["MiniMaxM3SparseForCausalLM"]}


def text_of(config: ModelConfig) -> dict[str, Any]:
    """The released spelling as a text-only file, nested keys included."""
    released = config.to_dict()
    return released | released.pop("text_config") | {"architectures": ["MiniMaxM3VLForCausalLM"]}
