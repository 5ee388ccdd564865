"""Help pages with options under headings, and messages of hqconv for wrong command lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from hqconv.cli.output import print_error, say
from hqconv.errors import RequestError
from hqconv.schemas.suggestions import close_to

# Typer does not export UsageError and may contain its own Click.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class DocumentedGroup(TyperGroup):
    """Group of all commands. A wrong command line is one message of hqconv, with --json also a JSON document."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command name."""
        with _as_request_error(list(args)):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Find the command, parse its options and run it."""
        with _as_request_error([*getattr(ctx, "_protected_args", ()), *ctx.args]):
            return super().invoke(ctx)


@contextmanager
def _as_request_error(args: list[str]) -> Iterator[None]:
    """Print a usage error of Typer as a message of hqconv, under --json also as a document; exit with 2."""
    try:
        yield
    except _UsageError as error:
        wrong = _request_error(error, args)
        say(f"error: {wrong.message()}")
        if "--json" in args:
            print_error(wrong, wrong.exit_code)
        raise typer.Exit(wrong.exit_code) from None


def _request_error(error: Any, args: list[str]) -> RequestError:
    """Return the RequestError for a usage error: its command, its option, and the option that was probably meant."""
    path = " ".join(["hqconv", *(args[:1] if error.ctx is None else error.ctx.command_path.split()[1:])])
    found, close = error.format_message().replace("Value error, ", ""), ""
    if (unknown := getattr(error, "option_name", None)) is not None and hasattr(error, "possibilities"):
        found, close = f"No such option: {unknown}", close_to(str(unknown), error.possibilities or ())
    listed = "commands" if path == "hqconv" else "options"
    remedy = f"{close} `{path} --help` lists the {listed}.".strip()
    return RequestError("The command line is wrong.", where=path, found=found, remedy=remedy)


class GroupedCommand(TyperCommand):
    """Command whose help lists options under headings, as plain text that fits in 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options under their headings; options without a heading come first."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            is_argument = param.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
