"""The command `hqconv`: its commands, wrong command lines, and streams. Heavy libraries are imported in functions."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from hqconv.cli import commands, interrupt
from hqconv.cli.output import ClosedStream, discard_stdout, print_error, say
from hqconv.errors import OutputError, RequestError
from hqconv.version import __version__

# Typer does not export UsageError and contains its own Click.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class CommandGroup(TyperGroup):
    """Group of all commands. A wrong command line is one message of hqconv, with --json also a JSON document."""

    def main(self, args: Sequence[str] | None = None, *positional: Any, **options: Any) -> NoReturn:
        """Run the command of a command line, and exit."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(given, *positional, **{**options, "standalone_mode": False})
        except SystemExit:  # raised by rich where the reader of the help has gone away, and after a shell completion
            discard_stdout()
            code = 0
        except OSError as error:
            discard_stdout()
            say(f"error: The help cannot be printed: {error.strerror or error}.")
            code = OutputError.exit_code
        except _UsageError as error:
            wrong = _request_error(error, given)
            say(f"error: {wrong.message()}")
            if "--json" in given:
                print_error(wrong, wrong.exit_code)
            code = wrong.exit_code
        sys.exit(code)


def _request_error(error: Any, args: Sequence[str]) -> RequestError:
    """Return the RequestError for a usage error of Typer: its command, and what is wrong."""
    path = " ".join(
        ["hqconv", *(args[:1] if error.ctx is None else error.ctx.command_path.split()[1:])]
    )
    listed = "commands" if path == "hqconv" else "options"
    return RequestError(
        "The command line is wrong.",
        where=path,
        found=error.format_message().replace("Value error, ", ""),
        remedy=f"`{path} --help` lists the {listed}.",
    )


app = typer.Typer(
    cls=CommandGroup,
    help="Convert Mixture-of-Experts checkpoints into artifacts that the Humming GPU kernels run without repacking.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Version = Annotated[bool, typer.Option("--version", help="Show the version and exit.")]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: Version = False) -> None:
    if version:
        print(f"hqconv {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


for _command in (
    *(
        commands.convert,
        commands.allocate,
        commands.verify,
        commands.report,
        commands.warm,
        commands.push,
    ),
    *(commands.publish, commands.evaluate, commands.check, commands.inspect, commands.schemas),
):
    app.command()(_command)


def main() -> None:
    """Entry point of the `hqconv` command."""
    from hqconv.io.file_access import raise_limit

    interrupt.listen()
    raise_limit()
    if sys.stdout is None:  # closed by the shell: >&-
        sys.stdout = ClosedStream()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    app(prog_name="hqconv")
