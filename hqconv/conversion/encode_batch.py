"""Encode a batch of experts, map the result to byte ranges of the output files, and sum its measurements by unit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from hqconv.artifact.error_summary import FEW_TOKENS
from hqconv.calibration.inputs import ExpertActivations, LinearInputs
from hqconv.conversion.encode import EncodedBatch, LayerEncoder
from hqconv.kernel_layout.transform import gemm_tensors, to_kernel
from hqconv.models.moe_layer import MoeLayer, RawExperts, RawLayout
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import CopiedShardPlan, MoeLayerPlan, OutputUnit, layers_of
from hqconv.quantization.quantize import ErrorSums
from hqconv.schemas.grid import TpSlice
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
        return sum(
            ref.num_bytes for expert in self.experts for ref in self.planned.layer.refs(expert)
        )


Span = tuple[TensorRef, int, int]  # of a tensor: the start in it, and the number of bytes


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes of tensors that are copied unchanged."""

    planned: CopiedShardPlan
    spans: tuple[Span, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all spans."""
        return sum(size for _, _, size in self.spans)

    def parts(self, num_bytes: int) -> list[tuple[int, Piece]]:
        """Return parts of at most `num_bytes`, to be read side by side, each with its first byte in this piece."""
        if self.num_bytes <= num_bytes:
            return [(0, self)]
        pieces = [Piece(self.planned, spans) for spans in _spans(self.spans, num_bytes)]
        ends = itertools.accumulate(piece.num_bytes for piece in pieces)
        return [(end - piece.num_bytes, piece) for end, piece in zip(ends, pieces, strict=True)]


@dataclass(frozen=True, eq=False)
class Run:
    """Bytes to write at one offset of one of the unit's files: flat, uint8."""

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
            data = run.data if run.num_bytes <= num_bytes else run.data[start : start + num_bytes]
            if filled >= num_bytes:
                chunks.append([])
                filled = 0
            chunks[-1].append(Run(run.file, run.offset_bytes + start, len(data), data))
            filled += len(data)
    return chunks


def is_calibrated(planned: MoeLayerPlan) -> bool:
    """Return whether a layer's codes are chosen by the inputs of a calibration."""
    return planned.encoding.quantizer == GPTQ and not planned.encoding.is_direct


def num_batches(planned: MoeLayerPlan, num_experts: int) -> int:
    """Return the number of equal batches of at most `num_experts` into which a layer is split."""
    return -(-planned.layer.num_experts // num_experts)


def split_unit(unit: OutputUnit, num_experts: int, piece_bytes: int) -> Iterator[Batch | Piece]:
    """Split a unit into equal batches of at most `num_experts`, or into pieces of at most `piece_bytes`."""
    for layer in layers_of(unit):
        total = layer.layer.num_experts
        count = num_batches(layer, num_experts)
        for number in range(count):
            yield Batch(layer, range(number * total // count, (number + 1) * total // count))
    if isinstance(unit, CopiedShardPlan):
        for spans in _spans(((ref, 0, ref.num_bytes) for ref in unit.refs), piece_bytes):
            yield Piece(unit, spans)


def _spans(whole: Iterable[Span], piece_bytes: int) -> Iterator[tuple[Span, ...]]:
    """Yield the bytes of all spans in order, `piece_bytes` at a time."""
    spans: list[Span] = []
    room = piece_bytes
    for ref, begin, num_bytes in whole:
        start = begin
        end = begin + num_bytes
        while start < end:
            size = min(room, end - start)
            spans.append((ref, start, size))
            start = start + size
            room = room - size
            if not room:
                yield tuple(spans)
                spans = []
                room = piece_bytes
    if spans:
        yield tuple(spans)


class Lane:
    """One sequence of work on a device, in order. On a GPU a stream: one lane's copies run beside another's kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def used(self) -> AbstractContextManager[Any]:
        """Run the work inside on the lane."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def to_host(
        self, tensors: Sequence[torch.Tensor], out: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Copy tensors to flat uint8 tensors on the host, on a GPU to views of `out`; valid after `arrive`."""
        flat = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
        if self._stream is None:
            return flat
        assert out is not None
        host = list(torch.split(out[: sum(map(len, flat))], [len(one) for one in flat]))
        for there, here in zip(flat, host, strict=True):
            here.copy_(there, non_blocking=True)
        return host

    def arrive(self) -> Callable[[], None] | None:
        """Return a function that waits for all work begun so far; None where nothing is pending."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize


@dataclass(frozen=True, eq=False)
class EncodedRuns:
    """An encoded batch: bytes to write, valid once `wait` has returned if there is one, and measurements.

    error_sums: waits, and returns the error sums of each matrix by role; raises DeferredCheckError where the batch must
    be encoded again.
    """

    runs: list[Run]
    wait: Callable[[], None] | None
    error_sums: Callable[[], Mapping[str, Any]]


def encode_to_runs(
    source: Source,
    batch: Batch,
    raw: RawExperts | None,
    lane: Lane,
    out: torch.Tensor | None,
    *,
    is_careful: bool = False,
    inputs_of: Callable[[MoeLayer], ExpertActivations | LinearInputs | None] | None = None,
) -> EncodedRuns:
    """Encode a batch and lay out its tensors; on a GPU, start that work without waiting for it.

    raw: the experts' bytes, unless the source reads for itself. The runs may be views of `out`, which is free once they
    are written. inputs_of: gives a calibration's inputs of a layer, None for one that is rounded.
    """
    planned = batch.planned
    inputs = None
    if inputs_of is not None and is_calibrated(planned):
        inputs = inputs_of(planned.layer)
    encoder = LayerEncoder(source, planned.layer, planned.encoding, lane.device, inputs)
    done = encoder.encode(batch.experts, raw, is_careful=is_careful)
    # by TP rank and name, or in the checkpoint layout by role
    written: dict[tuple[int | str, str], torch.Tensor] = {}
    if planned.forms:
        for part in planned.slices:
            written |= {
                (part.rank, name): value
                for name, value in _kernel_tensors(batch, done, part).items()
            }
    else:
        written = {
            (role, name): value
            for role, tensors in done.tensors.items()
            for name, value in tensors.items()
        }
    done = replace(done, tensors={})  # on a GPU their memory is used again for the copies
    host = iter(lane.to_host([*done.measured, *written.values()], out))
    measured = [next(host).view(torch.float64).view(one.shape) for one in done.measured]
    runs = list(_runs(batch, dict(zip(written, host, strict=True))))
    wait = lane.arrive()

    def error_sums() -> dict[str, list[ErrorSums]]:
        if wait is not None:
            wait()
        return done.error_sums(measured)

    return EncodedRuns(runs, wait, error_sums)


def _kernel_tensors(batch: Batch, done: EncodedBatch, part: TpSlice) -> dict[str, torch.Tensor]:
    """Return the kernel tensors of one TP rank."""
    planned = batch.planned
    packed = gemm_tensors(done.tensors, planned.encoding.schema, part)
    return {
        f"{gemm}_{name}": value
        for gemm, form in planned.forms.items()
        for name, value in to_kernel(form, packed[gemm]).items()
    }


def _runs(batch: Batch, written: Mapping[tuple[int | str, str], torch.Tensor]) -> Iterator[Run]:
    """Yield the runs of the tensors to write, which are on the host as flat bytes."""
    stacks = {name: value.view(len(batch.experts), -1) for name, value in written.items()}
    if not batch.planned.forms:
        for index, expert in enumerate(batch.experts):
            for (role, name), value in stacks.items():
                place = batch.planned.packed_place(expert, str(role), name)
                yield _run(place, value[index])
        return
    neighbours = batch.planned.neighbours(batch.experts)
    for part in batch.planned.slices:
        tensors = {name: value for (rank, name), value in stacks.items() if rank == part.rank}
        for ep_rank, runs in neighbours.items():
            places = batch.planned.rank_tensors(part.rank, ep_rank)
            assert places.keys() == tensors.keys(), (
                batch.planned.name,
                sorted(places),
                sorted(tensors),
            )
            for indices, local in runs:
                for begin, end in _adjacent(indices):
                    for name, value in tensors.items():
                        place = places[name].entry(local + begin)
                        experts = value[indices[begin] : indices[begin] + end - begin]
                        yield _run(
                            place._replace(num_bytes=place.num_bytes * len(experts)), experts
                        )


def _run(place: TensorRef, data: torch.Tensor) -> Run:
    assert data.numel() == place.num_bytes, (place, data.shape)
    return Run(place.file, place.offset_bytes, place.num_bytes, data.reshape(-1))


def _adjacent(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each part of the list whose numbers follow each other."""
    begin = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield begin, end
            begin = end


# --- what a unit lost, over all its batches


def projection_errors(
    error_sums: Sequence[Mapping[str, ErrorSums]], *, is_coded: bool
) -> dict[str, Any]:
    """Return the relative Frobenius error of each projection over all experts, and of the worst expert.

    Where the source `is_coded`, also the number of requantized experts, and of their scale groups without any error;
    where scales were rounded, the largest relative change; of a calibration the error of
    outputs; of w2 also the experts that a calibration hardly reached.
    `math.fsum` is exact: the order of experts does not matter.
    """
    errors: dict[str, Any] = {}
    for role in error_sums[0]:
        of_role = [of_expert[role] for of_expert in error_sums]
        each = [relative_error(sums.error, sums.power) for sums in of_role]
        worst = max(range(len(each)), key=each.__getitem__)
        errors[role] = {
            "relative_error": relative_error(
                math.fsum(sums.error for sums in of_role), math.fsum(sums.power for sums in of_role)
            ),
            "worst_expert": worst,
            "worst_relative_error": each[worst],
        }
        errors[role] |= (requantized_counts(of_role) if is_coded else {}) | scale_changes(of_role)
        errors[role] |= _calibration_counts(of_role)
        outputs = [sums for sums in of_role if sums.output_error and sums.output_power]
        if outputs:
            error = math.fsum(sums.output_error or 0.0 for sums in outputs)
            power = math.fsum(sums.output_power or 0.0 for sums in outputs)
            # the last digits depend on how experts are batched
            errors[role]["relative_output_error"] = float(f"{relative_error(error, power):.5g}")
    return errors


class Measurements:
    """Error sums of a unit, added batch by batch in any order."""

    def __init__(self) -> None:
        self._error_sums: dict[tuple[str, int], dict[str, ErrorSums]] = {}

    def add(self, batch: Batch, error_sums: Mapping[str, Sequence[ErrorSums]]) -> None:
        """Add a batch: error sums of each expert by role."""
        for index, expert in enumerate(batch.experts):
            self._error_sums[batch.planned.name, expert] = {
                role: of_role[index] for role, of_role in error_sums.items()
            }

    def errors(self, unit: OutputUnit) -> dict[str, Any]:
        """Return the quantization error of each projection, of each linear group by name; {} for copied tensors."""
        found = {}
        for plan in layers_of(unit):
            experts = range(plan.layer.num_experts)
            each = [self._error_sums[plan.name, expert] for expert in experts]
            found[plan.name] = projection_errors(each, is_coded=plan.encoding.is_coded)
        return found.get(unit.name, found)


def requantized_counts(error_sums: Sequence[ErrorSums]) -> dict[str, int]:
    """Count a projection's requantized experts, their scale groups, and the groups without any error."""
    requantized = [sums for sums in error_sums if not sums.is_direct]
    return {
        "num_experts_requantized": len(requantized),
        "num_groups": sum(sums.num_groups for sums in requantized),
        "num_exact_groups": sum(sums.num_exact for sums in requantized),
    }


def _calibration_counts(error_sums: Sequence[ErrorSums]) -> dict[str, int]:
    """Count experts that no token of a calibration chose, and those that fewer than FEW_TOKENS did."""
    counts = [sums.num_tokens for sums in error_sums if sums.num_tokens is not None]
    if not counts:
        return {}
    return {
        "num_experts_without_tokens": counts.count(0),
        "num_experts_with_few_tokens": sum(0 < count < FEW_TOKENS for count in counts),
    }


def scale_changes(error_sums: Sequence[ErrorSums]) -> dict[str, float]:
    """Return the largest relative change of a projection's scales, where scales were rounded."""
    changes = [sums.scale_change for sums in error_sums if sums.scale_change is not None]
    return {"largest_scale_change": max(changes)} if changes else {}


def relative_error(error: float, power: float) -> float:
    """Return the relative error of two sums of squares; 0 for a matrix of zeros."""
    return math.sqrt(error / power) if power else 0.0
