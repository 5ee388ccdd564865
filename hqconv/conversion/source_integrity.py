"""Integrity of the source: its files are hashed while they are converted, and compared with their first state.

An output unit is recorded as finished only after that check, with the files' states: a resumed conversion keeps nothing
that was read from other files. The digests of an artifact must equal its manifest, those of a Hub repo the Hub's; with
`--source-digests` the digests of any source are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from hqconv.artifact.build import hub_digest
from hqconv.conversion.encode_batch import Batch, Piece
from hqconv.conversion.journal import JournalEntry
from hqconv.conversion.stages import Stage, StageProfile, Stages
from hqconv.errors import InputError
from hqconv.models.source_protocol import Source
from hqconv.planning.plan import ConversionPlan


class SourceIntegrity:
    """The checked files of a source. Only the thread that feeds the stages calls `begin`."""

    def __init__(
        self, source: Source, stages: Stages, profile: StageProfile, known: Mapping[str, str]
    ) -> None:
        """Start with no checked files. known: digests that earlier runs took."""
        self._source, self._stages, self._profile = source, stages, profile
        self._started: set[str] = set()
        self._hashed: set[str] = set()
        self._known = known

    def begin(self, item: Batch | Piece) -> set[str]:
        """Return the names of the files that an item is read from, and start to hash them, each once."""
        files = [
            self._source.files[number] for number in _file_numbers(item, self._source.reads_ahead)
        ]
        for file in files:
            if self._needs_digest(file.name) and file.name not in self._started:
                self._started.add(file.name)
                if file.name in self._known and not self._source.is_here(
                    file.name
                ):  # a commit cannot change
                    self._hashed.add(file.name)
                else:
                    self._stages.start(Stage.FINISH, file.size_bytes, self._hash, file.name)
        return {file.name for file in files}

    def _needs_digest(self, name: str) -> bool:
        """Return True where digests are wanted, and for bytes of the Hub's cache that others may have written."""
        return self._source.guard.is_hashing or _is_of_others(self._source, name)

    def _hash(self, name: str) -> None:
        take_digest(self._source, name, self._stages.check_cancelled)
        self._hashed.add(name)
        self._stages.notify()

    def wait_unchanged(self, names: Collection[str]) -> None:
        """Wait until files are hashed, and check that they are unchanged. Raises InputError for a changed one."""
        needed = set(filter(self._needs_digest, names)) - self._hashed
        if needed:
            with self._profile.waiting("digests of the source"):
                self._stages.wait(lambda: self._hashed.issuperset(needed))
        self._source.guard.check_unchanged(names)

    def digests(self, names: Collection[str]) -> dict[str, str]:
        """Return the digests of files after `wait_unchanged`; none where nothing is hashed."""
        digests = self._source.guard.digests
        return {name: digests[name] for name in sorted(names) if name in digests}

    def states(self, names: Collection[str]) -> dict[str, list[int]]:
        """Return the states of files of a folder; of a repo none, as its commit cannot change."""
        states = {} if self._source.revision is not None else self._source.guard.states()
        return {name: states[name] for name in sorted(names) if name in states}

    @contextmanager
    def blame_files_first(self, names: Collection[str]) -> Iterator[None]:
        """On an InputError inside, report a changed or damaged file instead of the values that were read from it."""
        try:
            yield
        except InputError:
            self._source.guard.check_unchanged(names)
            for name in sorted(set(names) - self._hashed):
                if self._source.guard.is_held or hub_digest(self._source, name) is not None:
                    take_digest(self._source, name)
            raise


def take_digest(source: Source, name: str, keep_on: Callable[[], object] | None = None) -> None:
    """Hash a file of the source, where it lies on the Hub by range requests.

    Raises as `FileSnapshot.prove`, and InputError where the Hub lists another digest.
    """
    guard = source.guard
    if source.is_here(name) or source.listing is None:
        guard.prove(name, keep_on)
    else:
        sha256 = source.listing.sha256(name, keep_on)
        guard.compare(name, sha256)
        guard.digests[name] = sha256
    compare_with_hub(source, name, guard.digests[name])


def _is_of_others(source: Source, name: str) -> bool:
    """Return True for a file that was in the Hub's cache before, and of which the Hub lists the digest."""
    return source.is_taken_over(name) and hub_digest(source, name) is not None


def blame_taken_over(source: Source, names: Iterable[str]) -> None:
    """Raise InputError where files that were in the Hub's cache before have other bytes than the Hub lists."""
    for name in names:
        if _is_of_others(source, name):
            take_digest(source, name)


def compare_with_hub(source: Source, name: str, sha256: str) -> None:
    """Raise InputError where the Hub lists another SHA-256 of a file than it was read with."""
    of_hub = hub_digest(source, name)
    if of_hub not in (None, sha256):
        raise InputError(
            "A file has other bytes than the Hub lists for it.",
            where=str(source.guard.path_of(name)),
            expected=f"sha256 {of_hub}",
            found=f"sha256 {sha256}",
            remedy="Remove the file from the Hub's cache, and run the same command again: it is fetched anew.",
        )


def is_of_these_files(source: Source, entry: JournalEntry) -> bool:
    """Return whether a finished unit was read from the files that the source has now: by their states, else digests."""
    states, guard = source.guard.states(), source.guard
    proves = not (guard.is_hashing and guard.misses_changes)
    changed = [
        name for name, state in entry.states.items() if states.get(name) != state or not proves
    ]
    for name in changed:
        if not guard.is_hashing or name not in states or name not in entry.sources:
            return False
        if name not in guard.digests:
            take_digest(source, name)
        if guard.digests[name] != entry.sources[name]:
            return False
    return True


def source_digests(
    source: Source, plan: ConversionPlan, entries: Iterable[JournalEntry]
) -> dict[str, str]:
    """Return name → SHA-256 of every source file that was read; none where nothing is hashed.

    Files that an earlier run did not hash are hashed now. Raises InputError where two units were read from different
    bytes, or as `take_digest`.
    """
    guard, digests = source.guard, dict[str, str]()
    if not guard.is_hashing:
        return digests
    for entry in entries:
        for name, sha256 in entry.sources.items():
            if digests.setdefault(name, sha256) != sha256:
                what, where = (
                    "A file of the source changed during the conversion.",
                    str(source.root / name),
                )
                remedy = (
                    "Keep the source as it is during a conversion, and start anew with --overwrite."
                )
                raise InputError(
                    what, where=where, expected=digests[name], found=sha256, remedy=remedy
                )
    experts = plan.experts
    numbers = {source.tensors[name].file for name in (*experts.converted, *experts.copied)}
    for name in sorted({source.files[number].name for number in numbers} - digests.keys()):
        take_digest(source, name)
        digests[name] = guard.digests[name]
    return digests


def _file_numbers(item: Batch | Piece, reads_ahead: bool) -> set[int]:
    """Return the files of an item's tensors, and with a layer's first experts the files of its activation scales."""
    if isinstance(item, Piece):
        return {ref.file for ref, _, _ in item.spans}
    layer = item.planned.layer
    numbers = {
        ref.file
        for refs in layer.input_scales.refs.values()
        for ref in refs
        if not item.experts.start
    }
    if reads_ahead:
        return numbers | {ref.file for ref, _ in item.layout.ranges}
    return numbers | {ref.file for expert in item.experts for ref in layer.refs(expert)}
