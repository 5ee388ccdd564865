"""The inverse of the kernel layout by array operations: many experts at once, on the device that holds their bytes.

A twin of `hqconv.artifact.unlayout.read`, which has loops and words for one expert: this one says only *which* experts
hold something that no conversion writes. Like it, it shares no code with `hqconv.backends`. A test holds each to the
other bit for bit.

Shape legend: E experts, N rows, K columns, G groups along K, T = K / 16 tiles, B = N / 64 blocks, r row of an 8-row
chunk, c chunk of a block or column pair of a lane. Floats are bit patterns: uint8, int16 or int32 by their width.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hqconv.artifact.unlayout import form as forms
from hqconv.artifact.unlayout.form import PADDED_E5M0, KernelTensors
from hqconv.artifact.unlayout.loops import fragment_pieces

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Stack:
    """Matrices of E experts in logical order, padding removed; `hqconv.artifact.matrix.Matrix` with E in front.

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


def read_stack(form: KernelTensors, bits: Tensors) -> Stack:
    """Kernel tensors [E, …] as the GEMM kernels read them. Shapes and widths must be those of the form."""
    rows, columns = form.shape
    zero, zero_padded, wrong = _unpack_zero_point(form, bits)
    codes = _unpack_codes(form, bits["weight"], zero_padded)
    wrong |= _outside(codes, rows, columns, 0)
    channels = {}
    for name in ("bias", "weight_scale_2"):
        if name in bits and bits[name].ndim == 2:
            values = _unpermute_channels(bits[name])
            wrong |= _outside(values.unsqueeze(2), rows, 1, 0)
            channels[name] = values[:, :rows]
    scale_2 = channels.get("weight_scale_2", bits.get("weight_scale_2"))
    scale_2 = scale_2.unsqueeze(1) if scale_2 is not None and scale_2.ndim == 1 else scale_2
    scale, wrong_scale = _unpack_scale(form, bits["weight_scale"])
    stack = Stack(
        codes=codes[:, :rows, :columns],
        scale=scale,
        scale_dtype=form.scale_dtype,
        scale_value=float_values(scale, form.scale_dtype),
        wrong=wrong | wrong_scale,
        zero_point=zero,
        scale_2=scale_2,
        bias=channels.get("bias"),
    )
    return _undo_rebias(stack) if form.scale_dtype == PADDED_E5M0 else stack


# --- codes -------------------------------------------------------------------------------------------------


