"""Host memory for batches, on kernels that have no large pages too."""

from __future__ import annotations

import mmap

import pytest
import torch

from hqconv.conversion import devices
from hqconv.conversion.devices import host_buffer

CPU = torch.device("cpu")


class NoLargePages(mmap.mmap):
    def madvise(self, *_: int) -> None:  # type: ignore[override]
        raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("has_large_pages", [True, False])
def test_a_buffer_holds_what_is_put_into_it(has_large_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_large_pages:
        monkeypatch.setattr(devices.mmap, "mmap", NoLargePages)
    buffer = host_buffer(5000, CPU)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (5000,))
    buffer[:] = torch.arange(5000) % 251
    assert buffer.numpy().data[4999] == 4999 % 251
    assert host_buffer(0, CPU).numel() == 0
