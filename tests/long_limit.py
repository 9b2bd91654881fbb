"""A one-layer model that allows a million tokens, with a pool for them and with a small one."""

import functools
from dataclasses import replace
from pathlib import Path

from m31jax import Engine
from m31jax.checkpoint import make
from tests import engines

MILLION = 1 << 20
CONFIG = replace(
    engines.MINI,
    num_layers=1,
    moe_layers=(False,),
    sparse_layers=(True,),
    max_position_embeddings=MILLION,
)
SMALL = MILLION // 16
PROMPT = 448


@functools.cache
def folder() -> Path:
    path = engines.checkpoint("mini", "bf16").with_name("mini-million")
    make.make(make.with_format(CONFIG, "bf16"), path, seed=5, progress=False)
    return path


@functools.cache
def engine(max_seq_len: int) -> Engine:
    """NVFP4 lanes: the pool of a million tokens takes 94 MB. The prompt is one chunk."""
    return Engine.load(
        folder(),
        kv_dtype="nvfp4",
        index_dtype="nvfp4",
        max_slots=1,
        max_seq_len=max_seq_len,
        prefill_chunk=PROMPT,
        progress=False,
    )
