"""Deferred value checks on a GPU, read together: a separate result for each check would synchronize every time.

Inside `deferring_checks` a check returns False and its mask is kept. At the end the caller reads all masks at once; if
one is set, it repeats the work without deferring, and the check raises its own message. Checks that protect the
device, such as for an index out of range, are never deferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_put_down: ContextVar[list[torch.Tensor] | None] = ContextVar("put_down", default=None)


class DeferredChecks:
    """Masks of the deferred checks."""

    def __init__(self) -> None:
        self.masks: list[torch.Tensor] = []

    def all(self) -> torch.Tensor | None:
        """Return the result of each deferred check: bool [C] on the device; None without any."""
        return torch.stack(self.masks) if self.masks else None


@contextmanager
def deferring_checks() -> Iterator[DeferredChecks]:
    """Defer checks in this thread."""
    doubts = DeferredChecks()
    token = _put_down.set(doubts.masks)
    try:
        yield doubts
    finally:
        _put_down.reset(token)


def is_any(mask: torch.Tensor) -> bool:
    """Return True if an element of a bool tensor is true; inside `deferring_checks` False."""
    put_down = _put_down.get()
    if put_down is None:
        return bool(mask.any())
    put_down.append(mask.any())
    return False
