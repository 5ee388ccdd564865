"""Output streams, errors and exit codes: messages on stderr, JSON on stdout (docs/ci.md), no control characters."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from hqconv.cli import interrupt
from hqconv.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    HqconvError,
    OutputError,
    RequestError,
    printable,
    printable_line,
)
from hqconv.version import __version__

JSON_VERSION = (
    1  # increased when a key that docs/ci.md calls stable is removed or changes its meaning
)
_MULTILINE_KEYS = ("notes", "obstacle")  # texts that hold messages of hqconv
_LOG = logging.getLogger(__name__)  # errors and warnings, which stderr shows anyway


def say(text: str) -> None:
    """Print a message on stderr. Never fails, even if stderr is closed."""
    with suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def warn(text: str, *, quiet: bool = False) -> None:
    """Log a warning, and print it on stderr unless `quiet`."""
    _LOG.warning("%s", text)
    if not quiet:
        say(f"warning: {text}")


def of_rank(path: Path) -> Path:
    """Return a file's path for this process: torchrun gives the same command line to all its processes."""
    from hqconv.conversion.option_values import torchrun_rank

    return path.with_name(f"{path.name}.rank{torchrun_rank()}") if torchrun_rank() else path


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return one line without control characters: names of a checkpoint may hold them."""
        return printable_line(super().format(record))


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print a record on stderr, above the progress bar."""
        say(self.format(record))


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of logging
        """Ignore a log file that cannot take a record, e.g. on a full disk: the work goes on."""


@contextmanager
def logged(command: str, *, quiet: bool, verbose: bool, log_file: Path | None) -> Iterator[None]:
    """Show the package's log on stderr, without `verbose` its warnings only, and append it to a file."""
    if verbose and quiet:
        raise RequestError(
            "--verbose and --quiet exclude each other.", remedy="Give one of the two."
        )
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    handlers: list[logging.Handler] = []
    if not quiet:
        handlers.append(_StderrHandler(logging.INFO if verbose else logging.WARNING))
        handlers[0].addFilter(lambda record: record.name != __name__)
        handlers[0].setFormatter(
            _LineFormatter("%(asctime)s %(message)s" if verbose else "%(message)s", "%H:%M:%S")
        )
    if log_file is not None:
        handlers.append(_LogFile(log_file, encoding="utf-8", errors="backslashreplace"))
        handlers[-1].setFormatter(_LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("hqconv")
    level = package.level
    for handler in handlers:
        package.addHandler(handler)
    if handlers:
        package.setLevel(
            logging.DEBUG if log_file is not None else logging.INFO if verbose else logging.WARNING
        )
        package.info("hqconv %s, Python %s: %s", __version__, sys.version.split()[0], command)
    try:
        yield
    finally:
        package.setLevel(level)
        for handler in handlers:
            package.removeHandler(handler)
            with suppress(OSError):  # a full disk
                handler.close()


class ClosedStream(io.TextIOBase):
    """A standard output that the shell has closed (`>&-`): nothing can be written to it."""

    def write(self, _: str) -> int:
        """Raise OSError."""
        raise OSError(errno.EBADF, "standard output is closed")


def discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that flushing a broken pipe at exit does not fail."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout; NaN and infinity become null.

    Raises OSError if stdout cannot be written. Nothing more is written to it then.
    """
    try:
        sys.stdout.write(
            json.dumps(_finite({**_head(), **document}), indent=2, allow_nan=False) + "\n"
        )
        sys.stdout.flush()
    except OSError:
        discard_stdout()  # half a document may be written: no other document may follow
        raise


def print_error(error: HqconvError, exit_code: int) -> None:
    """Print the document of a failed command. Never fails, because the exit code tells the same."""
    parts = {key: getattr(error, key) for key in ("what", "where", "expected", "found", "remedy")}
    with suppress(OSError, ValueError):
        print_json({"kind": "error", "exit_code": exit_code, **parts})


def _head() -> dict[str, Any]:
    """First keys of every document: format version and tool versions. An artifact's own versions are other keys."""
    humming = None
    with suppress(PackageNotFoundError):
        humming = version("humming-kernels")
    tool = {"hqconv_version": __version__, "humming_kernels_version": humming}
    return {"json_version": JSON_VERSION, "tool": tool}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable_document(value: Any, key: str = "") -> Any:
    """Escape control characters in all keys and texts of a JSON value, since checkpoint names may hold terminal codes.

    Texts become one line, except under the keys of multi-line messages. key: the key of `value` in its parent.
    """
    if isinstance(value, str):
        return printable(value) if key in _MULTILINE_KEYS else printable_line(value)
    if isinstance(value, Mapping):
        return {printable_document(k): printable_document(item, k) for k, item in value.items()}
    return (
        [printable_document(item, key) for item in value]
        if isinstance(value, list | tuple)
        else value
    )


@contextmanager
def one_message(*, json: bool) -> Iterator[None]:
    """Turn every exception into one message on stderr and an exit code; `json`: also print a document."""
    try:
        yield
        sys.stdout.flush()
    except HqconvError as error:
        raise _fail(error, json=json) from None
    except KeyboardInterrupt:  # raised by a library; Ctrl-C is handled by `interrupt`
        raise _fail(
            HqconvError(interrupt.MESSAGE), EXIT_INTERRUPTED, interrupt.MESSAGE, json=json
        ) from None
    except BrokenPipeError:  # the reader of stdout has seen enough, as in `| head -1`
        discard_stdout()
    except OSError as error:
        reason, where = str(error.strerror or error), str(error.filename or "")
        text = f"error: The operating system refused: {reason}" + (
            f"\n  where: {where}" if where else ""
        )
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
    return RequestError(
        "The system has no more memory or threads.",
        found=str(error).split("\n")[0] or type(error).__name__,
        remedy="Lower --max-memory or --threads.",
    )


def _fail(
    error: HqconvError, exit_code: int | None = None, text: str | None = None, *, json: bool
) -> typer.Exit:
    """Print an error. exit_code, text: None for those of the error."""
    exit_code = error.exit_code if exit_code is None else exit_code
    if os.environ.get("HQCONV_DEBUG") == "1":
        traceback.print_exc()
    text = f"error: {error.message()}" if text is None else text
    _LOG.error("%s", text)
    say(text)
    if json:
        print_error(error, exit_code)
    return typer.Exit(exit_code)
