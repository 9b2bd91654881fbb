"""From the keys of a `config.json` to the fields of `ModelConfig`."""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .keys import (
    MODEL_KEYS,
    SHARED_KEYS,
    SPARSE_KEYS,
    Entry,
    Reader,
    as_object,
    check_integer,
    merge,
    same,
    show,
)
from .quantization import Layout

ARCHITECTURES = (
    "MiniMaxM3SparseForConditionalGeneration",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3VLForConditionalGeneration",
    "MiniMaxM3VLForCausalLM",
)
MODEL_TYPES = ("minimax_m3_vl", "minimax_m3", "minimax_m3_text", "minimax_m3_vl_text")
# What the text object of released files calls itself; it comes along when that is lifted out.
MISNAMED_MODEL_TYPE = "minimax_m2"
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

DEFAULT_PAGE_SIZE = 128
MAX_LAYERS = 4096
MAX_EXPERTS = 65536
NO_SPARSE_LAYERS = {
    "index_num_heads": 0,
    "index_head_dim": 0,
    "sparse_block_size": DEFAULT_PAGE_SIZE,
    "topk_blocks": 0,
    "init_blocks": 0,
    "local_blocks": 0,
}


def split(config: object) -> tuple[Reader, Any]:
    """The merged text keys and the raw `quantization_config` (None for none) of an outer object.

    The text object is `text_config` if there is one, else the file itself. Token ids,
    `tie_word_embeddings` and `quantization_config` may sit beside `text_config`; any other key of
    the text model there must agree with the one inside.
    """
    outer = as_object(config, "the file")
    architecture = _check_identity(outer)
    nested = outer.get("text_config")
    if nested is None:
        if architecture and architecture.endswith("ForConditionalGeneration"):
            raise ConfigError(
                f"missing key 'text_config', which {architecture} keeps the text model in; restore "
                "it, or for a text-only file name a ForCausalLM architecture"
            )
        text = {key: value for key, value in outer.items() if key != "text_config"}
    else:
        text = dict(as_object(nested, "text_config"))
        for key in outer:
            if key not in MODEL_KEYS or outer[key] is None:
                continue
            if not (key in text and same(text[key], outer[key])):
                inner = show(text[key]) if key in text else "absent"
                raise ConfigError(
                    f"{key}={show(outer[key])} beside text_config, where it is {inner}; the text "
                    "model is read from text_config, so move the right value there"
                )
        for key in sorted(SHARED_KEYS - {"tie_word_embeddings"}):
            if text.get(key) is None:
                text[key] = outer.get(key)
            elif outer.get(key) is not None and not same(text[key], outer[key]):
                raise ConfigError(
                    f"{key}={show(outer[key])} beside text_config but {show(text[key])} in it; "
                    "keep one"
                )
        text["tie_word_embeddings"] = _is_tied(outer) or _is_tied(text)
    quant = text.pop("quantization_config", None)
    return Reader(merge(text)), quant


def _check_identity(outer: dict[str, Any]) -> str | None:
    """The architecture, if the file names one. Raises unless the file says it is a MiniMax-M3."""
    names, model_type = outer.get("architectures"), outer.get("model_type")
    if names is not None:
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError(f"architectures={show(names)} must be a list of one name")
        if names[0].startswith(("DSpark", "DFlash")):
            raise ConfigError(
                f"architectures={show(names)} is a drafter; give the target's directory as the "
                "model and this one as the drafter"
            )
        if names[0] not in ARCHITECTURES:
            raise ConfigError(
                f"architectures={show(names)} is not supported; use one of "
                f"{', '.join(ARCHITECTURES)}"
            )
    elif model_type is None:
        raise ConfigError(
            "missing keys 'architectures' and 'model_type'; name a MiniMax-M3 architecture"
        )
    known = (*MODEL_TYPES, MISNAMED_MODEL_TYPE) if names else MODEL_TYPES
    if model_type is not None and not (isinstance(model_type, str) and model_type in known):
        raise ConfigError(
            f"model_type={show(model_type)} is not supported; use one of {', '.join(MODEL_TYPES)}"
        )
    return names[0] if names else None


def _is_tied(raw: dict[str, Any]) -> bool:
    value = raw.get("tie_word_embeddings")
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"tie_word_embeddings={show(value)} must be true or false")
    return value is True


