"""Conversion to an Orbax checkpoint laid out for one tensor-parallel width, and back bit for bit.

`orbax` describes the directory and reads it.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors import safe_open

from sharding import mesh as mesh_names

from .. import weights
from ..config import ModelConfig
from ..errors import CheckpointError, TargetError
from . import loader, values
from .files import DTYPES, INDEX, Stored, Views, read_header
from .orbax import (
    EXTRAS,
    METADATA,
    PARAMS,
    SOURCE_INDEX,
    VERSION,
    from_orbax,
    is_orbax,
    read_metadata,
    restore,
    table,
)
from .plan import check_widths
from .reader import Checkpoint, canonical, raise_problems
from .requantise import copy_other_files
from .writer import Spec, fresh_directory, write_file, write_json


def to_orbax(
    path: Path | str,
    out: Path | str,
    tp: int,
    dtype: DTypeLike = np.float32,
    *,
    devices: Sequence[Any],
    progress: bool = True,
) -> dict[str, Any]:
    """Convert a Hugging Face checkpoint for `tp` ranks. Host memory holds the whole result.

    Args:
      path: the checkpoint. out: where to write; absent or empty.
      tp: ranks.
      devices: at least `tp` of them, so that the files are cut as ranks read them; their memory
        holds the result.
      dtype: of BF16 tensors in memory, float32 or bfloat16.
      progress: a bar while reading.
    Returns:
      tp, dtype, parameters (count), total_bytes.
    Raises:
      CheckpointError: the checkpoint is damaged, is a conversion already, or `out` is not empty.
      TargetError: the model cannot be cut to `tp` ranks, or there are fewer devices.
    """
    import orbax.checkpoint as ocp  # takes a second to import, and only conversion needs it

    path, out = Path(path), Path(out)
    if is_orbax(path):
        raise CheckpointError(f"{path} is an Orbax conversion already; convert it back first")
    if np.dtype(dtype).name not in ("float32", "bfloat16"):
        raise TargetError(
            f"dtype={np.dtype(dtype).name} loses bits of BF16; use float32 or bfloat16"
        )
    config = ModelConfig.from_dir(path)
    check_widths(config, tp)
    if len(devices) < tp:
        raise TargetError(
            f"tp={tp} needs {tp} devices, {len(devices)} found; on CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={tp} before JAX starts"
        )
    mesh = mesh_names.make_mesh(tp, devices)
    manifest = weights.expand(config, tp, dtype)
    with fresh_directory(out) as partial:
        params = loader.load(path, config, mesh, dtype=dtype, progress=progress)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / PARAMS, params)
        checkpoint = Checkpoint(path)
        extras = _extras(checkpoint, manifest)
        specs = [Spec(s.name, s.dtype, s.shape) for s in extras.values()]
        write_file(partial / EXTRAS, specs, lambda spec: [checkpoint.view(extras[spec.name])], None)
        copy_other_files(path, partial)
        if (path / INDEX).is_file():
            shutil.copyfile(path / INDEX, partial / SOURCE_INDEX)
        write_json(
            partial / METADATA,
            {
                "version": VERSION,
                "tp": tp,
                "dtype": np.dtype(dtype).name,
                "prefix": checkpoint.prefix,
                "parameters": table(manifest),
                "shards": [_shard(checkpoint, shard) for shard in checkpoint.listing.shards],
            },
        )
    total = sum(p.nbytes for p in manifest.parameters)
    return {
        "tp": tp,
        "dtype": np.dtype(dtype).name,
        "parameters": len(manifest.parameters),
        "total_bytes": total,
    }


def to_hf(path: Path | str, out: Path | str) -> dict[str, Any]:
    """Write the Hugging Face checkpoint that a conversion was made from: same shards, same bytes.

    Host memory holds all parameters.

    Returns:
      tensors, total_bytes, shards.
    Raises:
      CheckpointError: `path` is no conversion or damaged, or `out` is not empty.
    """
    path, out = Path(path), Path(out)
    metadata = read_metadata(path)
    config = ModelConfig.from_dir(path)
    manifest = weights.expand(config, metadata["tp"], np.dtype(metadata["dtype"]))
    # Arrays of zeros take no memory until they are written; Orbax only looks at their type.
    abstract = {p.name: np.zeros(p.shape, p.dtype) for p in manifest.parameters}
    params = restore(path, abstract)
    origin = {
        name: (parameter, source)
        for parameter in manifest.parameters
        for source in parameter.sources
        for name in (source.name, *source.aliases)
    }
    if not (path / EXTRAS).is_file():
        raise CheckpointError(
            f"{path} has no {EXTRAS}, which the way back needs; convert the original again"
        )
    extras, problem = read_header(path / EXTRAS)
    raise_problems(path, [problem] if problem else [])
    views = Views()

    def values_of(spec: Spec) -> list[np.ndarray]:
        if spec.name in extras:
            return [views.view(extras[spec.name])]
        parameter, source = origin[canonical(spec.name, metadata["prefix"]) or spec.name]
        return [_original(params[parameter.name], parameter, source, spec)]

    written: list[Spec] = []
    with fresh_directory(out) as partial:
        for shard in metadata["shards"]:
            specs = [Spec(name, dtype, tuple(shape)) for name, dtype, shape in shard["tensors"]]
            write_file(partial / shard["file"], specs, values_of, shard["metadata"])
            written += specs
        copy_other_files(path, partial, (METADATA, PARAMS, SOURCE_INDEX))
        if (path / SOURCE_INDEX).is_file():
            shutil.copyfile(path / SOURCE_INDEX, partial / INDEX)
    return {
        "tensors": len(written),
        "total_bytes": sum(spec.nbytes for spec in written),
        "shards": len(metadata["shards"]),
    }


def _shard(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    """Layout of one original file: its metadata, and tensors in the order of their bytes."""
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    tensors = sorted(
        (s for s in checkpoint.listing.tensors.values() if s.path == path), key=lambda s: s.offset
    )
    return {
        "file": path.name,
        "metadata": metadata,
        "tensors": [[s.name, s.dtype, list(s.shape)] for s in tensors],
    }


def _extras(checkpoint: Checkpoint, manifest: weights.Manifest) -> dict[str, Stored]:
    """Stored tensors that no parameter holds bit for bit, by stored name."""
    extras = dict(checkpoint.listing.tensors)
    for source in manifest.sources():
        stored = checkpoint.find(source)
        assert stored is not None  # loaded before
        is_repaired = source.codes and not values.is_sound(
            checkpoint.view(stored), source.part.check
        )
        if source.part.fill != "reciprocal" and not is_repaired:
            del extras[stored.name]
    return extras


def _original(
    array: np.ndarray, parameter: weights.Parameter, source: weights.Source, spec: Spec
) -> np.ndarray:
    """The checkpoint tensor that filled an entry of a parameter."""
    if parameter.repeat > 1:
        shape = (-1, parameter.head_rows, *array.shape[1:])
        array = array.reshape(shape)[:: parameter.repeat].reshape(-1, *array.shape[1:])
    part = array[source.index]
    if parameter.fill == "bits":
        return part
    return np.asarray(part).astype(DTYPES[spec.dtype])


__all__ = ["from_orbax", "to_hf", "to_orbax"]
