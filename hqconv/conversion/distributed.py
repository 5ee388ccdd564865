"""Several processes in one conversion, on one machine or many, started by torchrun.

The processes communicate through torchrun's store: a counter that assigns output units to ranks, the journal entries of
each rank, and the first failure. Each rank writes whole units, and records them in a journal of its own.
torch is loaded only when the store is opened.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from hqconv.conversion.journal import Journal, JournalEntry, read_identity
from hqconv.conversion.torchrun import has_agent_store, is_distributed, parent
from hqconv.errors import OutputError
from hqconv.schemas.artifact_names import member_journal

_T = TypeVar("_T")
_POLL_S = 0.05
_LEAVE_TIMEOUT_S = 60.0
_STORE_TIMEOUT_S = 40.0  # of torchrun's own store, which is there before this process
_LOOK_S, _GRACE_S = 1.0, 10.0  # between looks for torchrun; until a process without torchrun is ended


class ParentWatch:
    """A thread that ends this process when torchrun is gone, because nothing else would.

    A process that waits for the store, or works on a large unit, does not notice. It has some seconds to end with a
    message of its own. Then it gets SIGTERM, which a command tells as ever, and after a while it ends at once.
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="hqconv-torchrun", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self) -> None:
        while os.getppid() == parent():
            if self._stopped.wait(_LOOK_S):
                return
        if self._stopped.wait(_GRACE_S):
            return
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._stopped.wait(_GRACE_S):
            os._exit(128 + signal.SIGTERM)


@contextmanager
def _reachable() -> Iterator[None]:
    """Turn the store's error for a lost connection into an OutputError."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError
        raise OutputError(
            "The processes of this conversion lost each other.",
            where="torchrun's store",
            found=str(error).partition("\n")[0][:200],
            remedy="See whether one of them, or its machine, is gone; then run the same command with --resume.",
        ) from error


class MemberFolder:
    """The output folder as a rank above 0 sees it: the root that rank 0 took, and a journal of the rank's own."""

    def __init__(self, root: Path, rank: int) -> None:
        """Begin a journal in a folder whose own journal was begun. Raises OutputError for an unreadable journal."""
        self.root = root
        self.entries: list[JournalEntry] = []
        self.journal = Journal(root, member_journal(rank))
        self.journal.begin(read_identity(root))

    def __enter__(self) -> MemberFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def record(self, entry: JournalEntry) -> None:
        """Record a finished unit; the record survives a kill from here on."""
        self.journal.record(entry)
        self.entries.append(entry)


class ProcessGroup:
    """The processes that share a conversion: this one is `rank` of `world_size`; rank 0 begins and seals."""

    def __init__(self, store: Any, rank: int, world_size: int, watch: ParentWatch | None = None) -> None:
        """store: a `torch.distributed.Store` that all processes reach. watch: to stop when this process leaves."""
        self.rank, self.world_size, self._store, self._watch = rank, world_size, store, watch

    @classmethod
    def of_environment(cls) -> ProcessGroup | None:
        """Join the processes that torchrun started; None in a single process.

        From now on this process ends soon after torchrun does. Raises OutputError where the store cannot be reached.
        """
        if not is_distributed():
            return None
        watch = ParentWatch()
        from torch import distributed

        # A store of rank 0 comes when rank 0 has planned the conversion: torch's own timeout is longer.
        limit: Any = {"timeout": timedelta(seconds=_STORE_TIMEOUT_S)} if has_agent_store() else {}
        try:
            with _reachable():
                found = next(distributed.rendezvous("env://", **limit))  # type: ignore[attr-defined]
        except BaseException:
            watch.stop()
            raise
        store, rank, world_size = found
        return cls(store, rank, world_size, watch)

    def take_next(self, items: Sequence[_T]) -> Iterator[_T]:
        """Yield the items that this process takes of those that all processes have: first come, first served."""
        while (index := self.count("dealt", 1) - 1) < len(items):
            self._check()
            yield items[index]

    def count(self, name: str, more: int) -> int:
        """Add to a number that all processes share, and return the sum."""
        with _reachable():
            return int(self._store.add(f"hqconv/count/{name}", more))

    def send(self, key: str, value: Any) -> None:
        """Publish a JSON value to all processes, once per key."""
        with _reachable():
            self._store.set(f"hqconv/{key}", json.dumps(value))

    def receive(self, key: str) -> Any:
        """Wait for another process's value. Raises OutputError where a process failed meanwhile."""
        while not self._is_sent(key):
            self._check()
            time.sleep(_POLL_S)
        return self._value(key)

    def _is_sent(self, key: str) -> bool:
        with _reachable():
            return bool(self._store.check([f"hqconv/{key}"]))

    def _value(self, key: str) -> Any:
        with _reachable():
            return json.loads(self._store.get(f"hqconv/{key}"))

    def _check(self) -> None:
        if self._is_sent("failed"):
            failure = self._value("failed")
            raise OutputError(
                "Another process of this conversion failed.",
                where=f"rank {failure['rank']}",
                found=failure["error"],
                remedy="See its own message; then run the same command with --resume.",
            )

    def fail(self, error: BaseException) -> None:
        """Tell the other processes that this one ends, so that they do not wait for its work."""
        message = str(error).partition("\n")[0] or type(error).__name__
        with suppress(OutputError):  # they cannot be reached, or know already
            self._check()
            self.send("failed", {"rank": self.rank, "error": message})
        self._stop_watch()

    def send_finished(self, entries: Sequence[JournalEntry]) -> None:
        """Send this process's finished units to rank 0."""
        self.send(f"finished/{self.rank}", [entry.to_dict() for entry in entries])

    def receive_finished(self) -> Iterator[JournalEntry]:
        """Wait for the finished units of all other ranks; for rank 0."""
        for rank in range(1, self.world_size):
            for document in self.receive(f"finished/{rank}"):
                yield JournalEntry.from_dict(document)

    def leave(self) -> None:
        """Leave together: rank 0 may hold the store, and goes last."""
        num_gone, waited_s = self.count("gone", 1), 0.0
        while self.rank == 0 and num_gone < self.world_size and waited_s < _LEAVE_TIMEOUT_S:
            time.sleep(_POLL_S)
            num_gone, waited_s = self.count("gone", 0), waited_s + _POLL_S
        self._stop_watch()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
