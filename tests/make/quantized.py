"""Quantized matrices and stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tests.make.quant_weight  # noqa: F401 - lets Humming quantize on the CPU
from hqconv.humming_ops.runtime import resident
from hqconv.quantization import cpu
from hqconv.quantization.quantize import ErrorSums, quantize_by_operations, quantize_stacks
from hqconv.quantization.quantized import QuantizedStack
from hqconv.schemas.weight_schema import WeightSchema
from tests.make.tensors import assert_same, same_bits, with_one_nan


@dataclass(frozen=True)
class Quantized:
    """One matrix's tensors, without an expert dimension; tensor-level scales are [1]."""

    tensors: dict[str, torch.Tensor]
    error_sums: ErrorSums


def quantize(
    matrices: Sequence[torch.Tensor], schema: WeightSchema, param_dtype: str, **options: Any
) -> list[Quantized]:
    """Quantize the matrices [N, K] of one expert; see `quantize_stacks`."""
    results = []
    for stack in quantize_stacks(
        [one.unsqueeze(0) for one in matrices], schema, param_dtype, **options
    ):
        tensors = {
            name: tensor[0] if tensor.ndim > 1 else tensor for name, tensor in stack.tensors.items()
        }
        results.append(Quantized(tensors, stack.error_sums()[0]))
    return results


def assert_same_stacks(ours: QuantizedStack, theirs: QuantizedStack) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert_same(tensor, theirs.tensors[name], name)
    for name in ("error", "power", "num_exact"):
        assert same_bits(*(with_one_nan(getattr(s, name)) for s in (ours, theirs))), name
    assert ours.num_groups == theirs.num_groups


def assert_gpu_recipe_agrees(
    stacks: list[torch.Tensor], schema: WeightSchema, param_dtype: str, quantizer: str
) -> list[QuantizedStack]:
    """Run the code for GPUs on the CPU, over the twins of Humming's operations, against the compiled loops."""
    loops = cpu.quantize_stacks(stacks, schema, param_dtype, None, True, quantizer)
    with resident(torch.device("cpu")):
        recipe = quantize_by_operations(stacks, schema, param_dtype, None, True, quantizer)
    for ours, theirs in zip(loops, recipe, strict=True):
        assert_same_stacks(ours, theirs)
    return loops
