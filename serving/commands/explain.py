"""`m31jax explain`: what would run where, and why."""

from typing import Any

import click

from .options import answer_json, engine_options, json_option, load_engine


@click.command("explain", short_help="Say what runs where, and why.")
@click.argument("model")
@engine_options
@json_option
def command(model: str, as_json: bool, **options: Any) -> None:
    """Print the resolved target of MODEL.

    Every op's implementation and why it was chosen, every switch with its state and where that came
    from, versions, and the memory plan of each device in bytes.

    \b
    Examples:
      m31jax explain tiny
      m31jax explain ./MiniMax-M3.1 --tp 8 --json
    """
    explained = load_engine(model, options).explain()
    if as_json:
        answer_json(explained)
    else:
        click.echo("\n".join(as_lines(explained)))


def as_lines(value: Any, indent: int = 0) -> list[str]:
    """Nested dicts and lists as indented `key: value` lines; a list of small dicts as one line each."""
    pad = " " * indent
    match value:
        case dict():
            lines = []
            for key, inner in value.items():
                if isinstance(inner, dict | list | tuple) and inner:
                    lines += [f"{pad}{key}:", *as_lines(inner, indent + 2)]
                else:
                    lines.append(f"{pad}{key}: {as_text(inner)}")
            return lines
        case list() | tuple() if all(isinstance(item, dict) for item in value):
            return [
                pad + ", ".join(f"{key}: {as_text(inner)}" for key, inner in item.items())
                for item in value
            ]
        case list() | tuple():
            return [f"{pad}{as_text(item)}" for item in value]
    return [f"{pad}{as_text(value)}"]


def as_text(value: Any) -> str:
    """One value as a person reads it: byte counts keep their digits, in groups of three."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict | list | tuple) and not value:
        return "none"
    return str(value)
