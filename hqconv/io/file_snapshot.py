"""Checks that a source's files stay unchanged after opening, and match an artifact's manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from hqconv.errors import InputError
from hqconv.io.file_access import sha256_of
from hqconv.schemas.artifact_names import COMPANIONS, CONFIG, INDEX, MANIFEST

_KEEP = "Keep the source as it is, then run the same command again (`convert`: with --resume)."
_AGAIN = "Verify the artifact; copy it again from where it is whole, or convert the original model again."


class ListedFile(Protocol):
    """Size and digest of a file, as an artifact's manifest lists it."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def sha256(self) -> str: ...


class FileSnapshot:
    """State of the files below `root` at their first use, by names relative to it.

    For an artifact also its manifest's entries. digests: name → SHA-256 of the files that were hashed. `prove`,
    `compare` and `check_unchanged` may be called by any thread.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._placed: dict[str, Path] = {}
        self._seen: dict[str, os.stat_result] = {}
        self._listed: Mapping[str, ListedFile] | None = None
        self._keeps_digests = False
        self.digests: dict[str, str] = {}

    def keep_digests(self) -> None:
        """Hash the files whose contents are converted or copied, even if no manifest lists their digests."""
        self._keeps_digests = True

    @property
    def is_hashing(self) -> bool:
        """True if converted or copied files are hashed: for a new manifest, or to compare them with the source's."""
        return self.is_held or self._keeps_digests

    def place(self, name: str, path: Path) -> None:
        """Set the path of a file of a Hub repo that lies outside of `root`, and record its state."""
        self._placed[name] = path
        self.look(name)

    def path_of(self, name: str) -> Path:
        """Return the path of a file: below `root`, unless it was placed elsewhere."""
        return self._placed.get(name, self._root / name)

    def look(self, name: str) -> os.stat_result:
        """Record a file's current state; call this before its bytes are read. Raises OSError for a missing file."""
        status = self.path_of(name).stat()
        return self._seen.setdefault(name, status)

    def has_seen(self, name: str) -> bool:
        """Return True if the file's state was recorded."""
        return name in self._seen

    def forget(self, name: str) -> None:
        """Drop the record of a file that will be removed, after its last comparison."""
        self._seen.pop(name, None)
        self._placed.pop(name, None)

    def look_if_there(self, names: Iterable[str]) -> None:
        """Call `look` for each of the files that exists."""
        for name in names:
            if self.path_of(name).is_file():
                self.look(name)

    def states(self) -> dict[str, list[int]]:
        """Return the first state of each recorded file: size, times of contents and of status in ns, and inode."""
        return {name: list(_identity(status)[:4]) for name, status in sorted(self._seen.items())}

    @property
    def misses_changes(self) -> bool:
        """True if a file lies on tmpfs, where bytes that are written through a mapping leave its times as they are."""
        devices = _memory_devices()
        return any(status.st_dev in devices for status in self._seen.values())

    def check_unchanged(self, names: Iterable[str] | None = None) -> None:
        """Compare recorded files, all of them or some, with their first state: size, times, inode and device.

        Byte ranges of a repo's commit have no record: a commit cannot change.
        Raises InputError that names the first file which changed or disappeared.
        """
        for name in list(self._seen) if names is None else names:
            before = self._seen.get(name)
            if before is None:
                continue
            try:
                now = self.path_of(name).stat()
            except OSError as error:
                raise self._changed(name, before, error.strerror) from error
            if _identity(now) != _identity(before):
                raise self._changed(name, before, _words(now))

    def _changed(self, name: str, before: os.stat_result, found: str | None) -> InputError:
        return InputError(
            "A file of the source changed during the conversion.",
            where=str(self.path_of(name)),
            expected=_words(before),
            found=found,
            remedy=_KEEP,
        )

    # --- an artifact's files

    @property
    def is_held(self) -> bool:
        """True if a manifest lists the files' digests."""
        return self._listed is not None

    def hold_to(
        self,
        listed: Mapping[str, ListedFile],
        sizes: Mapping[str, int] | None = None,
        digests: Mapping[str, str] | None = None,
        *,
        is_whole: bool = True,
    ) -> None:
        """Check an artifact's files against the entries of its manifest, by name; later checks use the entries, too.

        Every recorded file must be listed, and every listed file must exist with its size, except README.md and similar
        files (without `is_whole` other files too: some of a repo may not be on this machine). The config and the index,
        which have been read already, must match their digests too. sizes, digests: of files that are not here yet, as
        reported by the Hub. Raises InputError.
        """
        self._listed = listed
        for name in listed if is_whole else ():
            self._check_there(name, listed[name].size_bytes)
        for name, size in {
            **(sizes or {}),
            **{name: s.st_size for name, s in self._seen.items()},
        }.items():
            if name == MANIFEST or name in COMPANIONS:
                continue
            size_bytes = self._entry(name).size_bytes
            if size != size_bytes:
                raise self._differs(name, f"{size_bytes} bytes", f"{size} bytes")
            if digests and name in digests:
                self.compare(name, digests[name])
        for name in sorted(self._seen.keys() & {CONFIG, INDEX}):
            self.prove(name)

    def prove(self, name: str, keep_on: Callable[[], object] | None = None) -> None:
        """Hash a whole file. Raises InputError if it cannot be read, or differs from its manifest entry.

        keep_on: as in `sha256_of`.
        """
        try:
            sha256 = sha256_of(self.path_of(name), keep_on)
        except OSError as error:
            what, where = "A file of the source cannot be read.", str(self.path_of(name))
            remedy = _AGAIN if self.is_held else _KEEP
            raise InputError(
                what, where=where, found=error.strerror or error, remedy=remedy
            ) from error
        self.compare(name, sha256)
        self.digests[name] = sha256

    def compare(self, name: str, sha256: str) -> None:
        """Compare the digest of a file that was hashed while it was read; nothing is checked without a manifest."""
        if self._listed is None or name in COMPANIONS:
            return
        expected = self._entry(name).sha256
        if sha256 != expected:
            raise self._differs(name, f"sha256 {expected}", f"sha256 {sha256}")

    def _check_there(self, name: str, size_bytes: int) -> None:
        if name in COMPANIONS:
            return
        try:
            found = f"{self.path_of(name).stat().st_size} bytes"
        except (OSError, ValueError) as error:  # the latter of names that no file has
            found = getattr(error, "strerror", None) or str(error)
        if found != f"{size_bytes} bytes":
            raise self._differs(name, f"{size_bytes} bytes", found)

    def _entry(self, name: str) -> ListedFile:
        assert self._listed is not None
        if name not in self._listed:
            what, where = "The artifact's manifest does not list a file.", str(self.path_of(name))
            expected = "none that is read but those, and README.md and its like"
            remedy = "Take away what is not the artifact's; if it is, copy or convert the artifact again."
            raise InputError(what, where=where, expected=expected, remedy=remedy)
        return self._listed[name]

    def _differs(self, name: str, expected: str, found: str) -> InputError:
        return InputError(
            "A file of the artifact is not what its manifest lists.",
            where=str(self.path_of(name)),
            expected=expected,
            found=found,
            remedy=_AGAIN,
        )


def _identity(status: os.stat_result) -> tuple[int, int, int, int, int]:
    return (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
    )  # `cp -p` keeps mtime


def _memory_devices() -> set[int]:
    """Return the devices of mounted tmpfs; none where the system does not list its mounts."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return set()
    numbers = [
        line.split()[2].split(":")
        for line in lines
        if line.rpartition(" - ")[2].split()[0] in ("tmpfs", "ramfs")
    ]
    return {os.makedev(int(major), int(minor)) for major, minor in numbers}


def _words(status: os.stat_result) -> str:
    size, mtime, ctime, inode, device = _identity(status)
    return f"{size} bytes, mtime {mtime} ns, ctime {ctime} ns, inode {inode} on device {device}"
