"""Frame of every command: parameters, logging, the printed result, one message and exit code for every failure."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from hqconv.cli.options import at_home, takes
from hqconv.cli.output import discard_stdout, logged, of_rank, one_message, print_json, warn
from hqconv.errors import RequestError
from hqconv.io.durable_files import FileKind, output_file

PAGE = FileKind(
    "a report of hqconv", lambda head: b'<meta name="generator" content="hqconv report">' in head
)
_WRITTEN = {  # parameters of commands that are output files
    "log_file": FileKind(
        "a log of hqconv", lambda head: bool(re.match(rb"\d{4}-[\d :,-]+ [A-Z]+ hqconv", head))
    ),
    "profile": FileKind("a profile of hqconv", lambda head: head.startswith(b'{\n  "profile_of":')),
    "report": PAGE,
    "page": PAGE,
}
# Parameters that are sources and artifacts.
_FOLDERS = ("src", "path", "model", "source", "checkpoint", "against", "out", "kernels")


@dataclass(frozen=True)
class Result:
    """Document that a command prints, None for nothing, and its exit code.

    is_output: the document is all that the command makes: a stdout that cannot be written is an error. Of finished work
    it is a warning.
    """

    document: Mapping[str, Any] | None
    exit_code: int = 0
    is_output: bool = False


def show(document: Mapping[str, Any], *, json: bool, is_output: bool = False) -> None:
    """Print a document to stdout, as JSON or as tables. A reader that has gone away has seen enough: no error."""
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


def _output_files(options: dict[str, Any]) -> dict[str, Path | None]:
    """Check the files that a command will write besides artifacts, before any work, and return their places.

    No other option may name the same file, and none of them may lie in a source or an artifact.
    """
    given = {
        name: Path(value)
        for name, value in options.items()
        if isinstance(value, Path) or (value and name in _FOLDERS)
    }
    folders = [given[name] for name in _FOLDERS if name in given]
    checked: dict[str, Path | None] = {}
    for name in options.keys() & _WRITTEN.keys():
        checked[name] = None
        if name not in given:
            continue
        flag = f"--{name.replace('_', '-')}" if name != "page" else "-o"
        path = given[name] if name in ("page", "report") else of_rank(given[name])
        if twice := [
            other for other, value in given.items() if other != name and _is_same(value, path)
        ]:
            found = f"{path}, also of --{twice[0].replace('_', '-')}"
            raise RequestError("Two options name the same file.", where=flag, found=found)
        checked[name] = output_file(path, flag, _WRITTEN[name], folders)
    return checked


def _is_same(left: Path, right: Path) -> bool:
    try:
        return left.resolve() == right.resolve() or left.samefile(right)
    except (OSError, RuntimeError, ValueError):  # no file, or no path at all
        return False


def command(
    function: Callable[..., Any], *own: str, is_artifact: bool = False
) -> Callable[..., Callable[..., None]]:
    """Decorate a command with the parameters of an API function, its `own` and the shared options: see `takes`.

    Its result is printed, its work logged, and every failure is one message and a documented exit code.
    """

    def decorate(run: Callable[..., Result]) -> Callable[..., None]:
        wanted = inspect.signature(run).parameters

        @wraps(run)
        def guarded(
            *, json: bool, quiet: bool, verbose: bool, log_file: Path | None, **options: Any
        ) -> None:
            with ExitStack() as stack, one_message(json=json):  # a failure is logged as well
                options = {name: at_home(value) for name, value in options.items()}
                checked = _output_files({**options, "log_file": at_home(log_file)})
                log_file = checked.pop("log_file")
                stack.enter_context(
                    logged(run.__name__, quiet=quiet, verbose=verbose, log_file=log_file)
                )
                options |= checked
                own_options = {"json": json, "quiet": quiet, "log_file": log_file}
                options |= {name: value for name, value in own_options.items() if name in wanted}
                result = run(**options)
                is_dry_run = bool(options.get("dry_run"))
                if result.document is not None and (json or not quiet or is_dry_run):
                    show(result.document, json=json, is_output=result.is_output)
                if result.exit_code:
                    raise typer.Exit(result.exit_code)

        return takes(function, *own, is_artifact=is_artifact, has_context="context" in wanted)(
            guarded
        )

    return decorate
