"""Stages of worker threads that stop together at the first error, and the profile of their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from hqconv.conversion.trace import SLOTS, STREAMS, THREADS, Trace

_Task = tuple[int, float, Callable[..., None], tuple[Any, ...]]  # bytes, time of `start`, function, arguments

_THREAD_PREFIX = "hqconv-"


class CancelledError(Exception):
    """Stops a task without a message, because another task failed or the user interrupted."""


class Stages:
    """Named pools of threads, each with a queue of tasks. A task may start tasks of other stages and wait for them.

    Plain threads and queues instead of `concurrent.futures`: unused futures would hold Python's lock longer than all
    other work on a batch. Only the owning thread calls `stop`.
    """

    def __init__(self, num_threads: dict[str, int], profile: StageProfile) -> None:
        self._queues: dict[str, SimpleQueue[_Task | None]] = {name: SimpleQueue() for name in num_threads}
        self._profile = profile
        self._changed = threading.Condition()
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._threads = {
            name: [
                threading.Thread(target=self._work, args=(name,), name=f"{_THREAD_PREFIX}{name}_{number}", daemon=True)
                for number in range(count)
            ]
            for name, count in num_threads.items()
        }
        for name, threads in self._threads.items():
            profile.threads(name, len(threads))
            for thread in threads:
                thread.start()

    def start(self, stage: str, num_bytes: int, task: Callable[..., None], *arguments: Any) -> None:
        """Queue a task for a stage's threads; a task that is still queued at `stop` never runs."""
        self._queues[stage].put((num_bytes, time.monotonic(), task, arguments))

    def _work(self, stage: str) -> None:
        queue = self._queues[stage]
        while (item := queue.get()) is not None:
            if self._is_cancelled:
                continue
            num_bytes, queued_at, task, arguments = item
            try:
                subject = arguments[0] if arguments else ""
                with self._profile.busy(stage, num_bytes, time.monotonic() - queued_at, subject):
                    task(*arguments)
            except BaseException as error:  # noqa: BLE001 - reported by the owner
                self.cancel(error)
            del item, task, arguments, subject  # frees their buffers before the next task comes

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
        for name, threads in self._threads.items():
            for _ in threads:
                self._queues[name].put(None)
        for thread in (thread for threads in self._threads.values() for thread in threads):
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt:
                    continue


@dataclass
class _Stage:
    num_threads: int = 0
    busy_seconds: float = 0.0
    queued_seconds: float = 0.0
    num_tasks: int = 0
    num_bytes: int = 0


@dataclass
class StageProfile:
    """Time and bytes of each stage, and the time of the slots by phase, counted from any thread.

    trace: where each task, wait and phase goes as a span.
    """

    trace: Trace | None = None
    _stages: dict[str, _Stage] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waits: dict[str, float] = field(default_factory=dict)
    _slot_seconds: dict[str, float] = field(default_factory=dict)
    _gpu_seconds: dict[str, float] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _warm_at: float | None = None
    _warm_bytes: int = 0

    def threads(self, stage: str, num_threads: int) -> None:
        """Record the number of a stage's threads."""
        with self._lock:
            self._stages.setdefault(stage, _Stage()).num_threads = num_threads

    def end_warm_up(self, num_bytes: int) -> None:
        """Record the first finished batch: memory is allocated and pinned, kernels are built and loaded.

        num_bytes: of the source that have been written by now, copied tensors included.
        """
        if self._warm_at is None:
            self._warm_at, self._warm_bytes = time.monotonic(), num_bytes

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the time inside as a wait for the results of other stages."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            with self._lock:
                self._waits[cause] = self._waits.get(cause, 0.0) + ended - started
            self._add_span(f"waits for {cause}", started, ended)

    def _add_span(self, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        """Add a span to the track of the calling thread."""
        if self.trace is not None:
            thread = threading.current_thread().name.removeprefix(_THREAD_PREFIX)
            self.trace.add(THREADS, thread, name, begin_s, end_s, **arguments)

    @contextmanager
    def busy(self, stage: str, num_bytes: int = 0, queued: float = 0.0, subject: object = "") -> Iterator[None]:
        """Count the time inside as a task of a stage.

        queued: seconds that the task waited for a thread. subject: its text names the work in the trace.
        """
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            seconds = ended - started
            with self._lock:
                one = self._stages.setdefault(stage, _Stage())
                one.busy_seconds += seconds
                one.queued_seconds += queued
                one.num_tasks += 1
                one.num_bytes += num_bytes
            if self.trace is not None:
                queued_ms = round(queued * 1e3, 3)
                self._add_span(stage, started, ended, of=str(subject), bytes=num_bytes, queued_ms=queued_ms)

    def add_slot_phase(self, slot: str, phase: str, subject: object, begin_s: float, end_s: float) -> None:
        """Count a phase of the batch in a slot, or in a buffer of results. begin_s, end_s: of `time.monotonic`."""
        with self._lock:
            self._slot_seconds[phase] = self._slot_seconds.get(phase, 0.0) + end_s - begin_s
        if self.trace is not None:
            self.trace.add(SLOTS, slot, phase, begin_s, end_s, of=str(subject))

    def add_gpu_step(self, stream: str, step: str, subject: object, begin_s: float, end_s: float) -> None:
        """Count a step of a batch on a GPU's stream. begin_s, end_s: of `time.monotonic`."""
        with self._lock:
            self._gpu_seconds[step] = self._gpu_seconds.get(step, 0.0) + end_s - begin_s
        if self.trace is not None:
            self.trace.add(STREAMS, stream, step, begin_s, end_s, of=str(subject))

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as a JSON document.

        warm_up_seconds, warm_up_gigabytes: until the first batch was written. share: busy part of the stage's threads'
        time, waits inside a task included; a stage near 1 is the bottleneck. queued_seconds: time that the stage's
        tasks waited for a thread, summed. waits: seconds by cause. slot_seconds: by phase of the batches in the slots,
        summed over the slots. gpu_seconds: by step of the batches on a GPU, summed over the streams; empty without a
        trace.
        """
        with self._lock:
            seconds = time.monotonic() - self._started
            return {
                "seconds": round(seconds, 3),
                "warm_up_seconds": round((self._warm_at or self._started) - self._started, 3),
                "warm_up_gigabytes": round(self._warm_bytes / 1e9, 3),
                "waits": {cause: round(waited, 3) for cause, waited in self._waits.items()},
                "slot_seconds": {phase: round(spent, 3) for phase, spent in self._slot_seconds.items()},
                "gpu_seconds": {step: round(spent, 3) for step, spent in self._gpu_seconds.items()},
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
