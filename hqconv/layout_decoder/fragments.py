"""The order of codes in a kernel's weight: where each lies, and all of them back in rows. The one place that chooses.

Part of `hqconv.layout_decoder.read`, and like it independent of Humming and of `hqconv.backends`.

In the fragment layouts a *chunk* is 4 a rows by 256 / a columns of a-bit activations' weights: 32 codes for each of 32
lanes, as `num_bits` words (`s2r_loader/loader_b.cuh`, `load`). A *unit* is 32 / a neighbours of a row, what one
register of the tensor core's operand holds: a of them are a lane's share of a chunk.
"""

from __future__ import annotations

import numpy as np

from hqconv.layout_decoder import loops
from hqconv.layout_decoder.layout_form import LayoutForm
from hqconv.layout_decoder.numbers import Array
from hqconv.layout_decoder.packed import unpack_codes

# first word, shift, mask, left shift; second word, shift, mask: two runs of bits that make a code, or alike ones
Piece = tuple[int, int, int, int, int, int, int]


# --- where codes lie ---------------------------------------------------------------------------------------


def unit_places(form: LayoutForm) -> Array:
    """Of a lane's units: (8-row part of the chunk, half of its columns), int64 [a, 2].

    Units run over 16-row parts, their row halves, column halves; transposed, over column halves before row halves, so
    that WGMMA has them in registers as it takes them (`mma/wgmma.cuh`, `transform_b`).
    """
    unit = np.arange(form.activation_bits)
    part, second, third = unit // 4 * 2, unit // 2 % 2, unit % 2
    row, column = (third, second) if form.is_transposed else (second, third)
    return np.stack((part + row, column), 1)


def unit_pieces(form: LayoutForm) -> Array:
    """Where a lane's units lie in its words: uint32 [a, 7], see `Piece`.

    A *plane* is 32 bits of fields, each as wide as the next power of two; a unit is one field in every a-bit part of
    a plane (`dequant_b1248`, `dequant_b3567`).
    """
    a, width = form.activation_bits, _field_width(form)
    repeat = sum(1 << bit for bit in range(0, 32, a))
    places = (divmod(unit * width, a) for unit in range(a))
    return np.array([_piece(*place, form.num_bits, repeat) for place in places], np.uint32)


def code_pieces(form: LayoutForm) -> Array:
    """Where a lane's 32 codes lie in its words, unit by unit: uint32 [32, 7].

    Natively dequantized ones lie after each other (`dequant_native.cuh`). Split ones do so but for their sign, which
    is where the units of `unit_pieces` have it (`dequant_fused.cuh`: magnitudes go through `prmt`, signs do not).
    """
    width, a = _field_width(form), form.activation_bits
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
    """Whether all codes of a unit lie alike."""
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


def read_codes(form: LayoutForm, words: Array, zero: Array | None) -> Array:
    """Codes uint8 [E, N, K], padding included, of stored words [E, …]; `zero` [E, N, G] are the integer zero points."""
    num_experts, (n, k) = words.shape[0], form.padded_shape
    if form.order == "fragments":
        codes = np.empty((num_experts, n, k), np.uint8)
        _read_fragments(form, words, codes)
    else:
        codes = unpack_codes(_in_rows(form, words).reshape(num_experts * n, -1), form.num_bits)
        codes = codes.reshape(num_experts, n, k)
    if form.is_signed:  # two's complement as offset binary
        codes ^= np.uint8(1 << (form.num_bits - 1))
    if form.is_centred:
        if zero is None:
            zero = np.full((num_experts, n, 1), 1 << (form.num_bits - 1), np.uint8)
        loops.restore_centred(codes, zero, k // zero.shape[2], (1 << form.num_bits) - 1)
    return codes


def _in_rows(form: LayoutForm, words: Array) -> Array:
    """Packed words [E, N, W]; of chunks, every row's first 16 bytes come first (`loader_b.cuh`, `load_native`)."""
    if form.order == "rows":
        return words
    num_experts, rows, row_words = words.shape
    chunks = words.reshape(num_experts, row_words // 4, rows, 4)
    return np.ascontiguousarray(chunks.transpose(0, 2, 1, 3)).reshape(words.shape)


def _read_fragments(form: LayoutForm, words: Array, codes: Array) -> None:
    a, num_bits = form.activation_bits, form.num_bits
    if form.is_packed_k:
        words = _in_tiles(form, words)
    if not is_by_units(form):
        loops.unpack_singly(words, num_bits, a, code_pieces(form), unit_places(form), codes)
        return
    units = codes.view({16: np.uint16, 8: np.uint32, 4: np.uint64}[a])
    loops.unpack_units(words, num_bits, a, unit_pieces(form), unit_places(form), units)


def _in_tiles(form: LayoutForm, words: Array) -> Array:
    """Packed K as it would be without: 16 rows by two instructions' columns, a lane's words of both side by side
    (`loader_b.cuh`, `load_packed_k`), against 32 rows by one's."""
    num_experts, tiles, _ = words.shape
    half = form.num_bits // 2
    regions = words.reshape(
        num_experts, tiles, -1, 2, 32, 2, half
    )  # E, T, chunk, 16 rows, lane, instruction, words
    return np.ascontiguousarray(regions.transpose(0, 1, 5, 2, 4, 3, 6)).reshape(num_experts, tiles * 2, -1)
