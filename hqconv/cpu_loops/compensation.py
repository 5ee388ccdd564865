"""Compiled CPU loops that round weights one after the other, each corrected for the errors of those before it (GPTQ).

Columns are taken tile by tile, in a tile in a given order. With the errors e = w - decoded of the columns before j in
this order, column j is rounded as w_j + sum of e_i * feedback_ij, added in that order, in float64. The loss of a tile
is the sum of (w_j + correction - decoded_j)**2 * penalty_j: eᵀ H e of the H that the factors are of
(`quantization.gptq`). Every operation is rounded once, in one order, so that a GPU gives the same bits.
Shape legend: N rows, K columns, G groups along K, T tiles along K, W columns of a tile, U units of decision along K.
"""

from __future__ import annotations

import functools

import numpy as np

from hqconv.cpu_loops.arithmetic import (
    ASYM_INT,
    FLOAT,
    MAGNITUDE,
    SIGN,
    SYM_INT,
    bits_of,
    count_exact,
    float_of,
    fold_squares,
    source_bits,
    u32,
    u64,
)
from hqconv.cpu_loops.bit_fields import pack_row
from hqconv.jit import compiled

_LANES = 8  # rows that are rounded side by side
_LARGEST = 3.4028234663852886e38  # of float32
_OVERFLOW = np.float32(2.0**31)  # of 32-bit integers, from here on the least one


@functools.cache
def loss_meter(code):
    """Return the compiled loop that measures a matrix's losses in `code`: (kind, bits, exponent bits, mantissa bits).

    measure(source_NK, limit, groups, factors, is_compensated, loss_NT), with groups and limit as `encoders.encoder`
    takes them and factors (order_TW, feedback_TWW, penalty_TW): `loss_NT` gets the float64 loss of each tile of a row,
    with codes of the corrected weights, or else of the weights themselves.
    """
    visit = _tile_visitor(_nearest(code))

    @compiled
    def measure(source_NK, limit, groups, factors, is_compensated, loss_NT):
        last, width = source_NK.shape[0] - 1, factors[0].shape[1]
        scratch = _scratch(source_NK.shape[1], width)
        is_new = np.full(_LANES, is_compensated)
        for n in range(0, last + 1, _LANES):
            for t in range(loss_NT.shape[1]):
                losses = visit(source_NK, n, t, limit, groups, factors, is_new, scratch)
                for lane in range(min(_LANES, last + 1 - n)):
                    loss_NT[n + lane, t] = losses[lane]

    return measure


