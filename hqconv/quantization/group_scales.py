"""Scales of groups: as stored and as numbers, and those of round-to-nearest. The same bits on the CPU and on CUDA.

All divisions are tensor by tensor, because torch on CUDA divides by a Python number with a reciprocal.
Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hqconv.humming_ops.runtime import humming
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import scale_values
from hqconv.schemas.dtypes import CodeKind, torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

_FP8_MAX = {"float8e4m3": 448.0, "float8e5m2": 57344.0}
_INTEGER_REACH = {
    1: (0.499, 1.499)
}  # Humming's, up and down in units of the scale; others reach their largest codes
# Up to this group size Humming's kernel makes one pass over a float32 group, and nvcc then fuses the product
# `zero * -scale` into the subtraction that follows (seen on an H200 with CUDA 13.0; 16-bit sources never fuse).
FUSED_GROUP_SIZE = 128


@dataclass(frozen=True, eq=False)
class GroupScales:
    """Scales of a stack's groups, [E, R, G]: `stored`, the float32 `scale` it decodes to, and the `zero` point's value.

    zero: float32, None without zero points. second: the second scale, float32 [E, 1 or N, 1]; None if there is none.
    """

    stored: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    second: torch.Tensor | None

    def effective(self) -> torch.Tensor:
        """Return the product of scale and second scale."""
        return self.scale if self.second is None else self.scale * self.second

    def inverse(self) -> torch.Tensor:
        """Return the factor from weights to codes: the inverse of the decoded scale."""
        return self.effective().reciprocal()

    def lowest(self) -> torch.Tensor | None:
        """Return the value subtracted from weights first, if there are zero points."""
        return None if self.zero is None else self.zero * -self.scale

    def where(self, condition: torch.Tensor, other: GroupScales) -> GroupScales:
        """Return these scales where `condition` [E, R, G] holds, elsewhere the other ones."""
        stored = torch.where(condition, bits_of(self.stored), bits_of(other.stored)).view(
            self.stored.dtype
        )
        zero = self.zero
        if zero is not None and other.zero is not None:
            zero = torch.where(condition, zero, other.zero)
        return GroupScales(
            stored, torch.where(condition, self.scale, other.scale), zero, self.second
        )

    def tensors(self, schema: WeightSchema, param_dtype: str) -> dict[str, torch.Tensor]:
        """Return the tensors that store the scales: `weight_scale`, `zero_point`, `weight_scale_2`."""
        tensors = {
            "weight_scale": self.stored.flatten()
            if schema.weight_scale_type == "tensor"
            else self.stored
        }
        if self.zero is not None and schema.is_fp_zero_point:
            tensors["zero_point"] = self.zero.to(torch_dtype_of(param_dtype))
        elif self.zero is not None:
            columns = self.zero.to(torch.uint8).transpose(-1, -2).contiguous()
            packed = bit_codec.pack(columns.view(-1, columns.size(-1)), schema.num_bits)
            tensors["zero_point"] = (
                packed.view(*columns.shape[:-1], -1).transpose(-1, -2).contiguous()
            )
        if self.second is not None and schema.has_row_scale:
            tensors["weight_scale_2"] = self.second.squeeze(-1).to(torch_dtype_of(param_dtype))
        elif self.second is not None:
            tensors["weight_scale_2"] = self.second.flatten()
        return tensors


def bits_of(stored: torch.Tensor) -> torch.Tensor:
    """View 8-bit scales as bytes, of which torch has every operation; return wider ones as they are."""
    return stored.view(torch.uint8) if stored.element_size() == 1 else stored


def scales_of(tensors: Mapping[str, torch.Tensor], schema: WeightSchema) -> GroupScales:
    """Read the scales from a stack's tensors; `tensors` as in `QuantizedStack`."""
    stored, zero, second = (
        tensors["weight_scale"],
        tensors.get("zero_point"),
        tensors.get("weight_scale_2"),
    )
    stored = stored.view(-1, 1, 1) if schema.weight_scale_type == "tensor" else stored
    if zero is not None and zero.dtype == torch.int32:
        columns = zero.transpose(-1, -2).contiguous()
        flat = columns.view(-1, columns.size(-1))
        zero = (
            bit_codec.unpack(flat, schema.num_bits).view(*columns.shape[:-1], -1).transpose(-1, -2)
        )
    if second is not None:
        second = second.float().view(len(stored), -1, 1)
    return GroupScales(
        stored, stored_values(stored), None if zero is None else zero.float().contiguous(), second
    )


def stored_values(stored: torch.Tensor) -> torch.Tensor:
    """Return stored scales as float32; of e5m3 each byte is a finite number, as for Humming."""
    if stored.dtype == torch.uint8:
        values: torch.Tensor = humming().weight.decode_e5m3_scale(stored)
        return values
    return scale_values(stored)


