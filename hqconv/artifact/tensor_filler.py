"""Fill tensors from files: many threads, all files in one queue, through small pinned buffers to a GPU.

Each thread has one piece on its way to the GPU while it reads the next one. The bytes go once into a buffer and from
there into the tensor: no other tensor is created, and the buffers are the only additional memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch

from hqconv.errors import VerificationError
from hqconv.io.file_access import BLOCK_BYTES, PieceReader, Reads
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.tensors import TensorRef

# Measured on an H200 with 16 processors: 8 threads read 21 GB/s, 16 threads 40, 32 threads 33; pieces of 4 MB 17,
# of 16 MB 40, of 64 MB 39.
NUM_THREADS = 16
PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class LoadTarget:
    """Destination tensor for the bytes of one tensor of a file; contiguous."""

    ref: TensorRef
    tensor: torch.Tensor

    def as_bytes(self) -> torch.Tensor:
        """Memory of the tensor, uint8 [num_bytes]."""
        return self.tensor.detach().view(-1).view(torch.uint8)


class FileToRead(Protocol):
    """File that holds tensors; `name` stands for it in errors."""

    @property
    def path(self) -> Path:
        """Path on this machine."""

    @property
    def name(self) -> str:
        """Path in the artifact."""


AnyFile = TypeVar("AnyFile", bound=FileToRead)


class StagingBuffers:
    """Host buffers of PIECE_BYTES, pinned if `device` is a GPU; created in the background because pinning is slow.

    They begin at page boundaries. Memory that CUDA refuses to pin is used unpinned: copies from it are slower.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_users = 0
        self.timer: threading.Timer | None = None
        self._device = device
        self._size_bytes = PIECE_BYTES + -PIECE_BYTES % BLOCK_BYTES
        self._free: SimpleQueue[torch.Tensor | Exception] = SimpleQueue()
        self._pinned: list[torch.Tensor] = []
        self._num_made = self._num_wanted = 0
        self._is_released = False
        self._lock = threading.Lock()
        self._maker: threading.Thread | None = None

    def grow(self, num_buffers: int) -> None:
        """Let there be at least so many buffers, some time from now."""
        with self._lock:
            self._num_wanted = max(self._num_wanted, num_buffers)
            if self._maker is None and self._num_made < self._num_wanted:
                self._maker = threading.Thread(target=self._make, name="hqconv-pin", daemon=True)
                self._maker.start()

    def take(self, *, waits: bool) -> torch.Tensor | None:
        """Return a free buffer, uint8 [PIECE_BYTES] or some more; if there is none, wait for one or return None.

        Raises the errors of the buffers' creation.
        """
        try:
            found = self._free.get(waits)
        except Empty:
            return None
        if isinstance(found, Exception):
            self._free.put(found)
            raise found
        return found

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer that `take` gave."""
        self._free.put(buffer)

    def release(self) -> None:
        """Unpin and free all buffers; none may be in use."""
        with self._lock:
            self._is_released, maker = True, self._maker
        if maker is not None:
            maker.join()
        with _beside_captures(self._device):
            while self._pinned:
                _cudart().cudaHostUnregister(self._pinned.pop().data_ptr())
        self._free = SimpleQueue()

    def _make(self) -> None:
        try:
            with _beside_captures(self._device):
                while self._is_another_wanted():
                    self._free.put(self._new())
        except Exception as error:  # noqa: BLE001 - raised by `take`
            self._free.put(error)

    def _is_another_wanted(self) -> bool:
        with self._lock:
            if self._is_released or self._num_made >= self._num_wanted:
                self._maker = None
                return False
            self._num_made += 1
            return True

    def _new(self) -> torch.Tensor:
        memory = mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)  # a child's copy of the pages would be written by nobody
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if self._device.type == "cuda" and int(_cudart().cudaHostRegister(buffer.data_ptr(), len(memory), 0)) == 0:
            self._pinned.append(buffer)
        return buffer


_KEEP_S = 5.0  # until buffers that nobody uses are freed: the next layer or file may follow at once
_KEEP_PREPARED_S = 120.0
_pools: dict[torch.device, StagingBuffers] = {}
_pools_lock = threading.RLock()


def prepare_buffers(device: torch.device) -> None:
    """Create the buffers of a GPU in the background, for a TensorFiller that begins later."""
    with _pools_lock:
        pool = _pool(device)
        pool.grow(2 * NUM_THREADS)
        if not pool.num_users:
            _free_later(device, pool, _KEEP_PREPARED_S)


def _borrow(device: torch.device, num_threads: int) -> StagingBuffers:
    with _pools_lock:
        pool = _pool(device)
        pool.num_users += 1
        pool.grow(2 * num_threads)
        return pool


def _give_back(device: torch.device, pool: StagingBuffers) -> None:
    with _pools_lock:
        pool.num_users -= 1
        if not pool.num_users:
            _free_later(device, pool, _KEEP_S)


def _pool(device: torch.device) -> StagingBuffers:
    pool = _pools.setdefault(device, StagingBuffers(device))
    if pool.timer is not None:
        pool.timer.cancel()
        pool.timer = None
    return pool


def _free_later(device: torch.device, pool: StagingBuffers, delay_s: float) -> None:
    timer = threading.Timer(delay_s, _free, [device, pool])
    timer.daemon = True
    pool.timer = timer
    timer.start()


def _free(device: torch.device, pool: StagingBuffers) -> None:
    with _pools_lock:
        if pool.timer is not threading.current_thread():  # it has been taken into use again
            return
        _pools.pop(device)
    pool.release()


def _forget_pools() -> None:
    """Forget the parent's buffers in a child process, which has no such memory."""
    global _pools_lock
    _pools.clear()
    _pools_lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_pools)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def _beside_captures(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one of this thread, which may pin memory while another thread captures a CUDA graph.

    In CUDA's default mode the call would be refused, and the capture would fail. A server captures its graphs while
    these buffers are still being created, or freed.
    """
    if device.type != "cuda":
        yield
        return
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    with torch.cuda.device(device):
        is_exchanged = exchange(ctypes.byref(mode)) == 0  # mode is the thread's own one now
        try:
            yield
        finally:
            if is_exchanged:
                exchange(ctypes.byref(mode))


@dataclass
class _Piece:
    """Run of a file's bytes, and its destinations in the order of the file: (bytes of a tensor, first byte, size)."""

    job: _Job
    begin: int
    num_bytes: int = 0
    parts: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)

    def destinations(self) -> list[torch.Tensor]:
        """Return the destination parts, uint8."""
        return [data[first : first + size] for data, first, size in self.parts]


