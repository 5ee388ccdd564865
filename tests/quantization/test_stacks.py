"""Stacks of experts: each matrix as if alone, and the recipe for GPUs the same as the CPU's, here over the twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hqconv.jit import Helpers
from hqconv.kernel_layout.transform import kernel_form, to_kernel
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import QuantizedStack
from hqconv.schemas.options import MSE, RTN
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.conversions import kernel_spec_of
from tests.make.matrices import RARE_SCHEMAS, SCHEMAS, any_schema, hard_stacks
from tests.make.quantized import assert_gpu_recipe_agrees, assert_same_stacks
from tests.make.tensors import assert_same

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


@pytest.mark.parametrize(
    ("name", "param_dtype"), [*zip(SCHEMAS, 11 * ("float16", "bfloat16"), strict=True)]
)
def test_a_stack_is_laid_out_like_its_experts(name: str, param_dtype: str) -> None:
    schema = resolve_schema(name)
    # One expert's scales leave float16's range and need a second scale, the others' do not.
    stack = hard_stacks(torch.bfloat16, *SHAPE, NUM_EXPERTS)[0] * torch.tensor(
        [1.0, 2.0**-24, 1.0]
    ).bfloat16().view(-1, 1, 1)
    [quantized] = quantize_stacks([stack], schema, param_dtype)
    form = kernel_form(*SHAPE, kernel_spec_of(schema, param_dtype, 90))
    whole = to_kernel(form, quantized.tensors)
    for e in range(NUM_EXPERTS):
        alone = to_kernel(
            form, {key: tensor[e : e + 1] for key, tensor in quantized.tensors.items()}
        )
        assert alone.keys() == whole.keys()
        for key, tensor in alone.items():
            assert_same(whole[key][e : e + 1], tensor, key)