def rounded_scales(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 values to a dtype of stored scales that has a fraction; 8-bit ones saturate."""
    if dtype == torch.uint8:
        stored: torch.Tensor = humming().weight.encode_e5m3_scale(
            values.nan_to_num(0.0).contiguous()
        )
        return stored
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


@dataclass(frozen=True, eq=False)
class NearestScales:
    """Scales of round-to-nearest, and how an encoder gets codes under them: round((w - lowest) * inverse).

    inverse: float32 [E, R, G]; of scales on one level the unrounded scale's. lowest: float64 [E, R, G], None without
    zero points. limit: magnitude at which small floats saturate; 0 where they need not, and for integers, which do by
    themselves.
    """

    scales: GroupScales
    inverse: torch.Tensor
    lowest: torch.Tensor | None = None
    limit: float = 0.0


def nearest_scales(
    highest: torch.Tensor,
    lowest: torch.Tensor,
    schema: WeightSchema,
    param_dtype: str,
    *,
    is_fused: bool = False,
) -> NearestScales:
    """Return the scales on one level of groups with these ranges, float32 [E, R, G], as `quant_weight.cuh` has them.

    is_fused: whether the product of an integer zero point and its scale is subtracted unrounded, see FUSED_GROUP_SIZE.
    """
    scale, zero, bound = unrounded_scales(highest, lowest, schema), None, None
    if schema.has_zero_point:
        zero, bound = -lowest / scale, lowest.double()
        if not schema.is_fp_zero_point:
            zero = zero.round()
            bound = zero.double() * -scale.double() if is_fused else (zero * -scale).double()
    dtype = schema.scale_dtype(param_dtype)
    if dtype == "float8e8m0":
        scale = ((scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)
        stored = (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
    elif dtype == "float8e5m3":
        stored = humming().weight.encode_e5m3_scale(scale)
    else:
        stored = scale.to(torch_dtype_of(dtype))
    if zero is not None and schema.is_fp_zero_point:
        zero = zero.to(torch_dtype_of(param_dtype)).float()
    return NearestScales(
        GroupScales(stored, stored_values(stored), zero, None), scale.reciprocal(), bound
    )


def unrounded_scales(
    highest: torch.Tensor, lowest: torch.Tensor, schema: WeightSchema
) -> torch.Tensor:
    """Return unrounded scales, float32, from each group's largest and smallest value, at least ±1e-30.

    Of symmetric integers Humming's, negative where the largest value is wider than the smallest, so that the widest
    value gets the code that is furthest from zero. Unsigned scale dtypes have no sign; under a scale per row, e8m0
    scales are the least ones under which no integer saturates; 1-bit integers have no positive code.
    """
    code, below = schema.code_type, lowest.abs()
    widest = torch.maximum(highest, below)
    if code.kind == CodeKind.ASYM_INT:
        return (highest - lowest) / constant(code.largest * 2 + 1, highest)
    if code.kind != CodeKind.SYM_INT:
        return widest / constant(code.largest, widest)
    if schema.bs_dtype == "float8e8m0" and schema.has_row_scale and code.num_bits > 1:
        most, least = constant(code.largest, highest), constant(code.largest + 1, below)
        return torch.maximum(below / least, highest / most)
    narrowest = torch.minimum(highest, below)
    up, down = _INTEGER_REACH.get(code.num_bits, (code.largest, code.largest + 1))
    wide = (widest.double() / constant(down, widest, torch.float64)).float()
    narrow = (narrowest.double() / constant(up, widest, torch.float64)).float()
    scale = torch.maximum(wide, narrow)
    return (
        scale
        if schema.bs_dtype in ("float8e8m0", "float8e5m3")
        else torch.where(highest > below, -scale, scale)
    )


def constant(value: float, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a number as a tensor of no dimension, in the dtype (unless one is named) and on the device of another one.

    `Tensor.new_tensor` would copy it from the host, and wait for the GPU.
    """
    return torch.full((), value, dtype=dtype or like.dtype, device=like.device)


# --- Two levels: 8-bit group scales under a second scale, float32 per matrix or in 16 bits per row.


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
            torch.where(s.view(*p.shape, -1).abs().amax(-1) > 0, p, torch.zeros_like(p)).amax(
                (1, 2)
            )
            for s, p in zip(stacks, powers, strict=True)
        ]
    ).amax(0)
    second = (largest / top).clamp_min(2.0**-100).reshape(-1, 1, 1)  # its inverse stays finite
    return [GivenScales((p / second).clamp(lowest, top).to(fp8), second) for p in powers]


