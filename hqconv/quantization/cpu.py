"""Quantization on the CPU: compiled loops over the rows of a stack.

Legend: E experts, N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hqconv.cpu_loops import arithmetic
from hqconv.cpu_loops.compensation import compensating_encoder, loss_meter
from hqconv.cpu_loops.encoders import BFLOAT16, E8M0, GIVEN, encoder, tile_encoder
from hqconv.cpu_loops.helper_threads import in_parts
from hqconv.cpu_loops.repack import TILE_ROWS
from hqconv.cpu_loops.scale_loops import TO_BFLOAT16, TO_FLOAT16, TO_FLOAT32, searcher
from hqconv.kernel_layout import cpu_ops
from hqconv.kernel_layout.cpu_ops import Array
from hqconv.kernel_layout.runtime import humming
from hqconv.kernel_layout.weight_tiles import StackTiles
from hqconv.quantization.gptq import CompensationStart, compensate, inverse_of
from hqconv.quantization.quantized import (
    RTN,
    HessianFactors,
    QuantizedStack,
    Quantizer,
    TileFactors,
    code_of,
    num_groups,
)
from hqconv.quantization.scale_search import (
    CandidateScales,
    Ladder,
    SearchResult,
    SearchStart,
    byte_values,
    magnitude_bytes,
    scales_of,
    search,
    tensors_of,
)
from hqconv.quantization.two_level_scales import GivenScales, group_scales, two_level
from hqconv.schemas import sum_factors
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema


def quantize_stacks(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    given: Sequence[GivenScales] | None,
    count_exact: bool,
    quantizer: Quantizer = RTN,
    tiles: Sequence[StackTiles] | None = None,
) -> list[QuantizedStack]:
    """Quantize stacks on the CPU; see `hqconv.quantization.quantize.quantize_stacks`."""
    each_tiles: Sequence[StackTiles | None] = tiles or [None] * len(stacks)
    is_plain = quantizer.name == RTN.name
    if is_plain and (scales := _row_scales(schema, param_dtype)) != GIVEN:
        pairs = zip(stacks, each_tiles, strict=True)
        return [_encode_in_one_pass(stack, schema, scales, count_exact, t) for stack, t in pairs]
    ranges = [_measure(stack, schema) for stack in stacks]
    shared = None
    if schema.is_coupled:
        widest = [np.maximum(r.highest, -r.lowest).reshape(len(stacks[0]), -1).max(axis=1) for r in ranges]
        shared = np.max(widest, axis=0).astype(np.float32)
    each: Sequence[GivenScales | None] = given or [None] * len(ranges)
    groups = [_groups(r, schema, param_dtype, shared, g) for r, g in zip(ranges, each, strict=True)]
    if given is None and not is_plain:
        rounded, groups = groups, search_scales(ranges, groups, schema, param_dtype, quantizer.importance)
        if quantizer.factors is not None:
            assert tiles is None, "compensation gives packed codes only"
            return _compensated(ranges, rounded, groups, schema, param_dtype, quantizer.factors, count_exact)
    return [_encode(r, g, schema, count_exact, t) for r, g, t in zip(ranges, groups, each_tiles, strict=True)]


def _measure(stack: torch.Tensor, schema: WeightSchema) -> Ranges:
    num_experts, num_rows, num_columns = stack.shape
    source = cpu_ops.as_bits(stack).reshape(-1, num_columns)
    group = schema.weight_scale_group_size or num_columns
    highest, lowest = np.empty((2, len(source), num_columns // group), np.float32)
    in_parts(
        lambda rows: arithmetic.group_ranges(source[rows], group, highest[rows], lowest[rows]), len(source), LEAST_ROWS
    )
    if schema.weight_scale_type in ("block", "tensor"):
        rows = schema.weight_scale_group_size_n if schema.weight_scale_type == "block" else num_rows
        blocks = (len(source) // rows, rows, -1)
        highest, lowest = highest.reshape(blocks).max(axis=1), lowest.reshape(blocks).min(axis=1)
    fused = stack.dtype == torch.float32 and group <= cpu_ops.FUSED_GROUP_SIZE
    return Ranges(source, (num_experts, num_rows, num_columns), highest, lowest, fused)


@np.errstate(all="ignore")
def _groups(ranges: Ranges, schema: WeightSchema, param_dtype: str, shared: Any, given: GivenScales | None) -> Groups:
    """Return scales and zero points of a stack in stored form, and the encoder's inputs."""
    highest, lowest, num_experts = ranges.highest, ranges.lowest, ranges.shape[0]
    if schema.weight_scale_type == "tensor":
        highest, lowest = shared[:, None], -shared[:, None]
    if schema.weight_scale_2_type != "none":
        return _two_level_groups(ranges, schema, param_dtype, shared, given)
    scale, lowest, zero = cpu_ops.group_scales(
        code_of(schema),
        highest,
        lowest,
        e8m0=schema.bs_dtype == "float8e8m0",
        negative=schema.bs_dtype != "float8e5m3",
        fp_zero=schema.is_fp_zero_point,
        fused=ranges.fused,
    )
    stack = torch.from_numpy(scale).view(num_experts, -1, scale.shape[-1])
    tensors, decode_scale = _store_scales(stack, schema, param_dtype)
    inverse = np.float32(1) / scale
    if schema.has_zero_point:
        stored, zero = _store_zero_point(zero, schema, param_dtype)
        tensors["zero_point"] = stored.reshape(num_experts, -1, stored.size(-1))
    return Groups(tensors, inverse, lowest, decode_scale, zero, None, 0.0)


