"""Search for the scales with the least squared error, then keep the gain; never worse than round-to-nearest.

Least squares shrinks: the decoded weights have a part of the weights' size only, and every layer's outputs lose it. So
codes are those of the scales found, and the scales that are stored have <decoded, w> = <w, w> with these codes. This
loses more than the least squared error; where it is not less than that of round-to-nearest, its scale and codes stay.

The same choice on every device: errors are float64 sums in the folding order of `fold_sum`, candidates come in one
order, and a candidate must beat round-to-nearest by a margin, so that another order of summing cannot make it worse.
Candidates are elementwise and IEEE exact. A change of the candidates raises `planning.layer_encoding.SEARCH_VERSION`.
Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hqconv.quantization.bit_codec import bits_of
from hqconv.quantization.group_scales import GroupScales, rounded_scales, stored_values
from hqconv.quantization.quantized import fold_sum
from hqconv.schemas.tensors import CodeKind, torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

# Of the upper and the lower end of a range with a zero point.
_SHRINKS = (1.0, 0.9375, 0.875, 0.8125, 0.75)
_HALF_RANGE = 29  # powers of two below the largest e8m0 scale that float16 can hold
MARGIN = 1 - 2.0**-20  # of a loss that must be beaten
_ROW_TYPES = ("group", "channel")  # of scales that belong to one row each
_NUM_FITS = 2  # times that a scale of 16 or 32 bits is fitted to its codes


@dataclass(frozen=True)
class Ladder:
    """Scales that a search tries in place of a round-to-nearest scale, as numbered steps.

    Step 1 is the stored scale itself, with the inverse of its stored value. Steps 2, 3 … are larger scales, -1, -2 …
    smaller ones: the next 8-bit scales, or multiples of a wider scale by `up` and `down`. Steps from `first` to
    `num_up` are tried in this order, then -1 to -`num_down`.

    limit: an 8-bit scale of at least `limit` times the group's largest weight is not tried. Half of such a scale has
    every number of its grid that is nearest to a weight, and more, so that it loses no more. no_half: 8-bit scales
    below this byte, whose half cannot be stored, have no limit. A smaller scale is not tried where the weights beyond
    the largest code alone lose as much as the best scale: they lose more under each smaller one.
    """

    first: int
    up: tuple[float, ...] = ()
    down: tuple[float, ...] = ()
    limit: float = math.inf
    top: int = 0
    no_half: int = 0

    @property
    def has_bytes(self) -> bool:
        """True for 8-bit scales."""
        return self.top > 0

    @property
    def num_up(self) -> int:
        """Number of the last step upwards."""
        return self.top if self.has_bytes else len(self.up) + 1

    @property
    def num_down(self) -> int:
        """Number of steps downwards."""
        return self.top if self.has_bytes else len(self.down)

    def factors(self) -> tuple[float, ...]:
        """Return the multiple of each step from -`num_down` to `num_up`, of which step 0 changes nothing."""
        return (*reversed(self.down), 1.0, 1.0, *self.up)


# Of 8-bit scales: the largest finite number's byte, and the first byte whose half can be stored exactly.
_BYTES = {
    "float8e4m3": (126, 16),
    "float8e5m2": (123, 8),
    "float8e5m3": (254, 16),
    "float8e8m0": (254, 0),
}


_HALF_POWERS = 127 - 14, 127 + 15  # bytes of e8m0 scales that float16 holds


def ladder_of(schema: WeightSchema, param_dtype: str) -> Ladder:
    """Return the steps of a schema's scales; those of zero points are other ones, see `_shrunk_ranges`."""
    kind, bits, exponent, mantissa = code = schema.code_type
    if schema.bs_dtype in _BYTES:
        largest = code.largest
        if kind == CodeKind.FLOAT:
            # The next number of twice the grid is one unit above the largest code.
            largest += 2.0 ** (math.floor(math.log2(largest)) - mantissa - 1)
        has_own_codes = schema.bs_dtype == "float8e8m0" or schema.weight_scale_2_type != "none"
        top, no_half = _BYTES[schema.bs_dtype]
        if schema.has_row_scale and schema.bs_dtype == "float8e8m0" and param_dtype == "float16":
            top = _HALF_POWERS[1]
        first = 2 if has_own_codes else 1
        return Ladder(first, limit=2 / max(largest, 0.5), top=top, no_half=no_half)
    first = 2 if schema.weight_scale_type in ("block", "tensor") else 1
    if kind == CodeKind.FLOAT and exponent > 0:
        up = range(17, 32)
        down = range(15, 7, -1)
        return Ladder(first, tuple(i / 16 for i in up), tuple(i / 16 for i in down))
    if bits == 8:
        return Ladder(first, (129 / 128, 130 / 128), (127 / 128, 126 / 128))
    if bits >= 5:
        return Ladder(first, (33 / 32, 34 / 32, 35 / 32), tuple(1 - i / 64 for i in range(1, 12)))
    # Few codes for many weights leave out more of the tails.
    step = 16 if bits < 4 or schema.weight_scale_type == "channel" else 32
    larger = (17 / 16, 18 / 16, 19 / 16, 20 / 16)
    return Ladder(first, larger, tuple(1 - i / step for i in range(1, 12)))


