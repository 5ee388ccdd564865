"""Stacks of experts: each matrix as if alone, and the recipe for GPUs the same as the CPU's, here over the twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hqconv.jit import Helpers
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import QuantizedStack
from hqconv.schemas.options import MSE, RTN
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.matrices import RARE_SCHEMAS, SCHEMAS, any_schema, hard_stacks
from tests.make.quantized import assert_gpu_recipe_agrees, assert_same_stacks

SHAPE = (128, 384)
NUM_EXPERTS = 3


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "quantizer"),
    [
        *((name, RTN) for name in (*SCHEMAS[::2], *[*RARE_SCHEMAS][::2])),
        *(
            (name, MSE)
            for name in ("nvfp4", "fp8-block", "fp8-tensor", "int4-g64-zp", "int4-g32-e4m3-row")
        ),
    ],
)
def test_experts_and_helpers_change_nothing(name: str, quantizer: str) -> None:
    """Every expert is quantized as if alone, whatever threads run parts of its loops."""
    schema, dtype = any_schema(name), torch.bfloat16 if len(name) % 2 else torch.float32
    stacks = hard_stacks(dtype, *SHAPE, NUM_EXPERTS)

    def done(some: list[torch.Tensor]) -> list[QuantizedStack]:
        return quantize_stacks(some, schema, "bfloat16", count_exact=True, quantizer=quantizer)

    whole, helpers = done(stacks), Helpers(2)
    helpers.use(2)
    try:
        in_parts = done(stacks)
    finally:
        Helpers(0).use(0)
        helpers.stop()
    for ours, theirs in zip(in_parts, whole, strict=True):
        assert_same_stacks(ours, theirs)
    for e in range(NUM_EXPERTS):
        for stack, alone in zip(whole, done([s[e : e + 1] for s in stacks]), strict=True):
            of_expert = {key: tensor[e : e + 1] for key, tensor in stack.tensors.items()}
            sums = {"error": stack.error, "power": stack.power, "num_exact": stack.num_exact}
            own = {key: tensor[e : e + 1] for key, tensor in sums.items()}
            assert_same_stacks(replace(stack, tensors=of_expert, **own), alone)


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_recipe_for_gpus_is_that_of_the_cpu(name: str, param_dtype: str) -> None:
    stacks = hard_stacks(torch.bfloat16, *SHAPE, NUM_EXPERTS)
    assert_gpu_recipe_agrees(stacks, resolve_schema(name), param_dtype, RTN)
