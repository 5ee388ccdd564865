"""Reads of files: ranges, digests, and a bounded pool of open files."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_MAX_BUFFERS = 512  # of one call; Linux takes 1024


def adjoining(
    pieces: Iterable[tuple[TensorRef, WriteableBuffer]],
) -> Iterator[list[tuple[TensorRef, memoryview]]]:
    """Group tensors into runs that adjoin in one file, by file and offset; empty tensors are left out."""
    run: list[tuple[TensorRef, memoryview]] = []
    for ref, buffer in sorted(pieces, key=lambda piece: (piece[0].file, piece[0].offset_bytes)):
        if not ref.num_bytes:
            continue
        if run and (len(run) == _MAX_BUFFERS or not _follows(ref, run[-1][0])):
            yield run
            run = []
        run.append((ref, memoryview(buffer).cast("B")))
    if run:
        yield run


def _follows(ref: TensorRef, last: TensorRef) -> bool:
    return (ref.file, ref.offset_bytes) == (last.file, last.offset_bytes + last.num_bytes)


def fill(descriptor: int, views: Iterable[memoryview], offset: int) -> int:
    """Fill non-empty byte views one after the other from byte `offset` of a file on; return the offset reached.

    Fewer bytes are read at the end of the file only. Raises OSError.
    """
    views = list(views)
    while views:  # one call reads 2 GiB at most, and any call may return fewer bytes than requested
        num_read = os.preadv(descriptor, views, offset)
        if not num_read:
            break
        offset += num_read
        while views and num_read >= len(views[0]):
            num_read -= len(views.pop(0))
        if views and num_read:
            views[0] = views[0][num_read:]
    return offset


# Bytes of one write. Threads that write to one file take turns by calls: with calls of 9 MB to ext4 a conversion on two
# processors took twice as long.
_CALL_BYTES = 1 << 20


def write_fully(descriptor: int, data: ReadableBuffer, offset: int) -> None:
    """Write a C-contiguous buffer at byte `offset` of a file. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        num_written = os.pwrite(descriptor, view[:_CALL_BYTES], offset)
        view = view[num_written:]
        offset = offset + num_written


_OTHERS = 40  # descriptors left to the rest of the process: libraries, the journal, a terminal
# Owners that may have files open at the same time: a source, an artifact, and four groups of output files.
_SHARE = 6
_LEAST = 4
_MOST = 512


def raise_limit() -> None:
    """Raise this process's limit of open files to the system's; for commands, not for libraries."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft == hard:
        return
    wanted = max(soft, 1 << 16) if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_limit() -> int:
    """Number of files that one owner may keep open under the limit of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(_MOST, (soft - _OTHERS) // _SHARE))


@dataclass(eq=False)
class _OpenFile:
    """A descriptor of a pool, and the number of threads that use it. The pool's lock guards it."""

    descriptor: int
    num_users: int = 0
    is_dropped: bool = False  # closed by its last user


class Descriptors:
    """A pool of at most `limit` open files of one owner, by key; any thread may use it.

    The least recently used idle file is closed first, and opened again at its next use. A file in use is never closed,
    so that for a moment there may be one more for each thread.
    """

    def __init__(self, open_file: Callable[[str], int], limit: int | None = None) -> None:
        """`open_file` opens a descriptor for a key; its exceptions reach the caller of `using`."""
        self._open_file = open_file
        self._limit = open_limit() if limit is None else limit
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def using(self, key: str) -> Iterator[int]:
        """Open a descriptor, or reuse it, until the block ends.

        Raises ValueError for a closed pool.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError(f"{key}: use of a file whose owner is closed")
            if key not in self._open:
                self._make_room()
                self._open[key] = _OpenFile(self._open_file(key))
            self._open.move_to_end(key)
            file = self._open[key]
            file.num_users += 1
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.num_users -= 1
                if file.is_dropped and not file.num_users:
                    _close(file)

    def _make_room(self) -> None:
        idle = [key for key, file in self._open.items() if not file.num_users]
        for key in idle[: max(0, len(self._open) - self._limit + 1)]:
            _close(self._open.pop(key))

    def drop(self, key: str) -> None:
        """Close one file, if it is open: at once, or when its last user is done. The next use opens it anew.

        A number that is closed under a read could be that of another file before the read is done.
        """
        with self._lock:
            file = self._open.pop(key, None)
            if file is not None and file.num_users:
                file.is_dropped = True
            elif file is not None:
                _close(file)

    def close(self) -> None:
        """Close all files; nobody may be using one, and none may be opened again."""
        with self._lock:
            self._is_closed = True
            for file in self._open.values():
                _close(file)
            self._open.clear()


def _close(file: _OpenFile) -> None:
    with suppress(OSError):  # Linux has closed it; of written bytes `fsync` tells
        os.close(file.descriptor)


# Of a file, hashed in one call: with smaller ones a thread would often wait for Python's lock, which others hold.
_CHUNK_BYTES = 4 << 20

_own = threading.local()


def _chunk(num_bytes: int) -> memoryview:
    """Return memory of the calling thread: new pages for every file would cost more than reading it."""
    if len(getattr(_own, "chunk", b"")) < num_bytes:
        _own.chunk = bytearray(num_bytes)
    return memoryview(_own.chunk)[:num_bytes]


def sha256_of(path: Path, keep_on: Callable[[], object] | None = None, chunk_bytes: int = 0) -> str:
    """Compute the SHA-256 of a file's bytes, in hexadecimal. Raises OSError for an unreadable file.

    keep_on: called between chunks; its exception ends the work. chunk_bytes: memory of the thread; 0: 4 MiB.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = _chunk(max(1, min(chunk_bytes or _CHUNK_BYTES, os.fstat(file.fileno()).st_size)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if keep_on is not None:
                keep_on()
    return digest.hexdigest()
