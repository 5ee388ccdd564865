"""CPU twins of Humming's weight ops: same arguments, same bits, on CPU tensors.

Not of `quant_weight`: on the CPU `quantization` has loops of its own.

`meta` tensors are accepted too and give empty outputs of the right shape, so that layouts can be planned.
Errors of use are Humming's own concern here: like its ops, the twins assert.

Legend of the loops: a tile is 64 rows (N) by 64 columns (K); a lane is one of the 32 threads that own 128 codes of a
tile; P is the code width padded to a power of two. The source of every index is `kernel/process.cuh`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# (numba infers the types of the loops)
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from hqconv.cpu_loops import codes as code_loops
from hqconv.cpu_loops.codes import u64, unpack_row
from hqconv.jit import compiled, in_parts

Array = np.ndarray[Any, np.dtype[Any]]


def pack_weight(inputs: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Twin of `humming.ops.pack_weight`: int32 codes [..., K] to int32 words [..., K * num_bits / 32]."""
    assert inputs.dtype == torch.int32
    assert inputs.size(-1) % 32 == 0
    shape = (*inputs.shape[:-1], inputs.size(-1) * num_bits // 32)
    if inputs.is_meta:
        return inputs.new_empty(shape)
    masked = inputs.reshape(-1, inputs.size(-1)).numpy() & ((1 << num_bits) - 1)
    codes = masked.astype(np.uint8)
    packed = np.empty((len(codes), shape[-1] * 4), np.uint8)
    code_loops.pack_rows(codes, num_bits, packed)
    return torch.from_numpy(packed.view(np.int32)).reshape(shape)


def unpack_weight(inputs: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Twin of `humming.ops.unpack_weight`: the inverse of `pack_weight`."""
    assert inputs.dtype == torch.int32
    assert inputs.size(-1) % num_bits == 0
    shape = (*inputs.shape[:-1], inputs.size(-1) // num_bits * 32)
    if inputs.is_meta:
        return inputs.new_empty(shape)
    packed = inputs.contiguous().reshape(-1, inputs.size(-1)).numpy().view(np.uint8)
    codes = np.empty((len(packed), shape[-1]), np.int32)
    code_loops.unpack_rows(packed, num_bits, codes)
    return torch.from_numpy(codes).reshape(shape)


def dequant_weight(
    inputs: torch.Tensor, exponent_bits: int, mantissa_bits: int, is_signed: bool
) -> torch.Tensor:
    """Twin of `humming.ops.dequant_weight`: unpacked small-float codes to their float32 values."""
    assert inputs.dtype == torch.int32
    if inputs.is_meta:
        return inputs.new_empty(inputs.shape, dtype=torch.float32)
    num_bits = exponent_bits + mantissa_bits
    magnitude = inputs & ((1 << num_bits) - 1)
    sign = inputs & ((1 << num_bits) if is_signed else 0)
    if exponent_bits == 0:
        value = magnitude.float()
    else:
        factor = 2.0 ** (128 - 2 ** (exponent_bits - 1))
        value = (magnitude << (23 - mantissa_bits)).view(torch.float32) * factor
    return torch.where(sign != 0, -value, value)


def repack_weight(
    inputs: torch.Tensor,
    weight_bits: int,
    activation_bits: int,
    is_weight_packed: bool,
    should_preprocess_for_int2fp: bool = False,
    should_preprocess_with_zp: bool = False,
    use_fused_e8m0_scale: bool = False,
    interleave_mode: int = 3,
    group_size_zp: int = 0,
    zero_point: torch.Tensor | None = None,
    use_packed_k_layout: bool = False,
    use_native_dequant: bool = False,
) -> torch.Tensor:
    """Twin of `humming.ops.repack_weight` for packed codes [(E,) N, K]: into the kernel's own order."""
    assert inputs.dtype == torch.int32
    assert is_weight_packed  # as in every layout of `humming.transform`
    shape_n = inputs.size(-2)
    shape_k = inputs.size(-1) * 32 // weight_bits
    assert (shape_n % 64, shape_k % 64) == (0, 0)
    k_per_row = 64 if use_packed_k_layout else 256 // activation_bits
    shape = (*inputs.shape[:-2], shape_k // k_per_row, shape_n * k_per_row * weight_bits // 32)
    if inputs.is_meta:
        return inputs.new_empty(shape)
    stack = inputs.contiguous().reshape(-1, *inputs.shape[-2:]).numpy().view(np.uint32)
    num_experts = len(stack)
    centre = should_preprocess_for_int2fp
    out = np.empty((num_experts, shape[-2] * shape[-1]), np.uint32)
    zeros = np.empty((num_experts, 0, 0), np.uint32)
    group = 0
    if should_preprocess_with_zp:
        assert zero_point is not None
        of_experts = zero_point.contiguous().reshape(num_experts, -1, zero_point.size(-1))
        zeros = of_experts.numpy().view(np.uint32)
        group = group_size_zp or shape_k
    is_plain = (activation_bits, interleave_mode) == (16, 3) and not use_native_dequant
    transposed = use_packed_k_layout and not use_fused_e8m0_scale

    def repack_expert(weight: Array, zero: Array, tiles: Array) -> None:
        if is_plain and weight_bits == 4 and not centre:
            _repack_4bit_a16(weight.view(np.uint64), tiles.view(np.uint64))
        elif is_plain and weight_bits == 8 and not group:
            _repack_8bit_a16(weight.view(np.uint64), centre, tiles.view(np.uint64))
        else:
            _repack(
                weight,
                zero,
                weight_bits,
                activation_bits,
                centre,
                group,
                transposed,
                use_packed_k_layout,
                use_native_dequant,
                interleave_mode,
                tiles,
            )

    def run(experts: slice) -> None:
        for weight, zero, tiles in zip(stack[experts], zeros[experts], out[experts], strict=True):
            repack_expert(weight, zero, tiles)

    in_parts(run, num_experts)
    return torch.from_numpy(out.view(np.int32)).reshape(shape)


def process_mxfp4_w4a8_weight(
    inputs: torch.Tensor, delta_scale_offsets: torch.Tensor, inplace: bool = False
) -> torch.Tensor:
    """Twin of `humming.ops.process_mxfp4_w4a8_weight`: divide packed e2m1 codes by 2**offset per group."""
    if inputs.is_meta:
        return inputs if inplace else torch.empty_like(inputs)
    packed = inputs.contiguous().reshape(-1).numpy().view(np.uint32)
    shifts = delta_scale_offsets.contiguous().reshape(-1).numpy()
    repeat = packed.size // shifts.size // 4
    out = np.empty_like(packed)
    _shift_mxfp4(packed, np.repeat(shifts, repeat), _shift_table(), out)
    result = torch.from_numpy(out.view(np.int32)).reshape(inputs.shape)
    return inputs.copy_(result) if inplace else result


# --- compiled loops


@compiled
def _fill_zero_points(zero_ZG, n0, k0, num_bits, group_size, tile_zero):
    """Unpack the zero points of one tile, per row and group; they are packed along N."""
    mask = np.uint64((1 << num_bits) - 1)
    for r in range(64):
        first_bit = (n0 + r) * num_bits
        row, shift = divmod(first_bit, 32)
        for j in range(tile_zero.shape[1]):
            column = (k0 + j * group_size) // group_size
            if column >= zero_ZG.shape[1]:
                continue
            word = np.uint64(zero_ZG[row, column])
            if shift + num_bits > 32:
                word |= np.uint64(zero_ZG[row + 1, column]) << np.uint64(32)
            tile_zero[r, j] = (word >> np.uint64(shift)) & mask


@compiled
def _centre_codes(panel, k0, num_bits, tile_zero, group_size):
    """Turn one tile's integer codes into the sign-magnitude-like form that the int-to-float path wants."""
    mask = (1 << num_bits) - 1
    for r in range(64):
        for c in range(64):
            code = np.int32(panel[r, k0 + c])
            zero = np.int32(tile_zero[r, c // group_size])
            panel[r, k0 + c] = code - zero if code >= zero else mask - code


@compiled
def _lane_table(activation_bits, transposed):
    """Return row and column inside a tile of each lane's 128 codes, in the lane's order: int32 [32, 128, 2]."""
    a = activation_bits
    table = np.empty((32, 128, 2), np.int32)
    for lane in range(32):
        for i in range(8):
            for j in range(a // 2):
                for k in range(32 // a):
                    i1 = j // 2
                    i2 = (i * 8) // (a * 4)
                    i3 = (i * 8) % (a * 4) // 16
                    i4 = i % 2
                    i5 = j % 2
                    if transposed:
                        i4, i5 = i5, i4
                    index = ((((i1 * (16 // a) + i2) * (a // 4) + i3) * 2 + i4) * 2 + i5) * (
                        32 // a
                    ) + k
                    table[lane, index, 0] = i * 8 + lane // 4
                    table[lane, index, 1] = j * (128 // a) + lane % 4 * (32 // a) + k
    return table


@compiled
def _interleave_table(num_bits, activation_bits, interleave_mode, native):
    """Return for each position in a 32-bit word the code of its low bits and the code of its top bit: int32 [2, .]."""
    padded = 1
    while padded < num_bits:
        padded *= 2
    count = 32 // padded
    stride = 32 // activation_bits
    table = np.empty((2, count), np.int32)
    for k in range(count):
        moved = (k % (count // stride)) * stride + k // (count // stride)
        table[0, k] = k if native or interleave_mode % 2 == 0 else moved
        table[1, k] = k if native or interleave_mode // 2 == 0 else moved
    return table


@compiled
def _squeeze(packed, num_bits, padded):
    """Drop the padding of 3-, 5-, 6- and 7-bit codes in place: every `padded` words become `num_bits`.

    Every field of `padded` bits is filled from below with whole codes of the words in turn; where less room is left,
    with the top bits of a code, whose low bits begin the next field.
    """
    every_field = np.uint32(0xFFFFFFFF // ((1 << padded) - 1))
    source = 0
    num_left = num_bits
    for target in range(4 * num_bits):
        word = np.uint32(0)
        filled = 0
        while filled < padded:
            count = min(num_left, padded - filled)
            low = num_left - count
            mask = np.uint32(((1 << count) - 1) << low) * every_field
            word |= (packed[source] & mask) << np.uint32(filled - low)
            filled += count
            num_left = low
            if num_left == 0:
                source += 1
                num_left = num_bits
        packed[target] = word


@compiled
def _pack_lane(codes, places, order, num_bits, packed):
    """Pack one lane's 128 codes, at `places` of the flat panel `codes`, into 4 * num_bits words."""
    count = order.shape[1]
    padded = 32 // count
    top = np.uint32(1 << (num_bits - 1))
    rest = top - np.uint32(1)
    for j in range(4 * padded):
        word = np.uint32(0)
        for k in range(count):
            code = np.uint32(codes[places[j * count + order[0, k]]])
            if order[1, k] != order[0, k]:
                code = (code & rest) | (np.uint32(codes[places[j * count + order[1, k]]]) & top)
            word |= code << np.uint32(k * padded)
        packed[j] = word
    if padded != num_bits:
        _squeeze(packed, num_bits, padded)


@compiled
def _store_lane(packed, n0, k0, lane, num_rows, num_bits, activation_bits, packed_k, out):
    """Store a lane's words of the 64 x 64 tile at (n0, k0); the kernel's loads define the order of a row's words."""
    words_per_row = 16 * num_bits // activation_bits
    stride = (64 if packed_k else 256 // activation_bits) * num_rows * num_bits // 32
    half = num_bits // 2
    for i in range(activation_bits // 4):
        for j in range(words_per_row // num_bits):
            for k in range(num_bits):
                if packed_k:
                    row = k0 // 64
                    column = (n0 // 16 + j * 2 + k // half) * 32 * num_bits
                    column += lane * num_bits + i * half + k % half
                else:
                    row = k0 * activation_bits // 256 + i
                    column = (256 // activation_bits) * n0 * num_bits // 32
                    column += (j * 32 + lane) * num_bits + k
                out[row * stride + column] = packed[i * words_per_row + j * num_bits + k]


@compiled
def _repack(
    weight_NW,
    zero_ZG,
    num_bits,
    activation_bits,
    centre,
    group_size_zp,
    transposed,
    packed_k,
    native,
    interleave_mode,
    out,
):
    """Repack one expert. N is a multiple of 64, K of 64.

    `weight_NW`: uint32 [N, K * num_bits / 32]. `zero_ZG` has no column when the codes' midpoint is the zero
    point. `out`: uint32, flat, rows of `256 / activation_bits` columns of K (64 when `packed_k`) by `N` rows.
    """
    num_rows = weight_NW.shape[0]
    num_columns = weight_NW.shape[1] * 32 // num_bits
    table = _lane_table(activation_bits, transposed)
    order = _interleave_table(num_bits, activation_bits, interleave_mode, native)
    panel = np.empty((64, num_columns), np.uint8)
    codes = panel.reshape(-1)
    places = table[:, :, 0] * np.int32(num_columns) + table[:, :, 1]
    packed = np.empty(32, np.uint32)
    has_zero = zero_ZG.size > 0
    group = group_size_zp if has_zero else 64
    tile_zero = np.full((64, (64 + group - 1) // group), np.uint32(1 << (num_bits - 1)))
    for n0 in range(0, num_rows, 64):
        for r in range(64):
            unpack_row(weight_NW[n0 + r].view(np.uint8), num_bits, panel[r])
        for k0 in range(0, num_columns, 64):
            if centre:
                if has_zero:
                    _fill_zero_points(zero_ZG, n0, k0, num_bits, group, tile_zero)
                _centre_codes(panel, k0, num_bits, tile_zero, group)
            for lane in range(32):
                _pack_lane(codes[k0:], places[lane], order, num_bits, packed)
                _store_lane(
                    packed, n0, k0, lane, num_rows, num_bits, activation_bits, packed_k, out
                )


@functools.cache
def _shift_table() -> np.ndarray:
    """Return the e2m1 code of `code / 2**shift`, ties away from zero: uint32 [256 shifts, 16 codes].

    Follows `process_mxfp4.cuh` bit by bit: e2m1 values are placed among the float32 subnormals, and shifts of
    128 and more wrap the factor's exponent just as they do there. Code 8 (minus zero) becomes 0.
    """
    codes = np.arange(16, dtype=np.uint32)
    codes[8] = 0
    bits = ((codes & 8) << np.uint32(28)) | ((codes & 7) << np.uint32(22))
    factors = (np.uint32(0x3F800000) - (np.arange(256, dtype=np.uint32) << np.uint32(23))).view(
        np.float32
    )
    mask = np.uint32(0x81C00000)
    with np.errstate(all="ignore"):
        value = bits.view(np.float32)[None, :] * factors[:, None]
        # the GPU's NaN
        value_bits = np.where(np.isnan(value), np.uint32(0x7FFFFFFF), value.view(np.uint32))
        down_bits = value_bits & mask
        up_bits = (value_bits + np.uint32(0x00200000)) & mask
        go_up = np.abs(value - down_bits.view(np.float32)) >= np.abs(
            value - up_bits.view(np.float32)
        )
    rounded = np.where(go_up, up_bits, down_bits)
    table = ((rounded & np.uint32(0x80000000)) >> np.uint32(28)) | (
        (rounded & np.uint32(0x01C00000)) >> 22
    )
    table[0] = codes
    return table.astype(np.uint32)


@compiled
def _shift_mxfp4(packed, shifts, table, out):
    """Apply `_shift_table` to each 4-word group of packed e2m1 codes: `packed` uint32 [4 * len(shifts)]."""
    for group in range(shifts.size):
        codes = table[shifts[group]]
        for j in range(4):
            word = packed[group * 4 + j]
            result = np.uint32(0)
            for k in range(8):
                shift = np.uint32(4 * k)
                result |= codes[(word >> shift) & np.uint32(15)] << shift
            out[group * 4 + j] = result


_LOW_HALF = np.uint64(0xFFFFFFFF)


@compiled
def _spread_nibbles(word):
    """Spread the eight nibbles of the low 32 bits, one to a byte."""
    word = (word | (word << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    word = (word | (word << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    return (word | (word << np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)


@compiled
def _spread_bytes(word):
    """Spread the four bytes of the low 32 bits, one to 16 bits."""
    word = (word | (word << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return (word | (word << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)


_AHEAD = 8  # column blocks that are gathered at a time: a cache line of each row


@compiled
def _repack_4bit_a16(weight_ND, tiles):
    """Repack packed 4-bit codes for 16-bit activations, as `_repack`.

    `weight_ND`: uint64 [N, K / 16], 16 codes each, which are a column block. `tiles`: uint64
    [K / 16, N / 64], each uint32 [32 lanes, 4 quarters]. A word takes, of two rows 8 apart, a byte of the left half and
    one of the right half: first the four low nibbles, then the high ones. So the words of four lanes are the nibbles of
    two double words, dealt like cards.
    """
    num_panels = weight_ND.shape[0] // 64
    num_blocks = weight_ND.shape[1]
    columns = np.empty((_AHEAD, 64), np.uint64)
    dealt = np.empty((2, 32), np.uint64)
    for n in range(num_panels):
        panel = weight_ND[64 * n : 64 * n + 64]
        for d0 in range(0, num_blocks, _AHEAD):
            count = min(_AHEAD, num_blocks - d0)
            for r in range(64):  # upper rows first, quarters innermost, then the rows 8 below
                place = (r >> 3 & 1) * 32 + (r & 7) * 4 + (r >> 4)
                for d in range(count):
                    columns[d, place] = panel[r, d0 + d]
            for d in range(count):
                column = columns[d]
                start = ((d0 + d) * num_panels + n) * 64
                for i in range(u64(32)):
                    upper = _interleave_nibbles(column[i])
                    lower = _interleave_nibbles(column[u64(32) + i])
                    _deal(upper, lower, i, dealt)
                _store_tile(dealt, 4, tiles[start : start + 64])


@compiled
def _repack_8bit_a16(weight_ND, centre, tiles):
    """Repack 8-bit codes for 16-bit activations, as `_repack`; `centre` around the midpoint.

    `weight_ND`: uint64 [N, K / 8], 8 codes each; two are a column block. Tiles: uint32 [32 lanes, 8 eighths].
    """
    num_panels = weight_ND.shape[0] // 64
    num_blocks = weight_ND.shape[1] // 2
    columns = np.empty((_AHEAD, 2, 64), np.uint64)
    dealt = np.empty((2, 64), np.uint64)
    for n in range(num_panels):
        panel = weight_ND[64 * n : 64 * n + 64]
        for d0 in range(0, num_blocks, _AHEAD):
            count = min(_AHEAD, num_blocks - d0)
            for r in range(64):
                place = (r & 7) * 8 + (r >> 3)  # eighths innermost
                for d in range(count):
                    columns[d, 0, place] = panel[r, 2 * (d0 + d)]
                    columns[d, 1, place] = panel[r, 2 * (d0 + d) + 1]
            for d in range(count):
                left = columns[d, 0]
                right = columns[d, 1]
                start = ((d0 + d) * num_panels + n) * 128
                if centre:
                    _centre(left)
                    _centre(right)
                for i in range(u64(64)):
                    _deal(left[i], right[i], i, dealt)
                _store_tile(dealt, 8, tiles[start : start + 128])


@compiled
def _centre(codes):
    """Turn bytes into code - 128 from the midpoint up, and 255 - code below it."""
    ones = np.uint64(0x0101010101010101)
    for i in range(u64(codes.size)):
        below = ~(codes[i] >> np.uint64(7)) & ones
        codes[i] ^= (ones << np.uint64(7)) ^ ((below << np.uint64(7)) - below)


@compiled
def _interleave_nibbles(codes):
    """Interleave the nibbles of the left and the right half of 16 codes."""
    return _spread_nibbles(codes & _LOW_HALF) | (
        _spread_nibbles(codes >> np.uint64(32)) << np.uint64(4)
    )


@compiled
def _deal(first, second, i, dealt):
    """Interleave the bytes of two double words: lanes 0 and 1 of four to dealt[0, i], lanes 2 and 3 to dealt[1, i]."""
    eight = np.uint64(8)
    half = np.uint64(32)
    dealt[u64(0), i] = _spread_bytes(first & _LOW_HALF) | (
        _spread_bytes(second & _LOW_HALF) << eight
    )
    dealt[u64(1), i] = _spread_bytes(first >> half) | (_spread_bytes(second >> half) << eight)


@compiled
def _store_tile(dealt, num_slots, tile):
    """Store 8 rows of four lanes with `num_slots` words each, two words at a time; dealt: [2, 8 rows * slots]."""
    half = np.uint64(32)
    slots = u64(num_slots)
    pairs = u64(num_slots // 2)
    for r in range(u64(8)):
        for h in range(u64(2)):
            at = (r * u64(4) + h * u64(2)) * pairs
            for p in range(pairs):
                left = dealt[h, r * slots + p * u64(2)]
                right = dealt[h, r * slots + p * u64(2) + u64(1)]
                tile[at + p] = (left & _LOW_HALF) | (right << half)
                tile[at + pairs + p] = (left >> half) | (right & ~_LOW_HALF)
