"""The journal of an unfinished conversion: its identity, finished output units, and the process at work.

One JSON document a line, with a checksum as its last key; a line without the right checksum is never used. The file is
locked while a process works on the folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hqconv.errors import OutputError, differences
from hqconv.io.durable_files import FileRecord, output_errors, sync_above, sync_folder
from hqconv.schemas.artifact_names import JOURNAL, is_member_file, is_member_journal
from hqconv.schemas.untrusted_files import what_instead

_CHECKSUM = "checksum"
_CHECKSUM_FIELD = f', "{_CHECKSUM}": "'.encode()


def encode_line(document: Mapping[str, Any]) -> bytes:
    """Return a journal line, without its newline: the JSON object with the SHA-256 of all bytes before `checksum`."""
    body = json.dumps(document).encode().removesuffix(b"}")
    return body + _CHECKSUM_FIELD + hashlib.sha256(body).hexdigest().encode() + b'"}'


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a journal line, without its checksum; None for a line that was altered or has none."""
    body, _, checksum = line.rpartition(_CHECKSUM_FIELD)
    if checksum != hashlib.sha256(body).hexdigest().encode() + b'"}':
        return None
    try:
        document = json.loads(body + b"}")
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


@dataclass(frozen=True)
class JournalEntry:
    """A finished output unit: its files, its quantization errors, and the content sums of an MoE layer.

    sources: the SHA-256 of the source files that the unit was read from, where they were hashed.
    """

    unit: str
    files: list[FileRecord]
    measured: dict[str, Any]
    sums: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as a journal line."""
        return {
            "unit": self.unit,
            "files": [asdict(file) for file in self.files],
            "measured": self.measured,
            "sums": self.sums,
            "sources": self.sources,
        }

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> JournalEntry:
        """Read an entry of `to_dict`. Raises KeyError or TypeError for anything else."""
        files = [FileRecord(**record) for record in document["files"]]
        measured, sums = document["measured"], document["sums"]
        return cls(document["unit"], files, measured, sums, document["sources"])

    @property
    def _is_typed(self) -> bool:
        types = [(type(file.path), type(file.size_bytes), type(file.sha256)) for file in self.files]
        return (
            isinstance(self.unit, str)
            and all(of_file == (str, int, str) for of_file in types)
            and isinstance(self.measured, dict)
            and isinstance(self.sums, dict)
            and all(isinstance(sha256, str) for sha256 in self.sources.values())
        )


def parse_identity(path: Path, line: bytes) -> dict[str, Any]:
    """Parse a journal's first line: the identity of the conversion.

    Raises OutputError for a line that is unreadable or altered.
    """
    identity = decode_line(line)
    if identity is None:
        raise OutputError(
            "The journal of an unfinished conversion cannot be read.",
            where=str(path),
            expected="the line of a conversion, as it was written",
            found="other bytes",
            remedy="Start anew in another folder with -o, or remove this one.",
        )
    return identity


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole lines, and the bytes after the last newline."""
    *lines, torn = data.split(b"\n")
    return lines, torn


def parse_entry(line: bytes) -> JournalEntry | None:
    """Parse the line of a finished unit; None for any other line, and for an altered one."""
    document = decode_line(line)
    try:
        entry = None if document is None else JournalEntry.from_dict(document)
        return entry if entry is not None and entry._is_typed else None
    except (AttributeError, KeyError, TypeError):
        return None


def last_process(lines: list[bytes]) -> str:
    """Describe the process that began to work on the folder last."""
    for document in map(decode_line, reversed(lines)):
        if document is not None and {"process", "host"} <= document.keys():
            return f"process {document['process']} on {document['host']}"
    return "a process that has just begun"


