"""Writes safetensors shards and their index tensor by tensor, and directories all or nothing."""

import itertools
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import CheckpointError
from .files import DTYPES, INDEX

SHARD_BYTES = 5 << 30
"""Default largest shard; the released files are 48 of about 5.2 GB."""

_THREADS = min(8, os.cpu_count() or 1)
_SMALL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor to write: stored name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Values = Callable[[Spec], Iterable[np.ndarray]]
"""Gives a tensor's values in order, in as many pieces as memory asks for."""


@contextmanager
def fresh_directory(directory: Path) -> Iterator[Path]:
    """A temporary sibling that becomes `directory` when the block ends, and vanishes if it raises.

    A killed run leaves only the sibling, `.<name>.partial-*`, which is safe to delete.

    Raises:
      CheckpointError: `directory` exists and is not an empty directory.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not empty; name a new directory or empty it"
        )
    directory = directory.resolve()
    partial = directory.parent / f".{directory.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(directory)  # takes the place of an empty directory too
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def pack_shards(specs: Sequence[Spec], max_shard_bytes: int) -> list[list[Spec]]:
    """Cut a list of tensors into shards of at most `max_shard_bytes`, larger tensors alone."""
    shards: list[list[Spec]] = []
    held = 0
    for spec in specs:
        if not shards or held + spec.nbytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(spec)
        held += spec.nbytes
    return shards


def write_sharded(
    directory: Path, specs: Sequence[Spec], values: Values, max_shard_bytes: int
) -> list[str]:
    """Write shards `model-00001-of-000NN.safetensors`, then the index. Returns the shard names."""
    shards = pack_shards(specs, max_shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard, values, {"format": "pt"})
    weight_map = {
        spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard
    }
    write_index(directory, weight_map, sum(spec.nbytes for spec in specs))
    return names


def write_index(directory: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """Write `model.safetensors.index.json`."""
    content = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_json(directory / INDEX, content)


def write_json(path: Path, content: dict) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_file(
    path: Path, specs: Sequence[Spec], values: Values, metadata: dict[str, str] | None
) -> None:
    """Write one safetensors file with one tensor's pieces in memory at a time.

    Tensors lie widest dtype first and then by name, as the safetensors package lays them out, so
    that every one is aligned; they are made in the order of `specs`.

    Raises:
      CheckpointError: `values` gives another number of bytes than the shape says.
    """
    ordered = sorted(specs, key=lambda spec: (-DTYPES[spec.dtype].itemsize, spec.name))
    header: dict = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for spec in ordered:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        start = file.tell()
        for spec, pieces in _ahead(specs, values):
            file.seek(start + header[spec.name]["data_offsets"][0])
            written = 0
            for piece in pieces:
                written += file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            if written != spec.nbytes:
                raise CheckpointError(f"{spec.name}: {written} bytes given, {spec.nbytes} expected")


def _ahead(specs: Sequence[Spec], values: Values) -> Iterator[tuple[Spec, Iterable[np.ndarray]]]:
    """Each tensor with its pieces, small tensors made ahead by threads while others are written."""
    with ThreadPoolExecutor(_THREADS) as pool:
        waiting: deque[tuple[Spec, Future[list[np.ndarray]] | None]] = deque()
        todo = iter(specs)
        while True:
            for spec in itertools.islice(todo, 2 * _THREADS - len(waiting)):
                is_small = spec.nbytes <= _SMALL_BYTES
                waiting.append(
                    (spec, pool.submit(lambda s=spec: list(values(s))) if is_small else None)
                )
            if not waiting:
                return
            spec, pieces = waiting.popleft()
            yield spec, values(spec) if pieces is None else pieces.result()
