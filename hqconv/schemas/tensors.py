"""Positions of tensors in existing and in planned files. No tensor is touched here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hqconv.schemas.dtypes import num_bits


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without a position: its name, its safetensors dtype (or a name of another format), its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements; KeyError for a dtype that safetensors does not have."""
        return math.prod(self.shape) * num_bits(self.dtype) // 8


class TensorRef(NamedTuple):
    """A tensor, or a part of one, and its position: `num_bytes` at `offset_bytes` of file number `file` of its owner.

    A tuple, since there may be a million of them: built in a third of a frozen dataclass's time, and not walked by the
    collector of cycles again and again.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset_bytes: int
    num_bytes: int

    def entry(self, index: int) -> TensorRef:
        """Return the position of one entry of the first dimension."""
        size = self.num_bytes // self.shape[0]
        offset = self.offset_bytes + index * size
        return self._replace(shape=self.shape[1:], offset_bytes=offset, num_bytes=size)
