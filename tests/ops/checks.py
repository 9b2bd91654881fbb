"""What the tests of every op share: compiled cells, implementations, bit-for-bit comparisons."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import cells as drawn
from m31jax.ops import op, oracle
from m31jax.ops.op import REFERENCE, Impl
from m31jax.ops.weight import Format, Weight

ALL_ROWS = 64
ROW_COUNTS = (1, 2, 3, 7, 8, 9, 17)
FEW_ROW_COUNTS = (1, 9)


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
    """A compiled implementation against the compiled reference; skips what it does not cover."""
    try:
        out = run(stem, number, impl)
    except op.NoImplementation:
        raise
    except NotImplementedError as limit:
        pytest.skip(f"{impl.kind} on {impl.arch}: {limit}")
    oracle.module(stem).compare(out, run(stem, number))


@functools.cache
def inputs(stem: str, number: int) -> dict[str, Any]:
    """Arguments of one cell; the same on each call, not to be changed."""
    module = oracle.module(stem)
    return module.make_inputs(module.CELLS[number].spec, jax.random.key(number))


@functools.cache
def _compiled(stem: str, number: int, impl: Impl) -> Callable[..., Any]:
    return jax.jit(oracle.bind(stem, inputs(stem, number), impl)[0])


def run(stem: str, number: int, impl: Impl = REFERENCE, **changed: Any) -> Any:
    """A compiled implementation on one cell, with some of its array arguments replaced."""
    _, arrays = oracle.bind(stem, inputs(stem, number), impl)
    unknown = set(changed) - set(arrays)
    assert not unknown, f"{unknown} are no array arguments of {stem}; they are fixed in the cell"
    return _compiled(stem, number, impl)(arrays | changed)


def assert_teeth(stem: str, number: int, wrong: Any) -> None:
    """`compare` must refuse a wrong result, and accept the right one."""
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


def row_counts(*variants: Any) -> Callable[..., Any]:
    """Parametrise `variant`, and `counts` over a few row counts, or all of them as a long test."""
    sets = [
        pytest.param(FEW_ROW_COUNTS, id="few"),
        pytest.param(ROW_COUNTS, id="all", marks=pytest.mark.long),
    ]

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        test = pytest.mark.parametrize("counts", sets)(test)
        return pytest.mark.parametrize("variant", variants)(test)

    return mark


def assert_row_counts(
    fn: Callable[..., Any], rows: Any, rest: Any = (), counts: tuple[int, ...] = ROW_COUNTS
) -> None:
    """Results of a few rows are those of 64 rows, bit for bit, compiled for each count.

    Args:
      fn: (rows, rest) -> pytree with one leading axis of rows.
      rows: pytree of arrays with 64 leading rows. rest: arrays that all rows share.
    """
    wrong = row_counts_that_differ(fn, rows, rest, counts)
    assert not wrong, f"rows change with the row count, at {wrong} rows against {ALL_ROWS}"


def row_counts_that_differ(
    fn: Callable[..., Any], rows: Any, rest: Any = (), counts: tuple[int, ...] = ROW_COUNTS
) -> list[int]:
    """Row counts whose results are not the first rows of the result of 64."""
    compiled = jax.jit(lambda rows, rest: fn(rows, rest))  # a new function is traced anew

    def first(tree: Any, count: int) -> Any:
        return jax.tree.map(lambda x: np.asarray(x)[:count], tree)

    whole = compiled(rows, rest)
    return [n for n in counts if not same_bits(compiled(first(rows, n), rest), first(whole, n))]


def untile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the promise: run every op on its live rows at once instead of over fixed tiles."""

    def direct(fn: Callable[..., Any], *rows: Any) -> Any:
        return fn(*rows)

    for stem in oracle.STEMS:
        monkeypatch.setattr(oracle.module(stem), "map_tiles", direct)


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    """Standard normal values, drawn on the host: an eager JAX draw compiles once a shape."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


def cast(weight: Weight, dtype: str) -> Weight:
    """A dense weight in another dtype; quantised ones stay."""
    return Weight(weight.data.astype(dtype)) if weight.scale is None else weight


def weight(seed: int, *shape: int, fmt: Format = "dense", dtype: str = "float32") -> Weight:
    """A random weight of one format."""
    return cast(drawn.weight(np.random.default_rng(seed), shape, fmt), dtype)
