"""Threads in stages that end together: the first error stops them all, and is the one that is reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from hqconv.conversion.profile import StageProfile

_Task = tuple[int, float, Callable[..., None], tuple[Any, ...]]  # bytes, when it was handed in, what to do


class CancelledError(Exception):
    """Another task failed, or the user interrupted; this one stops without a message of its own."""


class Stages:
    """Named threads, each group with a queue of tasks. A task may start tasks of other stages, and wait for what others
    change.

    Plain threads and queues instead of an executor: its futures, which nobody asks, cost more of Python's one lock than
    all else that is done for a batch. `stop` is for the thread that owns them.
    """

    def __init__(self, num_threads: dict[str, int], profile: StageProfile) -> None:
        self._queues: dict[str, SimpleQueue[_Task | None]] = {name: SimpleQueue() for name in num_threads}
        self._profile = profile
        self._changed = threading.Condition()
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._threads = {
            name: [
                threading.Thread(target=self._work, args=(name,), name=f"hqconv-{name}_{number}", daemon=True)
                for number in range(count)
            ]
            for name, count in num_threads.items()
        }
        for name, threads in self._threads.items():
            profile.threads(name, len(threads))
            for thread in threads:
                thread.start()

    def start(self, stage: str, num_bytes: int, task: Callable[..., None], *arguments: Any) -> None:
        """Run a task in a stage's threads as soon as one is free, unless they are stopped before."""
        self._queues[stage].put((num_bytes, time.monotonic(), task, arguments))

    def _work(self, stage: str) -> None:
        queue = self._queues[stage]
        while (item := queue.get()) is not None:
            if self._is_cancelled:
                continue
            num_bytes, asked, task, arguments = item
            try:
                with self._profile.busy(stage, num_bytes, time.monotonic() - asked):
                    task(*arguments)
            except BaseException as error:  # noqa: BLE001 - reported by the owner
                self._fail(error)
            del item, task, arguments  # what they hold is not kept until the next one comes

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._is_cancelled = True
            if self._error is None and not isinstance(error, CancelledError):
                self._error = error
            self._changed.notify_all()

    def wait(self, is_reached: Callable[[], bool]) -> None:
        """Until something that tasks change is reached. Raises the first error once there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or is_reached())
            if self._is_cancelled:
                raise self._error or CancelledError

    def keep_on(self) -> None:
        """For a long task to ask from time to time. Raises CancelledError once all are to stop."""
        if self._is_cancelled:
            raise CancelledError

    def tell(self) -> None:
        """Something changed that others may wait for."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Let nobody begin, and wait until nobody is at work, whatever else is interrupted meanwhile."""
        self._is_cancelled = True
        self.tell()
        for name, threads in self._threads.items():
            for _ in threads:
                self._queues[name].put(None)
        for thread in (thread for threads in self._threads.values() for thread in threads):
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt:
                    continue
