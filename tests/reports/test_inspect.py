"""What dry runs, `inspect` and `schemas` say, and that they write nothing and load no torch needlessly."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hqconv.api import inspect
from hqconv.artifact.manifest import read_manifest
from hqconv.conversion.journal import FolderJournal, JournalEntry
from hqconv.errors import RequestError, VerificationError
from hqconv.planning.spec import recommended_schema
from hqconv.reports.documents import describe_schemas, layer_runs
from hqconv.schemas.gpu_target import GPU_CLASSES, TARGETS, GpuTarget
from hqconv.schemas.input_schema import INPUT_PRESETS
from hqconv.schemas.weight_schema import PRESETS, RECOMMENDED
from tests.make import processes
from tests.make.command import call
from tests.make.places import REPO
from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.small import GOOD, E, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "small", intermediate_size=256)


@pytest.fixture(scope="module")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact; do not change it."""
    out = tmp_path_factory.mktemp("artifacts") / "out"
    succeed("convert", model, "-o", out, "--schema", "mxfp4", "--target", "sm90", "--tp", 2)
    return out


def succeed(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def document(*arguments: object) -> Any:
    """What a command prints with --json, without what every document has."""
    described = json.loads(succeed(*arguments, "--json"))
    return {key: value for key, value in described.items() if key not in ("json_version", "tool")}


def plan_of(model: Path, *more: object) -> Any:
    """The document of a dry run, whose exit code says whether something stands in the way."""
    result = call(
        "convert", model, "--schema", "int4", "--target", "sm90", "--dry-run", "--json", *more
    )
    described = json.loads(result.stdout)
    assert result.exit_code == (4 if described["notes"] else 0)
    return described


# --- dry run -----------------------------------------------------------------------------------------------


def test_dry_run_tells_exactly_what_a_conversion_writes(model: Path, tmp_path: Path) -> None:
    before = read_tree(model)
    out = tmp_path / "out"
    described = plan_of(model, "-o", out, "--tp", 2, "--ep", 2, "--redundant-experts", 2)
    assert not out.exists()
    assert read_tree(model) == before
    succeed(
        *("convert", model, "-o", out, "--schema", "int4", "--target", "sm90"),
        *("--tp", 2, "--ep", 2, "--redundant-experts", 2),
    )
    written = {f"{p.relative_to(out)}": p.stat().st_size for p in out.rglob("*.safetensors")}
    assert {file["path"]: file["size_bytes"] for file in described["files"]} == written
    assert sum(described["rank_bytes"].values()) + (
        out / "model.safetensors"
    ).stat().st_size == sum(written.values())
    assert described["num_bytes_out"] == sum(written.values())
    assert described["other_files"] == ["tokenizer.json"]
    assert described["notes"] == []
    assert "--tp 1" in described["warnings"][0]  # no server
    assert described["tensors"]["converted"]["num_tensors"] == 24
    assert described["tensors"]["copied"]["num_tensors"] == 5
    assert (
        described["peak_memory_bytes"]
        == described["num_workers"] * described["worker_bytes"]
        <= 4 << 30
    )


def test_dry_run_of_a_huge_checkpoint_is_quick(tmp_path: Path) -> None:
    """60 layers of 384 experts, 2 TB of holes."""
    script = REPO / "scripts/make_checkpoint.py"
    sizes = "--layers 61 --experts 384 --hidden 7168 --intermediate 2048 --shard-size 10GB"
    make = [script, tmp_path / "big", "--sparse", "--model-type", "deepseek_v3", *sizes.split()]
    processes.run([sys.executable, *map(str, make)], check=True, capture_output=True)
    options = "--schema mxfp4 --tp 8 --target sm90 --dry-run --json"
    dry_run = [
        "-m",
        "hqconv",
        "convert",
        tmp_path / "big",
        "-o",
        tmp_path / "out",
        *options.split(),
    ]
    started = time.monotonic()
    command = [sys.executable, *map(str, dry_run)]
    done = processes.run(command, cwd=REPO, check=False, capture_output=True)
    assert done.returncode in (0, 4), done.stderr  # few disks have room for it
    seconds = time.monotonic() - started
    described = json.loads(done.stdout)
    assert described["tensors"]["converted"]["num_tensors"] == 60 * 384 * 3
    assert described["blocks"][0]["name"] == "model.layers.[1-60].mlp.experts"
    assert len(described["files"]) > 60 * 8
    assert seconds < 300  # a guard against hangs: it reads no tensor


# --- inspect -----------------------------------------------------------------------------------------------


def test_inspect_source(model: Path) -> None:
    described = inspect(str(model))
    assert (described["model_type"], described["family"]) == ("qwen3_moe", "qwen_moe")
    assert described["bytes_by_dtype"] == {"BF16": described["num_bytes"]}
    (block,) = described["blocks"]
    sizes = {"num_experts": 4, "hidden_size": 128, "intermediate_size": 256, "top_k": 2}
    assert block == layer(**sizes, name="model.layers.[0-1].mlp.experts", num_blocks=2)
    assert (described["quant_method"], described["direct_schemas"]) == (None, [])
    assert set(described["tp_sizes"]) == set(PRESETS)
    assert described["tp_sizes"]["mxfp4"] == [1, 2, 4, 8]
    assert described["tp_sizes"]["int4"] == [1, 2]
    assert "direct" not in succeed("inspect", model)
    assert document("inspect", model) == described


MODELOPT_NVFP4 = "modelopt nvfp4: float4e2m1, float8e4m3 scale per 1x16, second scale per tensor"
PACKED_INT4 = "compressed-tensors pack-quantized int4: uint4, bfloat16 scale per 1x128"
G_IDX = "gptq int4: uint4, float16 scale per 1x64, columns in g_idx order"
# Method, a layer's format, and the schemas that keep its codes.
DIRECT: dict[str, tuple[str, str, list[str]]] = {
    "fp8_blocks": (
        "fp8",
        "fp8: float8e4m3, float32 scale per 128x128",
        ["fp8-block", "source (fp8-block)"],
    ),
    "packed_int4": ("compressed-tensors", PACKED_INT4, ["int4", "source (int4)"]),
    "nvfp4": ("modelopt", MODELOPT_NVFP4, ["nvfp4", "source (nvfp4)"]),
    "gpt_oss_mxfp4": (
        "mxfp4",
        "mxfp4: float4e2m1, float8e8m0 scale per 1x32",
        ["mxfp4", "source (mxfp4)"],
    ),
    "gptq": ("gptq", G_IDX, ["source (int4-g64), as far as g_idx allows"]),
}


@pytest.mark.parametrize("name", DIRECT)
def test_inspect_of_a_quantized_source(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / name, GOOD[name][0]())
    method, stored, direct = DIRECT[name]
    described = inspect(str(folder))
    assert described["quant_method"] == method
    assert [layer["source_format"] for layer in described["blocks"]] == [stored]
    assert described["direct_schemas"] == direct
    stdout = succeed("inspect", folder)
    assert stored in stdout
    assert "direct" in stdout
    assert document("inspect", folder) == described
    if name == "nvfp4":  # ModelOpt writes a file of its own
        config = json.loads((folder / "config.json").read_text())
        algorithm = config.pop("quantization_config")["quant_algo"]
        (folder / "config.json").write_text(json.dumps(config))
        quantization = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
        (folder / "hf_quant_config.json").write_text(
            json.dumps({"producer": {}, "quantization": quantization})
        )
        again = inspect(str(folder))
        assert (again["quant_method"], again["direct_schemas"]) == (
            method,
            described["direct_schemas"],
        )


def test_inspect_of_layers_that_differ(tmp_path: Path) -> None:
    """One layer in fp8, one left in bf16: two entries; `source` keeps the one and leaves the other."""
    tensors, config = GOOD["fp8_blocks"][0]()
    for name, tensor in GOOD["plain"][0]()[0].items():
        if ".experts." in name:
            tensors[name.replace("layers.0", "layers.1")] = tensor
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.mlp"]
    folder = save(tmp_path / "src", (tensors, {**config, "num_hidden_layers": 2}))
    described = inspect(str(folder))
    formats = [layer["source_format"] for layer in described["blocks"]]
    assert formats == ["fp8: float8e4m3, float32 scale per 128x128", "not quantized"]
    assert described["direct_schemas"] == ["source (fp8-block: 1 layer; left as they are: 1)"]
    planned = plan_of(folder, "-o", tmp_path / "out", "--schema", "fp8-block")
    assert planned["conversion"] == {"direct": 1, "quantized": 1}
    stdout = succeed("convert", folder, "--schema", "source", "--target", "sm90", "--dry-run")
    assert "1 layer left as in the source" in stdout


def test_an_artifact_of_a_quantized_source(tmp_path: Path) -> None:
    folder, out = save(tmp_path / "src", GOOD["fp8_blocks"][0]()), tmp_path / "out"
    options = ("--target", "sm90", "-o", out)
    for schema, conversion, text in (
        ("int8", "requantized", "requantized from exactly decoded float32 (1 layer)"),
        ("source", "direct", "direct: codes and scales kept (1 layer)"),
    ):
        convert = ("convert", folder, "--schema", schema, *options, "--overwrite")
        planned = document(*convert, "--dry-run")
        assert text in succeed(*convert, "--dry-run")
        succeed(*convert)
        described = inspect(str(out))
        assert planned["conversion"] == described["conversion"] == {conversion: 1}
        assert planned["blocks"] == described["blocks"] == inspect(str(folder))["blocks"]
        assert (planned["source"]["quant_method"], described["quant_method"]) == ("fp8", "hqconv")
        is_requantized = conversion == "requantized"
        assert described["requantized"]["num_matrices"] == (3 * E if is_requantized else 0)
        assert ("requantized scale groups" in succeed("inspect", out)) == is_requantized


def test_inspect_says_why_a_source_cannot_be_converted(tmp_path: Path) -> None:
    folder = write_qwen3_moe(tmp_path / "model", num_experts=1, num_layers=1)
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_act"]
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    described = inspect(str(folder))
    assert not described["convertible"]
    assert "activation is not known" in described["obstacle"]
    assert "activation is not known" in succeed("inspect", folder)


def test_inspect_artifact(artifact: Path) -> None:
    described = inspect(str(artifact))
    assert (described["layout"], described["target"], described["tp"]) == ("kernel", "sm90", 2)
    assert described["schema"]["weight_schema"] == PRESETS["mxfp4"].humming_fields()
    assert described["tensors"] == {"converted": 24, "copied": 5, "dropped": 0}
    assert described["quant_method"] == "hqconv"
    assert described["missing_or_resized_files"] == []
    assert set(described["rank_bytes"]) == {"experts/tp0-ep0", "experts/tp1-ep0"}
    assert 0.1 < described["quantization_error"]["w2"]["median"] < 0.13
    stdout = succeed("inspect", artifact)
    for text in ("humming-kernels", "2 ranks", "down (w2)", "model.layers.[0-1].mlp.experts"):
        assert text in stdout
    assert document("inspect", artifact) == described


def test_inspect_unfinished(tmp_path: Path) -> None:
    with FolderJournal(tmp_path) as journal:
        journal.begin({"identity": 1})
        for unit in ("a", "b"):
            journal.record(JournalEntry(unit, [], {}))
    described = inspect(str(tmp_path))
    assert (described["kind"], described["num_units_done"]) == ("unfinished", 2)
    stdout = succeed("inspect", tmp_path)
    assert "not an artifact yet" in stdout
    assert "--resume" in stdout
    with pytest.raises(VerificationError, match="--resume"):
        read_manifest(tmp_path)
    (tmp_path / "empty").mkdir()
    for path, found in (
        (tmp_path / "empty", "no such file"),
        (tmp_path / "nothing", "no such folder"),
    ):
        with pytest.raises(RequestError, match=found):
            read_manifest(path)


# --- the rest ----------------------------------------------------------------------------------------------


def layer(**more: object) -> dict[str, object]:
    sizes = dict.fromkeys(("num_experts", "hidden_size", "intermediate_size", "top_k"), 8)
    stored = {"source_format": "not quantized", "source_dtype": "BF16"}
    return {**sizes, "activation": "silu", "gated": True, **stored, **more}


def test_layers_are_collapsed() -> None:
    layers = {f"model.layers.{i}.mlp.experts": layer() for i in (3, 4, 5, 7)}
    layers |= {f"model.layers.{i}.mlp.experts": layer(num_experts=2) for i in (11, 13, 15)}
    layers |= {"mtp.layers.0.mlp.experts": layer(), "experts": layer()}
    layers |= {f"model.layers.{i}.mlp.experts": layer(source_format="fp8") for i in (40, 41)}
    assert [(run["name"], run["num_blocks"]) for run in layer_runs(layers)] == [
        ("model.layers.[3-5,7].mlp.experts", 4),
        ("model.layers.[11,13,15].mlp.experts", 3),
        ("mtp.layers.0.mlp.experts", 1),
        ("experts", 1),
        ("model.layers.[40-41].mlp.experts", 2),
    ]


def test_schemas() -> None:
    described = describe_schemas()
    assert [schema["name"] for schema in described["presets"]] == list(PRESETS)
    dtypes = {s["name"]: s["stock_vllm_param_dtypes"] for s in described["presets"]}
    assert dtypes["mxfp4"] == ["bfloat16"]
    assert dtypes["int4"] == ["bfloat16", "float16"]
    assert dtypes["nvfp4"] == dtypes["fp6-e3m2"] == []
    stdout = succeed("schemas")
    for name in (*PRESETS, *(short["name"] for short in described["shorthands"]), *RECOMMENDED):
        assert name in stdout
    assert "with bfloat16 only" in " ".join(stdout.split())
    assert document("schemas") == described


def test_input_schemas_are_listed() -> None:
    listed = {schema["name"]: schema for schema in describe_schemas()["input_schemas"]}
    assert list(listed) == list(INPUT_PRESETS)
    stdout = " ".join(succeed("schemas").split())
    for name, inputs in INPUT_PRESETS.items():
        described = listed[name]
        assert described["description"] == inputs.describe()
        assert {key: described[key] for key in inputs.humming_fields()} == inputs.humming_fields()
        assert f"{name} {inputs.describe()}" in stdout


@pytest.mark.parametrize("target", TARGETS)
def test_schemas_for_a_gpu(target: int) -> None:
    """The recommended ones run, and fp8 activations run where a schema is named for them."""
    (row,) = (row for row in GPU_CLASSES if target in row.sm_versions)
    found = document("schemas", "--for", f"sm{target}")
    runs = found["runs"]
    assert (found["schema"], found["fp8_schema"]) == (RECOMMENDED[0], row.fp8_schema)
    assert RECOMMENDED[0] in runs["a16"]
    assert bool(runs["fp8"]) == (row.fp8_schema is not None)
    assert row.fp8_schema is None or row.fp8_schema in runs["fp8"]
    for name, inputs in ((RECOMMENDED[0], "a16"), (row.fp8_schema, "fp8")):  # what `convert` takes
        taken = recommended_schema(GpuTarget(target), "float16", INPUT_PRESETS[inputs], "kernel")
        assert name == (None if taken is None else taken.name)


def test_the_command_of_a_gpu() -> None:
    found = document("schemas", "--for", "NVIDIA H200")
    assert (found["gpu"], found["target"], found["fp8_schema"]) == ("h200", "sm90", "mxfp4")
    assert found["command"] in succeed("schemas", "--for", "h200")
    assert found["command"].endswith(" --schema int4-g32-e4m3 --calibrate TEXT --target h200")
    for arguments, what in (
        (("--for", "h2000"), "The target is not a GPU architecture"),
        (("--for", "h200", "--recipes"), "exclude each other"),
    ):
        refused = call("schemas", *arguments)
        assert (refused.exit_code, what in refused.stderr) == (2, True)
