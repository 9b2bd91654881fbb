"""Every `M31JAX_*` environment variable, in one table, and the one function that reads them.

`Target.resolve` calls `read` once, before anything is traced: a value read while tracing would be
frozen into the compiled step, and later changes would be ignored. Nothing is read at import.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import TargetError
from .ops.op import Kind

PREFIX = "M31JAX_"
DISABLE = "M31JAX_DISABLE_"
ENABLE = "M31JAX_ENABLE_"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Variable:
    """A variable with a value of its own."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Switch:
    """Something that is on or off: an op's fast implementation, or one optimisation.

    `M31JAX_DISABLE_<NAME>=1` turns it off and `M31JAX_ENABLE_<NAME>=1` on, whatever its default.
    """

    name: str
    default: bool
    why: str


VARIABLES = (
    Variable("M31JAX_IMPL", "op=kind,op=kind", "forces one implementation of an op"),
    Variable("M31JAX_TARGET", "target name", "the target, where neither API nor CLI names one"),
    Variable("M31JAX_LOG", "|".join(LOG_LEVELS), "log level on stderr"),
    Variable("M31JAX_CACHE_DIR", "folder", "where compiled steps and made checkpoints are kept"),
)
"""Variables that are not switches. Each op has its pair of switches for free."""

ITEMS: tuple[Switch, ...] = ()
"""Optimisations that belong to no single op, each with the reason for its default."""


@dataclass(frozen=True)
class State:
    """One switch as resolved: whether it is on, and which variable (or the default) said so."""

    name: str
    is_on: bool
    source: str
    why: str


@dataclass(frozen=True)
class Forced:
    """One `op=kind` of `M31JAX_IMPL`."""

    op: str
    kind: Kind
    source: str


@dataclass(frozen=True)
class Settings:
    """What the environment asked for. Frozen; `explain` prints it."""

    states: tuple[State, ...]
    forced: tuple[Forced, ...]
    target: str | None
    log_level: str
    cache_dir: Path

    def state(self, name: str) -> State:
        """The state of one switch; KeyError for a name that has no row."""
        for state in self.states:
            if state.name == name:
                return state
        raise KeyError(name)

    def is_on(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.state(name).is_on

    def forced_kind(self, op: str) -> Kind | None:
        """The implementation that `M31JAX_IMPL` forces for `op`, None where the target chooses."""
        return next((forced.kind for forced in self.forced if forced.op == op), None)


def read(environ: Mapping[str, str], items: Iterable[str | Switch] = ()) -> Settings:
    """Parse every `M31JAX_*` variable of `environ`; a pure function of its arguments.

    Args:
      environ: usually `os.environ`. Of names without the prefix only XDG_CACHE_HOME matters.
      items: the op stems. A stem alone is on by default (wherever the target claims a fast
        implementation); a `Switch` of that name makes one opt-in. The rows of `ITEMS` come on top.
    Raises:
      TargetError: an unknown name, op or kind (with the nearest known ones), a value that is not
        allowed, or two variables that contradict each other.
    """
    ops = {switch.name: switch for switch in map(_op_switch, items)}
    switches = ops | {switch.name: switch for switch in ITEMS}
    ours = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    _refuse_unknown(ours, switches)

    states = tuple(_state(switch, ours) for switch in switches.values())
    forced = _forced(ours.get("M31JAX_IMPL"), tuple(ops))
    for choice in forced:
        _refuse_contradiction(choice, next(state for state in states if state.name == choice.op))
    return Settings(
        states=states,
        forced=forced,
        target=_text(ours, "M31JAX_TARGET"),
        log_level=log_level(ours),
        cache_dir=cache_dir(environ),
    )


def known_names(items: Iterable[str]) -> tuple[str, ...]:
    """Every variable name that `read` accepts for these switches."""
    pairs = (prefix + item.upper() for item in items for prefix in (DISABLE, ENABLE))
    return (*(variable.name for variable in VARIABLES), *pairs)


def _op_switch(item: str | Switch) -> Switch:
    if isinstance(item, Switch):
        return item
    return Switch(item, default=True, why="the op's fast implementation, where the target has one")


def _refuse_unknown(ours: Mapping[str, str], switches: Mapping[str, Switch]) -> None:
    known = known_names(switches)
    for name in sorted(ours):
        if name not in known:
            near = _nearest(name, known) or tuple(variable.name for variable in VARIABLES)
            raise TargetError(
                f"{name} is not a variable of m31jax; the nearest are {', '.join(near)}. "
                "Unset it, or see `m31jax explain` for every switch"
            )


def _nearest(name: str, known: Iterable[str]) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(name, list(known), n=3, cutoff=0.6))


