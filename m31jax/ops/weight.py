"""A linear weight as it is stored, and its values. Shared by the ops that multiply by one."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from .. import mxfp8, nvfp4

Format = Literal["dense", "mxfp8", "nvfp4"]


class Weight(NamedTuple):
    """A weight [..., N, K]; K is the input axis that scales run along.

    | format | data                    | scale                    | scale_2 (decode, multiplies) |
    |--------|-------------------------|--------------------------|------------------------------|
    | dense  | float32 or bfloat16     | None                     | None                         |
    | mxfp8  | float8_e4m3fn           | uint8 E8M0 [..., N, K/32] | None                        |
    | nvfp4  | uint8 [..., N, K/2]     | float8_e4m3fn [..., N, K/16] | float32 [...]            |
    """

    data: Array
    scale: Array | None = None
    scale_2: Array | None = None

    @property
    def format(self) -> Format:
        """Which row of the table this is; a fact of the parts present, fixed while tracing."""
        if self.scale is None:
            return "dense"
        return "mxfp8" if self.scale_2 is None else "nvfp4"

    def take(self, index: Array | int) -> "Weight":
        """One entry of the leading axis: an expert."""
        scale, scale_2 = (None if part is None else part[index] for part in self[1:])
        return Weight(self.data[index], scale, scale_2)


def dequantize(weight: Weight, dtype: jnp.dtype) -> Float[Array, "*B N K"]:
    """The weight's values, rounded once to `dtype` (float32 keeps every format exactly)."""
    if weight.scale is None:
        values = weight.data
    elif weight.scale_2 is None:
        values = mxfp8.dequantize(weight.data, weight.scale)
    else:
        values = nvfp4.dequantize(weight.data, weight.scale, weight.scale_2[..., None, None])
    return values.astype(dtype)


def mxfp8_activation(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Values of `x` after MXFP8 quantisation per row and 32 channels, the MXFP8 linear's rule."""
    return mxfp8.dequantize(*mxfp8.quantize(x.astype(jnp.float32))).astype(x.dtype)


def split_input(values: Float[Array, "*B N K"], slices: int) -> Float[Array, "*B S N k"]:
    """Cut the input axis into `slices` equal runs, slice axis first.

    Row-parallel products are partial sums over slices whose number does not depend on the tensor
    parallel width, so that their sum has the same bits at every width.

    Raises:
      ValueError: `slices` does not divide K.
    """
    *batch, rows, width = values.shape
    if slices < 1 or width % slices:
        raise ValueError(
            f"slices={slices} does not divide the {width} inputs of this rank; "
            f"use a divisor, such as {math.gcd(width, 8)}"
        )
    return jnp.moveaxis(values.reshape(*batch, rows, slices, width // slices), -2, -3)
