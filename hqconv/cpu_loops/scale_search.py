"""Compiled CPU loops that measure what candidate scales would lose, without storing codes.

The arithmetic is that of `encoders`: the same codes and decoded values, so that what is measured is what will be.
Shape legend: N rows, K columns, G groups along K.
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
    float_of,
    fold_sum,
    source_bits,
    u32,
    u64,
)
from hqconv.jit import compiled


@functools.cache
def scorer(code):
    """The compiled loop that measures a matrix's errors in `code`: (kind, bits, exponent bits, mantissa bits).

    score(source_NK, limit, groups, importance_K, error_NG), with groups (inverse_NG, lowest_NG, scale_NG, zero_NG,
    scale_2_N) as `encoders.encoder` takes them: `error_NG` gets the float64 sums of (w - decoded)**2 * importance in
    the order of `fold_sum` over each group's columns.
    """
    kind, num_bits, exponent_bits, mantissa_bits = code
    if kind == FLOAT:
        return _over_groups(_float_terms(exponent_bits, mantissa_bits))
    if kind == ASYM_INT:
        return _over_groups(_asymmetric_terms(num_bits))
    return _over_groups(_symmetric_terms(num_bits, kind == SYM_INT))


def _over_groups(write_terms):
    @compiled
    def score(source_NK, limit, groups, importance_K, error_NG):
        inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N = groups
        size = u64(source_NK.shape[1] // error_NG.shape[1])
        terms = np.empty(size, np.float64)
        for n in range(error_NG.shape[0]):
            for g in range(error_NG.shape[1]):
                start = u64(g) * size
                group = (inverse_NG[n, g], lowest_NG[n, g], scale_NG[n, g], zero_NG[n, g], scale_2_N[n])
                write_terms(source_NK[n], start, limit, group, importance_K, terms)
                error_NG[n, g] = fold_sum(terms)

    return score


def _float_terms(exponent_bits, mantissa_bits):
    """Small floats: see `encoders` for the arithmetic."""
    exponent_shift = 128 - (1 << (exponent_bits - 1))
    bias, threshold_bits = np.uint32(exponent_shift << 23), np.uint32((exponent_shift + 1) << 23)
    threshold = np.float32(2.0 ** (exponent_shift - 126))
    drop, below_half = np.uint32(23 - mantissa_bits), np.uint32((1 << (22 - mantissa_bits)) - 1)
    mask, first_normal = (
        np.uint32((1 << (exponent_bits + mantissa_bits)) - 1),
        np.uint32(1 << mantissa_bits),
    )

    @compiled
    def write_terms(row, start, limit, group, importance_K, terms):
        inverse, _lowest, scale, _zero, scale_2 = group
        limit_bits = bits_of(limit) if limit > 0 else MAGNITUDE
        for k in range(u64(terms.size)):
            weight = float_of(source_bits(row[start + k]))
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
            difference = np.float64(weight) - np.float64(decoded)
            terms[k] = (difference * difference) * importance_K[start + k]

    return write_terms


def _symmetric_terms(num_bits, is_offset):
    """Integers, half to even and clamped."""
    highest = np.float32((1 << (num_bits - 1)) - 1)
    lowest_code = np.float32(-(1 << (num_bits - 1)) if is_offset else -highest)

    @compiled
    def write_terms(row, start, limit, group, importance_K, terms):
        inverse, _lowest, scale, _zero, scale_2 = group
        for k in range(u64(terms.size)):
            weight = float_of(source_bits(row[start + k]))
            code = min(max(np.float32(np.rint(np.float32(weight * inverse))), lowest_code), highest)
            decoded = np.float32(np.float32(code * scale) * scale_2)
            difference = np.float64(weight) - np.float64(decoded)
            terms[k] = (difference * difference) * importance_K[start + k]

    return write_terms


def _asymmetric_terms(num_bits):
    """Integers with a zero point, half to even and clamped."""
    highest = np.float32((1 << num_bits) - 1)

    @compiled
    def write_terms(row, start, limit, group, importance_K, terms):
        inverse, lowest, scale, zero, scale_2 = group
        for k in range(u64(terms.size)):
            weight = float_of(source_bits(row[start + k]))
            x = np.float32(np.float32(np.float64(weight) - lowest) * inverse)
            code = min(max(np.float32(np.rint(x)), np.float32(0)), highest)
            decoded = np.float32(np.float32(np.float32(code - zero) * scale) * scale_2)
            difference = np.float64(weight) - np.float64(decoded)
            terms[k] = (difference * difference) * importance_K[start + k]

    return write_terms
