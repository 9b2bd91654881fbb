"""Rules between the fields of a `ModelConfig`, however it was made."""

from typing import TYPE_CHECKING

from ..errors import ConfigError
from .read import layout

if TYPE_CHECKING:
    from .model_config import ModelConfig

_MULTIPLE = {"mxfp8": 32, "nvfp4": 16, "nvfp4_modelopt": 16}  # elements that share one scale


def check(config: "ModelConfig") -> None:
    """Raises `ConfigError` for the first broken rule, under the key of `config.json`."""
    _check_layers(config)
    _check_attention(config)
    if any(config.sparse_layers):
        _check_indexer(config)
    if any(config.moe_layers):
        _check_experts(config)
    if not all(config.moe_layers) and config.dense_intermediate_size < 1:
        raise ConfigError(
            f"dense_intermediate_size={config.dense_intermediate_size} but layer "
            f"{config.moe_layers.index(False)} has a dense MLP; give its width"
        )
    _check_tokens(config)
    _check_scale_groups(config)


def _check_layers(config: "ModelConfig") -> None:
    sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in sizes:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least 1")
    for name in ("moe_layers", "sparse_layers"):
        flags = getattr(config, name)
        if not isinstance(flags, tuple) or len(flags) != config.num_layers:
            raise ConfigError(
                f"{name} must be a tuple of num_hidden_layers={config.num_layers} booleans, got "
                f"{flags!r}"
            )


def _check_attention(config: "ModelConfig") -> None:
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads={config.num_heads} is not a multiple of "
            f"num_key_value_heads={config.num_kv_heads}; every KV head serves the same number of "
            "heads"
        )
    if config.rotary_dim % 2 or not 2 <= config.rotary_dim <= config.head_dim:
        raise ConfigError(
            f"rotary_dim={config.rotary_dim} must be even and in 2..head_dim={config.head_dim}; "
            "fix rotary_dim or partial_rotary_factor"
        )


def _check_indexer(config: "ModelConfig") -> None:
    if config.index_num_heads > config.num_kv_heads:
        raise ConfigError(
            f"sparse_num_index_heads={config.index_num_heads} is more than "
            f"num_key_value_heads={config.num_kv_heads}; merging several selections for one KV "
            "head is not supported, only one index head per KV head is"
        )
    if config.index_num_heads < config.num_kv_heads:
        raise ConfigError(
            f"sparse_num_index_heads={config.index_num_heads} is less than "
            f"num_key_value_heads={config.num_kv_heads}; sharing a selection between KV heads is "
            "not supported, only one index head per KV head is"
        )
    if config.index_head_dim < config.rotary_dim:
        raise ConfigError(
            f"sparse_index_dim={config.index_head_dim} is less than "
            f"rotary_dim={config.rotary_dim}; the index heads rotate as many channels as the others"
        )
    if config.sparse_block_size < 1 or config.topk_blocks < 1:
        raise ConfigError(
            f"sparse_block_size={config.sparse_block_size} and "
            f"sparse_topk_blocks={config.topk_blocks} must be at least 1"
        )
    if config.init_blocks + config.local_blocks > config.topk_blocks:
        raise ConfigError(
            f"sparse_init_block={config.init_blocks} + sparse_local_block={config.local_blocks} "
            f"exceeds sparse_topk_blocks={config.topk_blocks}; forced blocks take their places "
            "from the top-k"
        )


def _check_experts(config: "ModelConfig") -> None:
    if config.intermediate_size < 1 or config.num_experts < 1 or config.experts_per_token < 1:
        raise ConfigError(
            f"intermediate_size={config.intermediate_size}, num_local_experts={config.num_experts} "
            f"and num_experts_per_tok={config.experts_per_token} must be at least 1 for MoE layers"
        )
    if config.experts_per_token > config.num_experts:
        raise ConfigError(
            f"num_experts_per_tok={config.experts_per_token} exceeds num_local_experts="
            f"{config.num_experts}; a token chooses distinct experts"
        )


def _check_tokens(config: "ModelConfig") -> None:
    named = [("bos_token_id", config.bos_token_id), ("pad_token_id", config.pad_token_id)]
    named += [("eos_token_id", token) for token in config.eos_token_ids]
    for key, token in named:
        if token is not None and not 0 <= token < config.vocab_size:
            raise ConfigError(
                f"{key}={token} is outside the vocabulary; vocab_size={config.vocab_size}"
            )


def _check_scale_groups(config: "ModelConfig") -> None:
    """The input width of every quantised product must be whole scale groups."""
    attention = ("num_attention_heads * head_dim", config.num_heads * config.head_dim)
    inputs = {
        "o_proj": attention,
        "mlp.down_proj": ("dense_intermediate_size", config.dense_intermediate_size),
        "shared_experts.down_proj": ("shared_intermediate_size", config.shared_intermediate_size),
    }
    hidden = ("hidden_size", config.hidden_size)
    for module in layout(vars(config)).linears:
        fmt = config.quantization.linear_format(module)
        key, width = next((inputs[tail] for tail in inputs if module.endswith(tail)), hidden)
        _check_multiple(key, width, fmt, module)
    if any(config.moe_layers):
        for key, width in (hidden, ("intermediate_size", config.intermediate_size)):
            _check_multiple(key, width, config.quantization.experts, "routed experts")


def _check_multiple(key: str, width: int, fmt: str, module: str) -> None:
    group = _MULTIPLE.get(fmt, 1)
    if width % group:
        raise ConfigError(
            f"{key}={width} is not a multiple of {group}, the scale group of {fmt}; leave {module} "
            "in BF16"
        )
