"""The output folder: begun, resumed, or replaced by a new artifact that is built beside it.

An unfinished folder holds a journal and no manifest, so that nothing takes it for an artifact. Each group of files is
recorded in the journal only after all of them lie under their final names. An artifact that is replaced stays as it is
until the new one is complete: that is built in the sibling folder `.<name>.hqconv`, then both change places, and what
the old manifest lists is removed. Only files that a manifest or a journal lists are ever removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import is_artifact
from hqconv.conversion.journal import Journal, JournalEntry, compare_identities
from hqconv.conversion.safe_delete import (
    check_replaceable,
    check_strays,
    files_in,
    listed_files,
    remove_listed,
)
from hqconv.errors import OutputError
from hqconv.io.durable_files import (
    check_space,
    is_whole,
    make_folder,
    output_errors,
    partial,
    sync_above,
    write_whole,
)
from hqconv.io.exchange_folders import exchange, settle
from hqconv.schemas.artifact_names import COMPANIONS, JOURNAL, MANIFEST


def side_folder(out: Path) -> Path:
    """Where an artifact that will replace the one at `out` is built."""
    return out.with_name(f".{out.name}.hqconv")


def parked_folder(out: Path) -> Path:
    """Where an old artifact lies for a moment, on file systems that cannot exchange folders at once."""
    return out.with_name(f".{out.name}.hqconv-old")


class OutputFolder:
    """An artifact in the making. `root` is where its files are written, `done` the groups that are finished.

    `identity` says what is converted, from what, by which versions; a resumed run must have the same. `paths` are all
    files of the artifact. Used as a context manager: at its end the lock is given back.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], paths: Collection[str]) -> None:
        self.out = self.root = out.resolve()
        self.done: dict[str, JournalEntry] = {}
        self._identity = {**identity, "files": sorted(paths)}
        self._paths = paths
        self._journal: Journal | None = None
        self._replaces = False
        self.warnings: list[str] = []

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._journal.close()

    @property
    def has_lock(self) -> bool:
        """Whether other processes are kept out; not on file systems without locks."""
        return self._journal is None or self._journal.has_lock

    # --- taking the folder -----------------------------------------------------------------------------------

    def start(self, num_bytes: int, *, resume: bool = False, overwrite: bool = False) -> bool:
        """Take the folder for this conversion, which will write `num_bytes`.

        False where `resume` finds an artifact that is finished already; what its conversion left behind is removed.
        Raises OutputError where the folder is taken or too small, is not what is resumed, holds files of others that
        would be lost, or where another process is at work on it.
        """
        side = side_folder(self.out)
        if self.out.exists() and not self.out.is_dir():
            raise taken(self.out, "a file")
        with ExitStack() as unused:
            of_side, of_out = self._held(side, unused)
            if of_side is not None:
                self._take_up(side, of_side, resume=resume, overwrite=overwrite)
            elif is_artifact(self.out) and resume:
                self._try_to_discard(side)
                if of_out is not None:
                    of_out.remove()
                return False
            elif is_artifact(self.out):
                if not overwrite:
                    raise taken(self.out, "a finished artifact")
                check_replaceable(self.out)
                check_strays(self.out, listed_files(self.out), self._paths)
                check_space(side, num_bytes)
                self._replace(side, of_out)
            elif of_out is not None:
                self._take_up(self.out, of_out, resume=resume, overwrite=overwrite)
            elif self.out.exists() and files_in(self.out) and not (self.out / JOURNAL).exists():
                raise taken(self.out, "a folder that hqconv did not make, and that is not empty")
            else:
                check_space(self.out, num_bytes)
                self._begin(self.out)
        return True

    def _held(self, side: Path, unused: ExitStack) -> tuple[Journal | None, Journal | None]:
        """The journals that are there, locked, so that nobody else is at work; `unused` closes those not taken up."""
        while True:
            journals = []
            for root in (side, self.out):
                journals.append(Journal.if_there(root))
                if journals[-1] is not None:
                    unused.callback(self._close_unless_taken_up, journals[-1])
            parked = parked_folder(self.out)
            if not parked.exists():
                return journals[0], journals[1]
            with output_errors(self.out):
                settle(side, self.out, parked)
            for journal in filter(None, journals):
                journal.close()

    def _close_unless_taken_up(self, journal: Journal) -> None:
        if journal is not self._journal:
            journal.close()

    def _begin(self, root: Path) -> None:
        """Start from nothing in a folder that is empty, or not there."""
        journal = _claim(root)
        if journal.identity is not None or files_in(root) > {JOURNAL}:
            journal.drop()
            raise taken(root, "a folder that is not empty")
        self.root, self._journal = root, journal
        journal.begin(self._identity)

    def _take_up(self, root: Path, journal: Journal, *, resume: bool, overwrite: bool) -> None:
        """Go on with an unfinished conversion, or start it anew."""
        replaces, begun = root != self.out, journal.identity
        if overwrite:
            self._start_anew(root, journal)
        elif resume and begun is not None:
            compare_identities(self.out, begun, self._identity)
            self._keep_finished(root, journal)
        elif begun is not None or files_in(root) > {JOURNAL} or (replaces and not resume):
            nothing = "a journal that says nothing: nothing to resume"
            raise taken(self.out, nothing if resume else "an unfinished conversion")
        # else it was killed in its first moment
        self.root, self._journal, self._replaces = root, journal, replaces
        journal.begin(self._identity)

    def _start_anew(self, root: Path, journal: Journal) -> None:
        """Remove what an unfinished conversion wrote, by what its journal says."""
        words = (journal.identity or {}).get("files")
        begun = [path for path in words if isinstance(path, str)] if isinstance(words, list) else []
        listed = {*begun, *listed_files(root), *self._paths}
        check_strays(root, listed)
        # The manifest first, so that the rest is never taken for an artifact.
        remove_listed(root, [MANIFEST, *sorted(listed - {MANIFEST})])
        journal.restart()

    def _keep_finished(self, root: Path, journal: Journal) -> None:
        """Groups whose files are all there and whole are done; half-written files are removed."""
        check_strays(root, {*self._paths, *listed_files(root)}, self._paths)
        with output_errors(root):
            for entry in journal.entries:
                if all(is_whole(root, record) for record in entry.files):
                    self.done[entry.unit] = entry
            (root / MANIFEST).unlink(missing_ok=True)  # killed after sealing
            for path in self._paths:
                partial(root / path).unlink(missing_ok=True)

    def _replace(self, side: Path, of_out: Journal | None) -> None:
        """Build beside a finished artifact. `of_out`: the journal of a run killed after it had changed places."""
        journal = _claim(side)
        try:
            # One that changed places since we looked still holds the journal that it took along.
            held = Journal.if_there(self.out) if of_out is None else None
            if held is not None:
                held.close()
            if journal.identity is not None:
                raise taken(self.out, "an unfinished conversion")
            self._discard_old(side)
            if files_in(side) > {JOURNAL}:
                raise taken(
                    side, "a folder beside the output that is not empty, where the new one would be built"
                )
        except BaseException:
            journal.drop()
            with suppress(OSError):
                side.rmdir()
            raise
        self.root, self._journal, self._replaces = side, journal, True
        journal.begin(self._identity)
        if of_out is not None:
            of_out.remove()

    # --- the end ---------------------------------------------------------------------------------------------

    def record(self, entry: JournalEntry) -> None:
        """Note a finished group; it survives a kill from here on."""
        assert self._journal is not None
        self._journal.record(entry)
        self.done[entry.unit] = entry

    @property
    def notes(self) -> Journal:
        """Where it is noted what is fetched for this conversion."""
        assert self._journal is not None
        return self._journal

    def seal(self, manifest: bytes) -> None:
        """Write the manifest, the artifact's last file, let it take the place of an older one, forget the journal."""
        assert self._journal is not None
        check_strays(self.root, self._paths, self._paths)  # what came meanwhile
        self._check_still_there()
        write_whole(self.root, MANIFEST, manifest)
        if self._replaces:
            side = self.root
            with output_errors(self.out):
                if self.out.exists():
                    check_strays(self.out, listed_files(self.out), self._paths)  # what came meanwhile
                    exchange(side, self.out, parked_folder(self.out))
                else:  # somebody removed the old artifact meanwhile
                    side.rename(self.out)
                    sync_above(self.out)
            self.root = self.out
            self._journal.moved_to(self.out)
            self._try_to_discard(side)
        self._journal.remove()

    def _check_still_there(self) -> None:
        """Refuse to seal where somebody removed or cut a finished file meanwhile."""
        for record in (record for entry in self.done.values() for record in entry.files):
            path = self.root / record.path
            if not path.is_file() or path.stat().st_size != record.size_bytes:
                what = "A finished file was removed or cut meanwhile."
                raise OutputError(what, where=str(path), remedy="Run the same command with --resume.")

    def _try_to_discard(self, side: Path) -> None:
        """The new artifact is in its place: what cannot be removed of the old one is said, and no failure."""
        try:
            self._discard_old(side)
        except OutputError as error:
            self.warnings.append(f"The old artifact could not be removed from {side}: {error.found}.")
        else:
            if side.exists():
                self.warnings.append(f"Something that hqconv did not make is left in {side}.")

    def _discard_old(self, side: Path) -> None:
        """Remove what is left of an artifact that was replaced; files of others beside it move to the new one."""
        if not side.exists():
            return
        listed = listed_files(side)
        with output_errors(side):
            for name in COMPANIONS:
                if name not in listed and (side / name).exists() and not (self.out / name).exists():
                    (side / name).rename(self.out / name)
            # The manifest last: until then it says which of the files left by a kill were the old artifact's.
            remove_listed(side, sorted(listed - {MANIFEST}))
            (side / MANIFEST).unlink(missing_ok=True)
            with suppress(OSError):  # not empty: somebody put files there meanwhile
                side.rmdir()
            sync_above(side)


def place_of_work(out: Path) -> Path | None:
    """Where an unfinished conversion to `out` lies, if there is one."""
    side = side_folder(out.resolve())
    if (side / JOURNAL).is_file():
        return side
    return out if (out / JOURNAL).is_file() and not is_artifact(out) else None


def _claim(root: Path) -> Journal:
    """The journal of a folder, which is made if it is not there."""
    while True:
        with output_errors(root):
            make_folder(root)
        try:
            return Journal(root)
        except OutputError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise  # else the folder was removed by another process that was just done with it


def taken(root: Path, found: str) -> OutputError:
    """The error for a place that cannot be used as it is."""
    return OutputError(
        "The output folder cannot be used.",
        where=str(root),
        expected="no such folder, an empty one, or with --resume an unfinished conversion",
        found=found,
        remedy="Choose another with -o, go on with --resume, or replace an artifact with --overwrite.",
    )
