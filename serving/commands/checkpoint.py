"""`m31jax checkpoint`: make, inspect and convert checkpoint directories."""

import os
from pathlib import Path
from typing import Any

import click

from .explain import as_lines
from .options import (
    FORMATS,
    PRESETS,
    Failure,
    answer_json,
    json_option,
    simulate_devices,
    start_logging,
)


@click.group("checkpoint", short_help="Make, inspect and convert checkpoints.")
def command() -> None:
    """Make, inspect and convert checkpoint directories.

    \b
    Example: m31jax checkpoint inspect ./MiniMax-M3
    """


@command.command("make", short_help="Write a random, or a re-quantised, checkpoint.")
@click.option("--preset", type=click.Choice(PRESETS), help="Shapes of a random checkpoint.")
@click.option("--from", "source", metavar="MODEL", help="Re-quantise this BF16 checkpoint.")
@click.option(
    "--drafter-for", "target", metavar="MODEL", help="Add a random drafter to this checkpoint."
)
@click.option("--format", "form", type=click.Choice(FORMATS), help="How weights are stored.")
@click.option("--drafter", is_flag=True, help="Add a random drafter, in dspark/.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    metavar="S",
    help="The same seed gives the same bytes.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where to write; absent or empty.",
)
@json_option
def make(
    preset: str | None,
    source: str | None,
    target: str | None,
    form: str | None,
    drafter: bool,
    seed: int,
    dry_run: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a checkpoint in the released layout.

    With --preset a random one, with --from the weights of a BF16 checkpoint in another format. With
    --drafter-for nothing but a random drafter, beside the checkpoint's own files.

    \b
    Examples:
      m31jax checkpoint make --preset tiny --format nvfp4 --output DIR
      m31jax checkpoint make --preset full --format nvfp4 --drafter --dry-run --json
      m31jax checkpoint make --from ./MiniMax-M3 --format mxfp8 --output DIR
      m31jax checkpoint make --drafter-for ./MiniMax-M3.1
    """
    if sum(given is not None for given in (preset, source, target)) != 1:
        raise click.UsageError("give exactly one of --preset, --from and --drafter-for")
    if target is None and form is None:
        raise click.UsageError(f"give --format, one of {', '.join(FORMATS)}")
    if target is not None and (form is not None or output is not None or drafter):
        raise click.UsageError("--drafter-for takes no --format, --output or --drafter")
    if source is not None and (form == "bf16" or drafter):
        raise click.UsageError("--from takes --format mxfp8 or nvfp4, and no --drafter")
    if dry_run and preset is None:
        raise click.UsageError("--dry-run goes with --preset")
    if output is None and target is None and not dry_run:
        raise click.UsageError("give --output DIR, or --dry-run")
    start_logging()
    from m31jax import presets
    from m31jax.checkpoint import make, requantise

    if preset is not None and form is not None:
        config = make.with_format(presets.PRESETS[preset], form)
        if dry_run:
            done = make.dry_run(config, drafter=drafter)
        else:
            assert output is not None
            done = make.make(config, output, seed=seed, drafter=drafter)
    elif source is not None and form is not None:
        assert output is not None
        done = requantise.requantise(locate(source), output, form)
    else:
        assert target is not None
        output = locate(target)
        done = make.add_drafter(output, seed=seed)
    answer({"output": None if dry_run else str(output)} | done, as_json)


@command.command("inspect", short_help="Say what a directory holds, and what is wrong.")
@click.argument("model")
@click.option(
    "--values/--no-values",
    "read_values",
    default=None,
    help="Look for NaN and bad scales in every tensor; by default up to 1 GiB.",
)
@json_option
def inspect(model: str, read_values: bool | None, as_json: bool) -> None:
    """Say what MODEL holds, what would be loaded from it, and everything that is wrong with it.

    Exits with 1 if anything is wrong.

    \b
    Examples:
      m31jax checkpoint inspect tiny
      m31jax checkpoint inspect ./MiniMax-M3.1 --values --json
    """
    start_logging()
    from m31jax.checkpoint.inspect import inspect

    report = inspect(locate(model), read_values=read_values)
    answer(report, as_json)
    if report["problems"]:
        raise Failure(f"{model} has {len(report['problems'])} problems")


@command.command("convert", short_help="Convert to Orbax, laid out for a width, and back.")
@click.argument("model")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Where to write; absent or empty.",
)
@click.option("--tp", type=click.IntRange(1), metavar="N", help="Ranks to lay out for; 1.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of BF16 tensors in memory; float32.",
)
@json_option
def convert(model: str, output: Path, tp: int | None, dtype: str | None, as_json: bool) -> None:
    """Convert a Hugging Face checkpoint to an Orbax one, or an Orbax one back, bit for bit.

    \b
    Examples:
      m31jax checkpoint convert ./MiniMax-M3.1 --tp 8 --output DIR
      m31jax checkpoint convert ./converted --output DIR
    """
    start_logging()
    from m31jax.checkpoint import convert, orbax

    path = locate(model)
    if not orbax.is_orbax(path):
        import jax
        import jax.numpy as jnp

        simulate_devices(tp or 1)
        stored = jnp.dtype(dtype or "float32")
        done = convert.to_orbax(path, output, tp or 1, stored, devices=jax.devices())
    elif tp is not None or dtype is not None:
        raise click.UsageError(
            f"{model} is an Orbax conversion; the way back takes no --tp, --dtype"
        )
    else:
        done = convert.to_hf(path, output)
    answer({"output": str(output)} | done, as_json)


def locate(model: str) -> Path:
    """The directory that MODEL means."""
    from m31jax import bundled, switches

    return bundled.locate(model, switches.cache_dir(os.environ))


def answer(value: dict[str, Any], as_json: bool) -> None:
    """The answer, as JSON or as lines."""
    if as_json:
        answer_json(value)
    else:
        click.echo("\n".join(as_lines(value)))
