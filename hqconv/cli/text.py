"""Text that cannot change what a terminal shows: a name in a checkpoint may hold the terminal's own commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

# C0 but the line feed, DEL, C1, changes of the writing direction, and what is no text at all.
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with its control characters written out, `\\x1b` for ESC."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: str) -> None:
    """One message on stderr, which never fails: nobody may be there to read it."""
    with suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def printable_words(words: Any) -> Any:
    """`printable` of every text in JSON words, keys too."""
    if isinstance(words, str):
        return printable(words)
    if isinstance(words, Mapping):
        return {printable_words(key): printable_words(value) for key, value in words.items()}
    return [printable_words(value) for value in words] if isinstance(words, list | tuple) else words
