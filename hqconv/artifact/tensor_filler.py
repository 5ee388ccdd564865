"""Fill tensors from files: many threads, all files in one queue, through small pinned buffers to a GPU.

Each thread has one piece on its way to the GPU while it reads the next one. The bytes go once into a buffer and from
there into the tensor: no other tensor is created, and the buffers are the only additional memory.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hqconv.artifact.rank_file import RankFile
from hqconv.errors import VerificationError
from hqconv.io.file_access import BLOCK_BYTES, PieceReader, Reads
from hqconv.io.host_buffers import HostBuffers
from hqconv.io.pipeline import pipeline
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


@dataclass
class _Pool:
    buffers: HostBuffers
    num_users: int = 0
    timer: threading.Timer | None = None  # that frees the buffers


_KEEP_S = 5.0  # until buffers that nobody uses are freed: the next layer or file may follow at once
_KEEP_PREPARED_S = 120.0
_pools: dict[torch.device, _Pool] = {}
_pools_lock = threading.RLock()


def prepare_buffers(device: torch.device) -> None:
    """Create the buffers of a GPU in the background, for a TensorFiller that begins later."""
    with _pools_lock:
        pool = _pool(device, 2 * NUM_THREADS)
        if not pool.num_users:
            _free_later(device, pool, _KEEP_PREPARED_S)


def _pool(device: torch.device, num_buffers: int) -> _Pool:
    if device not in _pools:
        size_bytes = PIECE_BYTES + -PIECE_BYTES % BLOCK_BYTES
        _pools[device] = _Pool(
            HostBuffers(size_bytes, device, 2 * NUM_THREADS, may_be_copied=False)
        )
    pool = _pools[device]
    if pool.timer is not None:
        pool.timer.cancel()
        pool.timer = None
    pool.buffers.grow(num_buffers)
    return pool


@contextlib.contextmanager
def _borrowed(device: torch.device, num_buffers: int) -> Iterator[HostBuffers]:
    """Buffers of a device while the context lasts; they stay for a while afterwards."""
    with _pools_lock:
        pool = _pool(device, num_buffers)
        pool.num_users += 1
    try:
        yield pool.buffers
    finally:
        with _pools_lock:
            pool.num_users -= 1
            if not pool.num_users:
                _free_later(device, pool, _KEEP_S)


def _free_later(device: torch.device, pool: _Pool, delay_s: float) -> None:
    def free() -> None:
        with _pools_lock:
            if pool.timer is not timer:  # it has been taken into use again
                return
            _pools.pop(device)
        pool.buffers.release()

    pool.timer = timer = threading.Timer(delay_s, free)
    timer.daemon = True
    timer.start()


def _forget_pools() -> None:
    """Forget the parent's buffers in a child process, which has no such memory."""
    global _pools_lock
    _pools.clear()
    _pools_lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_pools)


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

    def __init__(self, file: RankFile, reads: Reads) -> None:
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


