"""Several processes in one conversion, on one machine or many, started by torchrun.

The processes communicate through torchrun's store: a counter that assigns output units to ranks, the journal entries of
each rank, signs of life, and the first failure. Each rank writes whole units, and records them in a journal of its own.
torchrun ends the processes of one machine together, but tells no other machine: the signs of life do.
torch is loaded only when the store is opened.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

from hqconv.conversion.journal import Journal, JournalEntry, read_identity
from hqconv.conversion.torchrun import has_agent_store, is_distributed, parent
from hqconv.errors import PeerError
from hqconv.schemas.artifact_names import member_journal

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_POLL_S = 0.05
_LEAVE_TIMEOUT_S = 60.0
_HEAR_TIMEOUT_S = 5.0  # until the others have heard of a failure
_STORE_TIMEOUT_S = 40.0  # of torchrun's own store, which is there before this process
_LOOK_S, _GRACE_S = 1.0, 10.0  # between looks for torchrun; until a process that should end is ended
# Between signs of life, far less than half of the next; until a process without them, or one that never came, is gone.
_BEAT_S, _GONE_S, _JOIN_TIMEOUT_S = 2.0, 30.0, 300.0


def _end_after_grace(stopped: threading.Event, reason: object) -> None:
    """End this process, unless it ends by itself in some seconds.

    The reason is logged, the process gets SIGTERM, of which a command tells as ever, and after a while it ends at once.
    """
    if stopped.wait(_GRACE_S):
        return
    _LOG.warning("%s", reason)
    os.kill(os.getpid(), signal.SIGTERM)
    if not stopped.wait(_GRACE_S):
        os._exit(128 + signal.SIGTERM)


class ParentWatch:
    """A thread that ends this process when torchrun is gone, because nothing else would.

    A process that waits for the store, or works on a large unit, does not notice.
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
        _end_after_grace(self._stopped, "torchrun has ended; its processes end, too.")


