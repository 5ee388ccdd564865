"""Squared error of quantized matrices under weights of the input columns: plain operations, the same bits everywhere.

Legend: E experts, N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, dequantize
from hqconv.quantization.hadamard import average_importance, rotate
from hqconv.quantization.quantized import fold_sum
from hqconv.schemas.weight_schema import WeightSchema

_CPU_NUMBERS, _CUDA_NUMBERS = 1 << 18, 1 << 22  # weights whose float64 terms are in memory at once


def weighted_sums(
    values: torch.Tensor, tensors: Mapping[str, torch.Tensor], schema: WeightSchema, weights: torch.Tensor
) -> torch.Tensor:
    """Return float64 [2] on the matrix's device: sums of weight · (w - decoded)² and of weight · w².

    values: the source's matrix [N, K] in any float dtype. tensors: its packed tensors, as in `Quantized`. weights:
    float32 [K] on the same device, of squared errors in each column. Sums are folded over columns, then over rows. Of a
    schema with a rotation they are of the rotated matrix, under the averaged weights. Does not wait for the device.
    """
    if schema.rotation:
        values, weights = rotate(values, schema.rotation), average_importance(weights, schema.rotation)
    decoded, factors = dequantize(_coded(tensors, schema, len(values))), weights.double()
    num_rows = max(1, (_CUDA_NUMBERS if values.is_cuda else _CPU_NUMBERS) // values.size(1))
    rows = torch.empty(2, len(values), dtype=torch.float64, device=values.device)
    for begin in range(0, len(values), num_rows):
        part = slice(begin, begin + num_rows)
        of_source = values[part].double()
        difference = of_source - decoded[part].double()
        for number, terms in enumerate((difference, of_source)):
            rows[number, part] = fold_sum(terms.square_().mul_(factors))
    return fold_sum(rows)


def _coded(tensors: Mapping[str, torch.Tensor], schema: WeightSchema, num_rows: int) -> CodedMatrix:
    """Return packed tensors of one matrix as a matrix of codes."""
    scale, zero, second = tensors["weight_scale"], tensors.get("zero_point"), tensors.get("weight_scale_2")
    group_n, group_k = schema.scale_group()
    if zero is not None and zero.dtype == torch.int32:
        zero = bit_codec.unpack_along_rows(zero.view(-1, zero.size(-1)), schema.num_bits, num_rows)
    return CodedMatrix(
        schema.b_dtype,
        tensors["weight"],
        scale.reshape(-1, 1) if scale.ndim < 2 else scale,
        group_n,
        group_k,
        zero,
        None if second is None else second.reshape(-1),
    )
