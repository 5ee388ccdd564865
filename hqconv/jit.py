"""Loops compiled by numba, cached on disk for the next process, and threads that help a loop.

Loops release the interpreter's lock.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import FunctionType
from typing import Any

from numba import njit
from numba.core import caching, event

Function = Callable[..., Any]


def compiled(function: Function, **options: Any) -> Function:
    """Compile a function on its first call with each kind of arguments. options: of `numba.njit`."""
    _name_by_closure(function)
    loop: Function = njit(nogil=True, **options)(function)
    # no folder can hold it, of installation and home: every process compiles for itself
    with suppress(RuntimeError):
        loop._cache = LoopCache(function)  # type: ignore[attr-defined]
    return loop


def compiled_sums(function: Function) -> Function:
    """`compiled`, where sums of floats may be taken in any order: in vectors, and with other last bits elsewhere."""
    return compiled(function, fastmath={"reassoc"})


def inlined(function: Function) -> Function:
    """`compiled`, and expanded where another compiled function calls it."""
    return compiled(function, inline="always")


class CacheFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Cache of one function on disk that several processes may fill at the same time.

    numba numbers the data files. Two processes that compile different signatures at once both take the next number, and
    the index then gives one signature the machine code of the other: a wrong result without any error. Here every data
    file has a name of its own, so that such a race can only lose an entry.
    """

    def _data_name(self, number: int) -> str:
        return str(self._data_name_pattern.format(number=uuid.uuid4().int))


class LoopCache(caching.FunctionCache):  # type: ignore[misc]
    """Cache of one loop, for as long as no source of any loop changes: one that is inlined is a part of its callers."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        stamp = (self._impl.locator.get_source_stamp(), _digest_of_loops())
        self._cache_file = CacheFile(self._cache_path, self._impl.filename_base, stamp)

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        """Return the key of a cached loop: its types, the processor, its name.

        numba's own has the pickled closure. A compiled function in it has another random number in every process, so
        that each process would compile such a loop again.
        """
        return signature, codegen.magic_tuple(), self._py_func.__qualname__


def _name_by_closure(function: Function) -> None:
    """Add a digest of the values that a function closes over to its name, and so to its symbol's.

    numba names symbols by function, argument types, and a number that each process counts for itself. Two loops of one
    name that two processes compiled may have the same number, and a loop that calls one of them then gets the other: a
    wrong result without any error.
    """
    if function.__closure__:
        function.__qualname__ += f"_{hashlib.sha256(_describe(function).encode()).hexdigest()[:16]}"


def _describe(value: Any) -> str:
    """Describe a function by its place and its closure, anything else by its value; sources are in the stamp."""
    value = getattr(value, "py_func", value)
    if not isinstance(value, FunctionType):
        return f"{type(value).__name__} {value!r}"
    closed = ", ".join(_describe(cell.cell_contents) for cell in value.__closure__ or ())
    return f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}({closed})"


@functools.cache
def _digest_of_loops() -> str:
    root = Path(__file__).parent
    paths = [
        Path(__file__),
        root / "humming_ops" / "cpu_ops.py",
        *sorted(root.glob("cpu_loops/*.py")),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


class _Announcer(event.Listener):  # type: ignore[misc]
    """Reports once that loops are being compiled."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say

    def on_start(self, event: event.Event) -> None:
        say = self._say
        self._say = None
        if say is not None:
            say("Preparing (first run on this machine); this takes up to a minute.")

    def on_end(self, event: event.Event) -> None:
        return None


def announced(say: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Call `say` once when a loop must be compiled inside; not for loops that are cached on disk."""
    listener: AbstractContextManager[Any] = event.install_listener("numba:compile", _Announcer(say))
    return listener


_own = threading.local()
_PARTS = 2  # for each helper, so that none waits long for the slowest


class Helpers:
    """A pool of helper threads for the threads that called `use`."""

    def __init__(self, count: int) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"hqconv-helper_{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task

    def use(self, share: int) -> None:
        """Run the calling thread's loops in these helpers from now on, in parts for `share` of them."""
        _own.helpers = self
        _own.num_parts = share * _PARTS

    def run(self, task: Callable[[slice], None], slices: list[slice]) -> None:
        """Run a task for each slice, and wait for all. Raises the first error."""
        done = threading.Semaphore(0)
        errors = list[BaseException]()

        def run_slice(part: slice) -> None:
            try:
                task(part)
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                errors.append(error)
            finally:
                done.release()

        for part in slices[1:]:
            self._queue.put(functools.partial(run_slice, part))
        run_slice(slices[0])
        for _ in slices:
            done.acquire()
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """End the threads; no thread may use them any more."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()


def in_parts(task: Callable[[slice], None], length: int, least: int = 1) -> None:
    """Run a task over a range: in parts of at least `least`, side by side, if the calling thread has helpers."""
    helpers = getattr(_own, "helpers", None)
    count = 1 if helpers is None else min(_own.num_parts, length // least)
    if helpers is None or count < 2:
        task(slice(0, length))
        return
    bounds = [length * number // count for number in range(count + 1)]
    helpers.run(task, [slice(begin, end) for begin, end in pairwise(bounds)])
