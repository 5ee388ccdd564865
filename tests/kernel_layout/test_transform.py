"""Every kernel layout on the CPU against Humming's CUDA ops: here where there is a GPU, else as one gave them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.humming_ops.runtime import humming, target_facts
from hqconv.kernel_layout.transform import kernel_form, to_kernel
from hqconv.quantization.quantize import quantize_stacks
from hqconv.schemas.gpu_target import GpuTarget
from tests.make.conversions import kernel_spec_of
from tests.make.golden import digest
from tests.make.layout_cases import cases, laid_out
from tests.make.places import GOLDEN
from tests.make.tensors import assert_same

RECORDED = GOLDEN / "layouts.json"  # by scripts/record.py layouts


@pytest.mark.skipif(
    not RECORDED.exists(), reason="not recorded yet: scripts/record.py layouts, on a GPU"
)
def test_bytes_are_those_of_a_gpu() -> None:
    golden = json.loads(RECORDED.read_bytes())["cases"]
    assert golden.keys() <= cases().keys()
    for seed, (name, kind) in enumerate(cases().items()):
        if name in golden:
            assert {k: digest(t) for k, t in laid_out(kind, seed, "cpu").items()} == golden[name], (
                name
            )


@pytest.mark.skipif(
    not RECORDED.exists(), reason="not recorded yet: scripts/record.py layouts, on a GPU"
)
def test_every_case_is_recorded() -> None:
    """New cases wait for a GPU; until then Humming's transform over the CPU twins has only the inverse as its judge."""
    missing = cases().keys() - json.loads(RECORDED.read_bytes())["cases"].keys()
    second = [name for name in missing if cases()[name].schema.weight_scale_2_type != "none"]
    assert len(second) == len(missing), "cases of older schemas are recorded"
    if missing:
        pytest.skip(
            f"{len(missing)} cases are not recorded yet: scripts/record.py layouts, on a GPU"
        )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bytes_are_those_of_the_gpu_here() -> None:
    for seed, (name, kind) in enumerate(list(cases().items())[::7]):
        here, there = (laid_out(kind, seed, device) for device in ("cpu", "cuda"))
        assert {k: digest(t) for k, t in here.items()} == {
            k: digest(t) for k, t in there.items()
        }, name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "schema", ["mxfp4", "int4", "nvfp4", "fp8-block", "fp8-tensor", "int4-g32-e4m3"]
)
def test_encoding_does_not_wait_for_the_gpu(schema: str) -> None:
    """Only the first call waits, which compiles kernels and copies tables."""
    kind = kernel_spec_of(schema)
    form = kernel_form(512, 1024, kind)
    stacks = [torch.randn(2, 512, 1024, device="cuda").to(torch.bfloat16)]
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            (done,) = quantize_stacks(stacks, kind.schema, kind.param_dtype)
            to_kernel(form, done.tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")


SCALE_DTYPES = (
    torch.uint8,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(SCALE_DTYPES),
    on_results=st.booleans(),
    lead=st.lists(st.integers(1, 3), max_size=2),
    num_blocks=st.integers(1, 4),
    num_groups=st.integers(1, 9),
)
def test_scales_are_laid_out_as_by_hummings_own_code(
    dtype: torch.dtype, on_results: bool, lead: list[int], num_blocks: int, num_groups: int
) -> None:
    layout = humming().transform.transform_humming_weight_scale
    bits = torch.randint(
        0, 256, (*lead, 64 * num_blocks, num_groups * dtype.itemsize), dtype=torch.uint8
    )
    with target_facts(GpuTarget(90)):
        theirs = layout.__wrapped__(bits.view(dtype), on_results)
        ours = layout(bits.view(dtype), on_results)
    assert_same(ours, theirs, str(dtype))
