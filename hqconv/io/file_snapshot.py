"""States and digests of a source's files: they must stay what they were when they were opened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hqconv.errors import InputError
from hqconv.io.durable_files import source_errors
from hqconv.io.file_access import sha256_of

_KEEP = "Keep the source as it is, then run the same command again (`convert`: with --resume)."
_AGAIN = "Copy the file again, or verify the artifact that it belongs to; remove a damaged file of the Hub's cache."

State = tuple[int, int, int, int]  # size in bytes, times of contents and of status in ns, inode


def state_of(path: Path) -> State | None:
    """Return the state of a file, which differs once the file is changed or replaced; None where there is none."""
    try:
        return _state(path.stat())
    except OSError:
        return None


def _state(status: os.stat_result) -> State:
    # `cp -p` keeps mtime
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class FileSnapshot:
    """States of the files below `root` at their first use, by names relative to it; any thread may use it.

    listed: name → SHA-256, as an artifact's manifest or the Hub lists it.
    is_hashing: `check_unchanged` hashes each file, once. digests: name → SHA-256 of the hashed files.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths: dict[str, Path] = {}  # of files outside of `root`
        self._seen: dict[str, os.stat_result] = {}
        self.is_hashing = False
        self.listed: Mapping[str, str] = {}
        self.digests: dict[str, str] = {}

    def place(self, name: str, path: Path) -> None:
        """Set the path of a file of a Hub repo that lies outside of `root`, and record its state."""
        self._paths[name] = path
        self.look(name)

    def path_of(self, name: str) -> Path:
        """Return the path of a file: below `root`, unless it was placed elsewhere."""
        return self._paths.get(name, self._root / name)

    def look(self, name: str) -> os.stat_result:
        """Record a file's state; call this before its bytes are read. Raises OSError for a missing file."""
        return self._seen.setdefault(name, self.path_of(name).stat())

    def look_if_there(self, names: Iterable[str]) -> None:
        """Call `look` for each of the files that exists."""
        for name in names:
            if self.path_of(name).is_file():
                self.look(name)

    def has_seen(self, name: str) -> bool:
        """Return True if the file's state was recorded."""
        return name in self._seen

    def forget(self, name: str) -> None:
        """Drop the record of a file that will be removed, after its last comparison."""
        self._seen.pop(name, None)
        self._paths.pop(name, None)

    def states(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Return the first state of each recorded file, for a JSON document."""
        return {
            name: list(_state(self._seen[name])) for name in sorted(names) if name in self._seen
        }

    def check_unchanged(self, names: Iterable[str] | None = None) -> None:
        """Check recorded files, all of them or some, as `check_states`, and where `is_hashing` as `hash`.

        Byte ranges of a repo's commit have no record: a commit cannot change.
        """
        wanted = list(self._seen) if names is None else names
        recorded = [name for name in wanted if name in self._seen]
        for name in recorded:
            if self.is_hashing and name not in self.digests:
                self.hash(name)
        self.check_states(recorded)

    def check_states(self, names: Iterable[str]) -> None:
        """Compare recorded files with their first state. Raises InputError for one that changed or disappeared."""
        for name in names:
            before = _state(self._seen[name])
            now = state_of(self.path_of(name))
            if before != now:
                raise InputError(
                    "A file of the source changed since it was opened.",
                    where=self.path_of(name),
                    expected=_text(before),
                    found="no such file" if now is None else _text(now),
                    remedy=_KEEP,
                )

    @contextmanager
    def blame_files_first(self, names: Iterable[str]) -> Iterator[None]:
        """On an InputError inside, report a changed or damaged file instead of the values that were read from it."""
        try:
            yield
        except InputError:
            self.check_unchanged(names)
            for name in self.listed.keys() & self._seen.keys() & set(names):
                self.hash(name)
            raise

    def hash(self, name: str) -> None:
        """Hash a whole file. Raises InputError if it cannot be read, or as `compare`."""
        path = self.path_of(name)
        with source_errors(path):
            sha256 = sha256_of(path)
        self.compare(name, sha256)
        self.digests[name] = sha256

    def compare(self, name: str, sha256: str) -> None:
        """Compare a file's digest with the listed one. Raises InputError."""
        expected = self.listed.get(name, sha256)
        if sha256 != expected:
            raise InputError(
                "A file of the source is not what its manifest or the Hub lists.",
                where=self.path_of(name),
                expected=f"sha256 {expected}",
                found=f"sha256 {sha256}",
                remedy=_AGAIN,
            )


def _text(state: State) -> str:
    size_bytes, mtime_ns, ctime_ns, inode = state
    return f"{size_bytes} bytes, mtime {mtime_ns} ns, ctime {ctime_ns} ns, inode {inode}"
