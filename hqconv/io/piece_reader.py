"""Reads of a large file by several threads: through the page cache, or directly from the disk in whole blocks."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from hqconv.io.file_access import fill

Reads = Literal["auto", "cached", "direct"]
READS: tuple[Reads, ...] = get_args(Reads)

BLOCK_BYTES = 4096  # offsets, sizes and memory of direct reads; no disk in use has larger blocks
_NUM_SAMPLES = 8
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # of a file system without direct reads


class PieceReader:
    """One open file that several threads read, each with a buffer of its own.

    is_direct: True if reads bypass the page cache.
    """

    def __init__(self, path: Path, reads: Reads = "auto") -> None:
        """Open the file. `auto` reads it directly if most of it is not in the page cache.

        A file system that refuses direct reads gets reads through the page cache. Raises OSError.
        """
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.is_direct = False
        try:
            if reads == "direct" or (reads == "auto" and not is_cached(self._descriptor)):
                self._switch(is_direct=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; no thread may be reading it. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def fill(self, views: Iterable[memoryview], begin: int) -> int:
        """Fill byte views from byte `begin` on, through the page cache; return the offset reached. Raises OSError."""
        return fill(self._descriptor, views, begin)

    def fill_buffer(self, buffer: memoryview, begin: int, end: int) -> tuple[int, int]:
        """Read bytes `begin` to `end` of the file into a buffer.

        Returns the position of byte `begin` in the buffer, and the offset reached: less than `end` only at the end of
        the file. The buffer begins at a multiple of BLOCK_BYTES in memory, and holds all blocks of these bytes.
        Raises OSError.
        """
        if self.is_direct:
            start = begin - begin % BLOCK_BYTES
            try:
                return begin - start, self._fill_blocks(buffer, start, end)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._switch(is_direct=False)
        return 0, fill(self._descriptor, [buffer[: end - begin]], begin)

    def _fill_blocks(self, buffer: memoryview, start: int, end: int) -> int:
        """Read whole blocks from `start` on until `end` is reached; return the offset reached."""
        stop, reached = end + -end % BLOCK_BYTES, start
        while reached < end:
            at = reached - reached % BLOCK_BYTES  # a read that ended inside a block begins with this block again
            num_read = os.preadv(self._descriptor, [buffer[at - start : stop - start]], at)
            if at + num_read <= reached:
                break
            reached = at + num_read
        return min(reached, end)

    def _switch(self, *, is_direct: bool) -> None:
        """Change the mode of all later reads; a file system may refuse direct ones."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
            self.is_direct = is_direct
        except OSError as error:
            if not is_direct or error.errno not in _REFUSALS:
                raise


def is_cached(descriptor: int) -> bool:
    """Return whether at least half of some random bytes of a file are in the page cache.

    True for a file system that cannot tell, such as one in memory. The system begins to read the pages that are
    missing: so two calls do not look at the same bytes. Raises OSError.
    """
    size_bytes, num_cached = os.fstat(descriptor).st_size, 0
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # a missing byte starts the read of one page only
    try:
        for number in range(_NUM_SAMPLES):
            offset = int(size_bytes * (number + random.random()) / _NUM_SAMPLES)
            try:
                os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
                num_cached += 1
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                return True
    finally:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)
    return 2 * num_cached >= _NUM_SAMPLES
