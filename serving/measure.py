"""Measures the steps of an engine: how long, how far from the floor, and where the time goes."""

import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m31jax import Engine

_PROFILED_STEPS = 4


@dataclass(frozen=True)
class Timed:
    """Wall time of a call: until it returned (`host_us`), and until its result was on the host."""

    host_us: float
    total_us: float


def step_rows(
    engine: "Engine", *, context: int, repeats: int, counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows for the prefill of one prompt, and for decode with each number of live slots.

    Args:
      context: tokens in every slot when decode starts. repeats: timed calls of each kind.
      counts: live slots; at most the engine's.
    """
    from m31jax import compiles

    prompt = [token % engine.config.vocab_size for token in range(1, context + 1)]
    bandwidth = read_bandwidth()
    state = engine.init_state()
    longest = context + repeats + _PROFILED_STEPS + 2
    rows = []

    def prefill() -> Any:
        nonlocal state
        state, token = engine.prefill(engine.params, state, 0, prompt)
        return token

    def decode() -> Any:
        nonlocal state
        state, drawn = engine.step(engine.params, state, context=longest, is_greedy=True)
        return drawn.token

    def row(phase: str, live: int, tokens: int, call: Callable[[], Any]) -> dict[str, Any]:
        before = compiles.counter().count
        call().block_until_ready()
        compiled = compiles.counter().count - before
        times = [timed(call) for _ in range(repeats)]
        total = [t.total_us for t in times]
        median = statistics.median(total)
        late = compiles.counter().count - before - compiled
        return {
            "op": "step",
            "ok": late == 0,
            "phase": phase,
            "live_slots": live,
            "context": context,
            "median_us": median,
            "min_us": min(total),
            "max_us": max(total),
            "host_us": statistics.median(t.host_us for t in times),
            "repeats": repeats,
            "late_compiles": late,
            "tokens_per_s": tokens / median * 1e6,
        }

    rows.append(row("prefill", 1, len(prompt), prefill))
    state = engine.free(state, 0)
    for live in counts:
        state = engine.init_state()
        for slot in range(live):
            state, _ = engine.prefill(engine.params, state, slot, prompt)
        measured = row("decode", live, live, decode)
        moved = bytes_read(engine, live, context)
        floor = moved / bandwidth * 1e6
        hlo = decode_hlo(engine, state, longest)
        measured |= {
            "bytes": moved,
            "bandwidth_bytes_per_s": bandwidth,
            "floor_us": floor,
            "ratio": measured["median_us"] / floor,
            "where": where_time_goes(decode, hlo),
        }
        rows.append(measured)
    return rows


def timed(call: Callable[[], Any]) -> Timed:
    """Time one call, and the copy of its result to the host."""
    import numpy as np

    start = time.perf_counter()
    out = call()
    returned = time.perf_counter()
    np.asarray(out)
    return Timed((returned - start) * 1e6, (time.perf_counter() - start) * 1e6)


def read_bandwidth(size_bytes: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes a second at which this device sums a large float32 array; the best of `repeats`."""
    import jax
    import jax.numpy as jnp

    data = jnp.ones(size_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(data).block_until_ready()
    best = min(timed(lambda: total(data)).total_us for _ in range(repeats))
    return size_bytes / best * 1e6


def bytes_read(engine: "Engine", live: int, context: int) -> int:
    """Bytes that a decode step has to read, over all ranks: weights and cache.

    Of the routed experts as many as `live` rows reach on average when each draws its experts
    uniformly; of the embedding a row each; of K and V the chosen blocks, of index keys all.
    """
    from m31jax.checkpoint.plan import plan
    from m31jax.model.state import lane_shapes

    config, tp = engine.config, engine.target.tp
    reached = 1 - (1 - config.experts_per_token / config.num_experts) ** live
    weights = 0.0
    for name, size in plan(config, tp, engine.numerics.dtype).parameters.items():
        if name == "embed_tokens.weight" and not config.tie_word_embeddings:
            size = live * size / config.vocab_size
        elif ".moe.experts." in name:
            size *= reached
        weights += size * tp
    pages = -(-context // config.page_size)
    chosen = min(pages, config.topk_blocks)
    cache = 0
    for name, lane in lane_shapes(engine.memory.spec, num_pages=1).items():
        layer_bytes = lane.dtype.itemsize
        for size in lane.shape[1:]:
            layer_bytes *= size
        if name.startswith("index_"):
            cache += lane.shape[0] * pages * layer_bytes
        else:
            cache += sum(chosen if s else pages for s in config.sparse_layers) * layer_bytes
    return int(weights) + live * cache


def decode_hlo(engine: "Engine", state: Any, context: int) -> str:
    """The compiled decode step as text, for the scope that each instruction belongs to."""
    import numpy as np

    from m31jax.ops.op import ROW_TILE

    slots = np.arange(engine.memory.spec.slots, dtype=np.int32)
    rows = -(-len(slots) // ROW_TILE) * ROW_TILE
    padded = np.full(rows, -1, np.int32)
    padded[: len(slots)] = slots
    lowered = engine.steps.decode.lower(  # pyright: ignore[reportFunctionMemberAccess]
        engine.params,
        state,
        padded,
        pages=engine.page_bucket(context + 1),
        is_greedy=True,
    )
    return lowered.compile().as_text()


def where_time_goes(step: Callable[[], Any], hlo: str) -> dict[str, float]:
    """Share of the device's busy time that each op takes in a few profiled steps, largest first."""
    import jax

    from m31jax.ops import STEMS

    scopes = instruction_scopes(hlo, STEMS)
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        for _ in range(_PROFILED_STEPS):
            step().block_until_ready()
        jax.profiler.stop_trace()
        busy: dict[str, float] = defaultdict(float)
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    events = [
                        (event.name, event.start_ns, event.duration_ns)
                        for event in line.events
                        if event.name in scopes
                    ]
                    for scope, time_ns in self_times(events, scopes).items():
                        busy[scope] += time_ns
    total = sum(busy.values())
    ranked = sorted(busy.items(), key=lambda item: -item[1])
    return {scope: time_ns / total for scope, time_ns in ranked} if total else {}


def instruction_scopes(hlo: str, stems: Iterable[str]) -> dict[str, str]:
    """HLO instruction -> the op whose named scope it is in, the outermost; else `other`."""
    known = set(stems)
    scopes = {}
    for match in re.finditer(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$", hlo, re.MULTILINE):
        name = re.search(r'op_name="([^"]*)"', match[2])
        path = name[1].split("/") if name else []
        scopes[match[1]] = next((part for part in path if part in known), "other")
    return scopes


def self_times(
    events: Iterable[tuple[str, float, float]], scopes: Mapping[str, str]
) -> dict[str, float]:
    """Time of each scope on one thread, a loop's own time without that of its body.

    Args:
      events: (instruction, start, duration), in any order; they nest or follow each other.
    """
    busy: dict[str, float] = defaultdict(float)
    open_: list[tuple[str, float]] = []  # (scope, end)
    for name, start, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while open_ and open_[-1][1] <= start:
            open_.pop()
        if open_:
            busy[open_[-1][0]] -= duration
        busy[scopes[name]] += duration
        open_.append((scopes[name], start + duration))
    return busy
