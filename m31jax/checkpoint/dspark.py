"""The DSpark drafter's checkpoint: its config file and the table of its 97 tensors.

It lies in the folder `dspark/` of its target and has neither embedding nor head: those are the
target's.
"""

from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from ..weights import FORMATS, Part, Source

FOLDER = "dspark"
PREFIX = "language_model.model.dspark."
PREFIXES = (PREFIX, "model.dspark.", "dspark.")
"""The released prefix first; loaders accept all."""

ARCHITECTURE = "DSparkMiniMaxDraftModel"
BLOCK_SIZE = 7
_BIAS = (Part("", "", ("BF16",), None, "values", "finite"),)
_RELEASED_MASK, _RELEASED_VOCAB = 200058, 200064


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter; all but the last six equal the target's.

    Attributes:
      num_layers: drafter layers, each with sliding attention over `window` tokens and a dense MLP.
      capture_layers: target layers (0-based) whose output is its context, ascending.
      markov_rank: rank of the bias that depends on the previous token.
      block_size: tokens that it drafts at once.
      mask_token_id: stands for a token not drafted yet.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    capture_layers: tuple[int, ...]
    markov_rank: int
    block_size: int
    mask_token_id: int
    window: int


def shape_for(config: ModelConfig) -> DrafterShape:
    """A drafter for a target: the released one for released sizes, in proportion for others.

    Raises:
      ConfigError: hidden_size is not a multiple of 32, or every token id is special.
    """
    if config.hidden_size % 32:
        raise ConfigError(
            f"hidden_size={config.hidden_size} is not a multiple of 32, which a drafter's MXFP8 "
            "weights need; use another model"
        )
    layers = config.num_layers
    # The released drafter of a 60-layer target captures 3, 17, 31, 45 and 59.
    step = max(1, 14 * layers // 60)
    capture = tuple(range(layers - 1, -1, -step)[:5][::-1])
    special = {config.bos_token_id, config.pad_token_id, *config.eos_token_ids}
    free = [_RELEASED_MASK] if config.vocab_size == _RELEASED_VOCAB else []
    free += [i for i in range(config.vocab_size - 1, -1, -1) if i not in special][:1]
    if not free:
        raise ConfigError("every token id is special; a drafter needs one as its mask")
    ffn = config.dense_intermediate_size or 2 * config.hidden_size
    return DrafterShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=ffn + -ffn % 32,
        vocab_size=config.vocab_size,
        num_layers=min(5, max(1, layers // 2)),
        capture_layers=capture,
        markov_rank=min(256, config.hidden_size // 4),
        block_size=BLOCK_SIZE,
        mask_token_id=free[0],
        window=4096,
    )


def sources(shape: DrafterShape) -> list[Source]:
    """Every tensor of a drafter; names come after the prefix.

    Some files spell `.mlp.` as `.block_sparse_moe.`; some hold `rotary_emb.*`, which is recomputed.
    """
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    context = len(shape.capture_layers) * hidden
    found: list[Source] = []

    def add(module: str, sizes: tuple[int, ...], parts: tuple[Part, ...], group: str = "") -> None:
        found.extend(
            Source(
                module + part.tensor,
                ((*sizes[:-1], sizes[-1] // part.divide),),
                part,
                sizes[-1],
                aliases=tuple(module + alias for alias in part.aliases),
                codes=module + part.codes if part.codes else "",
                set=group or module,
            )
            for part in parts
        )

    bf16, norm, mxfp8 = FORMATS["bf16"], FORMATS["norm"], FORMATS["mxfp8"]
    add("fc", (hidden, context), bf16)
    add("hidden_norm", (hidden,), norm)
    add("final_norm", (hidden,), norm)
    add("markov_head.markov_w1", (shape.vocab_size, shape.markov_rank), bf16, "markov")
    add("markov_head.markov_w2", (shape.vocab_size, shape.markov_rank), bf16, "markov")
    add("confidence_head.proj", (1, hidden + shape.markov_rank), bf16, "confidence")
    add("confidence_head.proj.bias", (1,), _BIAS, "confidence")
    for layer in range(shape.num_layers):
        stem = f"layers.{layer}.decoder_layer."
        attn, mlp = stem + "self_attn.", stem + "mlp."
        add(stem + "input_layernorm", (hidden,), norm)
        add(stem + "post_attention_layernorm", (hidden,), norm)
        add(attn + "q_norm", (shape.head_dim,), norm, attn + "norm")
        add(attn + "k_norm", (shape.head_dim,), norm, attn + "norm")
        add(attn + "q_proj", (heads, hidden), mxfp8, attn + "qkv")
        add(attn + "k_proj", (kv, hidden), mxfp8, attn + "qkv")
        add(attn + "v_proj", (kv, hidden), mxfp8, attn + "qkv")
        add(attn + "o_proj", (hidden, heads), mxfp8)
        add(mlp + "gate_proj", (ffn, hidden), mxfp8, mlp)
        add(mlp + "up_proj", (ffn, hidden), mxfp8, mlp)
        add(mlp + "down_proj", (hidden, ffn), mxfp8, mlp)
    return found


def to_config(shape: DrafterShape, target: ModelConfig) -> dict[str, Any]:
    """The released, nested `config.json` of a drafter."""
    sliding = ["sliding_attention"] * shape.num_layers
    capture = list(shape.capture_layers)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "minimax_m3_vl",
        "text_config": {
            "num_hidden_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rotary_dim": target.rotary_dim,
            "rope_theta": target.rope_theta,
            "rms_norm_eps": target.rms_norm_eps,
            "dense_intermediate_size": shape.intermediate_size,
            "hidden_act": "swigluoai",
            "swiglu_alpha": target.swiglu_alpha,
            "swiglu_limit": target.swiglu_limit,
            "use_gemma_norm": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "sliding_window": shape.window,
            "layer_types": sliding,
            "moe_layer_freq": [0] * shape.num_layers,
            "sparse_attention_config": None,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "dspark_ffn_hidden_size": shape.intermediate_size,
            "dspark_markov_rank": shape.markov_rank,
            "dspark_block_size": shape.block_size,
            "dspark_noise_token_id": shape.mask_token_id,
            "dspark_markov_head_type": "vanilla",
            "dspark_use_dense_ffn": True,
            "dspark_hybrid_context_fusion": False,
            "dspark_target_layer_ids": capture,
            "dspark_config": {
                "use_dense_ffn": True,
                "ffn_hidden_size": shape.intermediate_size,
                "hybrid_context_fusion": False,
            },
            "dflash_config": {
                "num_hidden_layers": shape.num_layers,
                "num_target_layers": target.num_layers,
                "target_layer_ids": capture,
                "layer_types": sliding,
            },
        },
        "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    }