@functools.cache
def compensating_encoder(code):
    """Return the compiled loop that encodes a matrix in `code`, and measures its error as `encoders.encoder` does.

    encode(source_NK, limit, groups, factors, changed_NU, out), with out (packed_NB, error_N, power_N, exact_N): units
    of one or more tiles that have `changed` get codes of the corrected weights, the others those of the weights.
    """
    visit, num_bits = _tile_visitor(_nearest(code)), code[1]

    @compiled
    def encode(source_NK, limit, groups, factors, changed_NU, out):
        packed_NB, error_N, power_N, exact_N = out
        num_columns, num_tiles, last = source_NK.shape[1], factors[0].shape[0], source_NK.shape[0] - 1
        tiles_per_unit = num_tiles // changed_NU.shape[1]
        scratch, is_new = _scratch(num_columns, factors[0].shape[1]), np.empty(_LANES, np.bool_)
        _, _, codes_LK, decoded_LK, _ = scratch
        weights, sums = np.empty(num_columns, np.float32), np.empty((2, num_columns // 8))
        for first in range(0, last + 1, _LANES):
            for t in range(num_tiles):
                for lane in range(_LANES):
                    is_new[lane] = changed_NU[min(first + lane, last), t // tiles_per_unit]
                visit(source_NK, first, t, limit, groups, factors, is_new, scratch)
            for lane in range(min(_LANES, last + 1 - first)):
                n = first + lane
                for k in range(num_columns):
                    weights[k] = float_of(source_bits(source_NK[n, k]))
                pack_row(codes_LK[lane], num_bits, packed_NB[n])
                error_N[n], power_N[n] = fold_squares(weights, decoded_LK[lane], sums[0], sums[1])
                if exact_N.size > 0:
                    exact_N[n] = count_exact(weights, decoded_LK[lane], groups[0].shape[1])

    return encode


@compiled
def _scratch(num_columns, width):
    """Allocate corrections [L, W], errors [L], codes [L, K], decoded weights [L, K] and losses [L] of L rows."""
    codes, decoded = np.empty((_LANES, num_columns), np.uint8), np.empty((_LANES, num_columns), np.float32)
    return np.empty((_LANES, width)), np.empty(_LANES), codes, decoded, np.empty(_LANES)


def _tile_visitor(nearest):
    """Build the loop over a tile of some rows at a time, so that one row's rounding need not wait for another's."""

    @compiled
    def visit(source_NK, first, t, limit, groups, factors, is_new, scratch):
        inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N = groups
        order_TW, feedback_TWW, penalty_TW = factors
        correction_LW, error_L, codes_LK, decoded_LK, loss_L = scratch
        width, group_size = order_TW.shape[1], u64(source_NK.shape[1] // inverse_NG.shape[1])
        start, last = u64(t * width), source_NK.shape[0] - 1
        size = u64(min(width, source_NK.shape[1] - t * width))
        correction_LW[:] = 0.0
        loss_L[:] = 0.0
        for j in range(size):
            k = start + u64(order_TW[t, j])
            g, penalty = k // group_size, penalty_TW[t, j]
            for lane in range(_LANES):
                n = u64(min(first + lane, last))  # beyond the last row the last one once more
                weight = float_of(source_bits(source_NK[n, k]))
                group = (inverse_NG[n, g], lowest_NG[n, g], scale_NG[n, g], zero_NG[n, g], scale_2_N[n])
                wanted = np.float64(weight) + correction_LW[u64(lane), j]
                corrected = np.float32(min(max(wanted, -_LARGEST), _LARGEST))  # infinity times 0 would be NaN
                kept = not is_new[u64(lane)]
                code, value = nearest(weight if kept else corrected, limit, group, kept)
                codes_LK[u64(lane), k], decoded_LK[u64(lane), k] = code, value
                off = wanted - np.float64(value)
                loss_L[u64(lane)] += (off * off) * penalty
                error_L[u64(lane)] = np.float64(weight) - np.float64(value)
            feedback = feedback_TWW[t, j]
            for lane in range(u64(_LANES)):
                error, correction = error_L[lane], correction_LW[lane]
                for i in range(j + u64(1), size):
                    correction[i] += error * feedback[i]
        return loss_L

    return visit


def _nearest(code):
    """Return the function (weight, limit, group, is_kept) → (code, decoded weight) in `encoders.encoder`'s arithmetic.

    is_kept: the code is that of the encoder, also where its 32-bit integers overflow.
    """
    kind, num_bits, exponent_bits, mantissa_bits = code
    if kind == FLOAT:
        return _nearest_float(num_bits, exponent_bits, mantissa_bits)
    if kind == ASYM_INT:
        return _nearest_asymmetric(num_bits)
    return _nearest_symmetric(num_bits, kind == SYM_INT)


def _nearest_float(num_bits, exponent_bits, mantissa_bits):
    """Small floats: nearest, ties to the truncated value, saturated by `limit`."""
    exponent_shift = 128 - (1 << (exponent_bits - 1))
    bias, threshold_bits = np.uint32(exponent_shift << 23), np.uint32((exponent_shift + 1) << 23)
    threshold = np.float32(2.0 ** (exponent_shift - 126))
    drop, below_half = np.uint32(23 - mantissa_bits), np.uint32((1 << (22 - mantissa_bits)) - 1)
    mask, first_normal = np.uint32((1 << (num_bits - 1)) - 1), np.uint32(1 << mantissa_bits)
    sign_shift = np.uint32(32 - num_bits)

    @compiled
    def nearest(weight, limit, group, is_kept):
        inverse, _lowest, scale, _zero, scale_2 = group
        limit_bits = bits_of(limit) if limit > 0 else MAGNITUDE
        bits = bits_of(np.float32(weight * inverse))
        sign, magnitude = u32(bits & SIGN), min(u32(bits & MAGNITUDE), limit_bits)
        subnormal = u32(bits_of(np.float32(float_of(magnitude) + threshold)) - threshold_bits)
        scaled = subnormal if magnitude < threshold_bits else u32(magnitude - bias)
        rounded = u32(u32(u32(scaled + below_half) >> drop) & mask)
        kept = u32(rounded << drop)
        value = np.float32(float_of(u32(kept + threshold_bits)) - threshold)
        if rounded >= first_normal:
            value = float_of(u32(kept + bias))
        decoded = np.float32(np.float32(float_of(u32(bits_of(value) | sign)) * scale) * scale_2)
        return np.uint8(u32(rounded | u32(sign >> sign_shift))), decoded

    return nearest


def _nearest_symmetric(num_bits, is_offset):
    """Integers, half to even and clamped: offset binary, or sign and magnitude."""
    midpoint = np.int32(1 << (num_bits - 1))
    highest = np.int32(midpoint - 1)
    lowest_code = np.int32(-midpoint if is_offset else -highest)

    @compiled
    def nearest(weight, limit, group, is_kept):
        inverse, _lowest, scale, _zero, scale_2 = group
        x = np.rint(np.float32(weight * inverse))
        number = min(max(x, np.float32(lowest_code)), np.float32(highest))
        if is_kept and abs(x) >= _OVERFLOW:
            number = np.float32(lowest_code)
        code = np.int32(number)
        decoded = np.float32(np.float32(np.float32(code) * scale) * scale_2)
        if is_offset:
            return np.uint8(code + midpoint), decoded
        return np.uint8(abs(code) | (midpoint if code < 0 else np.int32(0))), decoded

    return nearest


def _nearest_asymmetric(num_bits):
    """Integers with a zero point, half to even and clamped."""
    highest = np.float32((1 << num_bits) - 1)

    @compiled
    def nearest(weight, limit, group, is_kept):
        inverse, lowest, scale, zero, scale_2 = group
        x = np.float32(np.float32(np.float64(weight) - lowest) * inverse)
        code = min(max(np.float32(np.rint(x)), np.float32(0)), highest)
        decoded = np.float32(np.float32(np.float32(code - zero) * scale) * scale_2)
        return np.uint8(code), decoded

    return nearest
