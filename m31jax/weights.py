"""MANIFEST: the one table of parameters, and the checkpoint tensors each is filled from.

`expand(config, tp, dtype)` resolves the table for one model and one tensor-parallel width. All that
reads, writes, measures or checks weights goes through it; only this file knows tensor names.

Names of checkpoint tensors are given after the prefix (`language_model.` in the released files).

| format         | tensors of a linear X [N, K]                                   |
|----------------|----------------------------------------------------------------|
| bf16           | weight                                                         |
| mxfp8          | weight E4M3, weight_scale_inv E8M0 [N, K/32]                   |
| nvfp4          | weight_packed, weight_scale E4M3 [N, K/16], weight_global_scale |
| nvfp4_modelopt | weight (packed), weight_scale E4M3 [N, K/16], weight_scale_2   |

Values are e4m3 * 2^(byte - 127), and e2m1 * weight_scale / weight_global_scale or * weight_scale_2.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from . import mxfp8, nvfp4
from .config import ModelConfig

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F32 = np.dtype(np.float32)
U8 = np.dtype(np.uint8)

Store = Literal["matrix", "norm", "router", "bias", "linear", "expert"]
Fill = Literal["values", "bits", "reciprocal"]
Check = Literal["finite", "positive", "e4m3", "e4m3_scale", "e8m0_scale", "codes"]


@dataclass(frozen=True)
class Part:
    """One of the arrays that store a module, in memory and in the checkpoint.

    Attributes:
      suffix: after the module's dot path; None for a tensor that is checked and not held.
      tensor, aliases: after the module's checkpoint name; spellings that mean the same.
      dtypes: accepted ones as safetensors spells them, the canonical first.
      dtype: in memory; None is the engine's.
      fill: copy values (with a cast), copy bits, or store 1 / value.
      check: what the values must satisfy.
      divide: how many input channels share an element; 0 is one number for the whole tensor.
      codes: for a scale, the tensor whose groups it scales.
    """

    suffix: str | None
    tensor: str
    dtypes: tuple[str, ...]
    dtype: np.dtype | None
    fill: Fill
    check: Check
    divide: int = 1
    aliases: tuple[str, ...] = ()
    codes: str = ""


# The last part of each NVFP4 packaging is the static activation scale; files that quantise
# activations on the fly lack it. `weight_scale_inv` multiplies, whatever its name says.
_MXFP8 = (
    Part(".weight", ".weight", ("F8_E4M3",), E4M3, "bits", "e4m3"),
    Part(".weight_scale", ".weight_scale_inv", ("U8", "F8_E8M0"), U8, "bits", "e8m0_scale",
         mxfp8.GROUP, (".weight_scale",), ".weight"),
)  # fmt: skip
FORMATS: dict[str, tuple[Part, ...]] = {
    "matrix": (Part(".weight", ".weight", ("BF16",), None, "values", "finite"),),
    "norm": (Part(".weight", ".weight", ("BF16",), F32, "values", "finite"),),
    "router": (Part(".weight", ".weight", ("F32", "BF16"), F32, "values", "finite"),),
    "bias": (Part("", "", ("F32", "BF16"), F32, "values", "finite"),),
    "bf16": (Part(".weight", ".weight", ("BF16",), None, "values", "finite"),),
    "mxfp8": _MXFP8,
    "nvfp4": (
        Part(".weight", ".weight_packed", ("U8",), U8, "bits", "codes", 2),
        Part(".weight_scale", ".weight_scale", ("F8_E4M3",), E4M3, "bits", "e4m3_scale",
             nvfp4.GROUP, codes=".weight_packed"),
        Part(".weight_scale_2", ".weight_global_scale", ("F32",), F32, "reciprocal", "positive", 0),
        Part(None, ".input_global_scale", ("F32",), F32, "values", "positive", 0),
    ),
    "nvfp4_modelopt": (
        Part(".weight", ".weight", ("U8",), U8, "bits", "codes", 2),
        Part(".weight_scale", ".weight_scale", ("F8_E4M3",), E4M3, "bits", "e4m3_scale",
             nvfp4.GROUP, codes=".weight"),
        Part(".weight_scale_2", ".weight_scale_2", ("F32",), F32, "values", "positive", 0),
        Part(None, ".input_scale", ("F32",), F32, "values", "positive", 0),
    ),
}  # fmt: skip
"""How a checkpoint stores a module, by the store of its row or the format the config gives."""


@dataclass(frozen=True)
class Row:
    """A row of MANIFEST.

    Attributes:
      parameter: dot path of the module, `{l}` the layer; the suffixes of `FORMATS` follow.
      tensors: names after the prefix, `{e}` the expert; several are stacked on a leading axis.
      shape: letters of `dimensions`, output axis first.
      axes: logical axis (`sharding.rules`) of each letter; None is replicated.
      store: a key of FORMATS, or "linear" or "expert": the config's quantisation gives the format.
      where: which layers have it, a key of `layers`.
      set: rows of one layer with the same set are useless one without the other.
    """

    parameter: str
    tensors: tuple[str, ...]
    shape: str
    axes: tuple[str | None, ...]
    store: Store
    where: str
    set: str = ""


def _at(place: tuple[str, str], leaf: str, *row: Any) -> Row:
    """A row whose module has the same last name in memory and in the checkpoint."""
    return Row(place[0] + leaf, (place[1] + leaf,), *row)


_TOP = ("", "model.")
_LAYER = ("layers.{l}.", "model.layers.{l}.")
_ATTN = ("layers.{l}.self_attn.", "model.layers.{l}.self_attn.")
_MLP = ("layers.{l}.mlp.", "model.layers.{l}.mlp.")
_MOE = ("layers.{l}.moe.", "model.layers.{l}.block_sparse_moe.")
_SHARED = (_MOE[0] + "shared_expert.", _MOE[1] + "shared_experts.")
_EXPERT = (_MOE[0] + "experts.", _MOE[1] + "experts.{e}.")
_W13 = (_EXPERT[1] + "w1", _EXPERT[1] + "w3")
_BIAS = "e_score_correction_bias"
_ROWS, _COLUMNS, _WHOLE = ("mlp", None), (None, "mlp"), (None, None)

MANIFEST: tuple[Row, ...] = (
    _at(_TOP, "embed_tokens", "VD", ("vocab", None), "matrix", "model"),
    _at(_TOP, "norm", "D", (None,), "norm", "model"),
    Row("lm_head", ("lm_head",), "VD", ("vocab", None), "matrix", "untied"),
    _at(_LAYER, "input_layernorm", "D", (None,), "norm", "layer"),
    _at(_LAYER, "post_attention_layernorm", "D", (None,), "norm", "layer"),
    _at(_ATTN, "q_proj", "QD", ("heads", None), "linear", "layer", "qkv"),
    _at(_ATTN, "k_proj", "KD", ("kv_heads", None), "linear", "layer", "qkv"),
    _at(_ATTN, "v_proj", "KD", ("kv_heads", None), "linear", "layer", "qkv"),
    _at(_ATTN, "o_proj", "DQ", (None, "heads"), "linear", "layer"),
    _at(_ATTN, "q_norm", "H", (None,), "norm", "layer", "qk_norm"),
    _at(_ATTN, "k_norm", "H", (None,), "norm", "layer", "qk_norm"),
    _at(_ATTN, "index_q_proj", "ID", ("index_heads", None), "linear", "sparse", "index"),
    _at(_ATTN, "index_k_proj", "JD", _WHOLE, "linear", "sparse", "index"),
    _at(_ATTN, "index_q_norm", "J", (None,), "norm", "sparse", "index"),
    _at(_ATTN, "index_k_norm", "J", (None,), "norm", "sparse", "index"),
    _at(_MLP, "gate_proj", "MD", _ROWS, "linear", "dense", "mlp"),
    _at(_MLP, "up_proj", "MD", _ROWS, "linear", "dense", "mlp"),
    _at(_MLP, "down_proj", "DM", _COLUMNS, "linear", "dense", "mlp"),
    Row(_MOE[0] + "router", (_MOE[1] + "gate",), "ED", _WHOLE, "router", "moe"),
    Row(_MOE[0] + "router." + _BIAS, (_MOE[1] + _BIAS,), "E", (None,), "bias", "bias"),
    Row(_EXPERT[0] + "gate_up_proj", _W13, "FD", _ROWS, "expert", "moe", "expert"),
    Row(_EXPERT[0] + "down_proj", (_EXPERT[1] + "w2",), "DF", _COLUMNS, "expert", "moe", "expert"),
    _at(_SHARED, "gate_proj", "SD", _ROWS, "linear", "shared", "shared"),
    _at(_SHARED, "up_proj", "SD", _ROWS, "linear", "shared", "shared"),
    _at(_SHARED, "down_proj", "DS", _COLUMNS, "linear", "shared", "shared"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor and the entry of its parameter that it fills.

    Attributes:
      name: canonical name after the prefix; `aliases` are other spellings of it.
      shapes: accepted ones, the canonical first.
      index: leading index inside the parameter, () for the whole of it.
      width: input channels of the module, the length of a vector.
      codes: for a scale, the tensor whose groups it scales.
      set: tensors with the same set are useless one without the other.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    part: Part
    width: int
    index: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    codes: str = ""
    set: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The canonical shape."""
        return self.shapes[0]


