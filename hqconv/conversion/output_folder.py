"""The output folder of a conversion: begun, resumed, shared by parts, or replaced by a new artifact.

An unfinished folder holds a journal and no manifest, so that nothing takes it for an artifact. A unit of files is
recorded in the journal only after all of them have their final names. With `--overwrite` the old artifact stays until
the new one is complete: that is built in the sibling folder `.<name>.hqconv`, then both folders are exchanged, and the
files of the old manifest are removed. Only files that a manifest or a journal lists are ever removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import Difference, Manifest, differences, is_artifact, read_manifest
from hqconv.artifact.model_card import are_sums, is_own_card
from hqconv.conversion.journal import FolderJournal, Journal, JournalEntry, busy
from hqconv.errors import (
    HqconvError,
    OutputError,
    RequestError,
    VerificationError,
    first_few,
    plural,
    short_text,
)
from hqconv.io.durable_files import (
    FileRecord,
    check_space,
    exchange,
    is_whole,
    make_folder,
    output_errors,
    partial,
    settle,
    size_of,
    sync_above,
    sync_folders,
    write_whole,
)
from hqconv.io.file_access import Descriptors, sha256_of, write_fully
from hqconv.planning.output_units import CopiedShardPlan, OutFile, OutputUnit
from hqconv.schemas.artifact_names import (
    CARD,
    COMPANIONS,
    JOURNAL,
    MANIFEST,
    PARTIAL,
    SUMS,
    journal_part,
    part_journal,
)

_MAX_PARTS = 9999
FINISHED = "a finished artifact"
UNFINISHED = "an unfinished conversion"
FOREIGN_FOLDER = "a folder that hqconv did not make, and that is not empty"
_WAIT_S = 60.0  # of a part for the folder's lock, which others hold while they begin, end or seal
DifferenceOf = Callable[[Manifest], Difference | None]


def side_folder(out: Path) -> Path:
    """Return the folder in which the artifact is built that will replace the one at `out`."""
    return out.with_name(f".{out.name}.hqconv")


def parked_folder(out: Path) -> Path:
    """Return the folder of the old artifact during an exchange, on file systems without an atomic one."""
    return out.with_name(f".{out.name}.hqconv-old")


@dataclass(frozen=True)
class Part:
    """One of `count` parts of a conversion; `number` is 1 … count."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parse `I/N`, such as 1/4. Raises RequestError for anything else."""
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text.strip(), re.ASCII)
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= count:
            raise RequestError(
                "There is no such part.",
                where="--part",
                expected=f"I/N with I from 1 to N, at most {_MAX_PARTS}, such as 1/4",
                found=text,
            )
        return cls(number, count)

    def may_work_beside(self, other: str) -> bool:
        """Return whether another part, such as 2/4, has no unit of this one."""
        number, _, count = other.partition("/")
        return count == str(self.count) and number != str(self.number)

    def share(self, units: Sequence[OutputUnit]) -> list[OutputUnit]:
        """Return this part's units: neighbours, so that few shards of a source are read by two parts.

        Parts have equal shares of the bytes of MoE layers, and of the bytes of copied tensors, to half a unit.
        """
        layers = [unit for unit in units if not isinstance(unit, CopiedShardPlan)]
        copied = [unit for unit in units if isinstance(unit, CopiedShardPlan)]
        return [*self._share(layers), *self._share(copied)]

    def _share(self, units: Sequence[OutputUnit]) -> Iterator[OutputUnit]:
        total = sum(unit.num_bytes_read for unit in units)
        end = 0
        for unit in units:
            begin = end
            end = end + unit.num_bytes_read
            # by the middle of the unit
            number = 1 + (begin + end) * self.count // max(1, 2 * total)
            if min(number, self.count) == self.number:
                yield unit


