"""What the stages of a conversion hand on to each other: some experts of a block, or a piece of a tensor to copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from hqconv.models.expert_bytes import RawLayout
from hqconv.planning.output_units import CopiedShardPlan, MoeLayerPlan, OutputUnit
from hqconv.schemas.tensors import TensorRef


@dataclass(frozen=True, eq=False)
class Batch:
    """Experts of one block that are read, encoded and written together."""

    planned: MoeLayerPlan
    experts: range

    @cached_property
    def layout(self) -> RawLayout:
        """Where their bytes go in a slot."""
        return RawLayout(self.planned.block, self.experts)

    @cached_property
    def num_bytes(self) -> int:
        """Source bytes of the experts."""
        return sum(ref.num_bytes for expert in self.experts for ref in self.planned.block.refs(expert))


class Stretch(NamedTuple):
    """Adjoining bytes of one tensor, or of several that follow it: the first one, where they start in it, its place."""

    ref: TensorRef
    start: int
    place: TensorRef
    num_bytes: int

    @property
    def part(self) -> TensorRef:
        """A tensor that is these bytes."""
        return self.ref._replace(offset_bytes=self.ref.offset_bytes + self.start, num_bytes=self.num_bytes)

    def run(self, data: torch.Tensor) -> Run:
        """These bytes, to be written."""
        return Run(self.place.file, self.place.offset_bytes + self.start, self.num_bytes, data)


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes of tensors that are copied as they are: for each tensor where they start in it, and how many they are."""

    planned: CopiedShardPlan
    spans: tuple[tuple[TensorRef, int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all spans."""
        return sum(size for _, _, size in self.spans)

    def stretches(self) -> Iterator[Stretch]:
        """The spans, in their order; those that adjoin in the source and in the group's file are one."""
        tensors = self.planned.files[0].tensors
        first: tuple[TensorRef, int, TensorRef] | None = None
        where, size = (-1, -1, -1), 0
        for ref, start, more in self.spans:
            place = tensors[ref.name]
            found = (ref.file, ref.offset_bytes + start, place.offset_bytes + start)
            if first is None or found != (where[0], where[1] + size, where[2] + size):
                if first is not None:
                    yield Stretch(*first, size)
                first, where, size = (ref, start, place), found, 0
            size += more
        if first is not None:
            yield Stretch(*first, size)


@dataclass(frozen=True, eq=False)
class Run:
    """So many bytes to write into one of a group's files."""

    file: int
    offset_bytes: int
    num_bytes: int
    data: torch.Tensor


def shares(runs: Iterable[Run], num_bytes: int) -> list[list[Run]]:
    """Runs dealt into shares of about `num_bytes`, to be written side by side; long ones are cut."""
    dealt: list[list[Run]] = []
    filled = num_bytes
    for run in runs:
        for start in range(0, run.num_bytes, num_bytes):
            data = run.data.view(torch.uint8).view(-1)[start : start + num_bytes]
            if filled >= num_bytes:
                dealt.append([])
                filled = 0
            dealt[-1].append(Run(run.file, run.offset_bytes + start, len(data), data))
            filled += len(data)
    return dealt


def cut(unit: OutputUnit, num_experts: int, piece_bytes: int) -> Iterator[Batch | Piece]:
    """A group in batches of at most `num_experts`, all about as large, or in pieces of at most `piece_bytes`."""
    if isinstance(unit, MoeLayerPlan):
        total = unit.block.num_experts
        count = -(-total // num_experts)
        for number in range(count):
            yield Batch(unit, range(number * total // count, (number + 1) * total // count))
    else:
        for spans in _spans(unit.refs, piece_bytes):
            yield Piece(unit, spans)


def _spans(refs: Iterable[TensorRef], piece_bytes: int) -> Iterator[tuple[tuple[TensorRef, int, int], ...]]:
    """The bytes of all tensors in order, so many at a time."""
    spans: list[tuple[TensorRef, int, int]] = []
    room = piece_bytes
    for ref in refs:
        start = 0
        while start < ref.num_bytes:
            size = min(room, ref.num_bytes - start)
            spans.append((ref, start, size))
            start, room = start + size, room - size
            if not room:
                yield tuple(spans)
                spans, room = [], piece_bytes
    if spans:
        yield tuple(spans)