def _two_level_groups(
    ranges: Ranges, schema: WeightSchema, param_dtype: str, shared: Any, given: GivenScales | None
) -> Groups:
    """Return 8-bit scales under a second scale, and the encoder's inputs."""
    shape = (ranges.shape[0], -1, ranges.highest.shape[-1])
    scale = group_scales(torch.from_numpy(ranges.highest), torch.from_numpy(ranges.lowest), schema)
    amax = torch.from_numpy(shared).view(-1, 1, 1) if schema.weight_scale_2_type == "tensor" else None
    scales = two_level(scale.view(shape), schema, param_dtype, amax, given)
    stored = scales.group.view(torch.uint8)
    values = _values_of(stored.reshape(-1, stored.size(-1)).numpy(), scales.group.dtype)
    second = scales.second_value.reshape(-1, 1).numpy()
    inverse = values * per_row(second, len(values))
    is_known = np.abs(inverse) > 0  # neither 0 nor NaN
    np.divide(np.float32(1), inverse, out=inverse, where=is_known)
    inverse[~is_known] = 0
    none, zero = np.zeros(values.shape), np.zeros_like(values)
    tensors = {"weight_scale": scales.group, "weight_scale_2": scales.second}
    return Groups(tensors, inverse, none, values, zero, second, scales.limit)


def _encode(
    ranges: Ranges, groups: Groups, schema: WeightSchema, count_exact: bool, tiles: StackTiles | None
) -> QuantizedStack:
    """Encode a stack with given groups, and measure its errors."""
    given = groups.per_row(len(ranges.source))
    out = _EncoderOutput(ranges.shape, schema, count_exact, tiles)
    out.encode(ranges.source, GIVEN, np.float32(groups.limit), given)
    return out.stack(groups.tensors)


def _row_scales(schema: WeightSchema, param_dtype: str) -> int:
    """Return the rounding of scales that the encoder can compute row by row; GIVEN if it cannot."""
    if schema.is_coupled or schema.weight_scale_2_type != "none" or schema.has_zero_point or schema.num_bits == 1:
        return GIVEN
    if schema.weight_scale_type not in ("group", "channel"):
        return GIVEN
    return {"float8e8m0": E8M0, "bfloat16": BFLOAT16}.get(schema.bs_dtype or param_dtype, GIVEN)


