"""Compiled core of the content sums (`schemas/content`) on the CPU."""

from __future__ import annotations

import numpy as np

from hqconv.compiled import compiled


@compiled
def sum_rows(values, columns, begin, end, sums):
    """Of rows `begin` to `end` of values [R, W]: int64 sums [R] of each value times its column's factor, int32 [W]."""
    for row in range(begin, end):
        total = np.int64(0)
        for column in range(values.shape[1]):
            total += np.int64(values[row, column]) * np.int64(columns[column])
        sums[row] = total