class PeerWatch:
    """A thread that gives signs of life, and ends this process when another one failed, is gone, or cannot be reached.

    Rank 0 watches all others, and they watch rank 0: what it finds reaches all of them by `failed`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._stopped = group, threading.Event()
        self._looked_at = time.monotonic()
        ranks = range(1, group.world_size) if group.rank == 0 else (0,)
        self._seen = dict.fromkeys(ranks, (0, self._looked_at))  # signs of life, and the time of the last new one
        threading.Thread(target=self._watch, name="hqconv-peers", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer, and give no more signs of life."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            try:
                self._group.count(_beat(self._group.rank), 1)
                self._group.check()
                self._look()
            except PeerError as error:
                if self._stopped.is_set():
                    return
                self._group.interrupt(error)
                _end_after_grace(self._stopped, error)
                return
            self._stopped.wait(_BEAT_S)

    def _look(self) -> None:
        """Compare the others' signs of life with the last ones. Raises PeerError for a process that gives none.

        After a pause of this process the others have their time anew: a suspended job pauses all of them.
        """
        before, self._looked_at = self._looked_at, time.monotonic()
        if self._looked_at - before > _GONE_S / 2:
            self._seen = {rank: (seen, self._looked_at) for rank, (seen, _) in self._seen.items()}
        for rank, (seen, since) in self._seen.items():
            found, now = self._group.count(_beat(rank), 0), time.monotonic()
            if found != seen:
                self._seen[rank] = found, now
            elif now - since > (_GONE_S if seen else _JOIN_TIMEOUT_S):
                self._group.lose(rank, now - since, has_joined=seen > 0)


def _beat(rank: int) -> str:
    return f"beat/{rank}"


@contextmanager
def _reachable() -> Iterator[None]:
    """Turn the store's error for a lost connection into a PeerError."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError
        raise PeerError(
            "The processes of this conversion lost each other.",
            where="torchrun's store",
            found=str(error).partition("\n")[0][:200],
            remedy="See whether one of them, its torchrun or its machine is gone; then run the same command with "
            "--resume.",
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
    """The processes that share a conversion: this one is `rank` of `world_size`; rank 0 begins and seals.

    A context manager: the others hear of an exception inside, and at its end all processes leave together.
    """

    def __init__(self, store: Any, rank: int, world_size: int, watch: ParentWatch | None = None) -> None:
        """store: a `torch.distributed.Store` that all processes reach. watch: to stop when this process leaves."""
        self.rank, self.world_size, self._store, self._watch = rank, world_size, store, watch
        self._peers: PeerWatch | None = None
        self._error: PeerError | None = None
        self._cancel: Callable[[PeerError], object] | None = None
        self._lock = threading.Lock()
        self._has_heard = False

    @classmethod
    def of_environment(cls) -> ProcessGroup | None:
        """Join the processes that torchrun started; None in a single process.

        From now on this process ends soon after torchrun does, or another process of the group. Raises PeerError where
        the store cannot be reached.
        """
        if not is_distributed():
            return None
        watch = ParentWatch()
        from torch import distributed

        # A store of rank 0 comes when rank 0 has loaded its libraries: torch's own timeout is longer.
        limit: Any = {"timeout": timedelta(seconds=_STORE_TIMEOUT_S)} if has_agent_store() else {}
        try:
            with _reachable():
                store, rank, world_size = next(distributed.rendezvous("env://", **limit))  # type: ignore[attr-defined]
            group = cls(store, rank, world_size, watch)
            group.join()
        except BaseException:
            watch.stop()
            raise
        return group

    def join(self) -> None:
        """Say who this process is, and begin with signs of life."""
        self.send(f"process/{self.rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._peers = PeerWatch(self)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            self.leave()
        else:
            self.fail(error)

    def name_of(self, rank: int) -> str:
        """Return a rank's name for messages, with process and machine where the rank has joined."""
        key = f"process/{rank}"
        return f"rank {rank} ({self._value(key)})" if self._is_sent(key) else f"rank {rank}"

    def take_next(self, items: Sequence[_T]) -> Iterator[_T]:
        """Yield the items that this process takes of those that all processes have: first come, first served."""
        while (index := self.count("dealt", 1) - 1) < len(items):
            self.check()
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
        """Wait for another process's value. Raises PeerError where a process failed meanwhile."""
        while not self._is_sent(key):
            self.check()
            time.sleep(_POLL_S)
        return self._value(key)

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return the values that all processes give under this key, in the order of ranks; a barrier."""
        if self.rank > 0:
            self.send(f"{key}/{self.rank}", value)
            return cast(list[Any], self.receive(key))
        values = [value, *(self.receive(f"{key}/{rank}") for rank in range(1, self.world_size))]
        self.send(key, values)
        return values

    def _is_sent(self, key: str) -> bool:
        with _reachable():
            return bool(self._store.check([f"hqconv/{key}"]))

    def _value(self, key: str) -> Any:
        with _reachable():
            return json.loads(self._store.get(f"hqconv/{key}"))

    def check(self) -> None:
        """Raise PeerError if another process failed, is gone, or cannot be reached."""
        if self._error is not None:
            raise self._error
        if not self._is_sent("failed"):
            return
        failure = self._value("failed")
        if not self._has_heard:
            self._has_heard = True
            self.count("heard", 1)
        raise PeerError(
            failure["what"],
            where=failure["where"],
            expected=failure["expected"],
            found=failure["found"],
            remedy=failure["remedy"],
        )

    def lose(self, rank: int, silent_s: float, *, has_joined: bool) -> None:
        """Tell all processes that one of them is gone. Raises PeerError."""
        if has_joined:
            what, expected = "A process of this conversion is gone.", f"a sign of life every {_BEAT_S:g} s"
        else:
            what, expected = "A process of this conversion did not come.", "that it joins the others"
        remedy = "See whether it, its torchrun or its machine ended; then run the same command with --resume."
        self._send_failure(what, self.name_of(rank), expected, f"none for {silent_s:.0f} s", remedy)
        self.check()

    def _send_failure(self, what: str, where: str, expected: str, found: str, remedy: str) -> None:
        """Publish the first failure; later ones follow from it."""
        if self.count("failures", 1) == 1:
            document = {"what": what, "where": where, "expected": expected, "found": found, "remedy": remedy}
            self.send("failed", document)

    @contextmanager
    def interrupting(self, cancel: Callable[[PeerError], object]) -> Iterator[None]:
        """Call `cancel` from another thread where a process of the group fails or is gone during the work inside."""
        with self._lock:
            self._cancel = cancel
            if self._error is not None:
                cancel(self._error)
        try:
            yield
        finally:
            with self._lock:
                self._cancel = None

    def interrupt(self, error: PeerError) -> None:
        """End the work of this process with an error."""
        with self._lock:
            self._error = error
            if self._cancel is not None:
                self._cancel(error)

    def fail(self, error: BaseException) -> None:
        """Tell the other processes that this one ends, so that they do not wait for its work.

        Returns when all have heard of it, or after some seconds: torchrun may take the store away with this process.
        """
        if self._peers is not None:
            self._peers.stop()
        with suppress(PeerError):  # they cannot be reached, or know already
            self.check()
            message = str(error).partition("\n")[0] or type(error).__name__
            where = f"{self.name_of(self.rank)}{_at(getattr(error, 'where', ''))}"
            remedy = "See its own message; then run the same command with --resume."
            self._send_failure("Another process of this conversion failed.", where, "", message, remedy)
            waited_s = 0.0
            while self.count("heard", 0) < self.world_size - 1 and waited_s < _HEAR_TIMEOUT_S:
                time.sleep(_POLL_S)
                waited_s += _POLL_S
        self._stop_watches()

    def send_finished(self, entries: Sequence[JournalEntry]) -> None:
        """Send this process's finished units to rank 0."""
        self.send(f"finished/{self.rank}", [entry.to_dict() for entry in entries])

    def receive_finished(self) -> Iterator[tuple[int, JournalEntry]]:
        """Wait for all other ranks, and yield each finished unit with its rank; for rank 0."""
        for rank in range(1, self.world_size):
            for document in self.receive(f"finished/{rank}"):
                yield rank, JournalEntry.from_dict(document)

    def leave(self) -> None:
        """Leave together: rank 0 may hold the store, and goes last."""
        if self._peers is not None:
            self._peers.stop()  # who is done with all work gives no more signs
        num_gone, waited_s = self.count("gone", 1), 0.0
        while self.rank == 0 and num_gone < self.world_size and waited_s < _LEAVE_TIMEOUT_S:
            time.sleep(_POLL_S)
            num_gone, waited_s = self.count("gone", 0), waited_s + _POLL_S
        self._stop_watches()

    def _stop_watches(self) -> None:
        for watch in (self._peers, self._watch):
            if watch is not None:
                watch.stop()


def _at(where: str) -> str:
    return f", {where}" if where else ""
