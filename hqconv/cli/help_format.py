"""Help pages with options under headings, and messages of hqconv for wrong command lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from hqconv.cli.output import discard_stdout, print_error, say
from hqconv.errors import OutputError, RequestError
from hqconv.schemas.suggestions import close_to

# Typer does not export UsageError and may contain its own Click.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class DocumentedGroup(TyperGroup):
    """Group of all commands. A wrong command line is one message of hqconv, with --json also a JSON document."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the first sentence of its help, whole."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=1000)) for name, one in found if one is not None])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without breaks inside words."""
        with _whole_words(formatter):
            super().format_help(ctx, formatter)

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
    """Print a usage error of Typer as a message of hqconv, under --json also as a document; exit with 2.

    Help that cannot be printed ends with 4, or with 0 where nobody reads on.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of --help or --version has seen enough
        discard_stdout()
        raise typer.Exit from None
    except OSError as error:
        discard_stdout()
        say(f"error: The help cannot be printed: {error.strerror or error}.")
        raise typer.Exit(OutputError.exit_code) from None
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


_HYPHEN, _NO_BREAK_HYPHEN = "-", "\u2011"


@contextmanager
def _whole_words(formatter: Any) -> Iterator[None]:
    """Keep the formatter of a help page from breaking lines at hyphens, as in --dry-run."""
    write_dl, write_text = formatter.write_dl, formatter.write_text

    def joined(text: str) -> str:
        return text.replace(_HYPHEN, _NO_BREAK_HYPHEN)

    formatter.write_dl = lambda rows, *more, **options: write_dl([(a, joined(b)) for a, b in rows], *more, **options)
    formatter.write_text = lambda text: write_text(joined(text))
    yield
    formatter.buffer = [text.replace(_NO_BREAK_HYPHEN, _HYPHEN) for text in formatter.buffer]


class GroupedCommand(TyperCommand):
    """Command whose help lists options under headings, as plain text that fits in 80 columns."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without breaks inside words."""
        with _whole_words(formatter):
            super().format_help(ctx, formatter)

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
