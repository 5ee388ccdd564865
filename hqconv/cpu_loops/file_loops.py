"""Compiled loops of system calls that move many bytes of a file without Python's lock.

A thread that reads or writes in Python takes the lock again after every call, and waits for it. One call for all bytes
is no way out: a sandbox such as gVisor keeps the memory of the process locked while it serves a call, so that threads
which only need a new page wait as long. Here calls are short and the lock is taken once.
"""

from __future__ import annotations

import numpy as np
from numba.core import types

from hqconv.jit import compiled

# Of the C library: ssize_t (int descriptor, void *memory, size_t size, off_t offset); -1 for an error.
_SIGNATURE = types.int64(types.int32, types.int64, types.int64, types.int64)
_pread, _pwrite = (types.ExternalFunction(name, _SIGNATURE) for name in ("pread", "pwrite"))


@compiled
def read_at(descriptor, addresses, sizes, offset, call_bytes):
    """Fill pieces of memory one after the other from byte `offset` of a file on; return the offset reached.

    addresses, sizes: int64 arrays. It is less than the end after an error, and at the end of the file.
    """
    for i in range(addresses.size):
        done = 0
        size = sizes[i]
        while done < size:
            count = _pread(descriptor, addresses[i] + done, min(call_bytes, size - done), offset)
            if count <= 0:
                return offset
            done += count
            offset += count
    return offset


@compiled
def write_at(descriptor, address, size, offset, call_bytes):
    """Write `size` bytes of memory at byte `offset` of a file; return the number written, fewer after an error."""
    done = 0
    while done < size:
        count = _pwrite(descriptor, address + done, min(call_bytes, size - done), offset + done)
        if count <= 0:
            return done
        done += count
    return done


def load() -> None:
    """Load the loops, or compile them, before threads wait for them."""
    nothing = np.empty(0, np.int64)
    read_at(np.int32(-1), nothing, nothing, 0, 1)
    write_at(np.int32(-1), 0, 0, 0, 1)
