"""Lanes and slots: the differences between the CPU and a GPU for the stages around the encoder."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hqconv.conversion.stages import StageProfile, Stages
from hqconv.cpu_loops.helper_threads import Helpers
from hqconv.models.expert_bytes import RawExperts

_CLOCK_TRIES = 5


@dataclass(frozen=True, eq=False)
class Buffer:
    """Host memory of a pool, uint8; pinned for a GPU."""

    number: int
    data: torch.Tensor


@dataclass(eq=False)
class Slot:
    """Host memory that one batch after another uses.

    buffer: for source bytes. out: for results of a GPU, while the batch has such a buffer. marks: ends of the steps of
    the batch on a GPU that is timed.
    """

    buffer: Buffer
    out: Buffer | None = None
    marks: list[tuple[str, torch.cuda.Event]] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of the slot."""
        return self.buffer.number

    @property
    def raw(self) -> torch.Tensor:
        """Memory for source bytes."""
        return self.buffer.data


class Lane(Protocol):
    """One sequence of work on a device, in order; other lanes run beside it.

    graphs: the `EncodingGraphs` of a GPU's stream.
    """

    device: torch.device
    number: int
    graphs: Any

    def mark(self, slot: Slot, step: str) -> None:
        """Mark the end of a step of a batch, where the lane has a clock."""
        ...

    def to_device(self, raw: RawExperts, slot: Slot) -> RawExperts:
        """Copy source bytes to the device, where they are not there already."""
        ...

    def to_host(self, tensors: Sequence[torch.Tensor], slot: Slot) -> list[torch.Tensor]:
        """Copy tensors to flat uint8 tensors on the host, perhaps views of `slot`, valid after `arrive`."""
        ...

    def arrive(self) -> Callable[[], None] | None:
        """Return a function that waits for all work begun so far; None where nothing is pending."""
        ...

    def steps(self, slot: Slot) -> list[tuple[str, float, float]]:
        """Return and forget the steps of the batch in `slot`, once they are done: name, begin and end in seconds.

        Times are of `time.monotonic`. None where the lane has no clock.
        """
        ...


class CpuLane:
    """Encodes batches in place, in the calling thread and its helper threads."""

    def __init__(self, number: int, helpers: Helpers | None, share: int) -> None:
        torch.set_num_threads(1)  # of this thread: lanes and helpers are as many as there are processors
        if helpers is not None:
            helpers.use(share)
        self.device, self.number, self.graphs = torch.device("cpu"), number, None

    def mark(self, slot: Slot, step: str) -> None: ...

    def to_device(self, raw: RawExperts, slot: Slot) -> RawExperts:
        return raw

    def to_host(self, tensors: Sequence[torch.Tensor], slot: Slot) -> list[torch.Tensor]:
        return [_flat(tensor) for tensor in tensors]

    def arrive(self) -> None:
        return None

    def steps(self, slot: Slot) -> list[tuple[str, float, float]]:
        return []


