"""Progress of a conversion or verification, reported to a listener."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Processed bytes of the source, and finished output units (`num_groups_done`).

    Resumed bytes are part of `done_bytes`. `group`: the name of the output unit that made the last progress.
    """

    group: str
    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    num_groups_done: int
    num_groups: int


class Meter:
    """Counts progress from any thread, and calls `listener` after each step, one call at a time."""

    def __init__(self, total_bytes: int, num_groups: int, listener: Callable[[Progress], None] | None) -> None:
        self._total_bytes, self._num_groups, self._listener = total_bytes, num_groups, listener
        self._done_bytes = self._num_done = self._resumed_bytes = 0
        self._lock = threading.Lock()

    def advance(self, group: str, num_bytes: int) -> None:
        """Add processed source bytes of a unit."""
        self._report(group, num_bytes, 0)

    def finish(self, group: str) -> None:
        """Add a unit whose files are complete."""
        self._report(group, 0, 1)

    def resume(self, group: str, num_bytes: int) -> None:
        """Add a unit that was complete before this run."""
        self._resumed_bytes += num_bytes
        self._report(group, num_bytes, 1)

    def _report(self, group: str, num_bytes: int, num_groups: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            self._num_done += num_groups
            if self._listener is not None:
                counts = (self._done_bytes, self._total_bytes, self._resumed_bytes)
                self._listener(Progress(group, *counts, self._num_done, self._num_groups))
