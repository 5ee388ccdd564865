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
from hqconv.quantization.bit_codec import bits_of
from hqconv.quantization.coded_matrix import scale_values
from hqconv.schemas.tensors import CodeKind, CodeType, torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

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

    def where(self, condition: torch.Tensor, alternative: GroupScales) -> GroupScales:
        """Return these scales where `condition` [E, R, G] holds, elsewhere the alternative ones."""
        stored = torch.where(condition, bits_of(self.stored), bits_of(alternative.stored))
        zero = self.zero
        if zero is not None and alternative.zero is not None:
            zero = torch.where(condition, zero, alternative.zero)
        scale = torch.where(condition, self.scale, alternative.scale)
        return GroupScales(stored.view(self.stored.dtype), scale, zero, self.second)

    def tensors(self, schema: WeightSchema, param_dtype: str) -> dict[str, torch.Tensor]:
        """Return the tensors that store the scales: `weight_scale`, `zero_point`, `weight_scale_2`."""
        is_flat = schema.weight_scale_type == "tensor"
        tensors = {"weight_scale": self.stored.flatten() if is_flat else self.stored}
        if self.zero is not None and schema.is_fp_zero_point:
            tensors["zero_point"] = self.zero.to(torch_dtype_of(param_dtype))
        elif self.zero is not None:
            columns = self.zero.to(torch.uint8).transpose(-1, -2)
            packed = bit_codec.pack(columns.flatten(0, -2), schema.num_bits)
            columns = packed.view(*columns.shape[:-1], -1)
            tensors["zero_point"] = columns.transpose(-1, -2).contiguous()
        if self.second is not None and schema.has_row_scale:
            tensors["weight_scale_2"] = self.second.squeeze(-1).to(torch_dtype_of(param_dtype))
        elif self.second is not None:
            tensors["weight_scale_2"] = self.second.flatten()
        return tensors


def scales_of(tensors: Mapping[str, torch.Tensor], schema: WeightSchema) -> GroupScales:
    """Read the scales from a stack's tensors; `tensors` as in `QuantizedStack`."""
    stored = tensors["weight_scale"]
    if schema.weight_scale_type == "tensor":
        stored = stored.view(-1, 1, 1)
    zero = tensors.get("zero_point")
    if zero is not None and zero.dtype == torch.int32:
        columns = zero.transpose(-1, -2).contiguous()
        codes = bit_codec.unpack(columns.flatten(0, -2), schema.num_bits)
        zero = codes.view(*columns.shape[:-1], -1).transpose(-1, -2)
    if zero is not None:
        zero = zero.float().contiguous()
    second = tensors.get("weight_scale_2")
    if second is not None:
        second = second.float().view(len(stored), -1, 1)
    return GroupScales(stored, stored_values(stored), zero, second)


def stored_values(stored: torch.Tensor) -> torch.Tensor:
    """Return stored scales as float32; of e5m3 each byte is a finite number, as for Humming."""
    if stored.dtype == torch.uint8:
        values: torch.Tensor = humming().weight.decode_e5m3_scale(stored)
        return values
    return scale_values(stored)


