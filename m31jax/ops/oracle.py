"""Each op held against its reference, cell by cell, on the device that JAX computes on.

`m31jax doctor`, the tests and `bench` all ask here, so that one comparison decides.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from . import STEMS
from .op import Cell, Impl, Kind, NoImplementation


@dataclass(frozen=True)
class Verdict:
    """What one implementation did on one cell of an op.

    | outcome     | problem                                              |
    |-------------|------------------------------------------------------|
    | agrees      | None                                                 |
    | disagrees   | what differs, as the op's `compare` says it          |
    | not covered | the limit that the implementation states for itself  |
    """

    op: str
    cell: str
    impl: Impl
    outcome: Literal["agrees", "disagrees", "not covered"]
    problem: str | None = None


def run(stem: str, kind: Kind | str | None = None) -> list[Verdict]:
    """One verdict a cell of an op: of one kind of implementation, or of every kind that it has.

    Raises:
      ValueError: an unknown op or kind; names the known ones.
      NoImplementation: the op has no implementation of `kind`.
    """
    arch = arch_of(device())
    impls = implementations(stem, arch) if kind is None else (Impl(kind_of(kind), arch),)
    cells = enumerate(module(stem).CELLS)
    return [verdict(stem, cell, impl, number) for number, cell in cells for impl in impls]


def verdict(stem: str, cell: Cell, impl: Impl, seed: int = 0) -> Verdict:
    """Hold the compiled implementation against the reference, run on the same device.

    Raises:
      NoImplementation: the op has no implementation of that kind.
    """
    op = module(stem)
    inputs = op.make_inputs(cell.spec, jax.random.key(seed))
    call, arrays = bind(stem, inputs, impl)
    try:
        out = jax.jit(call)(arrays)
    except NoImplementation:
        raise
    except NotImplementedError as limit:
        return Verdict(stem, cell.why, impl, "not covered", str(limit))
    try:
        op.compare(out, op.reference(**inputs))
    except AssertionError as difference:
        return Verdict(stem, cell.why, impl, "disagrees", str(difference))
    return Verdict(stem, cell.why, impl, "agrees")


def implementations(stem: str, arch: str) -> tuple[Impl, ...]:
    """Every kind of implementation that an op has, for `arch`, the reference first.

    Found by tracing the op's first cell, so that an op's `match` stays the only list of them.
    """
    op = module(stem)
    inputs = op.make_inputs(op.CELLS[0].spec, jax.random.key(0))
    found = []
    for kind in Kind:
        impl = Impl(kind, arch)
        call, arrays = bind(stem, inputs, impl)
        try:
            jax.eval_shape(call, arrays)
        except NoImplementation:
            continue
        except NotImplementedError:
            pass  # there is one, with a limit that each cell's verdict will state
        found.append(impl)
    return tuple(found)


def bind(
    stem: str, inputs: dict[str, Any], impl: Impl
) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """(function of the arrays alone, the arrays) of one call of an op.

    Numbers, formats and flags are static arguments of an op; arrays and pytrees of them are traced.
    A weight that is captured instead would be a constant, and the result another one.
    """
    arrays = {
        name: value
        for name, value in inputs.items()
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
    }
    static = {name: value for name, value in inputs.items() if name not in arrays}
    op = getattr(module(stem), stem)
    return lambda arrays: op(**arrays, **static, impl=impl), arrays


def module(stem: str) -> ModuleType:
    """The module of an op.

    Raises:
      ValueError: an unknown op; names the known ones.
    """
    if stem not in STEMS:
        raise ValueError(f"no op {stem!r}; the ops are {', '.join(STEMS)}")
    return importlib.import_module(f"{__package__}.{stem}")


def kind_of(name: Kind | str) -> Kind:
    """A kind of implementation by name.

    Raises:
      ValueError: an unknown kind; names the known ones.
    """
    if name not in Kind:
        raise ValueError(f"no kind {name!r} of implementation; the kinds are {', '.join(Kind)}")
    return Kind(name)


def device() -> Any:
    """The device that uncommitted arrays land on."""
    (found,) = jnp.zeros(()).devices()
    return found


def arch_of(found: Any) -> str:
    """Architecture in the spelling of `Impl.arch`: `sm_90` of an NVIDIA GPU, else the platform."""
    if found.platform == "gpu":
        return f"sm_{found.compute_capability.replace('.', '')}"
    return found.platform
