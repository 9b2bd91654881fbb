"""The device mesh: one axis, tensor parallel."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

TP = "tp"
"""Name of the tensor-parallel mesh axis."""


def make_mesh(
    tp: int,
    devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """A mesh of the first `tp` of `devices`.

    Raises:
      ValueError: fewer than `tp` devices; names both numbers and how to simulate more on CPU.
    """
    if len(devices) < tp:
        raise ValueError(
            f"tp={tp} needs {tp} devices, {len(devices)} found; lower tp, or on CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={tp} before JAX starts"
        )
    # Auto axes: with Explicit ones shard_map refuses inputs that are not placed yet.
    return Mesh(np.asarray(devices[:tp]), (TP,), axis_types=(AxisType.Auto,))
