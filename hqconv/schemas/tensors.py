"""Where the bytes of a tensor lie, in a file that is there or in one that will be. No tensor is touched here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hqconv.schemas.dtypes import num_bits


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without a place: its name, its safetensors dtype (or another format's name of one), its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements; KeyError for a dtype that safetensors does not have."""
        return math.prod(self.shape) * num_bits(self.dtype) // 8


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor, or a part of one, and its place: `num_bytes` at `offset_bytes` of file number `file` of its owner."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset_bytes: int
    num_bytes: int

    def entry(self, index: int) -> TensorRef:
        """The place of one entry of the first dimension."""
        size = self.num_bytes // self.shape[0]
        return replace(
            self, shape=self.shape[1:], offset_bytes=self.offset_bytes + index * size, num_bytes=size
        )
