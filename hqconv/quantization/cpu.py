"""Quantization on the CPU: compiled loops over the rows of a stack.

Legend: E experts, N output rows, K input columns, R rows of all experts, G groups along K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hqconv.cpu_loops import arithmetic
from hqconv.cpu_loops.encoders import encoder, panel_encoder
from hqconv.cpu_loops.helper_threads import in_parts
from hqconv.cpu_loops.scale_loops import (
    TO_BFLOAT16,
    TO_FLOAT16,
    TO_FLOAT32,
    StepStart,
    StepTable,
    searcher,
)
from hqconv.quantization.coded_matrix import byte_values
from hqconv.quantization.group_scales import (
    FUSED_GROUP_SIZE,
    GivenScales,
    GroupScales,
    NearestScales,
    nearest_scales,
    two_level_scales,
)
from hqconv.quantization.quantized import CodeSink, QuantizedStack, num_groups
from hqconv.quantization.scale_search import Ladder, SearchResult, magnitude_bytes, search
from hqconv.schemas.dtypes import CodeKind
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
    sinks: Sequence[CodeSink] | None = None,
) -> list[QuantizedStack]:
    """Quantize stacks on the CPU; see `hqconv.quantization.quantize.quantize_stacks`."""
    encoders = [
        _Encoder(_Rows.of(stack), schema, count_exact, None if sinks is None else sinks[number])
        for number, stack in enumerate(stacks)
    ]
    rows = [one.rows for one in encoders]
    scales = _nearest_scales(rows, schema, param_dtype, given)
    if given is not None or quantizer == RTN:
        return [
            one.encode(nearest, param_dtype) for one, nearest in zip(encoders, scales, strict=True)
        ]
    meters = [_Meter(one, nearest, schema) for one, nearest in zip(rows, scales, strict=True)]
    found = search(meters, schema, param_dtype)
    best = [_chosen(nearest, one, schema) for nearest, one in zip(scales, found, strict=True)]
    return [one.encode(chosen, param_dtype) for one, chosen in zip(encoders, best, strict=True)]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a stack [E, N, K] for compiled loops.

    bits: [R, K], bit patterns of bfloat16 (uint16), or of float32 (uint32), which is exact for every other dtype.
    """

    bits: Array
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, stack: torch.Tensor) -> _Rows:
        if stack.dtype == torch.bfloat16:
            bits = stack.contiguous().view(torch.uint16).numpy()
        else:
            bits = stack.float().contiguous().numpy().view(np.uint32)
        num_experts, num_rows, num_columns = stack.shape
        return cls(bits.reshape(-1, num_columns), (num_experts, num_rows, num_columns), stack.dtype)

    def ranges(self, schema: WeightSchema) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest and the smallest value of the weights of each scale, at least ±1e-30, float32 [E, R, G].

        Of a tensor's scale of every row.
        """
        total, num_columns = self.bits.shape
        group = schema.weight_scale_group_size or num_columns
        highest, lowest = np.empty((2, total, num_columns // group), np.float32)
        in_parts(
            lambda rows: arithmetic.group_ranges(
                self.bits[rows], group, highest[rows], lowest[rows]
            ),
            total,
            _LEAST_ROWS,
        )
        blocks = (self.shape[0], -1, schema.weight_scale_group_size_n or 1, num_columns // group)
        return (
            torch.from_numpy(highest.reshape(blocks).max(axis=2)),
            torch.from_numpy(lowest.reshape(blocks).min(axis=2)),
        )

    def is_fused(self, schema: WeightSchema) -> bool:
        """Return whether Humming's kernel fuses a product with a difference, see FUSED_GROUP_SIZE."""
        group = schema.weight_scale_group_size or self.bits.shape[1]
        return self.dtype == torch.float32 and group <= FUSED_GROUP_SIZE


def _nearest_scales(
    rows: Sequence[_Rows],
    schema: WeightSchema,
    param_dtype: str,
    given: Sequence[GivenScales] | None,
) -> list[NearestScales]:
    """Return the round-to-nearest scales of stacks; the matrices of one expert share the scale of their tensors."""
    ranges = [one.ranges(schema) for one in rows]
    shared = None
    if schema.is_coupled:
        widest = [
            torch.maximum(highest, -lowest).amax((1, 2), keepdim=True) for highest, lowest in ranges
        ]
        shared = torch.stack(widest).amax(0)
    each: Sequence[GivenScales | None] = given or [None] * len(rows)
    if schema.weight_scale_2_type != "none":
        pairs = zip(ranges, each, strict=True)
        return [
            two_level_scales(*of_stack, schema, param_dtype, shared, one) for of_stack, one in pairs
        ]
    if schema.weight_scale_type == "tensor":
        assert shared is not None
        return [nearest_scales(shared, -shared, schema, param_dtype)] * len(rows)
    return [
        nearest_scales(*of_stack, schema, param_dtype, is_fused=one.is_fused(schema))
        for of_stack, one in zip(ranges, rows, strict=True)
    ]


