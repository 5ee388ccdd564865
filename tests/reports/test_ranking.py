"""The ranking of schemas for a GPU: order, sizes, errors, speeds and the recommendation."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hqconv.errors import RequestError
from hqconv.kernel_layout.compatibility import why_overflow
from hqconv.kernel_layout.transform import why_not
from hqconv.reports import ranking
from hqconv.reports.ranking import (
    measured_errors,
    rank_schemas,
    size_class,
    speed_run_of,
    speed_runs,
)
from hqconv.schemas.gpu_target import GPUS, TARGETS, GpuTarget, gpu_named
from hqconv.schemas.input_schema import INPUT_PRESETS, KernelSpec
from hqconv.schemas.weight_schema import PRESETS, RECOMMENDED, resolve_schema
from tests.make import command


def call(*words: str, code: int = 0) -> str:
    done = command.call("schemas", *words)
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def of(words: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in words["schemas"] if one["name"] == name)


@pytest.mark.parametrize("inputs", INPUT_PRESETS)
@pytest.mark.parametrize("target", TARGETS)
def test_what_runs_is_ranked_and_the_rest_is_refused(target: int, inputs: str) -> None:
    dtype = "float16" if target == 75 else "bfloat16"
    specs = {
        name: KernelSpec(resolve_schema(name), dtype, GpuTarget(target), INPUT_PRESETS[inputs])
        for name in measured_errors()
    }
    runs = {name for name, spec in specs.items() if not why_not(spec) and not why_overflow(spec)}
    if not runs:
        with pytest.raises(RequestError, match="No schema runs"):
            rank_schemas(f"sm{target}", inputs)
        return
    words = rank_schemas(f"sm{target}", inputs)
    ranked = [one["name"] for one in words["schemas"]]
    assert len(set(ranked)) == len(ranked)
    assert {*ranked} == runs
    assert words["refused"].keys() == measured_errors().keys() - runs
    assert all(words["refused"].values())
    assert words["recommended"] in ranked
    kl = [one["divergence"].get("calibrated", {}).get("kl", 99.0) for one in words["schemas"]]
    order = [
        (one["size_class"], k, one["errors"]["gaussian"]["rtn"])
        for k, one in zip(kl, words["schemas"], strict=True)
    ]
    assert order == sorted(order)
    assert all(
        one["size_class"] - 0.25 < one["bits_per_weight"] <= one["size_class"] + 0.01
        for one in words["schemas"]
    )


def test_every_preset_and_recommended_shorthand_was_measured() -> None:
    assert {*PRESETS, *RECOMMENDED} <= measured_errors().keys()
    for of_schema in measured_errors().values():
        assert of_schema.keys() == {*ranking.KINDS}
        assert all(
            0 < one["mse"] <= 1.04 * one["rtn"] < 1 for one in of_schema.values()
        )  # it keeps the gain
        assert of_schema["gaussian"]["mse"] <= of_schema["gaussian"]["rtn"]


def test_size_classes() -> None:
    classes = {4.25: 4.25, 4.2544: 4.25, 4.2601: 4.5, 4.125: 4.25, 8.004: 8}
    assert {bits: size_class(bits) for bits in classes} == classes


def test_bits_are_those_of_stored_tensors() -> None:
    words = rank_schemas("h200")
    assert of(words, "mxfp4")["bits_per_weight"] == 4.25
    assert of(words, "int4")["bits_per_weight"] == 4.125
    # a scale of 16 bits for each row of 7168 columns (gate, up) or 2048 (down)
    assert math.isclose(
        of(words, "int8")["bits_per_weight"], 8 + 16 * (2 / 7168 + 1 / 2048) / 3, abs_tol=1e-4
    )


def test_speeds_are_those_of_the_run_on_this_architecture() -> None:
    [run] = [run for run in speed_runs() if run["sm_version"] == 90]
    words = rank_schemas("h200", "fp8")
    shown = {
        (one["name"], count): time
        for one in words["schemas"]
        for count, time in one["microseconds"].items()
    }
    rows = [
        row
        for row in run["rows"]
        if row["input_schema"] == "fp8" and row["microseconds"] is not None
    ]
    assert shown == {(row["schema"], str(row["num_tokens"])): row["microseconds"] for row in rows}
    assert words["speed"]["gpu_name"] == "h200"
    assert rank_schemas("b200", "fp8")["speed"] is None
    assert not any(one["microseconds"] for one in rank_schemas("b200")["schemas"])


def test_measured_rows_are_of_schemas_that_run() -> None:
    for run in speed_runs():
        assert gpu_named(run["gpu"]) in GPUS
        for row in run["rows"]:
            spec = KernelSpec(
                resolve_schema(row["schema"]),
                "bfloat16",
                GpuTarget(run["sm_version"]),
                INPUT_PRESETS[row["input_schema"]],
            )
            assert why_not(spec) is None
            assert row["microseconds"] is None or row["microseconds"] > 0


def run_of(gpu: str, sm_version: int, **times: float | None) -> dict[str, Any]:
    rows = [
        {
            "schema": name.replace("_", "-"),
            "input_schema": "a16",
            "num_tokens": 64,
            "microseconds": time,
        }
        for name, time in times.items()
    ]
    model = {"name": "M", "num_experts": 2, "top_k": 1, "hidden_size": 4, "intermediate_size": 8}
    facts = {
        "gpu": gpu,
        "sm_version": sm_version,
        "date": "2026-01-02",
        "source": "a test",
        "timed": "GEMMs",
    }
    return {**facts, "model": model, "rows": rows}


def test_the_same_gpu_goes_before_another_of_the_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [run_of("NVIDIA H200", 90), run_of("NVIDIA H20", 90)]
    monkeypatch.setattr(ranking, "speed_runs", lambda: runs)
    assert speed_run_of(GpuTarget(90), "h20") is runs[1]
    assert speed_run_of(GpuTarget(90), "h100") is runs[0]
    assert speed_run_of(GpuTarget(90)) is runs[0]
    assert speed_run_of(GpuTarget(100), "b200") is None
    assert "Another GPU of the architecture has other speeds." in call("--for", "h100")
    assert "Another GPU" not in call("--for", "h20")


def rank_of(
    monkeypatch: pytest.MonkeyPatch, inputs: str = "a16", kl: Any = None, **times: float | None
) -> dict[str, Any]:
    """The ranking on an H200 under other times and divergences."""
    rows = run_of("NVIDIA H200", 90, **times)
    for row in list(rows["rows"]):
        name, _, more = row["schema"].partition("@")
        row.update(schema=name, input_schema=more or "a16", num_tokens=64)
        rows["rows"].append({**row, "num_tokens": 8192})
    monkeypatch.setattr(ranking, "speed_runs", lambda: [rows])
    found = {name: {"calibrated": {"kl": one}} for name, one in (kl or {}).items()}
    monkeypatch.setattr(ranking, "measured_divergence", lambda: found)
    return rank_schemas("h200", inputs)


KL = {"int4-g32-e4m3": 0.04, "mxfp4": 0.08}


def test_speed_is_a_remark_and_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    words = rank_of(
        monkeypatch, kl=KL, int4_g32_e4m3=200.0, int4=90.0, mxfp4=100.0
    )  # int4's divergence is not known
    assert words["recommended"] == "int4-g32-e4m3"
    assert (
        "mxfp4 has 2.0 times the divergence, and was 2.00 times as fast in decode"
        in words["reason"]
    )
    words = rank_of(monkeypatch, kl=KL, int4_g32_e4m3=110.0, mxfp4=100.0)
    assert "times as fast" not in words["reason"]  # nothing worth a sentence
    words = rank_of(monkeypatch, kl=KL, int4_g32_e4m3=110.0, mxfp4=None)  # its kernel was wrong
    assert "times as fast" not in words["reason"]
    assert of(words, "mxfp4")["microseconds"] == {}


def test_the_divergence_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_of(monkeypatch, kl={**KL, "mxfp4": 0.03})["recommended"] == "mxfp4"
    assert (
        rank_of(monkeypatch, kl={"int3-g64": 0.01, "int8": 0.001})["recommended"] == "int4-g32-e4m3"
    )  # by its error


def test_with_quantized_activations_that_is_taken_which_they_speed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = {"int4_g32_e4m3": 100.0, "mxfp4": 100.0}
    words = rank_of(
        monkeypatch, "fp8", KL, **plain, **{"mxfp4@fp8": 60.0, "int4_g32_e4m3@fp8": 95.0}
    )
    assert words["recommended"] == "mxfp4"
    assert "whose prefill gains by fp8 activations" in words["reason"]
    words = rank_of(
        monkeypatch, "fp8", KL, **plain, **{"mxfp4@fp8": 90.0, "int4_g32_e4m3@fp8": 95.0}
    )
    assert words["recommended"] == "int4-g32-e4m3"
    assert rank_schemas("b200", "fp8")["recommended"] == "int4-g32-e4m3"  # no speeds


@pytest.mark.parametrize(
    ("kl", "time", "pays"), [(0.02, 105.0, True), (0.038, 105.0, False), (0.02, 120.0, False)]
)
def test_a_rotation_must_pay(
    monkeypatch: pytest.MonkeyPatch, kl: float, time: float | None, pays: bool
) -> None:
    both = {**KL, "int4-g32-e4m3-h32": kl}
    words = rank_of(monkeypatch, kl=both, int4_g32_e4m3=100.0, int4_g32_e4m3_h32=time)
    assert words["recommended"] == ("int4-g32-e4m3-h32" if pays else "int4-g32-e4m3")
    assert (
        rank_of(monkeypatch, kl=both, int4_g32_e4m3=100.0)["recommended"] == "int4-g32-e4m3"
    )  # not measured


def test_the_kernel_that_misreads_is_marked_and_not_recommended() -> None:
    words = rank_schemas("h200", "int8")
    assert "misreads" in of(words, "mxfp4")["caution"]
    assert of(words, "int4")["caution"] is None
    monkey = {name: one for name, one in measured_errors().items() if name in ("mxfp4", "int8")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "measured_errors", lambda: monkey)
        assert rank_schemas("h200", "int8")["recommended"] == "int8"
    assert "once more" in of(rank_schemas("h200", "fp8"), "mxfp4")["caution"]


def test_the_command_prints_the_order_the_choice_and_the_origin() -> None:
    words = rank_schemas("H200", "fp8")
    told = json.loads(call("--for", "H200", "--input-schema", "fp8", "--json"))
    assert {key: told[key] for key in words} == words
    text = call("--for", "H200", "--input-schema", "fp8")
    rows, names = text.splitlines()[1:], [one["name"] for one in words["schemas"]]
    lines = [next(n for n, line in enumerate(rows) if f" {name} " in line) for name in names]
    assert lines == sorted(lines)
    assert f"Take {words['recommended']}. {words['reason']}" in text
    assert words["rule"] in text
    assert "NVIDIA H200, 2026-11-24" in text
    assert "Do not run so: nvfp4" in text
    assert "not measured on this architecture" in call("--for", "rtx-5090")


def test_what_does_not_go_together_is_refused() -> None:
    for words, told in {
        "--input-schema fp8": "--input-schema is for a ranking",
        "--for h200 --recipes": "--for is for a ranking",
        "--for h2000": "The target is not a GPU architecture",
        "--for h200 --input-schema fp9": "There is no input schema named 'fp9'",
        "--for a100 --input-schema fp8": "No schema runs on this GPU",
    }.items():
        assert told in call(*words.split(), code=2)
