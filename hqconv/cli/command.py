"""Frame of every command: its options on the command line, its log, its result, and one message for each failure."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from hqconv.cli.output import discard_stdout, logged, one_message, print_json, say, warn
from hqconv.errors import RequestError
from hqconv.io.durable_files import FileKind, output_file
from hqconv.schemas.options import ConversionArguments, RunOptions, parse_runs, plain_type

if TYPE_CHECKING:
    from hqconv.cli.render import ShownProgress
    from hqconv.planning.plan import ConversionPlan

_FILES = {
    "log_file": FileKind(
        "a log of hqconv", lambda head: bool(re.match(rb"\d{4}-[\d :,-]+ [A-Z]+ hqconv", head))
    ),
    "profile": FileKind("a profile of hqconv", lambda head: head.startswith(b'{\n  "profile_of":')),
}
_FOLDERS = ("src", "path", "source", "checkpoint", "against", "out")
_PANELS = {
    "Parallelism": ("tp", "tp_split", "ep", "expert_placement", "redundant_experts"),
    "Hugging Face Hub": ("cache_limit", "keep_source"),
    "Existing output": ("resume", "overwrite", "update"),
    "Resources": ("device", "max_memory", "max_gpu_memory", "threads", "part"),
}
_ALL = "hqconv.help_all"  # of a context: all options are shown
_USUAL = (  # parameters that the help of a `LongCommand` shows, in this order
    "src",
    "repo",
    "out",
    "schema",
    "target",
    "size",
    "bits",
    "candidates",
    "calibrate",
    "evaluate",
    "tp",
    "ep",
    "config",
    "revision",
    "branch",
    "device",
    "max_memory",
    "resume",
    "overwrite",
    "dry_run",
    "json",
    "quiet",
    "help_all",
)
# Names of options for `command`.
CONVERSION = tuple(
    option.name for option in fields(ConversionArguments) if option.metadata.get("is_flag", True)
)
RUN = tuple(option.name for option in fields(RunOptions))
MODES = ("part", "resume", "overwrite", "update")
WORK = ("device", "max_memory", "threads")
HUB = ("cache_limit", "keep_source")


def flag(text: str, *names: str, **settings: Any) -> Any:
    """Declare an option of a command. names: its flags, `--name` without any; needed where the value is a bool."""
    return typer.Option(*names, help=text.replace("[", r"\["), **settings)


def _parameter(option: Field[Any]) -> inspect.Parameter:
    """Return an option's parameter for Typer; it is None where the option is not given."""
    kind: Any = plain_type(option)
    text = option.metadata["help"]
    panel = "Quantization and layout"
    if option.default and kind is not bool:
        text += f"  [default: {option.default}]"
    if "choices" in option.metadata:
        kind = Literal[option.metadata["choices"]]
    for heading, names in _PANELS.items():
        if option.name in names:
            panel = heading
    limits = {"min": option.metadata.get("least"), "max": option.metadata.get("most")}
    name = f"--{option.name.replace('_', '-')}"
    declared = flag(text, name, rich_help_panel=panel, **limits)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, declared],
    )


class LongCommand(TyperCommand):
    """A command with many options: `--help` shows the usual ones, `--help-all` all of them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, the usual options in one panel."""
        every = self.params
        named = {param.name: param for param in self.params}
        if not ctx.meta.get(_ALL):
            self.params = [copy.copy(named[name]) for name in _USUAL if name in named]
            for param in self.params:
                param.rich_help_panel = None  # type: ignore[attr-defined]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = every


def _show_all(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[_ALL] = True
        print(ctx.get_help(), end="")
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, flag("Show all options and exit.", "--help-all", is_eager=True, callback=_show_all)
    ],
)


@dataclass(frozen=True)
class Result:
    """Document that a command prints, and its exit code. is_output: the document is all that the command makes."""

    document: Mapping[str, Any]
    exit_code: int = 0
    is_output: bool = False


