"""Fetch the shards of a source on the Hub ahead of the work that needs them, and remove each after its last use.

The shards lie in a folder of this process (`io.fetch_folder`), of at most `--cache-limit` bytes; files that the Hub's
cache has are used from there, and stay. Tensors that are only copied are read by range requests, and need no file.
Several processes take runs of units (`divide_into_runs`), so that few shards are fetched by two of them; the processes
whose folders lie in one cache share its limit.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hqconv.errors import OutputError, RequestError
from hqconv.io import hub
from hqconv.io.durable_files import output_errors
from hqconv.io.fetch_folder import FetchFolder
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import MoeLayerPlan, OutputUnit

_NUM_THREADS = 4  # parallel downloads
_STOP_TIMEOUT_S = 2.0  # until cancelled downloads have noticed


class StoppedError(Exception):
    """Cancels a download because the work ends."""


@dataclass(frozen=True)
class ShardUse:
    """The shards that each unit of work is read from, in the order of the work.

    of_unit: name of an output unit or a layer → names of shards. sizes: of the shards that must be fetched.
    """

    of_unit: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, source: Source, units: Sequence[OutputUnit], *, keeps: bool) -> ShardUse:
        """Collect the shards of each unit.

        keeps: also whole shards of copied tensors, as always for an artifact.
        """
        whole = keeps or source.guard.is_held
        return cls._of(source, {unit.name: _shards_of_unit(source, unit, whole) for unit in units})

    @classmethod
    def of_layers(cls, source: Source, layers: Iterable[MoeLayer]) -> ShardUse:
        """Collect the shards of each MoE layer."""
        return cls._of(source, {layer.name: _shards_of_layer(source, layer) for layer in layers})

    @classmethod
    def _of(cls, source: Source, of_unit: Mapping[str, tuple[str, ...]]) -> ShardUse:
        names = dict.fromkeys(name for of_one in of_unit.values() for name in of_one)
        sizes = {file.name: file.size_bytes for file in source.files if file.name in names}
        return cls(of_unit, {name: sizes[name] for name in names if not source.is_here(name)})

    @property
    def total_bytes(self) -> int:
        """Total size of the shards that must be fetched."""
        return sum(self.sizes.values())

    @property
    def least_bytes(self) -> int:
        """Largest size that must be in the folder at one time: every shard from its first to its last use."""
        last = {name: number for number, of_one in enumerate(self.of_unit.values()) for name in of_one}
        held: dict[str, int] = {}
        most = 0
        for number, of_one in enumerate(self.of_unit.values()):
            held |= {name: self.sizes[name] for name in of_one if name in self.sizes}
            most = max(most, sum(held.values()))
            held = {name: size for name, size in held.items() if last[name] > number}
        return most

    def limit(self, policy: CachePolicy, num_sharing: int = 1) -> int:
        """Return the bytes that the folder may hold: four of the largest shards by default, at least `least_bytes`.

        num_sharing: processes that share the policy's limit. Raises RequestError for a share below `least_bytes`.
        """
        if policy.limit_bytes is None:
            return max(self.least_bytes, 4 * max(self.sizes.values(), default=0))
        if policy.limit_bytes // num_sharing < self.least_bytes and not policy.keeps:
            what = "The cache limit is too small for the files that one group of tensors is made of."
            expected = f"at least {self.least_bytes * num_sharing} bytes"
            expected += f" for {num_sharing} processes that share a cache" if num_sharing > 1 else ""
            remedy = "Give more, or leave the option out."
            raise RequestError(what, where="--cache-limit", expected=expected, found=policy.limit_bytes, remedy=remedy)
        return policy.limit_bytes // num_sharing


def _shards_of_layer(source: Source, layer: MoeLayer) -> tuple[str, ...]:
    refs = [ref for expert in range(layer.num_experts) for ref in layer.refs(expert)]
    refs += [ref for of_gemm in layer.input_scales.refs.values() for ref in of_gemm]
    return tuple(source.files[number].name for number in sorted({ref.file for ref in refs}))


def _shards_of_unit(source: Source, unit: OutputUnit, whole: bool) -> tuple[str, ...]:
    if isinstance(unit, MoeLayerPlan):
        return _shards_of_layer(source, unit.layer)
    refs = unit.refs if whole else ()
    return tuple(source.files[number].name for number in sorted({ref.file for ref in refs}))


def sort_by_shard(source: Source, units: Iterable[OutputUnit]) -> list[OutputUnit]:
    """Sort units so that each shard is needed for one run of units, where shards hold the layers in order."""

    def key(unit: OutputUnit) -> tuple[bool, int, int]:
        names = _shards_of_unit(source, unit, whole=False)
        numbers = [numbered[name] for name in names] or [0]
        return not isinstance(unit, MoeLayerPlan), min(numbers), max(numbers)

    numbered = {file.name: number for number, file in enumerate(source.files)}
    return sorted(units, key=key)


def divide_into_runs(source: Source, units: Sequence[OutputUnit], num_processes: int) -> list[Sequence[OutputUnit]]:
    """Divide units, sorted by shard, into runs that one process takes as a whole: long ones first, then shorter ones.

    A shard that units on both sides of a cut need is fetched twice. So a run has at least as many units as a shard, if
    there are runs for all processes then, and goes on to a cut between two shards if one is near.
    """
    shards = [set(_shards_of_unit(source, unit, whole=False)) for unit in units]
    num_shards = len(set().union(*shards))
    most = len(units) // num_processes
    least = max(1, min(len(units) // max(1, num_shards), most))
    runs, begin = list[Sequence[OutputUnit]](), 0
    while begin < len(units):
        length = max(least, (len(units) - begin) // (2 * num_processes))
        longest = max(length, min(length + least, most))
        ends = range(begin + length, min(len(units), begin + longest) + 1)
        clean = (end for end in ends if end == len(units) or not shards[end - 1] & shards[end])
        end = next(clean, min(len(units), begin + length))
        runs.append(units[begin:end])
        begin = end
    return runs


@dataclass(frozen=True)
class CachePolicy:
    """Limits for fetched shards. limit_bytes: None for the default; keeps: they stay, in the Hub's cache."""

    limit_bytes: int | None = None
    keeps: bool = False


