"""Scales that might encode a group better than round-to-nearest's: as they are stored, and as they decode.

Everything here is torch, elementwise and IEEE exact, so that a GPU and the CPU try the very same scales. Whoever
changes what is tried raises `planning.encoding.SEARCH_VERSION`.
Legend: E experts, R rows of scales (output rows, blocks of them, or 1), G groups along K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hqconv.humming_layout.runtime import humming
from hqconv.quantization import bit_codec
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

_E8M0_STEPS = (-1,)
_FP8_STEPS = (-6, -5, -4, -3, -2, -1, 1, 2, 3)
_FLOAT_STEPS = tuple(j / 16 for j in (15, 17, 14, 18, 13, 12, 11, 10, 9, 8))
_INT8_STEPS = tuple(1 + j / 128 for j in (-1, 1, -2, 2))
_SHRINKS = (1.0, 0.9375, 0.875, 0.8125, 0.75)  # of the upper and the lower end of a range with a zero point
_HALF_RANGE = 29  # so many powers of two below the largest are left of e8m0 scales in float16
_TOP = {
    torch.float8_e4m3fn: 126,
    torch.float8_e5m2: 123,
    torch.uint8: 254,
}  # the largest finite number's byte


@dataclass(frozen=True, eq=False)
class CandidateScales:
    """Group scales [E, R, G]: `stored`, the float32 `scale` it decodes to, and the `zero` point's value, if any.

    second: what decoded values are multiplied by besides, float32 [E, 1 or R, 1]; a search leaves it as it is.
    """

    stored: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    second: torch.Tensor | None

    def inverse(self) -> torch.Tensor:
        """What weights are multiplied by to become codes: of the scale as it decodes."""
        return (self.scale if self.second is None else self.scale * self.second).reciprocal()

    def lowest(self) -> torch.Tensor | None:
        """What is subtracted from weights before, where there are zero points."""
        return None if self.zero is None else self.zero * -self.scale

    def where(self, condition: torch.Tensor, other: CandidateScales) -> CandidateScales:
        """These scales where `condition` [E, R, G] holds, elsewhere the other's."""
        stored = torch.where(condition, _bits(self.stored), _bits(other.stored)).view(self.stored.dtype)
        zero = self.zero
        if zero is not None and other.zero is not None:
            zero = torch.where(condition, zero, other.zero)
        return CandidateScales(stored, torch.where(condition, self.scale, other.scale), zero, self.second)


def _bits(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.uint8) if stored.element_size() == 1 else stored


def scales_of(tensors: dict[str, torch.Tensor], schema: WeightSchema) -> CandidateScales:
    """What a stack's tensors say of its groups; `tensors` as in `QuantizedStack`."""
    stored, second = tensors["weight_scale"], tensors.get("weight_scale_2")
    stored = stored.view(-1, 1, 1) if schema.weight_scale_type == "tensor" else stored
    zero = tensors.get("zero_point")
    if zero is not None and zero.dtype == torch.int32:
        columns = zero.transpose(-1, -2).contiguous()
        flat = columns.view(-1, columns.size(-1))
        zero = bit_codec.unpack(flat, schema.num_bits).view(*columns.shape[:-1], -1).transpose(-1, -2)
    if second is not None:
        second = second.float().view(len(stored), -1, 1)
    return CandidateScales(
        stored, _decoded(stored), None if zero is None else zero.float().contiguous(), second
    )


def tensors_of(scales: CandidateScales, schema: WeightSchema, param_dtype: str) -> dict[str, torch.Tensor]:
    """The tensors that hold these scales and zero points, without the second scale."""
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
    """Float32 values of stored scales."""
    if stored.dtype == torch.uint8:
        values: torch.Tensor = humming().weight.decode_e5m3_scale(stored)
        return values
    if stored.dtype == torch.float8_e8m0fnu:  # no byte here is 0 or 255
        return (stored.view(torch.uint8).int() << 23).view(torch.float32)
    return stored.float()


def candidates(
    start: CandidateScales, schema: WeightSchema, param_dtype: str, floor: torch.Tensor | None
) -> Iterator[tuple[CandidateScales, torch.Tensor]]:
    """Scales to try instead of `start`, round-to-nearest's, each with a mask of the groups that have them.

    Where it does not hold, the scales are start's. `floor`: the least byte of e8m0 scales, [E, 1, 1].
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
        yield from _shifted(start, schema, param_dtype)
    elif start.stored.dtype == torch.float8_e8m0fnu:
        byte = start.stored.view(torch.uint8).int()
        for step in _E8M0_STEPS:
            least = torch.ones_like(byte) if floor is None else floor.clamp_min(1)
            moved = torch.where((byte + step) >= least, byte + step, byte)
            yield _like(start, moved.to(torch.uint8).view(start.stored.dtype))
    elif start.stored.element_size() == 1:
        yield from _stepped(start)
    else:
        for factor in _factors(schema):
            scaled = start.scale * start.scale.new_tensor(factor)
            yield _like(start, scaled.to(start.stored.dtype))


def _like(start: CandidateScales, stored: torch.Tensor) -> CandidateScales:
    return CandidateScales(stored, _decoded(stored), start.zero, start.second)


def _stepped(start: CandidateScales) -> Iterator[CandidateScales]:
    """8-bit floats some steps away; a scale that was rounded to 0 has none below."""
    byte = _bits(start.stored).int()
    sign = byte & (0 if start.stored.dtype == torch.uint8 else 0x80)
    top = _TOP[start.stored.dtype]
    for step in _FP8_STEPS:
        moved = ((byte - sign) + step).clamp(1, top)
        moved = torch.where((byte - sign) <= top, moved, byte - sign)  # NaN and infinity stay
        yield _like(start, (moved | sign).to(torch.uint8).view(start.stored.dtype))


def _factors(schema: WeightSchema) -> tuple[float, ...]:
    """What scales of 16 or 32 bits are multiplied by; 1 is the stored scale with its own inverse."""
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


def _shifted(start: CandidateScales, schema: WeightSchema, param_dtype: str) -> Iterator[CandidateScales]:
    """Ranges whose ends are drawn in, with the zero point that goes with them."""
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


def least_byte(stored: list[torch.Tensor], param_dtype: str) -> torch.Tensor | None:
    """Below which e8m0 scales would be cut off in float16, whose range the largest of an expert decides: [E, 1, 1]."""
    if stored[0].dtype != torch.float8_e8m0fnu or param_dtype != "float16":
        return None
    largest = torch.stack([one.view(torch.uint8).flatten(1).amax(1) for one in stored]).amax(0)
    return (largest.int() - _HALF_RANGE).view(-1, 1, 1)
