"""Compiled CPU loops of the search for scales: errors under other scales, sums for a fit, sweeps over scales.

Shape legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from hqconv.cpu_loops.arithmetic import (
    bits_of,
    float_of,
    fold_sum,
    group_range,
    source_bits,
    u32,
    u64,
)
from hqconv.cpu_loops.encoders import group_reader, limit_bits_of, rounder
from hqconv.jit import Function, compiled, inlined
from hqconv.schemas.dtypes import CodeKind

TO_BFLOAT16, TO_FLOAT16, TO_FLOAT32 = range(3)  # rounding of scales that are wider than 8 bits


class Searcher(NamedTuple):
    """Compiled loops that measure the scales of a matrix in one code type, with the arithmetic of `encoders.encoder`.

    groups: (inverse_NG, lowest_NG, scale_NG, zero_NG, scale_2_N) as an encoder takes them. Sums are float64 in the
    order of `fold_sum` over each group's columns.

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
    `down`, rounded as `rounding` says.
    """

    first: int
    limit: np.float32
    up: np.ndarray
    down: np.ndarray
    values: np.ndarray
    top: int
    no_half: int
    rounding: int


@functools.cache
def searcher(code):
    """Return the compiled loops that search for scales in a `CodeType`."""
    error_of = _group_error(code)
    sweep = _sweep(_upwards(error_of), _downwards(error_of, _clipped_error(*code.bounds)))
    return Searcher(_score(code, error_of), _fit(code), sweep)


def _number_writer(code):
    nearest, has_zero = rounder(code), code.kind == CodeKind.ASYM_INT

    @inlined
    def write_numbers(row, start, limit_bits, group, numbers):
        """Write the numbers of a group's codes, less the zero point."""
        inverse, lowest, _scale, zero, _scale_2 = group
        for k in range(u64(numbers.size)):
            weight = float_of(source_bits(row[start + k]))
            if has_zero:
                _code, number = nearest(
                    np.float32(np.float64(weight) - lowest) * inverse, limit_bits
                )
                numbers[k] = np.float32(number - zero)
            else:
                _code, number = nearest(weight * inverse, limit_bits)
                numbers[k] = number

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


def _clipped_error(lowest_code, highest_code):
    lowest_code, highest_code = np.float32(lowest_code), np.float32(highest_code)

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

    return clipped_error_of


def _score(code, error_of):
    group_at = group_reader(code)

    @compiled
    def score(source_NK, limit, groups, error_NG):
        size, limit_bits = u64(source_NK.shape[1] // error_NG.shape[1]), limit_bits_of(limit)
        scratch = np.empty(size, np.float32), np.empty(size, np.float64)
        for n in range(error_NG.shape[0]):
            for g in range(error_NG.shape[1]):
                group = group_at(groups, n, g)
                error_NG[n, g] = error_of(source_NK[n], u64(g) * size, limit_bits, group, scratch)

    return score


def _fit(code):
    write_numbers, group_at = _number_writer(code), group_reader(code)

    @compiled
    def fit(source_NK, limit, groups, products_NG, squares_NG, powers_NG):
        size, limit_bits = u64(source_NK.shape[1] // products_NG.shape[1]), limit_bits_of(limit)
        numbers, products, squares, powers = (
            np.empty(size, np.float32),
            np.empty(size),
            np.empty(size),
            np.empty(size),
        )
        for n in range(products_NG.shape[0]):
            row = source_NK[n]
            for g in range(products_NG.shape[1]):
                start = u64(g) * size
                write_numbers(row, start, limit_bits, group_at(groups, n, g), numbers)
                for k in range(size):
                    value, weight = (
                        np.float64(numbers[k]),
                        np.float64(float_of(source_bits(row[start + k]))),
                    )
                    products[k], squares[k], powers[k] = (
                        weight * value,
                        value * value,
                        weight * weight,
                    )
                products_NG[n, g], squares_NG[n, g] = fold_sum(products), fold_sum(squares)
                powers_NG[n, g] = fold_sum(powers)

    return fit


def _upwards(error_of):
    @compiled
    def upwards(row, start, limit_bits, scratch, ladder, given, least):
        """Return the step of the least error among larger scales, 0 for none, and that error."""
        _stored, byte, scale_2, _floor = given
        highest, lowest = group_range(row, start, u64(scratch[1].size))
        end, best = np.float32(max(highest, np.float32(-lowest)) * ladder.limit), 0
        has_bytes = ladder.values.size > 0
        for step in range(ladder.first, (ladder.top if has_bytes else ladder.up.size + 1) + 1):
            scale = _scale_at(step, ladder, given)
            is_small = np.float32(abs(scale) * scale_2) < end
            if step > 1 and not (is_small or (has_bytes and byte + step - 1 < ladder.no_half)):
                break
            if scale != 0:
                group = (
                    np.float32(1) / np.float32(scale * scale_2),
                    0.0,
                    scale,
                    np.float32(0),
                    scale_2,
                )
                error = error_of(row, start, limit_bits, group, scratch)
                if error < least:
                    least, best = error, step
        return best, least

    return upwards


def _downwards(error_of, clipped_error_of):
    @compiled
    def downwards(row, start, limit_bits, scratch, ladder, given, least):
        """Return the step of the least error among smaller scales, 0 for none, and that error."""
        scale_2, best = given[2], 0
        for step in range(1, (ladder.top if ladder.values.size > 0 else ladder.down.size) + 1):
            scale = _scale_at(-step, ladder, given)
            if scale == 0:
                break
            group = (
                np.float32(1) / np.float32(scale * scale_2),
                0.0,
                scale,
                np.float32(0),
                scale_2,
            )
            if clipped_error_of(row, start, group, scratch[1]) >= least:
                break
            error = error_of(row, start, limit_bits, group, scratch)
            if error < least:
                least, best = error, -step
        return best, least

    return downwards


def _sweep(upwards, downwards):
    @compiled
    def sweep(source_NK, limit, steps, ladder, error_NG, step_NG):
        size, limit_bits = u64(source_NK.shape[1] // error_NG.shape[1]), limit_bits_of(limit)
        scratch = np.empty(size, np.float32), np.empty(size, np.float64)
        for n in range(error_NG.shape[0]):
            row = source_NK[n]
            for g in range(error_NG.shape[1]):
                start, least = u64(g) * size, error_NG[n, g]
                given = (
                    steps.scale[n, g],
                    np.int64(steps.byte[n, g]),
                    steps.scale_2[n],
                    steps.floor[n],
                )
                best = 0
                if np.isfinite(given[0]):
                    best, least = upwards(row, start, limit_bits, scratch, ladder, given, least)
                    below, least = downwards(row, start, limit_bits, scratch, ladder, given, least)
                    best = below if below != 0 else best
                error_NG[n, g], step_NG[n, g] = least, best

    return sweep


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
    return _stored_float(np.float32(stored * factor), ladder.rounding)


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
