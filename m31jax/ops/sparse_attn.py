"""Attention of each row to its chosen sparse blocks."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from .. import kv_format
from ..kv_format import KVFormat, Stored
from . import cells
from .attend import attend
from .compare import assert_ulp
from .op import REFERENCE, Cell, Impl, Kind, checked, map_tiles, no_implementation

CELLS = (
    Cell("one row at TP8, 16 blocks", dict(lengths=(4000,), N=8, K=1, H=128, k=16, fmt="fp8")),
    Cell("short request: fewer blocks", dict(lengths=(5, 300), N=4, K=2, H=64, k=4, fmt="f32")),
    Cell(
        "NVFP4 cache, unequal rows",
        dict(lengths=(900, 640, 129), N=8, K=2, H=128, k=3, fmt="nvfp4"),
    ),
)


@checked
def sparse_attn(
    q: Float[Array, "T N H"],
    k_pool: Stored,
    v_pool: Stored,
    page_table: Int32[Array, "B J"],
    slot: Int32[Array, " T"],
    position: Int32[Array, " T"],
    block_table: Int32[Array, "T K U"],
    *,
    layer: int,
    scale: float,
    impl: Impl = REFERENCE,
) -> Float[Array, "T N H"]:
    """Softmax attention over the keys n <= position[t] that lie in block_table[t, kv head].

    Query head h belongs to KV head h // (N / K); all its heads share one row of the table. A row
    whose blocks hold no visible key (padding) gives zeros, never NaN.

    Args:
      q: queries, normalised and rotated.
      k_pool, v_pool: [L P K 128 W] parts.
      page_table: pool page of each block of each slot.
      slot, position: of each row; position -1 marks padding.
      block_table: chosen blocks per row and KV head, in this axis order, ascending, then -1.
      layer: which layer of the pools.
      scale: multiplies the dot products.
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
    """
    match impl.kind:
        case Kind.REFERENCE:
            return reference(
                q,
                k_pool,
                v_pool,
                page_table,
                slot,
                position,
                block_table,
                layer=layer,
                scale=scale,
            )
        case _:
            raise no_implementation("sparse_attn", impl)


def reference(
    q: Array,
    k_pool: Stored,
    v_pool: Stored,
    page_table: Array,
    slot: Array,
    position: Array,
    block_table: Array,
    *,
    layer: int,
    scale: float,
) -> Array:
    """The specification: blocks in ascending order, at most U of them however long the context."""
    _, heads, width = q.shape
    kv_heads = block_table.shape[1]

    def tile(q: Array, slot: Array, position: Array, blocks: Array) -> Array:
        grouped = q.reshape(q.shape[0], kv_heads, heads // kv_heads, width)
        count = (blocks >= 0).sum(axis=-1).max()
        out = attend(
            grouped,
            k_pool,
            v_pool,
            page_table,
            slot,
            position,
            blocks,
            count,
            layer=layer,
            scale=scale,
        )
        return out.reshape(q.shape).astype(q.dtype)

    return map_tiles(tile, q, slot, position, block_table)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `sparse_attn` for one cell: random blocks, the row's own block among them."""
    rng = cells.generator(key)
    lengths, kv, topk, fmt = spec["lengths"], spec["K"], spec["k"], KVFormat(spec["fmt"])
    shape = (2, cells.pool_pages(lengths, 128), kv, 128, spec["H"])
    table = np.full((len(lengths), kv, topk), -1, np.int32)
    for row, head in np.ndindex(table.shape[:2]):
        last = (lengths[row] - 1) // 128
        chosen = sorted([*rng.permutation(last)[: topk - 1], last])
        table[row, head, : len(chosen)] = chosen
    return dict(
        q=cells.normal(rng, (len(lengths), spec["N"], spec["H"])),
        k_pool=cells.pool(rng, shape, fmt),
        v_pool=cells.pool(rng, shape, fmt),
        block_table=jnp.asarray(table),
        layer=1,
        scale=spec["H"] ** -0.5,
        **cells.rows(rng, lengths, max(topk, -(-max(lengths) // 128)), 128),
    )


def compare(out: Array, ref: Array) -> None:
    """32 ulp: up to 2048 weights and products summed in another order, exp rounded otherwise."""
    assert_ulp(out, ref, 32, "sparse_attn")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """K and V of every chosen block, once a row and KV head."""
    stored = kv_format.parts(KVFormat(spec["fmt"]), spec["H"]).values()
    vector = sum(width * dtype.itemsize for width, dtype in stored)
    tokens = sum(min(length, 128 * spec["k"]) for length in spec["lengths"])
    return 2 * tokens * spec["K"] * vector
