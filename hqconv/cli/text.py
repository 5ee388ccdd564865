"""Documents as a terminal may show them: a name in a checkpoint may hold the terminal's own commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hqconv.errors import printable, printable_line

_MANY_LINES = ("notes", "obstacle")  # keys of texts that hold messages of ours


def say(text: str) -> None:
    """One message on stderr, which never fails: nobody may be there to read it."""
    with suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def lead_nowhere() -> None:
    """What stdout still holds goes to /dev/null, so that Python does not fail over it at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable_document(words: Any, key: str = "") -> Any:
    """`printable` of every text in JSON words, keys too; each on one line, but messages. `key`: of the words."""
    if isinstance(words, str):
        return printable(words) if key in _MANY_LINES else printable_line(words)
    if isinstance(words, Mapping):
        return {printable_document(k): printable_document(value, k) for k, value in words.items()}
    return [printable_document(value, key) for value in words] if isinstance(words, list | tuple) else words
