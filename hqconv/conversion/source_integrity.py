"""The source's files that the groups at work come from: hashed, and compared with what they were.

A group is put down as finished only after that, so that a resumed conversion keeps nothing made of other bytes. Of an
artifact the digests must be those that its manifest lists; of any source they are recorded where that is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from hqconv.conversion.batches import Batch, Piece
from hqconv.conversion.journal import JournalEntry
from hqconv.conversion.profile import StageProfile
from hqconv.conversion.stages import Stages
from hqconv.errors import InputError
from hqconv.models.protocols import Source
from hqconv.planning.plan import ConversionPlan


class SourceIntegrity:
    """What of a source is proven. `begin` is for the thread that feeds the stages, the rest for any."""

    def __init__(self, source: Source, stages: Stages, profile: StageProfile, stage: str) -> None:
        """stage: whose threads hash."""
        self._source, self._stages, self._profile, self._stage = source, stages, profile, stage
        self._begun: set[str] = set()
        self._whole: set[str] = set()

    def begin(self, item: Batch | Piece) -> set[str]:
        """The names of the files that an item is read from. They are hashed meanwhile, each once."""
        files = [self._source.files[number] for number in _numbers(item, self._source.reads_ahead)]
        for file in files if self._source.guard.is_hashing else ():
            if file.name not in self._begun:
                self._begun.add(file.name)
                self._stages.start(self._stage, file.size_bytes, self._prove, file.name)
        return {file.name for file in files}

    def _prove(self, name: str) -> None:
        self._source.guard.prove(name, self._stages.keep_on)
        self._whole.add(name)
        self._stages.tell()

    def settle(self, names: Collection[str]) -> None:
        """Wait until files are hashed, and compare them with what they were. Raises InputError for the first other."""
        if self._source.guard.is_hashing:
            with self._profile.waiting("digests of the source"):
                self._stages.wait(lambda: self._whole.issuperset(names))
        self._source.guard.check_unchanged(names)

    def digests(self, names: Collection[str]) -> dict[str, str]:
        """Those of files that are settled; none where nothing is hashed."""
        found = self._source.guard.digests
        return {name: found[name] for name in sorted(names) if name in found}

    @contextmanager
    def first(self, names: Collection[str]) -> Iterator[None]:
        """What is wrong with the files themselves comes before what was found in their bytes."""
        try:
            yield
        except InputError:
            self._source.guard.check_unchanged(names)
            for name in sorted(set(names) - self._whole) if self._source.guard.is_held else ():
                self._source.guard.prove(name)
            raise


def source_digests(source: Source, plan: ConversionPlan, entries: Iterable[JournalEntry]) -> dict[str, str]:
    """Name → SHA-256 of every file that something was read from; none where nothing is hashed.

    Files that a run before did not hash are hashed now. Raises InputError where two groups were read from different
    bytes, or as `Guard.prove`.
    """
    guard, found = source.guard, dict[str, str]()
    if not guard.is_hashing:
        return found
    for entry in entries:
        for name, sha256 in entry.sources.items():
            if found.setdefault(name, sha256) != sha256:
                what, where = "A file of the source changed during the conversion.", str(source.root / name)
                remedy = "Keep the source as it is during a conversion, and start anew with --overwrite."
                raise InputError(what, where=where, expected=found[name], found=sha256, remedy=remedy)
    experts = plan.experts
    numbers = {source.tensors[name].file for name in (*experts.converted, *experts.copied)}
    for name in sorted({source.files[number].name for number in numbers} - found.keys()):
        guard.prove(name)
        found[name] = guard.digests[name]
    return found


def _numbers(item: Batch | Piece, reads_ahead: bool) -> set[int]:
    """The files of an item's tensors; of a block's first experts also those of its activation scales."""
    if isinstance(item, Piece):
        return {ref.file for ref, _, _ in item.spans}
    block = item.planned.block
    numbers = {
        ref.file for refs in block.input_scales.refs.values() for ref in refs if not item.experts.start
    }
    if reads_ahead:
        return numbers | {ref.file for ref, _ in item.layout.ranges}
    return numbers | {ref.file for expert in item.experts for ref in block.refs(expert)}
