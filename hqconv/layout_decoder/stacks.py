"""The inverse of the kernel layout by array operations: many experts at once, on the device that holds their bytes.

A twin of `hqconv.layout_decoder.read`, which has loops and words for one expert: this one says only *which* experts
hold something that no conversion writes. Like it, it shares no code with `hqconv.backends`. A test holds each to the
other bit for bit.

Shape legend: E experts, N rows, K columns, G groups along K, T tiles along K, B chunks along N, r row of eight, c chunk
of a block or column of a lane. Floats are bit patterns: uint8, int16 or int32 by their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hqconv.layout_decoder.fragments import code_pieces, is_by_units, unit_pieces, unit_places
from hqconv.layout_decoder.layout_form import LayoutForm
from hqconv.layout_decoder.numbers import FUSED_INT8, PADDED_E5M0
from hqconv.layout_decoder.stack_scales import (
    Tensors,
    float_values,
    outside,
    unpack_fields,
    unpack_scale,
    unpack_zero_point,
    unpermute_channels,
)


@dataclass(frozen=True, eq=False)
class MatrixStack:
    """Matrices of E experts in logical order, padding removed; `artifact.expert_reader.ExpertMatrix` with E in front.

    codes uint8 [E, N, K]; scale [E, N, G], [E, N, 1] (channel), [E, N/bn, K/bk] (block) or [E, 1, 1] (tensor), its
    dtype, and what the kernels take it for, float32; zero_point uint8 codes or int16 patterns [E, N, G | 1]; scale_2
    [E, 1] or [E, N]; bias [E, N]; flushed bool [E, N, G]: the kernels take this e8m0 scale for zero, and the original
    was at most what `scale` says. wrong bool [E]: the expert holds what no conversion writes.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    scale_dtype: str
    scale_value: torch.Tensor
    wrong: torch.Tensor
    zero_point: torch.Tensor | None = None
    scale_2: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    flushed: torch.Tensor | None = None


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bit patterns."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def read_stack(form: LayoutForm, bits: Tensors) -> MatrixStack:
    """Kernel tensors [E, …] as the GEMM kernels read them. Shapes and widths must be those of the form."""
    rows, columns = form.shape
    zero, zero_padded, wrong = unpack_zero_point(form, bits)
    codes = _unpack_codes(form, bits["weight"], zero_padded)
    wrong |= outside(codes, rows, columns)
    channels = {}
    for name in ("bias", "weight_scale_2"):
        if name in bits and bits[name].ndim == 2:
            values = unpermute_channels(bits[name])
            wrong |= outside(values.unsqueeze(2), rows, 1)
            channels[name] = values[:, :rows]
    scale_2 = channels.get("weight_scale_2", bits.get("weight_scale_2"))
    scale_2 = scale_2.unsqueeze(1) if scale_2 is not None and scale_2.ndim == 1 else scale_2
    scale, wrong_scale = unpack_scale(form, bits["weight_scale"], scale_2)
    stack = MatrixStack(
        codes=codes[:, :rows, :columns],
        scale=scale,
        scale_dtype=form.scale_dtype,
        scale_value=float_values(scale, form.scale_dtype),
        wrong=wrong | wrong_scale,
        zero_point=zero,
        scale_2=scale_2,
        bias=channels.get("bias"),
    )
    return _as_e8m0(stack, form) if form.is_fused or form.scale_dtype == PADDED_E5M0 else stack


# --- codes -------------------------------------------------------------------------------------------------