def read_attention(reader: Reader) -> dict[str, Any]:
    """Residual stream, attention, indexer, norms and rotary embedding."""
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = reader.integer("head_dim", why="add it, it is not hidden_size / heads")
    sparse_layers = _sparse_layers(reader, num_layers)
    return {
        "hidden_size": reader.integer("hidden_size"),
        "num_layers": num_layers,
        "num_heads": reader.integer("num_attention_heads"),
        "num_kv_heads": reader.integer("num_key_value_heads"),
        "head_dim": head_dim,
        "sparse_layers": sparse_layers,
        **(_read_indexer(reader, sparse_layers) if any(sparse_layers) else NO_SPARSE_LAYERS),
        "use_gemma_norm": reader.boolean("use_gemma_norm", default=True),
        "rms_norm_eps": reader.positive("rms_norm_eps"),
        "rope_theta": reader.positive("rope_theta"),
        "rotary_dim": _rotary_dim(reader, head_dim),
        "max_position_embeddings": reader.integer("max_position_embeddings"),
    }


def _sparse_layers(reader: Reader, num_layers: int) -> tuple[bool, ...]:
    if not reader.boolean("use_sparse_attention", default=True):
        return (False,) * num_layers
    if "sparse_attention_freq" in reader:
        return reader.flags("sparse_attention_freq", num_layers)
    given = [reader.spelling(key) for key in sorted(SPARSE_KEYS) if key in reader]
    if given:
        raise ConfigError(
            f"{given[0]} is given but no layer is said to be sparse; add "
            "sparse_attention_config.sparse_attention_freq or layer_types, one entry per layer"
        )
    return (False,) * num_layers


def _read_indexer(reader: Reader, sparse_layers: tuple[bool, ...]) -> dict[str, Any]:
    block = reader.integer("sparse_block_size", why="sparse layers need it, 128 in released files")
    if "sparse_disable_index_value" in reader:
        disabled = reader.flags("sparse_disable_index_value", len(sparse_layers))
        for layer, is_sparse in enumerate(sparse_layers):
            if is_sparse and not disabled[layer]:
                raise ConfigError(
                    f"{reader.spelling('sparse_disable_index_value')} is 0 for the sparse layer "
                    f"{layer}; a K-only sparse index is required, so set it to 1 if the checkpoint "
                    "has no index_v_proj"
                )
    return {
        "index_num_heads": reader.integer(
            "sparse_num_index_heads", why="sparse layers need it, one per KV head"
        ),
        "index_head_dim": reader.integer("sparse_index_dim", why="sparse layers need it"),
        "sparse_block_size": block,
        "topk_blocks": reader.integer("sparse_topk_blocks", why="sparse layers need it"),
        "init_blocks": _forced_blocks(reader, "init", block, default=0),
        # Absent means 1: a query sees its own block, and 1 is the default of flat files' writer.
        "local_blocks": _forced_blocks(reader, "local", block, default=1),
    }


