"""Output streams: messages on stderr, JSON documents on stdout (docs/ci.md), text without control characters."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hqconv import __version__
from hqconv.errors import HqconvError, printable, printable_line

JSON_VERSION = 1  # increased when a key that docs/ci.md calls stable is removed or changes its meaning
_MULTILINE_KEYS = ("notes", "obstacle")  # texts that hold messages of hqconv


def say(text: str) -> None:
    """Print a message on stderr. Never fails, even if stderr is closed."""
    with suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that flushing a broken pipe at exit does not fail."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout; NaN and infinity become null.

    Raises OSError if stdout cannot be written. Nothing more is written to it then.
    """
    try:
        sys.stdout.write(json.dumps(_finite({**_head(), **document}), indent=2, allow_nan=False) + "\n")
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
    return [printable_document(item, key) for item in value] if isinstance(value, list | tuple) else value
