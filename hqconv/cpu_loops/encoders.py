"""Compiled CPU loops that round weights to codes, encode a matrix and measure its error, and search for scales.

One is compiled for each code type, so that shifts and masks are constants: half the time of one loop for all.
Shape legend: N rows, K columns, G groups along K, B bytes of packed codes along K (K * bits / 8).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from hqconv.cpu_loops.codes import (
    MAGNITUDE,
    SIGN,
    bits_of,
    count_exact,
    float_of,
    fold_squares,
    fold_sum,
    group_range,
    pack_row,
    source_bits,
    u32,
    u64,
)
from hqconv.jit import Function, compiled, inlined
from hqconv.schemas.tensors import CodeKind

_OVERFLOW = np.float32(2.0**31)  # of 32-bit integers


@functools.cache
def rounder(code, wraps):
    """Return the compiled function that rounds to a `CodeType`: nearest(x, limit_bits) → (code, its number).

    x: a weight over its scale, less the lowest value if codes have a zero point. limit_bits: bits of the largest
    magnitude of a small float, or MAGNITUDE. The number is float32, before zero point and scale. wraps: numbers beyond
    32-bit integers get the least code, as in Humming's kernel, where they overflow.
    """
    if code.kind == CodeKind.FLOAT:
        return _float_rounder(code)
    least, most = (np.float32(end) for end in code.bounds)
    midpoint = np.int32(1 << (code.num_bits - 1))
    offset = midpoint if code.kind == CodeKind.SYM_INT else np.int32(0)
    has_sign = code.kind == CodeKind.SIGN_MAGNITUDE

    @compiled
    def nearest(x, limit_bits):  # half to even, and clamped
        rounded = np.float32(np.rint(np.float32(x)))
        number = min(max(rounded, least), most)
        if wraps:
            number = least if rounded >= _OVERFLOW else number
        integer = np.int32(number)
        if has_sign:
            return np.uint8(
                np.int32(abs(integer) | (midpoint if integer < 0 else np.int32(0)))
            ), number
        return np.uint8(np.int32(integer + offset)), number

    return nearest


@functools.cache
def _float_rounder(code):
    """Build the rounding to small floats: nearest, ties to the truncated number, saturated.

    Humming divides by 2**exponent_shift, which makes the target's subnormals float32 subnormals, and rounds
    their bits. Adding `threshold` rounds to the same float32 subnormal grid without the slow subnormals.
    """
    exponent_shift = 128 - (1 << (code.exponent_bits - 1))
    bias = np.uint32(exponent_shift << 23)
    threshold_bits = np.uint32((exponent_shift + 1) << 23)
    threshold = np.float32(2.0 ** (exponent_shift - 126))
    drop = np.uint32(23 - code.mantissa_bits)
    below_half = np.uint32((1 << (22 - code.mantissa_bits)) - 1)
    mask = np.uint32((1 << (code.num_bits - 1)) - 1)
    first_normal = np.uint32(1 << code.mantissa_bits)
    sign_shift = np.uint32(32 - code.num_bits)

    @compiled
    def nearest(x, limit_bits):
        bits = bits_of(np.float32(x))
        sign = u32(bits & SIGN)
        magnitude = min(u32(bits & MAGNITUDE), limit_bits)
        subnormal = u32(bits_of(np.float32(float_of(magnitude) + threshold)) - threshold_bits)
        scaled = subnormal if magnitude < threshold_bits else u32(magnitude - bias)
        rounded = u32(u32(u32(scaled + below_half) >> drop) & mask)
        shifted = u32(rounded << drop)
        value = np.float32(float_of(u32(shifted + threshold_bits)) - threshold)
        if rounded >= first_normal:
            value = float_of(u32(shifted + bias))
        return np.uint8(u32(rounded | u32(sign >> sign_shift))), float_of(
            u32(bits_of(value) | sign)
        )

    return nearest


@compiled
def limit_bits_of(limit):
    """Return the `limit_bits` of a limit, 0 for none."""
    return bits_of(limit) if limit > 0 else MAGNITUDE


class GroupArrays(NamedTuple):
    """Scales and zero points of every group of N rows.

    A code is round((w - lowest) * inverse); it decodes to (code - zero) * scale * scale_2 in float32. inverse, scale,
    zero: float32 [N, G]; lowest: float64 [N, G]; scale_2: float32 [N]. lowest and zero are only read for codes with a
    zero point.
    """

    inverse: np.ndarray
    lowest: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    scale_2: np.ndarray


@functools.cache
def encoder(code):
    """Return the compiled loop that encodes a matrix in a `CodeType`.

    encode(source_NK, limit, groups, packed_NB, error_N, power_N, exact_N): small floats are clamped to ±`limit` where
    `limit` > 0. `error_N` and `power_N` get each row's float64 sums of (w - decoded)**2 and w**2, and `exact_N`, unless
    it is empty, the number of groups without any error.
    """
    encode_group = _group_encoder(code)
    group_at = _group_reader(code)
    num_bits = code.num_bits

    @compiled
    def encode(source_NK, limit, groups, packed_NB, error_N, power_N, exact_N):
        num_columns = source_NK.shape[1]
        num_groups = groups.scale.shape[1]
        # Two arrays, which LLVM knows not to overlap: parts of one are half as fast.
        weights = np.empty(num_columns, np.float32)
        decoded = np.empty(num_columns, np.float32)
        codes = np.empty(num_columns, np.uint8)
        sums = np.empty((2, num_columns // 4), np.float64)
        size = u64(num_columns // num_groups)
        limit_bits = limit_bits_of(limit)
        for n in range(source_NK.shape[0]):
            for g in range(num_groups):
                start = u64(g) * size
                group = group_at(groups, n, g)
                encode_group(source_NK[n], start, size, limit_bits, group, weights, codes, decoded)
            pack_row(codes, num_bits, packed_NB[n])
            error_N[n], power_N[n] = fold_squares(weights, decoded, sums[0], sums[1])
            if exact_N.size > 0:
                exact_N[n] = count_exact(weights, decoded, num_groups)

    return encode


def _group_reader(code):
    """Build the function (groups, n, g) → (inverse, lowest, scale, zero, scale_2) of group g in row n."""
    has_zero = code.kind == CodeKind.ASYM_INT

    @compiled
    def group_at(groups, n, g):
        inverse = groups.inverse[n, g]
        scale = groups.scale[n, g]
        scale_2 = groups.scale_2[n]
        if has_zero:
            return inverse, groups.lowest[n, g], scale, groups.zero[n, g], scale_2
        return inverse, 0.0, scale, np.float32(0), scale_2

    return group_at


def _group_rounder(code, wraps=False):
    """Build the function (weight, limit_bits, group) → (code, its number less the zero point)."""
    nearest = rounder(code, wraps)
    has_zero = code.kind == CodeKind.ASYM_INT

    @inlined
    def round_weight(weight, limit_bits, group):
        inverse, lowest, _scale, zero, _scale_2 = group
        if has_zero:  # in float64 and rounded once: both fl(w - lowest) and a fused multiply-add
            above = np.float32(np.float64(weight) - lowest)
            code, number = nearest(above * inverse, limit_bits)
            return code, np.float32(number - zero)
        return nearest(weight * inverse, limit_bits)

    return round_weight


def _group_encoder(code):
    """Build the loop over one group: its weights, codes and decoded weights."""
    round_weight = _group_rounder(code, wraps=True)

    @inlined
    def encode_group(row, start, group_size, limit_bits, group, weights, codes, decoded):
        _inverse, _lowest, scale, _zero, scale_2 = group
        for k in range(start, start + group_size):
            weight = float_of(source_bits(row[k]))
            weights[k] = weight
            codes[k], number = round_weight(weight, limit_bits, group)
            decoded[k] = number * scale * scale_2

    return encode_group


# --- columns that make good each other's errors


@functools.cache
def column_rounder(code):
    """Return the compiled loop that rounds the columns of each row one after the other, under the best of its scales.

    round_columns(begin, end, group, target, wanted, bound, limit_bits, scale_range): the rows of all experts from
    `begin` to `end`. group: `quantized.GroupColumns` of arrays. target, wanted: w and Mᵀ w, [E, S, N]. Column j becomes
    w_j + Σ_{i<j} M_ij e_i / M_jj, with the errors e of the columns before; the loss, the sum of (M_jj e_j)², must be
    below `bound`, [E, N]. The scale that fits the best codes is tried last, rounded as `_stored_float` says, unless
    this has no number.
    """
    try_scale = _scale_trial(code)

    @compiled
    def round_columns(begin, end, group, target, wanted, bound, limit_bits, scale_range):
        _, num_columns, num_rows = target.shape
        num_scales = group.scales.shape[0]
        row = np.empty((2, num_columns), np.float32)
        numbers, values = np.empty((2, num_columns), np.float32)
        for index in range(begin, end):
            e, n = divmod(index, num_rows)
            m = group.factor[min(e, group.factor.shape[0] - 1)]
            row[0] = target[e, :, n]
            row[1] = wanted[e, :, n]
            zero, scale_2 = group.zero[e, :, n], group.scale_2[e, n]
            least, fitted = np.float32(np.inf), np.float32(0)
            scale = group.scales[0, e, :, n].copy()
            for c in range(num_scales + 1):
                if c < num_scales:
                    scale[:] = group.scales[c, e, :, n]
                else:
                    scale[0] = _stored_float(fitted, scale_range)
                    if scale[0] == 0:
                        break
                lost, fit = try_scale(
                    row, m, scale, zero, scale_2, limit_bits, least, numbers, values
                )
                if lost < least:
                    least, fitted = lost, fit
                    if lost < bound[e, n]:
                        group.scale[e, n] = scale[0]
                        group.number[e, :, n] = numbers
                        group.value[e, :, n] = values
            group.loss[e, n] += least

    return round_columns


def _scale_trial(code):
    round_weight = _group_rounder(code)

    @compiled
    def try_scale(row, m, scale_L, zero_L, scale_2, limit_bits, least, numbers, values):
        """Round a row of target and wanted, [2, S]; return its loss, and the scale that fits its codes.

        At once where it loses more than `least`.
        """
        num_columns = row.shape[1]
        lost = products = squares = np.float32(0)
        carried = np.zeros(num_columns, np.float32)
        for j in range(num_columns):
            g = min(j, scale_L.size - 1)
            scale, zero = scale_L[g], zero_L[g]
            both = np.float32(scale * scale_2)
            inverse = np.float32(1) / both if both != 0 else np.float32(0)
            group = inverse, np.float64(np.float32(zero * -scale)), scale, zero, scale_2
            corrected = row[0, j] + carried[j] / m[j, j]
            _, number = round_weight(corrected, limit_bits, group)
            numbers[j] = number + zero
            values[j] = number * scale * scale_2
            error = (corrected - values[j]) * m[j, j]
            lost += error * error
            if not lost < least:
                break
            output = row[1, j] - error
            products += row[1, j] * output
            squares += output * output
            difference = row[0, j] - values[j]
            for i in range(j + 1, num_columns):
                carried[i] += difference * m[j, i]
        change = products / squares if squares > 0 else np.float32(0)
        return lost, np.float32(scale_L[0] * change) if 0.5 < change < 2 else np.float32(0)

    return try_scale


# --- search for scales


class Searcher(NamedTuple):
    """Compiled loops that measure the scales of a matrix in one code type, with the arithmetic of `encoder`.

    groups: `GroupArrays`. Sums are float64 in the order of `fold_sum` over each group's columns.

    score(source_NK, limit, groups, error_NG): sums of (w - decoded)**2.
    fit(source_NK, limit, groups, products_NG, squares_NG, powers_NG): sums of w * v, of v * v and of w * w, where v is
    the number of a code less the zero point.
    sweep(source_NK, limit, steps, ladder, error_NG, step_NG): tries other scales of symmetric codes, as
    `quantization.scale_search.Ladder` describes. `error_NG` holds the errors to be beaten, and gets the least ones;
    `step_NG` gets their steps.
    """

    score: Function
    fit: Function
    sweep: Function


class StepStart(NamedTuple):
    """Scales from which steps are taken: float32 [N, G], 8-bit ones as bytes [N, G] without their sign too.

    scale_2, floor: of each row, float32 [N] and int64 [N]; a scale's byte is not below the floor.
    """

    scale: np.ndarray
    byte: np.ndarray
    scale_2: np.ndarray
    floor: np.ndarray


class StepTable(NamedTuple):
    """A `quantization.scale_search.Ladder` for loops.

    values: value of each byte of an 8-bit scale, float32 [256]; empty for wider scales, whose multiples are `up` and
    `down`, rounded as `scale_range` says, see `_stored_float`.
    """

    first: int
    limit: np.float32
    up: np.ndarray
    down: np.ndarray
    values: np.ndarray
    top: int
    no_half: int
    scale_range: tuple[int, float, float]


@functools.cache
def searcher(code):
    """Return the compiled loops that search for scales in a `CodeType`."""
    error_of = _group_error(code)
    return Searcher(_score(code, error_of), _fit(code), _sweep(code, error_of))


def _number_writer(code):
    round_weight = _group_rounder(code)

    @inlined
    def write_numbers(row, start, limit_bits, group, numbers):
        """Write the numbers of a group's codes, less the zero point."""
        for k in range(u64(numbers.size)):
            weight = float_of(source_bits(row[start + k]))
            _code, numbers[k] = round_weight(weight, limit_bits, group)

    return write_numbers