@dataclass(frozen=True, slots=True)
class Parameter:
    """An array in memory.

    Attributes:
      name: dot path.
      shape: global shape. Where tp exceeds the heads, `repeat` neighbouring ranks hold the same
        head and axis 0 counts it `repeat` times.
      dtype, axes: dtype in memory; the logical axis of each dimension.
      head_rows: rows of one head along axis 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    fill: Fill
    sources: tuple[Source, ...] = field(repr=False)
    repeat: int = 1
    head_rows: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """MANIFEST resolved for one model, width and dtype.

    Attributes:
      parameters: what is held in memory, in the order of the model.
      optional: tensors that may be present and are only checked (static activation scales).
    """

    parameters: tuple[Parameter, ...]
    optional: tuple[Source, ...]

    def sources(self) -> Iterator[Source]:
        """Every tensor that must be present."""
        for parameter in self.parameters:
            yield from parameter.sources


def dimensions(config: ModelConfig) -> dict[str, int]:
    """The letters of MANIFEST's shapes."""
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "Q": config.num_heads * config.head_dim,
        "K": config.num_kv_heads * config.head_dim,
        "H": config.head_dim,
        "I": config.index_num_heads * config.index_head_dim,
        "J": config.index_head_dim,
        "M": config.dense_intermediate_size,
        "S": config.shared_intermediate_size,
        "F": config.intermediate_size,
        "E": config.num_experts,
    }


