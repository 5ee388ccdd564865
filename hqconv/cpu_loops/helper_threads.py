"""Helper threads that run the parts of a compiled loop side by side.

Compiled loops release Python's lock, but the code around them needs it: many threads that each encode a batch would
mostly wait for it. So few threads encode batches, and helper threads run parts of their loops.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from itertools import pairwise
from queue import SimpleQueue

_own = threading.local()
_PARTS = 2  # for each helper, so that none waits long for the slowest


class Helpers:
    """A pool of helper threads for the threads that called `use`."""

    def __init__(self, count: int) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"hqconv-helper_{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task

    def use(self, share: int) -> None:
        """Run the calling thread's loops in these helpers from now on, in parts for `share` of them."""
        _own.helpers, _own.num_parts = self, share * _PARTS

    def run(self, task: Callable[[slice], None], slices: list[slice]) -> None:
        """Run a task for each slice, and wait for all. Raises the first error."""
        done, errors = threading.Semaphore(0), list[BaseException]()

        def run_slice(part: slice) -> None:
            try:
                task(part)
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                errors.append(error)
            finally:
                done.release()

        for part in slices[1:]:
            self._queue.put(functools.partial(run_slice, part))
        run_slice(slices[0])
        for _ in slices:
            done.acquire()
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """End the threads; no thread may use them any more."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()


def in_parts(task: Callable[[slice], None], length: int, least: int = 1) -> None:
    """Run a task over a range: in parts of at least `least`, side by side, if the calling thread has helpers."""
    helpers: Helpers | None = getattr(_own, "helpers", None)
    count = 1 if helpers is None else min(_own.num_parts, length // least)
    if helpers is None or count < 2:
        task(slice(0, length))
        return
    bounds = [length * number // count for number in range(count + 1)]
    helpers.run(task, [slice(begin, end) for begin, end in pairwise(bounds)])
