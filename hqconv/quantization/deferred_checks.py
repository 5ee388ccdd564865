"""Checks of values on a GPU, judged together: reading the answer of each would wait for the device.

Inside `deferring_checks` a check finds nothing and is deferred. The opener asks in the end whether one should have
found something, and then does the work once more without it, where the right message is raised. What could harm the
device, such as an index out of range, is not asked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_put_down: ContextVar[list[torch.Tensor] | None] = ContextVar("put_down", default=None)


class DeferredChecks:
    """The checks that were put down."""

    def __init__(self) -> None:
        self.masks: list[torch.Tensor] = []

    def all(self) -> torch.Tensor | None:
        """For each of them, whether it should have found something: bool [C] on the device; None without any."""
        return torch.stack(self.masks) if self.masks else None


@contextmanager
def deferring_checks() -> Iterator[DeferredChecks]:
    """Put checks down, in this thread."""
    doubts = DeferredChecks()
    token = _put_down.set(doubts.masks)
    try:
        yield doubts
    finally:
        _put_down.reset(token)


def is_any(mask: torch.Tensor) -> bool:
    """Whether an element of a bool tensor is true; inside `deferring_checks` False."""
    put_down = _put_down.get()
    if put_down is None:
        return bool(mask.any())
    put_down.append(mask.any())
    return False
