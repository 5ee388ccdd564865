"""Lanes: the differences between the CPU and a GPU for the stages around the encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from hqconv.cpu_loops.helper_threads import Helpers
from hqconv.models.expert_bytes import RawExperts


class Lane(Protocol):
    """One sequence of work on a device, in order; other lanes run beside it."""

    device: torch.device

    def to_device(self, raw: RawExperts) -> RawExperts:
        """Copy source bytes to the device, where they are not there already."""
        ...

    def to_host(self, tensors: Sequence[torch.Tensor], out: torch.Tensor | None) -> list[torch.Tensor]:
        """Copy tensors to flat uint8 tensors on the host, on a GPU to views of `out`; valid after `arrive`."""
        ...

    def arrive(self) -> Callable[[], None] | None:
        """Return a function that waits for all work begun so far; None where nothing is pending."""
        ...


class CpuLane:
    """Encodes batches in place, in the calling thread and `share` of the helper threads."""

    device = torch.device("cpu")

    def __init__(self, helpers: Helpers | None, share: int) -> None:
        torch.set_num_threads(1)  # of this thread: lanes and helpers are as many as there are processors
        if helpers is not None:
            helpers.use(share)

    def to_device(self, raw: RawExperts) -> RawExperts:
        return raw

    def to_host(self, tensors: Sequence[torch.Tensor], out: torch.Tensor | None) -> list[torch.Tensor]:
        return [_flat(tensor) for tensor in tensors]

    def arrive(self) -> None:
        return None


class CudaLane:
    """A CUDA stream, so that one lane's copies run beside another lane's kernels."""

    def __init__(self, device: torch.device) -> None:
        torch.set_num_threads(1)
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_device(self, raw: RawExperts) -> RawExperts:
        return raw.on(self.device)

    def to_host(self, tensors: Sequence[torch.Tensor], out: torch.Tensor | None) -> list[torch.Tensor]:
        assert out is not None
        flat = [_flat(tensor) for tensor in tensors]
        host = list(torch.split(out[: sum(map(len, flat))], [len(one) for one in flat]))
        for there, here in zip(flat, host, strict=True):
            here.copy_(there, non_blocking=True)
        return host

    def arrive(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event.synchronize


@contextmanager
def using_lane(lane: Lane) -> Iterator[None]:
    """Run the work inside on the lane."""
    if isinstance(lane, CudaLane):
        with torch.cuda.stream(lane.stream):
            yield
    else:
        yield


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
