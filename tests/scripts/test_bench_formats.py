"""scripts/bench_formats.py on the CPU: plan, routes, the judgement of kernels, and the file. Only times need a GPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hqconv
from hqconv.kernel_layout import fused_moe
from hqconv.kernel_layout.compatibility import load_layer_config
from hqconv.kernel_layout.kernel_sources import NO_DEVICE, standing_in
from hqconv.kernel_layout.runtime import humming
from hqconv.reports.ranking import SPEEDS
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.serving.warm.gpus import KNOWN
from scripts import bench_formats, choosing_table
from scripts.bench_formats import Model, make_routes, merged, new_run, num_copies, num_steps, plan_pairs, speeds_text
from tests.make import standin
from tests.make.kernels import fake_compiler, use_compiler
from tests.make.qwen import write_qwen3_moe

QWEN = bench_formats.MODELS["qwen3-30b-a3b"]
SMALL = Model("small", num_experts=4, top_k=2, hidden_size=256, intermediate_size=256)


def test_a_dry_run_tells_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    bench_formats.main(["--dry-run", "--target", "h200", "--schemas", "mxfp4,nvfp4", "--inputs", "a16,fp8"])
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("does not run: nvfp4 with fp8: ")
    assert told[1:4] == [
        f"{name}: 1,16,64,8192 tokens" for name in ("mxfp4 with a16", "mxfp4 with fp8", "nvfp4 with a16")
    ]
    assert told[4] == "3 pairs, 12 rows of Qwen3-30B-A3B on sm90"


def test_by_default_every_schema_runs_with_16_bits() -> None:
    specs, refused = plan_pairs(bench_formats.SCHEMAS, ["a16", "fp8", "int8"], GpuTarget(90))
    assert [one.schema.name for one in specs if one.inputs.name == "a16"] == [*bench_formats.SCHEMAS]
    assert len(specs) + len(refused) == 3 * len(bench_formats.SCHEMAS)
    assert ("int4-g16-e4m3", "fp8") in refused


def test_humming_has_a_tuning_for_every_pair_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an H200 would have it, with the arguments of `tuning_entry`."""
    humming()
    use_compiler(monkeypatch, fake_compiler())
    tune = importlib.import_module("humming.tune")
    specs, _ = plan_pairs(bench_formats.SCHEMAS, ["a16", "fp8", "int8"], GpuTarget(90))
    with standing_in(KNOWN["h200"]):
        for spec in specs:
            for document in bench_formats.layer_documents(spec, QWEN).values():
                config = load_layer_config(document)
                for num_tokens in (1, 16, 64, 8192):
                    asked = {"shape_m": num_tokens * QWEN.top_k, "gemm_type": "indexed", "device": NO_DEVICE}
                    entry = dict(tune.get_heuristics_config(layer_config=config, **asked))
                    assert entry["block_shape"][0] > 0


def test_shapes_of_other_models() -> None:
    assert bench_formats.parse_model("gpt-oss-20b").num_experts == 32
    assert bench_formats.parse_model("mine:16:4:1024:512") == Model("mine", 16, 4, 1024, 512)
    for wrong in ("mine", "mine:16:4:1024", "mine:16:32:1024:512", ":1:1:1:1", "mine:0:0:1:1"):
        with pytest.raises(ValueError, match=wrong):
            bench_formats.parse_model(wrong)


@pytest.mark.parametrize("num_tokens", [1, 3, 15])
def test_few_tokens_read_every_expert_before_one_is_read_again(num_tokens: int) -> None:
    copies = 2
    steps = num_steps(QWEN, num_tokens, copies)
    routes = make_routes(QWEN, num_tokens, steps, copies)
    count = num_tokens * QWEN.top_k
    for copy in range(copies):
        mine = torch.cat([ids.flatten() for ids in routes[copy::copies]])
        assert set(mine.tolist()) == set(range(QWEN.num_experts))
        for begin in range(0, len(mine) - QWEN.num_experts + 1, count):
            assert len(set(mine[begin : begin + QWEN.num_experts].tolist())) == QWEN.num_experts


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 64, 2048])
def test_no_token_has_an_expert_twice(num_tokens: int) -> None:
    routes = make_routes(QWEN, num_tokens, num_steps(QWEN, num_tokens, 2), 2)
    for ids in routes:
        assert ids.shape == (num_tokens, QWEN.top_k)
        assert all(len(set(row)) == QWEN.top_k for row in ids.tolist())
    assert not torch.equal(routes[0], routes[-1])


def test_copies_exceed_the_cache() -> None:
    assert num_copies(300 << 20, 50 << 20) == 2
    assert num_copies(10 << 20, 50 << 20) * (10 << 20) >= 4 * (50 << 20)


# --- a pair, with a stand-in for the kernel ----------------------------------------------------------------


