"""Round-to-nearest quantization of expert matrices, with one result on every device.

Legend: E experts, N output rows, K input columns, G groups along K.

Schemas without a tensor- or second-level scale are Humming's `HummingWeightSchema.quant_tensor`, every matrix for
itself. With a shared scale (`fp8-tensor`, `nvfp4`) the recipe is the contract's: order-free maxima, the group
scale rounded first, and codes chosen against what is stored. The error of every matrix is measured against
its *stored* codes and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hqconv.humming_layout.runtime import resident
from hqconv.quantization import cpu, cuda
from hqconv.quantization.hadamard import averaged, rotate
from hqconv.quantization.quantized import RTN, ErrorSums, Quantized, QuantizedStack, Quantizer
from hqconv.quantization.two_level_scales import split_powers
from hqconv.schemas.weight_schema import WeightSchema

__all__ = ["ErrorSums", "Quantized", "QuantizedStack", "quantize", "quantize_stacks"]


def quantize_stacks(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    powers: Sequence[torch.Tensor] | None = None,
    *,
    count_exact: bool = False,
    quantizer: Quantizer = RTN,
) -> list[QuantizedStack]:
    """Quantize stacks [E, N, K]; the matrices of one expert share their tensor-level scale, if the schema has one.

    Inputs are bfloat16, float16 or float32 on one device; each matrix is quantized alone and at full size.
    A matrix with NaN or Inf comes back with a power that is no number and meaningless codes. `powers`, float32
    [E, N, G] powers of two, are the group scales to take instead of the recipe's, where a tensor-level second scale
    lets them; then `quantizer` says nothing. On CUDA nothing waits for the device.

    Under a schema that rotates, codes, scales and costs are those of the rotated matrices, in the inputs' dtype, as
    Humming's `quant_tensor` rotates them; `powers` are not taken then.
    """
    if schema.rotation:
        assert powers is None, "scales of a matrix that is rotated are none of the rotated one's"
        stacks = [rotate(stack, schema.rotation) for stack in stacks]
        if quantizer.importance is not None:
            quantizer = replace(quantizer, importance=averaged(quantizer.importance, schema.rotation))
        schema = replace(schema, hadamard_block_size=0)
    given = None if powers is None else split_powers(stacks, powers, schema)
    if stacks[0].is_cuda:
        with resident(stacks[0].device):
            return cuda.quantize_stacks(stacks, schema, param_dtype, given, count_exact, quantizer)
    return cpu.quantize_stacks(stacks, schema, param_dtype, given, count_exact, quantizer)


def quantize(
    matrices: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    powers: Sequence[torch.Tensor] | None = None,
    *,
    count_exact: bool = False,
    quantizer: Quantizer = RTN,
) -> list[Quantized]:
    """`quantize_stacks` of the matrices [N, K] of one expert."""
    stacks = [matrix.unsqueeze(0) for matrix in matrices]
    given = None if powers is None else [one.unsqueeze(0) for one in powers]
    done = quantize_stacks(stacks, schema, param_dtype, given, count_exact=count_exact, quantizer=quantizer)
    return [stack.split()[0] for stack in done]
