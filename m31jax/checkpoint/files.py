"""Safetensors files and their index: which tensors lie where, before any value is read."""

import json
import mmap
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(np.uint8),  # an exponent byte, read as U8 is
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "BOOL": np.dtype(np.bool_),
    "F64": np.dtype(np.float64),
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (16, 32, 64)},
}
"""NumPy dtype of each safetensors dtype that this code can read."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its stored name, safetensors dtype, shape, and bytes from `offset` on."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Listing:
    """Every tensor of a directory, and what is wrong with its files.

    Attributes:
      shards: files that are there. tensors: by stored name.
      problems: one sentence each, none for sound files.
      is_whole: whether every file could be read; if not, absent tensors mean nothing.
    """

    shards: tuple[Path, ...]
    tensors: dict[str, Stored]
    problems: tuple[str, ...]
    is_whole: bool


def few(names: Iterable[str], limit: int = 8) -> str:
    """The first names and how many there are: `a, b, ... (12)`."""
    names = list(names)
    more = ", ..." if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more} ({len(names)})"


def read_header(path: Path) -> tuple[dict[str, Stored], str | None]:
    """Tensors of one file by name, or no tensors and the reason why the file cannot be used."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            return (
                {},
                f"{path.name} is a Git LFS pointer, not weights; fetch it with `git lfs pull`",
            )
        if size < 8 or length > size - 8:
            return {}, (
                f"{path.name} is truncated or no safetensors file: {size} bytes, header needs "
                f"{8 + length}; download it again"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:  # both bad JSON and bad UTF-8
        return {}, f"{path.name} has a corrupt header ({error}); download it again"
    if not isinstance(header, dict):
        return {}, f"{path.name} has a corrupt header (no JSON object); download it again"
    header.pop("__metadata__", None)
    try:
        ends = [entry["data_offsets"][1] for entry in header.values()]
        end = 8 + length + max(ends, default=0)
    except (KeyError, TypeError, IndexError) as error:
        return {}, f"{path.name} has a corrupt header (an entry lacks {error}); download it again"
    if end > size:
        return {}, (
            f"{path.name} is truncated: {size} bytes, its tensors end at {end}; download it again"
        )
    try:
        with safe_open(path, framework="np"):
            pass  # checks dtypes, offsets without holes or overlaps, and sizes against shapes
    except SafetensorError as error:
        return {}, f"{path.name} has a corrupt header ({error}); download it again"
    return {
        name: Stored(
            name,
            path,
            entry["dtype"],
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }, None


def list_directory(directory: Path) -> Listing:
    """What the safetensors files of a directory hold, by its index if there is one."""
    problems: list[str] = []
    index = directory / INDEX
    absent: list[str] = []
    if index.is_file():
        weight_map, total, problem = _read_index(index)
        if problem:
            return Listing((), {}, (problem,), False)
        shards = sorted(set(weight_map.values()))
        absent = [name for name in shards if not (directory / name).is_file()]
        if absent:
            problems.append(f"{INDEX} names shards that are absent: {few(absent)}; download them")
        shards = [name for name in shards if name not in absent]
    elif (directory / SINGLE).is_file():
        weight_map, total, shards = None, None, [SINGLE]
    else:
        loose = sorted(path.name for path in directory.glob("*.safetensors"))
        reason = f"{few(loose)} but no {INDEX}" if loose else "no *.safetensors file at all"
        problem = f"no weights in {directory}: {reason}; expected {SINGLE} or {INDEX}"
        return Listing((), {}, (problem,), False)

    tensors: dict[str, Stored] = {}
    unread = set(absent)
    for name in shards:
        found, problem = read_header(directory / name)
        if problem:
            problems.append(problem)
            unread.add(name)
        twice = [f"{key} ({tensors[key].path.name}, {name})" for key in found if key in tensors]
        if twice:
            problems.append(f"tensors that lie in two shards: {few(twice)}")
        tensors |= found
    if weight_map is not None:
        problems += _against_index(weight_map, total, tensors, unread)
    unknown = [f"{s.name} ({s.dtype})" for s in tensors.values() if s.dtype not in DTYPES]
    if unknown:
        problems.append(f"tensors of a dtype that cannot be read: {few(unknown)}")
    return Listing(tuple(directory / name for name in shards), tensors, tuple(problems), not unread)


def _read_index(index: Path) -> tuple[dict[str, str], int | None, str | None]:
    """weight_map and total_size of an index, or the reason why it cannot be used."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        return {}, None, f"{INDEX} is not JSON ({error}); download it again"
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return {}, None, f"{INDEX} has no weight_map; download it again"
    odd = [v for v in weight_map.values() if not isinstance(v, str) or Path(v).name != v]
    if odd:
        return {}, None, f"{INDEX} names shards outside its directory: {few(map(str, odd))}"
    metadata = content.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None, None


def _against_index(
    weight_map: dict[str, str], total: int | None, tensors: dict[str, Stored], unread: set[str]
) -> list[str]:
    """Differences between an index and the shards; `unread` shards were reported already."""
    problems = []
    lost = [
        f"{name} ({shard})"
        for name, shard in weight_map.items()
        if shard not in unread and (name not in tensors or tensors[name].path.name != shard)
    ]
    if lost:
        problems.append(f"tensors that {INDEX} lists but their shard lacks: {few(lost)}")
    extra = [f"{name} ({s.path.name})" for name, s in tensors.items() if name not in weight_map]
    if extra:
        problems.append(f"tensors in a shard that {INDEX} does not list: {few(extra)}")
    held = sum(stored.nbytes for stored in tensors.values())
    if total is not None and not unread and not lost and not extra and total != held:
        problems.append(
            f"{INDEX} says total_size {total}, the shards hold {held} bytes: files of two versions"
        )
    return problems


class Views:
    """Memory-mapped values of stored tensors."""

    def __init__(self):
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def view(self, stored: Stored) -> np.ndarray:
        """A tensor's values as a read-only view of its file."""
        with self._lock:
            if stored.path not in self._maps:
                with stored.path.open("rb") as file:
                    self._maps[stored.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped = self._maps[stored.path]
        dtype = DTYPES[stored.dtype]
        count = stored.nbytes // dtype.itemsize
        flat = np.frombuffer(mapped, dtype, count, stored.offset)
        return flat.reshape(stored.shape)

    def release(self) -> None:
        """Give back the memory of pages read so far; views stay valid and read the file again."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)
