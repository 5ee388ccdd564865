"""The lines of a journal, in words: what is converted, finished groups, fetched files, and who is at work."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hqconv.errors import OutputError
from hqconv.io.durable_files import FileRecord, output_errors, sync_above, sync_folder
from hqconv.schemas.artifact_names import JOURNAL, is_member_journal
from hqconv.schemas.untrusted_files import what_instead

FETCHED = "fetched"


@dataclass(frozen=True)
class JournalEntry:
    """A finished group: its files, what its conversion measured, and of a block the content sums.

    sources: the SHA-256 of the source's files that were read for it, where they were hashed.
    """

    unit: str
    files: list[FileRecord]
    measured: dict[str, Any]
    sums: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The entry as a journal line holds it: the unit's key is `group`, as in journals of version 0.1."""
        document = asdict(self)
        return {"group": document.pop("unit"), **document}


def parse_identity(path: Path, line: bytes) -> dict[str, Any]:
    """What a journal's first line says was begun. Raises OutputError where it says nothing that can be read."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise OutputError(
            "The journal of an unfinished conversion cannot be read.",
            where=str(path),
            remedy="Start anew in another folder with -o, or remove this one.",
        ) from None


def lines_of(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines, and what follows the last of them."""
    *lines, torn = data.split(b"\n")
    return lines, torn


def parse_entry(line: bytes) -> JournalEntry | None:
    """A finished group, or None for a line that is none."""
    try:
        words = json.loads(line)
        files = [FileRecord(**record) for record in words["files"]]
        are_records = all(
            (type(f.path), type(f.size_bytes), type(f.sha256)) == (str, int, str) for f in files
        )
        measured, sums, sources = words["measured"], words["sums"], words.get("sources", {})
        are_digests = all(isinstance(sha256, str) for sha256 in sources.values())
        are_words = isinstance(measured, dict) and isinstance(sums, dict) and are_digests
        is_whole = are_records and isinstance(words["group"], str) and are_words
        return JournalEntry(words["group"], files, measured, sums, sources) if is_whole else None
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        return None


def parse_fetch(line: bytes) -> str | None:
    """A fetched file, or None for a line that is of none."""
    try:
        name = json.loads(line)[FETCHED]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def last_process(lines: list[bytes]) -> str:
    """Who noted last that it is at work."""
    for line in reversed(lines):
        try:
            words = json.loads(line)
            return f"process {int(words['process'])} on {words['host']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return "a process that has just begun"


