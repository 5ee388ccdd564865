"""Quantize expert matrices, with the same bits on every device.

Legend: E experts, N output rows, K input columns, G groups along K.

Round-to-nearest without a tensor- or second-level scale equals Humming's `HummingWeightSchema.quant_tensor`, matrix by
matrix. With a shared scale (`fp8-tensor`, `nvfp4`) maxima are order-free, the group scale is rounded first, and codes
are chosen for the stored scale. The error of every matrix is measured against its *stored* codes and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hqconv.humming_ops.runtime import resident
from hqconv.quantization import cpu, cuda
from hqconv.quantization.group_scales import split_powers
from hqconv.quantization.hadamard import rotate
from hqconv.quantization.quantized import CodeSink, ErrorSums, QuantizedStack
from hqconv.schemas.options import QUANTIZERS, RTN
from hqconv.schemas.weight_schema import WeightSchema

__all__ = ["ErrorSums", "QuantizedStack", "quantize_stacks"]


def quantize_stacks(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    powers: Sequence[torch.Tensor] | None = None,
    *,
    count_exact: bool = False,
    quantizer: str = RTN,
    sinks: Sequence[CodeSink] | None = None,
) -> list[QuantizedStack]:
    """Quantize stacks [E, N, K]; the matrices of one expert share their tensor-level scale, if the schema has one.

    Inputs are bfloat16, float16 or float32 on one device; each matrix is quantized alone and at full size.
    A matrix with NaN or Inf gets a power of NaN or Inf and meaningless codes. powers: group scales to take, powers of
    two, float32 [E, N, G], under a tensor-level second scale; `quantizer`, rtn or mse, is ignored then. Does not
    synchronize with CUDA.

    Under a schema with a rotation, codes, scales and error sums are those of the rotated matrices, in the inputs'
    dtype, as in Humming's `quant_tensor`; `powers` must be None.

    sinks: on the CPU, where each stack's codes go instead of into packed codes (see `QuantizedStack`).
    """
    assert quantizer in QUANTIZERS, quantizer
    if schema.rotation:
        assert powers is None, "the group scales of a matrix do not fit the rotated matrix"
        stacks = [rotate(stack, schema.rotation) for stack in stacks]
        schema = replace(schema, hadamard_block_size=0)
    given = None if powers is None else split_powers(stacks, powers, schema)
    if stacks[0].is_cuda:
        with resident(stacks[0].device):
            assert sinks is None, "a GPU lays codes out in an operation of its own"
            return cuda.quantize_stacks(stacks, schema, param_dtype, given, count_exact, quantizer)
    return cpu.quantize_stacks(stacks, schema, param_dtype, given, count_exact, quantizer, sinks)
