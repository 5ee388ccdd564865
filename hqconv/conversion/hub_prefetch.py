"""Shards of a source on the Hub: fetched ahead of the work that needs them, and removed after their last use.

The shards lie in a folder of this process in the Hub's cache, of at most `--cache-limit` bytes; files that the cache
had before are used from there, and stay. Tensors that are only copied are read by range requests: a shard of the output
has copied tensors of many shards of the source.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hqconv.errors import OutputError, RequestError
from hqconv.io import hub
from hqconv.io.durable_files import existing_parent, output_errors
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import CopiedShardPlan, MoeLayerPlan, OutputUnit

_NUM_THREADS = 4  # parallel downloads
_NUM_TRIES = 100  # to make a folder that other processes remove when they end
_STOP_TIMEOUT_S = 2.0  # until cancelled downloads have noticed


class StoppedError(Exception):
    """Cancels a download because the work ends."""


@dataclass(frozen=True)
class CachePolicy:
    """Limits for fetched shards. limit_bytes: None for the default; keeps: they stay, in the Hub's cache."""

    limit_bytes: int | None = None
    keeps: bool = False


@dataclass(frozen=True)
class ShardUse:
    """The shards that each unit of work is read from, in the order of the work.

    of_unit: name of an output unit or a layer → names of shards. sizes: of the shards that must be fetched.
    """

    of_unit: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    @classmethod
    def of(
        cls, source: Source, items: Iterable[OutputUnit | MoeLayer], *, keeps: bool = False
    ) -> ShardUse:
        """Collect the shards of output units or layers.

        keeps: also whole shards of copied tensors, as always for an artifact.
        """
        whole = keeps or source.guard.is_held
        of_unit = {item.name: shards_of(source, item, whole=whole) for item in items}
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
        last = {
            name: number for number, of_one in enumerate(self.of_unit.values()) for name in of_one
        }
        held: dict[str, int] = {}
        most = 0
        for number, of_one in enumerate(self.of_unit.values()):
            held |= {name: self.sizes[name] for name in of_one if name in self.sizes}
            most = max(most, sum(held.values()))
            held = {name: size for name, size in held.items() if last[name] > number}
        return most

    def limit(self, policy: CachePolicy) -> int:
        """Return the bytes that the folder may hold: four of the largest shards by default, at least `least_bytes`.

        Raises RequestError for a smaller limit.
        """
        if policy.limit_bytes is None:
            return max(self.least_bytes, 4 * max(self.sizes.values(), default=0))
        if policy.limit_bytes < self.least_bytes and not policy.keeps:
            what = (
                "The cache limit is too small for the files that one group of tensors is made of."
            )
            expected, remedy = (
                f"at least {self.least_bytes} bytes",
                "Give more, or leave the option out.",
            )
            raise RequestError(
                what,
                where="--cache-limit",
                expected=expected,
                found=policy.limit_bytes,
                remedy=remedy,
            )
        return policy.limit_bytes


def shards_of(
    source: Source, item: OutputUnit | MoeLayer, *, whole: bool = False
) -> tuple[str, ...]:
    """Return the names of the shards that an output unit or layer is read from; whole: also for copied tensors."""
    if isinstance(item, CopiedShardPlan):
        refs = list(item.refs) if whole else []
    else:
        layer = item.layer if isinstance(item, MoeLayerPlan) else item
        refs = [ref for expert in range(layer.num_experts) for ref in layer.refs(expert)]
        refs += [ref for of_gemm in layer.input_scales.refs.values() for ref in of_gemm]
    return tuple(source.files[number].name for number in sorted({ref.file for ref in refs}))


def sort_by_shard(source: Source, units: Iterable[OutputUnit]) -> list[OutputUnit]:
    """Sort units so that each shard is needed for one run of units, where shards hold the layers in order."""

    def key(unit: OutputUnit) -> tuple[bool, int, int]:
        names = shards_of(source, unit)
        numbers = [numbered[name] for name in names] or [0]
        return not isinstance(unit, MoeLayerPlan), min(numbers), max(numbers)

    numbered = {file.name: number for number, file in enumerate(source.files)}
    return sorted(units, key=key)