def _group_error(code):
    write_numbers = _number_writer(code)

    @compiled
    def error_of(row, start, limit_bits, group, scratch):
        """Return the error of a group under its scale."""
        _inverse, _lowest, scale, _zero, scale_2 = group
        numbers, terms = scratch
        write_numbers(row, start, limit_bits, group, numbers)
        for k in range(u64(terms.size)):
            decoded = np.float32(np.float32(numbers[k] * scale) * scale_2)
            difference = np.float64(float_of(source_bits(row[start + k]))) - np.float64(decoded)
            terms[k] = difference * difference
        return fold_sum(terms)

    return error_of


def _score(code, error_of):
    group_at = _group_reader(code)

    @compiled
    def score(source_NK, limit, groups, error_NG):
        size = u64(source_NK.shape[1] // error_NG.shape[1])
        limit_bits = limit_bits_of(limit)
        scratch = np.empty(size, np.float32), np.empty(size, np.float64)
        for n in range(error_NG.shape[0]):
            for g in range(error_NG.shape[1]):
                group = group_at(groups, n, g)
                error_NG[n, g] = error_of(source_NK[n], u64(g) * size, limit_bits, group, scratch)

    return score


def _fit(code):
    write_numbers = _number_writer(code)
    group_at = _group_reader(code)

    @compiled
    def fit(source_NK, limit, groups, products_NG, squares_NG, powers_NG):
        size = u64(source_NK.shape[1] // products_NG.shape[1])
        limit_bits = limit_bits_of(limit)
        numbers = np.empty(size, np.float32)
        products, squares, powers = np.empty((3, size))
        for n in range(products_NG.shape[0]):
            row = source_NK[n]
            for g in range(products_NG.shape[1]):
                start = u64(g) * size
                write_numbers(row, start, limit_bits, group_at(groups, n, g), numbers)
                for k in range(size):
                    value = np.float64(numbers[k])
                    weight = np.float64(float_of(source_bits(row[start + k])))
                    products[k] = weight * value
                    squares[k] = value * value
                    powers[k] = weight * weight
                products_NG[n, g] = fold_sum(products)
                squares_NG[n, g] = fold_sum(squares)
                powers_NG[n, g] = fold_sum(powers)

    return fit


def _sweep(code, error_of):
    upwards = _upwards(error_of)
    downwards = _downwards(code, error_of)

    @compiled
    def sweep(source_NK, limit, steps, ladder, error_NG, step_NG):
        size = u64(source_NK.shape[1] // error_NG.shape[1])
        limit_bits = limit_bits_of(limit)
        scratch = np.empty(size, np.float32), np.empty(size, np.float64)
        for n in range(error_NG.shape[0]):
            row = source_NK[n]
            for g in range(error_NG.shape[1]):
                start = u64(g) * size
                least = error_NG[n, g]
                best = 0
                scale = steps.scale[n, g]
                byte = np.int64(steps.byte[n, g])
                given = (scale, byte, steps.scale_2[n], steps.floor[n])
                if np.isfinite(scale):
                    best, least = upwards(row, start, limit_bits, scratch, ladder, given, least)
                    below, least = downwards(row, start, limit_bits, scratch, ladder, given, least)
                    best = below if below != 0 else best
                error_NG[n, g] = least
                step_NG[n, g] = best

    return sweep


def _upwards(error_of):
    @compiled
    def upwards(row, start, limit_bits, scratch, ladder, given, least):
        """Return the step of the least error among larger scales, 0 for none, and that error."""
        _stored, byte, scale_2, _floor = given
        highest, lowest = group_range(row, start, u64(scratch[1].size))
        end = np.float32(max(highest, np.float32(-lowest)) * ladder.limit)
        best = 0
        has_bytes = ladder.values.size > 0
        for step in range(ladder.first, (ladder.top if has_bytes else ladder.up.size + 1) + 1):
            scale = _scale_at(step, ladder, given)
            is_small = np.float32(abs(scale) * scale_2) < end
            if step > 1 and not (is_small or (has_bytes and byte + step - 1 < ladder.no_half)):
                break
            if scale != 0:
                error = error_of(row, start, limit_bits, _symmetric(scale, scale_2), scratch)
                if error < least:
                    least = error
                    best = step
        return best, least

    return upwards


def _downwards(code, error_of):
    lowest_code, highest_code = (np.float32(end) for end in code.bounds)

    @compiled
    def clipped_error_of(row, start, group, terms):
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
            terms[k] = difference * difference if is_beyond else 0.0
        return fold_sum(terms)

    @compiled
    def downwards(row, start, limit_bits, scratch, ladder, given, least):
        """Return the step of the least error among smaller scales, 0 for none, and that error."""
        scale_2 = given[2]
        best = 0
        for step in range(1, (ladder.top if ladder.values.size > 0 else ladder.down.size) + 1):
            scale = _scale_at(-step, ladder, given)
            if scale == 0:
                break
            group = _symmetric(scale, scale_2)
            if clipped_error_of(row, start, group, scratch[1]) >= least:
                break
            error = error_of(row, start, limit_bits, group, scratch)
            if error < least:
                least = error
                best = -step
        return best, least

    return downwards


@compiled
def _symmetric(scale, scale_2):
    """Return a group, as of `_group_reader`, without a zero point and with the inverse of its stored scale."""
    inverse = np.float32(1) / np.float32(scale * scale_2)
    return inverse, 0.0, scale, np.float32(0), scale_2


@compiled
def _scale_at(step, ladder, given):
    """Return the scale of a step, with the sign of the stored one; 0 where there is none."""
    stored, byte, _scale_2, floor = given
    if ladder.values.size > 0:
        moved = byte + (step - 1 if step > 0 else step)
        if byte > ladder.top or moved < max(floor, 1) or moved > ladder.top:
            return np.float32(0)
        scale = np.float32(ladder.values[moved])
        return np.float32(-scale) if stored < 0 else scale
    factor = np.float32(1)
    if step != 1:
        factor = ladder.up[step - 2] if step > 1 else ladder.down[-step - 1]
    return _stored_float(np.float32(stored * factor), ladder.scale_range)


@compiled
def _stored_float(scale, scale_range):
    """Round to the dtype of stored scales, ties to even; 0 where it has no such normal number.

    scale_range: of `group_scales.stored_range`.
    """
    num_dropped, least, most = scale_range
    rounded = scale
    if num_dropped > 0:
        drop = u32(num_dropped)
        bits = bits_of(scale)
        odd = u32(u32(bits >> drop) & u32(1))
        bits = u32(u32(bits + u32(u32(u32(1) << u32(drop - u32(1))) - u32(1))) + odd)
        rounded = float_of(u32(u32(bits >> drop) << drop))
    return rounded if abs(rounded) >= least and abs(rounded) <= most else np.float32(0)
