"""Encode a batch of experts, and map the result to byte ranges of the output files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from hqconv.conversion.devices import Lane, Slot
from hqconv.conversion.encode import EncodedBatch, encode_batch
from hqconv.humming_layout.rank_slices import gemm_tensors
from hqconv.humming_layout.transform import to_kernel
from hqconv.humming_layout.weight_tiles import WeightTiles, weight_tiles
from hqconv.models.expert_bytes import RawExperts, RawLayout
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import CopiedShardPlan, MoeLayerPlan, OutputUnit
from hqconv.quantization.content_sums import expert_sums, sum_names
from hqconv.quantization.quantize import ErrorSums
from hqconv.schemas.options import GPTQ
from hqconv.schemas.tensors import TensorRef


@dataclass(frozen=True, eq=False)
class Batch:
    """Experts of one MoE layer that are read, encoded and written together."""

    planned: MoeLayerPlan
    experts: range

    @cached_property
    def layout(self) -> RawLayout:
        """The positions of their bytes in a slot."""
        return RawLayout(self.planned.layer, self.experts)

    @cached_property
    def num_bytes(self) -> int:
        """Source bytes of the experts."""
        return sum(ref.num_bytes for expert in self.experts for ref in self.planned.layer.refs(expert))


class CopiedRange(NamedTuple):
    """A byte range of the source that is copied: the first tensor, the start in it, and its place in the output."""

    ref: TensorRef
    start: int
    place: TensorRef
    num_bytes: int

    @property
    def part(self) -> TensorRef:
        """A tensor that consists of these bytes."""
        return self.ref._replace(offset_bytes=self.ref.offset_bytes + self.start, num_bytes=self.num_bytes)

    def run(self, data: torch.Tensor) -> Run:
        """Return the run that writes these bytes."""
        return Run(self.place.file, self.place.offset_bytes + self.start, self.num_bytes, data)


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes of tensors that are copied unchanged: spans of (tensor, start in the tensor, number of bytes)."""

    planned: CopiedShardPlan
    spans: tuple[tuple[TensorRef, int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all spans."""
        return sum(size for _, _, size in self.spans)

    def ranges(self) -> Iterator[CopiedRange]:
        """Yield the spans in order, joined where they are adjacent in the source and in the output file."""
        tensors = self.planned.files[0].tensors
        first: tuple[TensorRef, int, TensorRef] | None = None
        begin, size = (-1, -1, -1), 0
        for ref, start, span_bytes in self.spans:
            place = tensors[ref.name]
            position = (ref.file, ref.offset_bytes + start, place.offset_bytes + start)
            if first is None or position != (begin[0], begin[1] + size, begin[2] + size):
                if first is not None:
                    yield CopiedRange(*first, size)
                first, begin, size = (ref, start, place), position, 0
            size += span_bytes
        if first is not None:
            yield CopiedRange(*first, size)


@dataclass(frozen=True, eq=False)
class Run:
    """Bytes to write at one offset of one of the unit's files."""

    file: int
    offset_bytes: int
    num_bytes: int
    data: torch.Tensor


def split_runs(runs: Iterable[Run], num_bytes: int) -> list[list[Run]]:
    """Split runs into lists of about `num_bytes`, to be written side by side; long runs are cut."""
    chunks: list[list[Run]] = []
    filled = num_bytes
    for run in runs:
        for start in range(0, run.num_bytes, num_bytes):
            data = run.data.view(torch.uint8).view(-1)[start : start + num_bytes]
            if filled >= num_bytes:
                chunks.append([])
                filled = 0
            chunks[-1].append(Run(run.file, run.offset_bytes + start, len(data), data))
            filled += len(data)
    return chunks


def split_unit(unit: OutputUnit, num_experts: int, piece_bytes: int) -> Iterator[Batch | Piece]:
    """Split a unit into equal batches of at most `num_experts`, or into pieces of at most `piece_bytes`."""
    if isinstance(unit, MoeLayerPlan):
        total = unit.layer.num_experts
        count = -(-total // num_experts)
        for number in range(count):
            yield Batch(unit, range(number * total // count, (number + 1) * total // count))
    else:
        for spans in _spans(unit.refs, piece_bytes):
            yield Piece(unit, spans)


def _spans(refs: Iterable[TensorRef], piece_bytes: int) -> Iterator[tuple[tuple[TensorRef, int, int], ...]]:
    """Yield the bytes of all tensors in order, `piece_bytes` at a time."""
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


@dataclass(frozen=True, eq=False)
class EncodedRuns:
    """An encoded batch. Its `runs` are valid once `wait` has returned, where it is not None."""

    runs: list[Run]
    wait: Callable[[], None] | None
    _encoded: EncodedBatch
    _measured: list[torch.Tensor]
    _sums: torch.Tensor

    def error_sums(self) -> dict[str, list[ErrorSums]]:
        """Return the error sums of each matrix by role, after `wait`; see `EncodedBatch`."""
        if self.wait is not None:
            self.wait()
        return self._encoded.error_sums(self._measured)

    def sums(self) -> dict[tuple[str, str], list[int]]:
        """Return each expert's content sums by role and tensor, after `error_sums`; see `schemas/sum_factors`."""
        names = sum_names(self._encoded.tensors)
        return dict(zip(names, self._sums.tolist(), strict=True))


def encode_to_runs(
    source: Source, batch: Batch, raw: RawExperts | None, lane: Lane, slot: Slot, *, is_careful: bool = False
) -> EncodedRuns:
    """Encode a batch and lay out its tensors; on a GPU, start that work without waiting for it.

    The runs may be views of `slot`, which is free once they are written.
    """
    planned, layer = batch.planned, batch.planned.layer
    raw = None if raw is None else lane.to_device(raw, slot)
    tiles = _weight_tiles(batch, lane.device)
    done = encode_batch(
        source, layer, batch.experts, raw, planned.encoding, lane.device, is_careful=is_careful, tiles=tiles
    )
    del raw  # on a GPU the memory is used again for the kernel layout
    weights = tiles.weights if tiles is not None and done.row_sums else {}
    runs = list(_kernel_runs(batch, done, weights) if planned.forms else _packed_runs(batch, done))
    sums = expert_sums(done.tensors, planned.encoding.schema, done.row_sums)
    host = lane.to_host([sums, *done.measured, *(run.data for run in runs)], slot)
    sums_bits, measured, data = host[0], host[1 : len(done.measured) + 1], host[len(done.measured) + 1 :]
    for run, one in zip(runs, data, strict=True):
        assert one.numel() == run.num_bytes, (planned.name, run.file, run.offset_bytes, run.num_bytes)
    return EncodedRuns(
        [replace(run, data=one) for run, one in zip(runs, data, strict=True)],
        lane.arrive(),
        done,
        [bits.view(torch.float64).view(one.shape) for bits, one in zip(measured, done.measured, strict=True)],
        sums_bits.view(torch.int64).view(sums.shape),
    )


def _weight_tiles(batch: Batch, device: torch.device) -> WeightTiles | None:
    """Allocate the kernel weights that the CPU's encoder can write at once; None where it gives packed codes."""
    planned = batch.planned
    if not planned.forms or device.type != "cpu" or planned.encoding.quantizer == GPTQ:
        return None
    return weight_tiles(planned.forms, planned.slices, planned.encoding.shapes, len(batch.experts))


def _kernel_runs(batch: Batch, done: EncodedBatch, weights: Mapping[tuple[str, int], torch.Tensor]) -> Iterator[Run]:
    """Yield the runs of the kernel layout: one for each tensor and rank file, more where experts are scattered.

    weights: by GEMM and TP rank, the kernel weights that the encoder wrote.
    """
    planned = batch.planned
    neighbours = planned.neighbours(batch.experts)
    for part in planned.slices:
        packed = gemm_tensors(done.tensors, planned.encoding.schema, part)
        tensors = {
            f"{gemm}_{name}": value
            for gemm, form in planned.forms.items()
            for name, value in to_kernel(form, packed[gemm]).items()
        }
        tensors |= {f"{gemm}_weight": value for (gemm, rank), value in weights.items() if rank == part.rank}
        for ep_rank, runs in neighbours.items():
            places = planned.rank_tensors(part.rank, ep_rank)
            assert places.keys() == tensors.keys(), (planned.name, sorted(places), sorted(tensors))
            for indices, local in runs:
                for name, value in tensors.items():
                    first = places[name].entry(local)
                    num_bytes = first.num_bytes * len(indices)
                    yield Run(first.file, first.offset_bytes, num_bytes, _select_experts(value, indices))


def _select_experts(stack: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return some experts of a stack, without a copy where they are adjacent in the stack."""
    if indices == list(range(indices[0], indices[-1] + 1)):
        return stack[indices[0] : indices[-1] + 1]
    bits = stack.view(torch.uint8) if stack.element_size() == 1 else stack
    return bits[indices].view(stack.dtype)


def _packed_runs(batch: Batch, done: EncodedBatch) -> Iterator[Run]:
    """Yield the runs of the checkpoint layout, where each expert's tensors have their own names."""
    for index, expert in enumerate(batch.experts):
        for role, tensors in done.tensors.items():
            for name, value in tensors.items():
                place = batch.planned.packed_place(expert, role, name)
                yield Run(place.file, place.offset_bytes, place.num_bytes, value[index : index + 1])
