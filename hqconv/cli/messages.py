"""Every end of a command as one message on stderr and the contract's exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import typer

from hqconv.cli import stopping
from hqconv.cli.options import at_home
from hqconv.errors import EXIT_BUG, EXIT_INTERRUPTED, HqconvError, OutputError, RequestError, printable


@contextmanager
def _one_message() -> Iterator[None]:
    """Turns every exception into one message on stderr and the contract's exit code."""
    try:
        yield
        sys.stdout.flush()
    except HqconvError as error:
        raise _fail(f"error: {error.message()}", error.exit_code) from None
    except KeyboardInterrupt:  # raised by a library: the user's own never comes here
        raise _fail(stopping.words(), EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # the reader of stdout went away: nobody is left to tell
        lead_nowhere()
        raise typer.Exit(OutputError.exit_code) from None
    except OSError as error:
        place = f"\n  where: {error.filename}" if error.filename else ""
        text = f"error: The operating system refused: {error.strerror or error}{place}"
        raise _fail(text, OutputError.exit_code) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 - the last resort: one line instead of a traceback
        if short := _what_is_short(error):
            raise _fail(f"error: {short}", RequestError.exit_code) from None
        remedy = "Set HQCONV_DEBUG=1 to see the traceback, and please report it."
        text = f"internal error: {type(error).__name__}: {error}\n  what to do: {remedy}"
        raise _fail(text, EXIT_BUG) from None


def _what_is_short(error: Exception) -> str:
    """The message where the system had no more memory or threads, by what Python and torch raise; else ""."""
    texts = ("can't start new thread", "can't allocate memory", "not enough memory")
    if not isinstance(error, MemoryError) and not any(text in str(error) for text in texts):
        return ""
    what, remedy = "The system gives no more memory, or no more threads.", "Lower --max-memory or --threads."
    return RequestError(
        what, found=str(error).split("\n")[0] or type(error).__name__, remedy=remedy
    ).message()


def _fail(text: str, exit_code: int) -> typer.Exit:
    if os.environ.get("HQCONV_DEBUG") == "1":
        traceback.print_exc()
    with suppress(OSError):  # a full disk under stderr
        print(printable(text), file=sys.stderr, flush=True)
    return typer.Exit(exit_code)


def lead_nowhere() -> None:
    """What stdout still holds goes to /dev/null, so that Python does not fail over it at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose every end is one message and an exit code of the contract."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with _one_message():
            command(*args, **{name: at_home(value) for name, value in kwargs.items()})

    return run
