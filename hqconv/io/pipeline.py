"""A function that runs over items in worker threads, with bounded look-ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def pipeline(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    ahead: int,
    num_threads: int,
    *,
    begin_thread: Callable[[], object] | None = None,
    name: str = "hqconv-pipeline",
) -> Generator[Result, None, None]:
    """Run `work` over items in worker threads and yield the results in the order of the items.

    The items are taken in the calling thread. While a result is used, at most `ahead` items after it are in work or
    done. At an error of `work` or of `items`, at a KeyboardInterrupt and at `close` no further item is begun; those in
    work are waited for, so that no thread is left. Use `contextlib.closing` where the consumer may raise.

    begin_thread: called first in every thread. name: begin of the threads' names.
    Raises the error of the first item that failed, after the results before it.
    """
    pool = ThreadPoolExecutor(num_threads, name, begin_thread)
    begun: deque[Future[Result]] = deque()
    try:
        for item in items:
            begun.append(pool.submit(work, item))
            if len(begun) > ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        begun.clear()  # their results may be large
        stop_threads(pool)


def stop_threads(pool: ThreadPoolExecutor) -> None:
    """Drop the tasks that have not begun, and wait for the others, also through a KeyboardInterrupt."""
    while True:
        try:
            pool.shutdown(wait=True, cancel_futures=True)
        except KeyboardInterrupt:
            continue
        return
