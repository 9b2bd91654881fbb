"""Choice of experts and their weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from . import cells
from .compare import assert_equal, assert_ulp
from .op import REFERENCE, Cell, Impl, Kind, checked, map_tiles, no_implementation

CELLS = (
    Cell("one row, released numbers", dict(T=1, D=6144, E=128, X=4, bias=True)),
    Cell("a verify, released numbers", dict(T=8, D=6144, E=128, X=4, bias=True)),
    Cell("no bias, rows past one tile", dict(T=13, D=64, E=8, X=2, bias=False)),
)


class Routes(NamedTuple):
    """Chosen experts of each row, ids ascending, and their weights, which sum to 1."""

    ids: Int32[Array, "T X"]
    weights: Float32[Array, "T X"]


@checked
def moe_route(
    x: Float[Array, "T D"],
    router: Float32[Array, "E D"],
    bias: Float32[Array, " E"] | None,
    *,
    experts_per_token: int,
    impl: Impl = REFERENCE,
) -> Routes:
    """Choose the best experts by sigmoid(x router^T) + bias; weigh them by the sigmoid alone.

    The product is float32 grade: TF32 or BF16 would change the choice. Ties: the lower expert id.

    Args:
      x: rows, never taken from a quantised input.
      router: one row an expert.
      bias: score correction, only for the choice; None if the model has none.
      experts_per_token: how many to choose (X).
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
    """
    match impl.kind:
        case Kind.REFERENCE:
            return reference(x, router, bias, experts_per_token=experts_per_token)
        case _:
            raise no_implementation("moe_route", impl)


def reference(x: Array, router: Array, bias: Array | None, *, experts_per_token: int) -> Routes:
    """The specification."""

    def tile(rows: Array) -> Routes:
        logits = jnp.einsum(
            "td,ed->te", rows.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST
        )
        scores = jax.nn.sigmoid(logits)
        _, ids = jax.lax.top_k(scores if bias is None else scores + bias, experts_per_token)
        ids = jnp.sort(ids, axis=-1)
        chosen = jnp.take_along_axis(scores, ids, axis=-1)
        total = jnp.maximum(chosen.sum(axis=-1, keepdims=True), 1e-20)
        return Routes(ids.astype(jnp.int32), chosen / total)

    return map_tiles(tile, x)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `moe_route` for one cell."""
    rng = cells.generator(key)
    experts, width = spec["E"], spec["D"]
    return dict(
        x=cells.normal(rng, (spec["T"], width)),
        router=cells.weight(rng, (experts, width), "dense").data,
        bias=0.25 * cells.normal(rng, (experts,)) if spec["bias"] else None,
        experts_per_token=spec["X"],
    )


def compare(out: Routes, ref: Routes) -> None:
    """Ids exact (cells have margins far above rounding); weights, of D products, within 64 ulp."""
    assert_equal(out.ids, ref.ids, "expert ids")
    assert_ulp(out.weights, ref.weights, 64, "expert weights")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """The router in float32 and the rows."""
    return 4 * spec["D"] * (spec["E"] + spec["T"])