def _state(switch: Switch, ours: Mapping[str, str]) -> State:
    disable, enable = DISABLE + switch.name.upper(), ENABLE + switch.name.upper()
    said = [name for name in (disable, enable) if name in ours]
    for name in said:
        if ours[name] != "1":
            raise TargetError(f"{name}={ours[name]!r}: the only value is 1; else unset {name}")
    if len(said) == 2:
        raise TargetError(f"{disable}=1 and {enable}=1 contradict each other; unset one of them")
    if not said:
        return State(switch.name, switch.default, "default", switch.why)
    return State(switch.name, said == [enable], f"{said[0]}=1", switch.why)


def _forced(value: str | None, ops: tuple[str, ...]) -> tuple[Forced, ...]:
    if value is None:
        return ()
    forced: dict[str, Forced] = {}
    for pair in value.split(","):
        op, equals, kind = (part.strip() for part in pair.partition("="))
        if not (op and equals and kind):
            raise TargetError(
                f"M31JAX_IMPL={value!r}: {pair!r} is not op=kind; "
                "write for example M31JAX_IMPL=index_score=reference,moe_route=reference"
            )
        if op not in ops:
            near = _nearest(op, ops) or ops
            raise TargetError(
                f"M31JAX_IMPL={value!r}: there is no op {op!r}; the nearest are {', '.join(near)}"
            )
        if kind not in {known.value for known in Kind}:
            raise TargetError(
                f"M31JAX_IMPL={value!r}: {kind!r} is not a kind of implementation; "
                f"use one of {', '.join(Kind)}"
            )
        if op in forced:
            raise TargetError(f"M31JAX_IMPL={value!r}: names {op} twice; keep one")
        forced[op] = Forced(op, Kind(kind), f"M31JAX_IMPL={op}={kind}")
    return tuple(forced.values())


def _refuse_contradiction(choice: Forced, state: State) -> None:
    """Forcing a fast implementation that is switched off, or the reference of one switched on."""
    if state.source != "default" and state.is_on == (choice.kind is Kind.REFERENCE):
        raise TargetError(
            f"{choice.source} and {state.source} contradict each other; unset one of them"
        )


def _text(ours: Mapping[str, str], name: str) -> str | None:
    value = ours.get(name)
    if value is not None and not value.strip():
        raise TargetError(f"{name} is set but empty; give it a value or unset it")
    return value


def log_level(environ: Mapping[str, str]) -> str:
    """The level of M31JAX_LOG, for what logs before there is a target; TargetError as in `read`."""
    value = environ.get("M31JAX_LOG", "info")
    if value not in LOG_LEVELS:
        raise TargetError(f"M31JAX_LOG={value!r}: use one of {', '.join(LOG_LEVELS)}")
    return value


def cache_dir(environ: Mapping[str, str]) -> Path:
    """M31JAX_CACHE_DIR, or m31jax's folder in the user's cache folder. It need not exist."""
    ours = _text(environ, "M31JAX_CACHE_DIR")
    if ours is not None:
        return Path(ours)
    # The base-directory rule: an unset, empty or relative XDG_CACHE_HOME means ~/.cache.
    users = Path(environ.get("XDG_CACHE_HOME", ""))
    return (users if users.is_absolute() else Path.home() / ".cache") / "m31jax"
