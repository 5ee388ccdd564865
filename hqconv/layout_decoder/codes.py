"""The codes of a kernel's weight: the bits that hold each of them, and all of them back in rows.

Part of `hqconv.layout_decoder.decode`, and like it independent of Humming and of the conversion. Only the unpacking of
words exists twice, as compiled loops for the CPU and as array operations for other devices, from the same tables.

In the fragment layouts a *chunk* is 4 a rows by 256 / a columns of a-bit activations' weights: 32 codes for each of 32
lanes, as `num_bits` words (`s2r_loader/loader_b.cuh`, `load`). A *unit* is 32 / a neighbours of a row, what one
register of the tensor core's operand holds: a of them are a lane's share of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hqconv.layout_decoder import loops
from hqconv.layout_decoder.layout_form import LayoutForm

Array = NDArray[Any]
# first word, shift, mask, left shift; second word, shift, mask: two runs of bits that form a code or a unit
Piece = tuple[int, int, int, int, int, int, int]


# --- positions of codes ------------------------------------------------------------------------------------


def unit_places(form: LayoutForm) -> Array:
    """Positions of a lane's units: (8-row part of the chunk, half of its columns), int64 [a, 2].

    Units run over 16-row parts, their row halves, column halves; transposed, over column halves before row halves, so
    that WGMMA has them in registers as it takes them (`mma/wgmma.cuh`, `transform_b`).
    """
    unit = np.arange(form.activation_bits)
    part = unit // 4 * 2
    second = unit // 2 % 2
    third = unit % 2
    row, column = (third, second) if form.is_transposed else (second, third)
    return np.stack((part + row, column), 1)


def unit_pieces(form: LayoutForm) -> Array:
    """Bits of a lane's units in its words: uint32 [a, 7], see `Piece`.

    A *plane* is 32 bits of fields, each as wide as the next power of two; a unit is one field in every a-bit part of
    a plane (`dequant_b1248`, `dequant_b3567`).
    """
    a = form.activation_bits
    width = _field_width(form)
    repeat = sum(1 << bit for bit in range(0, 32, a))
    places = (divmod(unit * width, a) for unit in range(a))
    return np.array([_piece(*place, form.num_bits, repeat) for place in places], np.uint32)


def code_pieces(form: LayoutForm) -> Array:
    """Bits of a lane's 32 codes in its words, unit by unit: uint32 [32, 7], see `Piece`.

    Natively dequantized codes follow each other (`dequant_native.cuh`). So do split codes but for the sign, which is
    where the units of `unit_pieces` have it (`dequant_fused.cuh`: magnitudes go through `prmt`, signs do not).
    """
    width = _field_width(form)
    a = form.activation_bits
    pieces = []
    for code in range(32):
        plane, offset = divmod(code * width, 32)
        piece = _piece(plane, offset, form.num_bits, 1)
        if form.is_split:
            unit, place = divmod(code, 32 // a)
            plane, field = divmod(unit * width, a)
            sign = plane, field + place * a + form.num_bits - 1, 1, form.num_bits - 1
            piece = (*sign, piece[4], piece[5], (1 << (form.num_bits - 1)) - 1)
        pieces.append(piece)
    return np.array(pieces, np.uint32)


def is_by_units(form: LayoutForm) -> bool:
    """True if all codes of a unit are stored alike."""
    return not (form.is_native or form.is_split)


def _field_width(form: LayoutForm) -> int:
    return 1 << (form.num_bits - 1).bit_length()


def _piece(plane: int, field: int, num_bits: int, repeat: int) -> Piece:
    """A field of a plane. Where the code's width is no power of two, planes are squeezed: one may straddle two words,
    its high bits in the first of them (`get_quanted_value_group`)."""
    width = 1 << (num_bits - 1).bit_length()
    word, offset = divmod(plane * num_bits, width)
    num_high = min(num_bits, width - offset)
    num_low = num_bits - num_high
    high, low = (repeat * ((1 << count) - 1) for count in (num_high, num_low))
    return word, field + offset, high, num_low, word + (num_low > 0), field, low


# --- codes in rows -----------------------------------------------------------------------------------------


def has_loops(device: torch.device) -> bool:
    """True on the CPU, where compiled loops are 2 to 8 times as fast as array operations."""
    return device.type == "cpu"


def decode_codes(form: LayoutForm, words: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Codes uint8 [E, N, K], padding included, of stored int32 words [E, …]; `zero` [E, N, G] integer zero points."""
    num_experts = words.size(0)
    n, k = form.padded_shape
    if form.order == "fragments":
        codes = _from_fragments(form, words)
    else:
        # every row's first 16 bytes come first (`loader_b.cuh`, `load_native`)
        if form.order == "chunks":
            words = words.view(num_experts, -1, n, 4).transpose(1, 2)
        codes = unpack_fields(words.reshape(num_experts, n, -1), form.num_bits)
    if form.is_signed:  # two's complement as offset binary
        codes ^= 1 << (form.num_bits - 1)
    codes = codes.view(num_experts, n, k)
    return _restore_centred(form, codes, zero) if form.is_centred else codes