def _chosen(nearest: NearestScales, found: SearchResult, schema: WeightSchema) -> NearestScales:
    """Return the stored scales of a search with how codes are got: as before for scales that did not change.

    Small floats saturate: under a smaller scale weights exceed the largest code.
    """
    lowest, bound = found.scales.lowest(), nearest.lowest
    if lowest is not None and bound is not None:
        bound = torch.where(found.changed, lowest.double(), bound)
    inverse = torch.where(found.changed, found.scales.inverse(), nearest.inverse)
    return NearestScales(found.stored, inverse, bound, _saturation(schema))


def _saturation(schema: WeightSchema) -> float:
    """Return the magnitude at which small floats saturate; 0 for integers, which do by themselves."""
    return schema.code_type.largest if schema.code_type.kind == CodeKind.FLOAT else 0.0


def _loop_groups(given: NearestScales, num_rows: int) -> tuple[Array, ...]:
    """Return (inverse, lowest, scale, zero, scale_2) as `encoders.encoder` takes them, for all `num_rows` rows.

    Without zero points, the lowest values and zeros have one row only.
    """
    scales = given.scales
    inverse, scale = (_per_row(one, num_rows) for one in (given.inverse, scales.scale))
    second = (
        np.ones(num_rows, np.float32)
        if scales.second is None
        else _per_row(scales.second, num_rows).reshape(-1)
    )
    if scales.zero is not None and given.lowest is not None:
        return (
            inverse,
            _per_row(given.lowest, num_rows),
            scale,
            _per_row(scales.zero, num_rows),
            second,
        )
    return inverse, np.zeros((1, 1)), scale, np.zeros((1, 1), np.float32), second


