"""Which directory a MODEL argument means: one of the user's, or the bundled checkpoint `tiny`."""

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

from .checkpoint import make
from .config import ModelConfig
from .errors import CheckpointError
from .presets import TINY

NAME = "tiny"
"""The argument that names the bundled checkpoint; a directory of that name is reached as ./tiny."""

TRAINED = Path(__file__).parent / NAME
"""Package data; where it is absent, `tiny` is a random checkpoint, made once and kept."""

_SEED = 31
_log = logging.getLogger(__name__)


def locate(model: str | os.PathLike[str], cache_dir: Path) -> Path:
    """The directory that `model` means.

    Args:
      model: `tiny`, or a path.
      cache_dir: where a random `tiny` is kept; made if absent.
    Raises:
      CheckpointError: neither; says how to download a checkpoint.
    """
    if model == NAME:
        return TRAINED if TRAINED.is_dir() else random_tiny(cache_dir)
    path = Path(model)
    if path.is_dir():
        return path
    what = "is a file" if path.exists() else "does not exist"
    name = str(model)
    is_repository = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    repository = name if is_repository else "ORG/NAME"
    raise CheckpointError(
        f"MODEL {name!r} {what}; it must be a directory with config.json and *.safetensors, or "
        f"`{NAME}` for the bundled checkpoint. To download one: "
        f"hf download {repository} --local-dir {repository.rpartition('/')[2]}"
    )


def random_tiny(cache_dir: Path) -> Path:
    """A random NVFP4 checkpoint of the tiny preset, made in `cache_dir` unless it is there."""
    config = make.with_format(TINY, "nvfp4")
    folder = cache_dir / f"{NAME}-random-{_digest(config)}"
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f".{NAME}-") as scratch:
            made = Path(scratch) / NAME
            make.make(config, made, seed=_SEED, progress=False)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process may have been first
                    raise
    _log.warning(
        "%s: no trained checkpoint is bundled; its weights, and its text, are random", NAME
    )
    return folder


def _digest(config: ModelConfig) -> str:
    """Changes with the layout that `make` writes, so that a kept checkpoint is never stale."""
    tensors = [
        (source.name, source.part.dtypes[0], source.shape)
        for source in make.released_sources(config)
    ]
    content = json.dumps([config.to_dict(), tensors, _SEED], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]
