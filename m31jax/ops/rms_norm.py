"""Root-mean-square norm with the weight stored centred at zero."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from . import cells
from .compare import assert_ulp
from .op import REFERENCE, Cell, Impl, Kind, checked, fixed_sum, map_tiles, no_implementation

CELLS = (
    Cell("one row, the released width", dict(T=1, D=6144, dtype="float32")),
    Cell("a verify of eight rows in bfloat16", dict(T=8, D=6144, dtype="bfloat16")),
    Cell("rows that do not fill the last tile", dict(T=11, D=256, dtype="float32")),
)


@checked
def rms_norm(
    x: Float[Array, "T D"],
    weight: Float32[Array, " D"],
    *,
    eps: float,
    offset: float,
    impl: Impl = REFERENCE,
) -> Float[Array, "T D"]:
    """out = x * rsqrt(mean(x^2) + eps) * (offset + weight), in float32, rounded once to x's dtype.

    Args:
      x: rows of the residual stream.
      weight: as the checkpoint stores it. It is folded nowhere else: with `offset` 1 a weight of 0
        gives the plain normalised row and -1 gives zero.
      eps: added to the mean of squares.
      offset: 1 for Gemma-style weights, 0 for plain ones.
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
    Source: RMSNorm of the MiniMax-M3 model, `use_gemma_norm`.
    """
    match impl.kind:
        case Kind.REFERENCE:
            return reference(x, weight, eps=eps, offset=offset)
        case _:
            raise no_implementation("rms_norm", impl)


def normalise(x: Array, weight: Array, eps: float, offset: float) -> Array:
    """The formula for any number of leading axes; shared with the per-head norms."""
    wide = x.astype(jnp.float32)
    mean = fixed_sum(wide * wide)[..., None] / x.shape[-1]
    return (wide * jax.lax.rsqrt(mean + eps) * (offset + weight)).astype(x.dtype)


def reference(x: Array, weight: Array, *, eps: float, offset: float) -> Array:
    """The specification."""
    return map_tiles(lambda tile: normalise(tile, weight, eps, offset), x)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `rms_norm` for one cell."""
    rng = cells.generator(key)
    x = cells.normal(rng, (spec["T"], spec["D"]), spec["dtype"])
    return dict(x=x, weight=0.3 * cells.normal(rng, (spec["D"],)), eps=1e-6, offset=1.0)


def compare(out: Array, ref: Array) -> None:
    """2 ulp: the mean is summed in another order and the result rounded once."""
    assert_ulp(out, ref, 2, "rms_norm")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """Rows in and out, and the weight."""
    return 2 * spec["T"] * spec["D"] * jnp.dtype(spec["dtype"]).itemsize + 4 * spec["D"]