class HubPrefetch:
    """The downloads for one run of work. `start` and `stop` are for the thread that owns the work."""

    def __init__(self, source: Source | None, use: ShardUse, policy: CachePolicy) -> None:
        """use: of the units, in the order of the work. Nothing is fetched without a source, or for a folder.

        Raises RequestError for a limit that is too small.
        """
        self._source, self._use, self._keeps = source, use, policy.keeps
        self._listing = None if source is None else source.listing
        self._limit = 1 << 62 if self._keeps else use.limit(policy)
        self._changed = threading.Condition()  # guards all that follows
        self._on_change: Callable[[], None] = lambda: None
        self._queue = deque(use.sizes)  # in the order of the first use
        self._present: set[str] = set()
        self._own: set[str] = set()  # in the folder of this process: removed after the last use
        self._held_bytes = 0  # of `_own`, running downloads included
        self._users: dict[str, set[str]] = {}  # shard → unfinished units
        for unit, names in use.of_unit.items():
            for name in names:
                self._users.setdefault(name, set()).add(unit)
        self._error: BaseException | None = None
        self._is_stopped = False
        self._folder: _OwnFolder | None = None
        self._threads: list[threading.Thread] = []

    def start(self, on_change: Callable[[], None] | None = None) -> None:
        """Start the downloads. on_change: called after each finished download.

        Raises OutputError where the folder for the shards cannot be made.
        """
        self._on_change = on_change or self._on_change
        if self._listing is None or not self._queue:
            return
        if not self._keeps:
            with output_errors(
                hub.cache_folder(), "Mend the Hub's cache, or have HF_HOME name another place."
            ):
                self._folder = _OwnFolder()
        for number in range(_NUM_THREADS):
            thread = threading.Thread(target=self._work, name=f"hqconv-fetch_{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def is_ready(self, unit: str) -> bool:
        """Return whether all shards of a unit are on this machine. Raises the error of a failed download."""
        names = self._use.of_unit.get(unit, ())
        if all(name in self._present or name not in self._use.sizes for name in names):
            return True
        if self._error is not None:
            raise self._error
        return False

    def wait_for(self, unit: str) -> None:
        """Wait until a unit's shards are on this machine. Raises the error of a failed download."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready(unit))

    def release(self, unit: str) -> None:
        """Remove the shards of a finished unit that no other unit needs; for any thread."""
        with self._changed:
            for name in self._use.of_unit.get(unit, ()):
                self._users[name].discard(unit)
                if not self._users[name] and name in self._own:
                    self._drop(name)
            self._changed.notify_all()

    def _drop(self, name: str) -> None:
        assert self._source is not None
        assert self._folder is not None
        self._source.forget(name)
        with suppress(OSError):  # `stop` removes the folder
            (self._folder.root / name).unlink()
        self._own.discard(name)
        self._present.discard(name)
        self._held_bytes -= self._use.sizes[name]

    def stop(self) -> None:
        """Cancel the downloads, and remove the folder of this process."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        latest = time.monotonic() + _STOP_TIMEOUT_S
        with suppress(KeyboardInterrupt):
            for thread in self._threads:
                thread.join(max(0.0, latest - time.monotonic()))
        if self._folder is not None and self._source is not None:
            for name in self._own & self._present:
                self._source.forget(name)
            self._folder.close()

    # --- the threads that fetch

    def _work(self) -> None:
        assert self._source is not None
        while (name := self._next_shard()) is not None:
            error: BaseException | None = None
            try:
                self._source.fetch(
                    [name], self._check, None if self._folder is None else self._folder.root
                )
            except BaseException as failure:  # noqa: BLE001 - raised by `is_ready`
                error = failure
            with self._changed:
                if error is None:
                    self._present.add(name)
                elif not self._is_stopped:
                    self._error, self._is_stopped = error, True
                self._changed.notify_all()
            self._on_change()

    def _next_shard(self) -> str | None:
        """Return the next shard as soon as there is room for it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or not self._queue or self._has_room())
            if self._is_stopped or not self._queue:
                return None
            name = self._queue.popleft()
            if not self._keeps and not self._is_cached(name):
                self._own.add(name)
                self._held_bytes += self._use.sizes[name]
            return name

    def _has_room(self) -> bool:
        return self._held_bytes + self._use.sizes[self._queue[0]] <= self._limit

    def _is_cached(self, name: str) -> bool:
        """Return True if the Hub's cache has the bytes: they are used from there."""
        assert self._source is not None
        assert self._listing is not None
        return hub.has_cached_bytes(self._source.root, name, self._listing.digests.get(name))

    def _check(self) -> None:
        if self._is_stopped:
            raise StoppedError


class _OwnFolder:
    """A folder of this process in `.hqconv` of the Hub's cache, with a locked file; removed after a kill, too.

    The rest of the cache belongs to all programs of the user.
    """

    def __init__(self) -> None:
        """Create the folder, and remove those of killed processes. Raises OSError."""
        self._place = hub.cache_folder() / ".hqconv"
        new = self._make()
        self._lock = (new / "lock").open("w")
        _takes(self._lock)
        self.root = new.rename(
            new.with_name(f"run-{new.name}")
        )  # only now others look for its lock
        for left in self._place.glob("run-*/lock"):
            with suppress(OSError), left.open("r+") as lock:
                if _takes(lock):
                    shutil.rmtree(left.parent, ignore_errors=True)

    def _make(self) -> Path:
        for number in range(_NUM_TRIES):
            try:
                self._place.mkdir(parents=True, exist_ok=True)
                return Path(tempfile.mkdtemp(prefix="", dir=self._place))
            except (
                FileNotFoundError,
                FileExistsError,
            ):  # the process that ended last removed the folder above
                if number == _NUM_TRIES - 1:
                    raise
        raise AssertionError

    def close(self) -> None:
        """Remove the folder with all its files."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()
        with suppress(OSError):  # another process has a folder there
            self._place.rmdir()


def _takes(lock: IO[str]) -> bool:
    """Lock an open file without waiting; return False where another process has it, or there are no locks."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@contextmanager
def fetched_layers(
    source: Source | None, layers: Iterable[MoeLayer], policy: CachePolicy
) -> Iterator[HubPrefetch]:
    """Fetch the shards of MoE layers of a source ahead of the work inside, which waits for and releases each layer.

    Nothing is fetched of a folder, or without a source. Raises RequestError or OutputError as `check_room`.
    """
    if source is None or source.listing is None:
        yield HubPrefetch(source, ShardUse({}, {}), policy)
        return
    use = ShardUse.of(source, layers)
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
) -> None:
    """Refuse a cache limit or a disk that is too small for the shards; `num_bytes_out` are written to `out`.

    Raises RequestError or OutputError.
    """
    assert source.listing is not None
    num_bytes = use.total_bytes if policy.keeps else min(use.total_bytes, use.limit(policy))
    sizes = source.listing.sizes
    num_bytes += sum(sizes[name] for name in source.sidecar_files.names if not source.is_here(name))
    cache, out = existing_parent(source.root), existing_parent((out or source.root).absolute())
    with output_errors(cache):
        free, is_shared = shutil.disk_usage(cache).free, cache.stat().st_dev == out.stat().st_dev
    needed = num_bytes + (num_bytes_out if is_shared else 0)
    if free < needed:
        parts = f"{num_bytes / 1e6:.1f} MB for files of the source"
        parts += f", {num_bytes_out / 1e6:.1f} MB for the artifact" if is_shared else ""
        raise OutputError(
            "The disk cannot hold what is fetched from the Hub.",
            where=str(cache),
            expected=f"{needed / 1e6:.1f} MB free: {parts}",
            found=f"{free / 1e6:.1f} MB free",
            remedy="Free some space, set HF_HOME to another place, or give a smaller --cache-limit.",
        )
