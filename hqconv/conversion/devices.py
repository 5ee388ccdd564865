"""Where a batch is encoded: all that differs between the CPU and a GPU for the stages around it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from hqconv.conversion.profile import StageProfile
from hqconv.conversion.resources import Staging
from hqconv.conversion.stages import Stages
from hqconv.cpu_loops.helper_threads import Helpers


@dataclass(frozen=True, eq=False)
class Slot:
    """Host memory that one batch after another uses, uint8.

    raw: what is read. out: what comes back from a GPU, both pinned; of no size where nothing does.
    """

    raw: torch.Tensor
    out: torch.Tensor


class Lane(Protocol):
    """One way through a device: what is begun on it is done in its order, beside what is begun on others."""

    device: torch.device

    def to_host(self, tensors: Sequence[torch.Tensor], slot: Slot) -> list[torch.Tensor]:
        """The tensors' bytes as flat uint8 tensors on the host, maybe views of `slot`; there when `arrive` says so."""
        ...

    def arrive(self) -> Callable[[], None] | None:
        """What waits until all that was begun so far is done; None where it is."""
        ...


class CpuLane:
    """Batches are encoded where they were read, by the calling thread and its share of the helpers."""

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
    """A stream of its own, so that one lane's copies run beside another's kernels."""

    def __init__(self, device: torch.device) -> None:
        torch.set_num_threads(1)
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, tensors: Sequence[torch.Tensor], slot: Slot) -> list[torch.Tensor]:
        """One after the other into `slot.out`."""
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
    """A lane; one for the CPU is the calling thread's, with its share of the helpers."""
    return CudaLane(device) if device.type == "cuda" else CpuLane(helpers, share)


@contextmanager
def entered(lane: Lane) -> Iterator[None]:
    """Work that is started inside is the lane's."""
    if isinstance(lane, CudaLane):
        with torch.cuda.stream(lane.stream):
            yield
    else:
        yield


def make_slot(raw_bytes: int, out_bytes: int, device: torch.device) -> Slot:
    """Host memory for one batch."""
    return Slot(host_buffer(raw_bytes, device), host_buffer(out_bytes, device))


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory to read into, uint8: pinned for a GPU, and in large pages for the CPU where the system has them."""
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


STAGE = "slot"


class Slots:
    """All slots of a conversion. `take` is for the thread that owns the stages, `give` for any."""

    def __init__(self, staging: Staging, device: torch.device, stages: Stages, profile: StageProfile) -> None:
        self._staging, self._device, self._stages, self._profile = staging, device, stages, profile
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._num_slots = 0  # made or being made
        self._is_making = False

    def take(self) -> Slot:
        """A slot that nobody uses; waits for one, and has another one made where that is allowed.

        Pinning takes longer than a batch does: meanwhile another slot may come back.
        """
        with self._lock:
            must_make = not self._free and not self._is_making and self._num_slots < self._staging.num_slots
            self._num_slots += must_make
            self._is_making |= must_make
        if must_make:
            self._stages.start(STAGE, 0, self._make)
        if not self._free:
            with self._profile.waiting("a free slot"):
                self._stages.wait(lambda: bool(self._free))
        with self._lock:
            return self._free.pop()

    def give(self, slot: Slot) -> None:
        """Nobody uses it any more."""
        with self._lock:
            self._free.append(slot)
        self._stages.tell()

    def _make(self) -> None:
        slot = make_slot(self._staging.slot_bytes, self._staging.out_bytes, self._device)
        self._is_making = False
        self.give(slot)
