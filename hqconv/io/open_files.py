"""Open files, of which there are never many at a time, however many ranks, shards and threads there are."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_OTHERS = 40  # descriptors left to the rest of the process: libraries, the journal, a terminal
# Owners that may have files open at the same time: a source, an artifact, and four groups of output files.
_SHARE = 6
_LEAST, _MOST = 4, 512


def raise_limit() -> None:
    """Let this process open as many files as the system allows it to; for commands, not for libraries."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft == hard:
        return
    wanted = max(soft, 1 << 16) if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_limit() -> int:
    """How many files one owner may keep open under the limit of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(_MOST, (soft - _OTHERS) // _SHARE))


class Descriptors:
    """The open files of one owner, by key; any thread may use them.

    Where `limit` are open the least recently used one that nobody is using is closed first, and opened again when it is
    asked for again. A file that is in use is never closed, so that for a moment there may be one more for each thread.
    """

    def __init__(self, open_file: Callable[[str], int], limit: int | None = None) -> None:
        """`open_file` gives a descriptor for a key; what it raises reaches the caller of `using`."""
        self._open_file = open_file
        self._limit = open_limit() if limit is None else limit
        self._open: OrderedDict[str, int] = OrderedDict()
        self._num_users: dict[str, int] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def using(self, key: str) -> Iterator[int]:
        """A descriptor that stays open until the block ends. Raises ValueError once they are closed."""
        with self._lock:
            if self._is_closed:
                raise ValueError(f"{key}: use of a file whose owner is closed")
            if key not in self._open:
                self._make_room()
                self._open[key] = self._open_file(key)
            self._open.move_to_end(key)
            self._num_users[key] = self._num_users.get(key, 0) + 1
            descriptor = self._open[key]
        try:
            yield descriptor
        finally:
            with self._lock:
                self._num_users[key] -= 1

    def _make_room(self) -> None:
        idle = [key for key in self._open if not self._num_users.get(key)]
        for key in idle[: max(0, len(self._open) - self._limit + 1)]:
            os.close(self._open.pop(key))

    def drop(self, key: str) -> None:
        """Close one file, if it is open; nobody may be using it."""
        with self._lock:
            if key in self._open:
                os.close(self._open.pop(key))

    def close(self) -> None:
        """Close all files; nobody may be using one, and none may be asked for again."""
        with self._lock:
            self._is_closed = True
            while self._open:
                os.close(self._open.popitem()[1])
