"""Where a conversion's time goes: how long each stage's threads were at work, and what was waited for."""

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
    queued_seconds: float = 0.0
    num_tasks: int = 0
    num_bytes: int = 0


@dataclass
class StageProfile:
    """Counts from any thread; `words` at any time."""

    _stages: dict[str, _Stage] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waits: dict[str, float] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _begun: float | None = None

    def threads(self, stage: str, num_threads: int) -> None:
        """How many threads a stage has."""
        with self._lock:
            self._stages.setdefault(stage, _Stage()).num_threads = num_threads

    def begin(self) -> None:
        """The first batch came through: memory was made and pinned, kernels were built and loaded."""
        if self._begun is None:
            self._begun = time.monotonic()

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """A thread waits for something that other stages make."""
        started = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._waits[cause] = self._waits.get(cause, 0.0) + time.monotonic() - started

    @contextmanager
    def busy(self, stage: str, num_bytes: int = 0, queued: float = 0.0) -> Iterator[None]:
        """A task of a stage, the bytes that it deals with, and how long it waited for one of the stage's threads."""
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            with self._lock:
                one = self._stages.setdefault(stage, _Stage())
                one.busy_seconds += seconds
                one.queued_seconds += queued
                one.num_tasks += 1
                one.num_bytes += num_bytes

    def to_dict(self) -> dict[str, Any]:
        """As JSON words.

        warm_up_seconds: until the first batch came through. share: of the stage's threads' time, waits inside a task
        included; a stage near 1 is what the others wait for. queued_seconds: that its tasks waited for a thread, all
        tasks together. waits: seconds by what was waited for.
        """
        with self._lock:
            seconds = time.monotonic() - self._started
            return {
                "seconds": round(seconds, 3),
                "warm_up_seconds": round((self._begun or self._started) - self._started, 3),
                "waits": {cause: round(waited, 3) for cause, waited in self._waits.items()},
                "stages": {
                    name: {
                        "threads": stage.num_threads,
                        "tasks": stage.num_tasks,
                        "busy_seconds": round(stage.busy_seconds, 3),
                        "queued_seconds": round(stage.queued_seconds, 3),
                        "share": round(stage.busy_seconds / (seconds * max(1, stage.num_threads)), 3),
                        "gigabytes": round(stage.num_bytes / 1e9, 3),
                    }
                    for name, stage in self._stages.items()
                },
            }
