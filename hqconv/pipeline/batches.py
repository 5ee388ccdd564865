"""What the stages of a conversion hand on to each other: some experts of a block, or a piece of a tensor to copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from hqconv.planning.groups import Group, PlannedBlock, PlannedCopy
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.raw import RawLayout


@dataclass(frozen=True, eq=False)
class Batch:
    """Experts of one block that are read, encoded and written together."""

    planned: PlannedBlock
    experts: range

    @cached_property
    def layout(self) -> RawLayout:
        """Where their bytes go in a slot."""
        return RawLayout(self.planned.block, self.experts)

    @cached_property
    def num_bytes(self) -> int:
        """Source bytes of the experts."""
        return sum(ref.num_bytes for expert in self.experts for ref in self.planned.block.refs(expert))


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of bytes of one tensor, copied as they are."""

    planned: PlannedCopy
    ref: TensorRef
    start: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Run:
    """So many bytes to write into one of a group's files."""

    file: int
    offset_bytes: int
    num_bytes: int
    data: torch.Tensor


def cut(group: Group, num_experts: int, piece_bytes: int) -> Iterator[Batch | Piece]:
    """A group in batches of at most `num_experts`, all about as large, or in pieces of at most `piece_bytes`."""
    if isinstance(group, PlannedBlock):
        total = group.block.num_experts
        count = -(-total // num_experts)
        for number in range(count):
            yield Batch(group, range(number * total // count, (number + 1) * total // count))
    else:
        for ref in group.refs:
            for start in range(0, ref.num_bytes, piece_bytes):
                yield Piece(group, ref, start, min(piece_bytes, ref.num_bytes - start))
