"""Options that several commands share, and how a command answers."""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from m31jax import Engine


class Failure(click.ClickException):
    """A failure that the user can do something about, printed as one line."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print `error: ...` on stderr, or on `file`."""
        first, *rest = (line.strip() for line in self.message.splitlines())
        listed = f" {'; '.join(rest)}" if rest else ""
        click.echo(f"error: {first}{listed}", file=file, err=file is None)


PRESETS = ("tiny", "full")
FORMATS = ("bf16", "mxfp8", "nvfp4")
"""The names in `m31jax.presets`, repeated so that `--help` imports no JAX; a test compares them."""

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


def load_engine(model: str, options: Mapping[str, Any]) -> "Engine":
    """`Engine.load` with the values of `engine_options`; progress on stderr."""
    start_logging()
    simulate_devices(options.get("tp", 1))
    keep_compiled_steps()
    from m31jax import Engine

    return Engine.load(model, **named(options))


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `engine_options` as `Engine.load` takes them, whose drafter "none" is None."""
    is_off = options.get("drafter") == "none"
    return {**options, "drafter": None} if is_off else dict(options)


def simulate_devices(count: int) -> None:
    """Let a machine with one CPU run as `count` devices, unless it was told how many; says so.

    Changes nothing on a machine with accelerators, whose devices are never simulated.
    """
    if count == 1 or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    if jax.default_backend() == "cpu":
        say(f"simulating {count} devices on this CPU")


COMPILED_BYTES = 4 << 30
"""Most that the folder of compiled steps may take. A limit also makes JAX lock the folder, so that
two processes cannot read what the other has half written."""


def keep_compiled_steps() -> None:
    """Keep compiled steps in the cache folder, unless JAX has been given a folder of its own.

    The tiny model's steps take half a minute to compile and none to read.
    """
    import jax

    from m31jax import switches

    if jax.config.jax_compilation_cache_dir is None:
        folder = switches.cache_dir(os.environ) / "compiled" / _instruction_set()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", COMPILED_BYTES)


def _instruction_set() -> str:
    """Names what this CPU can run: JAX's own key does not, and machines share home folders."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]


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
