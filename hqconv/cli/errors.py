"""Error reporting of commands: one message on stderr, an exit code and, with --json, one document."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import typer

from hqconv.cli import interrupt
from hqconv.cli.options import at_home
from hqconv.cli.output import discard_stdout, print_error, say
from hqconv.conversion.torchrun import is_rank_zero
from hqconv.errors import EXIT_BUG, EXIT_INTERRUPTED, HqconvError, OutputError, RequestError


@contextmanager
def _one_message(*, json: bool) -> Iterator[None]:
    """Turn every exception into one message on stderr and an exit code; `json`: also print a document."""
    try:
        yield
        sys.stdout.flush()
    except HqconvError as error:
        raise _fail(error, json=json) from None
    except KeyboardInterrupt:  # raised by a library; Ctrl-C is handled by `interrupt`
        text = interrupt.message()
        raise _fail(HqconvError(text), EXIT_INTERRUPTED, text, json=json) from None
    except BrokenPipeError:  # the reader of stdout is gone
        discard_stdout()
        raise typer.Exit(OutputError.exit_code) from None
    except OSError as error:
        reason, where = str(error.strerror or error), str(error.filename or "")
        text = f"error: The operating system refused: {reason}" + (f"\n  where: {where}" if where else "")
        refused = OutputError("The operating system refused.", where=where, found=reason)
        raise _fail(refused, text=text, json=json) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 - the last resort: one line instead of a traceback
        if shortage := _resource_error(error):
            raise _fail(shortage, json=json) from None
        remedy = "Set HQCONV_DEBUG=1 to see the traceback, and please report it."
        found = f"{type(error).__name__}: {error}"
        bug = HqconvError("This is a bug of hqconv.", found=found, remedy=remedy)
        text = f"internal error: {found}\n  what to do: {remedy}"
        raise _fail(bug, EXIT_BUG, text, json=json) from None


def _resource_error(error: Exception) -> RequestError | None:
    """RequestError for exhausted memory or threads, recognized from exceptions of Python and torch; else None."""
    texts = ("can't start new thread", "can't allocate memory", "not enough memory")
    if not isinstance(error, MemoryError) and not any(text in str(error) for text in texts):
        return None
    what, remedy = "The system has no more memory or threads.", "Lower --max-memory or --threads."
    return RequestError(what, found=str(error).split("\n")[0] or type(error).__name__, remedy=remedy)


def _fail(error: HqconvError, exit_code: int | None = None, text: str | None = None, *, json: bool) -> typer.Exit:
    """Print an error. exit_code, text: None for those of the error."""
    exit_code = error.exit_code if exit_code is None else exit_code
    if os.environ.get("HQCONV_DEBUG") == "1":
        traceback.print_exc()
    say(f"error: {error.message()}" if text is None else text)
    if json and is_rank_zero():  # only rank 0 prints
        print_error(error, exit_code)
    return typer.Exit(exit_code)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that every failure is one message and a documented exit code."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with _one_message(json=bool(kwargs.get("json"))):
            command(*args, **{name: at_home(value) for name, value in kwargs.items()})

    return run
