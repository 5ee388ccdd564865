"""Compiled sums over a decoded matrix and its source.

Shape legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

import numpy as np

from hqconv.compiled import compiled_sums


@compiled_sums
def sum_groups(weights_NK, bits_NK, decoded_NK, num_groups, widened, row):  # type: ignore[no-untyped-def]
    """Sums in float64 of (w - d)**2, w**2, w * d, d**2; the largest (w - d)**2 / w**2 of a group, its row and group.

    `weights_NK` is float32. Where it has no rows, `bits_NK` are bfloat16 patterns (uint16), of which `widened` uint32
    [K] and `row`, the same memory as float32, hold one row at a time.
    """
    group_size = np.uint64(decoded_NK.shape[1] // num_groups)
    error, power, dot, decoded_power = 0.0, 0.0, 0.0, 0.0
    worst, worst_n, worst_g = 0.0, 0, 0
    for n in range(decoded_NK.shape[0]):
        weights = row
        if len(weights_NK):
            weights = weights_NK[n]
        else:
            for k in range(len(widened)):
                widened[k] = np.uint32(bits_NK[n, k]) << np.uint32(16)
        for g in range(num_groups):
            start = np.uint64(g) * group_size
            group_error, group_power, group_dot, group_decoded = 0.0, 0.0, 0.0, 0.0
            for k in range(group_size):
                weight, decoded = np.float64(weights[start + k]), np.float64(decoded_NK[n, start + k])
                group_error += (weight - decoded) * (weight - decoded)
                group_power += weight * weight
                group_dot += weight * decoded
                group_decoded += decoded * decoded
            error += group_error
            power += group_power
            dot += group_dot
            decoded_power += group_decoded
            if group_power > 0 and group_error / group_power > worst:
                worst, worst_n, worst_g = group_error / group_power, n, g
    return error, power, dot, decoded_power, worst, worst_n, worst_g