class TensorFiller:
    """Fill the tensors of several files in the background, in the order given; `wait` for one owner at a time."""

    def __init__(
        self,
        files: Iterable[tuple[Hashable, RankFile, Sequence[LoadTarget]]],
        *,
        check: Callable[[RankFile], object] | None = None,
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
        if check is not None:
            files_of = (file for _, file, _ in jobs)
            collections.deque(
                pipeline(files_of, check, NUM_THREADS, NUM_THREADS, name="hqconv-fill"), maxlen=0
            )
        devices = {target.tensor.device for _, _, targets in jobs for target in targets}
        is_gpu = any(device.type == "cuda" for device in devices)
        mode: Reads = "cached" if reads == "auto" and not is_gpu else reads
        self._jobs: dict[Hashable, _Job] = {owner: _Job(file, mode) for owner, file, _ in jobs}
        self._all_jobs = list(self._jobs.values())
        pieces = [
            piece for owner, _, targets in jobs for piece in _pieces(self._jobs[owner], targets)
        ]
        for piece in pieces:
            piece.job.num_left += 1
        self._pieces = iter(pieces)
        self._num_threads = min(NUM_THREADS, len(pieces))
        self._is_running = bool(pieces)
        self._device = next(iter(devices), torch.device("cpu"))
        self._is_staged = is_gpu or mode == "direct"
        # One thread starts and ends the others: an interrupt comes to the main thread alone, and finds one to stop.
        self._thread = threading.Thread(target=self._run, name="hqconv-fill")
        if pieces:
            if is_gpu:
                torch.cuda.synchronize(
                    self._device
                )  # copies into this memory must be done before others write
            try:
                self._thread.start()
            except BaseException:
                self.stop()
                raise

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
                self._condition.wait_for(lambda: not (job.num_left and self._is_running))
                if job.num_left:
                    raise self._failure or RuntimeError(
                        "The work was stopped before this tensor was full."
                    )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Give up pieces that have not begun, and return when all threads have ended."""
        self._is_stopped = True
        if self._thread.ident is not None:  # else it ends at once, if it begins at all
            self._thread.join()

    def _run(self) -> None:
        """Fill all pieces in threads, and close what is open."""
        try:
            if self._is_staged:
                with _borrowed(self._device, 2 * self._num_threads) as buffers:
                    self._run_threads(lambda: self._fill_staged(buffers))
            else:
                self._run_threads(self._fill_directly)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._fail(error)
        for job in self._all_jobs:
            job.close()
        with self._condition:
            self._is_running = False
            self._condition.notify_all()

    def _run_threads(self, fill: Callable[[], None]) -> None:
        def run() -> None:
            try:
                fill()
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._fail(error)

        threads = [
            threading.Thread(target=run, name=f"hqconv-fill-{number}")
            for number in range(self._num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
        except BaseException:  # no more threads in this system
            self._is_stopped = True
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._is_stopped = True

    def _fill_directly(self) -> None:
        """Read pieces into tensors of the CPU."""
        while (piece := self._claim()) is not None:
            with _reading(piece) as reader:
                reached = reader.fill(
                    [part.numpy().data for part in piece.destinations()], piece.begin
                )
            _check_end(piece, reached)
            self._arrived(piece)

    def _fill_staged(self, buffers: HostBuffers) -> None:
        """Read pieces into buffers; while one piece is copied from its buffer the next one is read."""
        is_gpu = self._device.type == "cuda"
        stream: Any = torch.cuda.Stream(self._device) if is_gpu else None  # type: ignore[no-untyped-call]
        copying: tuple[_Piece, torch.Tensor, Any] | None = None
        try:
            while (piece := self._claim()) is not None:
                buffer = buffers.take(waits=copying is None)
                if (
                    buffer is None and copying is not None
                ):  # who waits holds none, so that somebody gives one back
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

    def _finish(
        self, buffers: HostBuffers, piece: _Piece, buffer: torch.Tensor, event: Any
    ) -> None:
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
    file: RankFile, refs: Mapping[str, TensorRef], device: torch.device, reads: Reads = "auto"
) -> dict[str, torch.Tensor]:
    """Read tensors of one file into new tensors on `device`, of their dtypes and shapes.

    Raises VerificationError for a file that ends too early or cannot be read.
    """
    tensors = {
        name: torch.empty(ref.shape, dtype=torch_dtype(ref.dtype), device=device)
        for name, ref in refs.items()
    }
    targets = [LoadTarget(ref, tensors[name]) for name, ref in refs.items()]
    filler = TensorFiller([(file.name, file, targets)], reads=reads)
    filler.wait(file.name)
    return tensors


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
            raise AssertionError(
                f"{target.ref.name}: {data.numel()} bytes for {target.ref.num_bytes}"
            )
        done = 0
        while done < data.numel():
            offset = begin + done
            if (
                piece is None
                or piece.begin + piece.num_bytes != offset
                or offset % PIECE_BYTES == 0
            ):
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


def _unreadable(file: RankFile, expected: str, found: object) -> VerificationError:
    remedy = "Copy the artifact again from where it is whole, and start again."
    what = "A rank file of the artifact was cut off or lost while it was read."
    return VerificationError(what, where=file.name, expected=expected, found=found, remedy=remedy)
