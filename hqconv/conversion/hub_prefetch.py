"""Shards of a source on the Hub: downloaded ahead of the work that needs them, and removed after their last use.

The shards lie in a temporary folder in the Hub's cache, of at most `--cache-limit` bytes where the work can do with so
many; bytes that the cache had before are used from there, and stay. Tensors that are only copied are read by range
requests: a shard of the output has copied tensors of many shards of the source.
"""

from __future__ import annotations

import fcntl
import itertools
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hqconv.io import hub
from hqconv.io.durable_files import output_errors
from hqconv.io.pipeline import stop_threads
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import CopiedShardPlan, OutputUnit, layers_of

_NUM_SHARDS = 4  # that are downloaded at a time; as many of the largest may be here by default
_FOLDER = "hqconv-shards-"  # begin of a temporary folder's name


@dataclass(frozen=True)
class CachePolicy:
    """Limits for downloaded shards. limit_bytes: None for the default; keeps: they stay, in the Hub's cache."""

    limit_bytes: int | None = None
    keeps: bool = False


def shards_of(
    source: Source, item: OutputUnit | MoeLayer, *, whole: bool = False
) -> tuple[str, ...]:
    """Return the names of the shards that an output unit or layer is read from; whole: also for copied tensors."""
    if isinstance(item, CopiedShardPlan):
        refs = list(item.refs) if whole else []
    else:
        layers = [item] if isinstance(item, MoeLayer) else [plan.layer for plan in layers_of(item)]
        refs = [ref for layer in layers for e in range(layer.num_experts) for ref in layer.refs(e)]
        scales = [refs for layer in layers for refs in layer.input_scales.refs.values()]
        refs += itertools.chain(*scales)
    return tuple(source.files[number].name for number in sorted({ref.file for ref in refs}))


def sort_by_shard(source: Source, units: Iterable[OutputUnit]) -> list[OutputUnit]:
    """Sort units so that each shard is needed for one run of units, where shards hold the layers in order."""
    return sorted(
        units, key=lambda unit: (isinstance(unit, CopiedShardPlan), shards_of(source, unit))
    )


class HubPrefetch:
    """The downloads for one run of work, a few shards at a time. `release` is for one thread at a time."""

    def __init__(
        self, source: Source | None, items: Iterable[OutputUnit | MoeLayer], policy: CachePolicy
    ) -> None:
        """items: in the order of the work. Nothing is downloaded without a source, or for a folder."""
        self._source = source
        self._keeps = policy.keeps
        self._needed: dict[str, list[str]] = {}  # unfinished item → its shards that are not here
        self._sizes: Mapping[str, int] = {}
        if source is not None and source.listing is not None:
            self._sizes = source.listing.sizes
            for item in items:
                names = shards_of(source, item, whole=policy.keeps)
                self._needed[item.name] = [name for name in names if not source.is_here(name)]
        self._uses = Counter(itertools.chain(*self._needed.values()))
        self._queue = deque(self._uses)  # in the order of their first use
        largest_bytes = max((self._sizes[name] for name in self._uses), default=0)
        self._limit_bytes = policy.limit_bytes or _NUM_SHARDS * largest_bytes
        self._num_bytes = 0  # of the shards that are here or on their way
        self._downloads: dict[str, Future[None]] = {}
        self._pool = ThreadPoolExecutor(_NUM_SHARDS, "hqconv-fetch")
        self._folder: Path | None = None
        self._resources = ExitStack()
        self._is_stopped = False

    def start(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start the downloads. on_change: called after each download, in another thread.

        Raises OutputError where the folder for the shards cannot be made.
        """
        self._on_change = on_change
        if self._queue and not self._keeps:
            self._folder = self._resources.enter_context(_temporary_folder())
        self._download()

    def _download(self) -> None:
        """Start the downloads that the limit allows, and those of the oldest unfinished item in any case."""
        oldest = next(iter(self._needed.values()), [])
        while self._queue:
            name = self._queue[0]
            num_bytes = self._num_bytes + self._sizes[name]
            if num_bytes > self._limit_bytes and name not in oldest and not self._keeps:
                break
            assert self._source is not None
            self._queue.popleft()
            self._num_bytes = num_bytes
            download = self._pool.submit(self._source.fetch, [name], self._check, self._folder)
            download.add_done_callback(lambda _: self._on_change())
            self._downloads[name] = download

    def _check(self) -> None:
        if self._is_stopped:
            raise CancelledError

    def is_ready(self, item: str) -> bool:
        """Return whether all shards of an item are on this machine. Raises the error of a failed download."""
        for name in self._needed.get(item, ()):
            download = self._downloads.get(name)
            if download is None or not download.done():
                return False
            download.result()
        return True

    def wait_for(self, item: str) -> None:
        """Wait for the shards of the oldest unfinished item. Raises the error of a failed download."""
        for name in self._needed.get(item, ()):
            self._downloads[name].result()

    def release(self, item: str) -> None:
        """Remove the shards of a finished item that no other item needs, unless they lie in the Hub's cache."""
        for name in self._needed.pop(item, ()):
            self._uses[name] -= 1
            if not self._uses[name]:
                self._num_bytes -= self._sizes[name]
                self._remove(name)
        self._download()

    def _remove(self, name: str) -> None:
        if self._source is not None and self._folder is not None and (self._folder / name).exists():
            self._source.forget(name)
            (self._folder / name).unlink()

    def stop(self) -> None:
        """Cancel the downloads, and remove the temporary folder."""
        self._is_stopped = True
        stop_threads(self._pool)
        for name in self._downloads:
            self._remove(name)
        self._resources.close()


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Yield a locked folder in the Hub's cache, and remove those of killed processes."""
    cache = hub.cache_folder()
    with ExitStack() as stack:
        with output_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
            for path in cache.glob(f"{_FOLDER}*/lock"):  # locked while the process runs
                with suppress(OSError), path.open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent, ignore_errors=True)
            folder = tempfile.TemporaryDirectory(
                prefix=_FOLDER, dir=cache, ignore_cleanup_errors=True
            )
            root = Path(stack.enter_context(folder))
            own_lock = stack.enter_context((root / "lock").open("w"))
        with suppress(OSError):  # a file system without locks
            fcntl.flock(own_lock, fcntl.LOCK_EX)
        yield root


@contextmanager
def fetched_layers(
    source: Source | None, layers: Iterable[MoeLayer], policy: CachePolicy
) -> Iterator[HubPrefetch]:
    """Download the shards of MoE layers of a source ahead of the work inside, which waits for and releases each layer.

    Nothing is downloaded of a folder, or without a source. Raises as `HubPrefetch`.
    """
    prefetch = HubPrefetch(source, layers, policy)
    try:
        prefetch.start()
        yield prefetch
    finally:
        prefetch.stop()
