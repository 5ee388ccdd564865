"""The journal of an unfinished conversion: its identity, finished units, and the process at work.

One JSON document a line, with a checksum as its last key; a line without the right checksum is never used. The file is
locked while a process works on what it stands for.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from hqconv.errors import OutputError
from hqconv.io.durable_files import FileRecord, output_errors, sync_above, sync_folder
from hqconv.schemas.artifact_names import JOURNAL, journal_part
from hqconv.schemas.untrusted_files import what_instead

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_POLL_S = 0.05
_CHECKSUM_FIELD = b', "checksum": "'


@dataclass(frozen=True)
class JournalEntry:
    """A finished output unit: its files, and the quantization errors of an MoE layer.

    states: of the source's files that the unit was read from, in a folder, as `FileSnapshot.states`.
    """

    unit: str
    files: list[FileRecord]
    measured: dict[str, Any]
    states: dict[str, list[int]] = field(default_factory=dict)


# --- lines


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


def parse_entry(line: bytes) -> JournalEntry | None:
    """Parse the line of a finished unit; None for any other line, and for an altered one."""
    document = decode_line(line)
    if document is None or "unit" not in document:
        return None
    try:
        entry = JournalEntry(
            **{**document, "files": [FileRecord(**record) for record in document["files"]]}
        )
    except (KeyError, TypeError):
        return None
    texts = [entry.unit, *(text for file in entry.files for text in (file.path, file.sha256))]
    is_typed = all(isinstance(text, str) for text in texts) and isinstance(entry.measured, dict)
    is_typed = is_typed and isinstance(entry.states, dict)
    return entry if is_typed else None


def _split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole lines, and the bytes after the last newline."""
    *lines, torn = data.split(b"\n")
    return lines, torn


def _last_process(path: Path) -> str:
    """Describe the process that began to work last."""
    lines, _ = _split_lines(path.read_bytes())
    for document in map(decode_line, reversed(lines)):
        if document is not None and "process" in document:
            return f"process {document['process']} on {document['host']}"
    return "a process that has just begun"


# --- files


