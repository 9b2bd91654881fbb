"""The command line: `m31jax COMMAND`, or `python -m serving COMMAND`.

Exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage.
"""

import importlib
import warnings
from typing import Any

import click

from .commands.options import Failure

COMMANDS = ("demo", "generate", "checkpoint", "explain", "doctor", "bench")
"""Each is a module of `serving.commands`, in the order that `--help` lists them."""


class Commands(click.Group):
    """Imports a command's module when it is asked for, and reports our errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"serving.commands.{cmd_name}").command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly when the reader of stdout has gone
        except (OSError, NotImplementedError) as error:
            raise Failure(str(error)) from error
        except ValueError as error:
            # Our errors are ValueErrors; asking here, not at the top, keeps `--help` free of JAX.
            from m31jax.errors import M31Error

            if not isinstance(error, M31Error):
                raise
            raise Failure(str(error)) from error


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="m31jax")
def cli() -> None:
    """Serve MiniMax-M3 and MiniMax-M3.1 with JAX.

    \b
    Example: m31jax demo
    """


def show_warning(message: Warning | str, *_: Any) -> None:
    """A warning for the person who typed the command: without the line of code that gave it."""
    click.echo(f"warning: {message}", err=True)


def main() -> None:
    """Run the command that `sys.argv` names; never returns."""
    warnings.showwarning = show_warning
    cli(prog_name="m31jax")


if __name__ == "__main__":
    main()
