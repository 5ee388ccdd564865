"""Compiled CPU loops: group ranges and error sums, and the bit arithmetic they share with the encoders. No torch.

Shape legend: N rows, K columns, G groups along K, B bytes of packed codes along K (K * bits / 8).

All arithmetic is IEEE single precision in the order of Humming's `quant_weight.cuh`; error sums are double
precision in the fixed folding order of `fold_sum`, so that a GPU gives the same bits.
Every loop releases the GIL: callers run one matrix per thread.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
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


@intrinsic
def _prefetch(typing_context, array_NK, n, k):
    """Prefetch the cache line of an element; the element need not exist."""

    def fetch(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        row = builder.mul(arguments[1], builder.extract_value(array.strides, 0))
        column = builder.mul(arguments[2], builder.extract_value(array.strides, 1))
        address = builder.add(builder.ptrtoint(array.data, row.type), builder.add(row, column))
        pointer, i32 = context.get_value_type(types.voidptr), context.get_value_type(types.int32)
        function = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        call = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        builder.call(
            call, [builder.inttoptr(address, pointer), i32(0), i32(3), i32(1)]
        )  # to read, all caches, data
        return context.get_dummy_value()

    return types.void(array_NK, types.int64, types.int64), fetch


@compiled
def prefetch(array_NK, n, start, length):
    """Prefetch a run of row `n` during other work: the hardware prefetcher stops at the end of a page."""
    per_line = 64 // array_NK.itemsize
    for k in range(start, start + length, per_line):
        _prefetch(array_NK, n, k)


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
    num_groups = source_NK.shape[1] // group_size
    for n in range(source_NK.shape[0]):
        row = source_NK[n]
        prefetch(source_NK, n + 2, 0, row.size)
        for g in range(num_groups):
            highest_NG[n, g], lowest_NG[n, g] = group_range(
                row, u64(g) * u64(group_size), u64(group_size)
            )


@compiled
def group_range(row, start, length):
    """Return the largest and the smallest value of a run of a row, float32; Humming starts from ±1e-30.

    Integer comparison of the bits is exact and order-free, and it vectorises where float max does not.
    """
    largest, smallest = _bit_range(row, start, length)
    return float_of(u32(max(np.int32(_TINY_BITS), largest))), float_of(
        max(_TINY_BITS | SIGN, smallest)
    )


def _bit_range(row, start, length):
    """Return float32 bits of the largest number as int32, and of the smallest as uint32, ignoring all others."""
    raise AssertionError("compiled through its overload")


@overload(_bit_range, inline="always")
def _bit_range_overload(row, start, length):
    signed, unsigned = (np.int16, np.uint16) if row.dtype == types.uint16 else (np.int32, np.uint32)
    shift = 16 if row.dtype == types.uint16 else 0

    def bit_range(row, start, length):
        highest, lowest = signed(0), unsigned(0)
        for k in range(length):
            stored = row[start + k]
            highest = max(highest, signed(stored))
            lowest = max(lowest, stored)
        return np.int32(np.int32(highest) << shift), u32(u32(lowest) << u32(shift))

    return bit_range


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
def fold_rows(terms_RK):
    """Compute `fold_sum` of every row."""
    sums = np.empty(terms_RK.shape[0])
    for r in range(terms_RK.shape[0]):
        sums[r] = fold_sum(terms_RK[r])
    return sums


@compiled
def fold_squares(weights, decoded, errors, powers):
    """Return the sums of (weight - decoded)**2 and of weight**2 in float64, in the order of `fold_sum`.

    Columns come in multiples of 32, so the first three folds are done on the way in; `errors` and `powers` are scratch
    of K / 8.
    """
    e = u64(weights.size // 8)
    for k in range(e):
        w0, w1 = np.float64(weights[k]), np.float64(weights[k + e])
        w2, w3 = np.float64(weights[k + u64(2) * e]), np.float64(weights[k + u64(3) * e])
        w4, w5 = np.float64(weights[k + u64(4) * e]), np.float64(weights[k + u64(5) * e])
        w6, w7 = np.float64(weights[k + u64(6) * e]), np.float64(weights[k + u64(7) * e])
        powers[k] = _third_fold(w0, w1, w2, w3, w4, w5, w6, w7)
        w0, w1 = w0 - np.float64(decoded[k]), w1 - np.float64(decoded[k + e])
        w2, w3 = w2 - np.float64(decoded[k + u64(2) * e]), w3 - np.float64(decoded[k + u64(3) * e])
        w4, w5 = w4 - np.float64(decoded[k + u64(4) * e]), w5 - np.float64(decoded[k + u64(5) * e])
        w6, w7 = w6 - np.float64(decoded[k + u64(6) * e]), w7 - np.float64(decoded[k + u64(7) * e])
        errors[k] = _third_fold(w0, w1, w2, w3, w4, w5, w6, w7)
    return fold_sum(errors), fold_sum(powers)


@compiled
def _third_fold(a0, a1, a2, a3, a4, a5, a6, a7):
    """Return the sum of eight squares, one from each eighth of a row, added as in three folds."""
    return ((a0 * a0 + a4 * a4) + (a2 * a2 + a6 * a6)) + ((a1 * a1 + a5 * a5) + (a3 * a3 + a7 * a7))


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
