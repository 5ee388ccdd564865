"""Stacks of experts: each matrix as if alone, and the recipe for GPUs the same as the CPU's, here over the twins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tests.make.quant_weight  # noqa: F401 - lets Humming quantize on the CPU
from hqconv.errors import RequestError
from hqconv.humming_ops.runtime import resident
from hqconv.kernel_layout.transform import kernel_form, to_kernel
from hqconv.quantization import cpu, cuda
from hqconv.quantization.quantize import quantize, quantize_stacks
from hqconv.quantization.quantized import QuantizedStack, stack_tensors
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.conversions import kernel_spec_of
from tests.make.matrices import SCHEMAS, hard_matrix
from tests.make.tensors import assert_same, same_bits

SHAPE = (128, 384)
NUM_EXPERTS = 3


def hard_stacks(dtype: torch.dtype) -> list[torch.Tensor]:
    """Gate and up of three experts."""
    return [torch.stack([hard_matrix(*SHAPE, dtype, 10 * i + e) for e in range(NUM_EXPERTS)]) for i in range(2)]


def assert_same_stacks(ours: QuantizedStack, theirs: QuantizedStack) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert_same(tensor, theirs.tensors[name], name)
    for name in ("error", "power", "num_exact"):
        assert same_bits(getattr(ours, name), getattr(theirs, name)), name
    assert ours.num_groups == theirs.num_groups


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_expert_is_quantized_as_if_alone(name: str, dtype: torch.dtype) -> None:
    schema, stacks = resolve_schema(name), hard_stacks(dtype)
    whole = quantize_stacks(stacks, schema, "bfloat16", count_exact=True)
    alone = [quantize([s[e] for s in stacks], schema, "bfloat16", count_exact=True) for e in range(NUM_EXPERTS)]
    for index, stack in enumerate(whole):
        for key, tensor in stack_tensors([pair[index].tensors for pair in alone]).items():
            assert_same(stack.tensors[key], tensor, key)
        for e, one in enumerate(stack.split()):
            assert repr(one.error_sums) == repr(alone[e][index].error_sums)  # NaN among them
            for key, tensor in one.tensors.items():
                assert_same(tensor, alone[e][index].tensors[key], key)


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_recipe_for_gpus_is_that_of_the_cpu(name: str, param_dtype: str) -> None:
    """Humming's schema code and torch's operations over the twins, against the compiled loops."""
    schema, stacks = resolve_schema(name), hard_stacks(torch.bfloat16)
    with resident(torch.device("cpu")):
        recipe = cuda.quantize_stacks(stacks, schema, param_dtype, None, count_exact=True)
    for ours, theirs in zip(cpu.quantize_stacks(stacks, schema, param_dtype, None, True), recipe, strict=True):
        assert_same_stacks(ours, theirs)


@pytest.mark.parametrize("name", SCHEMAS)
def test_stacks_that_lie_side_by_side_are_taken_at_once(name: str) -> None:
    schema, stacks = resolve_schema(name), hard_stacks(torch.bfloat16)
    together = torch.stack(stacks)
    assert cuda._joined(stacks) is None
    assert cuda._joined([together[1], together[0]]) is None
    joined = cuda._joined(list(together))
    assert joined is not None
    assert same_bits(joined, together.flatten(0, 1))
    with resident(torch.device("cpu")):
        at_once = cuda.quantize_stacks(list(together), schema, "bfloat16", None, count_exact=True)
    for ours, theirs in zip(at_once, cpu.quantize_stacks(stacks, schema, "bfloat16", None, True), strict=True):
        assert_same_stacks(ours, theirs)


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_stack_is_laid_out_like_its_experts(name: str, param_dtype: str) -> None:
    schema = resolve_schema(name)
    # One expert's scales leave float16's range and need a second scale, the others' do not.
    stack = hard_stacks(torch.bfloat16)[0] * torch.tensor([1.0, 2.0**-24, 1.0]).bfloat16().view(-1, 1, 1)
    [quantized] = quantize_stacks([stack], schema, param_dtype)
    form = kernel_form(*SHAPE, kernel_spec_of(schema, param_dtype, 90))
    whole = to_kernel(form, quantized.tensors)
    for e in range(NUM_EXPERTS):
        alone = to_kernel(form, {key: tensor[e : e + 1] for key, tensor in quantized.tensors.items()})
        assert alone.keys() == whole.keys()
        for key, tensor in alone.items():
            assert_same(whole[key][e : e + 1], tensor, key)


def test_a_swapped_expert_is_seen() -> None:
    schema, stacks = resolve_schema("nvfp4"), hard_stacks(torch.bfloat16)
    [right, _] = quantize_stacks(stacks, schema, "bfloat16")
    [wrong, _] = quantize_stacks([s[[1, 0, 2]] for s in stacks], schema, "bfloat16")
    with pytest.raises(AssertionError):
        assert_same_stacks(right, wrong)


def test_without_a_c_compiler_there_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(cuda, "_sweep_kernel", lambda: SimpleNamespace(build_a_kernel=fail))
    with pytest.raises(RequestError) as info:
        cuda.check_kernels(torch.device("cpu"))
    assert info.value.found.startswith("RuntimeError: Failed to find C compiler")
    assert "--device cpu" in str(info.value)
