"""The pool of host buffers: its limit, waits, errors, and pinned memory."""

from __future__ import annotations

import mmap
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hqconv.io import pipeline
from hqconv.io.pipeline import HostBuffers, host_buffer

CPU = torch.device("cpu")


class NoLargePages(mmap.mmap):
    def madvise(self, advice: int, *_: int) -> None:  # type: ignore[override]
        if advice == mmap.MADV_HUGEPAGE:
            raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("has_large_pages", [True, False])
def test_a_buffer_holds_what_is_put_into_it(
    has_large_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_large_pages:
        monkeypatch.setattr(pipeline._Memory, "madvise", NoLargePages.madvise, raising=False)
    buffer = host_buffer(5000, CPU)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (5000,))
    buffer[:] = torch.arange(5000) % 251
    assert buffer.numpy().data[4999] == 4999 % 251
    assert host_buffer(0, CPU).numel() == 0


def test_buffers_are_used_again_and_are_at_most_so_many() -> None:
    pool = HostBuffers(5000, CPU, 3)
    buffers = [pool.take() for _ in range(3)]
    assert all(
        one is not None and len(one) == 5000 and one.data_ptr() % 4096 == 0 for one in buffers
    )
    assert pool.take(waits=False) is None
    assert not pool.has_free
    pool.give(buffers[1])  # type: ignore[arg-type]
    assert pool.take(waits=False) is buffers[1]
    pool.release()


def test_they_are_created_by_demand_or_beforehand() -> None:
    pool = HostBuffers(1, CPU, 10)
    assert pool.take() is not None
    assert pool._num_created <= 2
    pool.grow(100)
    assert [pool.take() for _ in range(9)]
    assert pool._num_created == 10
    pool.release()


def test_a_thread_that_waits_gets_what_another_gives() -> None:
    told = threading.Event()
    pool = HostBuffers(1, CPU, 1, told.set)
    buffer = pool.take()
    assert buffer is not None
    assert told.is_set()
    timer = threading.Timer(0.05, pool.give, [buffer])
    timer.start()
    assert pool.take() is buffer
    timer.join()
    pool.release()


def test_an_error_of_the_creation_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HostBuffers) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(HostBuffers, "_new", fail)
    pool = HostBuffers(1, CPU, 2)
    for _ in range(2):
        with pytest.raises(MemoryError):
            pool.take()
    pool.release()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_they_are_pinned_until_they_are_released() -> None:
    pool = HostBuffers(1 << 20, torch.device("cuda"), 2)
    buffers = [pool.take(), pool.take()]
    assert all(one is not None and one.is_pinned() for one in buffers)
    there = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    there.copy_(buffers[0], non_blocking=True)  # type: ignore[arg-type]
    pool.release()
    assert all(one is not None and one.is_pinned() for one in buffers)  # somebody may use them


class FakeDriver:
    """CUDA's capture mode of each thread, as `cuThreadExchangeStreamCaptureMode` has it; and calls that need it."""

    def __init__(self) -> None:
        self.modes: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []  # (call, mode of its thread)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802 - CUDA's name
        mine = self.modes.get(threading.get_ident(), 0)
        self.modes[threading.get_ident()], mode._obj.value = mode._obj.value, mine
        return 0

    def _called(self, name: str) -> int:
        self.calls.append((name, self.modes.get(threading.get_ident(), 0)))
        return 0

    def cudaHostRegister(self, *_: object) -> int:  # noqa: N802
        return self._called("pin")

    def cudaHostUnregister(self, *_: object) -> int:  # noqa: N802
        return self._called("unpin")


def test_a_thread_may_pin_beside_a_capture_only_while_it_pins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(pipeline.ctypes, "CDLL", lambda _: driver)
    monkeypatch.setattr(pipeline, "_cudart", lambda: driver)
    for name, stub in (("device", lambda _: nullcontext()), ("check_error", int)):
        monkeypatch.setattr(torch.cuda, name, stub)
    pool = HostBuffers(4096, torch.device("cuda", 0), 2, may_be_copied=False)
    pool.grow(2)
    taken = [pool.take() for _ in range(2)]
    pool.release()
    del taken
    assert driver.calls == [("pin", 2), ("pin", 2), ("unpin", 2), ("unpin", 2)]
    assert set(driver.modes.values()) == {0}  # all threads are back in CUDA's default mode


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_buffers_come_and_go_while_a_graph_is_captured() -> None:
    """In CUDA's default mode of captures, which vLLM uses."""
    pool = HostBuffers(1 << 20, torch.device("cuda", 0), 2, may_be_copied=False)
    data, copied = (
        torch.arange(64, device="cuda"),
        torch.zeros(64, dtype=torch.int64, device="cuda"),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copied.copy_(data)
        kept, other = pool.take(), pool.take()
        assert other is not None
        pool.give(other)
        del other
        freeing = threading.Thread(target=pool.release)
        freeing.start()
        freeing.join()
    assert kept is not None
    assert kept.is_pinned()
    graph.replay()
    assert torch.equal(copied, data)
