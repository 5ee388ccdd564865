"""A function that runs over items in worker threads, with bounded look-ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_torch_lock, _torch_before = (
    threading.Lock(),
    list[int](),
)  # torch's number of threads before each `one_torch_thread`


def pipeline(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    ahead: int,
    num_threads: int,
    *,
    runs_torch: bool = False,
    name: str = "hqconv-pipeline",
) -> Generator[Result, None, None]:
    """Run `work` over items in worker threads and yield the results in the order of the items.

    The items are taken in the calling thread. While a result is used, at most `ahead` items after it are in work or
    done. At an error of `work` or of `items`, at a KeyboardInterrupt and at `close` no further item is begun; those in
    work are waited for, so that no thread is left. Use `contextlib.closing` where the consumer may raise.

    runs_torch: torch's operations take no more threads than the workers. name: begin of the threads' names.
    Raises the error of the first item that failed, after the results before it.
    """
    begun: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(num_threads, name)
    with one_torch_thread() if runs_torch else nullcontext():
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) > ahead:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            stop_threads(pool)


def stop_threads(pool: ThreadPoolExecutor) -> None:
    """Drop the tasks of a pool that have not begun, and wait for the others, also through a KeyboardInterrupt."""
    while True:
        try:
            pool.shutdown(wait=True, cancel_futures=True)
        except KeyboardInterrupt:
            continue
        return


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch's operations inside in their own threads: callers' threads are as many as there are processors.

    torch has one number for all threads of the process: the last one that ends sets it back.
    """
    import torch

    with _torch_lock:
        _torch_before.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _torch_lock:
            before, _ = _torch_before[0], _torch_before.pop()
            if not _torch_before:
                torch.set_num_threads(before)
