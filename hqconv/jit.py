"""Loops compiled by numba: they release the interpreter's lock, and are cached on disk for the next process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import njit
from numba.core import event

Function = Callable[..., Any]
_is_cached = [True]  # False once a loop could not be cached


def compiled(function: Function) -> Function:
    """Compile a function on its first call with each kind of arguments.

    Where no folder can hold the result (a read-only installation and home), every process compiles for itself.
    """
    return _compile(function)


def compiled_sums(function: Function) -> Function:
    """`compiled`, where sums of floats may be taken in any order: in vectors, and with other last bits elsewhere."""
    return _compile(function, fastmath={"reassoc"})


def inlined(function: Function) -> Function:
    """`compiled`, and expanded where another compiled function calls it."""
    return _compile(function, inline="always")


def _compile(function: Function, **options: Any) -> Function:
    try:
        done: Function = njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        _is_cached[0] = False
        done = njit(nogil=True, **options)(function)
    return done


class _Announcer(event.Listener):  # type: ignore[misc]
    """Reports once that loops are being compiled."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say

    def on_start(self, event: event.Event) -> None:
        say, self._say = self._say, None
        if say is not None:
            then = (
                "this is done once." if _is_cached[0] else "no folder can hold them, so that every process does this."
            )
            say(f"Compiling loops for this processor, which takes up to a minute; {then}")

    def on_end(self, event: event.Event) -> None:
        return None


@contextmanager
def announced(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` once when a loop must be compiled inside; not for loops that are cached on disk."""
    listener = _Announcer(say)
    event.register("numba:compile", listener)
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)
