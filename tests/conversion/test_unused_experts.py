"""Experts that were never used: scales of 0 or infinity of one of them do not keep the others from being converted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hqconv
from hqconv.errors import InputError
from hqconv.sources.opening import open_source
from tests.make import input_scales
from tests.make.small import LAYER, Source, fp8_tensors, nvfp4, save, two_layers

UP = f"{LAYER}.3.up_proj"
ROLES = ("gate_proj", "up_proj", "down_proj")


FORMS: dict[str, tuple[Any, str]] = {
    "modelopt": (nvfp4, "weight_scale_2"),
    "compressed-tensors": (input_scales.compressed_nvfp4, "weight_global_scale"),
    "fp8": (fp8_tensors, "weight_scale"),
}


def with_scale(form: str, value: float, roles: tuple[str, ...] = ROLES) -> tuple[Source, str]:
    """A source whose last expert has another scale of its matrices, and the part's name."""
    make, part = FORMS[form]
    tensors, config = make()
    for role in roles:
        name = f"{LAYER}.3.{role}.{part}"
        tensors[name] = torch.full_like(tensors[name], value)
    return (tensors, config), part


@pytest.mark.parametrize(
    ("form", "value"), [("modelopt", 0.0), ("compressed-tensors", math.inf), ("fp8", 0.0)]
)
@pytest.mark.parametrize("schema", ["source", "int4"])
def test_a_matrix_under_one_scale_of_zero_is_zero(
    form: str, value: float, schema: str, tmp_path: Path
) -> None:
    (tensors, config), _ = with_scale(form, value)
    if form == "modelopt":  # of an expert of zeros its scales of groups are 0 / 0
        for role in ROLES:
            tensors[f"{LAYER}.3.{role}.weight_scale"].view(torch.uint8).fill_(0x7F)
    folder = save(tmp_path / "src", (tensors, config))
    text = "makes all weights of its matrix 0 (3 such scales)"
    assert any(text in warning for warning in hqconv.inspect(folder)["warnings"])
    plans = []
    hqconv.convert(
        folder,
        tmp_path / "out",
        schema=schema,
        target="sm90",
        tp=2,
        device="cpu",
        on_plan=lambda *at: plans.append(at[0]),
    )
    assert any(text in notice for notice in plans[0].notices)
    assert hqconv.verify(tmp_path / "out", folder, device="cpu").passed
    with open_source(tmp_path / "out") as artifact:
        layer = artifact.map_experts().layers[0]
        for expert, is_dead in ((3, True), (2, False)):
            matrices = artifact.read_expert(layer, expert, layer.roles, torch.device("cpu"))
            assert all(matrix.values().any() != is_dead for matrix in matrices.values())


@pytest.mark.parametrize(
    ("form", "value"),
    [
        *(("modelopt", value) for value in (math.inf, math.nan, -1.0)),
        *(("compressed-tensors", value) for value in (0.0, -0.0, math.nan, -math.inf)),
        *(("fp8", value) for value in (math.inf, -1.0)),
    ],
)
def test_a_scale_that_is_none_is_refused_before_work_begins(
    form: str, value: float, tmp_path: Path
) -> None:
    source, part = with_scale(form, value, ("up_proj",))
    folder = save(tmp_path / "src", source)
    document = hqconv.inspect(folder)
    assert not document["convertible"]
    assert f"{UP}.{part}" in document["obstacle"]
    with pytest.raises(InputError, match="not usable") as info:
        hqconv.plan(folder, schema="int4", target="sm90")
    assert info.value.where == f"{UP}.{part}"
    assert f'blocks = "{LAYER}", schema = "none"' in info.value.remedy


def test_the_layer_can_be_left_as_it_is(tmp_path: Path) -> None:
    source, part = with_scale("modelopt", math.inf)
    tensors, config = two_layers(source)
    for role in ROLES:
        tensors[f"{LAYER.replace('0', '1', 1)}.3.{role}.{part}"].fill_(0.25)
    folder = save(tmp_path / "src", (tensors, config))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'schema = "int4"\ntarget = "sm90"\n[[override]]\nblocks = "{LAYER}"\nschema = "none"\n'
    )
    hqconv.convert(folder, tmp_path / "out", config=recipe, device="cpu")
    assert hqconv.verify(tmp_path / "out", folder, device="cpu").passed


def test_calibration_may_have_used_no_input_of_an_expert(tmp_path: Path) -> None:
    tensors, config = input_scales.fp8()
    for role in ROLES:
        tensors[f"{LAYER}.3.{role}.input_scale"] = torch.tensor(0.0)
    folder = save(tmp_path / "src", (tensors, config))
    options = {
        "schema": "fp8-tensor",
        "input_schema": "fp8-static",
        "target": "sm90",
        "device": "cpu",
    }
    hqconv.convert(folder, tmp_path / "out", **options)
    assert hqconv.verify(tmp_path / "out", folder, device="cpu").passed
    for name in [
        name for name in tensors if name.endswith(("up_proj.input_scale", "gate_proj.input_scale"))
    ]:
        tensors[name] = torch.tensor(0.0)
    folder = save(tmp_path / "none", (tensors, config))
    with pytest.raises(InputError, match="calibration used no expert"):
        hqconv.convert(folder, tmp_path / "no", **options)


@pytest.mark.parametrize("form", FORMS)
def test_headers_with_holes_for_data_can_be_planned(form: str, tmp_path: Path) -> None:
    make, part = FORMS[form]
    tensors, config = make()
    for name in [name for name in tensors if name.endswith(f".{part}")]:
        tensors[name] = torch.zeros_like(tensors[name])
    folder = save(tmp_path / "src", (tensors, config))
    assert hqconv.inspect(folder)["convertible"]
    assert not any(
        "weights of its matrix" in text
        for text in hqconv.plan(folder, schema="int4", target="sm90").notices
    )
