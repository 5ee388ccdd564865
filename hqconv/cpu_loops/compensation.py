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

from hqconv.cpu_loops.arithmetic import count_exact, float_of, fold_squares, source_bits, u64
from hqconv.cpu_loops.codes import pack_row
from hqconv.cpu_loops.encoders import limit_bits_of, rounder
from hqconv.jit import compiled
from hqconv.schemas.dtypes import CodeKind

_LANES = 8  # rows that are rounded side by side
_LARGEST = 3.4028234663852886e38  # of float32


@functools.cache
def loss_meter(code):
    """Return the compiled loop that measures a matrix's losses in a `CodeType`.

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
    """Return the compiled loop that encodes a matrix in a `CodeType` and measures its error as `encoders.encoder` does.

    encode(source_NK, limit, groups, factors, changed_NU, out), with out (packed_NB, error_N, power_N, exact_N): units
    of one or more tiles that have `changed` get codes of the corrected weights, the others those of the weights.
    """
    visit, num_bits = _tile_visitor(_nearest(code)), code.num_bits

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
    """Return the function (weight, limit, group, is_kept) → (code, decoded weight).

    is_kept: the code is that of `encoders.encoder`, also where 32-bit integers overflow.
    """
    new_code, kept_code, has_zero = rounder(code), rounder(code, wraps=True), code.kind == CodeKind.ASYM_INT

    @compiled
    def nearest(weight, limit, group, is_kept):
        inverse, lowest, scale, zero, scale_2 = group
        x = (np.float32(np.float64(weight) - lowest) if has_zero else weight) * inverse
        limit_bits = limit_bits_of(limit)
        code, number = kept_code(x, limit_bits) if is_kept else new_code(x, limit_bits)
        if has_zero:
            number = np.float32(number - zero)
        return code, np.float32(np.float32(number * scale) * scale_2)

    return nearest
