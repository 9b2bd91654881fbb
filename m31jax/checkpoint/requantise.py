"""Re-writes a BF16 checkpoint with MXFP8 or NVFP4 weights, by the rules of the released files."""

import json
import shutil
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from .. import mxfp8, nvfp4, weights
from ..config import ModelConfig
from ..errors import CheckpointError
from .files import INDEX
from .make import counted, progress_bar, released_sources, with_format
from .reader import Checkpoint, raise_problems
from .writer import SHARD_BYTES, Spec, fresh_directory, write_json, write_sharded

# Operation by operation takes many times as long. Experts have two shapes; projections have many,
# and are quantised in runs of one shape, because a compilation takes longer than a small matrix.
_mxfp8 = jax.jit(mxfp8.quantize)
_nvfp4 = jax.jit(nvfp4.quantize_weight)
_RUN_GROUPS = 8192


def requantise(
    source: Path | str,
    directory: Path | str,
    format: str,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> dict[str, Any]:
    """Quantise the weights of a BF16 checkpoint and keep everything else as it is.

    Projections become MXFP8; routed experts MXFP8, or NVFP4 with one global scale for an expert's
    w1 and w3 and another for its w2. Static activation scales are not written: nothing is
    calibrated.

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
    now = config.quantization
    if (now.linear, now.experts) != ("bf16", "bf16"):
        raise CheckpointError(
            f"{source} is stored as {now.linear} with {now.experts} experts; only BF16 checkpoints "
            "can be re-quantised"
        )
    target = with_format(config, format)
    checkpoint = Checkpoint(source)
    raise_problems(source, checkpoint.problems(weights.expand(config)))
    tensors = {
        _stored_name(checkpoint, s): s
        for s in released_sources(target)
        if s.part.suffix is not None
    }
    specs = []
    for name, s in tensors.items():
        # What stays as it is keeps its dtype: a router may be BF16 or F32.
        stored = checkpoint.tensors[s.name] if s.part.check == "finite" else None
        specs.append(Spec(name, stored.dtype if stored else s.part.dtypes[0], s.shape))
    kept = checkpoint.untouched()
    specs += [Spec(name, stored.dtype, stored.shape) for name, stored in kept.items()]
    total = sum(spec.nbytes for spec in specs)
    quantiser = _Quantiser(checkpoint)

    def values(spec: Spec) -> Iterable[np.ndarray]:
        if spec.name in kept:
            yield checkpoint.view(kept[spec.name])
        else:
            yield quantiser.tensor(tensors[spec.name])

    with (
        fresh_directory(Path(directory)) as partial,
        progress_bar(total, "quantise", progress) as bar,
    ):
        shards = write_sharded(partial, specs, counted(values, bar), max_shard_bytes)
        copy_other_files(source, partial)
        raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
        raw["quantization_config"] = target.to_dict()["quantization_config"]
        write_json(partial / "config.json", raw)
    return {"tensors": len(specs), "total_bytes": total, "shards": len(shards)}


def _stored_name(checkpoint: Checkpoint, source: weights.Source) -> str:
    """The name of a new tensor, with the prefix that its module has in the BF16 checkpoint."""
    kept = checkpoint.tensors.get(source.name)
    if kept is not None:
        return kept.name
    module = source.name.removesuffix(source.part.tensor)
    stored = checkpoint.tensors[module + ".weight"].name
    return stored.removesuffix(".weight") + source.part.tensor


def copy_other_files(source: Path, directory: Path, leave: Iterable[str] = ()) -> None:
    """Copy everything but the weights: tokenizer, templates, generation config, a drafter's folder.

    Weights are `*.safetensors` and their index; files starting with a dot and those named in
    `leave` are left too.
    """
    for path in source.iterdir():
        is_weights = path.suffix == ".safetensors" or path.name == INDEX
        if is_weights or path.name.startswith(".") or path.name in leave:
            continue
        if path.is_dir():
            shutil.copytree(path, directory / path.name)
        else:
            shutil.copyfile(path, directory / path.name)


class _Quantiser:
    """Quantised tensors of a BF16 checkpoint; the parts of one module are made together."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        # Parts of a module follow each other; a few more modules are in flight in other threads.
        self.mxfp8 = lru_cache(maxsize=8)(self._mxfp8)
        self.nvfp4 = lru_cache(maxsize=8)(self._nvfp4)

    def tensor(self, source: weights.Source) -> np.ndarray:
        """The values of one tensor of the new checkpoint, in its shape and dtype."""
        match source.part.check:
            case "e4m3" | "e8m0_scale":
                data, scale = self.mxfp8(source.name.removesuffix(source.part.tensor))
                return data if source.part.check == "e4m3" else scale
            case "codes" | "e4m3_scale" | "positive":
                expert, _, leaf = source.name.removesuffix(source.part.tensor).rpartition(".")
                parts = self.nvfp4(expert, ("w2",) if leaf == "w2" else ("w1", "w3"))
                return parts[leaf][source.part.tensor]
        return self._read(source.name)

    def _read(self, name: str) -> np.ndarray:
        stored = self.checkpoint.tensors[name]
        tensor = self.checkpoint.view(stored)
        if not np.isfinite(tensor).all():
            raise CheckpointError(
                f"{stored.name} ({stored.path.name}) holds NaN or infinite values; it cannot be "
                "quantised"
            )
        return tensor

    def _mxfp8(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        weight = self._read(module + ".weight")
        groups = weight.reshape(-1, mxfp8.GROUP)
        data = np.empty(groups.shape, ml_dtypes.float8_e4m3fn)
        scale = np.empty((len(groups), 1), np.uint8)
        run = np.zeros((_RUN_GROUPS, mxfp8.GROUP), groups.dtype)
        for start in range(0, len(groups), _RUN_GROUPS):
            end = min(start + _RUN_GROUPS, len(groups))
            run[: end - start] = groups[start:end]
            run_data, run_scale = _mxfp8(run)
            data[start:end] = np.asarray(run_data)[: end - start]
            scale[start:end] = np.asarray(run_scale)[: end - start]
        return data.reshape(weight.shape), scale.reshape(*weight.shape[:-1], -1)

    def _nvfp4(self, expert: str, leaves: tuple[str, ...]) -> dict[str, dict[str, np.ndarray]]:
        """Parts of matrices that share a global scale, by matrix and tensor suffix."""
        stack = np.stack([self._read(f"{expert}.{leaf}.weight") for leaf in leaves])
        packed, scale, global_scale = (np.asarray(part) for part in _nvfp4(stack))
        return {
            leaf: {
                ".weight_packed": packed[i],
                ".weight_scale": scale[i],
                ".weight_global_scale": global_scale,
            }
            for i, leaf in enumerate(leaves)
        }
