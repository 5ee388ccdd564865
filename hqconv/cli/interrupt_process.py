"""Program that an interrupted command becomes (exec): print one line about the state on disk, and how to continue.

No thread of the command is left that could still write. This file imports nothing but small parts of Python.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress

_TERMINATE = 15
_WAIT_MS = 500  # for a blocked terminal or pipe


def stamp(path: str) -> str:
    """Identity of the file at a path (inode and modification time), or "" if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - pathlib takes a third of this program's time to load
    except (OSError, ValueError):
        return ""
    return f"{found.st_ino}-{found.st_mtime_ns}"


def choose(cases: Sequence[str]) -> str:
    """Return the message of the first case whose conditions hold.

    cases: for each case its message, its conditions, and "". A condition is a stamp and a path: `1234-5678:/out/file`
    holds if that very file is still there, `:/out/file` if any file is there.
    """
    text, holds = "", True
    for part in cases:
        if not part and holds:
            return text
        if not part:
            text, holds = "", True
        elif not text:
            text = part
        else:
            wanted, _, path = part.partition(":")
            found = stamp(path)
            holds = holds and bool(found) and wanted in ("", found)
    return ""


def say(text: str) -> None:
    """Print a line on stderr, unless it is closed or blocked."""
    with suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(_WAIT_MS):
            os.write(2, os.fsencode(text) + b"\n")


def end(number: int, prefix: str, cases: Sequence[str]) -> None:
    """Print the chosen message after `prefix`, and exit with the code of signal `number`."""
    text = choose(cases)
    if text:
        say(prefix + text)
    os._exit(128 + number)


def _end_children() -> None:
    """Terminate compilers that the command had started."""
    with suppress(OSError, ValueError), open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123
        for child in file.read().split():
            with suppress(OSError):
                os.kill(int(child), _TERMINATE)


if __name__ == "__main__":
    _end_children()
    end(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
