"""Every kernel layout on the CPU against Humming's CUDA ops: here where there is a GPU, else as one gave them."""

from __future__ import annotations

import json

import pytest
import torch

from tests.make.golden import digest
from tests.make.layout_cases import cases, laid_out
from tests.make.places import GOLDEN

RECORDED = GOLDEN / "layouts.json"  # by scripts/record_layouts.py


def test_there_is_a_case_for_every_layout() -> None:
    names = list(cases())
    assert len(names) > 300
    for word in (
        "int4/int8/",
        "int4/int4/",
        "mxfp4/fp8/",
        "fp8-g128",
        "nvfp4/nvfp4",
        "sm120",
        "sm100, CUDA 13.2",
        "sm75",
    ):
        assert any(word in name for name in names), word


def test_laying_out_is_finite_work_on_the_cpu() -> None:
    """Every third case runs, and its tensors are as planned, which `to_kernel` asserts."""
    for seed, kind in enumerate(list(cases().values())[::3]):
        assert laid_out(kind, seed, "cpu")


@pytest.mark.skipif(not RECORDED.exists(), reason="not recorded yet: scripts/record_layouts.py, on a GPU")
def test_bytes_are_those_of_a_gpu() -> None:
    golden = json.loads(RECORDED.read_bytes())["cases"]
    assert golden.keys() <= cases().keys()
    for seed, (name, kind) in enumerate(cases().items()):
        if name in golden:
            assert {k: digest(t) for k, t in laid_out(kind, seed, "cpu").items()} == golden[name], name


@pytest.mark.skipif(not RECORDED.exists(), reason="not recorded yet: scripts/record_layouts.py, on a GPU")
def test_every_case_is_recorded() -> None:
    """New cases wait for a GPU; until then Humming's transform over the CPU twins has only the inverse as its judge."""
    missing = cases().keys() - json.loads(RECORDED.read_bytes())["cases"].keys()
    second = [name for name in missing if cases()[name].schema.weight_scale_2_type != "none"]
    assert len(second) == len(missing), "cases of older schemas are recorded"
    if missing:
        pytest.skip(f"{len(missing)} cases are not recorded yet: scripts/record_layouts.py, on a GPU")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bytes_are_those_of_the_gpu_here() -> None:
    for seed, (name, kind) in enumerate(list(cases().items())[::7]):
        here, there = (laid_out(kind, seed, device) for device in ("cpu", "cuda"))
        assert {k: digest(t) for k, t in here.items()} == {k: digest(t) for k, t in there.items()}, name