def _forced_blocks(reader: Reader, which: str, block: int, default: int) -> int:
    """A count of blocks, given as blocks or as tokens, which are rounded up to whole blocks."""
    in_blocks, in_tokens = f"sparse_{which}_block", f"sparse_{which}_tokens"
    blocks = reader.integer(in_blocks, low=0, default=default)
    if in_tokens not in reader:
        return blocks
    tokens = reader.integer(in_tokens, low=0)
    rounded = -(-tokens // block)
    if in_blocks in reader and rounded != blocks:
        raise ConfigError(
            f"{reader.spelling(in_blocks)}={blocks} and {reader.spelling(in_tokens)}={tokens} "
            f"({rounded} blocks of {block}) disagree; keep one of them"
        )
    return rounded


def _rotary_dim(reader: Reader, head_dim: int) -> int:
    rotary_dim = reader.integer("rotary_dim", low=2, default=head_dim)
    if "partial_rotary_factor" not in reader:
        return rotary_dim
    factor = reader.positive("partial_rotary_factor")
    spelling = reader.spelling("partial_rotary_factor")
    if factor > 1:
        raise ConfigError(f"{spelling}={factor} must be at most 1")
    scaled = int(head_dim * factor)
    if "rotary_dim" in reader and rotary_dim != scaled:
        raise ConfigError(
            f"rotary_dim={rotary_dim} and {spelling}={factor} (of head_dim={head_dim}: {scaled}) "
            "disagree; keep one of them"
        )
    return scaled


def read_mlp(reader: Reader, num_layers: int) -> dict[str, Any]:
    """Dense MLP, router, experts and activation. Widths of absent kinds of layer may be absent."""
    moe_layers = (True,) * num_layers
    if "moe_layer_freq" in reader:
        moe_layers = reader.flags("moe_layer_freq", num_layers)
    moe = None if any(moe_layers) else 0
    dense = 0 if all(moe_layers) else None
    low = 0 if moe == 0 else 1
    for_moe = "MoE layers need it"
    act = (
        "SwiGLU of this model is clamped and must not be guessed; add the value it was trained with"
    )
    return {
        "moe_layers": moe_layers,
        "intermediate_size": reader.integer("intermediate_size", low=low, default=moe, why=for_moe),
        "dense_intermediate_size": reader.integer(
            "dense_intermediate_size",
            low=0 if dense == 0 else 1,
            default=dense,
            why="layers without experts need it",
        ),
        "shared_intermediate_size": 0 if moe == 0 else _shared_width(reader),
        "num_experts": reader.integer(
            "num_local_experts", low=low, high=MAX_EXPERTS, default=moe, why=for_moe
        ),
        "experts_per_token": reader.integer(
            "num_experts_per_tok", low=low, high=MAX_EXPERTS, default=moe, why=for_moe
        ),
        "routed_scaling_factor": reader.positive("routed_scaling_factor", default=1.0),
        "use_routing_bias": reader.boolean("use_routing_bias", default=True),
        "swiglu_alpha": reader.positive("swiglu_alpha", why=act),
        "swiglu_limit": reader.positive("swiglu_limit", why=act),
        "swiglu_beta": reader.number("swiglu_beta", default=1.0),
    }


def _shared_width(reader: Reader) -> int:
    """Total width of the shared expert. Its tensors, when loaded, are checked against it."""
    count = reader.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=1)
    if "shared_intermediate_size" in reader:
        return reader.integer("shared_intermediate_size", low=0) * max(1, count)
    if "n_shared_experts" in reader:
        return reader.integer("intermediate_size") * count
    raise ConfigError(
        "missing key 'shared_intermediate_size' (or 'n_shared_experts'); give the shared expert's "
        "width, 0 for a model without one"
    )


def read_tokens(reader: Reader) -> dict[str, Any]:
    """Vocabulary, head and special tokens."""
    vocab_size = reader.integer("vocab_size")
    ids = {"bos_token_id": None, "eos_token_ids": (), "pad_token_id": None}
    return {
        "vocab_size": vocab_size,
        "tie_word_embeddings": reader.boolean("tie_word_embeddings", default=False),
        **ids,
        **read_ids(reader, vocab_size),
    }


def read_generation(raw: object, vocab_size: int) -> dict[str, Any]:
    """The special tokens of a `generation_config.json`, whose other keys are sampling defaults."""
    own = as_object(raw, "the file")
    given = {key: Entry(own[key], key) for key in TOKEN_KEYS if own.get(key) is not None}
    return read_ids(Reader(given), vocab_size)


def read_ids(reader: Reader, vocab_size: int) -> dict[str, Any]:
    """The special tokens that are given, each checked to lie in the vocabulary."""
    ids: dict[str, Any] = {}
    for key in ("bos_token_id", "pad_token_id"):
        if key in reader:
            ids[key] = _token(reader.entries[key].value, key, vocab_size)
    if "eos_token_id" in reader:
        value = reader.entries["eos_token_id"].value
        values = value if isinstance(value, list) else [value]
        tokens = [_token(item, "eos_token_id", vocab_size) for item in values]
        ids["eos_token_ids"] = tuple(dict.fromkeys(tokens))
    return ids


def _token(value: object, key: str, vocab_size: int) -> int:
    token = check_integer(value, key)
    if token >= vocab_size:
        raise ConfigError(f"{key}={token} is outside the vocabulary; vocab_size={vocab_size}")
    return token


def layout(values: Mapping[str, Any]) -> Layout:
    """The quantisable modules of a model with these `ModelConfig` fields."""
    linears: list[str] = []
    for layer, is_moe in enumerate(values["moe_layers"]):
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        if values["sparse_layers"][layer]:
            names += ["index_q_proj", "index_k_proj"]
        linears += [f"model.layers.{layer}.self_attn.{name}" for name in names]
        mlp = "block_sparse_moe.shared_experts" if is_moe else "mlp"
        if not is_moe or values["shared_intermediate_size"]:
            linears += [
                f"model.layers.{layer}.{mlp}.{name}"
                for name in ("gate_proj", "up_proj", "down_proj")
            ]
    return Layout(
        linears=tuple(linears),
        moe_layers=tuple(i for i, is_moe in enumerate(values["moe_layers"]) if is_moe),
        num_experts=values["num_experts"],
        all_sparse=all(values["sparse_layers"]),
    )
