"""A function that runs over items in worker threads, with bounded look-ahead; and buffers in host memory.

Buffers are pinned for a GPU: single ones, and pools of equal ones that are used again and again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
_torch_lock = threading.Lock()
_torch_before = list[int]()  # torch's number of threads before each `one_torch_thread`


def pipeline(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    ahead: int,
    num_threads: int,
    *,
    runs_torch: bool = False,
    name: str = "hqconv-pipeline",
) -> Generator[Result, None, None]:
    """Run `work` over items in worker threads and yield the results in the order of the items.

    The items are taken in the calling thread. While a result is used, at most `ahead` items after it are in work or
    done. At an error of `work` or of `items`, at a KeyboardInterrupt and at `close` no further item is begun; those in
    work are waited for, so that no thread is left. Use `contextlib.closing` where the consumer may raise.

    runs_torch: torch's operations take no more threads than the workers. name: begin of the threads' names.
    Raises the error of the first item that failed, after the results before it.
    """
    begun: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(num_threads, name)
    with one_torch_thread() if runs_torch else nullcontext():
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) > ahead:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            stop_threads(pool)


def stop_threads(pool: ThreadPoolExecutor) -> None:
    """Drop the tasks of a pool that have not begun, and wait for the others, also through a KeyboardInterrupt."""
    while True:
        try:
            pool.shutdown(wait=True, cancel_futures=True)
        except KeyboardInterrupt:
            continue
        return


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch's operations inside in their own threads: callers' threads are as many as there are processors.

    torch has one number for all threads of the process: the last one that ends sets it back.
    """
    import torch

    with _torch_lock:
        _torch_before.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _torch_lock:
            before = _torch_before[0]
            _torch_before.pop()
            if not _torch_before:
                torch.set_num_threads(before)


# by `take`: the second one is on its way when the next batch or piece asks for it
_CREATED_AHEAD = 2
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class _Memory(mmap.mmap):
    """Anonymous memory; CUDA may have registered it until it is freed."""

    pinned_for: torch.device | None = None
    address = 0
    may_be_copied = True  # when it is freed, after an error

    def __del__(self) -> None:
        if self.pinned_for is None or sys.is_finalizing():
            return
        import torch

        with _using_gpu(self.pinned_for):
            # else nothing is waited for: that would end another thread's capture of a graph
            if self.may_be_copied:
                # after an error of CUDA, which has been raised
                with contextlib.suppress(RuntimeError):
                    torch.cuda.synchronize()
            _cudart().cudaHostUnregister(self.address)


def host_buffer(
    num_bytes: int, device: torch.device, *, may_be_copied: bool = True
) -> torch.Tensor:
    """Create a buffer, uint8 [num_bytes], that begins at a page boundary; pinned if `device` is a GPU.

    It is memory of our own, in huge pages where the system has them: torch's allocator of pinned memory takes the next
    power of two, and CUDA pins small pages one by one. may_be_copied: whoever drops it may not have waited for copies
    of a GPU. Raises RuntimeError where CUDA refuses to pin it.
    """
    import torch

    memory = _Memory(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # a child's copy of the pages would be written by nobody
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        with _using_gpu(device):  # its own, not the first one, which may be another process's
            torch.cuda.check_error(_cudart().cudaHostRegister(buffer.data_ptr(), len(memory), 0))
        memory.pinned_for = device
        memory.address = buffer.data_ptr()
        memory.may_be_copied = may_be_copied
    return buffer[:num_bytes]


class HostBuffers:
    """Pool of equal buffers for any thread, pinned if `device` is a GPU.

    One thread creates them in the background, because pinning is slow. Memory that CUDA refuses to pin is used
    unpinned: copies from it are slower.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        max_buffers: int,
        on_free: Callable[[], object] | None = None,
        *,
        may_be_copied: bool = True,
    ) -> None:
        """Begin with no buffer. on_free: called whenever `take` may have one, in any thread.

        may_be_copied: as of `host_buffer`.
        """
        self._may_be_copied = may_be_copied
        self._num_bytes = num_bytes
        self._device = device
        self._max_buffers = max_buffers
        self._on_free = on_free
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._num_created = self._num_wanted = 0
        self._is_released = False
        self._error: Exception | None = None
        self._creator: threading.Thread | None = None

    @property
    def has_free(self) -> bool:
        """True if `take` will not wait: for a free buffer, or for the error of their creation."""
        return bool(self._free) or self._error is not None

    def grow(self, num_buffers: int) -> None:
        """Let there be at least so many buffers, within the limit, some time from now."""
        with self._changed:
            self._num_wanted = max(self._num_wanted, min(num_buffers, self._max_buffers))
            if self._creator is None and self._num_created < self._num_wanted:
                self._creator = threading.Thread(
                    target=self._create, name="hqconv-buffers", daemon=True
                )
                self._creator.start()

    def take(self, *, waits: bool = True) -> torch.Tensor | None:
        """Return a free buffer; if there is none, let more be created, and wait for one or return None.

        Raises the error of the buffers' creation.
        """
        with self._changed:
            if not self.has_free:
                self.grow(self._num_created + _CREATED_AHEAD)
            while waits and not self.has_free:
                self._changed.wait()
            if self._free:
                return self._free.pop()
            if self._error is not None:
                raise self._error
            return None

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer that `take` gave."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()
        self._tell()

    def release(self) -> None:
        """Free the buffers, which unpins them; the pool is not used any more."""
        with self._changed:
            self._is_released = True
            creator = self._creator
        if creator is not None:
            creator.join()
        self._free.clear()

    def _tell(self) -> None:
        if self._on_free is not None:
            self._on_free()

    def _create(self) -> None:
        try:
            while self._is_another_wanted():
                self.give(self._new())
        except Exception as error:  # noqa: BLE001 - raised by `take`
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._tell()

    def _is_another_wanted(self) -> bool:
        with self._changed:
            if self._is_released or self._num_created >= self._num_wanted:
                self._creator = None
                return False
            self._num_created += 1
            return True

    def _new(self) -> torch.Tensor:
        try:
            return host_buffer(self._num_bytes, self._device, may_be_copied=self._may_be_copied)
        except RuntimeError:
            import torch

            return host_buffer(self._num_bytes, torch.device("cpu"))


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _using_gpu(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one of this thread, which may pin memory while another thread captures a CUDA graph.

    In CUDA's default mode the call would be refused, and the capture would fail. A server captures its graphs while
    buffers are still being created, or freed.
    """
    import torch

    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    with torch.cuda.device(device):
        is_exchanged = exchange(ctypes.byref(mode)) == 0  # mode is the thread's own one now
        try:
            yield
        finally:
            if is_exchanged:
                exchange(ctypes.byref(mode))
