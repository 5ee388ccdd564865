"""The public functions: what they take, what they refuse, and what they tell while they work."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hqconv
from hqconv import api
from hqconv.cli.app import app
from hqconv.cli.options import OPTIONS
from hqconv.conversion.stages import Progress
from hqconv.errors import InputError, RequestError
from hqconv.schemas.options import conversion_options
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
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


REFUSED: list[tuple[str, Any, str]] = [
    ("tp", 0, "--tp"),
    ("tp", True, "--tp"),  # a manifest with "tp": true is damaged
    ("tp", 2.0, "--tp"),
    ("tp", "2", "--tp"),
    ("ep", -1, "--ep"),
    ("redundant_experts", -1, "--redundant-experts"),
    ("expert_placement", "spread", "--expert-placement"),
    ("layout", "kernels", "--layout"),
    ("dtype", "float8", "--dtype"),
    ("dtype", "float32", "--dtype"),
    ("input_schema", "a8", "--input-schema"),
    ("max_memory", "much", "--max-memory"),
    ("max_memory", -5, "--max-memory"),
    ("max_memory", 0, "--max-memory"),
    ("max_gpu_memory", "0GB", "--max-gpu-memory"),
    ("cache_limit", 0, "--cache-limit"),
    ("max_memory", "9" * 320 + "GiB", "--max-memory"),
    ("dtype", "", "--dtype"),
    ("max_gpu_memory", "much", "--max-gpu-memory"),
    ("device", "tpu", "--device"),
    ("device", torch.device("meta"), "--device"),
    ("target", "h10", "--target"),
    ("target", 91, "--target"),
    ("schema", "int99", "--schema"),
]


@pytest.mark.parametrize(("name", "value", "where"), REFUSED, ids=lambda value: repr(value)[:20])
def test_what_cannot_be_asked_for(
    name: str, value: Any, where: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as caught:
        hqconv.convert(model, tmp_path / "out", **{**OPTIONS_OF, name: value})
    assert where in caught.value.where
    assert not (tmp_path / "out").exists()
    if name in inspect.signature(hqconv.plan).parameters:
        with pytest.raises(RequestError):
            hqconv.plan(model, **{**OPTIONS_OF, name: value})


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", 5), ("has_zero_point", "no"), ("weight_scale_group_size", 32.0), ("bs_dtype", 1)],
)
def test_a_schema_whose_fields_are_of_other_types(field: str, value: Any) -> None:
    """They would be written into the manifest as they are."""
    words = {"name": "mine", "b_dtype": "uint4", "weight_scale_group_size": 128}
    with pytest.raises(RequestError) as caught:
        WeightSchema(**{**words, field: value})
    assert caught.value.where == field


def test_a_source_that_may_not_be_looked_at(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(InputError, match="cannot be read"):
        hqconv.convert(model, tmp_path / "out", **OPTIONS_OF)


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
    words = manifest(tmp_path / "out")
    assert (words["schema_name"], words["tp"], words["target"]) == ("int4-g64", 1, "sm90")
    assert words["blocks"][LAYER]["schema_name"] == "fp8"
    command = [
        "convert",
        str(model),
        "--config",
        str(config),
        "--tp",
        "1",
        "-o",
        str(tmp_path / "same"),
    ]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert snapshot(tmp_path / "same") == snapshot(tmp_path / "out")
    assert hqconv.plan(model, config=str(config)).spec.grid.tp == 2
    assert (
        hqconv.plan(model, config=config, schema="mxfp8", overrides=()).spec.schema.name == "mxfp8"
    )
    assert hqconv.plan(model, config="ends-in-8-bits", target="sm90").spec.schema.name == "mxfp4"


def test_a_recipe_without_a_schema(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "recipe.toml"
    config.write_text('target = "sm90"')
    with pytest.raises(RequestError, match="No schema is named"):
        hqconv.plan(model, config=config)
    assert hqconv.plan(model, config=config, schema="int4").spec.target.name == "sm90"
    with pytest.raises(RequestError, match="cannot be read"):
        hqconv.plan(model, config=tmp_path / "none.toml")


def test_a_report_is_shown_on_one_line(model: Path, made: Path) -> None:
    plan, verified = (
        hqconv.plan(model, schema="int4", target="sm90"),
        hqconv.verify(made, model, device="cpu"),
    )
    report = hqconv.convert(model, made, **OPTIONS_OF, resume=True)
    gemms = hqconv.load(made, layer=LAYER).values()
    parts = [*plan.layers, *plan.units, plan.units[0].files[0], plan.layers[0].layer]
    for value in [plan, report, verified, *parts, *verified.results, *gemms]:
        text = repr(value)
        assert len(text) < 200 + len(str(made)), text
        assert "\n" not in text
        assert type(value).__name__ in text
    assert str(made) in repr(report)
    assert "passed (files pass, weights pass, kernel skipped)" in repr(verified)


def test_progress_comes_to_its_end(model: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    hqconv.convert(model, tmp_path / "out", **OPTIONS_OF, threads=4, progress=told.append)
    done = [progress.done_bytes for progress in told]
    assert done == sorted(done)
    assert (
        done[-1]
        == told[-1].total_bytes
        == hqconv.plan(model, schema="int4", target="sm90").num_bytes_read
    )
    assert told[-1].num_units_done == told[-1].num_units


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
    assert hqconv.inspect(tmp_path / "out")["kind"] == "unfinished"
    report = hqconv.convert(model, tmp_path / "out", **OPTIONS_OF, resume=True)
    assert report.num_units_resumed > 0
    assert snapshot(tmp_path / "out") == snapshot(made)


def test_every_parameter_is_on_the_command_line_or_a_callback() -> None:
    callbacks = {"on_plan", "progress"}
    callbacks |= {"overrides"}  # of --config
    for function in (hqconv.plan, hqconv.convert, hqconv.verify, hqconv.inspect):
        assert set(inspect.signature(function).parameters) - set(OPTIONS) <= callbacks


def test_all_of_it_is_typed_and_told() -> None:
    assert (REPO / "hqconv/py.typed").exists()
    for name in (name for name in hqconv.__all__ if name.islower() and name != "__version__"):
        function = getattr(hqconv, name)
        assert function is getattr(api, name)
        missing = [
            p
            for p in inspect.signature(function).parameters
            if not re.search(rf"\b{p}\b", function.__doc__)
        ]
        assert missing == []
        assert "return" in function.__annotations__
        assert set(function.__annotations__) - {"return"} == set(
            inspect.signature(function).parameters
        )


def test_the_types_are_public_and_come_when_asked_for(made: Path) -> None:
    assert isinstance(hqconv.verify(made, checks=["files"]), hqconv.VerificationReport)
    assert isinstance(resolve_schema("int4"), hqconv.WeightSchema)
    assert issubclass(RequestError, hqconv.HqconvError)
    for name in hqconv.__all__:
        assert getattr(hqconv, name) is not None


@pytest.mark.parametrize("device", ["tpu", "cuda:77"])
def test_no_such_device_to_load_to(device: str, made: Path) -> None:
    with pytest.raises(RequestError, match="no such"):
        hqconv.load(made, layer=LAYER, device=device)


@pytest.mark.parametrize(
    "call", [hqconv.inspect, lambda out, **words: hqconv.convert(out, **OPTIONS_OF, **words)]
)
def test_a_folder_has_no_revisions(call: Any, model: Path, made: Path) -> None:
    for folder in (model, made):
        with pytest.raises(RequestError, match="no revisions"):
            call(folder, revision="main")


def test_a_manifest_that_cannot_be_relied_on_is_in_the_report(made: Path, tmp_path: Path) -> None:
    (tmp_path / "hqconv.json").write_text("{}")
    report = hqconv.verify(tmp_path)
    assert not report.passed
    assert [f.what for f in report.results[0].findings] == ["The artifact's manifest is damaged."]
    (tmp_path / "hqconv.json").rename(tmp_path / ".hqconv-progress.jsonl")
    assert not hqconv.verify(tmp_path).passed


def numbers() -> list[tuple[str, str]]:
    """Function and parameter of each number of the public functions."""
    functions = (
        name
        for name in ("describe_plan", "warm", *hqconv.__all__)
        if inspect.isfunction(getattr(api, name, 0))
    )
    return [
        (function, name)
        for function in functions
        for name, parameter in inspect.signature(getattr(api, function)).parameters.items()
        if re.search(r"\b(int|float)\b", str(parameter.annotation))
        and "str" not in str(parameter.annotation)
        if name not in conversion_options()  # REFUSED has those
    ]


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("function", "name"), numbers())
def test_numbers_are_checked_at_the_door(function: str, name: str, tmp_path: Path) -> None:
    """Before anything is opened; so it does not matter that there is no model."""
    called = getattr(api, function)
    needed = [p for p in inspect.signature(called).parameters.values() if p.default is p.empty]
    arguments = {p.name: tmp_path / "none" for p in needed}
    bad: list[Any] = [
        -1,
        "x",
        "1",
        b"1",
        math.nan,
        math.inf,
        -math.inf,
        10**5000,
        -(10**5000),
        True,
    ]
    bad += [1.5] if "int" in str(inspect.signature(called).parameters[name].annotation) else []
    for value in (
        bad if name not in ("layers", "tokens") else [*bad, [-1], [1, "2"], [[1]], [1.5], 1]
    ):
        with pytest.raises(RequestError) as error:
            called(**{**arguments, name: value})
        assert error.value.where == api._FLAGS.get(name, f"--{name.replace('_', '-')}")


def test_numbers_of_other_types_are_numbers(made: Path) -> None:
    layer = "model.layers.0.mlp.experts"
    assert hqconv.load(made, layer=layer, tp_rank=np.int64(0)).keys() == {"w13", "w2"}
    assert hqconv.verify(
        made, checks=["files"], max_error=1, threads=np.uint8(1), layers={0}
    ).passed
