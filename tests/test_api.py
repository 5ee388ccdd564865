"""The public functions: what they take, what they refuse, and what they tell while they work."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import hqconv
from hqconv import api
from hqconv.conversion.stages import Progress
from hqconv.errors import RequestError
from hqconv.schemas import options
from hqconv.schemas.options import ConversionArguments, RunOptions
from hqconv.schemas.weight_schema import RECOMMENDED, WeightSchema, resolve_schema
from tests.make.command import call
from tests.make.conversions import manifest
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

LAYER = "model.layers.0.mlp.experts"
OPTIONS_OF: dict[str, Any] = {"schema": "int4", "target": "sm90", "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("api") / "model")


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    hqconv.convert(model, out, **OPTIONS_OF)
    return out


REFUSED: dict[str, tuple[Any, ...]] = {
    # A manifest with "tp": true would be damaged.
    "tp": (0, True, 2.0, "2", math.nan),
    "ep": (-1,),
    "redundant_experts": (-1,),
    "calibrate_tokens": (1,),
    "threads": (0, -1, "1", 10**6, True),
    "expert_placement": ("spread",),
    "layout": ("kernels", None),
    "dtype": ("float8", "float32", ""),
    "input_schema": ("a8",),
    "max_memory": ("much", -5, 0, "9" * 320 + "GiB"),
    "max_gpu_memory": ("much", "0GB", 0),
    "cache_limit": (0,),
    "device": ("tpu", torch.device("meta")),
    "target": ("h10", 91),
    "schema": ("int99",),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_for(name: str, model: Path, tmp_path: Path) -> None:
    functions = [hqconv.convert, hqconv.plan if name in CONVERSION else hqconv.convert]
    for value in REFUSED[name]:
        if value is None:  # it is not given
            assert hqconv.plan(model, **{**OPTIONS_OF, name: value}).spec.layout == "kernel"
            continue
        for function in functions:
            with pytest.raises(RequestError) as caught:
                function(model, **{**OPTIONS_OF, name: value})
            assert f"--{name.replace('_', '-')}" in caught.value.where
    with pytest.raises(TypeError, match="nothing_known"):
        hqconv.convert(model, **OPTIONS_OF, nothing_known=1)


CONVERSION, RUN = (
    {option.name: option for option in fields(kind)} for kind in (ConversionArguments, RunOptions)
)


def test_the_options_are_typed_and_described() -> None:
    """The keyword arguments are the fields, and closed choices are `Literal` types."""
    for declared, keywords in (
        (CONVERSION, options.ConversionKeywords),
        (RUN, options.RunKeywords),
    ):
        hints = get_type_hints(keywords)
        assert hints.keys() == declared.keys()
        for name, option in declared.items():
            kinds = (hints[name], *get_args(hints[name]))
            choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
            assert option.metadata.get("choices", ()) == choices
            assert option.metadata["help"].endswith((".", "]"))
    arguments = ConversionArguments()
    assert get_type_hints(ConversionArguments).keys() == CONVERSION.keys()
    assert (arguments.tp, arguments.layout, arguments.overrides) == (1, "kernel", ())


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("checks", [], "--checks"),  # which would pass without having looked at anything
        ("checks", ["weight"], "--checks"),
        ("layers", [], "--layers"),
        ("layers", [7], "--layers"),
        ("tokens", [], "--tokens"),
        ("revision", "main", "--revision"),  # of nothing
    ],
)
def test_what_cannot_be_verified(name: str, value: Any, where: str, made: Path) -> None:
    with pytest.raises(RequestError) as caught:
        hqconv.verify(made, **{name: value})
    assert caught.value.where == where


def test_a_plan_is_what_is_converted(model: Path, made: Path) -> None:
    plan = hqconv.plan(model, schema="int4", target="sm90")
    assert sorted(plan.paths) == sorted(snapshot(made))
    for group in plan.units:
        for file in group.files:
            assert (made / file.path).stat().st_size == file.size_bytes
    assert plan.rank_bytes() == hqconv.inspect(made)["rank_bytes"]


def test_a_schema_of_ones_own(model: Path, made: Path, tmp_path: Path) -> None:
    schema: WeightSchema = resolve_schema("int4")
    hqconv.convert(str(model), str(tmp_path / "out"), **{**OPTIONS_OF, "schema": schema})
    assert snapshot(tmp_path / "out") == snapshot(made)


RECIPE = """
schema = "int4-g64"
target = "sm90"
tp = 2
[[override]]
layers = "0"
schema = "fp8"
"""


def test_a_recipe_is_a_parameter(model: Path, tmp_path: Path) -> None:
    """As `--config` has it: options that are given win, and None gives none."""
    config = tmp_path / "recipe.toml"
    config.write_text(RECIPE)
    hqconv.convert(model, tmp_path / "out", config=config, tp=1, target=None, device="cpu")
    made = manifest(tmp_path / "out")
    assert (made["schema_name"], made["tp"], made["target"]) == ("int4-g64", 1, "sm90")
    assert made["blocks"][LAYER]["schema_name"] == "fp8"
    done = call("convert", model, "--config", config, "--tp", 1, "-o", tmp_path / "same")
    assert done.exit_code == 0
    assert snapshot(tmp_path / "same") == snapshot(tmp_path / "out")
    assert hqconv.plan(model, config=str(config)).spec.grid.tp == 2
    plan = hqconv.plan(model, config=config, schema="mxfp8", overrides=())
    assert plan.spec.schema.name == "mxfp8"
    assert (
        hqconv.plan(model, config="ends-in-8-bits", target="sm90").spec.schema.name
        == "int4-g32-e4m3"
    )
    config.write_text('target = "b200"')
    assert hqconv.plan(model, config=config).spec.schema.name == RECOMMENDED[0]
    with pytest.raises(RequestError, match="cannot be read"):
        hqconv.plan(model, config=tmp_path / "none.toml")


def test_an_error_of_the_callers_own_ends_it_and_it_can_be_resumed(
    model: Path, made: Path, tmp_path: Path
) -> None:
    class EnoughError(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.num_units_done:
            raise EnoughError

    with pytest.raises(EnoughError):
        hqconv.convert(model, tmp_path / "out", **OPTIONS_OF, progress=stop)
    told: list[Progress] = []
    report = hqconv.convert(
        model, tmp_path / "out", **OPTIONS_OF, resume=True, progress=told.append
    )
    assert report.num_units_resumed > 0
    assert (told[-1].done_bytes, told[-1].num_units_done) == (
        told[-1].total_bytes,
        told[-1].num_units,
    )
    assert snapshot(tmp_path / "out") == snapshot(made)


def test_all_of_it_is_typed_and_told() -> None:
    assert (REPO / "hqconv/py.typed").exists()
    for name in (name for name in hqconv.__all__ if name.islower() and name != "__version__"):
        function = getattr(hqconv, name)
        assert function.__wrapped__ is getattr(api, name)
        parameters = inspect.signature(function).parameters
        assert set(function.__annotations__) - {"return"} == parameters.keys()
        missing = [p for p in parameters if not re.search(rf"\b{p}\b", function.__doc__)]
        assert missing == [], name


def test_everything_public_comes_when_asked_for() -> None:
    assert all(getattr(hqconv, name) is not None for name in hqconv.__all__)


@pytest.mark.parametrize("device", ["tpu", "cuda:77"])
def test_no_such_device_to_load_to(device: str, made: Path) -> None:
    with pytest.raises(RequestError, match="no such"):
        hqconv.load(made, layer=LAYER, device=device)


def test_a_folder_has_no_revisions(model: Path, made: Path) -> None:
    for folder in (model, made):
        with pytest.raises(RequestError, match="no revisions"):
            hqconv.inspect(folder, revision="main")
        with pytest.raises(RequestError, match="no revisions"):
            hqconv.convert(folder, **OPTIONS_OF, revision="main")
