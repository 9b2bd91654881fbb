"""Re-writes a BF16 checkpoint with MXFP8 or NVFP4 weights, by the rules of the released files."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .. import mxfp8, nvfp4, weights
from ..config import ModelConfig
from ..errors import CheckpointError
from . import values
from .make import counted, progress_bar, released_sources, with_format
from .reader import Checkpoint, raise_problems
from .writer import SHARD_BYTES, Spec, fresh_directory, write_json, write_sharded


def requantise(
    source: Path | str,
    directory: Path | str,
    format: str,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> dict[str, Any]:
    """Quantise the weights of a BF16 checkpoint and keep everything else as it is.

    Projections become MXFP8; routed experts MXFP8, or NVFP4 with one global scale for an expert's w1 and
    w3 and another for its w2. Static activation scales are not written: nothing is calibrated.

    Args:
      source: a BF16 checkpoint, Hugging Face layout.
      directory: where to write; absent or empty.
      format: mxfp8 or nvfp4.
      max_shard_bytes, progress: as in `make.make`.
    Returns:
      tensors, total_bytes, shards.
    Raises:
      CheckpointError: the source is damaged or not BF16, or the directory is not empty.
      ConfigError: an unknown format, or a width that its groups do not divide.
    """
    source = Path(source)
    config = ModelConfig.from_dir(source)
    stored = config.quantization
    if (stored.linear, stored.experts) != ("bf16", "bf16"):
        raise CheckpointError(
            f"{source} is stored as {stored.linear} with {stored.experts} experts; only BF16 checkpoints can "
            "be re-quantised"
        )
    target = with_format(config, format)
    with Checkpoint(source) as checkpoint:
        raise_problems(source, checkpoint.problems(weights.expand(config)))
        writer = _Quantiser(checkpoint)
        kept = [checkpoint.listing.tensors[name] for name in checkpoint.skipped]
        kept += checkpoint.unit_scales
        optional = {s.name for s in weights.expand(target).optional}
        specs = [
            Spec(checkpoint.stored_name(s.name), s.part.dtypes[0], s.shape)
            for s in released_sources(target)
            if s.name not in optional
        ]
        specs += [Spec(tensor.name, tensor.dtype, tensor.shape) for tensor in kept]
        return _write(checkpoint, writer, specs, Path(directory), target, max_shard_bytes, progress)