def two_level_scales(
    highest: torch.Tensor,
    lowest: torch.Tensor,
    schema: WeightSchema,
    param_dtype: str,
    amax: torch.Tensor | None,
    given: GivenScales | None = None,
) -> NearestScales:
    """Return 8-bit scales under a second scale, of groups with these ranges, float32 [E, N, G].

    `amax`: the experts' shared maxima [E, 1, 1], for a second scale per matrix. Codes are chosen for the stored scales;
    a group whose scales' product is 0 or NaN gets codes of 0.
    """
    code = schema.code_type
    if given is not None:
        stored, second = given.group, given.second
    else:
        scale = unrounded_scales(highest, lowest, schema)
        stored, second = _two_levels(
            scale, schema, param_dtype, None if schema.has_row_scale else amax
        )
    scales = GroupScales(stored, stored_values(stored), None, second)
    effective = scales.effective()
    inverse = torch.where(effective.abs() > 0, effective.reciprocal(), torch.zeros_like(effective))
    return NearestScales(
        scales, inverse, limit=code.largest if code.kind == CodeKind.FLOAT else 0.0
    )


def scales_under(
    second: torch.Tensor,
    highest: torch.Tensor,
    lowest: torch.Tensor,
    schema: WeightSchema,
    param_dtype: str,
) -> GroupScales:
    """Return 8-bit scales under given second scales, of groups with these ranges, float32 [E, N, G]."""
    scale = unrounded_scales(highest, lowest, schema)
    if schema.bs_dtype == "float8e8m0":
        stored = _powers(scale, second, param_dtype)
    else:
        limit = _FP8_MAX[schema.bs_dtype or ""]
        stored = (scale / second).clamp(-limit, limit).to(torch_dtype_of(schema.bs_dtype or ""))
    return GroupScales(stored, stored_values(stored), None, second)


def _two_levels(
    scale: torch.Tensor, schema: WeightSchema, param_dtype: str, amax: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stored group scales [E, N, G], and second scales float32: [E, 1, 1] for maxima `amax`, else [E, N, 1]."""
    code = schema.code_type
    if schema.bs_dtype == "float8e8m0":
        return _powers_under_rows(scale, code.largest, param_dtype)
    scale_max = _FP8_MAX[schema.bs_dtype or ""]
    if amax is None:
        kept = (scale.abs().amax(-1, keepdim=True) / constant(scale_max, scale)).to(
            torch_dtype_of(param_dtype)
        )
        tiny = torch.finfo(kept.dtype).tiny
        second = torch.where(kept < tiny, torch.full_like(kept, tiny), kept).float()
    else:
        reach = (
            _INTEGER_REACH.get(code.num_bits, (code.largest,))[0]
            if schema.is_integer
            else code.largest
        )
        second = amax / constant(reach * scale_max, scale)
    return (scale / second).clamp(-scale_max, scale_max).to(
        torch_dtype_of(schema.bs_dtype or "")
    ), second


def _powers_under_rows(
    scale: torch.Tensor, largest: float, param_dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e8m0 scales [E, N, G] under row scales [E, N, 1] that the parameter dtype holds; no product below `scale`.

    A row's scale is the fraction of its largest group scale, from 1 to 2, rounded up: so this group's scale is exact
    but for the rounding. In float16, where the kernel keeps exponents from -14 to 15 only, it takes the row's size
    too: the largest code of the largest group stands for 1 to 4 under it.
    """
    is_wide = param_dtype == "bfloat16"
    dropped = 16 if is_wide else 13  # bits of float32's fraction that the dtype lacks
    top = scale.amax(-1, keepdim=True).contiguous()
    fraction = (
        ((top.view(torch.int32) & 0x007FFFFF | 0x3F800000) + ((1 << dropped) - 1))
        >> dropped
        << dropped
    )
    fraction = torch.where(
        fraction == 0x40000000, 0x3F800000, fraction
    )  # 2 is 1 with the next exponents
    if not is_wide:
        reach = math.floor(
            math.log2(min(max(largest, 1.0), 256.0))
        )  # e5m2's would leave no exponents below
        size = _exponents(top, fraction.view(torch.float32)) - 127 + reach
        fraction = fraction + (size.clamp(-14, 15) << 23)
    row = fraction.view(torch.float32)
    return _powers(scale, row, param_dtype), row.to(torch_dtype_of(param_dtype)).float()


def _powers(scale: torch.Tensor, row: torch.Tensor, param_dtype: str) -> torch.Tensor:
    """Return the e8m0 scales of scale / row, rounded up, as far as the kernel keeps them under a scale per row."""
    least, most = (1, 254) if param_dtype == "bfloat16" else (127 - 14, 127 + 15)
    return _exponents(scale, row).clamp(least, most).to(torch.uint8).view(torch.float8_e8m0fnu)


def _exponents(scale: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return the e8m0 bytes of scale / row, rounded up, as int32."""
    return ((scale / row).view(torch.int32) + 0x007FFFFF) >> 23
