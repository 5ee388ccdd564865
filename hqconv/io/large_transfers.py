"""Reads and writes of many bytes without Python's lock: for conversions, as their first use loads numba."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hqconv.io.file_access import fill

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LARGE_BYTES = 1 << 20  # reads and writes of at least so many are loops of short system calls
_CALL_BYTES = 1 << 20  # of such a call


def fill_large(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill byte views as `fill`, many bytes without Python's lock."""
    if sum(map(len, views)) < _LARGE_BYTES:
        return fill(descriptor, views, offset)
    import numpy as np

    from hqconv.cpu_loops.file_loops import read_at

    addresses = np.array([_address(view) for view in views], np.int64)
    sizes = np.array([len(view) for view in views], np.int64)
    reached: int = read_at(np.int32(descriptor), addresses, sizes, offset, _CALL_BYTES)
    left, rest = reached - offset, list(views)
    while rest and left >= len(rest[0]):
        left -= len(rest.pop(0))
    if rest:
        rest[0] = rest[0][left:]
    return fill(descriptor, rest, reached)  # the end of the file, or the error


def write_fully(descriptor: int, data: Buffer, offset: int) -> None:
    """Write a C-contiguous buffer at byte `offset` of a file, many bytes without Python's lock. Raises OSError."""
    view = memoryview(data).cast("B")
    if len(view) >= _LARGE_BYTES:
        import numpy as np

        from hqconv.cpu_loops.file_loops import write_at

        written = write_at(np.int32(descriptor), _address(view), len(view), offset, _CALL_BYTES)
        view, offset = view[written:], offset + written
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
