"""Files and folders that are either absent or complete, also after a power cut: temporary name, fsync, rename.

At the end the rule for every file that a command writes outside of its artifact, which is checked before any work.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hqconv.errors import InputError, OutputError
from hqconv.io.file_access import sha256_of
from hqconv.schemas.artifact_names import PARTIAL
from hqconv.schemas.untrusted_files import open_regular, what_instead

_LOG = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 22
_AGAIN = "then run the same command again (`convert`: with --resume)."


@dataclass(frozen=True)
class FileRecord:
    """A finished output file."""

    path: str
    size_bytes: int
    sha256: str


@contextmanager
def output_errors(
    where: object, remedy: str = f"Free the space or mend the folder, {_AGAIN}"
) -> Iterator[None]:
    """Turn an OSError of the output into an OutputError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "The disk is full." if full else "Writing the output failed."
        raise OutputError(
            what, where=where, found=error.strerror or error, remedy=remedy
        ) from error


@contextmanager
def source_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of a source file into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "A file of the source cannot be read.",
            where=path,
            found=error.strerror or error,
            remedy=f"Mend the source, {_AGAIN}",
        ) from error


def partial(path: Path) -> Path:
    """Return the temporary name of a file until it is complete."""
    return path.with_name(path.name + PARTIAL)


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(root: Path, folders: Iterable[Path]) -> None:
    """Flush the names in `root`, in folders below it, and in all folders between, so that these names are durable."""
    to_sync = {root}
    for folder in folders:
        while folder not in to_sync:
            to_sync.add(folder)
            folder = folder.parent
    for folder in sorted(to_sync, key=lambda folder: (-len(folder.parts), folder)):
        sync_folder(folder)


