"""The errors hqconv shows to people, and the exit code each one ends the command with.

HqconvError                      anything the user can act on
├── VerificationError      (1)   an artifact is not what its manifest or its source says
├── RequestError           (2)   the request cannot be met: unknown schema, TP does not divide, …
├── InputError             (3)   the bytes given are corrupt, incomplete or contradict their config
├── OutputError            (4)   the output exists, another process is at work on it, or the disk failed
└── NetworkError           (5)   the Hub cannot be reached or failed: the same command may work later

What is none of these is a bug of hqconv and ends with EXIT_BUG; a signal ends with 128 and its number.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence

EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h

NUM_SHOWN = 5  # names that a message lists
_LONG_LIST = 8  # commas of a list that stands below the remedy
_MAX_WORD = 200  # characters of a name
_MAX_TEXT = 4000  # of all that is said at one place

# C0 but the line feed, DEL, C1, what changes the writing direction or breaks lines, what is not seen, half characters.
_CONTROLS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0001-\U000e007f]"
)
_LONG_WORD = re.compile(rf"[^\s/]{{{_MAX_WORD + 1},}}")


def printable(text: str) -> str:
    """The text as a terminal may show it, whoever wrote it: control characters are written out, `\\x1b` for ESC.

    Words of more than 200 characters (a part of a path is a word), and texts of more than 4000, lose their middle. What
    went through once stays as it is.
    """
    text = _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    text = _LONG_WORD.sub(lambda match: _shortened(match[0], _MAX_WORD), text)
    return _shortened(text, _MAX_TEXT)


def printable_line(text: str) -> str:
    """`printable`, and on one line: what was a name cannot pass for lines of ours."""
    return printable(text.replace("\n", "\\n"))


def _shortened(text: str, most: int) -> str:
    """The text without its middle, where it has more than `most` characters."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}…{text[-half:]}"


def first_few(names: Sequence[str]) -> str:
    """The first few of some names, and how many there are in all."""
    more = f", … {len(names)} in all" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more


def number_runs(numbers: Iterable[int]) -> list[str]:
    """Texts of numbers in order, neighbours as one: `3-60`, `62`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == end else f"{first}-{end}" for first, end in runs]


def short_text(value: object) -> str:
    """Format a JSON value for a message, cut off where it is long."""
    text = value if isinstance(value, str) else "nothing" if value is None else json.dumps(value)
    return _shortened(text, _MAX_WORD)


def number_text(value: float, other: float | None = None) -> str:
    """Format a number with four significant digits, or with as many as distinguish it from `other`."""
    for digits in range(4, 18):
        text = f"{value:.{digits}g}"
        if other is None or value == other or text != f"{other:.{digits}g}":
            return text
    return repr(value)


def value_texts(expected: object, found: object) -> tuple[str, str]:
    """Return two values of an error as texts, floats with few digits: the full numbers are in the documents."""
    if isinstance(expected, float) and isinstance(found, float):
        return number_text(expected, found), number_text(found, expected)
    first, second = (
        number_text(value) if isinstance(value, float) else str(value)
        for value in (expected, found)
    )
    return first, second


def plural(count: int, noun: str, several: str | None = None) -> str:
    """Format a number of things: `1 file`, `2 files`. several: the plural of a noun that takes more than an s."""
    return f"{count} {noun if count == 1 else several or f'{noun}s'}"


def close_to(text: str, known: Iterable[str]) -> str:
    """Return `Did you mean mxfp4?` for the known name most like `text`; "" where none is close."""
    close = difflib.get_close_matches(text, [*known], 1)
    return f"Did you mean {close[0]}?" if close else ""


class HqconvError(Exception):
    """One readable message: what, where, what was expected, what was found, what to do next.

    The attributes are as they were given; the message is `printable`, whatever a checkpoint's names hold.
    """

    exit_code = EXIT_BUG

    def __init__(
        self,
        what: str,
        *,
        where: object = "",
        expected: object = "",
        found: object = "",
        remedy: str = "",
    ) -> None:
        self.what = what
        self.where = str(where)
        self.remedy = remedy
        self.expected, self.found = value_texts(expected, found)
        super().__init__(what)

    def __str__(self) -> str:
        """Return the parts that were given, one to a line, long lists last; nothing in them can change a terminal."""
        texts = {
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "what to do": self.remedy,
        }
        lines = [f"  {label}: {printable_line(text)}" for label, text in texts.items() if text]
        lines.sort(key=lambda line: line.count(", ") > _LONG_LIST)
        return "\n".join([printable_line(self.what), *lines])


class VerificationError(HqconvError):
    """An artifact failed verification."""

    exit_code = 1


class RequestError(HqconvError):
    """The request itself cannot be met."""

    exit_code = 2


class InputError(HqconvError):
    """The source checkpoint is corrupt, incomplete or not what it says it is."""

    exit_code = 3


class OutputError(HqconvError):
    """The output place is taken, or writing to it failed."""

    exit_code = 4


class NetworkError(HqconvError):
    """The network or the Hub failed; what was fetched is kept."""

    exit_code = 5
