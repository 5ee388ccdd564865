"""The last words of a stopped command: what lies on the disk, and how to go on.

`stopping` runs this file in the place of the process, when no thread is left that could still write; so it needs
nothing but Python itself.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress

_TERMINATE = 15
_WAIT_MS = 500  # for a terminal or pipe that takes no more


def stamp(path: str) -> str:
    """Which file lies at a path just now; "" where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - pathlib takes a third of this program's time to load
    except (OSError, ValueError):
        return ""
    return f"{found.st_ino}-{found.st_mtime_ns}"


def choose(words: Sequence[str]) -> str:
    """The text of the first case that holds.

    words: of each case its text, its conditions and "". A condition is a path with a stamp before it, as
    `1234-5678:/out/file`: that file is still there; or with nothing, `:/out/file`: some file is.
    """
    text, holds = "", True
    for word in words:
        if not word and holds:
            return text
        if not word:
            text, holds = "", True
        elif not text:
            text = word
        else:
            wanted, _, path = word.partition(":")
            found = stamp(path)
            holds = holds and bool(found) and wanted in ("", found)
    return ""


def say(text: str) -> None:
    """A line on stderr, unless nobody can take it."""
    with suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(_WAIT_MS):
            os.write(2, os.fsencode(text) + b"\n")


def end(number: int, before: str, words: Sequence[str]) -> None:
    """Ends the process as one that signal `number` stopped, with the text that is true; `before` is put before it."""
    text = choose(words)
    if text:
        say(before + text)
    os._exit(128 + number)


def _end_children() -> None:
    """Compilers that the command had started."""
    with suppress(OSError, ValueError), open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123
        for child in file.read().split():
            with suppress(OSError):
                os.kill(int(child), _TERMINATE)


if __name__ == "__main__":
    _end_children()
    end(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
