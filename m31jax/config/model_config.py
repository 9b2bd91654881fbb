"""`ModelConfig`: the shape and the constants of one checkpoint.

Read strictly: a missing, unknown, contradictory or unsupported key is a `ConfigError` that names
the key, its value and what is allowed, because a model computed slightly wrong still writes fluent
text.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import quantization_file, read
from .check import check
from .keys import as_object, naming, unique_keys
from .quantization import BF16, Quantization

# Keys of `config.json` and the fields that they become unchanged.
_RELEASED_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rotary_dim": "rotary_dim",
    "rope_theta": "rope_theta",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "use_gemma_norm": "use_gemma_norm",
    "swiglu_alpha": "swiglu_alpha",
    "swiglu_limit": "swiglu_limit",
    "swiglu_beta": "swiglu_beta",
    "intermediate_size": "intermediate_size",
    "dense_intermediate_size": "dense_intermediate_size",
    "shared_intermediate_size": "shared_intermediate_size",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "use_routing_bias": "use_routing_bias",
    "routed_scaling_factor": "routed_scaling_factor",
    "tie_word_embeddings": "tie_word_embeddings",
    "bos_token_id": "bos_token_id",
    "pad_token_id": "pad_token_id",
}


@dataclass(frozen=True)
class ModelConfig:
    """One MiniMax-M3 or M3.1 text model. Hashable, so it may be a static argument of `jit`.

    Attributes:
      vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim: as everywhere.
      intermediate_size: width of one routed expert; 0 without MoE layers.
      dense_intermediate_size: width of the MLP of layers that are not MoE; 0 when there is none.
      shared_intermediate_size: total width of the shared expert; 0 for none.
      num_experts, experts_per_token: routed experts, and how many of them act on a token.
      moe_layers: per layer, whether its MLP is MoE.
      sparse_layers: per layer, whether its attention is sparse (MSA) instead of full causal.
      index_num_heads, index_head_dim: shape of the indexer's queries, one head per KV head; its key
        has one head. All but the block size are 0 without sparse layers.
      sparse_block_size: tokens in a sparse block and a KV page; 128 without sparse layers.
      topk_blocks: sparse blocks chosen per query and KV head, forced ones included.
      init_blocks, local_blocks: how many of the oldest and newest visible blocks are forced.
      routed_scaling_factor: multiplies the routed experts' sum, never the shared expert.
      use_routing_bias: whether experts are chosen by score plus `e_score_correction_bias`.
      swiglu_alpha, swiglu_limit, swiglu_beta: g * sigmoid(alpha * g) * (u + beta), where the limit
        clamps g from above and u on both sides.
      use_gemma_norm: norms multiply by 1 + weight; False: by the weight.
      rms_norm_eps, rope_theta: as everywhere.
      rotary_dim: leading channels of each head that rotate.
      max_position_embeddings: longest context the checkpoint was made for, in tokens.
      tie_word_embeddings: the head is the embedding and `lm_head` is absent.
      bos_token_id, pad_token_id: ids, or None.
      eos_token_ids: every id that ends a reply; may be empty.
      quantization: number formats of the stored weights.
    Raises:
      ConfigError: fields that contradict each other, also from `dataclasses.replace`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    dense_intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    experts_per_token: int
    moe_layers: tuple[bool, ...]
    sparse_layers: tuple[bool, ...]
    index_num_heads: int
    index_head_dim: int
    sparse_block_size: int
    topk_blocks: int
    init_blocks: int
    local_blocks: int
    routed_scaling_factor: float
    use_routing_bias: bool
    swiglu_alpha: float
    swiglu_limit: float
    swiglu_beta: float
    use_gemma_norm: bool
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: Quantization = BF16

    def __post_init__(self):
        check(self)

    @cached_property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Ids of MoE layers, ascending."""
        return tuple(i for i, is_moe in enumerate(self.moe_layers) if is_moe)

    @cached_property
    def sparse_layer_ids(self) -> tuple[int, ...]:
        """Ids of sparse attention layers, ascending."""
        return tuple(i for i, is_sparse in enumerate(self.sparse_layers) if is_sparse)

    @property
    def page_size(self) -> int:
        """Tokens in a KV page: one sparse block."""
        return self.sparse_block_size

    @property
    def is_m31(self) -> bool:
        """Whether every layer is sparse, which is what sets M3.1 apart from M3."""
        return all(self.sparse_layers)

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Reads `config.json` of a checkpoint directory, with `generation_config.json` and
        `hf_quant_config.json` if they are there.

        Raises `ConfigError` naming the file when it is missing, unreadable or no JSON object.
        """
        folder = Path(path)
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(f"{folder} {what}; give the directory that holds config.json")
        config = _read_json(folder / "config.json")
        if config is None:
            raise ConfigError(
                f"{folder / 'config.json'} does not exist; give the directory of a whole checkpoint"
            )
        return cls.from_dict(
            config,
            generation=_read_json(folder / "generation_config.json"),
            hf_quant=_read_json(folder / "hf_quant_config.json"),
            source=str(folder / "config.json"),
        )

    @classmethod
    def from_dict(
        cls,
        config: dict[str, Any],
        *,
        generation: dict[str, Any] | None = None,
        hf_quant: dict[str, Any] | None = None,
        source: str = "config.json",
    ) -> "ModelConfig":
        """Reads a parsed `config.json`, nested (released) or flat (newer writers).

        Args:
          config: the outer object, with or without `text_config`.
          generation: `generation_config.json`; its token ids override those of `config`.
          hf_quant: `hf_quant_config.json`; read only when `config` has no `quantization_config`.
          source: file name that starts every error message; the other two lie beside it.
        Raises:
          ConfigError: anything that is not a model this code serves.
        """
        beside = Path(source).with_name
        with naming(source):
            reader, quant = read.split(config)
            values = read.read_attention(reader)
            values |= read.read_mlp(reader, values["num_layers"])
            values |= read.read_tokens(reader)
        if generation is not None:
            with naming(str(beside("generation_config.json"))):
                values |= read.read_generation(generation, values["vocab_size"])
        layout = read.layout(values)
        if quant is None and hf_quant is not None:
            with naming(str(beside("hf_quant_config.json"))):
                values["quantization"] = quantization_file.parse_hf_quant(hf_quant, layout)
        with naming(source):
            values.setdefault("quantization", quantization_file.parse(quant, layout))
            return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The released, nested `config.json`; `from_dict` reads it back to an equal value."""
        text: dict[str, Any] = {key: getattr(self, field) for key, field in _RELEASED_NAMES.items()}
        text |= {
            "n_shared_experts": 1 if self.shared_intermediate_size else 0,
            "moe_layer_freq": [int(is_moe) for is_moe in self.moe_layers],
            "eos_token_id": self.eos_token_ids[0]
            if len(self.eos_token_ids) == 1
            else list(self.eos_token_ids),
            "hidden_act": "swigluoai",
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "attention_output_gate": False,
            "dtype": "bfloat16",
        }
        if self.sparse_layer_ids:
            freq = [int(is_sparse) for is_sparse in self.sparse_layers]
            text["sparse_attention_config"] = {
                "use_sparse_attention": True,
                "sparse_index_dim": self.index_head_dim,
                "sparse_num_index_heads": self.index_num_heads,
                "sparse_topk_blocks": self.topk_blocks,
                "sparse_block_size": self.sparse_block_size,
                "sparse_score_type": "max",
                "sparse_init_block": self.init_blocks,
                "sparse_local_block": self.local_blocks,
                "sparse_attention_freq": freq,
                "sparse_disable_index_value": freq,
            }
        quant = quantization_file.to_dict(self.quantization, read.layout(vars(self)))
        return {
            "architectures": [read.ARCHITECTURES[0]],
            "model_type": read.MODEL_TYPES[0],
            "tie_word_embeddings": self.tie_word_embeddings,
            "dtype": "bfloat16",
            "text_config": text,
        } | ({} if quant is None else {"quantization_config": quant})


def _read_json(path: Path) -> dict[str, Any] | None:
    """The parsed file, or None when there is none."""
    with naming(str(path)):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}") from error
        try:
            return as_object(json.loads(text, object_pairs_hook=unique_keys), "the file")
        except ConfigError:
            raise
        except RecursionError as error:
            raise ConfigError("is nested too deeply to be a config") from error
        except ValueError as error:  # malformed JSON, bytes that are no UTF-8, endless digits
            raise ConfigError(f"is not valid JSON: {error}; download it again") from error
