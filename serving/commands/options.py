"""Options that several commands share, and how a command answers."""

import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from m31jax import Engine

json_option = click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object.")

_ENGINE_OPTIONS = (
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, metavar="N",
                 help="Devices to shard over."),
    click.option("--target", metavar="NAME", help="Target; this machine's by default."),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16"]),
                 help="Activations and unquantised weights."),
    click.option("--kv-dtype", type=click.Choice(["f32", "bf16", "fp8", "nvfp4"]),
                 help="How K and V are stored."),
    click.option("--index-dtype", type=click.Choice(["f32", "bf16", "fp8", "nvfp4"]),
                 help="How index keys are stored."),
    click.option("--activation-quant", type=click.Choice(["vendor", "none"]),
                 help="Activations of NVFP4 experts: the vendor's 4-bit rule, or as they are."),
    click.option("--drafter", default="auto", show_default=True, metavar="DIR|none",
                 help="Drafter for speculation: `auto` takes MODEL's own, if it has one."),
    click.option("--draft-tokens", type=click.IntRange(0), metavar="K",
                 help="Tokens drafted a step."),
)  # fmt: skip


def engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `Engine.load`; the command gets them as keyword arguments."""
    for option in reversed(_ENGINE_OPTIONS):
        function = option(function)
    return function


def load_engine(model: str | os.PathLike[str], options: Mapping[str, Any]) -> "Engine":
    """`Engine.load` with the values of `engine_options`; progress on stderr."""
    start_logging()
    from m31jax import Engine

    chosen = dict(options)
    if chosen.get("drafter") == "none":
        chosen["drafter"] = None
    return Engine.load(model, **chosen)


class _Stderr(logging.Handler):
    """Writes to whatever stderr is when a record comes, not when logging was set up."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def start_logging() -> None:
    """Log m31jax to stderr at the level of M31JAX_LOG."""
    from m31jax import switches

    log = logging.getLogger("m31jax")
    log.setLevel(switches.log_level(os.environ).upper())
    if not any(isinstance(handler, _Stderr) for handler in log.handlers):
        log.addHandler(_Stderr())
        log.propagate = False


def say(message: str) -> None:
    """A line for the person, on stderr."""
    click.echo(message, err=True)


def answer_json(value: Mapping[str, Any]) -> None:
    """The answer of `--json`: one object on one line of stdout."""
    click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain))


def _plain(value: Any) -> Any:
    """What json does not know and answers hold: NumPy numbers and arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
