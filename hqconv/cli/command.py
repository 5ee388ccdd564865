"""Frame of every command: parameters, logging, the printed result, one message and exit code for every failure."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from hqconv.cli.options import at_home, takes
from hqconv.cli.output import discard_stdout, logged, one_message, print_json, warn


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


def command(function: Callable[..., Any], *own: str, is_artifact: bool = False) -> Callable[..., Callable[..., None]]:
    """Decorate a command with the parameters of an API function, its `own` and the shared options: see `takes`.

    Its result is printed, its work logged, and every failure is one message and a documented exit code.
    """

    def decorate(run: Callable[..., Result]) -> Callable[..., None]:
        wanted = inspect.signature(run).parameters

        @wraps(run)
        def guarded(*, json: bool, quiet: bool, verbose: bool, log_file: Path | None, **options: Any) -> None:
            with ExitStack() as stack, one_message(json=json):  # a failure is logged as well
                stack.enter_context(logged(run.__name__, quiet=quiet, verbose=verbose, log_file=log_file))
                options = {name: at_home(value) for name, value in options.items()}
                options |= {name: value for name, value in (("json", json), ("quiet", quiet)) if name in wanted}
                result = run(**options)
                is_dry_run = bool(options.get("dry_run"))
                if result.document is not None and (json or not quiet or is_dry_run):
                    show(result.document, json=json, is_output=result.is_output)
                if result.exit_code:
                    raise typer.Exit(result.exit_code)

        return takes(function, *own, is_artifact=is_artifact, has_context="context" in wanted)(guarded)

    return decorate