def unpack_fields(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Little-endian bit fields of int32 words [..., W] as uint8 [..., 32 W / num_bits]."""
    words = words.contiguous()
    if num_bits == 8:
        return words.view(torch.uint8).clone()
    if has_loops(words.device):
        codes = torch.empty(*words.shape[:-1], words.size(-1) * 32 // num_bits, dtype=torch.uint8)
        rows = words.numpy().view(np.uint32).reshape(-1, words.size(-1))
        loops.unpack_fields(rows, num_bits, codes.numpy().reshape(len(rows), -1))
        return codes
    data = words.view(torch.uint8)
    mask = (1 << num_bits) - 1
    if 8 % num_bits == 0:
        fields = [(data >> shift) & mask for shift in range(0, 8, num_bits)]
        return torch.stack(fields, -1).flatten(-2)
    runs = data.view(*data.shape[:-1], -1, num_bits).long()  # eight codes fill num_bits whole bytes
    whole = sum((runs[..., i] << (8 * i) for i in range(1, num_bits)), runs[..., 0])
    fields = [((whole >> (i * num_bits)) & mask).to(torch.uint8) for i in range(8)]
    return torch.stack(fields, -1).flatten(-2)


def _from_fragments(form: LayoutForm, words: torch.Tensor) -> torch.Tensor:
    """Codes [E, N, K]: 4 a rows by 256 / a columns have `num_bits` words for each of 32 lanes (lane 4 r + c)."""
    num_experts = words.size(0)
    n, k = form.padded_shape
    a = form.activation_bits
    tiles = k * a // 256
    chunks = n // (4 * a)
    per_unit = 32 // a
    if form.is_packed_k:
        # 16 rows by two instructions' columns, a lane's words of both side by side (`loader_b.cuh`, `load_packed_k`),
        # as they would be without: 32 rows by the columns of one.
        regions = words.view(num_experts, tiles // 2, chunks, 2, 32, 2, form.num_bits // 2)
        words = regions.permute(0, 1, 5, 2, 4, 3, 6)
    if has_loops(words.device):
        return _by_loops(form, words.reshape(num_experts, tiles, -1).numpy().view(np.uint32))
    lanes = words.reshape(num_experts, tiles, chunks, 8, 4, form.num_bits)  # E, T, B, r, c
    # E, B, 8 rows, r, T, half, c, code of a unit
    shape = (num_experts, chunks, a // 2, 8, tiles, 2, 4, per_unit)
    codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
    places = unit_places(form).tolist()
    if not is_by_units(form):
        for index, piece in enumerate(code_pieces(form).tolist()):
            row, half = places[index // per_unit]
            field = _field(lanes, piece).byte().permute(0, 2, 3, 1, 4)
            codes[:, :, row, :, :, half, :, index % per_unit] = field
        return codes.view(num_experts, n, k)
    wide = codes.flatten(6).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[per_unit])
    for piece, (row, half) in zip(unit_pieces(form).tolist(), places, strict=True):
        unit = _one_a_byte(_field(lanes, piece), a)
        wide[:, :, row, :, :, half] = unit.to(wide.dtype).permute(0, 2, 3, 1, 4)
    return codes.view(num_experts, n, k)


def _by_loops(form: LayoutForm, words: Array) -> torch.Tensor:
    """Codes of fragments, uint32 [E, T, W], by compiled loops."""
    a = form.activation_bits
    num_bits = form.num_bits
    codes = np.empty((len(words), *form.padded_shape), np.uint8)
    if is_by_units(form):
        units = codes.view({16: np.uint16, 8: np.uint32, 4: np.uint64}[a])
        loops.unpack_units(words, num_bits, a, unit_pieces(form), unit_places(form), units)
    else:
        loops.unpack_singly(words, num_bits, a, code_pieces(form), unit_places(form), codes)
    return torch.from_numpy(codes)


def _field(lanes: torch.Tensor, piece: Sequence[int]) -> torch.Tensor:
    """One `Piece` of every lane's words, int32 [E, T, B, r, c]."""
    first, shift, mask, left, second, shift_2, mask_2 = piece
    value = (lanes[..., first] >> shift) & mask  # a mask ends where the sign's copies begin
    return (value << left) | ((lanes[..., second] >> shift_2) & mask_2) if left else value


def _one_a_byte(units: torch.Tensor, activation_bits: int) -> torch.Tensor:
    """Codes that are `activation_bits` apart, one in each byte."""
    if activation_bits == 16:
        return (units | (units >> 8)) & 0xFFFF
    if activation_bits == 8:
        return units
    wide = units.long()
    for step, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
        wide = (wide | (wide << step)) & mask
    return wide


def _restore_centred(
    form: LayoutForm, codes: torch.Tensor, zero: torch.Tensor | None
) -> torch.Tensor:
    """Sign-and-magnitude codes around a zero point as plain codes; uint8 wraps around."""
    largest = (1 << form.num_bits) - 1
    if zero is None:
        zero = codes.new_full((len(codes), codes.size(1), 1), 1 << (form.num_bits - 1))
    if has_loops(codes.device):
        loops.restore_centred(codes.numpy(), zero.numpy(), codes.size(2) // zero.size(2), largest)
        return codes
    grouped = codes.view(*codes.shape[:2], zero.size(2), -1)
    zero = zero.unsqueeze(3)
    return torch.where(grouped <= largest - zero, grouped + zero, largest - grouped).view_as(codes)
