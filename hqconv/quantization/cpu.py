"""Quantization on the CPU: compiled loops over the rows of a stack.

Legend: E experts, N output rows, K input columns, R rows of all experts, G groups along K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hqconv.cpu_loops.codes import group_ranges
from hqconv.cpu_loops.encoders import (
    GroupArrays,
    StepStart,
    StepTable,
    column_rounder,
    encoder,
    limit_bits_of,
    searcher,
)
from hqconv.jit import in_parts
from hqconv.quantization.coded_matrix import byte_values
from hqconv.quantization.group_scales import (
    FUSED_GROUP_SIZE,
    GivenScales,
    GroupScales,
    NearestScales,
    nearest_scales,
    saturation,
    stored_range,
    two_level_scales,
)
from hqconv.quantization.quantized import (
    GroupColumns,
    QuantizedStack,
    fold_sum,
    num_groups,
    per_row,
)
from hqconv.quantization.scale_search import MARGIN, Ladder, SearchResult, magnitude_bytes, search
from hqconv.schemas.options import RTN
from hqconv.schemas.weight_schema import WeightSchema

Array = np.ndarray[Any, np.dtype[Any]]
_LEAST_ROWS = 64  # of one helper thread's part of a loop


def quantize_stacks(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    given: Sequence[GivenScales] | None,
    count_exact: bool,
    quantizer: str = RTN,
) -> list[QuantizedStack]:
    """Quantize stacks on the CPU; see `hqconv.quantization.quantize.quantize_stacks`."""
    all_rows = [_Rows.of(stack, schema) for stack in stacks]
    scales = _nearest_scales(all_rows, param_dtype, given)
    if given is None and quantizer != RTN:
        meters = [_Meter(rows, nearest) for rows, nearest in zip(all_rows, scales, strict=True)]
        found = search(meters, schema, param_dtype)
        scales = [
            _chosen(nearest, result, schema) for nearest, result in zip(scales, found, strict=True)
        ]
    return [
        _encode(rows, nearest, param_dtype, count_exact)
        for rows, nearest in zip(all_rows, scales, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a stack [E, N, K] for compiled loops.

    bits: [R, K], bit patterns of bfloat16 (uint16), or of float32 (uint32), which is exact for every other dtype.
    """

    bits: Array
    shape: tuple[int, int, int]
    dtype: torch.dtype
    schema: WeightSchema

    @classmethod
    def of(cls, stack: torch.Tensor, schema: WeightSchema) -> _Rows:
        if stack.dtype == torch.bfloat16:
            bits = stack.contiguous().view(torch.uint16).numpy()
        else:
            bits = stack.float().contiguous().numpy().view(np.uint32)
        num_experts, num_rows, num_columns = stack.shape
        shape = (num_experts, num_rows, num_columns)
        return cls(bits.reshape(-1, num_columns), shape, stack.dtype, schema)

    @property
    def group_size(self) -> int:
        return self.schema.weight_scale_group_size or self.shape[2]

    @property
    def num_groups(self) -> int:
        return self.shape[2] // self.group_size

    def ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest and the smallest value of the weights of each scale, at least ±1e-30, float32 [E, R, G].

        Of a tensor's scale of every row.
        """
        highest, lowest = np.empty((2, len(self.bits), self.num_groups), np.float32)

        def run(rows: slice) -> None:
            group_ranges(self.bits[rows], self.group_size, highest[rows], lowest[rows])

        in_parts(run, len(self.bits), _LEAST_ROWS)
        block_rows = self.schema.weight_scale_group_size_n or 1
        blocks = (self.shape[0], -1, block_rows, self.num_groups)
        return (
            torch.from_numpy(highest.reshape(blocks).max(axis=2)),
            torch.from_numpy(lowest.reshape(blocks).min(axis=2)),
        )

    @property
    def is_fused(self) -> bool:
        """True if Humming's kernel fuses a product with a difference, see FUSED_GROUP_SIZE."""
        return self.dtype == torch.float32 and self.group_size <= FUSED_GROUP_SIZE


