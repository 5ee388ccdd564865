"""Layers whose GEMMs have schemas of their own. The oracle are conversions with one schema for both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import hqconv
from hqconv.errors import RequestError
from hqconv.schemas.grid import GROUPS, Grid
from hqconv.schemas.weight_schema import SchemaPair, pair, resolve_layer_schema, resolve_schema
from tests.make.conversions import assert_verified, manifest, open_plan, run
from tests.make.models import save_model
from tests.make.tensors import assert_same, load_all, snapshot

LAYER = "model.layers.0.block_sparse_moe.experts"
PAIRS = (
    ("int3-g64", "int4-g32-e4m3"),
    ("int4-g32-e4m3", "mxfp4"),
    ("int4-g64", "int8"),  # two widths of code tiles
    ("mxfp4", "int4-g64-zp"),
    ("fp8-block", "int2-g32-fpzp"),
    ("nvfp4", "fp6-e3m2"),
    ("fp8-tensor", "int5-c"),
)
GRIDS = (Grid(), Grid(2, 2), Grid(3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral") / "src"
    return save_model(
        folder, "mixtral", intermediate_size=768, num_hidden_layers=2, num_local_experts=3
    )


def name_of(both: tuple[str, str]) -> str:
    return "+".join(both)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("both", "grid"), [(both, GRIDS[n % 3]) for n, both in enumerate(PAIRS)], ids=str
)
def test_each_gemm_is_that_of_its_schema_alone(
    both: tuple[str, str], grid: Grid, model: Path, tmp_path: Path
) -> None:
    run(model, tmp_path / "both", name_of(both), grid)
    document = manifest(tmp_path / "both")
    fields = {
        gemm: resolve_schema(name).humming_fields()
        for gemm, name in zip(("w13", "w2"), both, strict=True)
    }
    assert (document["format_version"], document["schema_name"], document["weight_schema"]) == (
        2,
        name_of(both),
        fields,
    )
    for gemm, name in zip(("w13", "w2"), both, strict=True):
        run(model, tmp_path / gemm, name, grid)
        for path in (tmp_path / gemm / "experts").rglob("*.safetensors"):
            alone, found = (
                load_file(path),
                load_file(tmp_path / "both" / path.relative_to(tmp_path / gemm)),
            )
            of_gemm = {key: one for key, one in alone.items() if f".{gemm}_" in key}
            assert {key for key in found if f".{gemm}_" in key} == of_gemm.keys()
            for key, tensor in of_gemm.items():
                assert_same(found[key], tensor, key)
        for layer, entry in manifest(tmp_path / gemm)["blocks"].items():
            errors = {
                role: error
                for role, error in entry["quantization_error"].items()
                if (role == "w2") == (gemm == "w2")
            }
            assert errors.items() <= document["blocks"][layer]["quantization_error"].items()
            assert entry[gemm] == document["blocks"][layer][gemm]
    assert_verified(tmp_path / "both", model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("both", PAIRS[::2], ids=name_of)
def test_it_is_decoded_and_a_source_like_any_other(
    both: tuple[str, str], model: Path, tmp_path: Path
) -> None:
    run(model, tmp_path / "out", name_of(both), Grid(3))
    run(tmp_path / "out", tmp_path / "cut", "source", Grid(2))
    run(model, tmp_path / "again", name_of(both), Grid(2))
    assert (
        manifest(tmp_path / "cut")["weight_schema"] == manifest(tmp_path / "again")["weight_schema"]
    )
    assert snapshot(tmp_path / "cut/experts") == snapshot(tmp_path / "again/experts")
    assert_verified(tmp_path / "cut", tmp_path / "out")
    run(tmp_path / "out", tmp_path / "other", f"{both[0]}+int7-g32")  # one of its codes is kept
    assert (
        manifest(tmp_path / "other")["blocks"][LAYER]["conversion"] == "w13 direct; w2 requantized"
    )
    assert_verified(tmp_path / "other", tmp_path / "out")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("both", PAIRS[::2], ids=name_of)
def test_checkpoint_layout(both: tuple[str, str], model: Path, tmp_path: Path) -> None:
    report = run(model, tmp_path / "out", name_of(both), layout="checkpoint")
    assert any("one schema for both GEMMs" in warning for warning in report.plan.warnings)
    found = load_all(tmp_path / "out")
    for gemm, name in zip(("w13", "w2"), both, strict=True):
        run(model, tmp_path / gemm, name, layout="checkpoint")
        for key, tensor in load_all(tmp_path / gemm).items():
            if ".experts." in key and (".w2." in key) == (gemm == "w2"):
                assert_same(found.pop(key), tensor, key)
    assert not any(".experts." in key for key in found)
    config = json.loads((tmp_path / "out/config.json").read_bytes())["quantization_config"]
    assert config.keys() == {
        "quant_method",
        "w13",
        "w2",
        "ignore",
    }  # no b_dtype: vLLM as it is refuses it
    assert_verified(tmp_path / "out", model)
    if not any(resolve_schema(name).is_coupled for name in both):
        run(tmp_path / "out", tmp_path / "kernel", "source", Grid(2))
        run(model, tmp_path / "again", name_of(both), Grid(2))
        assert snapshot(tmp_path / "kernel/experts") == snapshot(tmp_path / "again/experts")


def test_searches_and_parts(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"quantizer": "mse"}
    name = "int3-g64+int4-g32"
    run(model, tmp_path / "whole", name, Grid(2), **options)
    for part in ("2/2", "1/2"):
        run(model, tmp_path / "parts", name, Grid(2), part=part, **options)
    assert snapshot(tmp_path / "parts") == snapshot(tmp_path / "whole")
    run(model, tmp_path / "w2", "int4-g32", Grid(2), **options)
    path = f"experts/tp1-ep0/{LAYER}.safetensors"
    key = f"{LAYER}.w2_weight"
    assert_same(
        load_file(tmp_path / "whole" / path)[key], load_file(tmp_path / "w2" / path)[key], key
    )
    assert_verified(tmp_path / "whole", model)


def test_shorthand_and_recipes_of_gemms(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('b_dtype = "uint4"\nweight_scale_group_size = 64\n')
    text = (
        'schema = "int3-g64+own.toml"\n[[override]]\nlayers = "0"\nw2.schema = "int8"\n'
        '[[override]]\nlayers = "0-1"\nw13.schema = "int5-g64"\n'
        '[[override]]\nlayers = "1"\nschema = "mxfp4"\nw2.schema = "int4-g32"\n'
    )
    recipe = tmp_path / "r.toml"
    recipe.write_text(text)
    plan = hqconv.plan(model, config=recipe, target="sm90")
    assert plan.spec.schema.name == "int3-g64+own"
    first, second = (plan.spec.layer_spec_of(layer.name).schema for layer in plan.layers)
    assert (first.name, second.name) == ("int5-g64+int8", "mxfp4+int4-g32")
    assert plan.layers[1].encoding.of("w3").schema == resolve_schema("mxfp4")
    assert pair(resolve_schema("int4"), resolve_schema("int4-g128")) == resolve_schema("int4")
    assert isinstance(resolve_layer_schema("int4+int8"), SchemaPair)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int4+", "no schema named ''"),
        ("int4+int8+int8", "no schema named"),
        ("source+int4", "cannot be half of a pair"),
        ("int4+int9", "no schema named 'int9'"),
    ],
)
def test_what_is_no_pair(text: str, expected: str) -> None:
    with pytest.raises(RequestError, match=expected.replace("'", ".")):
        resolve_layer_schema(text)


@pytest.mark.parametrize(
    ("schema", "inputs", "expected"),
    [
        ("mxfp4+fp8", "int8", "fp8"),  # w2 alone does not run
        ("nvfp4+mxfp4", "fp8", "nvfp4"),  # groups of 16 under 8-bit activations
        ("nvfp4+int8", "fp8", "nvfp4 int8"),  # both are named in one message
    ],
)
def test_each_gemm_must_run_with_the_activations(
    schema: str, inputs: str, expected: str, model: Path
) -> None:
    with pytest.raises(RequestError, match="does not run this pair") as error:
        hqconv.plan(model, schema=schema, input_schema=inputs, target="sm90")
    text = str(error.value)
    assert [name for name in schema.split("+") if f"{name}: " in text] == expected.split()


def test_slices_fit_both_gemms(tmp_path: Path) -> None:
    """Rows of w13 are cut in blocks, columns of w2 in groups; the hidden size has the groups of w13 alone."""
    src = save_model(
        tmp_path / "src", "mixtral", intermediate_size=320, num_hidden_layers=1, num_local_experts=2
    )
    source, plan = open_plan(src, "int4-g128+int4-g64", Grid(5))
    source.close()
    assert [part.end for part in plan.layers[0].slices] == [64, 128, 192, 256, 320]
    with pytest.raises(RequestError, match="multiples of 128"):
        open_plan(src, "int4-g32+int4-g128", Grid(2))
    grid = Grid(2, split=GROUPS)
    run(
        src, tmp_path / "out", "int4-g32+int4-g128", grid
    )  # the last group of w2 is filled with zeros
    assert_verified(tmp_path / "out", src)


def test_exponents_are_fused_in_one_gemm(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", "int4-g32+mxfp4", Grid(2), input_schema="int8")
    assert_verified(tmp_path / "out", model)
    document = manifest(tmp_path / "out")
    for layer in document["blocks"].values():
        assert not layer["w13"]["flags"]["use_fused_e8m0_scale"]
        assert layer["w2"]["flags"]["use_fused_e8m0_scale"]
