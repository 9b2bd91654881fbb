"""Reads an Orbax checkpoint that `convert.to_orbax` laid out for one tensor-parallel width.

config.json, tokenizer files, dspark/   as they were
m31jax.json            width, dtype, parameters, and the layout of the original shards
params/                the Orbax checkpoint: every parameter, cut as its ranks hold it
source.index.json      the original index, if there was one
extras.safetensors     tensors that parameters do not hold exactly (encode scales, activation
                       scales, vision): needed for the way back only
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import DTypeLike

from sharding import mesh as mesh_names
from sharding import rules

from .. import weights
from ..config import ModelConfig
from ..errors import CheckpointError, TargetError

METADATA = "m31jax.json"
PARAMS = "params"
EXTRAS = "extras.safetensors"
SOURCE_INDEX = "source.index.json"
VERSION = 1


def is_orbax(path: Path) -> bool:
    """Whether a directory is a conversion made by `to_orbax`."""
    return (path / METADATA).is_file()


def from_orbax(
    path: Path | str, config: ModelConfig, mesh: Mesh, *, dtype: DTypeLike = np.float32
) -> dict[str, jax.Array]:
    """Load a conversion; arguments and result as in `loader.load`.

    Any width whose arrays have the same global shapes will do; only K/V heads held by several ranks
    tie a conversion to its width. A dtype other than the converted one is cast after loading.

    Raises:
      TargetError: the conversion was laid out for a width that does not fit `mesh`.
      CheckpointError: it is damaged, or not of this config.
    """
    path, tp = Path(path), mesh.shape[mesh_names.TP]
    metadata = read_metadata(path)
    manifest = weights.expand(config, tp, dtype, with_sources=False)
    stored, wanted = metadata["parameters"], table(manifest)
    if stored != table(
        weights.expand(config, metadata["tp"], metadata["dtype"], with_sources=False)
    ):
        raise CheckpointError(
            f"{path / METADATA} and config.json describe different models; convert the original "
            "again"
        )
    for name, (shape, _) in wanted.items():
        if stored[name][0] != shape:
            raise TargetError(
                f"{path} is laid out for tp={metadata['tp']}: {name} is {stored[name][0]}, tp={tp} "
                f"needs {shape}; use tp={metadata['tp']} or convert the original for tp={tp}"
            )
    abstract = {
        p.name: jax.ShapeDtypeStruct(
            p.shape,
            np.dtype(stored[p.name][1]),
            sharding=NamedSharding(mesh, rules.spec(p.axes)),
        )
        for p in manifest.parameters
    }
    params = restore(path, abstract)
    for parameter in manifest.parameters:
        if params[parameter.name].dtype != parameter.dtype:
            params[parameter.name] = params[parameter.name].astype(parameter.dtype)
    return {p.name: params[p.name] for p in manifest.parameters}


def restore(path: Path, abstract: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a conversion: arrays on devices or in NumPy, as `abstract` has them.

    Raises:
      CheckpointError: `params/` is absent or damaged.
    """
    import orbax.checkpoint as ocp  # takes a second to import, and only conversions need it

    if not (path / PARAMS).is_dir():
        raise CheckpointError(f"{path} has {METADATA} but no {PARAMS}/; convert the original again")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore((path / PARAMS).resolve(), abstract)
    except Exception as error:  # Orbax raises the bare class for damaged data
        raise CheckpointError(
            f"{path / PARAMS} is damaged ({error}); convert the original again"
        ) from error


def read_metadata(path: Path) -> dict[str, Any]:
    """`m31jax.json` of a conversion.

    Raises:
      CheckpointError: it is absent, unreadable or of another version.
    """
    if not is_orbax(path):
        raise CheckpointError(f"{path} has no {METADATA}: not an Orbax conversion of m31jax")
    try:
        metadata = json.loads((path / METADATA).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path / METADATA} is not JSON ({error}); convert again") from error
    version = metadata.get("version") if isinstance(metadata, dict) else None
    if version != VERSION:
        raise CheckpointError(
            f"{path / METADATA} has version {version!r}, this code reads {VERSION}; convert the "
            "original again"
        )
    absent = {"tp", "dtype", "prefix", "parameters", "shards"} - metadata.keys()
    if absent:
        raise CheckpointError(
            f"{path / METADATA} lacks {', '.join(sorted(absent))}; convert the original again"
        )
    return metadata


def table(manifest: weights.Manifest) -> dict[str, list]:
    """Shape and dtype of each parameter, as JSON holds them."""
    return {p.name: [list(p.shape), p.dtype.name] for p in manifest.parameters}
