"""What the CPU's compiled loops read of a stack and of its scale groups.

Legend: N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hqconv.cpu_loops import arithmetic
from hqconv.humming_layout import cpu_ops
from hqconv.humming_layout.cpu_ops import Array
from hqconv.schemas.weight_schema import WeightSchema

LEAST_ROWS = 64  # of a loop's part


@dataclass
class Ranges:
    """Highest and lowest value per group, float32 [R, G]: a row for each row, block of rows, or matrix of the stack."""

    source: Array
    shape: tuple[int, int, int]
    highest: Array
    lowest: Array
    fused: bool  # see `twins.FUSED_GROUP_SIZE`


@dataclass
class Groups:
    """What the loop reads of each group, [R, G] as in `Ranges`, and the tensors that are stored of it.

    The names are those of `encoders.encoder`; `scale_2` has a row for each row or matrix, or is None.
    """

    tensors: dict[str, torch.Tensor]
    inverse: Array
    lowest: Array
    scale: Array
    zero: Array
    scale_2: Array | None
    limit: float

    def per_row(self, num_rows: int) -> tuple[Array, ...]:
        """(inverse, lowest, scale, zero, scale_2), as encoders take them, for so many rows or for all at once."""
        scale_2 = np.ones((1, 1), np.float32) if self.scale_2 is None else self.scale_2
        values = (self.inverse, self.lowest, self.scale, self.zero)
        return (*(per_row(one, num_rows) for one in values), per_row(scale_2, num_rows).reshape(-1))


def code_of(schema: WeightSchema) -> tuple[int, int, int, int]:
    """The schema's codes as loops know them: (kind, bits, exponent bits, mantissa bits)."""
    kind, *rest = cpu_ops.parse_dtype(schema.b_dtype)
    bits, exponent, mantissa = rest
    return arithmetic.ASYM_INT if schema.has_zero_point else kind, bits, exponent, mantissa


def per_row(values: Array, num_rows: int) -> Array:
    """Values [R, …] with a row for each of `num_rows` rows."""
    block_rows = num_rows // len(values)
    return np.ascontiguousarray(np.repeat(values, block_rows, axis=0) if block_rows > 1 else values)
