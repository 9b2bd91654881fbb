"""`m31jax bench`: measurements, each with its floor, its device and the versions that made it."""

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from .doctor import versions
from .options import (
    FORMATS,
    Failure,
    answer_json,
    engine_options,
    json_option,
    load_engine,
    say,
    start_logging,
)


@click.group("bench", short_help="Measure.")
def command() -> None:
    """Measure what this machine does.

    \b
    Example: m31jax bench step --preset tiny
    """


@command.command("ops", short_help="Time every implementation of ops.")
@click.argument("stems", nargs=-1, metavar="[STEM]...")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only this kind of implementation; repeatable.",
)
@click.option(
    "--rounds",
    type=click.IntRange(2),
    default=10,
    show_default=True,
    metavar="N",
    help="Timed programs a row.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="F",
    help="Also write the rows to a file, as a JSON list.",
)
@json_option
def ops(
    stems: tuple[str, ...],
    kinds: tuple[str, ...],
    rounds: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time every cell of the ops STEM (all by default) with every implementation.

    Exits with 1 if an implementation disagrees with its reference.

    \b
    Examples:
      m31jax bench ops
      m31jax bench ops index_score index_topk --json
    """
    start_logging()
    from m31jax.ops import STEMS, bench
    from m31jax.ops.op import Kind

    for word, known in ((stems, STEMS), (kinds, tuple(Kind))):
        unknown = sorted(set(word) - set(known))
        if unknown:
            raise click.UsageError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
    rows = bench.run(stems or STEMS, kinds=[Kind(kind) for kind in kinds] or None, rounds=rounds)
    rows = [row | provenance() for row in rows]
    write(rows, output)
    if as_json:
        answer_json({"rows": rows})
    else:
        click.echo(bench.table(rows))
    bad = sum(row["ok"] is False for row in rows)
    if bad:
        raise Failure(f"{bad} of {len(rows)} rows disagree with their reference")


@command.command("step", short_help="Time prefill and decode steps.")
@click.argument("model", required=False)
@click.option("--preset", type=click.Choice(["tiny"]), help="A random checkpoint instead of MODEL.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="nvfp4",
    show_default=True,
    help="How the preset is stored.",
)
@click.option(
    "--slots",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    metavar="N",
    help="Slots; decode is timed with one live and with all.",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    metavar="N",
    help="Tokens in each slot before decode.",
)
@click.option(
    "--repeats",
    type=click.IntRange(2),
    default=20,
    show_default=True,
    metavar="N",
    help="Timed calls of each kind.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="F",
    help="Also write the rows to a file, as a JSON list.",
)
@engine_options
@json_option
def step(
    model: str | None,
    preset: str | None,
    form: str,
    slots: int,
    context: int,
    repeats: int,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Time the prefill of a prompt, and decode steps with one live slot and with all.

    A decode step's floor is the bytes that it has to read over the bandwidth at which this device
    sums a large array. Shares are of the time in which the device was busy.

    \b
    Examples:
      m31jax bench step --preset tiny
      m31jax bench step ./MiniMax-M3.1 --tp 8 --slots 32 --json
    """
    if (model is None) == (preset is None):
        raise click.UsageError("give either MODEL or --preset tiny")
    with ExitStack() as stack:
        if model is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = str(random_checkpoint(form, Path(folder)))
        longest = context + 2 * repeats + 16
        engine = load_engine(model, options | {"max_slots": slots, "max_seq_len": longest})
    from ..measure import step_rows

    say("compiling and measuring ...")
    rows = step_rows(engine, context=context, repeats=repeats, counts=sorted({1, slots}))
    about = provenance() | {"numerics": engine.numerics.describe(), "tp": engine.target.tp}
    rows = [row | about for row in rows]
    write(rows, output)
    if as_json:
        answer_json({"rows": rows})
    else:
        click.echo("\n".join(table(rows)))


def write(rows: list[dict[str, Any]], output: Path | None) -> None:
    """Keep rows in a file, one JSON list, if there is one."""
    if output is not None:
        output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def random_checkpoint(form: str, folder: Path) -> Path:
    """A random checkpoint of the tiny preset."""
    from m31jax import presets
    from m31jax.checkpoint import make

    make.make(make.with_format(presets.TINY, form), folder / "tiny", progress=False)
    return folder / "tiny"


def provenance() -> dict[str, Any]:
    """What made a row: command, device, versions, commit (None outside a git checkout)."""
    import jax

    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return {
        "command": " ".join(["m31jax", *sys.argv[1:]]),
        "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        "versions": versions(),
        "commit": done.stdout.strip() or None,
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows for a person."""
    first = rows[0]
    used = ("python", "jax", "jaxlib", "numpy")
    lines = [
        f"{first['device']}; " + ", ".join(f"{name} {first['versions'][name]}" for name in used),
        f"medians of {first['repeats']}, context {first['context']} tokens",
    ]
    for row in rows:
        spread = f"{row['min_us'] / 1e3:.2f} to {row['max_us'] / 1e3:.2f}"
        lines.append(
            f"{row['phase']}, {row['live_slots']} live: {row['tokens_per_s']:,.1f} tokens/s; "
            f"{row['median_us'] / 1e3:.2f} ms ({spread}), of it {row['host_us'] / 1e3:.2f} ms "
            "until the call returns"
        )
        if "floor_us" in row:
            speed = f"{row['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s"
            floor = f"floor {row['floor_us'] / 1e3:.3f} ms ({row['bytes']:,} bytes at {speed})"
            lines.append(f"  {floor}, ratio {row['ratio']:.1f}")
            shares = ", ".join(f"{name} {share:.0%}" for name, share in row["where"].items())
            lines.append(f"  where: {shares}")
    return lines
