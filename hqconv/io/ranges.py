"""Reading byte ranges of a file, those that adjoin by one system call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_MAX_BUFFERS = 512  # of one call; Linux takes 1024


def adjoining(
    pieces: Iterable[tuple[TensorRef, WriteableBuffer]],
) -> Iterator[list[tuple[TensorRef, memoryview]]]:
    """Whole ranges in runs that lie one after the other in one file; empty ones are left out."""
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
    """Fill byte views, none of them empty, one after the other from a byte of a file on; returns where it ended.

    That is early at the end of the file only. Raises OSError.
    """
    views = list(views)
    while views:  # one call reads 2 GiB at most, and any call may return less than asked
        num_read = os.preadv(descriptor, views, offset)
        if not num_read:
            break
        offset += num_read
        while views and num_read >= len(views[0]):
            num_read -= len(views.pop(0))
        if views and num_read:
            views[0] = views[0][num_read:]
    return offset
