"""What a request leaves behind between steps: cache lanes, page table, lengths.

`LANES` is the one list of per-token state. Allocation, byte accounting, extract, insert and reset
all walk it, so a lane that is added here cannot be forgotten by a mover.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float32, Int32, UInt32

from sharding import rules

from .. import kv_format
from ..config import ModelConfig
from ..kv_format import KVFormat, Stored


class Lane(NamedTuple):
    """One kind of per-token state.

    | field  | meaning                                                             |
    |--------|---------------------------------------------------------------------|
    | name   | key in `DecodeState.lanes`                                          |
    | part   | `data` or `scale` of the stored vector; NVFP4 alone has scales      |
    | layers | which layers have it                                                |
    | heads  | logical axis of its heads, None for one vector a token              |
    | format | which of the two cache formats stores it                            |
    """

    name: str
    part: Literal["data", "scale"]
    layers: Literal["all", "sparse"]
    heads: Literal["kv_heads"] | None
    format: Literal["kv", "index"]


LANES = (
    Lane("k", "data", "all", "kv_heads", "kv"),
    Lane("k_scale", "scale", "all", "kv_heads", "kv"),
    Lane("v", "data", "all", "kv_heads", "kv"),
    Lane("v_scale", "scale", "all", "kv_heads", "kv"),
    Lane("index_k", "data", "sparse", None, "index"),
    Lane("index_k_scale", "scale", "sparse", None, "index"),
)

GUARD_PAGE = 0
"""Belongs to no request: what an unallocated page-table entry names."""


@dataclass(frozen=True)
class StateSpec:
    """Everything that fixes the shapes of a DecodeState.

    Attributes:
      slots: requests that decode at once (B).
      num_pages: pages of the pool, the guard included (P).
      pages_per_slot: columns of the page table (J).
    """

    config: ModelConfig
    tp: int
    kv_format: KVFormat
    index_format: KVFormat
    slots: int
    num_pages: int
    pages_per_slot: int

    @property
    def max_seq_len(self) -> int:
        """Longest context of one slot, in tokens."""
        return self.pages_per_slot * self.config.page_size


class LaneShape(NamedTuple):
    """Global shape, dtype and logical axes of one lane's pool."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]


def lane_shapes(spec: StateSpec, num_pages: int | None = None) -> dict[str, LaneShape]:
    """The lanes that `spec` has: [L P K page W], or [L P page W] without heads.

    Past `num_kv_heads` ranks each head is stored by several, so the global head axis grows to tp.
    """
    config, shapes = spec.config, {}
    for lane in LANES:
        fmt = spec.kv_format if lane.format == "kv" else spec.index_format
        width = config.head_dim if lane.format == "kv" else config.index_head_dim
        layers = config.num_layers if lane.layers == "all" else len(config.sparse_layer_ids)
        stored = kv_format.parts(fmt, width)
        if lane.part not in stored or layers == 0:
            continue
        columns, dtype = stored[lane.part]
        heads = [max(config.num_kv_heads, spec.tp)] if lane.heads else []
        pages = spec.num_pages if num_pages is None else num_pages
        shapes[lane.name] = LaneShape(
            (layers, pages, *heads, config.page_size, columns),
            dtype,
            (None, None, *([lane.heads] if lane.heads else []), None, None),
        )
    return shapes


def page_bytes(spec: StateSpec) -> int:
    """Bytes of one page on one rank, all lanes and layers, exact."""
    total = 0
    for shape, dtype, axes in lane_shapes(spec, num_pages=1).values():
        ranks = spec.tp if any(axes) else 1
        total += int(np.prod(shape, dtype=np.int64)) * dtype.itemsize // ranks
    return total


class SlotSampling(NamedTuple):
    """How each slot draws its tokens, and how many it has drawn (`count`, the output position)."""

    temperature: Float32[Array, " B"]
    top_p: Float32[Array, " B"]
    top_k: Int32[Array, " B"]
    min_p: Float32[Array, " B"]
    seed: UInt32[Array, "B 2"]
    count: Int32[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The donated argument of every step.

    Attributes:
      lanes: pool of each lane, by name.
      page_table: pool page of each block of each slot; 0 where none is allocated.
      lengths: tokens in the cache, per slot.
      next_token: the token at position `lengths`, drawn but not yet in the cache.
      is_active: slots that decode.
      sampling: of each slot.
    """

    lanes: dict[str, Array]
    page_table: Int32[Array, "B J"]
    lengths: Int32[Array, " B"]
    next_token: Int32[Array, " B"]
    is_active: Bool[Array, " B"]
    sampling: SlotSampling


def abstract(spec: StateSpec) -> tuple[DecodeState, DecodeState]:
    """(shapes, PartitionSpecs) of a state; two trees of one structure."""
    pools = lane_shapes(spec)
    slots = (spec.slots,)
    counts = {"seed": (jnp.uint32, (spec.slots, 2)), "top_k": (jnp.int32, slots)}
    counts["count"] = (jnp.int32, slots)

    def leaf(shape: tuple[int, ...], dtype: Any) -> Any:  # stands where the state has an array
        return jax.ShapeDtypeStruct(shape, dtype)

    def sampling(name: str) -> Any:
        dtype, shape = counts.get(name, (jnp.float32, slots))
        return leaf(shape, dtype)

    shapes = DecodeState(
        lanes={name: leaf(p.shape, p.dtype) for name, p in pools.items()},
        page_table=leaf((spec.slots, spec.pages_per_slot), jnp.int32),
        lengths=leaf(slots, jnp.int32),
        next_token=leaf(slots, jnp.int32),
        is_active=leaf(slots, jnp.bool_),
        sampling=SlotSampling(*(sampling(name) for name in SlotSampling._fields)),
    )
    specs = jax.tree.map(lambda _: PartitionSpec(), shapes)
    cut = {name: rules.spec(pool.axes) for name, pool in pools.items()}
    return shapes, DecodeState(**{**specs.__dict__, "lanes": cut})


def pool(lanes: Mapping[str, Array], name: str) -> Stored:
    """The stored vectors of one kind: `k`, `v` or `index_k` with its scales."""
    return Stored(lanes[name], lanes.get(f"{name}_scale"))


def with_pool(lanes: Mapping[str, Array], name: str, stored: Stored) -> dict[str, Array]:
    """`lanes` with one kind replaced."""
    out = {**lanes, name: stored.data}
    if stored.scale is not None:
        out[f"{name}_scale"] = stored.scale
    return out