class _Job:
    """One owner's file: opened at its first piece, closed after its last."""

    def __init__(self, file: FileToRead, reads: Reads) -> None:
        self.file = file
        self.num_left = 0  # pieces that have not arrived
        self._reads = reads
        self._reader: PieceReader | None = None
        self._lock = threading.Lock()

    def reader(self) -> PieceReader:
        with self._lock:
            if self._reader is None:
                self._reader = PieceReader(self.file.path, self._reads)
            return self._reader

    def close(self) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None


class TensorFiller(Generic[AnyFile]):
    """Fill the tensors of several files in the background, in the order given; `wait` for one owner at a time."""

    def __init__(
        self,
        files: Iterable[tuple[Hashable, AnyFile, Sequence[LoadTarget]]],
        *,
        check: Callable[[AnyFile], object] | None = None,
        reads: Reads = "auto",
    ) -> None:
        """Begin with (owner, file, tensors), …; the tensors are on one device.

        check: called for every file before the first byte is loaded; its errors end the work.
        reads: `auto` reads files directly if they are not in the page cache and the tensors are on a GPU.
        """
        jobs = list(files)
        self.begun_s = self.ended_s = time.perf_counter()  # the latter of the last bytes so far
        self.num_bytes = sum(target.ref.num_bytes for _, _, targets in jobs for target in targets)
        self._condition = threading.Condition()
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._threads: list[threading.Thread] = []
        self._begun: list[threading.Thread] = []  # those of them that are in `_work`, or were
        self._num_running = 0
        if check is not None:
            _check_all(check, [file for _, file, _ in jobs])
        devices = {target.tensor.device for _, _, targets in jobs for target in targets}
        is_gpu = any(device.type == "cuda" for device in devices)
        mode: Reads = "cached" if reads == "auto" and not is_gpu else reads
        self._jobs: dict[Hashable, _Job] = {owner: _Job(file, mode) for owner, file, _ in jobs}
        self._all_jobs = list(self._jobs.values())
        pieces = [piece for owner, _, targets in jobs for piece in _pieces(self._jobs[owner], targets)]
        for piece in pieces:
            piece.job.num_left += 1
        self._pieces = iter(pieces)
        self._start(devices, min(NUM_THREADS, len(pieces)), is_staged=is_gpu or mode == "direct")

    def __contains__(self, owner: Hashable) -> bool:
        """Return whether an owner's tensors are being filled, or full and not waited for."""
        return owner in self._jobs

    @property
    def is_done(self) -> bool:
        """True if every owner has been waited for."""
        return not self._jobs

    def wait(self, owner: Hashable) -> None:
        """Return when an owner's tensors are full.

        Raises VerificationError if a file ends too early or cannot be read, and ends all work then.
        """
        job = self._jobs.pop(owner)
        try:
            with self._condition:
                self._condition.wait_for(lambda: not (job.num_left and self._num_running))
                if job.num_left:
                    raise self._failure or RuntimeError("The work was stopped before this tensor was full.")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Give up pieces that have not begun, and return when all threads have ended."""
        self._is_stopped = True
        for thread in self._threads:
            thread.join()

    def _start(self, devices: Collection[torch.device], num_threads: int, *, is_staged: bool) -> None:
        if not num_threads:
            return
        device = next(iter(devices))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # copies into this memory must be done before others write
        buffers = _borrow(device, num_threads) if is_staged else None
        self._num_running = num_threads
        try:
            self._threads = [
                threading.Thread(target=self._work, args=(device, buffers), name=f"hqconv-fill-{number}")
                for number in range(num_threads)
            ]
            for thread in self._threads:
                thread.start()
        except BaseException:  # an interrupt may leave it open whether the last one of them runs
            with self._condition:
                self._is_stopped, self._threads = True, self._begun
                num_missing = num_threads - len(self._begun)
            self._leave(num_missing, device, buffers)
            self.stop()
            raise

    def _work(self, device: torch.device, buffers: StagingBuffers | None) -> None:
        """Fill pieces until there are none, in one thread; the last thread closes what is open."""
        with self._condition:
            if self._threads is self._begun:  # `_start` has failed and does not count this thread any more
                return
            self._begun.append(threading.current_thread())
        try:
            if buffers is None:
                self._fill_directly()
            else:
                self._fill_staged(device, buffers)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._failure = self._failure or error
            self._is_stopped = True
        self._leave(1, device, buffers)

    def _leave(self, num_threads: int, device: torch.device, buffers: StagingBuffers | None) -> None:
        """Count threads that have ended, or never began; if no other is left, close what is open."""
        with self._condition:
            self._num_running -= num_threads
            is_last = num_threads > 0 and self._num_running == 0
        if is_last:
            self._clean_up(device, buffers)
            with self._condition:
                self._condition.notify_all()

    def _clean_up(self, device: torch.device, buffers: StagingBuffers | None) -> None:
        for job in self._all_jobs:
            job.close()
        if buffers is not None:
            _give_back(device, buffers)

    def _fill_directly(self) -> None:
        """Read pieces into tensors of the CPU."""
        while (piece := self._claim()) is not None:
            with _reading(piece) as reader:
                reached = reader.fill([part.numpy().data for part in piece.destinations()], piece.begin)
            _check_end(piece, reached)
            self._arrived(piece)

    def _fill_staged(self, device: torch.device, buffers: StagingBuffers) -> None:
        """Read pieces into buffers; while one piece is copied from its buffer the next one is read."""
        stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        copying: tuple[_Piece, torch.Tensor, Any] | None = None
        try:
            while (piece := self._claim()) is not None:
                buffer = buffers.take(waits=copying is None)
                if buffer is None and copying is not None:  # who waits holds none, so that somebody gives one back
                    done, copying = copying, None
                    self._finish(buffers, *done)
                    buffer = buffers.take(waits=True)
                assert buffer is not None
                try:
                    event = self._stage(piece, buffer, stream)
                except BaseException:
                    buffers.give(buffer)
                    raise
                previous, copying = copying, (piece, buffer, event)
                if previous is not None:
                    self._finish(buffers, *previous)
        finally:
            if copying is not None:
                self._finish(buffers, *copying)

    def _stage(self, piece: _Piece, buffer: torch.Tensor, stream: Any) -> Any:
        """Read a piece into a buffer and begin its copies; return the event of their end."""
        with _reading(piece) as reader:
            end = piece.begin + piece.num_bytes
            position, reached = reader.fill_buffer(buffer.numpy().data, piece.begin, end)
        _check_end(piece, reached)
        return _copy(buffer[position:], piece.destinations(), stream)

    def _finish(self, buffers: StagingBuffers, piece: _Piece, buffer: torch.Tensor, event: Any) -> None:
        """Wait for the copies of a piece, and return its buffer."""
        if event is not None:
            event.synchronize()
        buffers.give(buffer)
        self._arrived(piece)

    def _claim(self) -> _Piece | None:
        """Return the next piece; None after the last one, or if the work was stopped or the program ends."""
        if self._is_stopped or not threading.main_thread().is_alive():
            return None
        with self._condition:
            return next(self._pieces, None)

    def _arrived(self, piece: _Piece) -> None:
        with self._condition:
            self.ended_s = time.perf_counter()
            piece.job.num_left -= 1
            if not piece.job.num_left:
                piece.job.close()
                self._condition.notify_all()


def read_tensors(
    file: FileToRead, refs: Mapping[str, TensorRef], device: torch.device, reads: Reads = "auto"
) -> dict[str, torch.Tensor]:
    """Read tensors of one file into new tensors on `device`, of their dtypes and shapes.

    Raises VerificationError for a file that ends too early or cannot be read.
    """
    tensors = {name: torch.empty(ref.shape, dtype=torch_dtype(ref.dtype), device=device) for name, ref in refs.items()}
    targets = [LoadTarget(ref, tensors[name]) for name, ref in refs.items()]
    filler = TensorFiller([(file.name, file, targets)], reads=reads)
    filler.wait(file.name)
    return tensors


def _check_all(check: Callable[[AnyFile], object], files: Sequence[AnyFile]) -> None:
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hqconv-fill")
    try:
        list(pool.map(check, files))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _copy(buffer: torch.Tensor, parts: Iterable[torch.Tensor], stream: Any) -> Any:
    """Copy a buffer's bytes into parts of tensors, one after the other; on a GPU return an event of their arrival."""
    begin = 0
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        for part in parts:
            part.copy_(buffer[begin : begin + part.numel()], non_blocking=True)
            begin += part.numel()
        return None if stream is None else stream.record_event()