def _unpack_codes(form: KernelTensors, words: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """uint8 [E, N, K], padding included.

    For 64 rows and 16 columns there are `num_bits` words for each of 32 lanes (4 r + c); each of a lane's 16 pairs of
    codes lies in one or two of these, see `fragment_pieces`. Pairs run over (16-row block, row half, column half).
    """
    num_experts, (n, k) = words.size(0), form.padded_shape
    tiles, blocks = k // 16, n // 64
    lanes = words.view(num_experts, tiles, blocks, 8, 4, form.num_bits)  # E, T, B, r, c
    out = torch.empty(
        (num_experts, blocks, 8, 8, tiles, 2, 4), dtype=torch.int16, device=words.device
    )  # E, B, pair // 2, r, T, pair % 2, c
    for pair, piece in enumerate(fragment_pieces(form.num_bits).tolist()):
        first, shift, mask, left, second, shift_2, mask_2 = piece
        value = (lanes[..., first] >> shift) & mask  # a mask ends where the sign's copies begin
        if left:
            value = (value << left) | ((lanes[..., second] >> shift_2) & mask_2)
        value = (value | (value >> 8)) & 0xFFFF  # one code in each byte
        out[:, :, pair // 2, :, :, pair % 2] = value.to(torch.int16).permute(0, 2, 3, 1, 4)
    codes = out.view(torch.uint8).view(num_experts, n, k)
    return _restore_centred(form, codes, zero) if form.is_centred else codes


def _restore_centred(form: KernelTensors, codes: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Sign-and-magnitude codes around a zero point as plain codes; uint8 wraps around."""
    largest = (1 << form.num_bits) - 1
    if zero is None:
        zero = codes.new_full((len(codes), codes.size(1), 1), 1 << (form.num_bits - 1))
    grouped, zero = codes.view(*codes.shape[:2], zero.size(2), -1), zero.unsqueeze(3)
    return torch.where(grouped <= largest - zero, grouped + zero, largest - grouped).view_as(codes)


def unpack_fields(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Little-endian bit fields of int32 words [..., W] as uint8 [..., 32 W / num_bits]."""
    data = words.contiguous().view(torch.uint8)
    mask = (1 << num_bits) - 1
    if 8 % num_bits == 0:
        fields = [(data >> shift) & mask for shift in range(0, 8, num_bits)]
        return torch.stack(fields, -1).flatten(-2)
    runs = data.view(*data.shape[:-1], -1, num_bits).long()  # eight codes fill num_bits whole bytes
    whole = sum((runs[..., i] << (8 * i) for i in range(1, num_bits)), runs[..., 0])
    fields = [((whole >> (i * num_bits)) & mask).to(torch.uint8) for i in range(8)]
    return torch.stack(fields, -1).flatten(-2)


# --- scales and zero points --------------------------------------------------------------------------------


def _unpack_scale(form: KernelTensors, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in logical order, and the experts that hold others than they can."""
    if form.scale_type == "tensor":
        return stored.view(-1, 1, 1), torch.zeros(len(stored), dtype=torch.bool, device=stored.device)
    if form.scale_type == "block":
        scale = stored.transpose(1, 2)
    elif form.scale_type == "channel":
        scale = _unpermute_channels(stored).transpose(1, 2)
    else:
        scale = _unpermute_groups(stored)
    rows, groups = form.scale_shape(padded=False)
    wrong = _outside(scale, rows, groups, form.padding_scale)
    scale = scale[:, :rows, :groups].contiguous()
    if form.scale_dtype == PADDED_E5M0:
        wrong |= ((scale & 7 != 0) | (scale >> 3 == 31)).flatten(1).any(1)
    return scale, wrong


def _unpack_zero_point(
    form: KernelTensors, bits: Tensors
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Zero points without and with padding (the second only for integers), and the experts with impossible ones."""
    weight = bits["weight"]
    wrong = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    if form.zero_kind == "none":
        return None, None, wrong
    stored = bits["zero_point"]
    if form.zero_kind == "int":
        stored = unpack_fields(stored, 4 if form.num_bits <= 4 else 8)
    zero = _unpermute_groups(stored)
    rows, groups = form.shape[0], form.scale_shape(padded=False)[1]
    wrong |= _outside(zero, rows, groups, 0)
    inside = zero[:, :rows, :groups].contiguous()
    if form.zero_kind == "float":
        return inside, None, wrong
    mask = (1 << form.num_bits) - 1  # the kernels take no notice of the bits above
    wrong |= (inside > mask).flatten(1).any(1)
    return inside & mask, zero & mask, wrong


def _outside(values: torch.Tensor, rows: int, columns: int, expected: int) -> torch.Tensor:
    """Experts whose padding, outside [E, rows, columns], is not as expected."""
    below, beside = values[:, rows:] != expected, values[:, :rows, columns:] != expected
    return below.flatten(1).any(1) | beside.flatten(1).any(1)


def _unpermute_groups(stored: torch.Tensor) -> torch.Tensor:
    """[E, G, N] as a lane reads it, in logical order [E, N, G]: in 64 rows, chunk c of row r is at 8 r + c."""
    num_experts, groups, rows = stored.shape
    blocks = stored.view(num_experts, groups, rows // 64, 8, 8)  # E, G, B, r, c
    return blocks.permute(0, 2, 4, 3, 1).reshape(num_experts, rows, groups)


def _unpermute_channels(stored: torch.Tensor) -> torch.Tensor:
    """Values [E, …, N] that scale the accumulator, in logical order: in 32 rows, row pairs before chunks."""
    blocks = stored.view(*stored.shape[:-1], -1, 4, 4, 2)  # …, 32 rows, row pair, c, row of the pair
    return blocks.transpose(-2, -3).reshape(stored.shape)


def _undo_rebias(stack: Stack) -> Stack:
    """float16's exponents as the e8m0 scales that they were made from, see `read.e8m0_exponents`."""
    exponent, wrong, value = stack.scale.int() >> 3, stack.wrong, stack.scale_value
    original = exponent + (127 - 15)
    if stack.scale_2 is not None:
        second = float_values(stack.scale_2, "F32")
        fraction, power = torch.frexp(second)
        wrong = wrong | (fraction != 0.5).flatten(1).any(1)
        original, value = original + (power - 1).unsqueeze(2), value * second.unsqueeze(2)
    return Stack(
        codes=stack.codes,
        scale=original.clamp(0, 255).to(torch.uint8),
        scale_dtype="F8_E8M0",
        scale_value=value,
        wrong=wrong,
        zero_point=stack.zero_point,
        bias=stack.bias,
        flushed=exponent == 0,
    )


# --- number formats ----------------------------------------------------------------------------------------


def float_values(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    """The float32 values of patterns of a safetensors dtype; `U8` is e5m3, "codes" are plain integers."""
    if dtype == "codes":
        return bits.float()
    if wide := {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(dtype):
        return bits.view(wide).float()
    return look_up(_table(dtype, bits.device), bits)


def look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """What each uint8 code stands for, of a table of 256."""
    return table.index_select(0, codes.int().flatten()).view(codes.shape)


@functools.lru_cache(maxsize=64)
def _table(dtype: str, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(forms.to_float32(np.arange(256, dtype=np.uint8), dtype)).to(device)
