"""Compiled CPU loops of the search for scales: errors under other scales, sums for a fit, sweeps over scales.

Shape legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from hqconv.cpu_loops.arithmetic import (
    ASYM_INT,
    FLOAT,
    MAGNITUDE,
    SIGN,
    SYM_INT,
    bits_of,
    float_of,
    fold_sum,
    group_range,
    largest_value,
    source_bits,
    u32,
    u64,
)
from hqconv.jit import Function, compiled

TO_BFLOAT16, TO_FLOAT16, TO_FLOAT32 = range(3)  # rounding of scales that are wider than 8 bits


class Searcher(NamedTuple):
    """Compiled loops that measure the scales of a matrix in one code type, with the arithmetic of `encoders.encoder`.

    groups: (inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N) as an encoder takes them. Sums are float64 in the
    order of `fold_sum` over each group's columns, every term times its column's importance.

    score(source_NK, limit, groups, importance_K, error_NG): sums of (w - decoded)**2.
    fit(source_NK, limit, groups, importance_K, products_NG, squares_NG): sums of w * v and of v * v, where v is the
    number of a code less the zero point.
    sweep(source_NK, limit, scales, importance_K, ladder, error_NG, step_NG): tries other scales of symmetric codes, as
    `hqconv.quantization.scale_search.Ladder` describes. scales: (scale_NG, byte_NG, scale_2_N), bytes without their
    sign. ladder: (first, limit, up, down, values, top, no_half, floor_N, rounding), with the value of each byte in
    `values`, empty for wider scales. `error_NG` holds the errors to be beaten, and gets the least ones; `step_NG` gets
    their steps.
    """

    score: Function
    fit: Function
    sweep: Function


@functools.cache
def searcher(code):
    """Return the compiled loops that search for scales in `code`: (kind, bits, exponent bits, mantissa bits)."""
    kind, num_bits, exponent_bits, mantissa_bits = code
    highest = largest_value(*code)
    lowest = -highest - 1 if kind == SYM_INT else -highest
    if kind == FLOAT:
        write_values = _float_values(exponent_bits, mantissa_bits)
    elif kind == ASYM_INT:
        write_values = _asymmetric_values(num_bits)
    else:
        write_values = _symmetric_values(lowest, highest)
    error_of = _group_error(write_values)
    sweep = _sweep(_upwards(error_of), _downwards(error_of, _clipped_error(lowest, highest)))
    return Searcher(_score(error_of), _fit(write_values), sweep)


def _group_error(write_values):
    @compiled
    def error_of(row, start, limit, group, importance_K, scratch):
        """Return the error of a group under its scale."""
        _inverse, _lowest, scale, _zero, scale_2 = group
        values, terms = scratch
        write_values(row, start, limit, group, values)
        for k in range(u64(terms.size)):
            decoded = np.float32(np.float32(values[k] * scale) * scale_2)
            difference = np.float64(float_of(source_bits(row[start + k]))) - np.float64(decoded)
            terms[k] = (difference * difference) * importance_K[start + k]
        return fold_sum(terms)

    return error_of


def _clipped_error(lowest_code, highest_code):
    lowest_code, highest_code = np.float32(lowest_code), np.float32(highest_code)

    @compiled
    def clipped_error_of(row, start, group, importance_K, terms):
        """Return the error of the weights beyond the largest and the smallest code alone."""
        inverse, _lowest, scale, _zero, scale_2 = group
        most = np.float32(np.float32(highest_code * scale) * scale_2)
        least = np.float32(np.float32(lowest_code * scale) * scale_2)
        for k in range(u64(terms.size)):
            weight = float_of(source_bits(row[start + k]))
            x = np.float32(weight * inverse)
            end = most if x > highest_code else least
            difference = np.float64(weight) - np.float64(end)
            is_beyond = x > highest_code or x < lowest_code
            terms[k] = (difference * difference) * importance_K[start + k] if is_beyond else 0.0
        return fold_sum(terms)

    return clipped_error_of


def _score(error_of):
    @compiled
    def score(source_NK, limit, groups, importance_K, error_NG):
        inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N = groups
        size = u64(source_NK.shape[1] // error_NG.shape[1])
        scratch = np.empty(size, np.float32), np.empty(size, np.float64)
        for n in range(error_NG.shape[0]):
            for g in range(error_NG.shape[1]):
                group = (inverse_NG[n, g], lowest_NG[n, g], scale_NG[n, g], zero_NG[n, g], scale_2_N[n])
                error_NG[n, g] = error_of(source_NK[n], u64(g) * size, limit, group, importance_K, scratch)

    return score


def _fit(write_values):
    @compiled
    def fit(source_NK, limit, groups, importance_K, products_NG, squares_NG):
        inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N = groups
        size = u64(source_NK.shape[1] // products_NG.shape[1])
        values, products, squares = np.empty(size, np.float32), np.empty(size), np.empty(size)
        for n in range(products_NG.shape[0]):
            row = source_NK[n]
            for g in range(products_NG.shape[1]):
                start = u64(g) * size
                group = (inverse_NG[n, g], lowest_NG[n, g], scale_NG[n, g], zero_NG[n, g], scale_2_N[n])
                write_values(row, start, limit, group, values)
                for k in range(size):
                    value, importance = np.float64(values[k]), importance_K[start + k]
                    weight = np.float64(float_of(source_bits(row[start + k])))
                    products[k], squares[k] = (weight * value) * importance, (value * value) * importance
                products_NG[n, g], squares_NG[n, g] = fold_sum(products), fold_sum(squares)

    return fit


def _upwards(error_of):
    @compiled
    def upwards(row, start, limit, importance_K, scratch, ladder, given, least):
        """Return the step of the least error among larger scales, 0 for none, and that error."""
        first, limit_factor, up, _down, values, top, no_half, _floor_N, _rounding = ladder
        _stored, byte, scale_2, _floor = given
        highest, lowest = group_range(row, start, u64(scratch[1].size))
        end, best = np.float32(max(highest, np.float32(-lowest)) * limit_factor), 0
        for step in range(first, (top if values.size else up.size + 1) + 1):
            scale = _scale_at(step, ladder, given)
            is_small = np.float32(abs(scale) * scale_2) < end
            if step > 1 and not (is_small or (values.size > 0 and byte + step - 1 < no_half)):
                break
            if scale != 0:
                group = (np.float32(1) / np.float32(scale * scale_2), 0.0, scale, np.float32(0), scale_2)
                error = error_of(row, start, limit, group, importance_K, scratch)
                if error < least:
                    least, best = error, step
        return best, least

    return upwards


def _downwards(error_of, clipped_error_of):
    @compiled
    def downwards(row, start, limit, importance_K, scratch, ladder, given, least):
        """Return the step of the least error among smaller scales, 0 for none, and that error."""
        _first, _limit, _up, down, values, top, _no_half, _floor_N, _rounding = ladder
        scale_2, best = given[2], 0
        for step in range(1, (top if values.size else down.size) + 1):
            scale = _scale_at(-step, ladder, given)
            if scale == 0:
                break
            group = (np.float32(1) / np.float32(scale * scale_2), 0.0, scale, np.float32(0), scale_2)
            if clipped_error_of(row, start, group, importance_K, scratch[1]) >= least:
                break
            error = error_of(row, start, limit, group, importance_K, scratch)
            if error < least:
                least, best = error, -step
        return best, least

    return downwards


def _sweep(upwards, downwards):
    @compiled
    def sweep(source_NK, limit, scales, importance_K, ladder, error_NG, step_NG):
        scale_NG, byte_NG, scale_2_N = scales
        floor_N, size = ladder[7], u64(source_NK.shape[1] // error_NG.shape[1])
        scratch = np.empty(size, np.float32), np.empty(size, np.float64)
        for n in range(error_NG.shape[0]):
            row = source_NK[n]
            for g in range(error_NG.shape[1]):
                start, least = u64(g) * size, error_NG[n, g]
                given = (scale_NG[n, g], np.int64(byte_NG[n, g]), scale_2_N[n], floor_N[n])
                best = 0
                if np.isfinite(given[0]):
                    best, least = upwards(row, start, limit, importance_K, scratch, ladder, given, least)
                    below, least = downwards(row, start, limit, importance_K, scratch, ladder, given, least)
                    best = below if below != 0 else best
                error_NG[n, g], step_NG[n, g] = least, best

    return sweep


@compiled
def _scale_at(step, ladder, given):
    """Return the scale of a step, with the sign of the stored one; 0 where there is none."""
    _first, _limit, up, down, values, top, _no_half, _floor_N, rounding = ladder
    stored, byte, _scale_2, floor = given
    if values.size > 0:
        moved = byte + (step - 1 if step > 0 else step)
        if byte > top or moved < max(floor, 1) or moved > top:
            return np.float32(0)
        scale = np.float32(values[moved])
        return np.float32(-scale) if stored < 0 else scale
    factor = np.float32(1)
    if step != 1:
        factor = up[step - 2] if step > 1 else down[-step - 1]
    return _stored_float(np.float32(stored * factor), rounding)


@compiled
def _stored_float(scale, rounding):
    """Round to the dtype of stored scales, ties to even; 0 where the result is subnormal or infinite there."""
    kept, least, most = scale, np.float32(2.0**-126), np.float32(3.4e38)
    if rounding != TO_FLOAT32:
        drop = u32(16) if rounding == TO_BFLOAT16 else u32(13)
        bits = bits_of(scale)
        odd = u32(u32(bits >> drop) & u32(1))
        rounded = u32(u32(bits + u32(u32(u32(1) << u32(drop - u32(1))) - u32(1))) + odd)
        kept = float_of(u32(u32(rounded >> drop) << drop))
    if rounding == TO_FLOAT16:
        least, most = np.float32(2.0**-14), np.float32(65504)
    return kept if abs(kept) >= least and abs(kept) <= most else np.float32(0)


def _float_values(exponent_bits, mantissa_bits):
    """Build the numbers of small floats: the arithmetic of `_float_encoder`."""
    exponent_shift = 128 - (1 << (exponent_bits - 1))
    bias, threshold_bits = np.uint32(exponent_shift << 23), np.uint32((exponent_shift + 1) << 23)
    threshold = np.float32(2.0 ** (exponent_shift - 126))
    drop, below_half = np.uint32(23 - mantissa_bits), np.uint32((1 << (22 - mantissa_bits)) - 1)
    mask, first_normal = (np.uint32((1 << (exponent_bits + mantissa_bits)) - 1), np.uint32(1 << mantissa_bits))

    @compiled
    def write_values(row, start, limit, group, values):
        inverse, _lowest, _scale, _zero, _scale_2 = group
        limit_bits = bits_of(limit) if limit > 0 else MAGNITUDE
        for k in range(u64(values.size)):
            bits = bits_of(np.float32(float_of(source_bits(row[start + k])) * inverse))
            sign, magnitude = u32(bits & SIGN), min(u32(bits & MAGNITUDE), limit_bits)
            subnormal = u32(bits_of(np.float32(float_of(magnitude) + threshold)) - threshold_bits)
            scaled = subnormal if magnitude < threshold_bits else u32(magnitude - bias)
            rounded = u32(u32(u32(scaled + below_half) >> drop) & mask)
            kept = u32(rounded << drop)
            value = np.float32(float_of(u32(kept + threshold_bits)) - threshold)
            if rounded >= first_normal:
                value = float_of(u32(kept + bias))
            values[k] = float_of(u32(bits_of(value) | sign))

    return write_values


def _symmetric_values(lowest_code, highest_code):
    """Build the numbers of integers, half to even and clamped."""
    lowest_code, highest_code = np.float32(lowest_code), np.float32(highest_code)

    @compiled
    def write_values(row, start, limit, group, values):
        inverse, _lowest, _scale, _zero, _scale_2 = group
        for k in range(u64(values.size)):
            x = np.float32(float_of(source_bits(row[start + k])) * inverse)
            values[k] = min(max(np.float32(np.rint(x)), lowest_code), highest_code)

    return write_values


def _asymmetric_values(num_bits):
    """Build the numbers of integers with a zero point, half to even and clamped, less the zero point."""
    highest = np.float32((1 << num_bits) - 1)

    @compiled
    def write_values(row, start, limit, group, values):
        inverse, lowest, _scale, zero, _scale_2 = group
        for k in range(u64(values.size)):
            weight = float_of(source_bits(row[start + k]))
            x = np.float32(np.float32(np.float64(weight) - lowest) * inverse)
            values[k] = np.float32(min(max(np.float32(np.rint(x)), np.float32(0)), highest) - zero)

    return write_values
