"""Compiled sums over a decoded matrix and its source.

Shape legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

import numpy as np

from hqconv.compiled import compiled_sums


@compiled_sums
def sum_groups(weights_NK, decoded_NK, error_NG, power_NG):  # type: ignore[no-untyped-def]
    """Write (w - d)**2 and w**2 of each group, and return the sums of w * d and d**2; float32 in, float64 out."""
    num_groups = error_NG.shape[1]
    group_size = np.uint64(weights_NK.shape[1] // num_groups)
    dot, decoded_power = 0.0, 0.0
    for n in range(weights_NK.shape[0]):
        for g in range(num_groups):
            start = np.uint64(g) * group_size
            error, power, group_dot, group_decoded = 0.0, 0.0, 0.0, 0.0
            for k in range(group_size):
                weight, decoded = np.float64(weights_NK[n, start + k]), np.float64(decoded_NK[n, start + k])
                error += (weight - decoded) * (weight - decoded)
                power += weight * weight
                group_dot += weight * decoded
                group_decoded += decoded * decoded
            error_NG[n, g], power_NG[n, g] = error, power
            dot += group_dot
            decoded_power += group_decoded
    return dot, decoded_power