def measured(
    folder: Path, patch: pytest.MonkeyPatch, schema: str, inputs: str, change: Callable[[torch.Tensor], object]
) -> list[dict[str, Any]]:
    """The rows of a pair whose kernel multiplies with the decoded weights, w2 after `change`."""
    model = write_qwen3_moe(folder / "model", num_layers=1, hidden_size=256, intermediate_size=256, num_experts=4)
    [spec], _ = plan_pairs([schema], [inputs], GpuTarget(90))
    bench_formats.convert_pair(model, folder, spec, "cpu")
    out = bench_formats.artifact_folder(folder, spec)
    loaded = hqconv.load(out, layer=bench_formats.LAYER)
    assert {name: gemm.config for name, gemm in loaded.items()} == bench_formats.layer_documents(spec, SMALL)
    weights = hqconv.dequantize(out, layer=bench_formats.LAYER)
    change(weights["w2"])
    floats = {"w13": torch.cat([weights["w1"], weights["w3"]], 1), "w2": weights["w2"]}

    def load(document: Any, tensors: Any) -> fused_moe.Gemm:
        return fused_moe.Gemm(
            fused_moe.layer_config(document), {"weight": floats["w13" if document["shape_n"] == 2 * 256 else "w2"]}
        )

    standin.use(patch)
    patch.setattr(fused_moe, "load_gemm", load)
    patch.setattr(bench_formats, "l2_bytes", lambda _: 1 << 20)
    patch.setattr(
        bench_formats, "time_steps", lambda launch, steps, runs: [launch(one) for one in steps[::-1]] and 12.34
    )
    return bench_formats.measure_pair(spec, out, SMALL, [1, 5], 3, torch.device("cpu"))


@pytest.mark.parametrize(("schema", "inputs"), [("int4-g32-e4m3", "a16"), ("int4-g64", "fp8")])
def test_a_right_kernel_has_a_time(schema: str, inputs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(tmp_path, monkeypatch, schema, inputs, lambda weight: None)
    assert [(row["schema"], row["input_schema"], row["num_tokens"]) for row in rows] == [
        (schema, inputs, 1),
        (schema, inputs, 5),
    ]
    for row in rows:
        assert row["microseconds"] == 12.3
        assert 0 < row["kernel_error"] < 0.01
        assert "failed" not in row


def test_a_wrong_kernel_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(tmp_path, monkeypatch, "int4-g32-e4m3", "a16", lambda weight: weight[0].mul_(1.1))
    assert any(row["microseconds"] is None and row["failed"].startswith("kernel error 0.") for row in rows)
    assert all((row["microseconds"] is None) == ("failed" in row) for row in rows)


def test_a_pair_that_fails_has_rows_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, _ = plan_pairs(["mxfp4", "int4"], ["a16"], GpuTarget(90))

    def measure(*_: object) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(bench_formats, "measure_pair", measure)
    rows = bench_formats.measure_all(specs, QWEN, [1, 64], tmp_path, 3, {("int4", "a16"): "OutputError: full"})
    assert [row["failed"] for row in rows] == ["RuntimeError: no kernel image"] * 2 + ["OutputError: full"] * 2
    assert all(row["microseconds"] is None and row["kernel_error"] is None for row in rows)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


# --- the file ----------------------------------------------------------------------------------------------

ROWS = [
    {"schema": "mxfp4", "input_schema": inputs, "num_tokens": count, "microseconds": time, "kernel_error": 0.002}
    for inputs, count, time in (("a16", 64, 99.4), ("a16", 8192, 1300.0), ("fp8", 64, 88.0), ("fp8", 8192, None))
]


def test_a_run_replaces_that_of_the_same_gpu_and_model(tmp_path: Path) -> None:
    before = json.loads(SPEEDS.read_text())
    run = new_run(QWEN, ROWS, "NVIDIA H200", 90, {"torch": "2"})
    assert merged(before, run)["runs"] == [run]
    other = new_run(QWEN, ROWS, "NVIDIA B200", 100, {})
    assert merged(before, other)["runs"] == [*before["runs"], other]
    out = tmp_path / "speeds.json"
    for _ in range(2):
        bench_formats.write_run(other, out)
    assert json.loads(out.read_text()) == merged(before, other)


def test_the_table_shows_a_run() -> None:
    run = new_run(QWEN, ROWS, "NVIDIA H200", 90, {})
    head, _, *lines = choosing_table.speed_table(run).splitlines()
    [cells] = [line.split(" | ") for line in lines if line.startswith("| `mxfp4`")]
    shown = dict(zip(head.split(" | "), cells, strict=True))
    assert shown["a16, 64"] == "99"
    assert shown["a16, 8192"] == "1300"
    assert shown["fp8, 64"] == "88"
    assert shown["fp8, 8192"] == "–"


def test_the_file_of_the_package_is_as_the_script_writes_it() -> None:
    document = json.loads(SPEEDS.read_text(encoding="utf-8"))
    assert SPEEDS.read_text(encoding="utf-8") == speeds_text(document)
    assert all(
        {"gpu", "sm_version", "date", "source", "timed", "versions", "model", "rows"} <= run.keys()
        for run in document["runs"]
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pair_on_the_gpu(tmp_path: Path) -> None:
    target = bench_formats.target_here()
    model = write_qwen3_moe(tmp_path / "model", num_layers=1, hidden_size=256, intermediate_size=256, num_experts=4)
    [spec], _ = plan_pairs(["int4"], ["a16"], target)
    bench_formats.convert_pair(model, tmp_path, spec, "cuda:0")
    bench_formats.compile_pair(spec, SMALL, 5)
    out = bench_formats.artifact_folder(tmp_path, spec)
    rows = bench_formats.measure_pair(spec, out, SMALL, [5], 3, torch.device("cuda:0"))
    assert [row.get("failed") for row in rows] == [None]
    assert rows[0]["microseconds"] > 0
    assert 0 < rows[0]["kernel_error"] < 0.01