def sync_above(folder: Path) -> None:
    """Flush the name of a folder itself; a folder above it that may not be read is left alone."""
    with suppress(PermissionError):
        sync_folder(folder.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, with durable names."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_above(path)


def write_whole(root: Path, name: str, data: bytes) -> FileRecord:
    """Write a small file of the folder `root`."""
    return _write_chunks(root, name, iter((data,)))


def copy_whole(source: Path, root: Path, name: str) -> FileRecord:
    """Copy a file into the folder `root`, a chunk at a time. Raises InputError for an unreadable file."""

    def chunks() -> Iterator[bytes]:
        with source_errors(source), open(open_regular(source), "rb", buffering=0) as file:  # noqa: PTH123
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    return _write_chunks(root, name, chunks())


def _write_chunks(root: Path, name: str, chunks: Iterator[bytes]) -> FileRecord:
    path = root / name
    digest = hashlib.sha256()
    num_bytes = 0
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(partial(path)) as file:
            try:
                for chunk in chunks:
                    file.write(chunk)
                    digest.update(chunk)
                    num_bytes += len(chunk)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                partial(path).unlink(missing_ok=True)
                raise
            partial(path).replace(path)
        sync_folders(root, [path.parent])
    _LOG.debug("Wrote %s: %d bytes.", path, num_bytes)
    return FileRecord(name, num_bytes, digest.hexdigest())


@contextmanager
def _alone(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that nobody else writes: another process waits until it has its final name."""
    is_ours = False
    while not is_ours:
        if path.is_symlink() or not path.is_file():
            path.unlink(missing_ok=True)  # a link, or a pipe
        with path.open("ab") as file:
            with suppress(OSError):  # of file systems without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                is_ours = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            if is_ours:
                file.truncate(0)
                yield file


def size_of(path: Path) -> int | None:
    """Return the bytes of a regular file; None where there is none."""
    return path.stat().st_size if path.is_file() else None


def is_whole(root: Path, record: FileRecord) -> bool:
    """Return True if a file of the folder exists with its recorded size and digest."""
    path = root / record.path
    return (
        path.is_file()
        and path.stat().st_size == record.size_bytes
        and sha256_of(path) == record.sha256
    )


def check_space(root: Path, num_bytes: int) -> None:
    """Raise OutputError if the disk lacks space for `num_bytes`, or the folder cannot be written."""
    folder = next(path for path in (root, *root.parents) if path.exists())
    with output_errors(folder):
        free = shutil.disk_usage(folder).free
        writable = os.access(folder, os.W_OK | os.X_OK)
    if free < num_bytes:
        raise OutputError(
            "The disk cannot hold the artifact.",
            where=folder,
            expected=f"{num_bytes / 1e6:.1f} MB free",
            found=f"{free / 1e6:.1f} MB free",
            remedy="Free some space, or choose another place with -o.",
        )
    if not writable:
        raise OutputError(
            "The output folder cannot be written.", where=folder, remedy="Check its permissions."
        )


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h
# Errors of kernels and file systems that cannot exchange: NFS, some overlays and FUSE file systems, gVisor.
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


def exchange(new: Path, old: Path, parked: Path) -> None:
    """Exchange the contents of two folders, safely against power cuts. Raises OSError.

    Where the file system cannot exchange, three renames by way of `parked` do; `settle` completes them after a kill.
    """
    if not _exchange_at_once(new, old):
        old.rename(parked)
        new.rename(old)
        parked.rename(new)
    sync_above(old)


def settle(new: Path, old: Path, parked: Path) -> None:
    """Finish, or undo, an interrupted exchange by three renames."""
    if not parked.exists():
        return
    if not old.exists():
        (new if new.exists() else parked).rename(old)
    if parked.exists() and not new.exists():
        parked.rename(new)
    sync_above(old)


def _exchange_at_once(left: Path, right: Path) -> bool:
    """Call renameat2 with RENAME_EXCHANGE; return False if the system has no such call."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(right))


# --- files outside of the artifact

_HEAD_BYTES = 512


@dataclass(frozen=True)
class FileKind:
    """A kind of file that hqconv writes: its name for people, and a test of its first bytes."""

    name: str
    has_head: Callable[[bytes], bool]


def output_file(path: Path, option: str, kind: FileKind, folders: Iterable[Path]) -> Path:
    """Return where the file `path` will be written, links followed.

    It is a new file, or replaces a regular file that is empty or of the same kind, and lies in none of `folders`: the
    source and the artifact. Raises OutputError, which names `option`.
    """
    try:
        place = path.resolve()
        found = _obstacle(path, place, kind, folders)
    except (OSError, RuntimeError, ValueError) as error:
        # a circle of links, a name that no file can have
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if found is None:
        return place
    raise OutputError(
        f"The file of {option} cannot be written there.",
        where=path,
        expected=f"a new file, or {kind.name}, outside of source and artifact",
        found=found,
        remedy=f"Name another path with {option}.",
    )


def _obstacle(path: Path, place: Path, kind: FileKind, folders: Iterable[Path]) -> str | None:
    for folder in folders:
        if place.is_relative_to(folder.resolve()):
            return f"a path inside {folder}"
    if path.exists():  # through links, also those of /proc/self/fd, which lead to no name
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return what_instead(status.st_mode)
        if _is_standard_stream(status):
            return "a file that is the input, the output or the error stream of this process"
        with open(open_regular(place), "rb") as file:  # noqa: PTH123
            head = file.read(_HEAD_BYTES)
        if head and not kind.has_head(head):
            return f"a file that is not {kind.name}"
    if not os.access(place.parent, os.W_OK | os.X_OK):
        return (
            f"a folder that cannot be written: {place.parent}"
            if place.parent.is_dir()
            else "no such folder"
        )
    return None


def _is_standard_stream(status: os.stat_result) -> bool:
    """Return whether a redirection of the shell reads or writes the file, as /dev/stdout may tell."""
    for descriptor in range(3):
        with suppress(OSError):  # closed by the shell
            if os.path.samestat(os.fstat(descriptor), status):
                return True
    return False