def rounded_scales(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 values to a dtype of stored scales, for e8m0 powers of two; 8-bit ones saturate."""
    if dtype == torch.uint8:
        numbers = values.nan_to_num(0.0).contiguous()
        stored: torch.Tensor = humming().weight.encode_e5m3_scale(numbers)
        return stored
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def stored_range(dtype: torch.dtype) -> tuple[int, float, float]:
    """Return a dtype of stored scales as low bits of float32 that it lacks, and its least and largest normal number."""
    if dtype == torch.uint8:
        return 20, 2.0**-14, 114688.0  # e5m3
    info = torch.finfo(dtype)
    return 23 + round(math.log2(info.eps)), info.tiny, info.max


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
    scale = unrounded_scales(highest, lowest, schema)
    zero = None
    bound = None
    if schema.has_zero_point:
        zero = -lowest / scale
        bound = lowest.double()
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
    code = schema.code_type
    below = lowest.abs()
    widest = torch.maximum(highest, below)
    if code.kind == CodeKind.ASYM_INT:
        return (highest - lowest) / constant(code.largest * 2 + 1, highest)
    if code.kind != CodeKind.SYM_INT:
        return widest / constant(code.largest, widest)
    if schema.bs_dtype == "float8e8m0" and schema.has_row_scale and code.num_bits > 1:
        most = constant(code.largest, highest)
        least = constant(code.largest + 1, below)
        return torch.maximum(below / least, highest / most)
    narrowest = torch.minimum(highest, below)
    up, down = _integer_reach(code)
    wide = (widest.double() / constant(down, widest, torch.float64)).float()
    narrow = (narrowest.double() / constant(up, widest, torch.float64)).float()
    scale = torch.maximum(wide, narrow)
    if schema.bs_dtype in ("float8e8m0", "float8e5m3"):
        return scale
    return torch.where(highest > below, -scale, scale)


def _integer_reach(code: CodeType) -> tuple[float, float]:
    """Return how far symmetric integers reach up and down in units of the scale, as Humming has it."""
    return (0.499, 1.499) if code.num_bits == 1 else (code.largest, code.largest + 1)


def saturation(schema: WeightSchema) -> float:
    """Return the magnitude at which small floats saturate; 0 for integers, which do by themselves."""
    return schema.code_type.largest if schema.code_type.kind == CodeKind.FLOAT else 0.0


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
    fp8 = _fp8(schema)
    top = 2.0 ** math.floor(math.log2(torch.finfo(fp8).max))
    lowest = torch.finfo(fp8).smallest_normal * torch.finfo(fp8).eps
    maxima = []
    for stack, scales in zip(stacks, powers, strict=True):
        has_weights = stack.view(*scales.shape, -1).abs().amax(-1) > 0
        maxima.append(torch.where(has_weights, scales, 0.0).amax((1, 2)))
    largest = torch.stack(maxima).amax(0)
    second = (largest / top).clamp_min(2.0**-100).reshape(-1, 1, 1)  # its inverse stays finite
    return [GivenScales((scales / second).clamp(lowest, top).to(fp8), second) for scales in powers]


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
    if given is not None:
        stored = given.group
        second = given.second
    else:
        scale = unrounded_scales(highest, lowest, schema)
        second = _second_scales(scale, schema, param_dtype, amax)
        stored = _stored_under(scale, second, schema, param_dtype)
    scales = GroupScales(stored, stored_values(stored), None, second)
    effective = scales.effective()
    inverse = torch.where(effective.abs() > 0, effective.reciprocal(), 0.0)
    return NearestScales(scales, inverse, limit=saturation(schema))


def _second_scales(
    scale: torch.Tensor, schema: WeightSchema, param_dtype: str, amax: torch.Tensor | None
) -> torch.Tensor:
    """Return second scales above unrounded ones, float32: [E, N, 1] per row, else [E, 1, 1] for the maxima `amax`."""
    code = schema.code_type
    if schema.bs_dtype == "float8e8m0":
        return _row_scales_of_powers(scale, code.largest, param_dtype)
    scale_max = torch.finfo(_fp8(schema)).max
    if schema.has_row_scale:
        row = scale.abs().amax(-1, keepdim=True) / constant(scale_max, scale)
        row = row.to(torch_dtype_of(param_dtype))
        return row.clamp_min(torch.finfo(row.dtype).tiny).float()
    assert amax is not None
    reach = _integer_reach(code)[0] if schema.is_integer else code.largest
    return amax / constant(reach * scale_max, scale)


def _stored_under(
    scale: torch.Tensor, second: torch.Tensor, schema: WeightSchema, param_dtype: str
) -> torch.Tensor:
    """Return the 8-bit scales that stand for unrounded ones under second scales."""
    # rounded up, as far as the kernel keeps them under a scale per row
    if schema.bs_dtype == "float8e8m0":
        least, most = (1, 254) if param_dtype == "bfloat16" else (127 - 14, 127 + 15)
        exponents = _exponents(scale, second).clamp(least, most)
        return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    limit = torch.finfo(_fp8(schema)).max
    return (scale / second).clamp(-limit, limit).to(_fp8(schema))


def _fp8(schema: WeightSchema) -> torch.dtype:
    return torch_dtype_of(schema.bs_dtype or "")


def _row_scales_of_powers(scale: torch.Tensor, largest: float, param_dtype: str) -> torch.Tensor:
    """Return row scales [E, N, 1] above e8m0 scales, which the parameter dtype holds.

    A row's scale is the fraction of its largest group scale, from 1 to 2, rounded up: so this group's scale is exact
    but for the rounding. In float16, where the kernel keeps exponents from -14 to 15 only, it takes the row's size
    too: the largest code of the largest group stands for 1 to 4 under it.
    """
    is_wide = param_dtype == "bfloat16"
    dropped = 16 if is_wide else 13  # bits of float32's fraction that the dtype lacks
    top = scale.amax(-1, keepdim=True).contiguous()
    fraction = top.view(torch.int32) & 0x007FFFFF | 0x3F800000
    fraction = (fraction + ((1 << dropped) - 1)) >> dropped << dropped
    # 2 is 1 with the next exponents.
    fraction = torch.where(fraction == 0x40000000, 0x3F800000, fraction)
    if not is_wide:
        # e5m2's reach would leave no exponents below.
        reach = math.floor(math.log2(min(max(largest, 1.0), 256.0)))
        size = _exponents(top, fraction.view(torch.float32)) - 127 + reach
        fraction = fraction + (size.clamp(-14, 15) << 23)
    return fraction.view(torch.float32)


def _exponents(scale: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return the e8m0 bytes of scale / row, rounded up, as int32."""
    return ((scale / row).view(torch.int32) + 0x007FFFFF) >> 23