def compare_identities(root: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume another conversion, naming the first difference and both values."""
    for key in {**now, **before}:  # in their own order: options before what follows from them
        if before.get(key) != now.get(key):
            expected, found = differences(_parsed(before.get(key)), _parsed(now.get(key)))
            raise OutputError(
                f"The unfinished conversion differs from this one in: {key}.",
                where=str(root),
                expected=expected,
                found=found,
                remedy="Repeat the first command with --resume, or start anew with --overwrite.",
            )


def _parsed(value: Any) -> Any:
    """Return the value of an option, which an identity holds as JSON text; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class Destination(Protocol):
    """The folder that finished output units are written to."""

    root: Path

    def record(self, entry: JournalEntry) -> None:
        """Record a finished unit."""
        ...


class Journal:
    """The journal of the folder `root`, opened and locked; `close` releases the lock.

    name: of the file; another one than JOURNAL is a journal of its own, such as that of an allocation.
    Where several processes share a conversion, each has a journal. Rank 0's is the folder's: it takes over the entries
    of the other journals when it is opened, and removes these files once it holds the entries itself.

    identity: of the conversion that was begun, or None. entries: the finished units. has_lock: False on a file system
    without locks, where no other process is kept out.
    """

    def __init__(self, root: Path, name: str = JOURNAL) -> None:
        """Open the journal, or create it. Raises OutputError where another process is at work."""
        self.path = root / name
        self.is_new, self.has_lock = False, True
        self._member_entries: list[JournalEntry] = []
        with output_errors(self.path):
            self._descriptor = self._open()
            try:
                self.identity, self.entries = self._read()
                if name == JOURNAL:
                    paths = self._member_paths(is_member_journal)
                    self._member_entries = [entry for path in paths for entry in self._take_over(path)]
            except BaseException:
                self.close()
                raise
        self.entries += self._member_entries

    def _member_paths(self, is_member: Callable[[str], bool]) -> list[Path]:
        try:
            return sorted(path for path in self.path.parent.iterdir() if is_member(path.name))
        except FileNotFoundError:  # another process just put the folder elsewhere
            return []

    def _take_over(self, path: Path) -> list[JournalEntry]:
        """Return the entries of another rank of this conversion. Raises OutputError while that process is at work."""
        member = Journal(path.parent, path.name)
        member.close()
        return member.entries if member.identity == self.identity else []

    def _remove_members(self) -> None:
        if self.path.name != JOURNAL:
            return
        with output_errors(self.path.parent):
            members = self._member_paths(is_member_file)
            for path in members:
                path.unlink(missing_ok=True)
            if members:  # before the journal that they belong to may go
                sync_folder(self.path.parent)

    @classmethod
    def open_existing(cls, root: Path) -> Journal | None:
        """Open the journal of a folder that has one; None for other folders."""
        return cls(root) if (root / JOURNAL).is_file() else None

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            try:
                descriptor, self.is_new = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
            except FileExistsError:
                try:
                    found = what_instead(self.path.lstat().st_mode)
                    if found is not None:  # which may wait to be read, or do something when it is opened
                        raise _not_a_file(self.path, found)
                    descriptor, self.is_new = os.open(self.path, flags), False
                except FileNotFoundError:
                    continue
            try:
                self._lock(descriptor)
                # Whoever held the lock until now may have removed the file, or exchanged its folder.
                if self.path.exists() and os.path.samestat(os.fstat(descriptor), self.path.stat()):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(self.path, last_process(split_lines(self.path.read_bytes())[0])) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.has_lock = False

    def _read(self) -> tuple[dict[str, Any] | None, list[JournalEntry]]:
        """Read the identity and the finished units; half a line of a killed run is cut off.

        A first and only line with zero bytes is cut off too: the power failed while it was written (a second line is
        written only once the first one is on the disk).
        """
        lines, torn = split_lines(self.path.read_bytes())
        if len(lines) == 1 and b"\0" in lines[0]:
            lines, torn = [], lines[0]
        if torn:
            os.truncate(self.path, sum(len(line) + 1 for line in lines))
        if not lines:
            return None, []
        entries = [entry for line in lines[1:] if (entry := parse_entry(line))]
        return parse_identity(self.path, lines[0]), entries

    def begin(self, identity: dict[str, Any]) -> None:
        """Record the identity, and that this process is at work; a journal that has the identity keeps its lines."""
        if self.identity is None:
            self._append(identity)
            self.identity = identity
        with output_errors(self.path.parent):  # also where a run that was killed wrote the identity
            sync_folder(self.path.parent)
            sync_above(self.path.parent)
        self._append({"process": os.getpid(), "host": socket.gethostname()})
        for entry in self._member_entries:
            self.record(entry)
        self._member_entries = []
        self._remove_members()

    def record(self, entry: JournalEntry) -> None:
        """Record a finished unit; the record survives a kill from here on."""
        self._append(entry.to_dict())

    def _append(self, document: dict[str, Any]) -> None:
        with output_errors(self.path):
            os.lseek(self._descriptor, 0, os.SEEK_END)
            line = memoryview(encode_line(document) + b"\n")
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)

    def restart(self) -> None:
        """Forget all lines, and keep the lock."""
        with output_errors(self.path):
            os.ftruncate(self._descriptor, 0)
            os.fsync(self._descriptor)
        self._remove_members()
        self.identity, self.entries, self._member_entries = None, [], []

    def moved_to(self, root: Path) -> None:
        """Follow the folder to its new name."""
        self.path = root / JOURNAL

    def remove(self) -> None:
        """Remove the journal of a conversion that is finished, or was never begun."""
        self._remove_members()
        with output_errors(self.path):
            self.path.unlink(missing_ok=True)
            sync_folder(self.path.parent)

    def drop(self) -> None:
        """Release the lock, and leave no journal where there was none."""
        if self.is_new:
            self.remove()
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def read_identity(root: Path) -> dict[str, Any]:
    """Read the identity of the conversion in a folder. Raises OutputError for an unreadable journal."""
    path = root / JOURNAL
    with output_errors(path):
        lines, _ = split_lines(path.read_bytes())
    return parse_identity(path, lines[0] if lines else b"")


def _not_a_file(path: Path, found: str) -> OutputError:
    what, remedy = "Something else has the name of a journal.", "Remove it, or choose another place with -o."
    return OutputError(what, where=str(path), expected="a regular file", found=found, remedy=remedy)


def _busy(path: Path, found: str) -> OutputError:
    return OutputError(
        "Another process is at work on this output.",
        where=str(path.parent if path.name == JOURNAL else path),
        expected="one process at a time",
        found=found,
        remedy="Wait until it is done, or choose another place with -o.",
    )
