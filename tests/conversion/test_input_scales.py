"""Static activation scales: from a source that was calibrated into every rank's file, whatever the grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.schemas.grid import Grid
from tests.make.conversions import assert_verified, manifest, run
from tests.make.formats import write
from tests.make.input_scales import (
    STATIC,
    as_stored,
    expected,
    fp8,
    scale_names,
    scale_of,
    scales_in,
)
from tests.make.small import GOOD, LAYER, Source, save, two_layers

EXPERT_3 = f"{LAYER}.3.up_proj.input_scale"


def static(source: Path, out: Path, grid: Grid | None = None, schema: str = "fp8-tensor") -> Any:
    return run(source, out, schema, grid, input_schema="fp8-static")


def refused(source: Source, folder: Path, schema: str = "fp8-tensor", **words: Any) -> HqconvError:
    """The error of a conversion that wrote nothing."""
    with pytest.raises(HqconvError) as error:
        run(
            save(folder / "src", source),
            folder / "out",
            schema,
            **{"input_schema": "fp8-static", **words},
        )
    assert not (folder / "out").exists()
    return error.value


@pytest.mark.parametrize("kind", STATIC)
@pytest.mark.parametrize("grid", [Grid(), Grid(2, 2, "round_robin", 2)])
def test_every_rank_has_the_largest_scale_of_all_experts(
    kind: str, grid: Grid, tmp_path: Path
) -> None:
    make, schema, inputs = STATIC[kind]
    source = save(tmp_path / "src", make())
    run(source, tmp_path / "out", schema, grid, input_schema=inputs)
    assert scales_in(tmp_path / "out") == {f"tp{t}-ep{e}": expected() for t, e in grid.ranks}
    document = manifest(tmp_path / "out")
    assert document["input_schema"] == inputs
    assert document["activation_schema"]["input_quant_mode"] == "static_tensor"
    recorded = {gemm: document["blocks"][LAYER][gemm]["input_scale"] for gemm in ("w13", "w2")}
    assert recorded == expected()
    assert {name for name, _, _ in scale_names()} <= document["tensors"]["converted"].keys()
    assert not document["tensors"]["dropped"]
    assert_verified(tmp_path / "out", source)


def test_stacks_of_scales(tmp_path: Path) -> None:
    source = write(tmp_path / "src", "fused-fp8-expert").folder
    path = next(source.glob("*.safetensors"))
    tensors = load_file(path)
    ends = ".down_proj"
    modules = [name.removesuffix(ends) for name in tensors if name.endswith(f"experts{ends}")]
    assert modules
    for number, name in enumerate(modules):
        for stack in ("gate_up_proj", "down_proj"):
            scales = torch.rand(len(tensors[f"{name}.down_proj"])) + number + 1
            tensors[f"{name}.{stack}_input_scale"] = scales
    save_file(tensors, path, {"format": "pt"})
    report = static(source, tmp_path / "out", Grid(2), "fp8-block")
    for layer, words in manifest(report.out)["blocks"].items():
        for gemm, stack in (("w13", "gate_up_proj"), ("w2", "down_proj")):
            stored = tensors[f"{layer}.{stack}_input_scale"]
            assert words[gemm]["input_scale"] == stored.max().item()
    assert_verified(report.out, source)


def test_experts_that_calibration_missed_are_told_and_passed_over(tmp_path: Path) -> None:
    tensors, config = fp8()
    for role in ("gate_proj", "up_proj"):
        del tensors[f"{LAYER}.1.{role}.input_scale"]  # the largest of w13
    source = save(tmp_path / "src", (tensors, config))
    report = static(source, tmp_path / "out", Grid(1, 2))
    warning = next(text for text in report.warnings if "calibration missed" in text)
    assert f"{LAYER}.1.gate_proj.input_scale" in warning
    wanted = {**expected(), "w13": as_stored(scale_of(0, "gate_proj"))}
    assert list(scales_in(tmp_path / "out").values()) == [wanted, wanted]
    assert_verified(tmp_path / "out", source)


@pytest.mark.parametrize("role", ["gate_up", "down"])
def test_without_any_scale_of_a_gemm_nothing_is_begun(role: str, tmp_path: Path) -> None:
    tensors, config = fp8()
    for name, _, projection in scale_names():
        if projection.removesuffix("_proj") in role:
            del tensors[name]
    error = refused((tensors, config), tmp_path)
    assert isinstance(error, RequestError)
    assert "no static activation scales" in error.what
    assert ("w2" if role == "down" else "w13") in error.where


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_named(value: float, tmp_path: Path) -> None:
    tensors, config = fp8()
    tensors[EXPERT_3] = torch.tensor(value)
    error = refused((tensors, config), tmp_path)
    assert isinstance(error, InputError)
    assert error.where == f"tensor {EXPERT_3}"
    assert "not below 0" in error.expected


@pytest.mark.parametrize("wrong", [torch.ones(2), torch.ones(0), torch.ones((), dtype=torch.int32)])
def test_a_tensor_that_is_no_scale_is_refused_from_its_header(
    wrong: torch.Tensor, tmp_path: Path
) -> None:
    tensors, config = fp8()
    tensors[EXPERT_3] = wrong
    source = save(tmp_path / "src", (tensors, config))
    with pytest.raises(InputError) as error:
        hqconv.plan(source, schema="fp8-tensor", target="sm90", input_schema="fp8-static")
    assert error.value.where == f"tensor {EXPERT_3}"
    hqconv.plan(source, schema="fp8-tensor", target="sm90")  # which drops it


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "other activations": (
        "fp8",
        {"input_schema": "int8-static", "schema": "int4"},
        "not measured for these",
    ),
    "dynamic config": ("dynamic", {}, "not measured for these"),
    "not calibrated": ("blocks", {"schema": "fp8-block"}, "no static activation scales"),
    "checkpoint layout": (
        "fp8",
        {"layout": "checkpoint"},
        "vLLM cannot load static activation scales",
    ),
    "two levels": (
        "fp8",
        {"input_schema": "two.toml", "target": "sm100", "schema": "nvfp4"},
        "not measured for these",
    ),
    "rotated": ("fp8", {"schema": "turned.toml"}, "before activations are rotated"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_carried_is_refused(case: str, tmp_path: Path) -> None:
    kind, words, what = REFUSED[case]
    source = GOOD["fp8_blocks"][0]() if kind == "blocks" else fp8()
    if kind == "dynamic":
        source[1]["quantization_config"]["activation_scheme"] = "dynamic"
    (tmp_path / "two.toml").write_text(
        'a_dtype = "float4e2m1"\ninput_scale_group_size = 16\ninput_scale_dtype = "float8e4m3"\n'
        'input_quant_mode = "static_tensor_dynamic_group"\n'
    )
    (tmp_path / "turned.toml").write_text(
        'b_dtype = "float8e4m3"\nweight_scale_type = "channel"\nhadamard_block_size = 32\n'
    )
    words = {key: str(tmp_path / v) if str(v).endswith(".toml") else v for key, v in words.items()}
    error = refused(source, tmp_path, **words)
    assert what in error.what
    assert isinstance(error, RequestError)


def test_an_artifact_as_source_keeps_its_scales(tmp_path: Path) -> None:
    source = save(tmp_path / "src", fp8())
    static(source, tmp_path / "first", Grid(2, 2))
    for number, grid in enumerate((Grid(), Grid(1, 4))):
        out = tmp_path / f"again{number}"
        static(tmp_path / "first", out, grid, "source")
        assert scales_in(out) == {f"tp{t}-ep{e}": expected() for t, e in grid.ranks}
        assert_verified(out, tmp_path / "first")
    run(tmp_path / "first", tmp_path / "plain", "source")
    document = manifest(tmp_path / "plain")
    assert len(document["tensors"]["dropped"]) == 2 * 4
    assert_verified(tmp_path / "plain", tmp_path / "first")
    with pytest.raises(RequestError, match="not measured for these"):
        run(tmp_path / "first", tmp_path / "other", "int4", input_schema="int8-static")
    with pytest.raises(RequestError, match="no static activation scales"):
        static(tmp_path / "plain", tmp_path / "other", schema="source")


def test_ranks_of_a_source_that_differ_are_refused(tmp_path: Path) -> None:
    static(save(tmp_path / "src", fp8()), tmp_path / "out", Grid(2))
    path = tmp_path / f"out/experts/tp1-ep0/{LAYER}.safetensors"
    data = path.read_bytes()
    stored = torch.tensor([expected()["w13"]]).numpy().tobytes()
    assert data.count(stored) == 1
    path.write_bytes(data.replace(stored, torch.tensor([2.0]).numpy().tobytes()))
    with pytest.raises(InputError, match="different scales"):
        static(tmp_path / "out", tmp_path / "again", schema="source")


def test_only_the_layers_that_ask_for_them_have_scales(tmp_path: Path) -> None:
    source = save(tmp_path / "src", two_layers(fp8()))
    recipe = tmp_path / "recipe.toml"
    override = '[[override]]\nlayers = "1"\ninput_schema = "fp8-static"\n'
    recipe.write_text(f'schema = "fp8-tensor"\n{override}')
    hqconv.convert(source, tmp_path / "out", config=recipe, target="sm90", device="cpu")
    layers = manifest(tmp_path / "out")["blocks"]
    assert "input_scale" not in layers[LAYER]["w13"]
    assert layers[LAYER.replace(".0.", ".1.")]["w13"]["input_scale"] == expected()["w13"]
    assert_verified(tmp_path / "out", source)