class Screen:
    """Progress and warnings of a command on stderr; each warning once, and nothing if quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._warnings: set[str] = set()

    def progress(self) -> ShownProgress:
        """Return a progress display, a context manager."""
        from hqconv.cli.render import ShownProgress

        return ShownProgress(quiet=self._quiet)

    def say(self, text: str) -> None:
        """Print a sentence about the next step."""
        if not self._quiet:
            say(text)

    def warn(self, *warnings: str) -> None:
        """Print the warnings that were not printed before."""
        for warning in warnings:
            if warning not in self._warnings:
                self._warnings.add(warning)
                warn(warning, quiet=self._quiet)

    def on_plan(self, plan: ConversionPlan) -> None:
        """Print the warnings of a plan."""
        self.warn(*plan.warnings, *plan.notices)


def _show(document: Mapping[str, Any], *, json: bool, is_output: bool) -> None:
    """Print a document to stdout, as JSON or as tables.

    is_output: the document is all that the command makes, so that a stdout that cannot be written is an error. Of
    finished work it is a warning. A reader that has gone away has seen enough.
    """
    try:
        if json:
            print_json(document)
        else:
            from hqconv.cli import render  # loads rich

            render.show(dict(document))
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
    except (OSError, UnicodeError) as error:
        if is_output:
            raise
        discard_stdout()
        warn(f"The report could not be written to stdout: {error}.")


def command(*names: str) -> Callable[[Callable[..., Result]], Callable[..., None]]:
    """Make a command of a function of a Screen and of options.

    Its `**options` become the options `names` of `ConversionArguments` and `RunOptions`; those that are not given are
    left out. The result is printed, the work logged, and every failure is one message and a documented exit code.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., None]:
        def run(
            *,
            json: Annotated[
                bool, flag("Print the result as one JSON document on stdout.", "--json")
            ] = False,
            quiet: Annotated[
                bool, flag("Print errors only, plus the output of --json.", "--quiet", "-q")
            ] = False,
            verbose: Annotated[
                bool,
                flag(
                    "Log the work on stderr: stages, units, downloads, retries, devices.",
                    "--verbose",
                    "-v",
                ),
            ] = False,
            log_file: Annotated[
                str | None,
                flag("Append the log, with the files that are read and written, to this file."),
            ] = None,
            **options: Any,
        ) -> None:
            with ExitStack() as stack, one_message(json=json):  # a failure is logged as well
                from hqconv.conversion.option_values import torchrun_rank

                rank = torchrun_rank()
                given = {"log_file": log_file, **options}  # help_all is None
                given = {name: value for name, value in given.items() if value is not None}
                _check_files(given, rank)
                place = given.pop("log_file", None)
                stack.enter_context(
                    logged(function.__name__, quiet=quiet, verbose=verbose, log_file=place)
                )
                result = function(Screen(quiet=quiet or rank > 0), **given)
                if json or not quiet or result.is_output or result.exit_code:
                    _show(result.document, json=json, is_output=result.is_output)
                if result.exit_code:
                    raise typer.Exit(result.exit_code)

        known = [*fields(ConversionArguments), *fields(RunOptions)]
        own, shared = (inspect.signature(part, eval_str=True) for part in (function, run))
        parameters = [
            *list(own.parameters.values())[1:],
            *(_parameter(option) for option in known if option.name in names),
            *shared.parameters.values(),
        ]
        if "calibrate" in names:
            parameters.append(_HELP_ALL)
        run.__name__ = function.__name__
        run.__doc__ = function.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                parameter.replace(kind=parameter.KEYWORD_ONLY)
                for parameter in parameters
                if parameter.kind is not parameter.VAR_KEYWORD
            ]
        )
        return run

    return decorate


def _check_files(options: dict[str, Any], rank: int) -> None:
    """Put the places of the log and the profile into the options, checked before any work.

    Neither may lie in a source or an artifact, or be the other one. rank: of torchrun, which gives the same command
    line to all its processes.
    """
    folders = [Path(options[name]) for name in _FOLDERS if name in options]
    for name, kind in _FILES.items():
        if name in options:
            path = Path(options[name])
            if rank:
                path = path.with_name(f"{path.name}.rank{rank}")
            options[name] = output_file(path, f"--{name.replace('_', '-')}", kind, folders)
            folders.append(options[name])


def parse_numbers(text: str, name: str, least: int = 0) -> list[int]:
    """Parse numbers and runs, such as 0,3-5. Raises RequestError for anything else, and for numbers below `least`."""
    runs = parse_runs(text, name)
    numbers = [number for first, last in runs for number in range(first, last + 1)]
    if not numbers or min(numbers) < least:
        raise RequestError(
            "The numbers cannot be used.",
            where=name,
            expected=f"numbers from {least} up, such as 1,3-5",
            found=text,
        )
    return numbers
