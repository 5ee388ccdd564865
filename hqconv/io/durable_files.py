"""Files that are either absent or complete, also after a power cut: temporary name, fsync, rename, fsync of names."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hqconv.errors import InputError, OutputError
from hqconv.io.digests import sha256_of
from hqconv.schemas.artifact_names import PARTIAL
from hqconv.schemas.untrusted_files import open_regular

_CHUNK_BYTES = 1 << 22
_RESUME = "Free the space or mend the folder, then run the same command with --resume."


@dataclass(frozen=True)
class FileRecord:
    """A finished output file."""

    path: str
    size_bytes: int
    sha256: str


@contextmanager
def output_errors(where: object) -> Iterator[None]:
    """Turn what the operating system says about the output into an OutputError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "The disk is full." if full else "Writing the output failed."
        raise OutputError(
            what, where=str(where), found=error.strerror or str(error), remedy=_RESUME
        ) from error


@contextmanager
def source_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a file of the source into an InputError."""
    try:
        yield
    except OSError as error:
        what, remedy = "A file of the source cannot be read.", "Mend the source, then go on with --resume."
        raise InputError(what, where=str(path), found=error.strerror or str(error), remedy=remedy) from error


def partial(path: Path) -> Path:
    """The name that a file has until it is complete."""
    return path.with_name(path.name + PARTIAL)


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(root: Path, folders: Iterable[Path]) -> None:
    """`sync_folder` of folders below `root`, of those between, and of `root`: what they hold lasts, and so do they."""
    found = {root}
    for folder in folders:
        while folder not in found:
            found.add(folder)
            folder = folder.parent
    for folder in sorted(found, key=lambda folder: (-len(folder.parts), folder)):
        sync_folder(folder)


def sync_above(folder: Path) -> None:
    """Flush the name of a folder itself; a folder above it that may not be read is left alone."""
    with suppress(PermissionError):
        sync_folder(folder.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are not there; all names of the latter last."""
    lacking = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in reversed(lacking):
        sync_above(one)


def write_whole(root: Path, name: str, data: bytes) -> FileRecord:
    """Write a small file of the folder `root`."""
    return _write_chunks(root, name, iter((data,)))


def copy_whole(source: Path, root: Path, name: str) -> FileRecord:
    """Copy a file into the folder `root`, a chunk at a time. Raises InputError where it cannot be read."""

    def chunks() -> Iterator[bytes]:
        with source_errors(source), open(open_regular(source), "rb", buffering=0) as file:  # noqa: PTH123
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    return _write_chunks(root, name, chunks())


def _write_chunks(root: Path, name: str, chunks: Iterator[bytes]) -> FileRecord:
    path = root / name
    digest, num_bytes = hashlib.sha256(), 0
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial(path).open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                num_bytes += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        partial(path).replace(path)
        sync_folders(root, [path.parent])
    return FileRecord(name, num_bytes, digest.hexdigest())


def is_whole(root: Path, record: FileRecord) -> bool:
    """Whether a file of the folder is there, with its size and digest."""
    path = root / record.path
    return path.is_file() and path.stat().st_size == record.size_bytes and sha256_of(path) == record.sha256


def check_space(root: Path, num_bytes: int) -> None:
    """Refuse to start where the disk cannot hold `num_bytes` more, or the folder cannot be written."""
    folder = root
    while not folder.exists():
        folder = folder.parent
    with output_errors(folder):
        free = shutil.disk_usage(folder).free
        writable = os.access(folder, os.W_OK | os.X_OK)
    if free < num_bytes:
        raise OutputError(
            "The disk cannot hold the artifact.",
            where=str(folder),
            expected=f"{num_bytes / 1e6:.1f} MB free",
            found=f"{free / 1e6:.1f} MB free",
            remedy="Free some space, or choose another place with -o.",
        )
    if not writable:
        what, remedy = "The output folder cannot be written.", "Check its permissions."
        raise OutputError(what, where=str(folder), remedy=remedy)
