"""Fetch the shards of a source on the Hub ahead of the units that need them, and delete each after its last use.

The Hub's cache holds at most `--cache-limit` of fetched shards; files that were in the cache before stay there. Tensors
that are only copied are read by range requests, and need no file. With several processes each fetches the shards of its
own units, and nothing is deleted.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hqconv.conversion.journal import Journal
from hqconv.conversion.stages import Stages
from hqconv.errors import OutputError, RequestError
from hqconv.io import hub
from hqconv.io.durable_files import output_errors
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import MoeLayerPlan, OutputUnit

_NUM_THREADS = 4  # parallel downloads
_STOP_TIMEOUT_S = 2.0  # until cancelled downloads have noticed


class StoppedError(Exception):
    """Cancels a download because the conversion ends."""


@dataclass(frozen=True)
class ShardUse:
    """The shards that each unit is read from, in the order of the work.

    of_unit: unit → names of shards. sizes: of the shards that must be fetched.
    """

    of_unit: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, source: Source, units: Sequence[OutputUnit], *, keeps: bool) -> ShardUse:
        """Collect the shards of each unit. keeps: also whole shards of copied tensors, as always for an artifact."""
        whole = keeps or source.guard.is_held
        of_unit = {unit.name: _shards_of_unit(source, unit, whole) for unit in units}
        names = dict.fromkeys(name for of_one in of_unit.values() for name in of_one)
        sizes = {file.name: file.size_bytes for file in source.files if file.name in names}
        return cls(of_unit, {name: sizes[name] for name in names if not source.is_here(name)})

    @property
    def total_bytes(self) -> int:
        """Total size of the shards that must be fetched."""
        return sum(self.sizes.values())

    @property
    def least_bytes(self) -> int:
        """Largest size that must be in the cache at one time: every shard from its first to its last use."""
        last = {name: number for number, of_one in enumerate(self.of_unit.values()) for name in of_one}
        held: dict[str, int] = {}
        most = 0
        for number, of_one in enumerate(self.of_unit.values()):
            held |= {name: self.sizes[name] for name in of_one if name in self.sizes}
            most = max(most, sum(held.values()))
            held = {name: size for name, size in held.items() if last[name] > number}
        return most

    def default_limit(self) -> int:
        """Return the default cache limit: four of the largest shards, and at least `least_bytes`."""
        return max(self.least_bytes, 4 * max(self.sizes.values(), default=0))


def _shards_of_unit(source: Source, unit: OutputUnit, whole: bool) -> tuple[str, ...]:
    if isinstance(unit, MoeLayerPlan):
        layer = unit.layer
        refs = [ref for expert in range(layer.num_experts) for ref in layer.refs(expert)]
        refs += [ref for of_gemm in layer.input_scales.refs.values() for ref in of_gemm]
    else:
        refs = list(unit.refs) if whole else []
    return tuple(source.files[number].name for number in sorted({ref.file for ref in refs}))


def sort_by_shard(source: Source, units: Iterable[OutputUnit]) -> list[OutputUnit]:
    """Sort units so that each shard is needed for one run of units, where shards hold the layers in order."""

    def key(unit: OutputUnit) -> tuple[bool, int, int]:
        names = _shards_of_unit(source, unit, whole=False)
        numbers = [numbered[name] for name in names] or [0]
        return not isinstance(unit, MoeLayerPlan), min(numbers), max(numbers)

    numbered = {file.name: number for number, file in enumerate(source.files)}
    return sorted(units, key=key)


@dataclass(frozen=True)
class CachePolicy:
    """Limits for the Hub's cache. limit_bytes: None for the default; keeps: no fetched shard is deleted."""

    limit_bytes: int | None = None
    keeps: bool = False


@dataclass(eq=False)
class _State:
    """The state of the downloads, guarded by the lock of `HubPrefetch`."""

    queue: deque[str]
    present: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)  # by this conversion: may be deleted
    held_bytes: int = 0  # of `fetched`, running downloads included
    users: dict[str, set[str]] = field(default_factory=dict)  # shard → unfinished units
    num_unfinished: int = 0  # units that were begun and are not finished
    awaited: tuple[str, ...] = ()  # the shards of the unit that waits
    error: BaseException | None = None
    is_stopped: bool = False


