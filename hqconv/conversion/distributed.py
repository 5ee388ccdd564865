"""Several processes at one conversion, on one machine or many: who does which group, and when all is done.

The processes are started by torchrun, and talk through its store: a counter that deals the groups, what each process
finished, and what went wrong. Each writes whole groups of files, and puts them down in a journal of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from hqconv.conversion.journal import Journal, JournalEntry, identity_of
from hqconv.conversion.torchrun import is_distributed
from hqconv.errors import OutputError
from hqconv.io.durable_files import FileRecord
from hqconv.schemas.artifact_names import member_journal

_T = TypeVar("_T")
_POLL_SECONDS = 0.05
_GOODBYE_SECONDS = 60.0


@contextmanager
def _reachable() -> Iterator[None]:
    """Turns what the store says of a lost connection into an OutputError."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError
        raise OutputError(
            "The processes of this conversion lost each other.",
            where="torchrun's store",
            found=str(error).partition("\n")[0][:200],
            remedy="See whether one of them, or its machine, is gone; then run the same command with --resume.",
        ) from error


class ProcessShare:
    """One process's share of a folder that the first process took: where it writes, and its own journal."""

    def __init__(self, root: Path, rank: int) -> None:
        """Begin a journal in a folder whose own journal was begun. Raises OutputError where it cannot be read."""
        self.root = root
        self.entries: list[JournalEntry] = []
        self._journal = Journal(root, member_journal(rank))
        self._journal.begin(identity_of(root))

    def __enter__(self) -> ProcessShare:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def record(self, entry: JournalEntry) -> None:
        """Note a finished group; it survives a kill from here on."""
        self._journal.record(entry)
        self.entries.append(entry)

    @property
    def notes(self) -> Journal:
        """Where it is noted what is fetched: nothing, as a team drops nothing."""
        return self._journal


class ProcessGroup:
    """This process's place among those that share a conversion: `rank` of `size`; rank 0 begins and seals."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """store: a `torch.distributed.Store` that all processes reach."""
        self.rank, self.size, self._store = rank, size, store

    @classmethod
    def of_environment(cls) -> ProcessGroup | None:
        """The team that torchrun started, or None in a process that is alone."""
        if not is_distributed():
            return None
        from torch import distributed

        store, rank, size = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
        return cls(store, rank, size)

    # --- what is to be done

    def deal(self, items: Sequence[_T]) -> Iterator[_T]:
        """Those of `items`, the same in every process, that this one takes: whoever asks first has the next one."""
        while (index := self.count("dealt", 1) - 1) < len(items):
            self._check()
            yield items[index]

    def count(self, name: str, more: int) -> int:
        """Add to a number that all processes share; what it is then."""
        with _reachable():
            return int(self._store.add(f"hqconv/count/{name}", more))

    # --- what the others say

    def say(self, key: str, words: Any) -> None:
        """Tell the others, once."""
        with _reachable():
            self._store.set(f"hqconv/{key}", json.dumps(words))

    def hear(self, key: str) -> Any:
        """What another process says; waits for it. Raises OutputError where one failed meanwhile."""
        while not self._is_said(key):
            self._check()
            time.sleep(_POLL_SECONDS)
        return self._words(key)

    def _is_said(self, key: str) -> bool:
        with _reachable():
            return bool(self._store.check([f"hqconv/{key}"]))

    def _words(self, key: str) -> Any:
        with _reachable():
            return json.loads(self._store.get(f"hqconv/{key}"))

    def _check(self) -> None:
        if self._is_said("failed"):
            words = self._words("failed")
            raise OutputError(
                "Another process of this conversion failed.",
                where=f"rank {words['rank']}",
                found=words["error"],
                remedy="See its own message; then run the same command with --resume.",
            )

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process goes away, so that they do not wait for it."""
        told = str(error).partition("\n")[0] or type(error).__name__
        with suppress(OutputError):  # they cannot be reached, or know already
            self._check()
            self.say("failed", {"rank": self.rank, "error": told})

    # --- the end

    def hand_in(self, entries: Sequence[JournalEntry]) -> None:
        """Tell rank 0 what this process finished."""
        self.say(f"finished/{self.rank}", [entry.to_dict() for entry in entries])

    def collect(self) -> Iterator[JournalEntry]:
        """For rank 0: what all the others finished; waits for them."""
        for rank in range(1, self.size):
            for words in self.hear(f"finished/{rank}"):
                files = [FileRecord(**record) for record in words["files"]]
                measured = (words["measured"], words["sums"], words["sources"])
                yield JournalEntry(words["group"], files, *measured)

    def part(self) -> None:
        """Leave together: rank 0 may hold the store, and goes last."""
        gone, waited = self.count("gone", 1), 0.0
        while self.rank == 0 and gone < self.size and waited < _GOODBYE_SECONDS:
            time.sleep(_POLL_SECONDS)
            gone, waited = self.count("gone", 0), waited + _POLL_SECONDS