class GpuClock:
    """A GPU's events as times of `time.monotonic`: one event of which the host's time is known.

    An event's time has the resolution of float32 milliseconds: 4 µs in the first minute, 60 µs after ten.
    """

    def __init__(self, device: torch.device) -> None:
        stream, tries = torch.cuda.Stream(device), []  # type: ignore[no-untyped-call]
        for _ in range(_CLOCK_TRIES):
            event = self.event()
            begin_s = time.monotonic()
            event.record(stream)
            event.synchronize()
            tries.append((time.monotonic() - begin_s, begin_s, event))
        took_s, begin_s, self._event = min(tries, key=lambda one: one[0])
        self._event_s = begin_s + took_s / 2

    def event(self) -> torch.cuda.Event:
        """Return a new event whose time can be told."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def steps(self, marks: Sequence[tuple[str, torch.cuda.Event]]) -> list[tuple[str, float, float]]:
        """Return name, begin and end of the steps between marks that the GPU has reached. The first mark is a begin.

        Durations are between neighbouring events, and so have the resolution of these: half a microsecond.
        """
        steps: list[tuple[str, float, float]] = []
        if marks:
            last = marks[0][1]
            end_s = self._event_s + self._event.elapsed_time(last) / 1e3
            for name, event in marks[1:]:
                begin_s, end_s = end_s, end_s + last.elapsed_time(event) / 1e3
                steps.append((name, begin_s, end_s))
                last = event
        return steps


class CudaLane:
    """A CUDA stream, so that one lane's copies run beside another lane's kernels."""

    def __init__(self, number: int, device: torch.device, clock: GpuClock | None = None) -> None:
        torch.set_num_threads(1)
        self.device, self.number, self._clock = device, number, clock
        self.graphs: Any = None
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self, slot: Slot, step: str) -> None:
        """Record on the stream the end of a step, where there is a clock."""
        if self._clock is not None:
            event = self._clock.event()
            event.record(self.stream)
            slot.marks.append((step, event))

    def to_device(self, raw: RawExperts, slot: Slot) -> RawExperts:
        self.mark(slot, "begin")
        there = raw.on(self.device)
        self.mark(slot, "copy in")
        return there

    def steps(self, slot: Slot) -> list[tuple[str, float, float]]:
        marks = slot.marks.copy()
        slot.marks.clear()
        return [] if self._clock is None else self._clock.steps(marks)

    def to_host(self, tensors: Sequence[torch.Tensor], slot: Slot) -> list[torch.Tensor]:
        """Copy the tensors into `slot.out`, one after the other."""
        assert slot.out is not None
        self.mark(slot, "kernels")
        flat = [_flat(tensor) for tensor in tensors]
        host, end = [], 0
        for one in flat:
            to = slot.out.data[end : end + len(one)]
            to.copy_(one, non_blocking=True)
            host.append(to)
            end += len(one)
        self.mark(slot, "copy out")
        return host

    def arrive(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event.synchronize


def make_lane(
    number: int, device: torch.device, helpers: Helpers | None, share: int, clock: GpuClock | None = None
) -> Lane:
    """Create a lane. On the CPU: for the calling thread, whose loops `share` helper threads run.

    clock: of a GPU whose steps are timed.
    """
    return CudaLane(number, device, clock) if device.type == "cuda" else CpuLane(number, helpers, share)


@contextmanager
def using_lane(lane: Lane) -> Iterator[None]:
    """Run the work inside on the lane."""
    if isinstance(lane, CudaLane):
        with torch.cuda.stream(lane.stream):
            yield
    else:
        yield


class _PinnedMemory(mmap.mmap):
    """Anonymous memory that CUDA has registered until it is freed."""

    address = 0
    device = torch.device("cpu")

    def __del__(self) -> None:
        if self.address:
            with suppress(RuntimeError):  # after an error of CUDA, which was told
                torch.cuda.synchronize(self.device)  # a conversion that failed may still be copying
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate a uint8 buffer in huge pages, where the system has them; pinned for a GPU.

    Memory that exists is registered with CUDA, instead of allocated by it: torch's allocator of pinned memory takes
    the next power of two, and CUDA pins small pages one by one.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = _PinnedMemory(-1, num_bytes)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type != "cpu":
        # Pinning touches a GPU: its own, not the first one, which may be another process's.
        with torch.cuda.device(device):
            _register(memory, buffer)
            memory.device = device
    return buffer


def _register(memory: _PinnedMemory, buffer: torch.Tensor) -> None:
    """Pin memory for CUDA. Raises torch's error where the system refuses."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    memory.address = buffer.data_ptr()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


BUFFER_STAGE = "buffer"
_ALLOCATING = 2  # buffers of a pool at a time: the next one is on its way when a batch asks for it


class Buffers:
    """A pool of equal host buffers, for any thread."""

    def __init__(
        self, kind: str, count: int, num_bytes: int, device: torch.device, stages: Stages, profile: StageProfile
    ) -> None:
        """kind: names the waits for a buffer in the profile."""
        self._kind, self._count, self._num_bytes, self._device = kind, count, num_bytes, device
        self._stages, self._profile = stages, profile
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._num_buffers = 0  # allocated or being allocated
        self._num_allocating = 0

    def take(self) -> Buffer:
        """Return a free buffer: wait for one, and allocate another where the limit allows.

        Pinning takes longer than encoding a batch: meanwhile another buffer may come back.
        """
        while True:
            with self._lock:
                if self._free:
                    return self._free.pop()
            self.allocate()
            with self._profile.waiting(f"a free {self._kind}"):
                self._stages.wait(lambda: bool(self._free))

    def allocate(self) -> None:
        """Start to allocate the next buffers, where the limit allows."""
        with self._lock:
            num_new = min(_ALLOCATING - self._num_allocating, self._count - self._num_buffers)
            numbers = range(self._num_buffers, self._num_buffers + num_new)
            self._num_allocating += num_new
            self._num_buffers += num_new
        for number in numbers:
            self._stages.start(BUFFER_STAGE, 0, self._allocate, number)

    def give(self, buffer: Buffer) -> None:
        """Return a buffer that is no longer used."""
        with self._lock:
            self._free.append(buffer)
        self._stages.notify()

    def _allocate(self, number: int) -> None:
        buffer = Buffer(number, host_buffer(self._num_bytes, self._device))
        with self._lock:
            self._num_allocating -= 1
        self.give(buffer)