def _pieces(job: _Job, targets: Sequence[LoadTarget]) -> Iterator[_Piece]:
    """Yield pieces of adjoining bytes; none crosses a multiple of PIECE_BYTES, so that its blocks fit into a buffer."""
    piece: _Piece | None = None
    for target in sorted(targets, key=lambda target: target.ref.offset_bytes):
        data, begin = target.as_bytes(), target.ref.offset_bytes
        if data.numel() != target.ref.num_bytes:
            raise AssertionError(f"{target.ref.name}: {data.numel()} bytes for {target.ref.num_bytes}")
        done = 0
        while done < data.numel():
            offset = begin + done
            if piece is None or piece.begin + piece.num_bytes != offset or offset % PIECE_BYTES == 0:
                if piece is not None:
                    yield piece
                piece = _Piece(job, offset)
            size = min(data.numel() - done, PIECE_BYTES - offset % PIECE_BYTES)
            piece.parts.append((data, done, size))
            piece.num_bytes += size
            done += size
    if piece is not None:
        yield piece


@contextlib.contextmanager
def _reading(piece: _Piece) -> Iterator[PieceReader]:
    """Open the file of a piece; an OSError becomes the error of an unreadable file."""
    try:
        yield piece.job.reader()
    except OSError as error:
        raise _unreadable(piece.job.file, "a readable file", error) from error


def _check_end(piece: _Piece, reached: int) -> None:
    end = piece.begin + piece.num_bytes
    if reached != end:
        raise _unreadable(piece.job.file, f"{end} bytes or more", f"{reached} bytes")


def _unreadable(file: FileToRead, expected: str, found: object) -> VerificationError:
    remedy = "Copy the artifact again from where it is whole, and start again."
    what = "A rank file of the artifact was cut off or lost while it was read."
    return VerificationError(what, where=file.name, expected=expected, found=found, remedy=remedy)
