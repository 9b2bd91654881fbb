"""`m31jax explain`: what would run where, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from .options import (
    answer_json,
    engine_options,
    json_option,
    named,
    simulate_devices,
    start_logging,
)


@click.command("explain", short_help="Say what runs where, and why.")
@click.argument("model")
@engine_options
@json_option
def command(model: str, as_json: bool, **options: Any) -> None:
    """Print the resolved target of MODEL.

    Every op's implementation and why it was chosen, every switch with its state and where that came
    from, pins and kernel objects in use, and the memory plan of each device in bytes.

    \b
    Examples:
      m31jax explain tiny
      m31jax explain ./MiniMax-M3.1 --tp 8 --json
    """
    explained = explain(model, options)
    if as_json:
        answer_json(explained)
    else:
        click.echo("\n".join(as_lines(explained)))


def explain(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `Engine.load(model, **options).explain()` would say, without reading a weight."""
    start_logging()
    simulate_devices(options["tp"])
    from m31jax.deployment import Deployment

    return Deployment.resolve(model, **named(options)).explain()


def as_lines(value: Mapping[str, Any] | Sequence[Any], indent: int = 0) -> list[str]:
    """Nested dicts and lists as indented `key: value` lines; what holds no dict or list is one."""
    pad = " " * indent
    lines = []
    if not isinstance(value, Mapping):
        return [pad + as_text(inner) for inner in value]
    for key, inner in value.items():
        if is_flat(inner):
            lines.append(f"{pad}{key}: {as_text(inner)}")
        else:
            lines += [f"{pad}{key}:", *as_lines(inner, indent + 2)]
    return lines


def is_flat(value: Any) -> bool:
    """Whether a value holds no dict and no list that holds one."""
    match value:
        case dict():
            return not any(isinstance(inner, dict | list | tuple) for inner in value.values())
        case list() | tuple():
            return not any(isinstance(inner, dict) for inner in value)
    return True


def as_text(value: Any) -> str:
    """A value on one line, as a person reads it."""
    match value:
        case bool():
            return "yes" if value else "no"
        case None | [] | ():
            return "none"
        case int():
            return f"{value:,}"
        case dict():
            return ", ".join(f"{key} {as_text(inner)}" for key, inner in value.items())
        case list() | tuple():
            return ", ".join(map(as_text, value))
    return str(value)
