"""Op contracts: what the model asks of a kernel. One module per op; start at `index_score.py`."""

STEMS = (
    "rms_norm",
    "linear",
    "row_linear",
    "mlp",
    "qk_norm_rope_append",
    "index_score",
    "index_topk",
    "sparse_attn",
    "dense_attn",
    "moe_route",
    "moe_experts",
)
"""Every op, in the order a layer calls them. A stem names its module, kernels, test and switch."""
