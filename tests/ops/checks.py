"""What the tests of every op share: compiled cells, implementations, bit-for-bit comparisons."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from m31jax.ops import op, oracle
from m31jax.ops.op import REFERENCE, Cell, Impl

ROW_COUNTS = (1, 2, 3, 7, 8, 9, 17)
ALL_ROWS = 64


def cells(stem: str) -> pytest.MarkDecorator:
    """Parametrise over the numbers of an op's cells."""
    found = oracle.module(stem).CELLS
    return pytest.mark.parametrize("cell", range(len(found)), ids=[cell.why for cell in found])


def implementations(stem: str) -> pytest.MarkDecorator:
    """Parametrise over cells and every implementation that this machine can be asked for."""
    arch = oracle.arch_of(oracle.device())
    pairs = [
        pytest.param(number, impl, id=f"{impl.kind}-{cell.why}")
        for impl in oracle.implementations(stem, arch)
        for number, cell in enumerate(oracle.module(stem).CELLS)
    ]
    return pytest.mark.parametrize(("cell", "impl"), pairs)


def assert_agrees(stem: str, number: int, impl: Impl) -> None:
    """One implementation against the reference on one cell; skips what it says it cannot do."""
    cell: Cell = oracle.module(stem).CELLS[number]
    verdict = oracle.verdict(stem, cell, impl, number)
    if verdict.outcome == "not covered":
        pytest.skip(f"{impl.kind} on {impl.arch}: {verdict.problem}")
    assert verdict.outcome == "agrees", verdict.problem


@functools.cache
def inputs(stem: str, number: int) -> dict[str, Any]:
    """Arguments of one cell; the same on each call, not to be changed."""
    op = oracle.module(stem)
    return op.make_inputs(op.CELLS[number].spec, jax.random.key(number))


@functools.cache
def _compiled(stem: str, number: int) -> Callable[..., Any]:
    return jax.jit(oracle.bind(stem, inputs(stem, number), REFERENCE)[0])


def run(stem: str, number: int, **changed: Any) -> Any:
    """The compiled reference on one cell, with some of its array arguments replaced."""
    _, arrays = oracle.bind(stem, inputs(stem, number), REFERENCE)
    unknown = set(changed) - set(arrays)
    assert not unknown, f"{unknown} are no array arguments of {stem}; they are fixed in the cell"
    return _compiled(stem, number)(arrays | changed)


def assert_teeth(stem: str, number: int, wrong: Any) -> None:
    """`compare` must refuse a wrong result, and accept the right one twice."""
    compare = oracle.module(stem).compare
    right = run(stem, number)
    compare(run(stem, number), right)
    with pytest.raises(AssertionError):
        compare(wrong, right)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two pytrees of arrays hold the same bytes."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


def assert_repeats(stem: str, number: int) -> None:
    """Two runs of one input agree bit for bit."""
    assert same_bits(run(stem, number), run(stem, number))


def assert_row_counts(fn: Callable[..., Any], rows: Any, rest: Any = ()) -> None:
    """Results of a few rows are those of 64 rows, bit for bit, compiled for each count.

    Args:
      fn: (rows, rest) -> pytree with one leading axis of rows.
      rows: pytree of arrays with 64 leading rows. rest: arrays that all rows share.
    """
    wrong = row_counts_that_differ(fn, rows, rest)
    assert not wrong, f"rows change with the row count, at {wrong} rows against {ALL_ROWS}"


def row_counts_that_differ(fn: Callable[..., Any], rows: Any, rest: Any = ()) -> list[int]:
    """Row counts whose results are not the first rows of the result of 64."""
    compiled = jax.jit(lambda rows, rest: fn(rows, rest))  # a new function is traced anew
    whole = compiled(rows, rest)
    wrong = []
    for count in ROW_COUNTS:
        part = compiled(jax.tree.map(lambda x, n=count: x[:n], rows), rest)
        if not same_bits(part, jax.tree.map(lambda x, n=count: x[:n], whole)):
            wrong.append(count)
    return wrong


def untile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the promise: run every op on its live rows at once instead of over fixed tiles."""
    monkeypatch.setattr(op, "map_tiles", _direct)
    for stem in oracle.STEMS:
        monkeypatch.setattr(oracle.module(stem), "map_tiles", _direct)


def _direct(fn: Callable[..., Any], *rows: Any) -> Any:
    return fn(*rows)
