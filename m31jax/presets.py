"""Model shapes that are known by name, for random checkpoints of the released layout.

`dataclasses.replace(TINY, quantization=FORMATS["nvfp4"])` is a tiny model stored as M3.1 is.
"""

from .config import ModelConfig, Quantization

FULL = ModelConfig(
    vocab_size=200064,
    hidden_size=6144,
    num_layers=60,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=3072,
    dense_intermediate_size=12288,
    shared_intermediate_size=3072,
    num_experts=128,
    experts_per_token=4,
    moe_layers=(False,) * 3 + (True,) * 57,
    sparse_layers=(True,) * 60,
    index_num_heads=4,
    index_head_dim=128,
    sparse_block_size=128,
    topk_blocks=16,
    init_blocks=0,
    local_blocks=1,
    routed_scaling_factor=2.0,
    use_routing_bias=True,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    swiglu_beta=1.0,
    use_gemma_norm=True,
    rms_norm_eps=1e-6,
    rope_theta=5e6,
    rotary_dim=64,
    max_position_embeddings=1048576,
    tie_word_embeddings=False,
    bos_token_id=200034,
    eos_token_ids=(200020,),
    pad_token_id=None,
)
"""The geometry of the released M3.1."""

TINY = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=256,
    dense_intermediate_size=512,
    shared_intermediate_size=256,
    num_experts=8,
    experts_per_token=2,
    moe_layers=(False, True, True, True),
    sparse_layers=(True,) * 4,
    index_num_heads=4,
    index_head_dim=64,
    sparse_block_size=128,
    topk_blocks=4,
    init_blocks=0,
    local_blocks=1,
    routed_scaling_factor=2.0,
    use_routing_bias=True,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    swiglu_beta=1.0,
    use_gemma_norm=True,
    rms_norm_eps=1e-6,
    rope_theta=5e6,
    rotary_dim=32,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    bos_token_id=510,
    eos_token_ids=(511,),
    pad_token_id=None,
)
"""FULL's structure at a size for tests: blocks are dropped from 513 tokens on, and every width cut
over ranks is a multiple of 256, so each of 8 ranks holds whole MXFP8 and NVFP4 scale groups."""

PRESETS = {"tiny": TINY, "full": FULL}
"""`--preset` of `m31jax checkpoint make`."""

# What the released files list as not quantised; a plain name matches that module in every layer.
_NOT_QUANTISED = ("embed_tokens", "lm_head", "gate", "e_score_correction_bias")

FORMATS = {
    "bf16": Quantization(),
    "mxfp8": Quantization("mxfp8", "mxfp8", _NOT_QUANTISED),
    "nvfp4": Quantization("mxfp8", "nvfp4", _NOT_QUANTISED),
}
"""`--format` of `m31jax checkpoint make`: BF16 M3, MXFP8 M3, and M3.1 as released."""