def expand(
    config: ModelConfig, tp: int = 1, dtype: DTypeLike = np.float32, *, with_sources: bool = True
) -> Manifest:
    """Resolve MANIFEST for a model.

    Args:
      config: the model.
      tp: ranks that the parameters will be cut over; `checkpoint.plan.check_widths` says which can.
      dtype: in memory, of what the checkpoint stores in BF16; norms, router and bias stay float32.
      with_sources: False leaves sources out; a full-size model has 9e4 of them, listed in a second.
    """
    parameters: list[Parameter] = []
    optional: list[Source] = []
    for row in MANIFEST:
        for layer in layers(config, row.where):
            for parameter in _resolve(config, row, layer, tp, np.dtype(dtype), with_sources):
                if parameter.name:
                    parameters.append(parameter)
                else:
                    optional += parameter.sources
    return Manifest(tuple(parameters), tuple(optional))


def layers(config: ModelConfig, where: str) -> Iterable[int]:
    """Layers that have a row; one -1 for a row of the whole model."""
    moe = config.moe_layer_ids
    has = {
        "model": (-1,),
        "untied": () if config.tie_word_embeddings else (-1,),
        "layer": range(config.num_layers),
        "sparse": config.sparse_layer_ids,
        "dense": [layer for layer in range(config.num_layers) if layer not in moe],
        "moe": moe,
        "bias": moe if config.use_routing_bias else (),
        "shared": moe if config.shared_intermediate_size else (),
    }
    return has[where]


def stored_format(config: ModelConfig, store: Store, module: str) -> str:
    """The key of FORMATS for a module (name after the prefix)."""
    if store == "linear":
        return config.quantization.linear_format(module)
    return config.quantization.experts if store == "expert" else store


def _resolve(
    config: ModelConfig, row: Row, layer: int, tp: int, dtype: np.dtype, with_sources: bool
) -> Iterator[Parameter]:
    """Parameters of one row in one layer; one without a name has sources that are only checked."""
    dims = dimensions(config)
    *outer, width = (dims[letter] for letter in row.shape)
    lead: tuple[int, ...] = ()
    if row.store == "expert":
        lead = (config.num_experts, 2) if len(row.tensors) > 1 else (config.num_experts,)
    heads = {"kv_heads": config.num_kv_heads, "index_heads": config.index_num_heads}
    repeat, head_rows = 1, 1
    if row.axes[0] in heads:
        count = heads[row.axes[0]]
        repeat, head_rows = max(1, tp // count), outer[0] // count

    names = [name.replace("{l}", str(layer)) for name in row.tensors]
    for part in FORMATS[stored_format(config, row.store, names[0])]:
        whole = (*outer, width // part.divide) if part.divide else ()
        if len(whole) > 1:
            whole = (whole[0] * repeat, *whole[1:])
        sources = ()
        if with_sources:
            shapes = ((*outer, width // part.divide),) if part.divide else ((1,), ())
            sources = tuple(
                Source(
                    module + part.tensor,
                    shapes,
                    part,
                    width,
                    index,
                    tuple(module + alias for alias in part.aliases),
                    module + part.codes if part.codes else "",
                    group if row.set else module,
                )
                for module, index, group in _modules(row, names, layer, lead)
            )
        yield Parameter(
            "" if part.suffix is None else row.parameter.replace("{l}", str(layer)) + part.suffix,
            (*lead, *whole),
            dtype if part.dtype is None else part.dtype,
            ((None,) * len(lead) + (row.axes if part.divide else ())),
            part.fill,
            sources,
            repeat,
            head_rows,
        )


def _modules(
    row: Row, names: list[str], layer: int, lead: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Checkpoint name, leading index and set of each module that a row stacks."""
    if not lead:
        yield names[0], (), f"{layer}.{row.set}"
        return
    for e in range(lead[0]):
        for j, name in enumerate(names):
            yield name.replace("{e}", str(e)), (e, j)[: len(lead)], f"{layer}.expert.{e}"
