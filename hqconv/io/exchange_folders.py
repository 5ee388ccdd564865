"""Two folders change places, at once where the file system can do that."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from hqconv.io.durable_files import sync_above

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h
# What kernels and file systems say that cannot exchange: NFS, some overlays and FUSE file systems, gVisor.
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


def exchange(new: Path, old: Path, parked: Path) -> None:
    """After it `old` holds what `new` held, and the other way round, power cut or not. Raises OSError.

    Where the file system cannot exchange, three renames do it, by way of `parked`; `settle` mends what a kill between
    them leaves.
    """
    if not _exchange_at_once(new, old):
        old.rename(parked)
        new.rename(old)
        parked.rename(new)
    sync_above(old)


def settle(new: Path, old: Path, parked: Path) -> None:
    """Finish, or take back, an exchange by three renames that was interrupted."""
    if not parked.exists():
        return
    if not old.exists():
        (new if new.exists() else parked).rename(old)
    if parked.exists() and not new.exists():
        parked.rename(new)
    sync_above(old)


def _exchange_at_once(left: Path, right: Path) -> bool:
    """renameat2 with RENAME_EXCHANGE; False where the system has no such call."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(right))