def _unpack_codes(form: LayoutForm, words: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """uint8 [E, N, K], padding included."""
    num_experts, (n, k) = words.size(0), form.padded_shape
    if form.order == "fragments":
        codes = _of_fragments(form, words)
    else:
        if form.order == "chunks":  # every row's first 16 bytes come first
            words = words.view(num_experts, -1, n, 4).transpose(1, 2)
        codes = unpack_fields(words.reshape(num_experts, n, -1), form.num_bits)
    if form.is_signed:
        codes = codes ^ (1 << (form.num_bits - 1))
    codes = codes.view(num_experts, n, k)
    return _restore_centred(form, codes, zero) if form.is_centred else codes


def _of_fragments(form: LayoutForm, words: torch.Tensor) -> torch.Tensor:
    """For 4 a rows and 256 / a columns there are `num_bits` words for each of 32 lanes (4 r + c), see `fragments`."""
    num_experts, (n, k), a = words.size(0), form.padded_shape, form.activation_bits
    tiles, chunks, per_unit = k * a // 256, n // (4 * a), 32 // a
    if form.is_packed_k:  # 16 rows by two tiles
        regions = words.view(num_experts, tiles // 2, chunks, 2, 32, 2, form.num_bits // 2)
        words = regions.permute(0, 1, 5, 2, 4, 3, 6)
    lanes = words.reshape(num_experts, tiles, chunks, 8, 4, form.num_bits)  # E, T, B, r, c
    shape = (
        num_experts,
        chunks,
        a // 2,
        8,
        tiles,
        2,
        4,
        per_unit,
    )  # E, B, 8 rows, r, T, half, c, code of a unit
    out = torch.empty(shape, dtype=torch.uint8, device=words.device)
    places = unit_places(form).tolist()
    if not is_by_units(form):
        for index, piece in enumerate(code_pieces(form).tolist()):
            row, half = places[index // per_unit]
            out[:, :, row, :, :, half, :, index % per_unit] = (
                _field(lanes, piece).byte().permute(0, 2, 3, 1, 4)
            )
        return out
    wide = out.flatten(6).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[per_unit])
    for piece, (row, half) in zip(unit_pieces(form).tolist(), places, strict=True):
        codes = _one_a_byte(_field(lanes, piece), a)
        wide[:, :, row, :, :, half] = codes.to(wide.dtype).permute(0, 2, 3, 1, 4)
    return out


def _field(lanes: torch.Tensor, piece: Sequence[int]) -> torch.Tensor:
    """One of `fragments`' pieces of every lane's words, int32 [E, T, B, r, c]."""
    first, shift, mask, left, second, shift_2, mask_2 = piece
    value = (lanes[..., first] >> shift) & mask  # a mask ends where the sign's copies begin
    return (value << left) | ((lanes[..., second] >> shift_2) & mask_2) if left else value


def _one_a_byte(units: torch.Tensor, activation_bits: int) -> torch.Tensor:
    """Codes that are `activation_bits` apart, in a byte each."""
    if activation_bits == 16:
        return (units | (units >> 8)) & 0xFFFF
    if activation_bits == 8:
        return units
    wide = units.long()
    for step, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
        wide = (wide | (wide << step)) & mask
    return wide


def _restore_centred(form: LayoutForm, codes: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Sign-and-magnitude codes around a zero point as plain codes; uint8 wraps around."""
    largest = (1 << form.num_bits) - 1
    if zero is None:
        zero = codes.new_full((len(codes), codes.size(1), 1), 1 << (form.num_bits - 1))
    grouped, zero = codes.view(*codes.shape[:2], zero.size(2), -1), zero.unsqueeze(3)
    return torch.where(grouped <= largest - zero, grouped + zero, largest - grouped).view_as(codes)


# --- e8m0 scales that became something else ---------------------------------------------------------------


def _as_e8m0(stack: MatrixStack, form: LayoutForm) -> MatrixStack:
    """Exponents for float16, or fused ones, as the e8m0 scales that they stand for, see `read.e8m0_exponents`."""
    wrong, value = stack.wrong, stack.scale_value
    if stack.scale_dtype == PADDED_E5M0:
        exponent, flushed = (stack.scale.int() >> 3) - 15, stack.scale >> 3 == 0
    else:
        exponent = stack.scale.int() + (stack.scale_dtype == FUSED_INT8)
        flushed = torch.zeros_like(stack.scale, dtype=torch.bool)
    if stack.scale_2 is not None:
        second = float_values(stack.scale_2, "F32" if form.scale_2_type == "tensor" else form.param_dtype)
        fraction, power = torch.frexp(second)
        lost = torch.zeros_like(second, dtype=torch.bool)
        if (stack.scale_dtype, form.param_dtype) == (FUSED_INT8, "F16"):
            lost = second == 0
        wrong = wrong | ((fraction != 0.5) & ~lost).flatten(1).any(1)
        power = torch.where(lost, -24, power)
        exponent, value = exponent + (power - 1).unsqueeze(2), value * second.unsqueeze(2)
        flushed = flushed | lost.unsqueeze(2)
    return MatrixStack(
        codes=stack.codes,
        scale=(exponent + 127).clamp(0, 255).to(torch.uint8),
        scale_dtype="F8_E8M0",
        scale_value=value,
        wrong=wrong,
        zero_point=stack.zero_point,
        bias=stack.bias,
        flushed=flushed,
    )
