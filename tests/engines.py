"""Small models that several tests share: made once a run, loaded once a worker."""

import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np

from m31jax import Engine
from m31jax.checkpoint import make
from m31jax.config import ModelConfig
from m31jax.presets import TINY
from tests.golden import golden_dir

MINI = dataclasses.replace(
    TINY,
    num_layers=2,
    hidden_size=64,
    vocab_size=96,
    num_heads=8,
    num_kv_heads=2,
    index_num_heads=2,
    head_dim=32,
    index_head_dim=32,
    rotary_dim=16,
    intermediate_size=32,
    dense_intermediate_size=64,
    shared_intermediate_size=48,
    moe_layers=(False, True),
    sparse_layers=(False, True),
    sparse_block_size=16,
    topk_blocks=3,
    init_blocks=1,
    local_blocks=1,
    max_position_embeddings=1024,
    bos_token_id=94,
    eos_token_ids=(95,),
)
"""M3 in two layers: full attention with a dense MLP, then sparse attention with experts."""

_FOLDER = tempfile.TemporaryDirectory(prefix="m31jax-tests-")


@functools.cache
def checkpoint(name: str, fmt: str) -> Path:
    """A random checkpoint of `mini` or `tiny` in `bf16`, `mxfp8` or `nvfp4`."""
    config: ModelConfig = {"mini": MINI, "tiny": TINY}[name]
    folder = Path(_FOLDER.name) / f"{name}-{fmt}"
    make.make(make.with_format(config, fmt), folder, seed=5, progress=False)
    return folder


@functools.cache
def mini(**options) -> Engine:
    """An engine of the BF16 `mini`."""
    return Engine.load(checkpoint("mini", "bf16"), progress=False, **options)


@functools.cache
def tiny(fmt: str = "nvfp4", **options) -> Engine:
    """An engine of the `tiny` preset."""
    return Engine.load(checkpoint("tiny", fmt), progress=False, **options)


@functools.cache
def golden(which: str, **options) -> Engine:
    """An engine of `hf_tiny_a` or `hf_tiny_k`."""
    return Engine.load(golden_dir() / f"hf_tiny_{which}", progress=False, **options)


@functools.cache
def golden_arrays(which: str) -> dict[str, np.ndarray]:
    """What the outside implementation computed for them."""
    with np.load(golden_dir() / f"hf_tiny_{which}" / "golden.npz") as arrays:
        return dict(arrays)


def prompt(length: int, seed: int = 0, vocab: int = 90) -> list[int]:
    """Random ids."""
    return np.random.default_rng([seed, length]).integers(0, vocab, length).tolist()
