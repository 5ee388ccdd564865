"""Single matrices, quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hqconv.quantization.quantize import ErrorSums, quantize_stacks
from hqconv.schemas.weight_schema import WeightSchema


@dataclass(frozen=True)
class Quantized:
    """One matrix's tensors, without an expert dimension; tensor-level scales are [1]."""

    tensors: dict[str, torch.Tensor]
    error_sums: ErrorSums


def quantize(
    matrices: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    powers: Sequence[torch.Tensor] | None = None,
    **options: Any,
) -> list[Quantized]:
    """Quantize the matrices [N, K] of one expert; see `quantize_stacks`."""
    results = []
    given = None if powers is None else [one.unsqueeze(0) for one in powers]
    for stack in quantize_stacks(
        [one.unsqueeze(0) for one in matrices], schema, param_dtype, given, **options
    ):
        tensors = {
            name: tensor[0] if tensor.ndim > 1 else tensor for name, tensor in stack.tensors.items()
        }
        results.append(Quantized(tensors, stack.error_sums()[0]))
    return results