class HubPrefetch:
    """Downloads of one conversion. Only the thread that owns the stages calls `wait_for`, `has_shards` and `stop`."""

    def __init__(
        self,
        source: Source,
        units: Sequence[OutputUnit],
        use: CachePolicy,
        journal: Journal,
        *,
        is_shared: bool = False,
    ) -> None:
        """units: the missing ones, in the order of the work. is_shared: other processes work on them, too."""
        self._source, self._journal, self._keeps = source, journal, use.keeps or is_shared
        self._use = ShardUse.of(source, units, keeps=use.keeps)
        limit = self._use.default_limit() if use.limit_bytes is None else use.limit_bytes
        self._limit = 1 << 62 if self._keeps else limit
        self._is_shared = is_shared
        self._changed = threading.Condition()
        self._state = _State(deque(() if is_shared else self._use.sizes))
        for unit, names in self._use.of_unit.items():
            for name in names:
                self._state.users.setdefault(name, set()).add(unit)
        self._take_over()
        self._stages: Stages | None = None
        self._threads: list[threading.Thread] = []

    def _take_over(self) -> None:
        """Take over the shards that an earlier run of this conversion fetched; delete those that no unit needs."""
        if self._source.listing is None or self._keeps:
            return
        for file in self._source.files:
            if self._key(file.name) not in self._journal.fetched:
                continue
            if not self._source.is_here(file.name):
                hub.remove_killed_downloads(self._source.root, self._source.listing.digests.get(file.name))
            else:
                self._state.fetched.add(file.name)
                self._state.held_bytes += file.size_bytes
                if file.name not in self._state.users:
                    self._drop(file.name)

    def _key(self, name: str) -> str:
        listing = self._source.listing
        assert listing is not None
        return f"{listing.repo_id}@{listing.commit}/{name}"

    # --- the thread that owns the stages

    def start(self, stages: Stages) -> None:
        """Start the downloads; `stages` is notified of each finished one."""
        self._stages = stages
        if self._source.listing is None:
            return
        for number in range(_NUM_THREADS):
            thread = threading.Thread(target=self._work, name=f"hqconv-fetch_{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def has_shards(self, unit: OutputUnit) -> bool:
        """Return whether all shards of a unit are in the cache."""
        names = self._use.of_unit.get(unit.name, ())
        return all(name in self._state.present or name not in self._use.sizes for name in names)

    def wait_for(self, unit: OutputUnit) -> None:
        """Wait until a unit's shards are in the cache. Raises the error of a failed download."""
        if self._source.listing is None:
            return
        assert self._stages is not None
        with self._changed:
            self._state.num_unfinished += 1
            self._state.awaited = self._use.of_unit[unit.name]
            if self._is_shared:
                self._state.queue.extend(n for n in self._use.of_unit[unit.name] if n in self._use.sizes)
            self._changed.notify_all()
        self._stages.wait(lambda: self.has_shards(unit) or self._state.error is not None)
        if not self.has_shards(unit) and self._state.error is not None:
            raise self._state.error
        self._state.awaited = ()

    def stop(self) -> None:
        """Start no more downloads, and cancel the running ones."""
        with self._changed:
            self._state.is_stopped = True
            self._changed.notify_all()
        latest = time.monotonic() + _STOP_TIMEOUT_S
        with suppress(KeyboardInterrupt):
            for thread in self._threads:
                thread.join(max(0.0, latest - time.monotonic()))

    # --- any thread

    def release(self, unit: OutputUnit) -> None:
        """Delete the shards of a recorded unit that no other unit needs."""
        if self._source.listing is None:
            return
        with self._changed:
            self._state.num_unfinished -= 1
            for name in self._use.of_unit[unit.name]:
                users = self._state.users[name]
                users.discard(unit.name)
                if not users and name in self._state.fetched and not self._keeps:
                    self._drop(name)
            self._changed.notify_all()

    def _drop(self, name: str) -> None:
        self._source.forget(name)
        with suppress(OSError):  # the file only takes up space
            hub.remove_cached_file(self._source.root, name)
        self._state.fetched.discard(name)
        self._state.held_bytes -= self._size(name)

    def _size(self, name: str) -> int:
        return next(file.size_bytes for file in self._source.files if file.name == name)

    # --- the threads that fetch

    def _work(self) -> None:
        for name in self._next_shards():
            try:
                self._source.fetch([name], self._check)
            except BaseException as error:  # noqa: BLE001 - raised by `wait_for`
                with self._changed:
                    if self._state.error is None and not self._state.is_stopped:
                        self._state.error = error
                    self._state.is_stopped = True
                    self._changed.notify_all()
            else:
                self._state.present.add(name)
            assert self._stages is not None
            self._stages.notify()

    def _check(self) -> None:
        if self._state.is_stopped:
            raise StoppedError

    def _next_shards(self) -> Iterator[str]:
        """Yield the next shard as soon as there is room for it, until all are fetched."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._state.is_stopped or self._may_fetch())
                if self._state.is_stopped:
                    return
                name = self._state.queue.popleft()
                self._record_fetch(name)
            yield name

    def _may_fetch(self) -> bool:
        """Return whether the next shard fits. Shards are fetched in order: an awaited shard is never behind others."""
        if not self._state.queue:
            return False
        would_be = self._state.held_bytes + self._use.sizes[self._state.queue[0]]
        # Where no other unit is in work, no room will become free.
        is_stuck = self._state.num_unfinished == 1 and self._state.queue[0] in self._state.awaited
        return would_be <= self._limit or is_stuck

    def _record_fetch(self, name: str) -> None:
        """Record a download, unless the cache has the bytes already."""
        listing = self._source.listing
        assert listing is not None
        if self._keeps or hub.has_cached_bytes(self._source.root, name, listing.digests.get(name)):
            return
        self._journal.record_fetch(self._key(name))
        self._state.fetched.add(name)
        self._state.held_bytes += self._use.sizes[name]


def check_room(source: Source, units: Sequence[OutputUnit], use: CachePolicy, out: Path, num_bytes_out: int) -> None:
    """Refuse a cache limit or a disk that is too small for the units' shards; `num_bytes_out` are written to `out`.

    Raises RequestError or OutputError.
    """
    assert source.listing is not None
    needs = ShardUse.of(source, units, keeps=use.keeps)
    limit = needs.default_limit() if use.limit_bytes is None else use.limit_bytes
    if limit < needs.least_bytes and not use.keeps:
        what = "The cache limit is too small for the files that one group of tensors is made of."
        expected, remedy = f"at least {needs.least_bytes} bytes", "Give more, or leave the option out."
        raise RequestError(what, where="--cache-limit", expected=expected, found=limit, remedy=remedy)
    num_bytes = needs.total_bytes if use.keeps else min(needs.total_bytes, limit)
    sizes = source.listing.sizes
    num_bytes += sum(sizes[name] for name in source.other_files if not source.is_here(name))
    _check_disk(source.root, num_bytes, out, num_bytes_out)


def _check_disk(cache: Path, num_bytes: int, out: Path, num_bytes_out: int) -> None:
    cache, out = _existing_parent(cache), _existing_parent(out.absolute())
    with output_errors(cache):
        free, is_shared = shutil.disk_usage(cache).free, cache.stat().st_dev == out.stat().st_dev
    needed = num_bytes + (num_bytes_out if is_shared else 0)
    if free >= needed:
        return
    parts = f"{num_bytes / 1e6:.1f} MB for files of the source"
    parts += f", {num_bytes_out / 1e6:.1f} MB for the artifact" if is_shared else ""
    raise OutputError(
        "The disk cannot hold what is fetched from the Hub.",
        where=str(cache),
        expected=f"{needed / 1e6:.1f} MB free: {parts}",
        found=f"{free / 1e6:.1f} MB free",
        remedy="Free some space, set HF_HOME to another place, or give a smaller --cache-limit.",
    )


def _existing_parent(path: Path) -> Path:
    """Return the nearest folder of a path that exists."""
    while not path.exists():
        path = path.parent
    return path
