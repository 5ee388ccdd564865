"""Scales on two levels: 8-bit group scales under a second scale, float32 per matrix or in 16 bits per row.

Legend: E experts, N output rows, K input columns, G groups along K. The same bits on the CPU and on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hqconv.cpu_loops import arithmetic
from hqconv.kernel_layout import cpu_ops
from hqconv.quantization.coded_matrix import scale_values
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

_FP8_MAX = {"float8e4m3": 448.0, "float8e5m2": 57344.0}


@dataclass(frozen=True, eq=False)
class GivenScales:
    """Group scales to take: stored fp8 [E, N, G], and the second scale float32 [E, 1, 1]."""

    group: torch.Tensor
    second: torch.Tensor


def split_powers(
    stacks: Sequence[torch.Tensor], powers: Sequence[torch.Tensor], schema: WeightSchema
) -> list[GivenScales]:
    """Split powers of two into fp8 scales and one power of two above them, the same for all matrices of an expert.

    The largest scale of a group that is not zero becomes fp8's largest power of two; so scales down to 2**-17 of it
    are exact, and smaller ones become that.
    """
    fp8 = torch_dtype_of(schema.bs_dtype or "")
    top = 2.0 ** math.floor(math.log2(_FP8_MAX[schema.bs_dtype or ""]))
    lowest = torch.finfo(fp8).smallest_normal * torch.finfo(fp8).eps
    largest = torch.stack(
        [
            torch.where(s.view(*p.shape, -1).abs().amax(-1) > 0, p, torch.zeros_like(p)).amax((1, 2))
            for s, p in zip(stacks, powers, strict=True)
        ]
    ).amax(0)
    second = (largest / top).clamp_min(2.0**-100).reshape(-1, 1, 1)  # its inverse stays finite
    return [GivenScales((p / second).clamp(lowest, top).to(fp8), second) for p in powers]


@dataclass(frozen=True, eq=False)
class TwoLevelScales:
    """Scales on two levels, stored and as numbers.

    group: stored fp8 or e8m0 scales [E, N, G]. second: stored second scales, float32 [E], or [E, N] in the parameter
    dtype. second_value: float32 [E, 1 or N, 1]. limit: largest code of a float type, which saturates; 0 for the other
    types, whose encoders saturate by themselves.
    """

    group: torch.Tensor
    second: torch.Tensor
    second_value: torch.Tensor
    limit: float

    @property
    def group_value(self) -> torch.Tensor:
        """The group scales as float32."""
        return scale_values(self.group)

    def inverse(self) -> torch.Tensor:
        """Return the factor from weights to codes, float32 [E, N, G]; 0 where the scales' product is 0 or NaN."""
        effective = self.group_value * self.second_value
        return torch.where(effective.abs() > 0, effective.reciprocal(), torch.zeros_like(effective))


