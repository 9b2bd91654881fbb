"""What a checkpoint directory holds, what would be loaded from it, and everything that is wrong."""

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .. import weights
from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError, TargetError
from ..target import WIDTHS
from . import dspark, orbax, values
from .files import few, list_directory
from .plan import allowed_widths, plan
from .reader import Checkpoint

_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_VALUES_UP_TO = 1 << 30  # bytes; larger checkpoints have their values read only on request
# Parts that hold the weights themselves, and weights an element.
_ELEMENTS = {"finite": 1, "e4m3": 1, "codes": 2}


def inspect(path: Path | str, *, read_values: bool | None = None) -> dict[str, Any]:
    """Look at a checkpoint without loading it.

    Args:
      path: the directory, Hugging Face or Orbax.
      read_values: look for NaN, infinities and bad scales in every tensor too; None reads them in
        checkpoints up to 1 GiB.
    Returns:
      layout ("huggingface" or "orbax"), prefix, format (linear, experts), shards (file, bytes),
      tensors, total_bytes, parameters (weights, scales not counted), skipped (tensors known and
      not loaded), bytes_per_rank (tp -> dtype -> bytes, or the reason why not), allowed_widths,
      problems (all of them; none for a sound checkpoint), notes, values_read, tokenizer (files),
      drafter (or None). What cannot be said of a damaged checkpoint is None.
    Raises:
      CheckpointError: `path` is not a directory.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; pass one that holds config.json")
    problems: list[str] = []
    config = None
    try:
        config = ModelConfig.from_dir(path)
    except ConfigError as error:
        problems.append(str(error))
    report: dict[str, Any] = {
        "path": str(path),
        "layout": "orbax" if orbax.is_orbax(path) else "huggingface",
        "format": None,
        "parameters": None,
        "bytes_per_rank": None,
        "allowed_widths": None,
    }
    if config is not None:
        quantization = config.quantization
        report |= {
            "format": {"linear": quantization.linear, "experts": quantization.experts},
            "parameters": _count(config),
            "bytes_per_rank": {tp: _bytes_per_rank(config, tp) for tp in WIDTHS},
            "allowed_widths": list(allowed_widths(config)),
        }
    look = _look_at_orbax if report["layout"] == "orbax" else _look_at_shards
    found, notes = look(path, config, read_values, problems)
    tokenizer = [name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if "tokenizer.json" not in tokenizer:
        notes.append("no tokenizer.json: ids go in and come out")
    return (
        report
        | found
        | {
            "problems": problems,
            "notes": notes,
            "tokenizer": tokenizer,
            "drafter": _drafter(path / dspark.FOLDER, problems),
        }
    )


def _count(config: ModelConfig) -> int:
    """Weights of a model."""
    return sum(
        math.prod(source.shape) * _ELEMENTS.get(source.part.check, 0)
        for source in weights.expand(config).sources()
    )


def _bytes_per_rank(config: ModelConfig, tp: int) -> dict[str, int] | str:
    try:
        return {dtype.name: plan(config, tp, dtype).bytes_per_rank for dtype in _DTYPES}
    except TargetError as error:
        return str(error)


def _look_at_shards(
    path: Path, config: ModelConfig | None, read_values: bool | None, problems: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Report and notes on safetensors files; appends to `problems`."""
    checkpoint = Checkpoint(path)
    stored = checkpoint.listing.tensors
    total = sum(tensor.nbytes for tensor in stored.values())
    is_read = total <= _VALUES_UP_TO if read_values is None else read_values
    notes = []
    if config is None:
        problems += checkpoint.listing.problems
        is_read = False
    else:
        manifest = weights.expand(config)
        problems += checkpoint.problems(manifest)
        if is_read:
            _read_values(checkpoint, manifest, problems, notes)
    if checkpoint.skipped:
        notes.append(f"known and not loaded: {few(checkpoint.skipped, 3)}")
    named = {shard.name for shard in checkpoint.listing.shards}
    loose = sorted(p.name for p in path.glob("*.safetensors") if p.name not in named)
    if loose and named:
        notes.append(f"files that the index does not name, ignored: {few(loose)}")
    return {
        "prefix": checkpoint.prefix if stored else None,
        "shards": [{"file": s.name, "bytes": s.stat().st_size} for s in checkpoint.listing.shards],
        "tensors": len(stored),
        "total_bytes": total,
        "skipped": len(checkpoint.skipped) + len(checkpoint.unit_scales),
        "values_read": is_read,
    }, notes


def _read_values(
    checkpoint: Checkpoint, manifest: weights.Manifest, problems: list[str], notes: list[str]
) -> None:
    """Check the values of every tensor that has the right shape and dtype."""
    usable = {source.name: source for source in manifest.sources() if checkpoint.fits(source)}
    repaired = []
    for source in usable.values():
        if source.codes and source.codes not in usable:
            continue
        stored = checkpoint.find(source)
        assert stored is not None  # it fits
        fault = values.reason(checkpoint, stored, source)
        if fault:
            problems.append(fault)
        elif not values.is_sound(checkpoint.view(stored), source.part.check):
            repaired.append(stored.name)
        checkpoint.release()
    optional = tuple(source for source in manifest.optional if checkpoint.fits(source))
    problems += values.check_optional(checkpoint, optional)
    if repaired:
        notes.append(f"NaN scales over zero codes, read as 0: {few(repaired)}")
    differing = [
        name
        for name in usable
        if name.endswith(".w1.weight_global_scale")
        and (other := name.replace(".w1.", ".w3.")) in usable
        and checkpoint.view(checkpoint.tensors[name]).item()
        != checkpoint.view(checkpoint.tensors[other]).item()
    ]
    if differing:
        notes.append(
            "w1 and w3 have different global scales, which fused kernels cannot take: "
            f"{few(differing)}"
        )


def _look_at_orbax(
    path: Path, config: ModelConfig | None, read_values: bool | None, problems: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Report and notes on a conversion; appends to `problems`."""
    del read_values  # they were read when it was converted
    found: dict[str, Any] = {"tensors": None, "total_bytes": None, "values_read": False}
    try:
        metadata = orbax.read_metadata(path)
    except CheckpointError as error:
        problems.append(str(error))
        return found, []
    tp, stored = metadata["tp"], metadata["parameters"]
    if not (path / orbax.PARAMS).is_dir():
        problems.append(f"{path} has no {orbax.PARAMS}/; convert the original again")
    if config is not None and stored != orbax.table(
        weights.expand(config, tp, metadata["dtype"], with_sources=False)
    ):
        problems.append(
            f"{path / orbax.METADATA} and config.json disagree; convert the original again"
        )
    found |= {
        "tp": tp,
        "dtype": metadata["dtype"],
        "prefix": metadata["prefix"],
        "tensors": len(stored),
        "total_bytes": sum(
            math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in stored.values()
        ),
    }
    return found, [f"laid out for tp={tp} in {metadata['dtype']}"]


def _drafter(folder: Path, problems: list[str]) -> dict[str, Any] | None:
    """What a drafter's folder holds; appends to `problems`."""
    if not folder.is_dir():
        return None
    listing = list_directory(folder)
    problems += [f"{folder.name}/: {problem}" for problem in listing.problems]
    if not (folder / "config.json").is_file():
        problems.append(f"{folder.name}/ has no config.json")
    return {
        "tensors": len(listing.tensors),
        "total_bytes": sum(tensor.nbytes for tensor in listing.tensors.values()),
    }
