"""Streams a checkpoint into sharded arrays: each rank's part only, one parameter at a time."""

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import DTypeLike
from tqdm import tqdm

from sharding import mesh as axis
from sharding import rules

from .. import weights
from ..config import ModelConfig
from ..errors import CheckpointError
from . import orbax, values
from .files import Stored
from .plan import check_widths, plan
from .reader import Checkpoint, raise_problems

_ALIGNMENT = 64  # bytes; jax uses an aligned host buffer in place on CPU instead of copying it
_THREADS = 4  # page faults and casts of different tensors overlap


def load(
    path: Path | str,
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: DTypeLike = np.float32,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Load a checkpoint directory, Hugging Face or Orbax.

    Headers are checked whole before anything is allocated, values as they are read; either the
    complete set of parameters comes back or an error. Host memory stays below the result plus the
    largest shard.

    Args:
      path: the directory.
      config: what its `config.json` says (`ModelConfig.from_dir`).
      mesh: devices; its axis "tp" is what parameters are cut over.
      dtype: in memory, of what is stored in BF16; norms and routers are float32.
      progress: bytes read, as a bar on stderr.
    Returns:
      Dot path -> global array, as `weights.expand` lists them, cut as `sharding.rules` says.
    Raises:
      TargetError: the model cannot be cut to this width.
      CheckpointError: tensors are missing, unknown, damaged or of another shape or dtype; names
        them.
    """
    path, tp = Path(path), mesh.shape[axis.TP]
    check_widths(config, tp)
    if orbax.is_orbax(path):
        params = orbax.from_orbax(path, config, mesh, dtype=dtype)
    else:
        params = _load_safetensors(path, config, mesh, dtype, progress)
    expected = plan(config, tp, dtype).bytes_per_rank
    placed = placed_bytes(params)
    assert all(count == expected for count in placed.values()), (placed, expected)
    return params


def placed_bytes(params: dict[str, jax.Array]) -> dict[int, int]:
    """Bytes of parameters on each device of this process, by device id."""
    placed: dict[int, int] = {}
    for array in params.values():
        for shard in array.addressable_shards:
            placed[shard.device.id] = placed.get(shard.device.id, 0) + shard.data.nbytes
    return placed


def _load_safetensors(
    path: Path, config: ModelConfig, mesh: Mesh, dtype: DTypeLike, progress: bool
) -> dict[str, jax.Array]:
    manifest = weights.expand(config, mesh.shape[axis.TP], dtype)
    checkpoint = Checkpoint(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = checkpoint.problems(manifest)
        raise_problems(path, problems or values.check_optional(checkpoint, manifest.optional))
        # File order, so that a disk reads forward and few shards are open at once.
        order = sorted(manifest.parameters, key=lambda p: _position(checkpoint, p))
        local = {p.name: _indices(p, mesh) for p in order}
        total = sum(_slice_bytes(p, set(local[p.name].values())) for p in order)
        made: dict[str, jax.Array] = {}
        with tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc="load",
            file=sys.stderr,
            disable=not progress,
        ) as bar:
            for parameter in order:
                filler = _Filler(checkpoint, parameter)
                sharding = NamedSharding(mesh, rules.spec(parameter.axes))
                buffers = {}
                for index in dict.fromkeys(local[parameter.name].values()):
                    buffers[index] = filler.fill(index, pool.map)
                    bar.update(buffers[index].nbytes)
                made[parameter.name] = jax.make_array_from_single_device_arrays(
                    parameter.shape,
                    sharding,
                    [
                        jax.device_put(buffers[index], device)
                        for device, index in local[parameter.name].items()
                    ],
                )
                checkpoint.release()
    return {p.name: made[p.name] for p in manifest.parameters}


Index = tuple[tuple[int, int], ...]
"""(start, stop) along each axis of a global array."""


def _indices(parameter: weights.Parameter, mesh: Mesh) -> dict[Any, Index]:
    """The part of a parameter that each device of this process holds."""
    sharding = NamedSharding(mesh, rules.spec(parameter.axes))
    cuts = sharding.addressable_devices_indices_map(parameter.shape)
    return {
        device: tuple(
            cut.indices(size)[:2] for cut, size in zip(slices or (), parameter.shape, strict=True)
        )
        for device, slices in cuts.items()
    }


def _slice_bytes(parameter: weights.Parameter, indices: set[Index]) -> int:
    elements = sum(math.prod(stop - start for start, stop in index) for index in indices)
    return elements * parameter.dtype.itemsize


def _position(checkpoint: Checkpoint, parameter: weights.Parameter) -> tuple[str, int]:
    stored = checkpoint.find(parameter.sources[0])
    assert stored is not None
    return stored.path.name, stored.offset


class _Filler:
    """Fills host buffers for parts of one parameter; checks the values it reads."""

    def __init__(self, checkpoint: Checkpoint, parameter: weights.Parameter):
        self.checkpoint = checkpoint
        self.parameter = parameter
        self.repaired: dict[str, np.ndarray] = {}

    def fill(self, index: Index, run: Callable) -> np.ndarray:
        """A new buffer with the values of `index`."""
        parameter = self.parameter
        out = aligned([stop - start for start, stop in index], parameter.dtype)
        lead = len(parameter.sources[0].index)
        cuts = [slice(start, stop) for start, stop in index[lead:]]
        if parameter.repeat > 1:
            # Neighbouring ranks hold one head: global head h is stored head h // repeat.
            head, offset = divmod(index[lead][0], parameter.head_rows)
            first = head // parameter.repeat * parameter.head_rows + offset
            cuts[0] = slice(first, first + index[lead][1] - index[lead][0])

        def one(source: weights.Source) -> None:
            self._copy(source, tuple(cuts), out[(*source.index, ...)])

        for _ in run(one, parameter.sources):
            pass
        return out

    def _copy(self, source: weights.Source, cuts: tuple[slice, ...], out: np.ndarray) -> None:
        stored = self.checkpoint.find(source)
        assert stored is not None
        view = self.checkpoint.view(stored)
        if not cuts:
            view = view.reshape(())  # a scale stored as [1] or []
        part = view[cuts]
        if self.parameter.fill != "values":
            self._check(source, stored, part)
        match self.parameter.fill:
            case "values":
                out[...] = part
                self._check(source, stored, out)  # after the cast: float32 is quicker to scan
            case "reciprocal":
                out[...] = np.float32(1) / part
            case "bits":
                if source.name in self.repaired:
                    part = self.repaired[source.name][cuts]
                out.view(np.uint8)[...] = part.view(np.uint8)

    def _check(self, source: weights.Source, stored: Stored, part: np.ndarray) -> None:
        """Raise unless the values just read are sound or can be repaired."""
        if values.is_sound(part, source.part.check) or source.name in self.repaired:
            return
        if source.codes:
            self.repaired[source.name] = values.repaired_scale(self.checkpoint, stored, source)
        elif fault := values.reason(self.checkpoint, stored, source):
            raise CheckpointError(fault)


def aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at an address that jax can use in place."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
