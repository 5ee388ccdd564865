"""Commands whose help has its options under headings, and what becomes of a wrong command line under --json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from hqconv.cli.json_documents import print_error
from hqconv.errors import RequestError

_UsageError: type[Exception] = typer.BadParameter.__bases__[
    0
]  # Typer has no name for it, and may bring its own Click


class DocumentedGroup(TyperGroup):
    """The root of all commands: where the command line has --json and is wrong, a JSON document says so as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before the command's name."""
        with _documented(list(args)):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Find the command, parse its options, run it."""
        with _documented([*getattr(ctx, "_protected_args", ()), *ctx.args]):
            return super().invoke(ctx)


@contextmanager
def _documented(args: list[str]) -> Iterator[None]:
    """Has what Typer says of a wrong command line stand in a document as well, if there is a --json in it."""
    try:
        yield
    except _UsageError as error:
        if "--json" in args:
            found: Any = error
            path = "hqconv" if found.ctx is None else found.ctx.command_path
            what, remedy = "The command line is wrong.", f"`{path} --help` shows what there is."
            said = RequestError(what, where=path, found=found.format_message(), remedy=remedy)
            print_error(said, RequestError.exit_code)
        raise


class GroupedCommand(TyperCommand):
    """Options without a heading come first; plain text, so that it is quick and loses nothing in 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and, under their headings, the options."""
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
