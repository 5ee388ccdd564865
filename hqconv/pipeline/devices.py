"""Where a batch is encoded: all that differs between the CPU and a GPU for the stages around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch


class Lane(Protocol):
    """One thread's way through a device."""

    device: torch.device

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors' bytes as flat uint8 tensors on the host, complete when this returns."""
        ...


class CpuLane:
    """Batches are encoded where they were read."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # of this thread: the lanes are as many as there are processors
        self.device = torch.device("cpu")

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [_flat(tensor) for tensor in tensors]


class CudaLane:
    """A stream of its own, so that one lane's copies run beside another's kernels."""

    def __init__(self, device: torch.device) -> None:
        torch.set_num_threads(1)
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Through pinned memory, which torch keeps for the next batch once the stream has passed."""
        flat = [_flat(tensor) for tensor in tensors]
        host = [torch.empty(one.shape, dtype=torch.uint8, pin_memory=True) for one in flat]
        for to, one in zip(host, flat, strict=True):
            to.copy_(one, non_blocking=True)
        self.stream.synchronize()
        return host


def make_lane(device: torch.device) -> Lane:
    """A lane for the calling thread."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()


@contextmanager
def entered(lane: Lane) -> Iterator[None]:
    """Work that is started inside is the lane's."""
    if isinstance(lane, CudaLane):
        with torch.cuda.stream(lane.stream):
            yield
    else:
        yield


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory to read into, uint8: pinned for a GPU."""
    if device.type == "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8)
    # Pinning touches a GPU: its own, not the first one, which may be another process's.
    with torch.cuda.device(device):
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
