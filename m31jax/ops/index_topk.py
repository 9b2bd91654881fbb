"""Choice of sparse blocks from their scores."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from . import cells
from .compare import assert_equal
from .op import REFERENCE, Cell, Impl, Kind, checked, map_tiles, no_implementation

CELLS = (
    Cell("fewer blocks than slots: all of them", dict(T=3, I=4, J=12, last=7, k=16)),
    Cell("released numbers at 64k tokens", dict(T=8, I=1, J=512, last=500, k=16)),
    Cell("past 4096 blocks", dict(T=1, I=4, J=8192, last=8191, k=16)),
    Cell("ties everywhere", dict(T=9, I=2, J=64, last=60, k=8, ties=True)),
    Cell("first blocks forced too", dict(T=2, I=2, J=40, last=33, k=6, init=2, local=2)),
)


@checked
def index_topk(
    scores: Float32[Array, "T I J"],
    position: Int32[Array, " T"],
    *,
    page: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    impl: Impl = REFERENCE,
) -> Int32[Array, "T I U"]:
    """The `topk` best visible blocks of each row and index head, ids ascending, then -1.

    The newest `local_blocks` and the first `init_blocks` visible blocks are always chosen and count
    towards `topk`. Equal scores (-0 equals 0): the lower id wins. NaN counts as the lowest score.

    Args:
      scores: of `index_score`; entries past a row's last block are ignored.
      position: of each row; -1 marks padding, whose ids are all -1.
      page: tokens a block. topk: blocks to choose (U = topk). init_blocks + local_blocks <= topk.
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
    """
    match impl.kind:
        case Kind.REFERENCE:
            return reference(
                scores,
                position,
                page=page,
                topk=topk,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
            )
        case _:
            raise no_implementation("index_topk", impl)


def reference(
    scores: Array,
    position: Array,
    *,
    page: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
) -> Array:
    """The specification. `top_k` returns the lower index first among equals."""
    width = scores.shape[2]
    chosen = min(topk, width)
    top = jnp.finfo(jnp.float32).max

    def tile(scores: Array, position: Array) -> Array:
        block = jnp.arange(width)
        last = (position // page)[:, None]  # T 1; -1 for padding
        visible = block <= last
        forced = visible & ((block > last - local_blocks) | (block < init_blocks))
        score = jnp.clip(jnp.where(jnp.isnan(scores), -top, scores), -top, top)
        score = jnp.where(score == 0.0, 0.0, score)  # top_k orders -0 below 0
        score = jnp.where(forced[:, None], jnp.inf, score)
        score = jnp.where(visible[:, None], score, -jnp.inf)
        best, ids = jax.lax.top_k(score, chosen)
        ids = jnp.sort(jnp.where(best == -jnp.inf, width, ids), axis=-1)
        return jnp.where(ids == width, -1, ids).astype(jnp.int32)

    ids = map_tiles(tile, scores, position)
    return jnp.pad(ids, ((0, 0), (0, 0), (0, topk - chosen)), constant_values=-1)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `index_topk` for one cell."""
    rng = cells.generator(key)
    scores = rng.standard_normal((spec["T"], spec["I"], spec["J"]), np.float32)
    if spec.get("ties"):
        scores = np.round(scores)
    position = spec["last"] * 128 + np.arange(spec["T"]) * 7 % 128
    return dict(
        scores=jnp.asarray(scores),
        position=jnp.asarray(position, jnp.int32),
        page=128,
        topk=spec["k"],
        init_blocks=spec.get("init", 0),
        local_blocks=spec.get("local", 1),
    )


def compare(out: Array, ref: Array) -> None:
    """Exact: a choice has no rounding."""
    assert_equal(out, ref, "index_topk")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """Scores once, ids out."""
    return 4 * spec["T"] * spec["I"] * (spec["J"] + spec["k"])
