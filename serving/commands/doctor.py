"""`m31jax doctor`: what this machine is, which targets it runs, and whether every op is right."""

import importlib.metadata
import os
import platform
from typing import Any

import click

from .explain import as_lines
from .options import Failure, answer_json, json_option, keep_compiled_steps, start_logging

VERSIONS = ("m31jax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "orbax-checkpoint")
OPTIONAL_VERSIONS = ("jax-cuda13-plugin", "triton", "jax-triton", "nvidia-cutlass-dsl")


@click.command("doctor", short_help="Check this machine and every op on it.")
@click.option("--op", "ops", multiple=True, metavar="STEM", help="Only this op; repeatable.")
@json_option
def command(ops: tuple[str, ...], as_json: bool) -> None:
    """Print this machine's devices and versions, which targets can run, and each op's verdict.

    An op is run over its cells as the machine's target would run it, compiled, and held against its
    reference. Exits with 1 if any disagrees.

    \b
    Examples:
      m31jax doctor
      m31jax doctor --op index_score --json
    """
    start_logging()
    keep_compiled_steps()
    from m31jax.ops import STEMS

    unknown = sorted(set(ops) - set(STEMS))
    if unknown:
        raise click.UsageError(f"no op {', '.join(unknown)}; the ops are {', '.join(STEMS)}")
    report = machine() | {"ops": verdicts(ops or STEMS)}
    bad = sum(not row["ok"] for row in report["ops"])
    report["ok"] = bad == 0
    if as_json:
        answer_json(report)
    else:
        click.echo("\n".join(as_lines(report)))
    if bad:
        raise Failure(f"{bad} of {len(report['ops'])} cells disagree")


def machine() -> dict[str, Any]:
    """Host, versions, devices, and each target with whether it can run here."""
    import jax

    from m31jax import target
    from m31jax.errors import TargetError

    targets = {}
    for name in target.names():
        try:
            target.Target.resolve(name=name)
        except TargetError as error:
            targets[name] = str(error)
        else:
            targets[name] = "can run"
    return {
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
        "devices": [
            {"id": device.id, "platform": device.platform, "kind": device.device_kind}
            for device in jax.devices()
        ],
        "targets": targets,
    }


def versions() -> dict[str, str]:
    """Python's and each package's version; optional packages that are absent say so."""
    found = {"python": platform.python_version()}
    for name in (*VERSIONS, *OPTIONAL_VERSIONS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def verdicts(stems: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row a cell of each op, as this machine's target runs it."""
    from tqdm import tqdm

    from m31jax.ops import oracle
    from m31jax.target import Target

    target = Target.resolve()
    rows = []
    for stem in tqdm(stems, desc="ops", unit="op", leave=False):
        for number, cell in enumerate(oracle.module(stem).CELLS):
            found = oracle.verdict(stem, cell, target.impl(stem), number)
            row = {
                "op": stem,
                "impl": str(found.impl.kind),
                "arch": found.impl.arch,
                "cell": cell.why,
                "outcome": found.outcome,
                "ok": found.outcome != "disagrees",
            }
            rows.append(row if found.problem is None else row | {"problem": found.problem})
    return rows
