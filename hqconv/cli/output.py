"""Output streams, errors and exit codes: messages on stderr, JSON on stdout (docs/ci.md), no control characters."""

from __future__ import annotations

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

from hqconv.errors import (
    EXIT_BUG,
    HqconvError,
    OutputError,
    RequestError,
    printable,
    printable_line,
)
from hqconv.version import __version__

# Increased when a key that docs/ci.md calls stable is removed or changes its meaning.
JSON_VERSION = 1
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
    package = logging.getLogger("hqconv")
    level = package.level
    handlers: list[logging.Handler] = []
    if quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not quiet:
        stderr = _StderrHandler(logging.INFO if verbose else logging.WARNING)
        stderr.addFilter(lambda record: record.name != __name__)
        line = "%(asctime)s %(message)s" if verbose else "%(message)s"
        stderr.setFormatter(_LineFormatter(line, "%H:%M:%S"))
        handlers.append(stderr)
        package.setLevel(stderr.level)
    if log_file is not None:
        file = _LogFile(log_file, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(_LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
        package.setLevel(logging.DEBUG)
    for handler in handlers:
        package.addHandler(handler)
    package.info("hqconv %s, Python %s: %s", __version__, sys.version.split()[0], command)
    try:
        yield
    finally:
        package.setLevel(level)
        for handler in handlers:
            package.removeHandler(handler)
            with suppress(OSError):  # a full disk
                handler.close()


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
    if isinstance(value, list | tuple):
        return [printable_document(item, key) for item in value]
    return value


@contextmanager
def one_message(*, json: bool) -> Iterator[None]:
    """Turn every exception into one message on stderr and an exit code; `json`: also print a document."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout has seen enough, as in `| head -1`
        discard_stdout()
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 - the last resort: one message instead of a traceback
        if os.environ.get("HQCONV_DEBUG") == "1":
            traceback.print_exc()
        raise fail(_as_ours(error), json=json) from None


def _as_ours(error: Exception) -> HqconvError:
    """Return the error that people are shown: of the system, for exhausted memory or threads, or for a bug."""
    if isinstance(error, HqconvError):
        return error
    text = f"{type(error).__name__}: {error}"
    shortages = ("can't start new thread", "can't allocate memory", "not enough memory")
    if isinstance(error, MemoryError) or any(shortage in text for shortage in shortages):
        return RequestError(
            "The system has no more memory or threads.",
            found=text.split("\n")[0],
            remedy="Lower --max-memory or --threads.",
        )
    if isinstance(error, OSError):
        where = str(error.filename or "")
        found = error.strerror or error
        return OutputError("The operating system refused.", where=where, found=found)
    return HqconvError(
        "This is a bug of hqconv.",
        found=text,
        remedy="Set HQCONV_DEBUG=1 to see the traceback, and please report it.",
    )


def fail(error: HqconvError, *, json: bool) -> typer.Exit:
    """Print an error, and return the exception that ends the command with its exit code."""
    _LOG.error("%s", error)
    say(f"{'internal error' if error.exit_code == EXIT_BUG else 'error'}: {error}")
    if json:
        keys = ("exit_code", "what", "where", "expected", "found", "remedy")
        document = {key: getattr(error, key) for key in keys}
        with suppress(OSError, ValueError):  # the exit code tells the same
            print_json({"kind": "error", **document})
    return typer.Exit(error.exit_code)
