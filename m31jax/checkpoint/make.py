"""Random checkpoints of any size in the released layout: names, shards, index and config files."""

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .. import weights
from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError
from ..presets import FORMATS
from . import dspark, random_values
from .writer import (
    SHARD_BYTES,
    Spec,
    Values,
    fresh_directory,
    pack_shards,
    write_json,
    write_sharded,
)

PREFIX = "language_model."
# The released sampling defaults; token ids are the model's own.
_SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 0.95}


def with_format(config: ModelConfig, name: str) -> ModelConfig:
    """The model stored as bf16, mxfp8 (M3) or nvfp4 (M3.1: MXFP8 projections, NVFP4 experts).

    Raises:
      ConfigError: an unknown format, or a width of the model that its groups do not divide.
    """
    if name not in FORMATS:
        raise ConfigError(f"format={name!r} is not one of {', '.join(FORMATS)}")
    return dataclasses.replace(config, quantization=FORMATS[name])


def make(
    config: ModelConfig,
    directory: Path | str,
    *,
    seed: int = 0,
    drafter: bool = False,
    max_shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a random checkpoint.

    Args:
      config: the model, its quantisation included (`with_format`).
      directory: where; absent or empty. It appears when everything is written.
      seed: the weights are a function of it and of each tensor's name.
      drafter: add a random drafter in `dspark/`.
      max_shard_bytes: tensors larger than this get a shard of their own.
      progress: bytes written, as a bar on stderr.
    Returns:
      What `dry_run` says of it.
    Raises:
      CheckpointError: the directory is not empty.
    """
    sources = released_sources(config)
    summary = dry_run(config, drafter=drafter, max_shard_bytes=max_shard_bytes)
    with (
        fresh_directory(Path(directory)) as partial,
        progress_bar(summary["total_bytes"], "make", progress) as bar,
    ):
        _write(partial, PREFIX, sources, seed, max_shard_bytes, bar)
        if drafter:
            _write_drafter(config, partial, seed, max_shard_bytes, bar)
        write_json(partial / "generation_config.json", _generation(config))
        write_json(partial / "config.json", config.to_dict())
    return summary


def add_drafter(
    model: Path | str,
    *,
    seed: int = 0,
    max_shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a random drafter fit for an existing checkpoint into its `dspark/`.

    Raises:
      CheckpointError: there is a drafter already.
      ConfigError: `model` is no checkpoint directory.
    """
    model = Path(model)
    config = ModelConfig.from_dir(model)
    shape = dspark.shape_for(config)
    total = sum(spec.nbytes for spec in _specs(dspark.PREFIX, dspark.sources(shape)))
    with progress_bar(total, "make", progress) as bar:
        _write_drafter(config, model, seed, max_shard_bytes, bar)
    return {"tensors": len(dspark.sources(shape)), "total_bytes": total}


def dry_run(
    config: ModelConfig, *, drafter: bool = False, max_shard_bytes: int = SHARD_BYTES
) -> dict[str, Any]:
    """What `make` would write, nothing written.

    Returns:
      tensors, total_bytes (both with the drafter's), shards, format, and with a drafter
      drafter_tensors and drafter_bytes.
    """
    specs = _specs(PREFIX, released_sources(config))
    quantization = config.quantization
    summary = {
        "tensors": len(specs),
        "total_bytes": sum(spec.nbytes for spec in specs),
        "shards": len(pack_shards(specs, max_shard_bytes)),
        "format": {"linear": quantization.linear, "experts": quantization.experts},
    }
    if drafter:
        draft = _specs(dspark.PREFIX, dspark.sources(dspark.shape_for(config)))
        draft_bytes = sum(spec.nbytes for spec in draft)
        summary["tensors"] += len(draft)
        summary["total_bytes"] += draft_bytes
        summary |= {"drafter_tensors": len(draft), "drafter_bytes": draft_bytes}
    return summary


def released_sources(config: ModelConfig) -> list[weights.Source]:
    """Every tensor of the released layout, layer by layer and there by name."""
    manifest = weights.expand(config)
    return sorted((*manifest.sources(), *manifest.optional), key=_layer_order)


def _layer_order(source: weights.Source) -> tuple[int, str]:
    """The layer of a tensor, and its name; the embedding comes first, final norm and head last."""
    parts = source.name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1]), source.name
    return -1 if "embed_tokens" in parts else 1 << 30, source.name


def _spec(prefix: str, source: weights.Source) -> Spec:
    return Spec(prefix + source.name, source.part.dtypes[0], source.shape)


def _specs(prefix: str, sources: Iterable[weights.Source]) -> list[Spec]:
    return [_spec(prefix, source) for source in sources]


def _write(
    directory: Path,
    prefix: str,
    sources: Sequence[weights.Source],
    seed: int,
    max_shard_bytes: int,
    bar: tqdm,
) -> None:
    by_name = {prefix + source.name: source for source in sources}
    draw: Values = counted(lambda spec: random_values.values(seed, by_name[spec.name]), bar)
    write_sharded(directory, _specs(prefix, sources), draw, max_shard_bytes)


def _write_drafter(
    config: ModelConfig, model: Path, seed: int, max_shard_bytes: int, bar: tqdm
) -> None:
    folder = model / dspark.FOLDER
    if folder.exists():
        raise CheckpointError(f"{folder} exists; remove it to make another drafter")
    shape = dspark.shape_for(config)
    with fresh_directory(folder) as partial:
        _write(partial, dspark.PREFIX, dspark.sources(shape), seed, max_shard_bytes, bar)
        write_json(partial / "config.json", dspark.to_config(shape, config))


def _generation(config: ModelConfig) -> dict[str, Any]:
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }
    return {key: value for key, value in ids.items() if value not in (None, [])} | _SAMPLING


def counted(values: Values, bar: tqdm) -> Values:
    """The same values, counted by a progress bar as they are taken."""

    def take(spec: Spec) -> Iterable[np.ndarray]:
        for piece in values(spec):
            bar.update(piece.nbytes)
            yield piece

    return take


def progress_bar(total: int, what: str, progress: bool) -> tqdm:
    """A bar of bytes on stderr."""
    return tqdm(
        total=total, unit="B", unit_scale=True, desc=what, file=sys.stderr, disable=not progress
    )
