"""Compiled CPU loops: group ranges and error sums, and the bit arithmetic they share with the encoders. No torch.

Shape legend: N rows, K columns, G groups along K, B bytes of packed codes along K (K * bits / 8).

All arithmetic is IEEE single precision in the order of Humming's `quant_weight.cuh`; error sums are double
precision in the fixed folding order of `fold_sum`, so that a GPU gives the same bits.
Every loop releases the GIL: callers run one matrix per thread.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from hqconv.jit import compiled

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
# Humming starts each group's range at ±1e-30, so that an all-zero group has a scale.
_TINY_BITS = np.uint32(np.float32(1e-30).view(np.uint32))


# numba's arithmetic on 32-bit integers gives 64 bits, and an index that may be negative is wrapped: both keep LLVM from
# using vectors. Hence `u32` around every operation, and unsigned indices.
u32, u64 = np.uint32, np.uint64


@intrinsic
def bits_of(typing_context, number):
    """Return the bit pattern of a float32."""

    def bitcast(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), bitcast


@intrinsic
def float_of(typing_context, bits):
    """Return the float32 of a bit pattern."""

    def bitcast(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), bitcast


def source_bits(stored):
    """Return the float32 bit pattern of a stored number: bfloat16 bits (uint16) or float32 bits (uint32)."""
    raise AssertionError("compiled through its overload")


@overload(source_bits, inline="always")
def _source_bits_overload(stored):
    if stored == types.uint16:
        return lambda stored: u32(u32(stored) << u32(16))
    return lambda stored: stored


@compiled
def group_ranges(source_NK, group_size, highest_NG, lowest_NG):
    """Write each group's largest and smallest value, float32, of bfloat16 bits (uint16) or float32 bits (uint32)."""
    size = u64(group_size)
    for n in range(highest_NG.shape[0]):
        for g in range(highest_NG.shape[1]):
            highest_NG[n, g], lowest_NG[n, g] = group_range(source_NK[n], u64(g) * size, size)


@compiled
def group_range(row, start, length):
    """Return the largest and the smallest value of a run of a row, float32; Humming starts from ±1e-30.

    Integer comparison of the bits is exact and order-free, and it vectorises where float max does not.
    """
    largest, smallest = np.int32(_TINY_BITS), u32(_TINY_BITS | SIGN)
    for k in range(length):
        bits = source_bits(row[start + k])
        largest = max(largest, np.int32(bits))
        smallest = max(smallest, bits)
    return float_of(u32(largest)), float_of(smallest)


@compiled
def fold_sum(terms):
    """Sum float64 `terms` in place by folding the upper half onto the lower: one order on every device."""
    length = u64(terms.size)
    while length > u64(1):
        half = (length + u64(1)) // u64(2)
        for k in range(length - half):
            terms[k] += terms[half + k]
        length = half
    return terms[0]


@compiled
def fold_squares(weights, decoded, errors, powers):
    """Return the sums of (weight - decoded)**2 and of weight**2 in float64, in the order of `fold_sum`.

    Columns come in multiples of 32, so the first two folds are done on the way in; `errors` and `powers` are scratch
    of K / 4.
    """
    q = u64(weights.size // 4)
    for k in range(q):
        w0, w1 = np.float64(weights[k]), np.float64(weights[k + q])
        w2, w3 = np.float64(weights[k + u64(2) * q]), np.float64(weights[k + u64(3) * q])
        powers[k] = _second_fold(w0, w1, w2, w3)
        w0, w1 = w0 - np.float64(decoded[k]), w1 - np.float64(decoded[k + q])
        w2, w3 = w2 - np.float64(decoded[k + u64(2) * q]), w3 - np.float64(decoded[k + u64(3) * q])
        errors[k] = _second_fold(w0, w1, w2, w3)
    return fold_sum(errors), fold_sum(powers)


@compiled
def _second_fold(a0, a1, a2, a3):
    """Return the sum of four squares, one from each quarter of a row, added as in two folds."""
    return (a0 * a0 + a2 * a2) + (a1 * a1 + a3 * a3)


@compiled
def count_exact(weights, decoded, num_groups):
    """Return the number of groups of a row that decode exactly to the source values."""
    group_size = u64(weights.size // num_groups)
    num_exact = 0
    for g in range(num_groups):
        num_wrong, start = 0, u64(g) * group_size
        for k in range(group_size):
            num_wrong += weights[start + k] != decoded[start + k]
        num_exact += num_wrong == 0
    return num_exact