class OutputFolder:
    """The folder of an unfinished artifact, a context manager that releases the lock at its end.

    root: the folder that files are written to. done: the finished units. identity: source, options and versions, which
    a resumed run must have in common. paths: all files of the artifact. difference: returns the first key in which a
    finished artifact's manifest differs from the request; None if the request made the artifact. is_current: returns
    whether a finished unit was read from the files that the source has now.
    """

    def __init__(
        self,
        out: Path,
        identity: Mapping[str, Any],
        paths: Collection[str],
        difference: DifferenceOf = lambda _: None,
        is_current: Callable[[JournalEntry], bool] = lambda _: True,
    ) -> None:
        self.out = self.root = out.resolve()
        self.done: dict[str, JournalEntry] = {}
        self.warnings: list[str] = []
        self.replaced_because = ""
        self._side = side_folder(self.out)
        self._identity = {**identity, "files": sorted(paths)}
        self._paths = paths
        self._difference = difference
        self._is_current_unit = is_current
        self._journal: FolderJournal | None = None
        self._part_journal: Journal | None = None

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for journal in (self._journal, self._part_journal):
            if journal is not None:
                journal.close()

    @property
    def has_lock(self) -> bool:
        """True if other processes are kept out: False on file systems without locks."""
        return self._journal is None or self._journal.has_lock

    # --- a whole conversion

    def start(
        self,
        num_bytes: int,
        *,
        resume: bool = False,
        overwrite: bool = False,
        why_not_current: Callable[[Manifest], str] | None = None,
    ) -> bool:
        """Take the folder for a whole conversion, which will write `num_bytes`; True if there is work to do.

        False where `resume` finds a finished artifact; leftovers of its conversion are removed. why_not_current: given
        for an update, which leaves an artifact for which it returns "", resumes a conversion of the same identity, and
        replaces everything else.
        Raises OutputError where the folder is in use or the disk too small, where `resume` finds another conversion or
        an artifact that lacks files, where foreign files would be lost, or where another process is at work on the
        folder.
        """
        self._check_no_file()
        with ExitStack() as unused:
            of_side, of_out = self._lock(unused)
            is_finished = is_artifact(self.out)
            unfinished = of_side or (None if is_finished else of_out)
            if why_not_current is not None:
                if is_finished and self._is_current(why_not_current):
                    if of_side is not None:
                        self._start_anew(self._side, of_side)
                    self._tidy_up(of_side, of_out)
                    return False
                resume = unfinished is not None and unfinished.identity == self._identity
                overwrite = not resume
                self.replaced_because = "" if resume else self.replaced_because
            if is_finished and resume and (of_side is None or of_side.identity is None):
                if (
                    of_side is None
                    or self._difference(read_manifest(self.out, is_sealed=True)) is None
                ):
                    check_finished(self.out, self._difference)
                    self._tidy_up(of_side, of_out)
                    return False
                self._discard_old()  # another request began to replace this artifact, and goes on
            if unfinished is not None:
                self._take_up(unfinished, resume=resume, overwrite=overwrite)
            elif is_finished:
                if not overwrite:
                    raise cannot_use(self.out, FINISHED)
                self._begin_to_replace(num_bytes, has_journal=of_out is not None)
            else:
                self._begin(num_bytes)
            if is_finished and of_out is not None:  # of the artifact, which is replaced
                of_out.remove()
        return True

    def _check_no_file(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise cannot_use(self.out, "a file")

    def _lock(self, unused: ExitStack) -> tuple[FolderJournal | None, FolderJournal | None]:
        """Lock the existing journals of the side folder and of the folder; `unused` closes what is not taken up.

        An exchange of both folders that was interrupted is finished first.
        """
        while True:
            journals = []
            for root in (self._side, self.out):
                journals.append(FolderJournal.open_existing(root))
                if journals[-1] is not None:
                    unused.callback(self._close_unless_taken_up, journals[-1])
            parked = parked_folder(self.out)
            if not parked.exists():
                return journals[0], journals[1]
            with output_errors(self.out):
                settle(self._side, self.out, parked)
            for journal in filter(None, journals):
                journal.close()

    def _close_unless_taken_up(self, journal: FolderJournal) -> None:
        if journal is not self._journal:
            journal.close()

    def _is_current(self, why_not_current: Callable[[Manifest], str]) -> bool:
        """Return whether the artifact is the one that an update asks for; else `replaced_because` gets the reason."""
        try:
            self.replaced_because = why_not_current(read_manifest(self.out))
        except VerificationError as error:
            self.replaced_because = error.what
        return not self.replaced_because

    def _tidy_up(self, of_side: FolderJournal | None, of_out: FolderJournal | None) -> None:
        """Remove what killed runs left beside a finished artifact: nothing of it is to be resumed."""
        self._try_to_discard(of_side)
        if of_out is not None:
            of_out.remove()

    def _begin(self, num_bytes: int) -> None:
        """Start in an empty or a new folder."""
        self._check_not_foreign()
        check_space(self.out, num_bytes)
        journal = _create_journal(self.out)
        if journal.identity is not None or files_in(self.out) > {JOURNAL}:
            journal.drop()
            raise cannot_use(self.out, "a folder that is not empty")
        self._work_in(self.out, journal)

    def _check_not_foreign(self) -> None:
        if self.out.exists() and files_in(self.out) and not (self.out / JOURNAL).exists():
            raise cannot_use(self.out, FOREIGN_FOLDER)

    def _work_in(self, root: Path, journal: FolderJournal) -> None:
        self.root = root
        self._journal = journal
        journal.begin(self._identity)

    def _take_up(self, journal: FolderJournal, *, resume: bool, overwrite: bool) -> None:
        """Continue an unfinished conversion, or start it anew."""
        root = journal.path.parent
        if overwrite:
            self._start_anew(root, journal)
        elif resume and journal.identity is not None:
            _refuse_another(self.out, journal.identity, self._identity)
            self._keep_finished(root, journal.entries, self._paths)
            (root / MANIFEST).unlink(missing_ok=True)  # killed after sealing
        elif (
            journal.identity is not None
            or files_in(root) > {JOURNAL}
            or (root != self.out and not resume)
        ):
            nothing = "a journal that says nothing: nothing to resume"
            raise cannot_use(self.out, nothing if resume else UNFINISHED)
        # else the run was killed before it recorded its identity
        self._work_in(root, journal)

    def _start_anew(self, root: Path, journal: FolderJournal) -> None:
        """Remove the files of an unfinished conversion that its journal lists."""
        files = (journal.identity or {}).get("files")
        begun = [path for path in files if isinstance(path, str)] if isinstance(files, list) else []
        listed = {*begun, *listed_files(root), *self._paths}
        check_strays(root, listed)
        # The manifest first, so that the rest is never taken for an artifact.
        remove_listed(root, [MANIFEST, *sorted(listed - {MANIFEST})])
        journal.restart()

    def _keep_finished(
        self, root: Path, entries: Iterable[JournalEntry], paths: Iterable[str]
    ) -> None:
        """Take current units whose files are all complete as done, and remove the partial files of `paths`."""
        check_strays(root, {*self._paths, *listed_files(root)}, self._paths)
        entries = self._current(entries)
        with output_errors(root):
            for entry in entries:
                if all(is_whole(root, record) for record in entry.files):
                    self.done[entry.unit] = entry
            for path in paths:
                partial(root / path).unlink(missing_ok=True)

    def _current(self, entries: Iterable[JournalEntry]) -> list[JournalEntry]:
        """Return the last entry of each unit that was read from the source's files as they are now."""
        last = {entry.unit: entry for entry in entries}
        current = [entry for entry in last.values() if self._is_current_unit(entry)]
        if num_stale := len(last) - len(current):
            what = "files of the source that have changed since must be made anew"
            self.warnings.append(f"{plural(num_stale, 'finished unit')} of {what}.")
        return current

    def _begin_to_replace(self, num_bytes: int, *, has_journal: bool) -> None:
        """Start in the side folder of a finished artifact. has_journal: the artifact's lock is held."""
        check_replaceable(self.out)
        check_strays(self.out, listed_files(self.out), self._paths)
        check_space(self._side, num_bytes)
        journal = _create_journal(self._side)
        try:
            # A run that exchanged the folders since then still holds the journal that moved along.
            moved = None if has_journal else FolderJournal.open_existing(self.out)
            if moved is not None:
                moved.close()
            if journal.identity is not None:
                raise cannot_use(self.out, UNFINISHED)
            self._discard_old()
            if files_in(self._side) > {JOURNAL}:
                what = (
                    "a folder beside the output that is not empty, where the new one would be built"
                )
                raise cannot_use(self._side, what)
        except BaseException:
            journal.drop()
            with suppress(OSError):
                self._side.rmdir()
            raise
        self._work_in(self._side, journal)

    # --- a part

    def join(self, part: Part, units: Sequence[OutputUnit]) -> bool:
        """Begin a part, which writes `units`, in a new folder or beside other parts of the same conversion.

        False if the artifact is finished. The folder's lock is held only meanwhile, and the lock of the part's own
        journal until `leave`. Raises OutputError as `start`, where a process is at work that is no other part of the
        same count, and on a file system without locks.
        """
        self._check_no_file()
        if (self._side / JOURNAL).is_file():
            raise cannot_use(
                self.out,
                "an artifact that an unfinished --overwrite replaces: finish it without --part",
            )
        if not (self.out / JOURNAL).exists():
            if is_artifact(self.out):
                check_finished(self.out, self._difference)
                return False
            self._check_not_foreign()
        journal = _create_journal(self.out, _WAIT_S)
        try:
            if is_artifact(self.out):
                check_finished(self.out, self._difference)
                journal.remove()
                return False
            self._begin_part(part, journal)
        except BaseException:
            journal.drop()
            raise
        finally:
            journal.close()
        names = {unit.name for unit in units}
        paths = [file.path for unit in units for file in unit.files]
        self._keep_finished(
            self.out, [entry for entry in journal.entries if entry.unit in names], paths
        )
        return True

    def _begin_part(self, part: Part, journal: FolderJournal) -> None:
        """Begin a part's own journal while the folder's is locked."""
        if not journal.has_lock:
            raise OutputError(
                "Parts need a file system with locks (flock).",
                where=self.out,
                remedy="Convert without --part, or elsewhere with -o.",
            )
        rival = next((other for other in journal.at_work if not part.may_work_beside(other)), None)
        if rival is not None:
            raise busy(journal.path, f"part {rival}, beside which there can be no part {part}")
        if journal.identity is not None:
            _refuse_another(self.out, journal.identity, self._identity)
        elif files_in(self.out) > {JOURNAL}:
            raise cannot_use(self.out, "a folder that is not empty")
        journal.begin(self._identity)
        self._part_journal = Journal(self.out / part_journal(part.number, part.count))
        self._part_journal.begin(self._identity)

    def leave(self) -> tuple[str, ...] | None:
        """End a part: its units go to the folder's journal, and `done` has those of all parts that ended.

        This process holds the folder's lock from here on. Returns the parts at work: none for the last one that leaves.
        None where another part took over this one's units and sealed.
        """
        assert self._part_journal is not None
        self._part_journal.close()  # it is taken over as that of any part that has ended
        journal = self._journal = FolderJournal(self.root, _WAIT_S)
        if is_artifact(self.root):
            journal.drop()
            return None
        if journal.identity != self._identity:
            journal.drop()
            raise OutputError(
                "The output folder was replaced meanwhile.",
                where=self.root,
                remedy="Run the same command again.",
            )
        journal.begin(self._identity)
        self.done = {entry.unit: entry for entry in self._current(journal.entries)}
        return tuple(journal.at_work)

    # --- finished units, and the end

    def record(self, entry: JournalEntry) -> None:
        """Record a finished unit; the record survives a kill from here on."""
        journal = self._part_journal or self._journal
        assert journal is not None
        journal.record(entry)
        self.done[entry.unit] = entry

    def seal(self, manifest: bytes) -> None:
        """Write the manifest as the last file, exchange the artifact with an older one, and remove the journal."""
        assert self._journal is not None
        check_strays(self.root, self._paths, self._paths)  # files that appeared meanwhile
        self._check_still_there()
        write_whole(self.root, MANIFEST, manifest)
        if self.root != self.out:
            with output_errors(self.out):
                if self.out.exists():
                    # files that appeared meanwhile
                    check_strays(self.out, listed_files(self.out), self._paths)
                    exchange(self._side, self.out, parked_folder(self.out))
                else:  # the old artifact was removed meanwhile
                    self._side.rename(self.out)
                    sync_above(self.out)
            self.root = self.out
            self._journal.path = self.out / JOURNAL
            self._try_to_discard()
        self._journal.remove()

    def _check_still_there(self) -> None:
        """Refuse to seal where a finished file was removed or truncated meanwhile."""
        for record in (record for entry in self.done.values() for record in entry.files):
            path = self.root / record.path
            if size_of(path) != record.size_bytes:
                raise OutputError(
                    "A finished file was removed or cut meanwhile.",
                    where=path,
                    remedy="Run the same command with --resume.",
                )

    def _try_to_discard(self, journal: FolderJournal | None = None) -> None:
        """Remove the old artifact, then an empty journal beside it; after the exchange a failure is only a warning."""
        try:
            self._discard_old()
            if journal is not None:
                journal.remove()
                with suppress(OSError):  # not empty: foreign files appeared meanwhile
                    self._side.rmdir()
        except OutputError as error:
            self.warnings.append(
                f"The old artifact could not be removed from {self._side}: {error.found}."
            )
        else:
            if self._side.exists():
                self.warnings.append(f"Something that hqconv did not make is left in {self._side}.")

    def _discard_old(self) -> None:
        """Remove the rest of a replaced artifact; companion files that are not listed move to the new one."""
        side = self._side
        if not side.exists():
            return
        listed = listed_files(side)
        with output_errors(side):
            for name in COMPANIONS:
                if name not in listed and (side / name).exists() and not (self.out / name).exists():
                    (side / name).rename(self.out / name)
            # The manifest last: after a kill it lists which remaining files belong to the old artifact.
            remove_listed(side, sorted(listed - {MANIFEST}))
            (side / MANIFEST).unlink(missing_ok=True)
            with suppress(OSError):  # not empty: foreign files appeared meanwhile
                side.rmdir()
            sync_above(side)


class UnitWriter:
    """The files of one unit while they are written: any thread may write any range, each once."""

    def __init__(self, root: Path, files: tuple[OutFile, ...]) -> None:
        """Create every file at its full size under a temporary name, and write its header."""
        self._root = root
        self._files = files
        self._paths = {file.path: partial(root / file.path) for file in files}
        self._descriptors = Descriptors(
            lambda path: os.open(self._paths[path], os.O_RDWR | os.O_CLOEXEC)
        )
        try:
            for file in files:
                self._create(file)
        except BaseException:
            self.abandon()
            raise

    def _create(self, file: OutFile) -> None:
        path = self._paths[file.path]
        with output_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                # a full disk fails before the work
                os.posix_fallocate(descriptor, 0, file.size_bytes)
                write_fully(descriptor, file.header, 0)
            finally:
                os.close(descriptor)

    def write_at(self, file: int, offset_bytes: int, data: Any) -> None:
        """Write a C-contiguous buffer at an offset of a file."""
        path = self._files[file].path
        with output_errors(self._root / path), self._descriptors.using(path) as descriptor:
            write_fully(descriptor, data, offset_bytes)

    def finish_file(
        self,
        file: OutFile,
        check_cancelled: Callable[[], object] | None = None,
        chunk_bytes: int = 0,
    ) -> FileRecord:
        """Flush a complete file to the disk, and return its size and digest; for any thread.

        check_cancelled: called from time to time; an exception of it ends the hashing. chunk_bytes: hashed in one call.
        """
        with output_errors(self._root / file.path):
            with self._descriptors.using(file.path) as descriptor:
                os.fsync(descriptor)
            digest = sha256_of(self._paths[file.path], check_cancelled, chunk_bytes)
            return FileRecord(file.path, file.size_bytes, digest)

    def publish(self) -> None:
        """Give the flushed files their final names, and flush the folders."""
        self._descriptors.close()
        for file in self._files:
            path = self._root / file.path
            with output_errors(path):
                self._paths[file.path].replace(path)
        with output_errors(self._root):
            sync_folders(self._root, {(self._root / file.path).parent for file in self._files})

    def abandon(self) -> None:
        """Remove the partial files."""
        self._descriptors.close()
        for path in self._paths.values():
            path.unlink(missing_ok=True)


def check_finished(out: Path, difference: DifferenceOf) -> Manifest:
    """Read the manifest of a finished artifact, and check that its request is this one and its files have their sizes.

    difference: as for `OutputFolder`. Raises OutputError for another request, or for missing or cut files,
    VerificationError for a damaged or altered manifest.
    """
    manifest = read_manifest(out, is_sealed=True)
    other = difference(manifest)
    if other is not None:
        raise OutputError(
            f"The output folder holds a finished artifact that differs from this request in: {_option(other.key)}.",
            where=out,
            expected=short_text(other.found),
            found=short_text(other.expected),
            remedy="Choose another folder with -o, or replace the artifact with --overwrite.",
        )
    with output_errors(out):
        missing = manifest.missing_files(lambda name: size_of(out / name))
        if missing:
            found = size_of(out / missing[0])
            raise OutputError(
                "A file of the finished artifact is missing or has another size.",
                where=first_few([str(out / name) for name in missing]),
                expected=f"{manifest.files[missing[0]].size_bytes} bytes",
                found="no such file" if found is None else f"{found} bytes",
                remedy="Convert again with --overwrite, or copy the file again from where it is whole.",
            )
    return manifest


def _refuse_another(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OutputError for the first difference between an unfinished conversion's identity and this one's."""
    for key, expected, found in differences(before, now):
        raise OutputError(
            f"The unfinished conversion differs from this one in: {_option(key)}.",
            where=out,
            expected=short_text(expected),
            found=short_text(found),
            remedy="Repeat the first command with --resume, or start anew with --overwrite.",
        )


def _option(key: str) -> str:
    """Return the command line's name of a request's key; other keys unchanged."""
    document, *path = key.split(": ")
    if document != "request":
        return key
    return ": ".join([f"--{path[0].replace('_', '-')}", *path[1:]])


def unfinished_folder(out: Path) -> Path | None:
    """Return the folder of an unfinished conversion to `out`; None if there is none."""
    side = side_folder(out.resolve())
    if (side / JOURNAL).is_file():
        return side
    return out if (out / JOURNAL).is_file() and not is_artifact(out) else None


def _create_journal(root: Path, wait_s: float = 0.0) -> FolderJournal:
    """Open the journal of a folder, and create both if they do not exist."""
    while True:
        with output_errors(root):
            make_folder(root)
        try:
            return FolderJournal(root, wait_s)
        except OutputError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise  # else another process finished and removed the folder


def cannot_use(root: Path, found: str) -> OutputError:
    """Return the error for an output path that cannot be used."""
    return OutputError(
        "The output folder cannot be used.",
        where=root,
        expected="no such folder, an empty one, or with --resume an unfinished conversion",
        found=found,
        remedy=_REMEDIES.get(found, "Choose another with -o."),
    )


_REMEDIES = {  # by what is found
    FINISHED: "Replace it with --overwrite, or choose another with -o.",
    UNFINISHED: "Go on with --resume, begin anew with --overwrite, or choose another with -o.",
}


# --- the files of a folder: which are ours, which are foreign


def listed_files(root: Path) -> set[str]:
    """Return the files that an artifact's manifest lists, and SHA256SUMS; none where there is no manifest.

    An edited model card and sums without the manifest are left out. Raises OutputError where the manifest cannot be
    read: then the artifact's files are unknown.
    """
    if not is_artifact(root):
        return set()
    try:
        manifest = read_manifest(root, allow_links=True)  # a link is removed, not its target
    except HqconvError as error:
        raise OutputError(
            "The manifest of the artifact to replace cannot be read: it must say which files are the artifact's.",
            where=root / MANIFEST,
            found=error.what,
            remedy="Choose another folder with -o, or remove this one yourself.",
        ) from error
    with output_errors(root):
        others = {CARD} if CARD in manifest.files and not is_own_card(root, manifest) else set()
        return {MANIFEST, *manifest.files, *([SUMS] if are_sums(root) else [])} - others


def files_in(root: Path) -> set[str]:
    """Return the files, links and empty folders in a folder; companion folders such as `.git` are not searched."""
    found = set()
    for folder, folders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        if relative == Path():
            found |= {name for name in folders if name in COMPANIONS}
            folders[:] = [name for name in folders if name not in COMPANIONS]
            names = [name for name in names if not journal_part(name)]  # they go with the journal
        found |= {(relative / name).as_posix() for name in (*names, *links)}
        if not names and not folders and relative != Path():
            found.add(relative.as_posix())
    return found


def check_strays(root: Path, listed: Collection[str], planned: Collection[str] = ()) -> None:
    """Refuse to replace a folder with foreign files: neither `listed` nor companions such as `.gitattributes`.

    planned: files of the new artifact. Raises OutputError that names the foreign files.
    """
    ours = {JOURNAL, MANIFEST, *listed, *(path + PARTIAL for path in listed), *_folders_of(listed)}
    kept = {name for name in COMPANIONS if name not in planned}
    strays = sorted(files_in(root) - ours - kept)
    if strays:
        raise OutputError(
            "The output folder holds files that hqconv did not make.",
            where=root,
            expected="nothing but the files that its manifest lists",
            found=first_few(strays),
            remedy="Move the files elsewhere, or choose another folder with -o.",
        )


def check_replaceable(out: Path) -> None:
    """Raise OutputError for an artifact whose folder cannot be exchanged: a mount point."""
    if out.is_mount():
        raise OutputError(
            "A mount point cannot be replaced.",
            where=out,
            remedy="Convert to a folder inside it, or empty it yourself.",
        )


def remove_listed(root: Path, listed: Sequence[str]) -> None:
    """Remove listed files and their partial forms in order, then empty folders, and flush the folders.

    Raises OutputError where the system refuses.
    """
    with output_errors(root):
        for path in listed:
            full = root / path
            if not _lies_in(root, path) or (full.is_dir() and not full.is_symlink()):
                continue
            full.unlink(missing_ok=True)
            partial(full).unlink(missing_ok=True)
        for folder in sorted(_folders_of(listed), key=lambda folder: -folder.count("/")):
            if _lies_in(root, folder):
                with suppress(OSError):
                    (root / folder).rmdir()
        left = (root / folder for folder in _folders_of(listed) if _lies_in(root, folder))
        sync_folders(
            root, [folder for folder in left if folder.is_dir() and not folder.is_symlink()]
        )


def _lies_in(root: Path, path: str) -> bool:
    """Return whether a listed path lies in the folder; a manifest may hold any path."""
    return "\0" not in path and (root / path).parent.resolve().is_relative_to(root.resolve())


def _folders_of(paths: Iterable[str]) -> set[str]:
    """Return the folders of relative paths."""
    return {
        folder.as_posix() for path in paths for folder in Path(path).parents if folder != Path()
    }