def _nearest_scales(
    all_rows: Sequence[_Rows], param_dtype: str, given: Sequence[GivenScales] | None
) -> list[NearestScales]:
    """Return the round-to-nearest scales of stacks; the matrices of one expert share the scale of their tensors."""
    schema = all_rows[0].schema
    ranges = [rows.ranges() for rows in all_rows]
    shared = None
    if schema.is_coupled:
        widest = [
            torch.maximum(highest, -lowest).amax((1, 2), keepdim=True) for highest, lowest in ranges
        ]
        shared = torch.stack(widest).amax(0)
    if schema.weight_scale_2_type != "none":
        return [
            two_level_scales(
                *ranges[number], schema, param_dtype, shared, given[number] if given else None
            )
            for number in range(len(ranges))
        ]
    if schema.weight_scale_type == "tensor":
        assert shared is not None
        return [nearest_scales(shared, -shared, schema, param_dtype)] * len(all_rows)
    return [
        nearest_scales(highest, lowest, schema, param_dtype, is_fused=rows.is_fused)
        for (highest, lowest), rows in zip(ranges, all_rows, strict=True)
    ]


def _chosen(nearest: NearestScales, found: SearchResult, schema: WeightSchema) -> NearestScales:
    """Return the stored scales of a search with how codes are got: as before for scales that did not change.

    Small floats saturate: under a smaller scale weights exceed the largest code.
    """
    lowest = found.scales.lowest()
    bound = nearest.lowest
    if lowest is not None and bound is not None:
        bound = torch.where(found.changed, lowest.double(), bound)
    inverse = torch.where(found.changed, found.scales.inverse(), nearest.inverse)
    return NearestScales(found.stored, inverse, bound, saturation(schema))


def _group_arrays(nearest: NearestScales, num_rows: int) -> GroupArrays:
    """Return the scales of all `num_rows` rows for compiled loops."""
    scales = nearest.scales
    scale = _per_row(scales.scale, num_rows)
    lowest = np.zeros(scale.shape)
    zero = np.zeros(scale.shape, np.float32)
    if scales.zero is not None and nearest.lowest is not None:
        lowest = _per_row(nearest.lowest, num_rows)
        zero = _per_row(scales.zero, num_rows)
    return GroupArrays(
        _per_row(nearest.inverse, num_rows), lowest, scale, zero, _second(scales, num_rows)
    )


def _second(scales: GroupScales, num_rows: int) -> Array:
    """Return the second scale of each row, 1 where there is none: float32 [R]."""
    if scales.second is None:
        return np.ones(num_rows, np.float32)
    return _per_row(scales.second, num_rows).reshape(-1)


def _per_row(values: torch.Tensor, num_rows: int) -> Array:
    """Repeat [E, R, G] so that each of `num_rows` rows of all experts has its own."""
    return per_row(values, num_rows).numpy()


def _encode(
    rows: _Rows, nearest: NearestScales, param_dtype: str, count_exact: bool
) -> QuantizedStack:
    """Encode all rows under given scales, in helper threads."""
    num_experts, num_rows, num_columns = rows.shape
    schema = rows.schema
    total = len(rows.bits)
    num_words = num_columns * schema.num_bits // 32
    groups = _group_arrays(nearest, total)
    packed = np.empty((total, num_words * 4), np.uint8)
    error, power = np.empty((2, total))
    exact = np.zeros(total if count_exact else 0, np.int64)
    encode = encoder(schema.code_type)
    limit = np.float32(nearest.limit)

    def run(part: slice) -> None:
        of_part = GroupArrays(*(array[part] for array in groups))
        out = packed[part], error[part], power[part], exact[part]
        encode(rows.bits[part], limit, of_part, *out)

    in_parts(run, total, _LEAST_ROWS)
    weight = torch.from_numpy(packed.view(np.int32)).view(num_experts, num_rows, num_words)
    return QuantizedStack(
        {**nearest.scales.tensors(schema, param_dtype), "weight": weight},
        fold_sum(torch.from_numpy(error).view(num_experts, num_rows)),
        fold_sum(torch.from_numpy(power).view(num_experts, num_rows)),
        torch.from_numpy(exact.reshape(num_experts, -1).sum(axis=1)),
        num_groups((num_rows, num_columns), schema) if count_exact else 0,
    )


