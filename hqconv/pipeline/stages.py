"""Threads in stages that end together: the first error stops them all, and is the one that is reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hqconv.pipeline.profile import Profile


class CancelledError(Exception):
    """Another task failed, or the user interrupted; this one stops without a message of its own."""


class Stages:
    """Named pools of threads. A task may start tasks of other stages, and wait for what tasks of others change.

    `stop` is for the thread that owns them.
    """

    def __init__(self, num_threads: dict[str, int], profile: Profile) -> None:
        self._pools = {name: ThreadPoolExecutor(n, f"hqconv-{name}") for name, n in num_threads.items()}
        self._profile = profile
        self._changed = threading.Condition()
        self._num_at_work = 0
        self._is_cancelled = False
        self._error: BaseException | None = None
        for name, n in num_threads.items():
            profile.threads(name, n)

    def start(self, stage: str, num_bytes: int, task: Callable[..., None], *arguments: Any) -> None:
        """Run a task in a stage's threads as soon as one is free, unless they are stopped before."""
        self._pools[stage].submit(self._run, stage, num_bytes, time.monotonic(), task, *arguments)

    def _run(
        self, stage: str, num_bytes: int, asked: float, task: Callable[..., None], *arguments: Any
    ) -> None:
        with self._changed:
            if self._is_cancelled:
                return
            self._num_at_work += 1
        try:
            with self._profile.busy(stage, num_bytes, time.monotonic() - asked):
                task(*arguments)
        except BaseException as error:  # noqa: BLE001 - reported by the owner
            with self._changed:
                self._is_cancelled = True
                if self._error is None and not isinstance(error, CancelledError):
                    self._error = error
        finally:
            with self._changed:
                self._num_at_work -= 1
                self._changed.notify_all()

    def wait(self, is_reached: Callable[[], bool]) -> None:
        """Until something that tasks change is reached. Raises the first error once there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or is_reached())
            if self._is_cancelled:
                raise self._error or CancelledError

    def tell(self) -> None:
        """Something changed that others may wait for."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Let nobody begin, and wait until nobody is at work, whatever else is interrupted meanwhile."""
        is_idle = False
        while not is_idle:
            try:
                with self._changed:
                    self._is_cancelled = True
                    self._changed.notify_all()
                    is_idle = self._changed.wait_for(lambda: self._num_at_work == 0)
            except KeyboardInterrupt:
                continue
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
