"""Attention of each row to its whole context: the dense layers of M3."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from .. import kv_format
from ..kv_format import KVFormat, Stored
from . import cells
from .attend import attend
from .compare import assert_ulp
from .op import REFERENCE, Cell, Impl, Kind, checked, map_tiles, no_implementation

CELLS = (
    Cell("one row at TP8", dict(lengths=(1500,), N=8, K=1, H=128, fmt="bf16")),
    Cell("rows of unequal requests", dict(lengths=(3, 257, 512), N=4, K=2, H=64, fmt="f32")),
)


@checked
def dense_attn(
    q: Float[Array, "T N H"],
    k_pool: Stored,
    v_pool: Stored,
    page_table: Int32[Array, "B J"],
    slot: Int32[Array, " T"],
    position: Int32[Array, " T"],
    *,
    layer: int,
    scale: float,
    impl: Impl = REFERENCE,
) -> Float[Array, "T N H"]:
    """Softmax attention over every key n <= position[t] of the row's request.

    Args:
      q: queries, normalised and rotated.
      k_pool, v_pool: [L P K 128 W] parts.
      page_table: pool page of each block of each slot.
      slot, position: of each row; position -1 marks padding, which gives zeros.
      layer: which layer of the pools.
      scale: multiplies the dot products.
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
    """
    match impl.kind:
        case Kind.REFERENCE:
            return reference(
                q, k_pool, v_pool, page_table, slot, position, layer=layer, scale=scale
            )
        case _:
            raise no_implementation("dense_attn", impl)


def reference(
    q: Array,
    k_pool: Stored,
    v_pool: Stored,
    page_table: Array,
    slot: Array,
    position: Array,
    *,
    layer: int,
    scale: float,
) -> Array:
    """The specification: pages in ascending order, as many as the longest row of a tile has."""
    _, heads, width = q.shape
    kv_heads = k_pool.data.shape[2]
    page = k_pool.data.shape[-2]
    columns = page_table.shape[1]

    def tile(q: Array, slot: Array, position: Array) -> Array:
        rows = q.shape[0]
        block = jnp.broadcast_to(jnp.arange(columns), (rows, kv_heads, columns))
        visible = block <= (position // page)[:, None, None]
        out = attend(
            q.reshape(rows, kv_heads, heads // kv_heads, width),
            k_pool,
            v_pool,
            page_table,
            slot,
            position,
            jnp.where(visible, block, -1),
            jnp.minimum(position.max() // page + 1, columns),
            layer=layer,
            scale=scale,
        )
        return out.reshape(q.shape).astype(q.dtype)

    return map_tiles(tile, q, slot, position)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `dense_attn` for one cell."""
    rng = cells.generator(key)
    lengths, fmt = spec["lengths"], KVFormat(spec["fmt"])
    shape = (2, cells.pool_pages(lengths, 128), spec["K"], 128, spec["H"])
    return dict(
        q=cells.normal(rng, (len(lengths), spec["N"], spec["H"])),
        k_pool=cells.pool(rng, shape, fmt),
        v_pool=cells.pool(rng, shape, fmt),
        layer=1,
        scale=spec["H"] ** -0.5,
        **cells.rows(rng, lengths, -(-max(lengths) // 128), 128),
    )


def compare(out: Array, ref: Array) -> None:
    """32 ulp: thousands of weights and products summed in another order, exp rounded otherwise."""
    assert_ulp(out, ref, 32, "dense_attn")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """K and V of the whole context, once a row and KV head."""
    stored = kv_format.parts(KVFormat(spec["fmt"]), spec["H"]).values()
    vector = sum(width * dtype.itemsize for width, dtype in stored)
    return 2 * sum(spec["lengths"]) * spec["K"] * vector
