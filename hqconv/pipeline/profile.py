"""Where a conversion's time goes: how long the threads of each stage were at work, waits inside a task included."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Stage:
    num_threads: int = 0
    busy_seconds: float = 0.0
    num_tasks: int = 0
    num_bytes: int = 0


@dataclass
class Profile:
    """Counts from any thread; `words` at any time."""

    _stages: dict[str, _Stage] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _started: float = field(default_factory=time.monotonic)

    def threads(self, stage: str, num_threads: int) -> None:
        """How many threads a stage has."""
        with self._lock:
            self._stages.setdefault(stage, _Stage()).num_threads = num_threads

    @contextmanager
    def busy(self, stage: str, num_bytes: int = 0) -> Iterator[None]:
        """A task of a stage, and the bytes that it deals with."""
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            with self._lock:
                one = self._stages.setdefault(stage, _Stage())
                one.busy_seconds += seconds
                one.num_tasks += 1
                one.num_bytes += num_bytes

    def words(self) -> dict[str, Any]:
        """As JSON words. `share`: of the stage's threads' time; a stage near 1 is what the others wait for."""
        with self._lock:
            seconds = time.monotonic() - self._started
            return {
                "seconds": round(seconds, 3),
                "stages": {
                    name: {
                        "threads": stage.num_threads,
                        "tasks": stage.num_tasks,
                        "busy_seconds": round(stage.busy_seconds, 3),
                        "share": round(stage.busy_seconds / (seconds * max(1, stage.num_threads)), 3),
                        "gigabytes": round(stage.num_bytes / 1e9, 3),
                    }
                    for name, stage in self._stages.items()
                },
            }