def stepped(
    start: GroupScales, steps: torch.Tensor, ladder: Ladder
) -> tuple[GroupScales, torch.Tensor]:
    """Return the scales that are `steps`, int32 [E, R, G], from `start`, and a mask of those that exist.

    Where there is none, and where the step is 0, the scale is that of `start`.
    """
    if ladder.has_bytes:
        byte = bits_of(start.stored).int()
        magnitude = magnitude_bytes(start.stored)
        moved = magnitude + torch.where(steps > 0, steps - 1, steps)
        exists = (moved >= 1) & (moved <= ladder.top) & (magnitude <= ladder.top)
        moved_bytes = torch.where(exists, moved | (byte ^ magnitude), byte)
        stored = moved_bytes.to(torch.uint8).view(start.stored.dtype)
    else:
        factors = start.scale.new_tensor(ladder.factors())
        stored = (start.scale * factors[(steps + ladder.num_down).long()]).to(start.stored.dtype)
        exists = torch.ones_like(steps, dtype=torch.bool)
    found = GroupScales(stored, stored_values(stored), start.zero, start.second)
    exists &= (steps != 0) & _is_usable(found, start)
    return found.where(exists, start), exists


def magnitude_bytes(stored: torch.Tensor) -> torch.Tensor:
    """Return the bytes of 8-bit scales without their sign bit, int32."""
    has_sign = stored.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return stored.view(torch.uint8).int() & (0x7F if has_sign else 0xFF)


def _is_usable(scales: GroupScales, start: GroupScales) -> torch.Tensor:
    """Return a mask of the scales that are neither zero, subnormal nor infinite."""
    dtype = torch.float32 if scales.stored.element_size() == 1 else scales.stored.dtype
    usable = scales.scale.abs() >= torch.finfo(dtype).tiny
    usable &= torch.isfinite(scales.scale) & torch.isfinite(start.scale)
    return usable if scales.zero is None else usable & torch.isfinite(scales.zero)


_NEAR_UP = 8  # steps of 8-bit scales: the most that the limit leaves above
_NEAR_DOWN = 3  # and the usual ones below


def candidate_scales(
    start: GroupScales, schema: WeightSchema, param_dtype: str
) -> Iterator[tuple[GroupScales, torch.Tensor]]:
    """Yield the scales of a schema's ladder, of 8-bit ones those near `start`; each with a mask of the groups with one.

    Of zero points ranges with shrunk ends. Without `start` itself, which is step 1. For a search under another measure,
    for which the bounds of the ladder do not hold.
    """
    if schema.has_zero_point:
        yield from _shrunk_ranges(start, schema, param_dtype)
        return
    ladder = ladder_of(schema, param_dtype)
    up = ladder.num_up
    down = ladder.num_down
    if ladder.has_bytes:
        is_power = start.stored.dtype == torch.float8_e8m0fnu
        up = 1 if is_power else _NEAR_UP
        down = _NEAR_DOWN
    for step in (*range(2, up + 1), *range(-1, -down - 1, -1)):
        tried, valid = stepped(start, torch.full_like(start.scale, step, dtype=torch.int32), ladder)
        yield tried.where(valid, start), valid


