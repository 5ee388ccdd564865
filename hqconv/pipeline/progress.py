"""How far a conversion is, told to whoever asked for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a conversion is: bytes of the source that are dealt with, and groups of files that are finished.

    Resumed bytes are among those done. `group` is the one that was worked on last.
    """

    group: str
    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    num_groups_done: int
    num_groups: int


class Meter:
    """Counts what is done, from any thread, and tells `listener` after each step, one call at a time."""

    def __init__(
        self, total_bytes: int, num_groups: int, listener: Callable[[Progress], None] | None
    ) -> None:
        self._total_bytes, self._num_groups, self._listener = total_bytes, num_groups, listener
        self._done_bytes = self._resumed_bytes = self._num_groups_done = 0
        self._lock = threading.Lock()

    def advance(self, group: str, num_bytes: int) -> None:
        """Source bytes of a group were dealt with."""
        with self._lock:
            self._done_bytes += num_bytes
            self._tell(group)

    def finish(self, group: str) -> None:
        """A group's files are complete."""
        with self._lock:
            self._num_groups_done += 1
            self._tell(group)

    def resume(self, group: str, num_bytes: int) -> None:
        """A group was complete before this run."""
        with self._lock:
            self._done_bytes += num_bytes
            self._resumed_bytes += num_bytes
            self._num_groups_done += 1
            self._tell(group)

    def _tell(self, group: str) -> None:
        if self._listener is not None:
            counts = (self._done_bytes, self._total_bytes, self._resumed_bytes)
            self._listener(Progress(group, *counts, self._num_groups_done, self._num_groups))
