"""Every end of a command as one message on stderr, the contract's exit code and, under --json, one document."""

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
from hqconv.cli.json_documents import print_error
from hqconv.cli.options import at_home
from hqconv.cli.text import lead_nowhere, say
from hqconv.conversion.torchrun import is_rank_zero
from hqconv.errors import EXIT_BUG, EXIT_INTERRUPTED, HqconvError, OutputError, RequestError


@contextmanager
def _one_message(*, json: bool) -> Iterator[None]:
    """Turns every exception into one message on stderr and the contract's exit code; `json`: also into a document."""
    try:
        yield
        sys.stdout.flush()
    except HqconvError as error:
        raise _fail(error, json=json) from None
    except KeyboardInterrupt:  # raised by a library: the user's own never comes here
        text = interrupt.words()
        raise _fail(HqconvError(text), EXIT_INTERRUPTED, text, json=json) from None
    except BrokenPipeError:  # the reader of stdout went away: nobody is left to tell
        lead_nowhere()
        raise typer.Exit(OutputError.exit_code) from None
    except OSError as error:
        reason, where = str(error.strerror or error), str(error.filename or "")
        text = f"error: The operating system refused: {reason}" + (f"\n  where: {where}" if where else "")
        said = OutputError("The operating system refused.", where=where, found=reason)
        raise _fail(said, text=text, json=json) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 - the last resort: one line instead of a traceback
        if short := _what_is_short(error):
            raise _fail(short, json=json) from None
        remedy = "Set HQCONV_DEBUG=1 to see the traceback, and please report it."
        found = f"{type(error).__name__}: {error}"
        bug = HqconvError("This is a bug of hqconv.", found=found, remedy=remedy)
        text = f"internal error: {found}\n  what to do: {remedy}"
        raise _fail(bug, EXIT_BUG, text, json=json) from None


def _what_is_short(error: Exception) -> RequestError | None:
    """What to say where the system had no more memory or threads, by what Python and torch raise; else None."""
    texts = ("can't start new thread", "can't allocate memory", "not enough memory")
    if not isinstance(error, MemoryError) and not any(text in str(error) for text in texts):
        return None
    what, remedy = "The system gives no more memory, or no more threads.", "Lower --max-memory or --threads."
    return RequestError(what, found=str(error).split("\n")[0] or type(error).__name__, remedy=remedy)


def _fail(
    error: HqconvError, exit_code: int | None = None, text: str | None = None, *, json: bool
) -> typer.Exit:
    """Says what went wrong. exit_code, text: None for the error's own."""
    exit_code = error.exit_code if exit_code is None else exit_code
    if os.environ.get("HQCONV_DEBUG") == "1":
        traceback.print_exc()
    say(f"error: {error.message()}" if text is None else text)
    if json and is_rank_zero():  # of several processes the first speaks
        print_error(error, exit_code)
    return typer.Exit(exit_code)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose every end is one message and an exit code of the contract."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with _one_message(json=bool(kwargs.get("json"))):
            command(*args, **{name: at_home(value) for name, value in kwargs.items()})

    return run
