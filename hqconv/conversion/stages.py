"""Stages of worker threads that stop together at the first error; their profile, and progress told to a listener."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any


class Stage(Enum):
    """Step of the work on an output unit, a batch or a piece; each has threads of its own."""

    READ = "read"
    ENCODE = "encode"
    WRITE = "write"
    FINISH = "finish"


@dataclass(frozen=True, eq=False)
class _Task:
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    num_bytes: int


class CancelledError(Exception):
    """Stops a task without a message, because another task failed or the user interrupted."""


class Stages:
    """A pool of threads with a queue of tasks for each stage. A task may start tasks of other stages and wait for them.

    Plain threads and queues instead of `concurrent.futures`: unused futures would hold Python's lock longer than all
    other work on a batch. Only the owning thread calls `stop`.
    """

    def __init__(self, num_threads: Mapping[Stage, int], profile: StageProfile) -> None:
        self._queues: dict[Stage, SimpleQueue[_Task | None]] = {
            stage: SimpleQueue() for stage in num_threads
        }
        self._profile = profile
        self._changed = threading.Condition()
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        for stage, count in num_threads.items():
            profile.stages[stage] = StageTime(count)
            for number in range(count):
                name = f"hqconv-{stage.value}_{number}"
                thread = threading.Thread(target=self._work, args=(stage,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def start(
        self, stage: Stage, num_bytes: int, function: Callable[..., None], *arguments: Any
    ) -> None:
        """Queue a task for a stage's threads; a task that is still queued at `stop` never runs."""
        self._queues[stage].put(_Task(function, arguments, num_bytes))

    def _work(self, stage: Stage) -> None:
        queue = self._queues[stage]
        while (task := queue.get()) is not None:
            if self._is_cancelled:
                continue
            try:
                with self._profile.busy(stage, task.num_bytes):
                    task.function(*task.arguments)
            except BaseException as error:  # noqa: BLE001 - reported by the owner
                self.cancel(error)
            del task  # frees its buffers before the next one comes

    def cancel(self, error: BaseException) -> None:
        """Stop all tasks; the owner's `wait` raises the first error. For any thread."""
        with self._changed:
            self._is_cancelled = True
            if self._error is None and not isinstance(error, CancelledError):
                self._error = error
            self._changed.notify_all()

    def wait(self, is_reached: Callable[[], bool]) -> None:
        """Wait until a condition holds that tasks change. Raises the first error of any task."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or is_reached())
            if self._is_cancelled:
                raise self._error or CancelledError

    def check_cancelled(self) -> None:
        """Raise CancelledError once all tasks are to stop; a long task calls this from time to time."""
        if self._is_cancelled:
            raise CancelledError

    def notify(self) -> None:
        """Wake the threads in `wait`: a condition may hold now."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Start no more tasks, and wait for the running ones, also through a KeyboardInterrupt."""
        self._is_cancelled = True
        self.notify()
        for queue in self._queues.values():
            for _ in self._threads:  # at least as many as the stage has
                queue.put(None)
        for thread in self._threads:
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt:
                    continue


@dataclass
class StageTime:
    """Work of one stage. share: see `StageProfile.to_dict`."""

    num_threads: int
    busy_s: float = 0.0
    num_tasks: int = 0
    num_bytes: int = 0


@dataclass
class StageProfile:
    """Time and bytes of each stage, and waits by cause, counted from any thread."""

    stages: dict[Stage, StageTime] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waits: dict[str, float] = field(default_factory=dict)
    _seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside as the time of all stages."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - started_s

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the time inside as a wait for the results of other stages."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._waits[cause] = self._waits.get(cause, 0.0) + time.monotonic() - started_s

    @contextmanager
    def busy(self, stage: Stage, num_bytes: int) -> Iterator[None]:
        """Count the time inside as a task of a stage."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                total = self.stages[stage]
                total.busy_s += time.monotonic() - started_s
                total.num_tasks += 1
                total.num_bytes += num_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as a JSON document.

        share: busy part of the stage's threads' time, waits inside a task included; a stage near 1 is the bottleneck.
        waits: seconds by cause.
        """
        with self._lock:
            stages = {}
            for stage, total in self.stages.items():
                share = total.busy_s / (self._seconds * max(1, total.num_threads))
                stages[stage.value] = {
                    "threads": total.num_threads,
                    "tasks": total.num_tasks,
                    "busy_seconds": round(total.busy_s, 3),
                    "share": round(share, 3),
                    "gigabytes": round(total.num_bytes / 1e9, 3),
                }
            waits = {cause: round(waited_s, 3) for cause, waited_s in self._waits.items()}
            return {"seconds": round(self._seconds, 3), "waits": waits, "stages": stages}


@dataclass(frozen=True)
class Progress:
    """Processed bytes of the source, and finished output units (`num_units_done`).

    Resumed bytes are part of `done_bytes`. `unit`: the name of the output unit that made the last progress. step: the
    work of the moment, for people. left_s: estimate of the rest; None before the first layer is complete.
    """

    unit: str
    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    num_units_done: int
    num_units: int
    step: str = ""
    left_s: float | None = None


class Meter:
    """Counts progress from any thread, and calls `listener` after each step, one call at a time.

    layers: name → bytes of the units whose time tells how long the others take. Copied files are faster.
    """

    def __init__(
        self,
        total_bytes: int,
        num_units: int,
        listener: Callable[[Progress], None] | None,
        layers: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._total_bytes = total_bytes
        self._num_units = num_units
        self._listener = listener
        self._done_bytes = self._num_done = self._resumed_bytes = self._layer_bytes = 0
        self._layers = dict(layers)
        self._begun_s = time.monotonic()
        self._lock = threading.Lock()

    def announce(self, step: str) -> None:
        """Tell of a step that processes no bytes of a unit."""
        self._report("", 0, 0, step)

    def advance(self, unit: str, num_bytes: int) -> None:
        """Add processed source bytes of a unit."""
        self._report(unit, num_bytes, 0)

    def finish(self, unit: str) -> None:
        """Add a unit whose files are complete."""
        self._layer_bytes += self._layers.pop(unit, 0)
        self._report(unit, 0, 1)

    def resume(self, unit: str, num_bytes: int) -> None:
        """Add a unit that was complete before this run."""
        self._resumed_bytes += num_bytes
        self._layers.pop(unit, 0)
        self._report(unit, num_bytes, 1)

    def _report(self, unit: str, num_bytes: int, num_units: int, step: str = "") -> None:
        with self._lock:
            self._done_bytes += num_bytes
            self._num_done += num_units
            if self._listener is not None:
                left_s = None
                if self._layer_bytes:
                    passed_s = time.monotonic() - self._begun_s
                    left_s = passed_s * sum(self._layers.values()) / self._layer_bytes
                counts = (self._done_bytes, self._total_bytes, self._resumed_bytes)
                self._listener(
                    Progress(unit, *counts, self._num_done, self._num_units, step, left_s)
                )
