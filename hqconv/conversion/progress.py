"""How far a conversion is, told to whoever asked for it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


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


def metered(
    items: Iterable[Item], meter: Meter | None, told: Callable[[Item], tuple[str, int]]
) -> Iterator[Item]:
    """The items, each counted by its group and bytes as `told` has them once it is there."""
    for item in items:
        if meter is not None:
            meter.advance(*told(item))
        yield item


class Meter:
    """Counts what is done, from any thread, and tells `listener` after each step, one call at a time.

    count: adds to a number by its name and returns it; where several processes share a conversion, of all of them.
    """

    def __init__(
        self,
        total_bytes: int,
        num_groups: int,
        listener: Callable[[Progress], None] | None,
        count: Callable[[str, int], int] | None = None,
    ) -> None:
        self._total_bytes, self._num_groups, self._listener = total_bytes, num_groups, listener
        self._numbers: Counter[str] = Counter()
        self._count = count or self._count_here
        self._resumed_bytes = 0
        self._lock = threading.Lock()

    def _count_here(self, name: str, more: int) -> int:
        self._numbers[name] += more
        return self._numbers[name]

    def advance(self, group: str, num_bytes: int) -> None:
        """Source bytes of a group were dealt with."""
        self._tell(group, num_bytes, 0)

    def finish(self, group: str) -> None:
        """A group's files are complete."""
        self._tell(group, 0, 1)

    def resume(self, group: str, num_bytes: int) -> None:
        """A group was complete before this run."""
        self._resumed_bytes += num_bytes
        self._tell(group, num_bytes, 1)

    def _tell(self, group: str, num_bytes: int, num_groups: int) -> None:
        with self._lock:
            done_bytes, num_done = self._count("bytes", num_bytes), self._count("groups", num_groups)
            if self._listener is not None:
                counts = (done_bytes, self._total_bytes, self._resumed_bytes)
                self._listener(Progress(group, *counts, num_done, self._num_groups))
