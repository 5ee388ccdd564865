"""Recipes: what a file says of a conversion, and artifacts whose layers differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hqconv
from hqconv.errors import RequestError
from hqconv.schemas.grid import Grid
from hqconv.schemas.options import load_recipe
from tests.make.conversions import check, manifest, run
from tests.make.qwen import write_qwen3_moe

MIXED = """
[[override]]
layers = "0, -1"
schema = "int8"

[[override]]
blocks = "model.layers.1.*"
schema = "nvfp4"

[[override]]
layers = "2"
schema = "none"
"""
LAYER = "model.layers.{}.mlp.experts"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("recipes") / "model", num_layers=5)


@pytest.fixture(scope="module", params=[Grid(), Grid(2, 2)], ids=str)
def mixed(request: pytest.FixtureRequest, model: Path) -> tuple[Path, Grid]:
    grid: Grid = request.param
    out = model.parent / f"mixed-{grid.tp}"
    recipe = load_recipe(write(model.parent, MIXED))
    run(model, out, "mxfp4", grid, overrides=recipe.overrides)
    return out, grid


def test_every_layer_has_the_bytes_of_its_schema(
    model: Path, mixed: tuple[Path, Grid], tmp_path: Path
) -> None:
    out, grid = mixed
    document = manifest(out)
    assert (document["format_version"], document["left_blocks"]) == (2, [LAYER.format(2)])
    for layer, schema in {0: "int8", 1: "nvfp4", 3: "mxfp4", 4: "int8"}.items():
        alone = tmp_path / schema
        if not alone.exists():
            run(model, alone, schema, grid)
        assert manifest(alone)["format_version"] == 1
        for path in sorted(alone.rglob(f"{LAYER.format(layer)}.safetensors")):
            assert (out / path.relative_to(alone)).read_bytes() == path.read_bytes()
        found, expected = (
            hqconv.dequantize(folder, layer=LAYER.format(layer)) for folder in (out, alone)
        )
        assert all(torch.equal(found[role], expected[role]) for role in expected)
    assert not list(out.rglob(f"{LAYER.format(2)}.safetensors"))


def test_it_is_a_source(model: Path, mixed: tuple[Path, Grid], tmp_path: Path) -> None:
    """Of another schema, and of its own, which is each layer's own; what was left stays left."""
    out, _ = mixed
    run(out, tmp_path / "again", "mxfp8")
    assert check(tmp_path / "again", out, "files", "weights").passed
    assert LAYER.format(2) not in manifest(tmp_path / "again")["blocks"]
    run(out, tmp_path / "own", "source", Grid(2))
    assert check(tmp_path / "own", out, "files", "weights").passed
    words, own = manifest(out), manifest(tmp_path / "own")
    assert manifest(tmp_path / "again")["left_blocks"] == own["left_blocks"] == [LAYER.format(2)]
    for name, layer in words["blocks"].items():
        found = own["blocks"][name].get("weight_schema", own["weight_schema"])
        assert found == layer.get("weight_schema", words["weight_schema"])


WRONG = {
    "schema = 4": "expected: str",
    "tp = '2'": "expected: int",
    "tp = true": "expected: int",
    "max_memory = '1GiB'": "max_memory",
    "override = 3": "[[override]]",
    "[layers.'0']\nschema = 'int4'": "recipe.toml: layers",
    "[[override]]\nlayers = '0'": "schema, w13.schema, w2.schema",
    "[[override]]\nschema = 'int4'": "one of blocks and layers",
    "[[override]]\nblocks = '*'\nlayers = '0'\nschema = 'int4'": "one of blocks and layers",
    "[[override]]\nlayers = '0-'\nschema = 'int4'": "such as 0, 3-5",
    "[[override]]\nlayers = '0'\nschema = 'source'": "by name",
    "[[override]]\nlayers = '0'\nw13.schema = 'none'": "no schema named 'none'",
    "[[override]]\nlayers = '0'\nw2.tp = '1'": "override 1: w2.tp",
    "[[override]]\nlayers = '0'\nw2.schema = 'source'": "by name",
    "[[override]]\nlayers = '0'\nw2 = 'int4'": "w2.schema",
    "[[override]]\nlayers = '0'\nw3.schema = 'int4'": "w3",
    "[[override]]\nlayers = '0'\nschema = 'int4'\nw2.input_schema = 'fp8'": "w2.input_schema",
    "[[override]]\nlayers = '0'\nschema = 'int4'\ntp = '2'": "override 1: tp",
    "[[override]]\nlayers = '0'\nschema = 'int9'": "int9",
    "schema = ": "cannot be read",
}


@pytest.mark.parametrize("text", WRONG)
def test_recipes_that_are_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_recipe(write(tmp_path, text))
    assert WRONG[text] in str(caught.value)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "layers = '9'\nschema = 'int4'": ({}, "for no layer"),
    "layers = '0, 7-9'\nschema = 'int4'": ({}, "found: layers 7-9"),
    "layers = '3-1, 0'\nschema = 'int4'": ({}, "found: layers 3-1"),
    "layers = '-1, -6'\nschema = 'none'": ({}, "found: layers -6"),
    "blocks = 'x.*'\nschema = 'none'": ({}, "found: x.*"),
    "blocks = '*'\nschema = 'none'": ({}, "nothing to convert"),
    "layers = '0'\ninput_schema = 'mxfp4'": ({}, "on sm90"),
    "layers = '0'\nschema = 'fp8-block'": ({"grid": Grid(2)}, "TP sizes that work"),
    "layers = '0'\nschema = 'int4'": ({"layout": "checkpoint"}, "--layout checkpoint"),
}


@pytest.mark.parametrize("text", UNFIT)
def test_recipes_that_do_not_fit(model: Path, tmp_path: Path, text: str) -> None:
    options, needle = UNFIT[text]
    overrides = load_recipe(write(tmp_path, f"[[override]]\n{text}")).overrides
    with pytest.raises(RequestError) as caught:
        run(model, tmp_path / "out", "mxfp4", overrides=overrides, **options)
    assert needle in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_layers_of_an_artifact_cannot_be_left(
    model: Path, mixed: tuple[Path, Grid], tmp_path: Path
) -> None:
    overrides = load_recipe(
        write(tmp_path, "[[override]]\nlayers = '0'\nschema = 'none'")
    ).overrides
    with pytest.raises(RequestError, match="in a checkpoint only"):
        run(mixed[0], tmp_path / "out", "mxfp4", overrides=overrides)


def test_schemas_lie_beside_the_recipe_or_in_the_package(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('b_dtype = "uint3"\nweight_scale_group_size = 64\n')
    sections = "[[override]]\nlayers = '0'\nschema = 'own.toml+int8'\n"
    sections += "[[override]]\nlayers = '1'\nschema = 'int8'\nw2.schema = 'w3-g64.toml'\n"
    recipe = load_recipe(write(tmp_path, f'schema = "own.toml"\n{sections}'))
    assert recipe.options == {"schema": str(tmp_path / "own.toml")}
    choices = [(override.choice.w13, override.choice.w2) for override in recipe.overrides]
    names = [[schema and schema.name for schema in choice] for choice in choices]
    assert names == [["own", "int8"], ["int8", "w3-g64"]]
