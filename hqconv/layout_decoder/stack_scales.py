"""Scales, zero points and bit fields of many experts by array operations, and their values: for `stacks`.

Legend: E experts, N rows, K columns, G groups along K, B blocks of 64 rows, r row of eight, c chunk of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch

from hqconv.layout_decoder import numbers
from hqconv.layout_decoder.layout_form import LayoutForm
from hqconv.layout_decoder.numbers import FUSED_FP8, PADDED_E5M0

Tensors = Mapping[str, torch.Tensor]


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


def unpack_scale(
    form: LayoutForm, stored: torch.Tensor, second: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in logical order, and the experts that hold others than they can."""
    if form.scale_type == "tensor":
        return stored.view(-1, 1, 1), torch.zeros(len(stored), dtype=torch.bool, device=stored.device)
    rows, groups = form.scale_shape(padded=False)
    scale, wrong = _scale_in_rows(form, stored)
    if form.is_fused:
        wrong = wrong | _is_wrongly_fused(form, scale, second)
    else:
        wrong = wrong | outside(scale, rows, groups, form.padding_scale)
    scale = scale[:, :rows, :groups].contiguous()
    if form.scale_dtype == PADDED_E5M0:
        wrong = wrong | ((scale & 7 != 0) | (scale >> 3 == 31)).flatten(1).any(1)
    return scale, wrong


def _scale_in_rows(form: LayoutForm, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [E, N, G] with their padding, and the experts whose words are not filled up with ones."""
    num_experts, wrong = len(stored), torch.zeros(len(stored), dtype=torch.bool, device=stored.device)
    if form.scale_type == "block":
        return stored.transpose(1, 2), wrong
    if form.scale_type == "channel":
        return unpermute_channels(stored).transpose(1, 2), wrong
    if form.scale_order == "group":
        return _unpermute_groups(stored), wrong
    words, rows = stored.size(1), form.padded_shape[0]
    data = stored.contiguous().view(torch.uint8)
    if form.scale_order == "four a word":
        return data.view(num_experts, words, rows, 4).transpose(1, 2).flatten(2), wrong
    if form.scale_order == "one a word":  # two groups of rows that are 8 apart
        tiles = data.view(num_experts, words, rows // 16, 8, 2, 2).permute(0, 2, 4, 3, 1, 5)
        return tiles.reshape(num_experts, rows, -1), wrong
    tiles = data.view(num_experts, words, -1, 32, 4, 4).permute(0, 2, 4, 3, 1, 5)  # tensor memory
    scale = tiles.reshape(num_experts, -1, words * 4)
    groups = form.scale_shape(padded=True)[1]
    return scale[:, :rows, :groups], outside(scale, rows, groups, 127)


def _is_wrongly_fused(form: LayoutForm, scale: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    """Experts with exponents out of range or, in the padding, others than 1.0 below and a row's largest beside."""
    rows, groups = form.scale_shape(padded=False)
    inside, least, below = scale[:, :rows, :groups], 0, torch.zeros_like(scale[:, :1, :1])
    if form.scale_dtype == FUSED_FP8 and second is not None:
        power = torch.frexp(float_values(second, "F32"))[1].view(-1, 1, 1) + 127
        least, below = 1, ((127 - power).clamp(min=0) + 1).byte()
    wrong = ((inside < least) | (inside > (12 if least else 3))).flatten(1).any(1)
    beside = scale[:, :rows, groups:] != inside.amax(2, keepdim=True)
    return wrong | (scale[:, rows:] != below).flatten(1).any(1) | beside.flatten(1).any(1)


def unpack_zero_point(
    form: LayoutForm, bits: Tensors
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
    wrong |= outside(zero, rows, groups)
    inside = zero[:, :rows, :groups].contiguous()
    if form.zero_kind == "float":
        return inside, None, wrong
    mask = (1 << form.num_bits) - 1  # the kernels take no notice of the bits above
    wrong |= (inside > mask).flatten(1).any(1)
    return inside & mask, zero & mask, wrong


def outside(values: torch.Tensor, rows: int, columns: int, expected: int = 0) -> torch.Tensor:
    """Experts whose padding, outside [E, rows, columns], is not as expected."""
    below, beside = values[:, rows:] != expected, values[:, :rows, columns:] != expected
    return below.flatten(1).any(1) | beside.flatten(1).any(1)


def _unpermute_groups(stored: torch.Tensor) -> torch.Tensor:
    """[E, G, N] as a lane reads it, in logical order [E, N, G]: in 64 rows, chunk c of row r is at 8 r + c."""
    num_experts, groups, rows = stored.shape
    blocks = stored.view(num_experts, groups, rows // 64, 8, 8)  # E, G, B, r, c
    return blocks.permute(0, 2, 4, 3, 1).reshape(num_experts, rows, groups)


def unpermute_channels(stored: torch.Tensor) -> torch.Tensor:
    """Values [E, …, N] that scale the accumulator, in logical order: in 32 rows, row pairs before chunks."""
    blocks = stored.view(*stored.shape[:-1], -1, 4, 4, 2)  # …, 32 rows, row pair, c, row of the pair
    return blocks.transpose(-2, -3).reshape(stored.shape)


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
    return torch.from_numpy(numbers.to_float32(np.arange(256, dtype=np.uint8), dtype)).to(device)
