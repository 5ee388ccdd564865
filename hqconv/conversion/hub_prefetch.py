"""Files of a source on the Hub: fetched ahead of the groups that are read from them, and dropped after the last one.

The Hub's cache never holds more than `--cache-limit` of what a conversion fetched. What was in it before stays there.
Tensors that are only copied are read by range requests, and need no file. In a team each process fetches what its own
groups need, and nothing is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hqconv.conversion.journal import Journal
from hqconv.conversion.stages import Stages
from hqconv.io import hub_cache
from hqconv.models.protocols import Source
from hqconv.planning.output_units import MoeLayerPlan, OutputUnit

_NUM_THREADS = 4  # downloads at once
_GOODBYE_SECONDS = 2.0  # until downloads that are not wanted any more have heard of it


class StoppedError(Exception):
    """The conversion ends: a download is not wanted any more."""


@dataclass(frozen=True)
class ShardUse:
    """Which of a source's files each group is read from, in the order in which the groups are worked on.

    of_group: group → files. sizes: of the files that have to be fetched.
    """

    of_group: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, source: Source, units: Sequence[OutputUnit], *, keeps: bool) -> ShardUse:
        """keeps: whole files of copied tensors are wanted, too, as they are for an artifact, which is hashed."""
        whole = keeps or source.guard.is_held
        of_group = {unit.name: _files_of(source, unit, whole) for unit in units}
        names = dict.fromkeys(name for of_one in of_group.values() for name in of_one)
        sizes = {file.name: file.size_bytes for file in source.files if file.name in names}
        return cls(of_group, {name: sizes[name] for name in names if not source.is_here(name)})

    @property
    def total_bytes(self) -> int:
        """Of all files that have to be fetched."""
        return sum(self.sizes.values())

    @property
    def least_bytes(self) -> int:
        """The most that must be there at one time: files of a group, and those between its first and last use."""
        last = {name: number for number, of_one in enumerate(self.of_group.values()) for name in of_one}
        held: dict[str, int] = {}
        most = 0
        for number, of_one in enumerate(self.of_group.values()):
            held |= {name: self.sizes[name] for name in of_one if name in self.sizes}
            most = max(most, sum(held.values()))
            held = {name: size for name, size in held.items() if last[name] > number}
        return most

    def default_limit(self) -> int:
        """Room for four of the largest files, and for what must be there."""
        return max(self.least_bytes, 4 * max(self.sizes.values(), default=0))


def _files_of(source: Source, unit: OutputUnit, whole: bool) -> tuple[str, ...]:
    if isinstance(unit, MoeLayerPlan):
        block = unit.block
        refs = [ref for expert in range(block.num_experts) for ref in block.refs(expert)]
        refs += [ref for of_gemm in block.input_scales.refs.values() for ref in of_gemm]
    else:
        refs = list(unit.refs) if whole else []
    return tuple(source.files[number].name for number in sorted({ref.file for ref in refs}))


def in_stretches(source: Source, units: Iterable[OutputUnit]) -> list[OutputUnit]:
    """Groups in an order in which a file is needed in one stretch, where files hold blocks one after the other."""

    def key(unit: OutputUnit) -> tuple[bool, int, int]:
        names = _files_of(source, unit, whole=False)
        numbers = [numbered[name] for name in names] or [0]
        return not isinstance(unit, MoeLayerPlan), min(numbers), max(numbers)

    numbered = {file.name: number for number, file in enumerate(source.files)}
    return sorted(units, key=key)


@dataclass(frozen=True)
class CachePolicy:
    """What a conversion may take of the Hub's cache. limit_bytes: None for the default; keeps: nothing is dropped."""

    limit_bytes: int | None = None
    keeps: bool = False


@dataclass(eq=False)
class _State:
    """Under the supply's lock."""

    queue: deque[str]
    present: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)  # fetched by this conversion: may be dropped
    held_bytes: int = 0  # of those, with the ones on their way
    users: dict[str, set[str]] = field(default_factory=dict)  # file → groups that are not finished
    num_unfinished: int = 0  # groups that were begun and are not finished
    awaited: tuple[str, ...] = ()  # the files of the group that is waited for
    error: BaseException | None = None
    is_stopped: bool = False


