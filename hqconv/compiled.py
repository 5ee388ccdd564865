"""Loops that numba compiles: without the interpreter's lock, and kept on disk for the next process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

Function = Callable[..., Any]


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
        done = njit(nogil=True, **options)(function)
    return done