def round_columns(
    group: GroupColumns,
    schema: WeightSchema,
    scale_range: tuple[int, float, float],
    *,
    is_first: bool,
) -> torch.Tensor:
    """Round the columns of a group on the CPU, see `GroupColumns`; return the change of their values, [E, S, N]."""
    present = group.value.clone()
    moved = group.inverse.mT @ group.pull
    target = present + moved
    wanted = group.factor.mT @ target
    margin = float("inf") if is_first else MARGIN
    bound = ((group.factor.mT @ moved).square().sum(1) + 1e-37) * margin
    loop = column_rounder(schema.code_type)
    limit_bits = limit_bits_of(saturation(schema))
    arrays: Any = GroupColumns(*(tensor.numpy() for tensor in group))  # type: ignore[arg-type]
    given = target.numpy(), wanted.numpy(), bound.numpy(), limit_bits, scale_range

    def run(rows: slice) -> None:
        loop(rows.start, rows.stop, arrays, *given)

    in_parts(run, group.loss.numel(), _LEAST_ROWS)
    return group.value - present


class _Meter:
    """`scale_search.ScaleMeter` of a stack on the CPU."""

    def __init__(self, rows: _Rows, nearest: NearestScales) -> None:
        self.scales = nearest.scales
        self._nearest = nearest
        self._rows = rows
        self._loops = searcher(rows.schema.code_type)
        self._limit = np.float32(saturation(rows.schema))
        self._shape = (*rows.shape[:2], rows.num_groups)

    def start_errors(self) -> torch.Tensor:
        return self._errors(self._nearest)

    def errors(self, scales: GroupScales, stored: GroupScales | None = None) -> torch.Tensor:
        return self._errors(replace(_own_codes(scales), scales=stored or scales))

    def _errors(self, given: NearestScales) -> torch.Tensor:
        [errors] = self._measured(self._loops.score, given, 1)
        return errors

    def fits(self, scales: GroupScales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        products, squares, powers = self._measured(self._loops.fit, _own_codes(scales), 3)
        return products, squares, powers

    def _measured(self, loop: Any, given: NearestScales, count: int) -> list[torch.Tensor]:
        """Run a loop over all rows; return its `count` results of each group, float64 [E, N, G] each."""
        bits = self._rows.bits
        total = len(self._rows.bits)
        groups = _group_arrays(given, total)
        out = np.empty((count, total, self._shape[2]))

        def run(rows: slice) -> None:
            of_part = GroupArrays(*(array[rows] for array in groups))
            loop(bits[rows], self._limit, of_part, *out[:, rows])

        in_parts(run, total, _LEAST_ROWS)
        return [torch.from_numpy(sums).view(self._shape) for sums in out]

    def sweep(
        self, start: GroupScales, least: torch.Tensor, ladder: Ladder, floor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bits = self._rows.bits
        total = len(self._rows.bits)
        table = _step_table(start, ladder)
        begin = _step_start(start, floor, total)
        error = _per_row(least, total).copy()
        steps = np.empty((total, self._shape[2]), np.int32)

        def run(rows: slice) -> None:
            of_part = StepStart(*(array[rows] for array in begin))
            self._loops.sweep(bits[rows], self._limit, of_part, table, error[rows], steps[rows])

        in_parts(run, total, _LEAST_ROWS)
        return torch.from_numpy(steps).view(self._shape), torch.from_numpy(error).view(self._shape)


def _own_codes(scales: GroupScales) -> NearestScales:
    """Return scales with the codes that they lead to themselves."""
    lowest = scales.lowest()
    return NearestScales(scales, scales.inverse(), None if lowest is None else lowest.double())


def _step_start(start: GroupScales, floor: torch.Tensor | None, num_rows: int) -> StepStart:
    scale = _per_row(start.scale, num_rows)
    byte = np.zeros(scale.shape, np.uint8)
    if start.stored.element_size() == 1:
        byte = _per_row(magnitude_bytes(start.stored).to(torch.uint8), num_rows)
    floors = np.zeros(num_rows, np.int64)
    if floor is not None:
        floors = _per_row(floor.long(), num_rows).reshape(-1)
    return StepStart(scale, byte, _second(start, num_rows), floors)


def _step_table(start: GroupScales, ladder: Ladder) -> StepTable:
    dtype = start.stored.dtype
    return StepTable(
        ladder.first,
        np.float32(ladder.limit),
        np.array(ladder.up, np.float32),
        np.array(ladder.down, np.float32),
        byte_values(dtype).numpy() if ladder.has_bytes else np.empty(0, np.float32),
        ladder.top,
        ladder.no_half,
        stored_range(dtype),
    )
