"""Block scores of the MSA indexer."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from .. import kv_format
from ..kv_format import KVFormat, Stored
from . import cells, pages
from .compare import assert_ulp
from .op import REFERENCE, Cell, Impl, Kind, at_least_two, checked, map_tiles, no_implementation

CELLS = (
    Cell("one row, last page partly filled", dict(lengths=(300,), I=1, G=128, J=4, fmt="bf16")),
    Cell("length is a page multiple", dict(lengths=(512, 256), I=4, G=128, J=6, fmt="f32")),
    Cell("rows of unequal requests, FP8", dict(lengths=(9, 1000, 130), I=2, G=64, J=9, fmt="fp8")),
    Cell("NVFP4 keys", dict(lengths=(700, 650), I=4, G=128, J=6, fmt="nvfp4")),
)


@checked
def index_score(
    index_q: Float[Array, "T I G"],
    index_pool: Stored,
    page_table: Int32[Array, "B J"],
    slot: Int32[Array, " T"],
    position: Int32[Array, " T"],
    *,
    layer: int,
    impl: Impl = REFERENCE,
) -> Float32[Array, "T I J"]:
    """Score each sparse block of each row's request.

    out[t, i, j] = max over keys n <= position[t] of block j of index_q[t, i] . key[n], unscaled;
    -inf where block j holds no visible key (and everywhere in a padding row).

    Args:
      index_q: index queries, normalised and rotated.
      index_pool: index-key pool [Ls P 128 W], one key a token shared by all index heads; one page
        is one sparse block.
      page_table: pool page of each block; entries past a row's last block are not read as keys.
      slot, position: of each row; position -1 marks padding.
      layer: which layer of the index pool.
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
      NotImplementedError: `impl` does not cover this valid input; names the limit.
    Source: MSA indexer of MiniMax-M3, maximum score.
    """
    match impl.kind:
        case Kind.REFERENCE:
            return reference(index_q, index_pool, page_table, slot, position, layer=layer)
        case _:
            raise no_implementation("index_score", impl)


def reference(
    index_q: Array,
    index_pool: Stored,
    page_table: Array,
    slot: Array,
    position: Array,
    *,
    layer: int,
) -> Array:
    """The specification: blocks in ascending order, as many as a tile's longest row has."""
    page = pages.page_size(index_pool)
    width = page_table.shape[1]

    def tile(query: Array, slot: Array, position: Array) -> Array:
        heads = query.shape[1]
        query = at_least_two(query.astype(jnp.float32), axis=1)

        def block(j: Array, scores: Array) -> Array:
            keys = kv_format.decode(pages.read(index_pool, layer, page_table[slot, j]))  # T page G
            dots = jnp.einsum("tig,tng->tin", query, keys, precision=jax.lax.Precision.HIGHEST)
            visible = j * page + jnp.arange(page) <= position[:, None]  # T page
            best = jnp.where(visible[:, None], dots, -jnp.inf).max(axis=-1)  # T I
            return jax.lax.dynamic_update_index_in_dim(scores, best, j, axis=2)

        empty = jnp.full((*query.shape[:2], width), -jnp.inf, jnp.float32)
        blocks = jnp.minimum(position.max() // page + 1, width)
        return jax.lax.fori_loop(0, blocks, block, empty)[:, :heads]

    return map_tiles(tile, index_q, slot, position)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `index_score` for one cell."""
    rng = cells.generator(key)
    lengths, width = spec["lengths"], spec["G"]
    shape = (2, cells.pool_pages(lengths, 128), 128, width)
    return dict(
        index_q=cells.normal(rng, (len(lengths), spec["I"], width)),
        index_pool=cells.pool(rng, shape, KVFormat(spec["fmt"])),
        layer=1,
        **cells.rows(rng, lengths, spec["J"], 128),
    )


def compare(out: Array, ref: Array) -> None:
    """8 ulp of the row's largest score: 128 products summed in another order. -inf is exact."""
    assert_ulp(out, ref, 8, "index_score")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """Every visible key once."""
    stored = kv_format.parts(KVFormat(spec["fmt"]), spec["G"]).values()
    return sum(spec["lengths"]) * sum(width * dtype.itemsize for width, dtype in stored)
