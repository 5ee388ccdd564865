"""Round-to-nearest quantization of expert matrices, with one result on every device.

Legend: N output rows, K input columns, G groups along K.

Schemas without a tensor- or second-level scale are Humming's `HummingWeightSchema.quant_tensor`, one matrix at
a time. With a shared scale (`fp8-tensor`, `nvfp4`) the recipe is the contract's: order-free maxima, the group
scale rounded first, and codes chosen against what is stored. The error of every matrix is measured against
its *stored* codes and scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hqconv.backends import cpu, cuda
from hqconv.backends.encoded import Cost, Quantized
from hqconv.backends.runtime import resident
from hqconv.backends.scales import split_powers
from hqconv.schemas.target import TargetSchema

__all__ = ["Cost", "Quantized", "quantize"]


def quantize(
    matrices: Sequence[torch.Tensor],
    schema: TargetSchema,
    param_dtype: str,
    powers: Sequence[torch.Tensor] | None = None,
    *,
    count_exact: bool = False,
) -> list[Quantized]:
    """Quantize matrices [N, K] of one expert that share their tensor-level scale, if the schema has one.

    Inputs are bfloat16, float16 or float32 on one device; each is quantized alone and at full size.
    A matrix with NaN or Inf comes back with `is_finite` False and meaningless codes. `powers`, float32 [N, G] powers
    of two, are the group scales to take instead of the recipe's, where a tensor-level second scale lets them.
    """
    stored = None if powers is None else split_powers(matrices, powers, schema)
    if matrices[0].is_cuda:
        with resident(matrices[0].device):
            return cuda.quantize(matrices, schema, param_dtype, stored, count_exact)
    return cpu.quantize(matrices, schema, param_dtype, stored, count_exact)