def sweep_each(
    start: GroupScales,
    least: torch.Tensor,
    ladder: Ladder,
    error_of: Callable[[GroupScales], torch.Tensor],
    floor: torch.Tensor | None = None,
    largest: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Try every step; return the step of the least error, int32 [E, R, G], and that error.

    least: the error to be beaten, float64 [E, R, G]. error_of: the error under a scale. floor: as `ScaleMeter.sweep`.
    largest: each group's largest magnitude, float32 [E, R, G], for the limit of 8-bit scales.
    """
    best = torch.zeros_like(least, dtype=torch.int32)
    for steps in (range(ladder.first, ladder.num_up + 1), range(-1, -ladder.num_down - 1, -1)):
        for step in steps:
            tried, valid = stepped(start, torch.full_like(best, step), ladder)
            if floor is not None:
                valid &= magnitude_bytes(tried.stored) >= floor
            if ladder.has_bytes:  # which has many steps: those that no group can take are left out
                going = valid if step < 0 else torch.ones_like(valid)
                if largest is not None and step > 1:
                    going = tried.effective().abs() < largest * ladder.limit
                    going |= magnitude_bytes(start.stored) + step - 1 < ladder.no_half
                if not bool(going.any()):
                    break
                valid &= going
            wins = valid & ((error := error_of(tried)) < least)
            best = torch.where(wins, step, best)
            least = torch.where(wins, error, least)
    return best, least


def _shrunk_ranges(
    start: GroupScales, schema: WeightSchema, param_dtype: str
) -> Iterator[tuple[GroupScales, torch.Tensor]]:
    """Yield ranges with shrunk ends, and their zero points; each with a mask of the groups that have one."""
    assert start.zero is not None
    top = start.scale.new_tensor(float(2**schema.num_bits - 1))
    high = (top - start.zero) * start.scale
    low = start.zero * start.scale
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
            found = GroupScales(stored, scale, zero, start.second)
            valid = _is_usable(found, start)
            yield found.where(valid, start), valid


def least_byte(
    stored: list[torch.Tensor], param_dtype: str, *, has_row_scale: bool
) -> torch.Tensor | None:
    """Return the least byte of e8m0 scales that float16 can hold beside the expert's largest scale: [E, 1, 1].

    Under a scale per row, exponents are not moved into float16's range: they are -14 to 15.
    """
    if stored[0].dtype != torch.float8_e8m0fnu or param_dtype != "float16":
        return None
    if has_row_scale:
        shape = (len(stored[0]), 1, 1)
        return torch.full(shape, _HALF_POWERS[0], dtype=torch.int32, device=stored[0].device)
    maxima = [scales.view(torch.uint8).flatten(1).amax(1) for scales in stored]
    return (torch.stack(maxima).amax(0).int() - _HALF_RANGE).view(-1, 1, 1)


class ScaleMeter(Protocol):
    """A stack's weights and its round-to-nearest scales, measured under other scales, on one device.

    Errors are squared errors of each row's part of each group, float64 [E, N, G], folded over columns, and of the codes
    that the scales lead to.
    """

    scales: GroupScales

    def start_errors(self) -> torch.Tensor:
        """Return the errors under the scales of round-to-nearest."""

    def errors(self, scales: GroupScales, stored: GroupScales | None = None) -> torch.Tensor:
        """Return the errors under other scales.

        stored: the scales that codes chosen under `scales` are decoded with, if others.
        """

    def fits(self, scales: GroupScales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sums of w * v, of v * v and of w * w, float64 [E, N, G].

        v: the number of a weight's code less the zero point.
        """

    def sweep(
        self, start: GroupScales, least: torch.Tensor, ladder: Ladder, floor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step of the least error of each scale of a row, int32 [E, N, G], and that error.

        least: the error to be beaten. floor: the least byte of e8m0 scales, [E, 1, 1]. Steps that cannot win are left
        out; the result is that of all steps.
        """


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The scales that codes are chosen under, those that are stored, and a mask of both that are not rtn's.

    changed: bool [E, R, G]. The zero points are the same in both; where it is False, `stored` are rtn's.
    """

    scales: GroupScales
    stored: GroupScales
    changed: torch.Tensor


def search(
    meters: Sequence[ScaleMeter], schema: WeightSchema, param_dtype: str
) -> list[SearchResult]:
    """Choose the scales of stacks, one projection each; projections that share a scale choose together."""
    stored = [meter.scales.stored for meter in meters]
    floor = least_byte(stored, param_dtype, has_row_scale=schema.has_row_scale)
    if schema.weight_scale_type != "tensor":
        return [_choose([meter], schema, param_dtype, floor) for meter in meters]
    return [_choose(meters, schema, param_dtype, floor)] * len(meters)


class _Best:
    """The best scales so far, their errors [E, R, G], and a mask of those that are not rtn's."""

    def __init__(self, scales: GroupScales, error: torch.Tensor) -> None:
        self.scales = scales
        self.error = error
        self.changed = torch.zeros_like(error, dtype=torch.bool)

    def offer(self, tried: GroupScales, error: torch.Tensor, valid: torch.Tensor) -> None:
        """Take the valid scales that lose less."""
        wins = valid & (error < self.error)
        self.scales = tried.where(wins, self.scales)
        self.error = torch.where(wins, error, self.error)
        self.changed = self.changed | wins


def _choose(
    meters: Sequence[ScaleMeter], schema: WeightSchema, param_dtype: str, floor: torch.Tensor | None
) -> SearchResult:
    start = meters[0].scales
    bound = scope_sums([meter.start_errors() for meter in meters], schema) * MARGIN

    def error_of(tried: GroupScales) -> torch.Tensor:
        return scope_sums([meter.errors(tried) for meter in meters], schema)

    best = _Best(start, bound)
    if schema.has_zero_point:
        for tried, valid in _shrunk_ranges(start, schema, param_dtype):
            best.offer(tried, error_of(tried), valid)
    else:
        ladder = ladder_of(schema, param_dtype)
        if schema.weight_scale_type in _ROW_TYPES:
            steps, best.error = meters[0].sweep(start, bound, ladder, floor)
        else:
            steps, best.error = sweep_each(start, bound, ladder, error_of)
        best.scales, best.changed = stepped(start, steps, ladder)
    if start.stored.element_size() > 1:
        for _ in range(_NUM_FITS):
            tried, valid = _least_squares(meters, schema, best.scales)
            best.offer(tried, error_of(tried), valid)
    scales = best.scales
    changed = best.changed
    if start.stored.dtype == torch.float8_e8m0fnu:
        return SearchResult(scales, scales, changed)
    gained = _with_gain(meters, schema, scales)
    errors = scope_sums([meter.errors(scales, gained) for meter in meters], schema)
    changed = changed & (errors < bound)
    return SearchResult(scales, gained.where(changed, start), changed)


def _with_gain(
    meters: Sequence[ScaleMeter], schema: WeightSchema, scales: GroupScales
) -> GroupScales:
    """Return the scales under which the codes of `scales` have <decoded, w> = <w, w>, rounded as they are stored.

    A scale that cannot be stored is that of `scales`.
    """
    products, _squares, powers = _fit_sums(meters, schema, scales)
    wanted = powers / products
    if scales.second is not None:
        wanted = wanted / scales.second.double()
    stored = rounded_scales(wanted.float(), scales.stored.dtype)
    found = GroupScales(stored, stored_values(stored), scales.zero, scales.second)
    return found.where(_is_usable(found, scales), scales)


def _least_squares(
    meters: Sequence[ScaleMeter], schema: WeightSchema, scales: GroupScales
) -> tuple[GroupScales, torch.Tensor]:
    """Return the least-squares scales of the codes of `scales`, and a mask of the usable ones."""
    products, squares, _powers = _fit_sums(meters, schema, scales)
    stored = (products / squares).float().to(scales.stored.dtype)
    found = GroupScales(stored, stored.float(), scales.zero, scales.second)
    valid = _is_usable(found, scales)
    return found.where(valid, scales), valid


def _fit_sums(
    meters: Sequence[ScaleMeter], schema: WeightSchema, scales: GroupScales
) -> list[torch.Tensor]:
    """Return the three sums of `ScaleMeter.fits` over all weights of each scale."""
    fits = [meter.fits(scales) for meter in meters]
    return [scope_sums(sums, schema) for sums in zip(*fits, strict=True)]


def scope_sums(of_stacks: Sequence[torch.Tensor], schema: WeightSchema) -> torch.Tensor:
    """Return the sums [E, R, G] over all weights of each scale: folded over rows, then matrix by matrix."""
    total, *rest = [_folded_rows(sums, schema) for sums in of_stacks]
    for sums in rest:
        total = total + sums
    return total


def _folded_rows(sums: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    num_experts, num_rows, num_groups = sums.shape
    if schema.weight_scale_type in _ROW_TYPES:
        return sums
    block_rows = num_rows
    if schema.weight_scale_type == "block":
        block_rows = schema.weight_scale_group_size_n
    blocks = sums.view(num_experts, num_rows // block_rows, block_rows, num_groups)
    return fold_sum(blocks.transpose(-1, -2).contiguous())