class Waiting(Protocol):
    """A thread that waits for conditions, and is notified of changes: `Stages` of a conversion."""

    def wait(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        ...

    def notify(self) -> None:
        """Wake the thread: a condition may hold now."""
        ...


class _OwnWaiting:
    """Waiting of a thread that has no stages."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(holds)

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


@dataclass(eq=False)
class _State:
    """The state of the downloads, guarded by the lock of `HubPrefetch`."""

    queue: deque[str] = field(default_factory=deque)
    wanted: set[str] = field(default_factory=set)  # in the queue, being fetched, or present
    present: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)  # in the folder of this process: removed after the last use
    held_bytes: int = 0  # of `own`, running downloads included
    users: dict[str, set[str]] = field(default_factory=dict)  # shard → unfinished units
    unfinished: set[str] = field(default_factory=set)  # units that were begun and are not released
    awaited: tuple[str, ...] = ()  # the shards of the unit that waits
    error: BaseException | None = None
    is_stopped: bool = False


class HubPrefetch:
    """Downloads for one run of work. Only the thread that owns the work calls `start`, `wait_for` and `stop`."""

    def __init__(self, source: Source | None, use: ShardUse, policy: CachePolicy, *, is_dealt: bool = False) -> None:
        """use: of the units, in the order of the work. is_dealt: this process does the units that `take` names.

        Nothing is fetched, and nothing waits, without a source or for a folder.

        Raises RequestError for a limit that is too small.
        """
        self._source, self._use, self._policy, self._keeps = source, use, policy, policy.keeps
        self._listing = None if source is None else source.listing
        self._limit = 1 << 62 if self._keeps else use.limit(policy)
        self._changed = threading.Condition()
        self._state = _State()
        self._folder: FetchFolder | None = None
        self._is_begun = False
        self._waiting: Waiting = _OwnWaiting()
        self._threads: list[threading.Thread] = []
        if not is_dealt:
            self.take(use.of_unit)

    # --- the thread that owns the work

    def take(self, units: Iterable[str]) -> None:
        """Add units to the work of this process: their shards are fetched after those of earlier units."""
        with self._changed:
            for unit in units:
                for name in self._use.of_unit.get(unit, ()):
                    self._state.users.setdefault(name, set()).add(unit)
                    if name in self._use.sizes and name not in self._state.wanted:
                        self._state.wanted.add(name)
                        self._state.queue.append(name)
            self._take_over()
            self._changed.notify_all()

    def open_folder(self) -> str:
        """Create the folder for shards, if one is needed. Return its name, or "" without one.

        Raises OutputError where the Hub's cache cannot be written.
        """
        if self._folder is None and self._listing is not None and self._use.sizes and not self._keeps:
            self._folder = FetchFolder(self._listing)
        return "" if self._folder is None else self._folder.root.name

    def share_limit(self, names: Iterable[str]) -> None:
        """Divide the limit among the processes whose folders lie in the same cache as the folder of this one.

        names: of `open_folder` of all processes. Raises RequestError for a share that is too small.
        """
        if self._folder is not None:
            num_sharing = sum(name != "" and self._folder.root.with_name(name).is_dir() for name in names)
            self._limit = self._use.limit(self._policy, max(1, num_sharing))

    def start(self, waiting: Waiting | None = None) -> None:
        """Start the downloads. waiting: of this thread, which is notified of each finished download.

        Raises OutputError where the Hub's cache cannot be written.
        """
        if waiting is not None:
            self._waiting = waiting
        if self._listing is None or not self._use.sizes:
            return
        self.open_folder()
        with self._changed:
            self._is_begun = True
            self._take_over()
        for number in range(_NUM_THREADS):
            thread = threading.Thread(target=self._work, name=f"hqconv-fetch_{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _take_over(self) -> None:
        """Take over the shards that killed processes left, once the first shards of this one are known."""
        if self._folder is not None and self._is_begun and self._state.queue:
            self._is_begun = False
            for name in self._folder.take_over(self._first_within_limit()):
                self._hold(name)

    def _first_within_limit(self) -> Iterator[str]:
        """Yield the shards that are needed first, as many as the folder may hold."""
        total = 0
        for name in self._state.queue:
            total += self._use.sizes[name]
            if total > self._limit:
                return
            yield name

    def has_shards(self, unit: str) -> bool:
        """Return whether all shards of a unit are on this machine."""
        names = self._use.of_unit.get(unit, ())
        return all(name in self._state.present or name not in self._use.sizes for name in names)

    def wait_for(self, unit: str) -> None:
        """Wait until a unit's shards are on this machine. Raises the error of a failed download."""
        if self._listing is None:
            return
        with self._changed:
            self._state.unfinished.add(unit)
            self._state.awaited = self._use.of_unit.get(unit, ())
            self._changed.notify_all()
        self._waiting.wait(lambda: self.has_shards(unit) or self._state.error is not None)
        if not self.has_shards(unit) and self._state.error is not None:
            raise self._state.error
        self._state.awaited = ()

    def stop(self) -> None:
        """Start no more downloads, and cancel the running ones.

        The folder is removed once all units are released; else the next run takes its files over.
        """
        with self._changed:
            self._state.is_stopped = True
            self._changed.notify_all()
        latest = time.monotonic() + _STOP_TIMEOUT_S
        with suppress(KeyboardInterrupt):
            for thread in self._threads:
                thread.join(max(0.0, latest - time.monotonic()))
        if self._folder is not None:
            if any(self._state.users.values()):
                self._folder.leave()
            else:
                self._folder.close()

    # --- any thread

    def release(self, unit: str) -> None:
        """Remove the shards of a finished unit that no other unit needs."""
        if self._listing is None:
            return
        with self._changed:
            self._state.unfinished.discard(unit)
            for name in self._use.of_unit.get(unit, ()):
                users = self._state.users[name]
                users.discard(unit)
                if not users and name in self._state.own:
                    self._drop(name)
            self._changed.notify_all()

    def _hold(self, name: str) -> None:
        self._state.own.add(name)
        self._state.held_bytes += self._use.sizes[name]

    def _drop(self, name: str) -> None:
        assert self._folder is not None
        assert self._source is not None
        self._source.forget(name)
        self._folder.remove(name)
        for names in (self._state.own, self._state.present, self._state.wanted):
            names.discard(name)
        self._state.held_bytes -= self._use.sizes[name]

    # --- the threads that fetch

    def _work(self) -> None:
        assert self._source is not None
        for name in self._next_shards():
            try:
                self._source.fetch([name], self._check, self._folder)
            except BaseException as error:  # noqa: BLE001 - raised by `wait_for`
                with self._changed:
                    if self._state.error is None and not self._state.is_stopped:
                        self._state.error = error
                    self._state.is_stopped = True
                    self._changed.notify_all()
            else:
                self._state.present.add(name)
            self._waiting.notify()

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
                if name not in self._state.own and not self._keeps and not self._is_cached(name):
                    self._hold(name)
            yield name

    def _may_fetch(self) -> bool:
        """Return whether the next shard fits. Shards are fetched in order: an awaited shard is never behind others."""
        if not self._state.queue:
            return False
        name = self._state.queue[0]
        would_be = self._state.held_bytes + (0 if name in self._state.own else self._use.sizes[name])
        # Where no other unit is in work, no room will become free.
        is_stuck = len(self._state.unfinished) == 1 and name in self._state.awaited
        return would_be <= self._limit or is_stuck

    def _is_cached(self, name: str) -> bool:
        """Return True if the Hub's cache has the bytes: they are used from there."""
        assert self._source is not None
        assert self._listing is not None
        return hub.has_cached_bytes(self._source.root, name, self._listing.digests.get(name))


@contextmanager
def fetched_layers(source: Source | None, layers: Iterable[MoeLayer], policy: CachePolicy) -> Iterator[HubPrefetch]:
    """Fetch the shards of MoE layers of a source ahead of the work inside, which waits for and releases each layer.

    Nothing is fetched of a folder, or without a source. Raises RequestError or OutputError as `check_room`.
    """
    if source is None or source.listing is None:
        yield HubPrefetch(source, ShardUse({}, {}), policy)
        return
    use = ShardUse.of_layers(source, layers)
    check_room(source, use, policy)
    prefetch = HubPrefetch(source, use, policy)
    try:
        prefetch.start()
        yield prefetch
    finally:
        prefetch.stop()


def check_room(
    source: Source,
    use: ShardUse,
    policy: CachePolicy,
    out: Path | None = None,
    num_bytes_out: int = 0,
    num_sharing: int = 1,
) -> None:
    """Refuse a cache limit or a disk that is too small for the shards; `num_bytes_out` are written to `out`.

    num_sharing: processes that fetch into this cache. Raises RequestError or OutputError.
    """
    assert source.listing is not None
    num_bytes = use.total_bytes
    if not policy.keeps:  # of units that two processes deal with, some shards are fetched twice
        num_bytes += (num_sharing - 1) * use.least_bytes
        num_bytes = min(num_bytes, num_sharing * use.limit(policy, num_sharing))
    sizes = source.listing.sizes
    num_bytes += sum(sizes[name] for name in source.other_files if not source.is_here(name))
    _check_disk(source.root, num_bytes, out or source.root, num_bytes_out)


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
