"""Which tensor-parallel widths a model can be cut to, and the bytes that each rank then holds."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from .. import mxfp8, nvfp4, weights
from ..config import ModelConfig
from ..errors import TargetError
from ..target import WIDTHS

_GROUP = {"mxfp8": mxfp8.GROUP, "nvfp4": nvfp4.GROUP, "nvfp4_modelopt": nvfp4.GROUP}


@dataclass(frozen=True)
class Plan:
    """Bytes of the parameters.

    Attributes:
      tp: ranks.
      parameters: bytes that one rank holds of each parameter, by name; the same on every rank.
    """

    tp: int
    parameters: dict[str, int]

    @property
    def bytes_per_rank(self) -> int:
        """Sum over parameters."""
        return sum(self.parameters.values())


def plan(config: ModelConfig, tp: int, dtype: DTypeLike = np.float32) -> Plan:
    """Bytes per rank and parameter.

    Raises:
      TargetError: the model cannot be cut to `tp` ranks.
    """
    check_widths(config, tp)
    manifest = weights.expand(config, tp, dtype, with_sources=False)
    return Plan(tp, {p.name: local_bytes(p, tp) for p in manifest.parameters})


def local_bytes(parameter: weights.Parameter, tp: int) -> int:
    """Bytes of a parameter on one rank."""
    return parameter.nbytes // (1 if all(axis is None for axis in parameter.axes) else tp)


def check_widths(config: ModelConfig, tp: int) -> None:
    """Refuse a width that would cut through a head, a scale group or an odd vocabulary.

    Raises:
      TargetError: names the reason and the widths that work.
    """
    reason = _obstacle(config, tp)
    if reason is not None:
        allowed = allowed_widths(config)
        way_out = f"allowed widths: {', '.join(map(str, allowed)) or 'none'}"
        raise TargetError(f"tp={tp} does not fit this model: {reason}; {way_out}")


def allowed_widths(config: ModelConfig) -> tuple[int, ...]:
    """The widths that `check_widths` accepts."""
    return tuple(tp for tp in WIDTHS if _obstacle(config, tp) is None)


def _obstacle(config: ModelConfig, tp: int) -> str | None:
    """Why a model cannot be cut to `tp` ranks, or None."""
    if tp not in WIDTHS:
        return f"widths are {', '.join(map(str, WIDTHS))}"
    for key, count in (("num_heads", config.num_heads), ("vocab_size", config.vocab_size)):
        if count % tp:
            return f"{key}={count} is not divisible by {tp}"
    heads = [("num_kv_heads", config.num_kv_heads)]
    if config.sparse_layer_ids:
        heads.append(("index_num_heads", config.index_num_heads))
    for key, count in heads:
        if count % tp if count >= tp else tp % count:
            return f"{key}={count} neither divides nor is divided by {tp}"
    for row in weights.MANIFEST:
        # The last axis is cut here: a rank's part has to be whole groups of the stored format.
        if len(row.shape) < 2 or row.axes[-1] is None:
            continue
        width = weights.dimensions(config)[row.shape[-1]]
        for layer in weights.layers(config, row.where):
            module = row.tensors[0].replace("{l}", str(layer)).replace("{e}", "0")
            fmt = weights.stored_format(config, row.store, module)
            if width % tp:
                return f"{module} has input width {width}, not divisible by {tp}"
            if (width // tp) % _GROUP.get(fmt, 1):
                return (
                    f"{module} has input width {width}, {width // tp} a rank, which cuts {fmt} "
                    f"groups of {_GROUP[fmt]}"
                )
    return None
