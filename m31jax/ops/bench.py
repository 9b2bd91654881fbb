"""Times every cell of an op with every implementation: `python -m m31jax.ops.bench <stem>...`.

A timed program makes several calls one after the other, each on its own copy of the inputs, so that
the copies together push each other out of the cache: in decode every weight is read once a step.
Programs of one cell take turns. The launch of a program is shared by its calls. An op that returns
the cache writes a new pool here, because a benchmark cannot donate what it uses again.
"""

import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import jax
import jax.numpy as jnp

from . import STEMS, oracle
from .op import Cell, Impl, Kind

COLD_BYTES = 128 << 20
"""Copies of the inputs exceed this together, where `MAX_COPIES` allows: twice the L2 of an H200."""

MAX_COPIES = 32
CPU_NOTE = "measured on CPU: compare figures of this run as ratios; none says anything of a GPU"


def run(
    stems: Sequence[str],
    *,
    kinds: Sequence[Kind | str] | None = None,
    rounds: int = 10,
) -> list[dict[str, Any]]:
    """One row a cell and implementation.

    Row keys: `op`, `cell`, `impl`, `arch`, `ok` (agrees with the reference; null where the
    implementation does not cover the cell, with `problem`), `device`, `versions`; and for what ran:
    `median_us`, `p10_us`, `p90_us` of one call over `rounds` programs, `calls` in each, `is_cold`
    (the copies exceed `COLD_BYTES`), `bytes_moved` (compulsory), `gb_s`, `floor_us` (this device
    reading that many bytes, measured in turn with the op), `ratio_to_floor`; `note` on CPU.

    Args:
      stems: ops. kinds: only these kinds of implementation. rounds: timed programs a row.
    Raises:
      ValueError: an unknown op or kind; names the known ones.
    """
    device = oracle.device()
    about: dict[str, Any] = {"device": device.device_kind, "versions": versions()}
    if device.platform == "cpu":
        about["note"] = CPU_NOTE
    wanted = None if kinds is None else {oracle.kind_of(kind) for kind in kinds}
    rows = []
    for stem in stems:
        impls = [
            impl
            for impl in oracle.implementations(stem, oracle.arch_of(device))
            if wanted is None or impl.kind in wanted
        ]
        for number, cell in enumerate(oracle.module(stem).CELLS):
            rows += [row | about for row in _measure(stem, cell, number, impls, rounds)]
    return rows


def versions() -> dict[str, str]:
    """Python's and the packages' versions that decide what was measured."""
    names = ("m31jax", "jax", "jaxlib")
    return {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names}


def _measure(
    stem: str, cell: Cell, seed: int, impls: Sequence[Impl], rounds: int
) -> list[dict[str, Any]]:
    op = oracle.module(stem)
    inputs = op.make_inputs(cell.spec, jax.random.key(seed))
    moved = op.bytes_moved(cell.spec)
    verdicts = [oracle.verdict(stem, cell, impl, seed) for impl in impls]
    timed: dict[str, Callable[[], None]] = {}
    calls, is_cold = 1, False
    for verdict in verdicts:
        if verdict.outcome != "not covered":
            call, arrays = oracle.bind(stem, inputs, verdict.impl)
            calls, is_cold = _copies(arrays)
            timed[verdict.impl.kind] = _program(call, arrays, calls)
    timed["floor"] = _program(_read, jnp.ones(max(1, moved // 4), jnp.float32), calls)
    samples = _take_turns(timed, rounds, calls)
    floor = statistics.median(samples["floor"])
    rows = []
    for verdict in verdicts:
        row = {
            "op": stem,
            "cell": cell.why,
            "impl": str(verdict.impl.kind),
            "arch": verdict.impl.arch,
            "ok": None if verdict.outcome == "not covered" else verdict.outcome == "agrees",
        }
        if verdict.problem is not None:
            row["problem"] = verdict.problem
        if verdict.impl.kind in samples:
            taken = samples[verdict.impl.kind]
            median = statistics.median(taken)
            spread = statistics.quantiles(taken, n=10, method="inclusive")
            row |= {
                "median_us": round(median, 3),
                "p10_us": round(spread[0], 3),
                "p90_us": round(spread[-1], 3),
                "calls": calls,
                "is_cold": is_cold,
                "bytes_moved": moved,
                "gb_s": round(moved / median / 1e3, 3),
                "floor_us": round(floor, 3),
                "ratio_to_floor": round(median / floor, 3),
            }
        rows.append(row)
    return rows


def _copies(arrays: Any) -> tuple[int, bool]:
    """(calls of one program, whether their inputs exceed the cache together)."""
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    if oracle.device().platform == "cpu":
        return 2, False
    count = min(MAX_COPIES, max(2, -(-COLD_BYTES // held)))
    return count, count * held >= COLD_BYTES


def _program(call: Callable[[Any], Any], arrays: Any, calls: int) -> Callable[[], None]:
    """A compiled and warmed program of `calls` calls, each on a copy of `arrays`."""
    copies = [jax.tree.map(lambda x: jnp.array(x, copy=True), arrays) for _ in range(calls)]

    def chain(copies: list[Any]) -> list[Any]:
        outs: list[Any] = []
        for own in copies:
            if outs:  # each call waits for the one before it
                own, outs[-1] = jax.lax.optimization_barrier((own, outs[-1]))
            outs.append(call(own))
        return outs

    compiled = jax.jit(chain).lower(copies).compile()

    def once() -> None:
        jax.block_until_ready(compiled(copies))

    once()
    return once


def _read(x: jax.Array) -> jax.Array:
    """Reads an array once."""
    return x.sum()


def _take_turns(
    timed: dict[str, Callable[[], None]], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Microseconds of one call, per program and round; at least two rounds."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(max(2, rounds)):
        for name, once in timed.items():
            start = time.perf_counter()
            once()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
    return samples


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a reader, one line each."""
    lines = [f"{'op':20} {'impl':10} {'us':>10} {'p90':>10} {'GB/s':>8} {'x floor':>8}  cell"]
    for row in rows:
        if "median_us" in row:
            figures = (
                f"{row['median_us']:10.1f} {row['p90_us']:10.1f} {row['gb_s']:8.2f} "
                f"{row['ratio_to_floor']:8.2f}"
            )
        else:
            figures = f"{'-':>10} {'-':>10} {'-':>8} {'-':>8}"
        problem = f"  {row['problem']}" if "problem" in row else ""
        lines.append(f"{row['op']:20} {row['impl']:10} {figures}  {row['cell']}{problem}")
    return "\n".join(lines)


@click.command("bench")
@click.argument("stems", nargs=-1, type=click.Choice(STEMS), required=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice([*Kind]), help="Repeatable.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(2))
@click.option("--json", "as_json", is_flag=True, help="A JSON list of rows instead of a table.")
def main(stems: tuple[str, ...], kinds: tuple[str, ...], rounds: int, as_json: bool) -> None:
    """Time ops; exits with 1 if one disagrees with its reference.

    Example: python -m m31jax.ops.bench index_score index_topk --json
    """
    rows = run(stems, kinds=kinds or None, rounds=rounds)
    if rows and "note" in rows[0]:
        click.echo(rows[0]["note"], err=True)
    click.echo(json.dumps(rows, indent=1) if as_json else table(rows))
    if any(row["ok"] is False for row in rows):
        raise click.ClickException("an implementation disagrees with its reference")


if __name__ == "__main__":
    main()