def _per_row(values: torch.Tensor, num_rows: int) -> Array:
    """Repeat [E, R, G] so that each of `num_rows` rows of all experts has its own."""
    flat = values.reshape(-1, values.size(-1))
    rows: Array = (
        flat.repeat_interleave(num_rows // len(flat), 0).numpy()
        if len(flat) < num_rows
        else flat.numpy()
    )
    return np.ascontiguousarray(rows)


def _of_rows(arrays: Sequence[Array], rows: slice, total: int) -> tuple[Array, ...]:
    """Return some rows of arrays with `total` rows; others hold for every row."""
    return tuple(one[rows] if len(one) == total else one for one in arrays)


@dataclass(frozen=True, eq=False)
class _Encoder:
    """Encoder of a stack: gives packed codes, or fills a sink."""

    rows: _Rows
    schema: WeightSchema
    count_exact: bool
    sink: CodeSink | None

    def encode(self, given: NearestScales, param_dtype: str) -> QuantizedStack:
        """Encode all rows under given scales."""
        tensors, groups = (
            given.scales.tensors(self.schema, param_dtype),
            _loop_groups(given, len(self.rows.bits)),
        )
        num_experts, num_rows, num_columns = self.rows.shape
        total, num_words = len(self.rows.bits), num_columns * self.schema.num_bits // 32
        shape = (num_experts, num_rows, num_words)
        sums, exact = np.empty((2, total)), np.zeros(total if self.count_exact else 0, np.int64)
        if self.sink is None:
            packed = np.empty((total, num_words * 4), np.uint8)
            self._pack(given.limit, groups, (packed, *sums, exact))
            weight = torch.from_numpy(packed.view(np.int32)).view(shape)
        else:
            self._fill(self.sink, given.limit, groups, (*sums, exact))
            weight = torch.empty(shape, dtype=torch.int32, device="meta")
        error, power = arithmetic.fold_rows(sums.reshape(2 * num_experts, -1)).reshape(
            2, num_experts
        )
        return QuantizedStack(
            {**tensors, "weight": weight},
            torch.from_numpy(error),
            torch.from_numpy(power),
            torch.from_numpy(exact.reshape(num_experts, -1).sum(axis=1)),
            num_groups((num_rows, num_columns), self.schema) if self.count_exact else 0,
        )

    def _pack(self, limit: float, groups: tuple[Array, ...], out: tuple[Array, ...]) -> None:
        """Encode to packed codes, in helper threads."""
        bits, total, encode = self.rows.bits, len(self.rows.bits), encoder(self.schema.code_type)

        def run(rows: slice) -> None:
            encode(
                bits[rows],
                np.float32(limit),
                _of_rows(groups, rows, total),
                _of_rows(out, rows, total),
            )

        in_parts(run, total, _LEAST_ROWS)

    def _fill(
        self, sink: CodeSink, limit: float, groups: tuple[Array, ...], out: tuple[Array, ...]
    ) -> None:
        """Encode into a sink, in helper threads."""
        bits, total, num_rows = self.rows.bits, len(self.rows.bits), self.rows.shape[1]
        encode = panel_encoder(self.schema.code_type, sink.store, sink.panel_rows)

        def run(panels: slice) -> None:
            rows = slice(panels.start * sink.panel_rows, panels.stop * sink.panel_rows)
            parts = _of_rows(groups, rows, total), _of_rows(out, rows, total)
            encode(bits[rows], np.float32(limit), *parts, rows.start, num_rows, sink.arrays)

        in_parts(run, total // sink.panel_rows)


class _Meter:
    """`scale_search.ScaleMeter` of a stack on the CPU."""

    def __init__(self, rows: _Rows, nearest: NearestScales, schema: WeightSchema) -> None:
        num_experts, num_rows, num_columns = rows.shape
        self.scales, self._nearest, self._rows = nearest.scales, nearest, rows
        self._loops, self._limit = searcher(schema.code_type), np.float32(_saturation(schema))
        self._shape = (
            num_experts,
            num_rows,
            num_columns // (schema.weight_scale_group_size or num_columns),
        )

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
        bits, total = self._rows.bits, len(self._rows.bits)
        groups, out = _loop_groups(given, total), np.empty((count, total, self._shape[2]))

        def run(rows: slice) -> None:
            loop(bits[rows], self._limit, _of_rows(groups, rows, total), *out[:, rows])

        in_parts(run, total, _LEAST_ROWS)
        return [torch.from_numpy(one).view(self._shape) for one in out]

    def sweep(
        self, start: GroupScales, least: torch.Tensor, ladder: Ladder, floor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bits, total = self._rows.bits, len(self._rows.bits)
        table, begin = _step_table(start, ladder), _step_start(start, floor, total)
        error, steps = _per_row(least, total).copy(), np.empty((total, self._shape[2]), np.int32)

        def run(rows: slice) -> None:
            own = StepStart(*(one[rows] for one in begin))
            self._loops.sweep(bits[rows], self._limit, own, table, error[rows], steps[rows])

        in_parts(run, total, _LEAST_ROWS)
        return torch.from_numpy(steps).view(self._shape), torch.from_numpy(error).view(self._shape)


def _own_codes(scales: GroupScales) -> NearestScales:
    """Return scales with the codes that they lead to themselves."""
    lowest = scales.lowest()
    return NearestScales(scales, scales.inverse(), None if lowest is None else lowest.double())


def _step_start(start: GroupScales, floor: torch.Tensor | None, num_rows: int) -> StepStart:
    scale, is_byte = _per_row(start.scale, num_rows), start.stored.element_size() == 1
    byte = (
        _per_row(magnitude_bytes(start.stored).to(torch.uint8), num_rows)
        if is_byte
        else np.zeros_like(scale, np.uint8)
    )
    second = (
        np.ones(num_rows, np.float32)
        if start.second is None
        else _per_row(start.second, num_rows).reshape(-1)
    )
    floors = (
        np.zeros(num_rows, np.int64)
        if floor is None
        else _per_row(floor.long(), num_rows).reshape(-1)
    )
    return StepStart(scale, byte, second, floors)


def _step_table(start: GroupScales, ladder: Ladder) -> StepTable:
    up, down = (np.array(factors, np.float32) for factors in (ladder.up, ladder.down))
    values = (
        byte_values(start.stored.dtype).numpy() if ladder.has_bytes else np.empty(0, np.float32)
    )
    rounding = {torch.bfloat16: TO_BFLOAT16, torch.float16: TO_FLOAT16}.get(
        start.stored.dtype, TO_FLOAT32
    )
    return StepTable(
        ladder.first,
        np.float32(ladder.limit),
        up,
        down,
        values,
        ladder.top,
        ladder.no_half,
        rounding,
    )
