"""Whole forward passes over one prompt: logits at every position, or everything a layer did.

They run the same rows through the same body as prefill, in a scratch state of one slot, so what
they show is what serving computes, cache formats included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import RequestError
from .model.attention import Rows
from .model.state import StateSpec
from .ops.op import ROW_TILE
from .request import Request, SamplingParams
from .runner import slot_sampling
from .steps import Observed, Steps, page_buckets

if TYPE_CHECKING:
    from .engine import Engine

_CHUNK = 64


def chunks(ids: Sequence[int], buckets: Sequence[int]) -> Iterator[tuple[int, np.ndarray, int]]:
    """(start, padded int32 ids, count) of each step of a prompt, for ascending row buckets."""
    start = 0
    while start < len(ids):
        count = min(len(ids) - start, buckets[-1])
        padded = np.zeros(next(rows for rows in buckets if rows >= count), np.int32)
        padded[:count] = ids[start : start + count]
        yield start, padded, count
        start += count


def score(engine: "Engine", ids: Sequence[int]) -> np.ndarray:
    """float32 [T, V]; see `Engine.score`."""
    seen = [np.asarray(out.logits)[:count] for out, count in _run(engine, ids, is_traced=False)]
    return np.concatenate(seen)


def trace(engine: "Engine", ids: Sequence[int]) -> dict[str, np.ndarray]:
    """See `Engine.trace`."""
    config = engine.config
    pieces: dict[str, list[np.ndarray]] = {}
    for out, count in _run(engine, ids, is_traced=True):
        assert out.layers is not None
        assert out.embedded is not None
        moe = [layer.routes for layer in out.layers if layer.routes is not None]
        tables = [layer.block_table for layer in out.layers if layer.block_table is not None]
        chunk: dict[str, list[Any]] = {
            "hidden": [out.embedded, *(layer.hidden for layer in out.layers)],
            "attn_out": [layer.attn_out for layer in out.layers],
            "mlp_out": [layer.mlp_out for layer in out.layers],
            "block_table": tables,
            "router_ids": [routes.ids for routes in moe],
            "router_weights": [routes.weights for routes in moe],
            "logits": [out.logits],
        }
        for key, arrays in chunk.items():
            if arrays:
                stacked = np.stack([np.asarray(array)[:count] for array in arrays])
                pieces.setdefault(key, []).append(_plain(stacked))
    whole = {key: np.concatenate(parts, axis=1) for key, parts in pieces.items()}
    whole["logits"] = whole["logits"][0]
    if "block_table" in whole:
        copies = whole["block_table"].shape[2] // config.index_num_heads  # ranks that share a head
        whole["block_table"] = whole["block_table"][:, :, ::copies].transpose(0, 2, 1, 3)
    return whole


def _plain(array: np.ndarray) -> np.ndarray:
    """Float arrays as float32: numpy readers do not know bfloat16."""
    return array if array.dtype.kind == "i" else array.astype(np.float32)


def _run(
    engine: "Engine", ids: Sequence[int], *, is_traced: bool
) -> Iterator[tuple[Observed, int]]:
    """Feed a prompt through a scratch state; (what came out, live rows) of each chunk."""
    limit = engine.config.max_position_embeddings
    params = SamplingParams(max_tokens=1, temperature=0.0)
    request = Request("observe", ids, params)  # pyright: ignore[reportArgumentType]
    if len(request.prompt_ids) > limit:
        raise RequestError(
            f"{len(request.prompt_ids)} ids, the model takes at most {limit}; shorten the prompt"
        )
    request.validate_for(engine.config, limit + 1, True, frozenset({"temperature"}))
    steps = _scratch(engine, len(request.prompt_ids))
    state = steps.init_state()
    row = np.arange(1, 1 + steps.spec.pages_per_slot, dtype=np.int32)
    state = steps.admit(state, np.int32(0), row, slot_sampling(request.params))
    buckets = (-(-min(_CHUNK, len(request.prompt_ids)) // ROW_TILE) * ROW_TILE,)
    for start, padded, count in chunks(request.prompt_ids, buckets):
        place = np.arange(padded.size, dtype=np.int32)
        rows = Rows(
            padded,  # pyright: ignore[reportArgumentType]
            np.zeros_like(padded),  # pyright: ignore[reportArgumentType]
            np.where(place < count, start + place, np.int32(-1)),  # pyright: ignore[reportArgumentType]
        )
        state, out = steps.observe(
            engine.params, state, rows, pages=steps.spec.pages_per_slot, is_traced=is_traced
        )
        yield out, count


def _scratch(engine: "Engine", tokens: int) -> Steps:
    """Steps over a pool just wide enough for `tokens`; one per page bucket, kept by the engine."""
    page = engine.config.page_size
    needed = -(-tokens // page)
    most = -(-engine.config.max_position_embeddings // page)
    columns = next(width for width in page_buckets(most) if width >= needed)
    if columns not in engine.scratch:
        spec: StateSpec = replace(
            engine.memory.spec, slots=1, num_pages=1 + columns, pages_per_slot=columns
        )
        engine.scratch[columns] = replace(engine.steps, spec=spec)
    return engine.scratch[columns]
