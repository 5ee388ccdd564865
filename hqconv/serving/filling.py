"""Fills tensors from files: pieces of them in order, several in flight, through small pinned buffers to a GPU.

A file's bytes go once from the page cache into a pinned buffer and from there into the tensor: no tensor is made, and
what is held beside the tensors is the buffers alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from hqconv.checkpoint.reading import fill
from hqconv.errors import VerificationError
from hqconv.schemas.tensors import TensorRef
from hqconv.serving.rank_file import RankFile, check_digest

NUM_THREADS = 12
PIECE_BYTES = 8 << 20  # of a buffer: large enough for a disk and a bus, small enough to be pinned in no time


@dataclass(frozen=True)
class Target:
    """A tensor that is to hold the bytes of one tensor of a file; contiguous."""

    ref: TensorRef
    tensor: torch.Tensor

    def as_bytes(self) -> torch.Tensor:
        """Its memory, uint8 [num_bytes]."""
        return self.tensor.detach().view(-1).view(torch.uint8)


@dataclass
class _Piece:
    """A run of a file's bytes, and the parts of tensors that it is for, in the order of the file."""

    file: RankFile
    begin: int
    parts: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() for part in self.parts)


class Filling:
    """Fills the tensors of several files in the background, in the order given; `wait` for one owner's at a time."""

    def __init__(
        self, files: Iterable[tuple[Hashable, RankFile, Sequence[Target]]], *, digests: bool = False
    ) -> None:
        """Begin with (owner, file, tensors), …. With `digests` all files are hashed, and found right, before that.

        Raises VerificationError for a file whose digest is not the manifest's.
        """
        jobs = list(files)
        self.begun_s = self.ended_s = time.perf_counter()  # the latter of the last bytes so far
        self.num_bytes = sum(target.ref.num_bytes for _, _, targets in jobs for target in targets)
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hqconv-fill")
        try:
            if digests:
                list(self._pool.map(check_digest, [file for _, file, _ in jobs]))
            for device in {target.tensor.device for _, _, targets in jobs for target in targets}:
                if (
                    device.type == "cuda"
                ):  # what was begun in this memory must be done before others write into it
                    torch.cuda.synchronize(device)
            self._begun: dict[Hashable, list[Future[None]]] = {
                owner: [self._pool.submit(self._fill, piece) for piece in _pieces(file, targets)]
                for owner, file, targets in jobs
            }
        except BaseException:
            self.stop()
            raise
        self._pool.shutdown(
            wait=False
        )  # no more work: the threads end when this is done, and free their buffers

    def __contains__(self, owner: Hashable) -> bool:
        """Whether an owner's tensors are being filled, or full and not waited for."""
        return owner in self._begun

    @property
    def is_done(self) -> bool:
        """Whether every owner has been waited for."""
        return not self._begun

    def wait(self, owner: Hashable) -> None:
        """Return when an owner's tensors are full.

        Raises VerificationError where the file ends too early or cannot be read.
        """
        try:
            for future in self._begun.pop(owner):
                future.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Give up what has not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self, piece: _Piece) -> None:
        device = piece.parts[0].device
        if device.type != "cuda":
            _read(piece.file, piece.begin, [part.numpy().data for part in piece.parts])
            self.ended_s = time.perf_counter()
            return
        buffer, stream = self._buffer(device)
        _read(piece.file, piece.begin, [buffer.numpy().data[: piece.num_bytes]])
        with torch.cuda.stream(stream):
            begin = 0
            for part in piece.parts:
                part.copy_(buffer[begin : begin + part.numel()], non_blocking=True)
                begin += part.numel()
        stream.synchronize()
        self.ended_s = time.perf_counter()

    def _buffer(self, device: torch.device) -> tuple[torch.Tensor, Any]:
        """This thread's pinned buffer, and its stream on a device."""
        found: dict[Any, tuple[torch.Tensor, Any]] = self._local.__dict__
        stream_type: Any = torch.cuda.Stream  # which says nothing of its types
        if device not in found:
            with torch.cuda.device(device):
                pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
                found[device] = pinned, stream_type(device)
        return found[device]


def _pieces(file: RankFile, targets: Sequence[Target]) -> Iterable[_Piece]:
    """Pieces of at most PIECE_BYTES, each of adjoining bytes and for one device."""
    piece: _Piece | None = None
    for target in sorted(targets, key=lambda target: target.ref.offset_bytes):
        data, begin = target.as_bytes(), target.ref.offset_bytes
        if data.numel() != target.ref.num_bytes:
            raise AssertionError(f"{target.ref.name}: {data.numel()} bytes for {target.ref.num_bytes}")
        done = 0
        while done < data.numel():
            follows = piece is not None and piece.begin + piece.num_bytes == begin + done
            if piece is None or not follows or piece.num_bytes == PIECE_BYTES:
                if piece is not None:
                    yield piece
                piece = _Piece(file, begin + done)
            size = min(data.numel() - done, PIECE_BYTES - piece.num_bytes)
            piece.parts.append(data[done : done + size])
            done += size
    if piece is not None:
        yield piece


def _read(file: RankFile, begin: int, views: list[memoryview]) -> None:
    """Fill views from a byte of a file on."""
    end = begin + sum(len(view) for view in views)
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            reached = fill(descriptor, views, begin)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(file, "a readable file", error) from error
    if reached != end:
        raise _unreadable(file, f"{end} bytes or more", f"{reached} bytes")


def _unreadable(file: RankFile, expected: str, found: object) -> VerificationError:
    remedy = "Copy the artifact again from where it is whole, and start the server again."
    what = "A rank file of the artifact was cut off or lost while it was read."
    return VerificationError(what, where=file.name, expected=expected, found=found, remedy=remedy)