def group_scales(highest: torch.Tensor, lowest: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """Return unrounded group scales, float32, from each group's largest and smallest value, at least ±1e-30.

    Of symmetric integers Humming's, negative where the largest value is wider than the smallest, so that the widest
    value gets the code that is furthest from zero. e8m0 has no sign: there, the least scale under which no integer
    saturates; 1-bit integers have no positive code.
    """
    kind, bits, exponent, mantissa = cpu_ops.parse_dtype(schema.b_dtype)
    below = lowest.abs()
    widest = torch.maximum(highest, below)
    largest = arithmetic.largest_value(kind, bits, exponent, mantissa)
    if kind != arithmetic.SYM_INT:
        return widest / constant(largest, widest)
    if schema.bs_dtype == "float8e8m0" and bits > 1:
        return torch.maximum(below / constant(largest + 1, below), highest / constant(largest, highest))
    narrowest = torch.minimum(highest, below)
    up, down = _INTEGER_REACH.get(bits, (largest, largest + 1))
    wide = (widest.double() / _double(widest, down)).float()
    narrow = (narrowest.double() / _double(widest, up)).float()
    scale = torch.maximum(wide, narrow)
    return scale if schema.bs_dtype == "float8e8m0" else torch.where(highest > below, -scale, scale)


_INTEGER_REACH = {1: (0.499, 1.499)}  # Humming's, up and down in units of the scale; others reach their largest codes


def constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return a number as a tensor of no dimension, in the dtype and on the device of another one.

    `Tensor.new_tensor` would copy it from the host, and wait for the GPU.
    """
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _double(like: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float64, device=like.device)


def two_level(
    scale: torch.Tensor, schema: WeightSchema, param_dtype: str, amax: torch.Tensor | None, given: GivenScales | None
) -> TwoLevelScales:
    """Round group scales to 8 bits under a second scale.

    `scale`: unrounded group scales [E, N, G] of `group_scales`, on any device; `amax`: the shared maximum [E, 1, 1], or
    None for a second scale per row. All divisions are tensor by tensor, because torch on CUDA divides by a Python
    number with a reciprocal.
    """
    kind, bits, exponent, mantissa = cpu_ops.parse_dtype(schema.b_dtype)
    largest = arithmetic.largest_value(kind, bits, exponent, mantissa)
    limit = largest if kind == arithmetic.FLOAT else 0.0
    if given is not None:
        return TwoLevelScales(given.group, given.second.flatten(), given.second, limit)
    if schema.bs_dtype == "float8e8m0":
        stored, kept = _powers_under_rows(scale, largest, param_dtype)
        return TwoLevelScales(stored, kept.squeeze(-1), kept.float(), limit)
    scale_max = _FP8_MAX[schema.bs_dtype or ""]
    if amax is None:
        second = scale.abs().amax(-1, keepdim=True) / constant(scale_max, scale)
        kept = second.to(torch_dtype_of(param_dtype))
        tiny = torch.finfo(kept.dtype).tiny
        kept = torch.where(kept < tiny, torch.full_like(kept, tiny), kept)
        second, stored_second = kept.float(), kept.squeeze(-1)
    else:
        reach = _INTEGER_REACH[bits][0] if kind == arithmetic.SYM_INT and bits in _INTEGER_REACH else largest
        second = amax / constant(reach * scale_max, scale)
        stored_second = second.flatten()
    stored = (scale / second).clamp(-scale_max, scale_max).to(torch_dtype_of(schema.bs_dtype or ""))
    return TwoLevelScales(stored, stored_second, second, limit)


def _powers_under_rows(scale: torch.Tensor, largest: float, param_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e8m0 scales [E, N, G] under row scales [E, N, 1] in the parameter dtype, no product below `scale`.

    A row's scale is the fraction of its largest group scale, from 1 to 2, rounded up: so this group's scale is exact
    but for the rounding. In float16, where the kernel keeps exponents from -14 to 15 only, it takes the row's size
    too: the largest code of the largest group stands for 1 to 4 under it.
    """
    is_wide = param_dtype == "bfloat16"
    dropped = 16 if is_wide else 13  # bits of float32's fraction that the dtype lacks
    top = scale.amax(-1, keepdim=True).contiguous()
    fraction = ((top.view(torch.int32) & 0x007FFFFF | 0x3F800000) + ((1 << dropped) - 1)) >> dropped << dropped
    fraction = torch.where(fraction == 0x40000000, 0x3F800000, fraction)  # 2 is 1 with the next exponents
    if not is_wide:
        reach = math.floor(math.log2(min(max(largest, 1.0), 256.0)))  # e5m2's would leave no exponents below
        size = _exponents(top, fraction.view(torch.float32)) - 127 + reach
        fraction = fraction + (size.clamp(-14, 15) << 23)
    row = fraction.view(torch.float32)
    least, most = (1, 254) if is_wide else (127 - 14, 127 + 15)
    stored = _exponents(scale, row).clamp(least, most).to(torch.uint8).view(torch.float8_e8m0fnu)
    return stored, row.to(torch_dtype_of(param_dtype))


def _exponents(scale: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return the e8m0 bytes of scale / row, rounded up, as int32."""
    return ((scale / row).view(torch.int32) + 0x007FFFFF) >> 23