class Journal:
    """A journal file, opened and locked; a context manager that releases the lock.

    identity: of the work that was begun, or None. entries: the finished units. has_lock: False on a file system without
    locks, where no other process is kept out.
    """

    def __init__(self, path: Path, wait_s: float = 0.0) -> None:
        """Open the journal, or create it. Raises OutputError if another process holds it for longer than `wait_s`."""
        self.path = path
        with output_errors(path):
            self._descriptor = self._open(time.monotonic() + wait_s)
            try:
                self.identity, self.entries = self._read()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, latest: float) -> int:
        while True:
            try:
                descriptor = os.open(self.path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
                self._is_new = True
            except FileExistsError:
                try:
                    descriptor = _open_existing(self.path)
                    self._is_new = False
                except FileNotFoundError:
                    continue
            try:
                self._lock(descriptor, latest)
                # Whoever held the lock until now may have removed the file, or exchanged its folder.
                if self.path.exists() and os.path.samestat(os.fstat(descriptor), self.path.stat()):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int, latest: float) -> None:
        while True:
            try:
                self.has_lock = _try_to_lock(descriptor)
                return
            except BlockingIOError:
                if time.monotonic() >= latest:
                    raise busy(self.path, _last_process(self.path)) from None
                time.sleep(_POLL_S)

    def _read(self) -> tuple[dict[str, Any] | None, list[JournalEntry]]:
        """Read the identity and the finished units; half a line of a killed run is cut off.

        A first and only line with zero bytes is cut off too: the power failed while it was written (a second line is
        written only once the first one is on the disk). Raises OutputError for any other first line that was altered.
        """
        lines, torn = _split_lines(self.path.read_bytes())
        if len(lines) == 1 and b"\0" in lines[0]:
            torn = lines.pop()
        if torn:
            os.truncate(self.path, sum(len(line) + 1 for line in lines))
        if not lines:
            return None, []
        identity = decode_line(lines[0])
        if identity is None:
            raise OutputError(
                "The journal of an unfinished conversion cannot be read.",
                where=self.path,
                expected="the line of a conversion, as it was written",
                found="other bytes",
                remedy="Start anew in another folder with -o, or remove this one.",
            )
        return identity, [entry for line in lines[1:] if (entry := parse_entry(line))]

    def begin(self, identity: dict[str, Any]) -> None:
        """Record the identity, and that this process is at work; a journal that has the identity keeps its lines."""
        if self.identity is None:
            self._append(identity)
            self.identity = identity
        with output_errors(self.path.parent):  # also where a run that was killed wrote the identity
            sync_folder(self.path.parent)
            sync_above(self.path.parent)
        self._append({"process": os.getpid(), "host": socket.gethostname()})

    def record(self, entry: JournalEntry) -> None:
        """Record a finished unit; the record survives a kill from here on."""
        self._append(asdict(entry))

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
        self.identity = None
        self.entries = []

    def remove(self) -> None:
        """Remove the journal of work that is finished, or was never begun."""
        with output_errors(self.path):
            self.path.unlink(missing_ok=True)
            sync_folder(self.path.parent)

    def drop(self) -> None:
        """Release the lock, and leave no journal where there was none."""
        # another process may have locked the new file first
        if self._is_new and self.identity is None:
            self.remove()
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class FolderJournal(Journal):
    """The journal of an output folder, with those of parts: it takes over the units of each part that has ended.

    at_work: the parts whose processes hold their own journals now. Part journals appear and disappear only while the
    folder's journal is locked.
    """

    def __init__(self, root: Path, wait_s: float = 0.0) -> None:
        super().__init__(root / JOURNAL, wait_s)
        self.at_work: list[str] = []
        self._ended: list[Path] = []
        self._taken_over: list[JournalEntry] = []
        try:
            with output_errors(self.path):
                for path in part_journals(root):
                    self._look_at_part(path)
        except BaseException:
            self.close()
            raise
        self.entries += self._taken_over

    @classmethod
    def open_existing(cls, root: Path) -> FolderJournal | None:
        """Open the journal of a folder that has one; None for other folders. Raises OutputError for a part at work."""
        if not (root / JOURNAL).is_file():
            return None
        journal = cls(root)
        if journal.at_work:
            journal.close()
            raise busy(journal.path, f"part {', part '.join(journal.at_work)}")
        return journal

    def _look_at_part(self, path: Path) -> None:
        if _is_locked(path):
            self.at_work.append(journal_part(path.name))
            return
        self._ended.append(path)
        first, *lines = _split_lines(path.read_bytes())[0] or [b""]
        if decode_line(first) == self.identity:
            self._taken_over += [entry for line in lines if (entry := parse_entry(line))]

    def begin(self, identity: dict[str, Any]) -> None:
        """Begin as any journal, and record what parts have finished."""
        super().begin(identity)
        for entry in self._taken_over:
            self.record(entry)
        self._taken_over = []
        self._remove_ended()

    def _remove_ended(self) -> None:
        with output_errors(self.path.parent):
            for path in self._ended:
                path.unlink(missing_ok=True)
            if self._ended:  # before the journal that they belong to may go
                sync_folder(self.path.parent)
        self._ended = []

    def restart(self) -> None:
        """Forget all lines, also of parts, and keep the lock."""
        super().restart()
        self._taken_over = []
        self._remove_ended()

    def remove(self) -> None:
        """Remove the journal, after those of parts."""
        self._remove_ended()
        super().remove()


def part_journals(root: Path) -> list[Path]:
    """Return the journals of parts in an output folder."""
    try:
        return sorted(path for path in root.iterdir() if journal_part(path.name))
    except FileNotFoundError:  # another process just put the folder elsewhere
        return []


def _open_existing(path: Path) -> int:
    found = what_instead(path.lstat().st_mode)
    if found is not None:  # which may wait to be read, or do something when it is opened
        raise OutputError(
            "Something else has the name of a journal.",
            where=path,
            expected="a regular file",
            found=found,
            remedy="Remove it, or choose another place with -o.",
        )
    return os.open(path, _FLAGS)


def _is_locked(path: Path) -> bool:
    """Return whether another process holds a journal."""
    descriptor = _open_existing(path)
    try:
        _try_to_lock(descriptor)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _try_to_lock(descriptor: int) -> bool:
    """Lock a file; False on a file system without locks. Raises BlockingIOError where another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def busy(path: Path, found: str) -> OutputError:
    """Return the error for work that another process does: `found` names it."""
    return OutputError(
        "Another process is at work on this output.",
        where=path.parent if path.name == JOURNAL else path,
        expected="one process at a time",
        found=found,
        remedy="Wait until it is done, or choose another place with -o.",
    )
