"""Checks of values on a GPU, judged together: reading the answer of each would wait for the device.

Inside `assuming_good` a check finds nothing and is put down. Whoever opened it asks in the end whether one should have
found something, and then does the work once more without it, where the right message is raised. What could harm the
device, such as an index out of range, is not asked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_put_down: ContextVar[list[torch.Tensor] | None] = ContextVar("put_down", default=None)


class Doubts:
    """The checks that were put down."""

    def __init__(self) -> None:
        self.masks: list[torch.Tensor] = []

    def all(self) -> torch.Tensor | None:
        """For each of them, whether it should have found something: bool [C] on the device; None without any."""
        return torch.stack(self.masks) if self.masks else None


@contextmanager
def assuming_good() -> Iterator[Doubts]:
    """Put checks down, in this thread."""
    doubts = Doubts()
    token = _put_down.set(doubts.masks)
    try:
        yield doubts
    finally:
        _put_down.reset(token)


def is_any(mask: torch.Tensor) -> bool:
    """Whether an element of a bool tensor is true; inside `assuming_good` False."""
    put_down = _put_down.get()
    if put_down is None:
        return bool(mask.any())
    put_down.append(mask.any())
    return False
