"""Search for the scales with the least squared error, never more than that of round-to-nearest.

The same choice on every device: errors are float64 sums in the folding order of `fold_sum`, candidates come in one
order, and a candidate must beat round-to-nearest by a margin, so that another order of summing cannot make it worse.
Candidates are elementwise and IEEE exact. A change of the candidates raises `planning.layer_encoding.SEARCH_VERSION`.
Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hqconv.humming_layout.runtime import humming
from hqconv.quantization import bit_codec
from hqconv.quantization.quantized import fold_sum
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

_E8M0_STEPS = (-1,)
_FP8_STEPS = (-6, -5, -4, -3, -2, -1, 1, 2, 3)
_FLOAT_STEPS = tuple(j / 16 for j in (15, 17, 14, 18, 13, 12, 11, 10, 9, 8))
_INT8_STEPS = tuple(1 + j / 128 for j in (-1, 1, -2, 2))
_SHRINKS = (1.0, 0.9375, 0.875, 0.8125, 0.75)  # of the upper and the lower end of a range with a zero point
_HALF_RANGE = 29  # powers of two below the largest e8m0 scale that float16 can hold
_TOP = {torch.float8_e4m3fn: 126, torch.float8_e5m2: 123, torch.uint8: 254}  # the largest finite number's byte


@dataclass(frozen=True, eq=False)
class CandidateScales:
    """Group scales [E, R, G]: `stored`, the float32 `scale` it decodes to, and the `zero` point's value, if any.

    second: the second scale, float32 [E, 1 or R, 1]; a search does not change it.
    """

    stored: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    second: torch.Tensor | None

    def inverse(self) -> torch.Tensor:
        """Return the factor from weights to codes: the inverse of the decoded scale."""
        return (self.scale if self.second is None else self.scale * self.second).reciprocal()

    def lowest(self) -> torch.Tensor | None:
        """Return the value subtracted from weights first, if there are zero points."""
        return None if self.zero is None else self.zero * -self.scale

    def where(self, condition: torch.Tensor, other: CandidateScales) -> CandidateScales:
        """Return these scales where `condition` [E, R, G] holds, elsewhere the other ones."""
        stored = torch.where(condition, _bits(self.stored), _bits(other.stored)).view(self.stored.dtype)
        zero = self.zero
        if zero is not None and other.zero is not None:
            zero = torch.where(condition, zero, other.zero)
        return CandidateScales(stored, torch.where(condition, self.scale, other.scale), zero, self.second)


def _bits(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.uint8) if stored.element_size() == 1 else stored


def scales_of(tensors: dict[str, torch.Tensor], schema: WeightSchema) -> CandidateScales:
    """Read the scales from a stack's tensors; `tensors` as in `QuantizedStack`."""
    stored, second = tensors["weight_scale"], tensors.get("weight_scale_2")
    stored = stored.view(-1, 1, 1) if schema.weight_scale_type == "tensor" else stored
    zero = tensors.get("zero_point")
    if zero is not None and zero.dtype == torch.int32:
        columns = zero.transpose(-1, -2).contiguous()
        flat = columns.view(-1, columns.size(-1))
        zero = bit_codec.unpack(flat, schema.num_bits).view(*columns.shape[:-1], -1).transpose(-1, -2)
    if second is not None:
        second = second.float().view(len(stored), -1, 1)
    return CandidateScales(stored, _decoded(stored), None if zero is None else zero.float().contiguous(), second)


def tensors_of(scales: CandidateScales, schema: WeightSchema, param_dtype: str) -> dict[str, torch.Tensor]:
    """Return the tensors that store these scales and zero points, without the second scale."""
    is_flat = schema.weight_scale_type == "tensor"
    tensors = {"weight_scale": scales.stored.flatten() if is_flat else scales.stored}
    if scales.zero is None:
        return tensors
    if schema.is_fp_zero_point:
        return {**tensors, "zero_point": scales.zero.to(torch_dtype_of(param_dtype))}
    columns = scales.zero.to(torch.uint8).transpose(-1, -2).contiguous()
    packed = bit_codec.pack(columns.view(-1, columns.size(-1)), schema.num_bits)
    packed = packed.view(*columns.shape[:-1], -1).transpose(-1, -2).contiguous()
    return {**tensors, "zero_point": packed}


