"""Work that several threads do ahead of the one that wants its results, in order and not too far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], num_ahead: int
) -> Iterator[tuple[Item, Result]]:
    """Each item with what `work` makes of it; at most `num_ahead` more are begun or wait. Raises what `work` raises."""
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) > num_ahead:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