def compare_identities(root: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
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


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class Destination(Protocol):
    """Where groups are written and put down."""

    root: Path

    @property
    def notes(self) -> Journal:
        """Where it is noted what is fetched."""
        ...

    def record(self, entry: JournalEntry) -> None:
        """Note a finished group."""
        ...


class Journal:
    """The journal of the folder `root`, opened and locked; `close` gives the lock back.

    Where several processes share a conversion, each has one. The first process's is the folder's: what the others
    finished is taken over from theirs when it is opened, and these are removed once it says so itself.

    identity: what the lines say was begun, None where nothing was. entries: the groups that were finished. fetched:
    files that were fetched into the Hub's cache. has_lock: False on a file system without locks, where nobody is kept
    out.
    """

    def __init__(self, root: Path, name: str = JOURNAL) -> None:
        """Open the journal, or create it. Raises OutputError where another process is at work."""
        self.path = root / name
        self.is_new, self.has_lock = False, True
        self._of_members: list[JournalEntry] = []
        with output_errors(self.path):
            self._descriptor = self._open()
            try:
                self.identity, self.entries, self.fetched = self._read()
                if name == JOURNAL:
                    self._of_members = [entry for path in self._members() for entry in self._take_over(path)]
            except BaseException:
                self.close()
                raise
        self.entries += self._of_members

    def _members(self) -> list[Path]:
        try:
            return sorted(path for path in self.path.parent.iterdir() if is_member_journal(path.name))
        except FileNotFoundError:  # another process just put the folder elsewhere
            return []

    def _take_over(self, path: Path) -> list[JournalEntry]:
        """What another process of the same conversion finished. Raises OutputError where it is still at work."""
        member = Journal(path.parent, path.name)
        member.close()
        return member.entries if member.identity == self.identity else []

    def _remove_members(self) -> None:
        with output_errors(self.path.parent):
            members = self._members()
            for path in members:
                path.unlink(missing_ok=True)
            if members:  # before the journal that they belong to may go
                sync_folder(self.path.parent)

    @classmethod
    def if_there(cls, root: Path) -> Journal | None:
        """The journal of a folder that has one."""
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
                        raise _no_file(self.path, found)
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
            raise _busy(self.path, last_process(lines_of(self.path.read_bytes())[0])) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.has_lock = False

    def _read(self) -> tuple[dict[str, Any] | None, list[JournalEntry], set[str]]:
        """Identity, finished groups and fetched files; half a line of a killed run is cut off.

        So is a first line that is none and the only one: the power failed while it was written, and the next is written
        once it lasts.
        """
        lines, torn = lines_of(self.path.read_bytes())
        if len(lines) == 1 and b"\0" in lines[0]:
            lines, torn = [], lines[0]
        if torn:
            os.truncate(self.path, sum(len(line) + 1 for line in lines))
        if not lines:
            return None, [], set()
        entries = [entry for line in lines[1:] if (entry := parse_entry(line))]
        return parse_identity(self.path, lines[0]), entries, set(filter(None, map(parse_fetch, lines[1:])))

    def begin(self, identity: dict[str, Any]) -> None:
        """Note what is converted, and that this process does it; a journal that says so already keeps its lines."""
        if self.identity is None:
            self._append(identity)
            self.identity = identity
            for name in sorted(self.fetched):  # of a conversion that was started anew
                self._append({FETCHED: name})
        with output_errors(self.path.parent):  # also where a run that was killed wrote the identity
            sync_folder(self.path.parent)
            sync_above(self.path.parent)
        self._append({"process": os.getpid(), "host": socket.gethostname()})
        for entry in self._of_members:
            self.record(entry)
        self._of_members = []
        if self.path.name == JOURNAL:
            self._remove_members()

    def record(self, entry: JournalEntry) -> None:
        """Note a finished group; it survives a kill from here on."""
        self._append(entry.to_dict())

    def note_fetch(self, name: str) -> None:
        """Note that a file will be fetched; it survives a kill from here on."""
        if name not in self.fetched:
            self._append({FETCHED: name})
            self.fetched.add(name)

    def _append(self, words: dict[str, Any]) -> None:
        with output_errors(self.path):
            os.lseek(self._descriptor, 0, os.SEEK_END)
            line = memoryview(json.dumps(words).encode() + b"\n")
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)

    def restart(self) -> None:
        """Forget all lines but what was fetched, and keep the lock."""
        with output_errors(self.path):
            os.ftruncate(self._descriptor, 0)
            os.fsync(self._descriptor)
        self._remove_members()
        self.identity, self.entries, self._of_members = None, [], []

    def moved_to(self, root: Path) -> None:
        """The folder has another name now."""
        self.path = root / JOURNAL

    def remove(self) -> None:
        """Forget the conversion: it is finished, or never was begun."""
        self._remove_members()
        with output_errors(self.path):
            self.path.unlink(missing_ok=True)
            sync_folder(self.path.parent)

    def drop(self) -> None:
        """Give the lock back, and leave no journal where there was none."""
        if self.is_new:
            self.remove()
        self.close()

    def close(self) -> None:
        """Give the lock back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def identity_of(root: Path) -> dict[str, Any]:
    """What the journal of a folder says was begun there. Raises OutputError where it says nothing that can be read."""
    path = root / JOURNAL
    with output_errors(path):
        lines, _ = lines_of(path.read_bytes())
    return parse_identity(path, lines[0] if lines else b"")


def _no_file(path: Path, found: str) -> OutputError:
    what, remedy = "Something else has the name of a journal.", "Remove it, or choose another folder with -o."
    return OutputError(what, where=str(path), expected="a regular file", found=found, remedy=remedy)


def _busy(path: Path, found: str) -> OutputError:
    return OutputError(
        "Another process is at work on this output.",
        where=str(path.parent),
        expected="one conversion at a time",
        found=found,
        remedy="Wait until it is done, or choose another folder with -o.",
    )