def _decoded(stored: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of stored scales."""
    if stored.dtype == torch.uint8:
        values: torch.Tensor = humming().weight.decode_e5m3_scale(stored)
        return values
    if stored.dtype == torch.float8_e8m0fnu:  # no byte here is 0 or 255
        return (stored.view(torch.uint8).int() << 23).view(torch.float32)
    return stored.float()


def candidates(
    start: CandidateScales, schema: WeightSchema, param_dtype: str, floor: torch.Tensor | None
) -> Iterator[tuple[CandidateScales, torch.Tensor]]:
    """Yield candidates to replace the round-to-nearest scales `start`, each with a mask of the groups that have one.

    Elsewhere the candidate equals `start`. `floor`: the least byte of e8m0 scales, [E, 1, 1].
    """
    for one in _raw_candidates(start, schema, param_dtype, floor):
        tiny = torch.finfo(torch.float32 if one.stored.element_size() == 1 else one.stored.dtype).tiny
        valid = (one.scale.abs() >= tiny) & torch.isfinite(one.scale) & torch.isfinite(start.scale)
        if one.zero is not None:
            valid &= torch.isfinite(one.zero)
        yield one.where(valid, start), valid


def _raw_candidates(
    start: CandidateScales, schema: WeightSchema, param_dtype: str, floor: torch.Tensor | None
) -> Iterator[CandidateScales]:
    if schema.has_zero_point:
        yield from _shrunk_ranges(start, schema, param_dtype)
    elif start.stored.dtype == torch.float8_e8m0fnu:
        byte = start.stored.view(torch.uint8).int()
        for step in _E8M0_STEPS:
            least = torch.ones_like(byte) if floor is None else floor.clamp_min(1)
            moved = torch.where((byte + step) >= least, byte + step, byte)
            yield _like(start, moved.to(torch.uint8).view(start.stored.dtype))
    elif start.stored.element_size() == 1:
        yield from _neighbouring_bytes(start)
    else:
        for factor in _factors(schema):
            scaled = start.scale * start.scale.new_tensor(factor)
            yield _like(start, scaled.to(start.stored.dtype))


def _like(start: CandidateScales, stored: torch.Tensor) -> CandidateScales:
    return CandidateScales(stored, _decoded(stored), start.zero, start.second)


def _neighbouring_bytes(start: CandidateScales) -> Iterator[CandidateScales]:
    """Yield the 8-bit floats some steps away; a scale that was rounded to 0 has none below."""
    byte = _bits(start.stored).int()
    sign = byte & (0 if start.stored.dtype == torch.uint8 else 0x80)
    top = _TOP[start.stored.dtype]
    for step in _FP8_STEPS:
        moved = ((byte - sign) + step).clamp(1, top)
        moved = torch.where((byte - sign) <= top, moved, byte - sign)  # NaN and infinity stay
        yield _like(start, (moved | sign).to(torch.uint8).view(start.stored.dtype))


def _factors(schema: WeightSchema) -> tuple[float, ...]:
    """Return the factors for scales of 16 or 32 bits; 1 is the stored scale with the inverse of its stored value."""
    own = (1.0,) if schema.weight_scale_type not in ("block", "tensor") else ()
    if not schema.is_integer:
        return (*own, *_FLOAT_STEPS)
    if schema.num_bits == 8:
        return (*own, *_INT8_STEPS)
    if schema.num_bits >= 5:
        return (*own, *(1 - i / 64 for i in range(1, 12)))
    # Few codes for many weights leave out more of the tails.
    step = 16 if schema.num_bits < 4 or schema.weight_scale_type == "channel" else 32
    return (*own, *(1 - i / step for i in range(1, 12)))


def _shrunk_ranges(start: CandidateScales, schema: WeightSchema, param_dtype: str) -> Iterator[CandidateScales]:
    """Yield ranges with shrunk ends, and their zero points."""
    assert start.zero is not None
    top = start.scale.new_tensor(float(2**schema.num_bits - 1))
    high, low = (top - start.zero) * start.scale, start.zero * start.scale
    for index, upper in enumerate(_SHRINKS):
        for lower in _SHRINKS[max(0, index - 1) : index + 2]:
            below = low * low.new_tensor(lower)
            stored = ((high * high.new_tensor(upper) + below) / top).to(start.stored.dtype)
            scale = stored.float()
            zero = below / scale
            if schema.is_fp_zero_point:
                zero = zero.to(torch_dtype_of(param_dtype)).float()
            else:
                zero = torch.minimum(torch.round(zero).clamp_min(0), top)
            yield CandidateScales(stored, scale, zero, start.second)


def least_byte(stored: list[torch.Tensor], param_dtype: str, *, has_row_scale: bool = False) -> torch.Tensor | None:
    """Return the least byte of e8m0 scales that float16 can hold beside the expert's largest scale: [E, 1, 1].

    Under a scale per row, exponents are not moved into float16's range: the least one is -14.
    """
    if stored[0].dtype != torch.float8_e8m0fnu or param_dtype != "float16":
        return None
    if has_row_scale:
        return torch.full((1, 1, 1), 127 - 14, dtype=torch.int32, device=stored[0].device)
    largest = torch.stack([one.view(torch.uint8).flatten(1).amax(1) for one in stored]).amax(0)
    return (largest.int() - _HALF_RANGE).view(-1, 1, 1)


_MARGIN = 1 - 2.0**-20

RowErrors = Callable[
    [CandidateScales], torch.Tensor
]  # float64 [E, N, G]: each row's of each group, folded over its columns


@dataclass(frozen=True, eq=False)
class SearchStart:
    """A stack after round-to-nearest: its scales, its errors float64 [E, N, G], and the function that scores others."""

    scales: CandidateScales
    error: torch.Tensor
    score: RowErrors


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The chosen scales, and a mask of those that differ from round-to-nearest: bool [E, R, G]."""

    scales: CandidateScales
    changed: torch.Tensor


def search(starts: Sequence[SearchStart], schema: WeightSchema, param_dtype: str) -> list[SearchResult]:
    """Choose the scales of stacks, one projection each; projections that share a scale choose together."""
    floor = least_byte([one.scales.stored for one in starts], param_dtype, has_row_scale=schema.has_row_scale)
    if schema.weight_scale_type != "tensor":
        return [_choose([one], schema, param_dtype, floor) for one in starts]
    return [_choose(starts, schema, param_dtype, floor)] * len(starts)


def _choose(
    starts: Sequence[SearchStart], schema: WeightSchema, param_dtype: str, floor: torch.Tensor | None
) -> SearchResult:
    best = start = starts[0].scales
    least = _scope_errors([one.error for one in starts], schema) * _MARGIN
    changed = torch.zeros_like(least, dtype=torch.bool)
    for scales, valid in candidates(start, schema, param_dtype, floor):
        error = _scope_errors([one.score(scales) for one in starts], schema)
        wins = valid & (error < least)
        best, least = scales.where(wins, best), torch.where(wins, error, least)
        changed |= wins
    return SearchResult(best, changed)


def _scope_errors(rows: Sequence[torch.Tensor], schema: WeightSchema) -> torch.Tensor:
    """Return the errors [E, R, G] of all weights of each scale: folded over rows, then matrix by matrix."""
    total = _folded_rows(rows[0], schema)
    for one in rows[1:]:
        total = total + _folded_rows(one, schema)
    return total


def _folded_rows(errors: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    num_experts, num_rows, num_groups = errors.shape
    if schema.weight_scale_type not in ("block", "tensor"):
        return errors
    block_rows = schema.weight_scale_group_size_n if schema.weight_scale_type == "block" else num_rows
    blocks = errors.view(num_experts, num_rows // block_rows, block_rows, num_groups)
    return fold_sum(blocks.transpose(-1, -2).contiguous())
