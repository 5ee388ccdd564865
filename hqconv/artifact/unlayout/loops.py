"""Compiled loops of `unlayout`: kernel words to codes, zero-point centring undone, codes to float32.

Shape legend: E experts, N rows, K columns (both padded), T = K / 16, G groups along K.
Every loop releases the GIL: callers run one expert (or stack) per thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hqconv.compiled import compiled

Array = NDArray[Any]
_PAIR = np.uint32(0xFFFF)
_EIGHT = np.uint32(8)


def fragment_pieces(num_bits: int) -> Array:
    """Where a lane's 16 pairs of codes lie in its `num_bits` words: uint32 [16, 7], see `unpack_pairs`.

    A *plane* is 32 bits of fields, each as wide as the next power of two; a pair is one field in both 16-bit
    halves of a plane (`dequant_b1248`, `dequant_b3567`). Where the width is no power of two, planes are
    squeezed: one may straddle two words, its high bits in the first of them (`get_quanted_value_group`).
    """
    width = 1 << (num_bits - 1).bit_length()
    pieces = np.zeros((16, 7), np.uint32)
    for pair in range(16):
        plane, field = divmod(pair * width, 16)
        word, offset = divmod(plane * num_bits, width)
        num_high = min(num_bits, width - offset)
        num_low = num_bits - num_high
        high, low = (0x00010001 * ((1 << count) - 1) for count in (num_high, num_low))
        pieces[pair] = (word, field + offset, high, num_low, word + (num_low > 0), field, low)
    return pieces


@compiled
def unpack_pairs(words_ETW, num_bits, pieces, pairs_ENP):  # type: ignore[no-untyped-def]
    """Write the codes of 16-bit-activation weights, two columns to a uint16, P = K / 2.

    `words_ETW` uint32 [E, T, N * num_bits / 2]: for 64 rows and 16 columns, `num_bits` words for each of 32
    lanes (`s2r_loader/loader_b.cuh`, `load`). A lane's fragment of 16 pairs is `pieces[pair]` = (first word,
    shift, mask, left shift, second word, shift, mask), see `fragment_pieces`.
    The pair's place is the A operand of `wgmma.m64nNk16`: row lane / 4, columns 2 * (lane % 4) and the next.
    """
    num_experts, num_tiles, num_words = words_ETW.shape
    num_blocks = num_words // (32 * num_bits)
    width = np.uint64(num_bits)
    for e in range(num_experts):
        for block in range(num_blocks):
            for tile in range(num_tiles):
                words = words_ETW[e, tile, block * 32 * num_bits : (block + 1) * 32 * num_bits]
                pairs = pairs_ENP[e, block * 64 : block * 64 + 64]
                for pair in range(16):
                    first, shift, mask, left, second, shift_2, mask_2 = pieces[pair]
                    # Pairs run over (16-row block, row half, column half): WGMMA::transform_b.
                    row, column = np.uint64(pair // 2 * 8), np.uint64(tile * 8 + pair % 2 * 4)
                    for r in range(np.uint64(8)):  # lane 4 r + c
                        for c in range(np.uint64(4)):
                            at = (np.uint64(4) * r + c) * width
                            value = np.uint32(words[at + first] >> shift) & mask
                            low = np.uint32(words[at + second] >> shift_2) & mask_2
                            value = np.uint32(np.uint32(value << left) | low)
                            pairs[row + r, column + c] = (value | (value >> _EIGHT)) & _PAIR


@compiled
def restore_centred(codes_ENK, zero_ENG, group_size, largest):  # type: ignore[no-untyped-def]
    """Turn sign-and-magnitude codes around a zero point back into plain codes, in place; all uint8.

    As `normalized_uint_to_fp` reads them: up to `largest - zero` a code is a distance above the zero point,
    from there on the bitwise complement of the plain code.
    """
    for e in range(codes_ENK.shape[0]):
        for n in range(codes_ENK.shape[1]):
            for g in range(zero_ENG.shape[2]):
                zero = zero_ENG[e, n, g]
                bound = np.uint8(largest - zero)
                codes = codes_ENK[e, n, g * group_size : (g + 1) * group_size]
                for k in range(codes.size):
                    code = codes[k]
                    codes[k] = np.uint8(code + zero) if code <= bound else np.uint8(largest - code)


@compiled
def decode_codes(codes_ENK, values, zero_ENG, scale_ENG, scale_2_EN, out_ENK):  # type: ignore[no-untyped-def]
    """out = (values[code] - zero) * scale * scale_2 in float32, in this order; `values` has 256 entries.

    The groups are the scale's; `zero_ENG` has as many or one.
    """
    last_zero = zero_ENG.shape[2] - 1
    group_size = np.uint64(codes_ENK.shape[2] // scale_ENG.shape[2])
    for e in range(codes_ENK.shape[0]):
        for n in range(codes_ENK.shape[1]):
            codes, out, scale_2 = codes_ENK[e, n], out_ENK[e, n], scale_2_EN[e, n]
            for g in range(scale_ENG.shape[2]):
                zero, scale = zero_ENG[e, n, min(g, last_zero)], scale_ENG[e, n, g]
                start = np.uint64(g) * group_size
                for k in range(group_size):
                    out[start + k] = ((values[codes[start + k]] - zero) * scale) * scale_2


@compiled
def split_bytes(data_NB, num_bits, codes_NK):  # type: ignore[no-untyped-def]
    """Bytes as their codes of 1, 2, 4 or 8 bits, the lowest first; all uint8."""
    per_byte, mask = np.uint64(8 // num_bits), np.uint8((1 << num_bits) - 1)
    for n in range(data_NB.shape[0]):
        data, codes = data_NB[n], codes_NK[n]
        if num_bits == 4:  # both at once: twice as fast
            for b in range(np.uint64(data.size)):
                codes[np.uint64(2) * b] = data[b] & np.uint8(15)
                codes[np.uint64(2) * b + np.uint64(1)] = data[b] >> np.uint8(4)
            continue
        for i in range(per_byte):
            shift = np.uint8(i * np.uint64(num_bits))
            for b in range(np.uint64(data.size)):
                codes[b * per_byte + i] = np.uint8(data[b] >> shift) & mask