class HubPrefetch:
    """The files of one conversion's source. `bring`, `has` and `stop` are for the thread that owns the stages."""

    def __init__(
        self,
        source: Source,
        units: Sequence[OutputUnit],
        use: CachePolicy,
        notes: Journal,
        *,
        is_shared: bool = False,
    ) -> None:
        """groups: those that are not done, in the order of their work. is_shared: others work on them, too."""
        self._source, self._notes, self._keeps = source, notes, use.keeps or is_shared
        self._needs = ShardUse.of(source, units, keeps=use.keeps)
        limit = self._needs.default_limit() if use.limit_bytes is None else use.limit_bytes
        self._limit = 1 << 62 if self._keeps else limit
        self._is_shared = is_shared
        self._changed = threading.Condition()
        self._state = _State(deque(() if is_shared else self._needs.sizes))
        for unit, names in self._needs.of_group.items():
            for name in names:
                self._state.users.setdefault(name, set()).add(unit)
        self._take_over()
        self._stages: Stages | None = None
        self._threads: list[threading.Thread] = []

    def _take_over(self) -> None:
        """What an earlier run of this conversion fetched: still of use, or to be dropped."""
        if self._source.listing is None or self._keeps:
            return
        for file in self._source.files:
            if self._key(file.name) not in self._notes.fetched:
                continue
            if not self._source.is_here(file.name):
                hub_cache.tidy(self._source.root, self._source.listing.digests.get(file.name))
            else:
                self._state.own.add(file.name)
                self._state.held_bytes += file.size_bytes
                if file.name not in self._state.users:
                    self._drop(file.name)

    def _key(self, name: str) -> str:
        listing = self._source.listing
        assert listing is not None
        return f"{listing.repo_id}@{listing.commit}/{name}"

    # --- the thread that owns the stages

    def start(self, stages: Stages) -> None:
        """Begin to fetch; `stages` hears of what has come."""
        self._stages = stages
        if self._source.listing is None:
            return
        for number in range(_NUM_THREADS):
            thread = threading.Thread(target=self._work, name=f"hqconv-fetch_{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def has(self, unit: OutputUnit) -> bool:
        """Whether all files of a group are here."""
        names = self._needs.of_group.get(unit.name, ())
        return all(name in self._state.present or name not in self._needs.sizes for name in names)

    def bring(self, unit: OutputUnit) -> None:
        """Wait until a group's files are here. Raises what stopped their download."""
        if self._source.listing is None:
            return
        assert self._stages is not None
        with self._changed:
            self._state.num_unfinished += 1
            self._state.awaited = self._needs.of_group[unit.name]
            if self._is_shared:
                self._state.queue.extend(n for n in self._needs.of_group[unit.name] if n in self._needs.sizes)
            self._changed.notify_all()
        self._stages.wait(lambda: self.has(unit) or self._state.error is not None)
        if not self.has(unit) and self._state.error is not None:
            raise self._state.error
        self._state.awaited = ()

    def stop(self) -> None:
        """Let nothing more be fetched; what is on its way is given up."""
        with self._changed:
            self._state.is_stopped = True
            self._changed.notify_all()
        latest = time.monotonic() + _GOODBYE_SECONDS
        with suppress(KeyboardInterrupt):
            for thread in self._threads:
                thread.join(max(0.0, latest - time.monotonic()))

    # --- any thread

    def release(self, unit: OutputUnit) -> None:
        """A group is finished, and noted as such: files that no other needs are dropped."""
        if self._source.listing is None:
            return
        with self._changed:
            self._state.num_unfinished -= 1
            for name in self._needs.of_group[unit.name]:
                users = self._state.users[name]
                users.discard(unit.name)
                if not users and name in self._state.own and not self._keeps:
                    self._drop(name)
            self._changed.notify_all()

    def _drop(self, name: str) -> None:
        self._source.forget(name)
        with suppress(OSError):  # it only takes up space
            hub_cache.drop(self._source.root, name)
        self._state.own.discard(name)
        self._state.held_bytes -= self._size(name)

    def _size(self, name: str) -> int:
        return next(file.size_bytes for file in self._source.files if file.name == name)

    # --- the threads that fetch

    def _work(self) -> None:
        for name in self._taken():
            try:
                self._source.fetch([name], self._check)
            except BaseException as error:  # noqa: BLE001 - raised by `bring`
                with self._changed:
                    if self._state.error is None and not self._state.is_stopped:
                        self._state.error = error
                    self._state.is_stopped = True
                    self._changed.notify_all()
            else:
                self._state.present.add(name)
            assert self._stages is not None
            self._stages.tell()

    def _check(self) -> None:
        if self._state.is_stopped:
            raise StoppedError

    def _taken(self) -> Iterator[str]:
        """The next file, as soon as there is room for it, until all are fetched."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._state.is_stopped or self._may_take())
                if self._state.is_stopped:
                    return
                name = self._state.queue.popleft()
                self._begin(name)
            yield name

    def _may_take(self) -> bool:
        """Files are fetched in order, so that one that is waited for never stands behind one that is not."""
        if not self._state.queue:
            return False
        would_be = self._state.held_bytes + self._needs.sizes[self._state.queue[0]]
        # Where nothing else is being made, no room will come of it.
        is_stuck = self._state.num_unfinished == 1 and self._state.queue[0] in self._state.awaited
        return would_be <= self._limit or is_stuck

    def _begin(self, name: str) -> None:
        """Note that a file is fetched, if it is this conversion that brings it into the cache."""
        listing = self._source.listing
        assert listing is not None
        if self._keeps or hub_cache.has_bytes(self._source.root, name, listing.digests.get(name)):
            return
        self._notes.note_fetch(self._key(name))
        self._state.own.add(name)
        self._state.held_bytes += self._needs.sizes[name]
