"""Lanes and slots: the differences between the CPU and a GPU for the stages around the encoder."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from hqconv.conversion.resources import Staging
from hqconv.conversion.stages import StageProfile, Stages
from hqconv.cpu_loops.helper_threads import Helpers


@dataclass(frozen=True, eq=False)
class Slot:
    """Host buffers that one batch after another uses, uint8.

    raw: for source bytes. out: for results of a GPU (empty on the CPU). Both are pinned for a GPU.
    """

    raw: torch.Tensor
    out: torch.Tensor


class Lane(Protocol):
    """One sequence of work on a device, in order; other lanes run beside it."""

    device: torch.device

    def to_host(self, tensors: Sequence[torch.Tensor], slot: Slot) -> list[torch.Tensor]:
        """Copy tensors to flat uint8 tensors on the host, perhaps views of `slot`, valid after `arrive`."""
        ...

    def arrive(self) -> Callable[[], None] | None:
        """Return a function that waits for all work begun so far; None where nothing is pending."""
        ...


class CpuLane:
    """Encodes batches in place, in the calling thread and its helper threads."""

    def __init__(self, helpers: Helpers | None, share: int) -> None:
        torch.set_num_threads(1)  # of this thread: lanes and helpers are as many as there are processors
        if helpers is not None:
            helpers.use(share)
        self.device = torch.device("cpu")

    def to_host(self, tensors: Sequence[torch.Tensor], slot: Slot) -> list[torch.Tensor]:
        return [_flat(tensor) for tensor in tensors]

    def arrive(self) -> None:
        return None


class CudaLane:
    """A CUDA stream, so that one lane's copies run beside another lane's kernels."""

    def __init__(self, device: torch.device) -> None:
        torch.set_num_threads(1)
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, tensors: Sequence[torch.Tensor], slot: Slot) -> list[torch.Tensor]:
        """Copy the tensors into `slot.out`, one after the other."""
        flat = [_flat(tensor) for tensor in tensors]
        host, end = [], 0
        for one in flat:
            to = slot.out[end : end + len(one)]
            to.copy_(one, non_blocking=True)
            host.append(to)
            end += len(one)
        return host

    def arrive(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event.synchronize


def make_lane(device: torch.device, helpers: Helpers | None, share: int) -> Lane:
    """Create a lane. On the CPU: for the calling thread, whose loops `share` helper threads run."""
    return CudaLane(device) if device.type == "cuda" else CpuLane(helpers, share)


@contextmanager
def using_lane(lane: Lane) -> Iterator[None]:
    """Run the work inside on the lane."""
    if isinstance(lane, CudaLane):
        with torch.cuda.stream(lane.stream):
            yield
    else:
        yield


def make_slot(raw_bytes: int, out_bytes: int, device: torch.device) -> Slot:
    """Allocate the host buffers of one batch."""
    return Slot(host_buffer(raw_bytes, device), host_buffer(out_bytes, device))


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate a uint8 buffer: pinned for a GPU, in huge pages for the CPU where the system has them."""
    if device.type == "cpu":
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = mmap.mmap(-1, num_bytes)
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)
    # Pinning touches a GPU: its own, not the first one, which may be another process's.
    with torch.cuda.device(device):
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


SLOT_STAGE = "slot"


class Slots:
    """All slots of a conversion. Only the thread that owns the stages calls `take`; any thread calls `give`."""

    def __init__(self, staging: Staging, device: torch.device, stages: Stages, profile: StageProfile) -> None:
        self._staging, self._device, self._stages, self._profile = staging, device, stages, profile
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._num_slots = 0  # allocated or being allocated
        self._is_allocating = False

    def take(self) -> Slot:
        """Return a free slot: wait for one, and allocate another where the limit allows.

        Pinning takes longer than encoding a batch: meanwhile another slot may come back.
        """
        with self._lock:
            must_allocate = not self._free and not self._is_allocating and self._num_slots < self._staging.num_slots
            self._num_slots += must_allocate
            self._is_allocating |= must_allocate
        if must_allocate:
            self._stages.start(SLOT_STAGE, 0, self._allocate)
        if not self._free:
            with self._profile.waiting("a free slot"):
                self._stages.wait(lambda: bool(self._free))
        with self._lock:
            return self._free.pop()

    def give(self, slot: Slot) -> None:
        """Return a slot that is no longer used."""
        with self._lock:
            self._free.append(slot)
        self._stages.notify()

    def _allocate(self) -> None:
        slot = make_slot(self._staging.slot_bytes, self._staging.out_bytes, self._device)
        self._is_allocating = False
        self.give(slot)
