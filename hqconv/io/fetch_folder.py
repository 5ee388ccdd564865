"""A folder of one process for files that are downloaded from the Hub, read, and removed after their last use.

It lies in the Hub's cache, in `.hqconv/`. The rest of the cache belongs to all programs of the user: hqconv adds files
there, and removes none. A lock tells which folders are in use. A killed process leaves its folder; the next process
that reads the same commit takes the files over.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hqconv.io import hub

_PLACE, _LOCK = ".hqconv", ".lock"
_LEFT_S = 24 * 3600.0  # a folder that a killed process left is removed after this time, whatever its repo


class FetchFolder:
    """The folder of one process for files of one commit. Methods may be called by any thread."""

    def __init__(self, listing: hub.Listing) -> None:
        """Create the folder and its lock. Raises OutputError where the Hub's cache cannot be written."""
        self._listing = listing
        place = hub.cache_folder() / _PLACE
        self._commit = place / f"{listing.repo_id.replace('/', '--')}@{listing.commit}"
        with hub.explained(listing.repo_id, listing.commit):
            self.root, self._descriptor = self._create()
            _remove_left(place)

    def _create(self) -> tuple[Path, int]:
        """Create a folder beside its locked file. The lock comes first: a folder without a lock is in no use."""
        while True:
            root = self._commit / secrets.token_hex(8)
            lock = _lock_of(root)
            self._commit.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the process that finished last removed the folder above
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                if _takes(descriptor, lock, without_locks=True):
                    root.mkdir()
                    return root, descriptor
                os.close(descriptor)  # another process took the new lock for a left one

    def take_over(self, wanted: Iterable[str]) -> list[str]:
        """Move complete files of killed processes here, those that are wanted; return their names, and remove the rest.

        The bytes are checked when a source uses them, as after a download.
        """
        names, found = list(wanted), []
        for root, descriptor in _left(self._commit):
            for name in names:
                path, own = root / name, self.root / name
                with suppress(OSError):
                    if path.stat().st_size == self._listing.sizes.get(name) and not own.exists():
                        own.parent.mkdir(parents=True, exist_ok=True)
                        path.rename(own)
                        found.append(name)
            _remove(root, descriptor)
        return found

    def fetch(self, name: str, check: Callable[[], None] | None = None) -> Path:
        """Return a file's path in the folder; download the file if it is missing. Raises as `hub.fetch_file`."""
        path = self.root / name
        if path.is_file() and path.stat().st_size == self._listing.sizes.get(name):
            return path
        return hub.fetch_file(self._listing.repo_id, self._listing.commit, name, check, local_dir=self.root)

    def remove(self, name: str) -> None:
        """Remove a file after its last use. A failure is ignored: `close` removes all files."""
        with suppress(OSError):
            (self.root / name).unlink(missing_ok=True)

    def leave(self) -> None:
        """Leave the files for the next process that reads the same commit."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Remove the folder with all its files."""
        _remove(self.root, self._descriptor)
        with suppress(OSError):  # another process has a folder there
            self._commit.rmdir()
            self._commit.parent.rmdir()


def _lock_of(root: Path) -> Path:
    return root.with_name(root.name + _LOCK)


def _takes(descriptor: int, lock: Path, *, without_locks: bool) -> bool:
    """Lock a file without waiting; return whether this process holds the lock and the file still has its name.

    without_locks: the answer on a file system that has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False


def _left(commit: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of killed processes, each with its lock, which this process now holds."""
    for lock in sorted(commit.glob(f"*{_LOCK}")):
        with suppress(OSError):  # removed meanwhile
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            if _takes(descriptor, lock, without_locks=False):
                yield lock.with_name(lock.name.removesuffix(_LOCK)), descriptor
            else:
                os.close(descriptor)


def _remove_left(place: Path) -> None:
    """Remove the folders that killed processes left long ago, of any repo."""
    for commit in place.iterdir():
        for root, descriptor in _left(commit):
            if time.time() - os.fstat(descriptor).st_mtime > _LEFT_S:
                _remove(root, descriptor)
            else:
                os.close(descriptor)
        with suppress(OSError):  # it is not empty
            commit.rmdir()


def _remove(root: Path, descriptor: int) -> None:
    """Remove a folder whose lock this process holds, then the lock."""
    shutil.rmtree(root, ignore_errors=True)
    with suppress(OSError):
        _lock_of(root).unlink(missing_ok=True)
    os.close(descriptor)
