"""Conversions with second scales: every layout and rank, verified, and what becomes of them as a source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hqconv
from hqconv.errors import RequestError
from hqconv.quantization.coded_matrix import CodedMatrix
from hqconv.quantization.quantized import express
from hqconv.schemas.grid import Grid
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.conversions import assert_verified, manifest, run
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import load_file

LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(
        tmp_path_factory.mktemp("second") / "src", num_layers=1, intermediate_size=256
    )


@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [
        ("int4-g32-e4m3", "float16", "kernel"),
        ("int4-g16-e4m3-row", "bfloat16", "checkpoint"),
        ("fp4-g32-e4m3", "bfloat16", "kernel"),
        ("fp8-g32-e5m2", "float16", "checkpoint"),
        ("fp4-g32-e8m0-row", "float16", "kernel"),
        ("int8-g32-e8m0-row", "bfloat16", "kernel"),
    ],
)
def test_an_artifact_is_verified_and_its_codes_are_kept(
    name: str, dtype: str, layout: str, src: Path, tmp_path: Path
) -> None:
    """On two ranks; as a source on one: kept directly under the schema's own name, or decoded exactly."""
    grid = Grid(2) if layout == "kernel" else Grid()
    run(src, tmp_path / "out", name, grid, dtype=dtype, layout=layout)
    assert_verified(tmp_path / "out", src)
    run(tmp_path / "out", tmp_path / "again", "source", dtype=dtype)
    assert_verified(tmp_path / "again", tmp_path / "out")
    found = manifest(tmp_path / "again")
    assert (found["schema_name"], found["blocks"][LAYER]["conversion"]) == (name, "direct")
    run(src, tmp_path / "one", name, dtype=dtype)
    rank = f"experts/tp0-ep0/{LAYER}.safetensors"
    for key, tensor in load_file(tmp_path / "one" / rank).items():
        other = load_file(tmp_path / "again" / rank)[key]
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), key


@pytest.mark.parametrize(("inputs", "tp"), [("fp8", 2), ("fp8-g128", 1), ("int8", 2)])
def test_exponents_are_fused_row_by_row(inputs: str, tp: int, src: Path, tmp_path: Path) -> None:
    """The row scale takes the exponents up, and verify tells both apart; float16 could not hold them."""
    run(src, tmp_path / "out", "fp4-g32-e8m0-row", Grid(tp), input_schema=inputs)
    assert_verified(tmp_path / "out", src)
    with pytest.raises(RequestError, match="float16 cannot hold"):
        run(src, tmp_path / "half", "fp4-g32-e8m0-row", dtype="float16", input_schema=inputs)


def test_powers_of_two_beyond_float16_are_not_kept() -> None:
    """Another converter's exponents under row scales: below 2^-14 they count as zero, above 2^15 they are refused."""
    schema, packed = resolve_schema("fp4-g32-e8m0-row"), torch.zeros(32, 4, dtype=torch.int32)
    for byte, param, is_kept in (
        (142, "float16", True),
        (143, "float16", False),
        (254, "bfloat16", True),
    ):
        scale = torch.full((32, 1), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        coded = CodedMatrix("float4e2m1", packed, scale, 1, 32, scale_2=torch.ones(32))
        if is_kept:
            assert express(coded, schema, param)["weight_scale"].view(torch.uint8).eq(byte).all()
            continue
        with pytest.raises(RequestError, match="too large for float16"):
            express(coded, schema, param)


def test_powers_of_two_become_fp8_scales_without_loss(src: Path, tmp_path: Path) -> None:
    """mxfp4 under e4m3 scales of the same groups; not under a scale per row of its own, whose product is no power."""
    for name, is_exact in (("mxfp4", True), ("fp4-g32-e8m0-row", False)):
        run(src, tmp_path / name, name)
        run(tmp_path / name, tmp_path / f"{name}-e4m3", "fp4-g32-e4m3")
        assert_verified(tmp_path / f"{name}-e4m3", tmp_path / name)
        errors = manifest(tmp_path / f"{name}-e4m3")["blocks"][LAYER]["quantization_error"]
        assert all((one["relative_error"] == 0) == is_exact for one in errors.values())
        assert all(one["relative_error"] < 0.08 for one in errors.values())


def test_scales_that_float16_sums_exceed_are_refused(src: Path, tmp_path: Path) -> None:
    """By Humming's source: a row's scale is applied to sums in float16, and e5m2 group scales are as large as 57344."""
    for name, is_served in (
        *(("int4-g32-e4m3", True), ("fp4-g32-e8m0-row", True), ("int8-g32-e8m0-row", True)),
        *(("int4-g32-e4m3-row", False), ("int4-g32-e5m2", False), ("fp4-g16-e4m3-row", False)),
    ):
        if is_served:
            hqconv.plan(src, schema=name, target="sm90", dtype="float16")
            continue
        with pytest.raises(RequestError, match="overflows"):
            hqconv.plan(src, schema=name, target="sm90", dtype="float16")
        hqconv.plan(src, schema=name, target="sm90", dtype="bfloat16")


def test_a_block_scaled_tensor_core_takes_no_signed_scales(src: Path) -> None:
    """From sm100 on it reads e4m3 scales as unsigned ones; below, nothing runs these activations."""
    with pytest.raises(RequestError, match="without their sign"):
        hqconv.plan(src, schema="int3-g16-e4m3", target="sm120", input_schema="nvfp4", cuda="13.0")