def _encode_in_one_pass(
    stack: torch.Tensor, schema: WeightSchema, scales: int, count_exact: bool, tiles: StackTiles | None
) -> QuantizedStack:
    """Compute scales, codes and error sums of a stack in one pass."""
    num_experts, num_rows, num_columns = stack.shape
    source = cpu_ops.as_bits(stack).reshape(-1, num_columns)
    inverse, scale = np.empty(
        (2, len(source), num_columns // (schema.weight_scale_group_size or num_columns)), np.float32
    )
    groups = (inverse, np.zeros((1, 1)), scale, np.zeros((1, 1), np.float32), np.ones(len(source), np.float32))
    out = _EncoderOutput((num_experts, num_rows, num_columns), schema, count_exact, tiles)
    out.encode(source, scales, cpu_ops.NO_LIMIT, groups)
    kept = torch.from_numpy(scale).view(num_experts, num_rows, -1)
    if scales == E8M0:
        stored = (kept.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        stored = kept.to(torch.bfloat16)  # exact: rounded already
    return out.stack({"weight_scale": stored})


def _run(
    encode: Any,
    source: Array,
    limit: Any,
    groups: tuple[Array, ...],
    out: tuple[Array, ...],
    factors: tuple[Array, ...] | None = None,
    changed: Array | None = None,
) -> None:
    """Run an encoder over all rows, in helper threads. Arrays of one row hold for every row.

    factors, changed: of `compensation.compensating_encoder`.
    """

    def run(rows: slice) -> None:
        more = () if changed is None else (factors, changed[rows])
        of_groups, of_out = (_of_rows(arrays, rows, len(source)) for arrays in (groups, out))
        encode(source[rows], limit, of_groups, *more, of_out)

    in_parts(run, len(source), LEAST_ROWS)


def _of_rows(arrays: tuple[Array, ...], rows: slice, total: int) -> tuple[Array, ...]:
    """Return some rows of arrays with `total` rows; others hold for every row."""
    return tuple(one[rows] if len(one) == total else one for one in arrays)


class _EncoderOutput:
    """Arrays that an encoder writes for a stack [E, N, K]: codes, and each row's error, power and exact groups.

    Codes are packed; or, with `tiles`, laid out there, with content sums of the packed ones.
    """

    def __init__(
        self, shape: tuple[int, int, int], schema: WeightSchema, count_exact: bool, tiles: StackTiles | None = None
    ) -> None:
        num_rows, num_columns = shape[0] * shape[1], shape[2]
        self._shape, self._schema, self._count_exact, self._tiles = shape, schema, count_exact, tiles
        self._num_words = num_columns * schema.num_bits // 32
        self._packed = np.empty((num_rows, self._num_words * 4), np.uint8) if tiles is None else None
        self._row_sums = None if tiles is None else np.empty(num_rows, np.int64)
        self._sums, self._exact = np.empty((2, num_rows)), np.zeros(num_rows if count_exact else 0, np.int64)

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Arrays in the encoder's order."""
        codes = self._row_sums if self._packed is None else self._packed
        assert codes is not None
        return codes, self._sums[0], self._sums[1], self._exact

    def encode(self, source: Array, scales: int, limit: Any, groups: tuple[Array, ...]) -> None:
        """Encode all rows with group scales as `encoders.encoder` takes them."""
        if self._tiles is None:
            _run(encoder(code_of(self._schema), scales), source, limit, groups, self.arrays)
            return
        words, pieces, centre = self._tiles
        encode, num_rows = tile_encoder(code_of(self._schema), scales, centre), self._shape[1]
        columns = sum_factors.factors("column", self._num_words)

        def run(blocks: slice) -> None:
            rows = slice(blocks.start * TILE_ROWS, blocks.stop * TILE_ROWS)
            of_groups, out = (_of_rows(arrays, rows, len(source)) for arrays in (groups, self.arrays))
            encode(source[rows], limit, of_groups, out, rows.start, num_rows, columns, (words, pieces))

        in_parts(run, len(source) // TILE_ROWS)

    def stack(self, tensors: dict[str, torch.Tensor]) -> QuantizedStack:
        """Return the result, with its scales and zero points."""
        num_experts, num_rows, num_columns = self._shape
        shape, row_sums = (num_experts, num_rows, self._num_words), None
        if self._packed is None:
            weight = torch.empty(shape, dtype=torch.int32, device="meta")
            row_sums = torch.from_numpy(self._row_sums).view(num_experts, num_rows)
        else:
            weight = torch.from_numpy(self._packed.view(np.int32)).view(shape)
        error, power = arithmetic.fold_rows(self._sums.reshape(2 * num_experts, -1)).reshape(2, num_experts)
        return QuantizedStack(
            {**tensors, "weight": weight},
            torch.from_numpy(error),
            torch.from_numpy(power),
            torch.from_numpy(self._exact.reshape(num_experts, -1).sum(axis=1)),
            num_groups((num_rows, num_columns), self._schema) if self._count_exact else 0,
            row_sums=row_sums,
        )


def _store_scales(scale: torch.Tensor, schema: WeightSchema, param_dtype: str) -> tuple[dict[str, torch.Tensor], Array]:
    """Return stored scales of [E, rows, G], and their float32 values [R, G]."""

    def rows(values: torch.Tensor) -> Array:
        flat: Array = values.reshape(-1, values.size(-1)).numpy()
        return flat

    if schema.weight_scale_type == "tensor":
        return {"weight_scale": scale.flatten()}, rows(scale)
    if schema.bs_dtype == "float8e8m0":
        stored = (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
        return {"weight_scale": stored}, rows(scale)
    if schema.bs_dtype == "float8e5m3":
        codec = humming().weight
        stored = codec.encode_e5m3_scale(scale)
        return {"weight_scale": stored}, rows(codec.decode_e5m3_scale(stored))
    is_block = schema.weight_scale_type == "block"
    stored = scale if is_block else scale.to(torch_dtype_of(schema.bs_dtype or param_dtype))
    return {"weight_scale": stored}, rows(stored.float())


def _values_of(codes: Array, dtype: torch.dtype) -> Array:
    """Return the float32 values of 8-bit floats by a table, which is faster than torch's conversion."""
    return _tables(dtype)[codes]


@functools.cache
def _tables(dtype: torch.dtype) -> Array:
    table: Array = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    return table


def _store_zero_point(zero: Array, schema: WeightSchema, param_dtype: str) -> tuple[torch.Tensor, Array]:
    """Return the stored zero point (integers packed along N) and its float32 value, of rows [R, G]."""
    if schema.is_fp_zero_point:
        stored = torch.from_numpy(zero).to(torch_dtype_of(param_dtype))
        return stored, stored.float().numpy()
    codes = torch.from_numpy(zero).to(torch.int32)
    packed = cpu_ops.pack_weight(codes.t().contiguous(), schema.num_bits).t().contiguous()
    return packed, zero


LEAST_ROWS = 64  # of one helper thread's part of a loop


@dataclass
class Ranges:
    """Highest and lowest value of each group, float32 [R, G]: R counts rows, row blocks, or matrices of the stack."""

    source: Array
    shape: tuple[int, int, int]
    highest: Array
    lowest: Array
    fused: bool  # see `cpu_ops.FUSED_GROUP_SIZE`


@dataclass
class Groups:
    """The encoder's inputs for each group, [R, G] as in `Ranges`, and the tensors that are stored.

    Fields as in `encoders.encoder`; `scale_2` has a row for each row or matrix, or is None.
    """

    tensors: dict[str, torch.Tensor]
    inverse: Array
    lowest: Array
    scale: Array
    zero: Array
    scale_2: Array | None
    limit: float

    def per_row(self, num_rows: int) -> tuple[Array, ...]:
        """Return (inverse, lowest, scale, zero, scale_2) for an encoder: with `num_rows` rows, or one for all rows."""
        scale_2 = np.ones((1, 1), np.float32) if self.scale_2 is None else self.scale_2
        values = (self.inverse, self.lowest, self.scale, self.zero)
        return (*(per_row(one, num_rows) for one in values), per_row(scale_2, num_rows).reshape(-1))


def per_row(values: Array, num_rows: int) -> Array:
    """Repeat values [R, …] so that each of `num_rows` rows has its own."""
    block_rows = num_rows // len(values)
    return np.ascontiguousarray(np.repeat(values, block_rows, axis=0) if block_rows > 1 else values)


def search_scales(
    ranges: Sequence[Ranges],
    groups: Sequence[Groups],
    schema: WeightSchema,
    param_dtype: str,
    importance: torch.Tensor | None,
) -> list[Groups]:
    """Replace the round-to-nearest scales of stacks by the ones with the least error; see `scale_search.search`."""
    starts = [_search_start(r, g, schema, importance) for r, g in zip(ranges, groups, strict=True)]
    found = search(starts, schema, param_dtype)
    return [_replaced(g, f, schema, param_dtype) for g, f in zip(groups, found, strict=True)]


def _search_start(ranges: Ranges, groups: Groups, schema: WeightSchema, importance: torch.Tensor | None) -> SearchStart:
    code, (num_experts, num_rows, num_columns) = code_of(schema), ranges.shape
    loops, total = searcher(code), num_experts * num_rows
    num_groups = num_columns // (schema.weight_scale_group_size or num_columns)
    groups = replace(groups, limit=arithmetic.largest_value(*code) if code[0] == arithmetic.FLOAT else 0.0)
    limit, shape = np.float32(groups.limit), (num_experts, num_rows, num_groups)
    weights = np.ones((1, num_columns)) if importance is None else importance.double().view(-1, num_columns).numpy()

    def run(loop: Callable[[slice, Array], None]) -> None:
        """Call `loop` for runs of rows, each of one expert where each has an importance of its own."""
        size = total // len(weights)
        for expert, of_expert in enumerate(weights):
            first = expert * size

            def part(rows: slice, first: int = first, of_expert: Array = of_expert) -> None:
                loop(slice(first + rows.start, first + rows.stop), of_expert)

            in_parts(part, size, LEAST_ROWS)

    def of(values: tuple[Array, ...], rows: slice) -> tuple[Array, ...]:
        return tuple(value[rows] if len(value) == total else value for value in values)

    def errors(one: Groups) -> torch.Tensor:
        out, values = np.empty((total, num_groups)), one.per_row(total)
        run(lambda rows, weight: loops.score(ranges.source[rows], limit, of(values, rows), weight, out[rows]))
        return torch.from_numpy(out).view(shape)

    def fit(tried: CandidateScales) -> tuple[torch.Tensor, torch.Tensor]:
        (products, squares), values = np.empty((2, total, num_groups)), _with_scales(groups, tried).per_row(total)
        run(lambda r, w: loops.fit(ranges.source[r], limit, of(values, r), w, products[r], squares[r]))
        return torch.from_numpy(products).view(shape), torch.from_numpy(squares).view(shape)

    def sweep(
        start: CandidateScales, least: torch.Tensor, ladder: Ladder, floor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        error, steps = _rows(least.clone()), np.empty((total, num_groups), np.int32)
        values = _sweep_inputs(start, total)
        steps_of = _ladder_inputs(start, ladder, floor, total)

        def part(rows: slice, weight: Array) -> None:
            ladder_of_rows = (*steps_of[:7], steps_of[7][rows], steps_of[8])
            loops.sweep(ranges.source[rows], limit, of(values, rows), weight, ladder_of_rows, error[rows], steps[rows])

        run(part)
        return torch.from_numpy(steps).view(shape), torch.from_numpy(error).view(shape)

    scales = scales_of(groups.tensors, schema)
    is_of_rows = schema.weight_scale_type in ("group", "channel")
    return SearchStart(
        scales,
        errors(groups),
        lambda tried: errors(_with_scales(groups, tried)),
        fit,
        lambda: torch.from_numpy(np.maximum(ranges.highest, -ranges.lowest)).view(scales.scale.shape),
        sweep if is_of_rows else None,
    )


def _sweep_inputs(start: CandidateScales, num_rows: int) -> tuple[Array, ...]:
    """Return scales, bytes and second scales for `Searcher.sweep`; bytes are 0 for scales of 16 and 32 bits."""
    scale = np.ascontiguousarray(_rows(start.scale))
    is_byte = start.stored.element_size() == 1
    byte = _rows(magnitude_bytes(start.stored).to(torch.uint8)) if is_byte else np.zeros(scale.shape, np.uint8)
    second = np.ones(num_rows, np.float32) if start.second is None else per_row(_rows(start.second), num_rows)
    return scale, np.ascontiguousarray(byte), second.reshape(-1)


def _ladder_inputs(
    start: CandidateScales, ladder: Ladder, floor: torch.Tensor | None, num_rows: int
) -> tuple[Any, ...]:
    """Return the ladder for `Searcher.sweep`, with one floor for each row."""
    up, down = (np.array(factors, np.float32) for factors in (ladder.up, ladder.down))
    values = byte_values(start.stored.dtype).numpy() if ladder.has_bytes else np.empty(0, np.float32)
    floors = np.zeros(num_rows, np.int64) if floor is None else per_row(_rows(floor).astype(np.int64), num_rows)
    rounding = {torch.bfloat16: TO_BFLOAT16, torch.float16: TO_FLOAT16}.get(start.stored.dtype, TO_FLOAT32)
    limit = np.float32(ladder.limit)
    return ladder.first, limit, up, down, values, ladder.top, ladder.no_half, floors.reshape(-1), rounding


def _rows(values: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = values.reshape(-1, values.size(-1)).numpy()
    return flat


def _with_scales(
    groups: Groups, scales: CandidateScales, changed: torch.Tensor | None = None, inverse: torch.Tensor | None = None
) -> Groups:
    """Return the groups with other scales, where `changed` holds (None: everywhere).

    inverse: the factor from weights to codes, if it is not the scales' own.
    """
    inverse, lowest, zero = scales.inverse() if inverse is None else inverse, scales.lowest(), scales.zero
    mask = None if changed is None else _rows(changed)

    def chosen(new: torch.Tensor, old: np.ndarray) -> np.ndarray:
        return _rows(new) if mask is None else np.where(mask, _rows(new), old)

    return replace(
        groups,
        inverse=chosen(inverse, groups.inverse),
        scale=_rows(scales.scale),
        lowest=groups.lowest if lowest is None else chosen(lowest.double(), groups.lowest),
        zero=groups.zero if zero is None else _rows(zero),
    )


def _replaced(groups: Groups, found: SearchResult, schema: WeightSchema, param_dtype: str) -> Groups:
    """Return the groups with the chosen scales, saturating: under a smaller scale weights exceed the largest code."""
    kind = code_of(schema)
    limit = arithmetic.largest_value(*kind) if kind[0] == arithmetic.FLOAT else 0.0
    tensors = {**groups.tensors, **tensors_of(found.scales, schema, param_dtype)}
    return replace(_with_scales(groups, found.scales, found.changed), tensors=tensors, limit=limit)


def _compensated(
    ranges: Sequence[Ranges],
    rounded: Sequence[Groups],
    best: Sequence[Groups],
    schema: WeightSchema,
    param_dtype: str,
    factors: HessianFactors,
    count_exact: bool,
) -> list[QuantizedStack]:
    """Encode stacks with error compensation, starting from the scales of `mse`; see `gptq.compensate`."""
    starts = [
        _compensation_start(one, before, after, schema)
        for one, before, after in zip(ranges, rounded, best, strict=True)
    ]
    found = compensate(starts, factors, schema, param_dtype)
    encode, done = compensating_encoder(code_of(schema)), []
    for one, groups, choice in zip(ranges, best, found, strict=True):
        changed, total = _rows(choice.of_groups()), len(one.source)
        new = _with_scales(groups, choice.scales, inverse=inverse_of(choice.scales)).per_row(total)
        mixed = tuple(
            np.where(changed, ours, kept) if kept.shape == changed.shape else kept
            for ours, kept in zip(new, groups.per_row(total), strict=True)
        )
        out = _EncoderOutput(one.shape, schema, count_exact)
        more = (_arrays(factors.wide), _rows(choice.changed))
        _run(encode, one.source, np.float32(groups.limit), mixed, out.arrays, *more)
        done.append(out.stack({**groups.tensors, **tensors_of(choice.scales, schema, param_dtype)}))
    return done


def _compensation_start(ranges: Ranges, rounded: Groups, best: Groups, schema: WeightSchema) -> CompensationStart:
    meter, total = loss_meter(code_of(schema)), len(ranges.source)

    def losses(one: Groups, factors: TileFactors, is_compensated: bool) -> torch.Tensor:
        arrays, values = _arrays(factors), one.per_row(total)
        out = np.empty((total, len(arrays[0])))

        def run(rows: slice) -> None:
            of_rows = tuple(value[rows] if len(value) == total else value for value in values)
            meter(ranges.source[rows], np.float32(one.limit), of_rows, arrays, is_compensated, out[rows])

        in_parts(run, total, LEAST_ROWS)
        return torch.from_numpy(out).view(*ranges.shape[:2], -1)

    return CompensationStart(
        scales_of(rounded.tensors, schema),
        scales_of(best.tensors, schema),
        lambda factors: losses(best, factors, False),
        lambda tried, factors: losses(_with_scales(best, tried, inverse=inverse_of(tried)), factors, True),
    )


def _arrays(factors: TileFactors) -> tuple[Array, ...]:
    return factors.order.numpy(), factors.feedback.numpy(), factors.penalty.numpy()
