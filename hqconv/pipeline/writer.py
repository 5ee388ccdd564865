"""The output folder: pre-sized files written in place, finished by fsync and rename, and a journal to resume by.

An unfinished folder holds a journal and no manifest, so that nothing takes it for an artifact. Each group of
files is recorded in the journal only after all of them lie under their final names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hqconv.errors import OutputError
from hqconv.plan.plan import OutFile, Place
from hqconv.schemas import artifact

_HASH_CHUNK_BYTES = 1 << 22
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


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = bytearray(_HASH_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that it is either absent or complete, also after a power cut."""
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + artifact.PARTIAL)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class GroupWriter:
    """The files of one group while they are written: any thread may write any place, each once."""

    def __init__(self, root: Path, files: tuple[OutFile, ...]) -> None:
        """Create every file at its full size under its temporary name, with its header."""
        self._root, self._files = root, files
        self._descriptors: list[int] = []
        try:
            for file in files:
                self._descriptors.append(self._create(file))
        except BaseException:
            self.abandon()
            raise

    def _partial(self, file: OutFile) -> Path:
        return self._root / (file.path + artifact.PARTIAL)

    def _create(self, file: OutFile) -> int:
        path = self._partial(file)
        with output_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, file.size_bytes)  # a full disk shows before the work
                self._write_at(descriptor, file.header, 0)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

    @staticmethod
    def _write_at(descriptor: int, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written

    def write(self, place: Place, data: Any) -> None:
        """Write one place whole. `data` is a C-contiguous buffer of exactly its size."""
        num_bytes = memoryview(data).nbytes
        assert num_bytes == place.num_bytes, (self._files[place.file].path, place, num_bytes)
        with output_errors(self._root / self._files[place.file].path):
            self._write_at(self._descriptors[place.file], data, place.offset_bytes)

    def finish(self) -> list[FileRecord]:
        """Flush the files to the disk, give them their final names, and return their sizes and digests."""
        records = []
        for file, descriptor in zip(self._files, self._descriptors, strict=True):
            path = self._root / file.path
            with output_errors(path):
                os.fsync(descriptor)
                records.append(FileRecord(file.path, file.size_bytes, sha256_of(self._partial(file))))
        for file in self._files:
            path = self._root / file.path
            with output_errors(path):
                self._partial(file).replace(path)
        with output_errors(self._root):
            for folder in sorted({(self._root / file.path).parent for file in self._files}):
                _sync_folder(folder)
        self._close()
        return records

    def abandon(self) -> None:
        """Remove what was written."""
        self._close()
        for file in self._files:
            self._partial(file).unlink(missing_ok=True)

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


@dataclass(frozen=True)
class JournalEntry:
    """A finished group: its files, and what its conversion measured."""

    group: str
    files: list[FileRecord]
    measured: dict[str, Any]


class OutputFolder:
    """An artifact in the making.

    `identity` says what is converted, from what, by which versions; a resumed run must have the same.
    """

    def __init__(self, root: Path, identity: dict[str, Any]) -> None:
        self.root = root
        self.done: dict[str, JournalEntry] = {}
        self._identity = identity
        self._journal = root / artifact.JOURNAL

    def start(self, *, resume: bool, overwrite: bool) -> None:
        """Take the folder for this conversion. Raises OutputError if it is taken, or not what is resumed."""
        with output_errors(self.root):
            if self.root.exists() and not self.root.is_dir():
                raise _taken(self.root, "a file")
            begun = self._journal.with_name(
                self._journal.name + artifact.PARTIAL
            )  # killed in its first moment
            occupied = self.root.exists() and any(path != begun for path in self.root.iterdir())
        if occupied and overwrite:
            self._clear()
        elif occupied and resume:
            self._continue()
            return
        elif occupied:
            unfinished = self._journal.exists()
            raise _taken(
                self.root, "an unfinished conversion" if unfinished else "a folder that is not empty"
            )
        write_whole(self._journal, json.dumps(self._identity).encode() + b"\n")

    def _clear(self) -> None:
        """Remove an old artifact or an unfinished one; never anything else."""
        ours = (self.root / artifact.MANIFEST).exists() or self._journal.exists()
        if not ours:
            raise OutputError(
                "--overwrite replaces only what hqconv made.",
                where=str(self.root),
                expected=f"a folder with {artifact.MANIFEST}",
                remedy="Remove the folder yourself, or choose another with -o.",
            )
        with output_errors(self.root):
            (self.root / artifact.MANIFEST).unlink(missing_ok=True)  # first: from here on it is no artifact
            for path in self.root.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _continue(self) -> None:
        if not self._journal.exists():
            finished = (self.root / artifact.MANIFEST).exists()
            nothing = f"a folder without {artifact.JOURNAL}: nothing to resume"
            raise _taken(self.root, "a finished artifact" if finished else nothing)
        with output_errors(self._journal):
            *lines, torn = self._journal.read_bytes().split(b"\n")
        try:
            before = dict(json.loads(lines[0]))
        except (ValueError, IndexError, TypeError):
            raise _taken(self.root, "an unreadable journal: nothing to resume") from None
        _compare(self.root, before, self._identity)
        for line in lines[1:]:
            entry = _parse_entry(line)
            if entry and all(self._is_there(record) for record in entry.files):
                self.done[entry.group] = entry
        with output_errors(self.root):
            if torn:  # half a line of a killed run: what is recorded next must not be glued to it
                os.truncate(self._journal, sum(len(line) + 1 for line in lines))
            (self.root / artifact.MANIFEST).unlink(missing_ok=True)  # killed after sealing
            for path in self.root.rglob("*" + artifact.PARTIAL):
                path.unlink()

    def _is_there(self, record: FileRecord) -> bool:
        path = self.root / record.path
        return (
            path.is_file() and path.stat().st_size == record.size_bytes and sha256_of(path) == record.sha256
        )

    def record(self, entry: JournalEntry) -> None:
        """Note a finished group; it survives a kill from here on."""
        line = json.dumps({**asdict(entry)}).encode() + b"\n"
        with output_errors(self._journal), self._journal.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.done[entry.group] = entry

    def seal(self, manifest: bytes) -> None:
        """Write the manifest, the artifact's last file, and forget the journal."""
        write_whole(self.root / artifact.MANIFEST, manifest)
        with output_errors(self._journal):
            self._journal.unlink(missing_ok=True)
            _sync_folder(self.root)


def _taken(root: Path, found: str) -> OutputError:
    return OutputError(
        "The output folder cannot be used.",
        where=str(root),
        expected="no such folder, an empty one, or with --resume an unfinished conversion",
        found=found,
        remedy="Choose another with -o, go on with --resume, or replace an artifact with --overwrite.",
    )


def _parse_entry(line: bytes) -> JournalEntry | None:
    """A journal line, or None for the half-written last line of a killed run."""
    try:
        words = json.loads(line)
        files = [FileRecord(**record) for record in words["files"]]
        return JournalEntry(words["group"], files, words["measured"])
    except (ValueError, KeyError, TypeError):
        return None


def _compare(root: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume another conversion, naming the first difference."""
    for key in {**now, **before}:  # in their own order: what was asked for before what follows from it
        if before.get(key) != now.get(key):
            raise OutputError(
                f"The unfinished conversion differs from this one in: {key}.",
                where=str(root),
                expected=_short(before.get(key)),
                found=_short(now.get(key)),
                remedy="Repeat the first command with --resume, or start anew with --overwrite.",
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + " …"


def num_bytes_below(root: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    with output_errors(root):
        return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())


def check_space(root: Path, num_bytes: int) -> None:
    """Refuse to start where the disk cannot hold the output."""
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
            expected=f"{num_bytes / 1e9:.2f} GB free",
            found=f"{free / 1e9:.2f} GB free",
            remedy="Free some space, or choose another place with -o.",
        )
    if not writable:
        raise OutputError(
            "The output folder cannot be written.", where=str(folder), remedy="Check its permissions."
        )
