"""What dry runs, `inspect` and `schemas` say, and that they write nothing and load no torch needlessly."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hqconv.api import inspect
from hqconv.artifact.error_summary import summarize_errors
from hqconv.artifact.manifest import read_manifest
from hqconv.cli import render
from hqconv.conversion.journal import FolderJournal, JournalEntry
from hqconv.errors import RequestError, VerificationError
from hqconv.reports.documents import describe_schemas, layer_runs
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import TARGETS
from hqconv.schemas.input_schema import INPUT_PRESETS
from hqconv.schemas.weight_schema import PRESETS, RECOMMENDED, resolve_schema
from tests.make import processes
from tests.make.command import call
from tests.make.places import REPO
from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.small import GOOD, E, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "small", intermediate_size=256)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    words = json.loads(succeed(*arguments, "--json"))
    return {key: value for key, value in words.items() if key not in ("json_version", "tool")}


def plan_of(model: Path, *more: object) -> Any:
    """The words of a dry run, whose exit code says whether something stands in the way."""
    result = call(
        "convert", model, "--schema", "int4", "--target", "sm90", "--dry-run", "--json", *more
    )
    words = json.loads(result.stdout)
    assert result.exit_code == (4 if words["notes"] else 0)
    return words


# --- dry run -----------------------------------------------------------------------------------------------


def test_dry_run_tells_exactly_what_a_conversion_writes(model: Path, tmp_path: Path) -> None:
    before = read_tree(model)
    out = tmp_path / "out"
    words = plan_of(model, "-o", out, "--tp", 2, "--ep", 2, "--redundant-experts", 2)
    assert not out.exists()
    assert read_tree(model) == before
    succeed(
        *("convert", model, "-o", out, "--schema", "int4", "--target", "sm90"),
        *("--tp", 2, "--ep", 2, "--redundant-experts", 2),
    )
    written = {f"{p.relative_to(out)}": p.stat().st_size for p in out.rglob("*.safetensors")}
    assert {file["path"]: file["size_bytes"] for file in words["files"]} == written
    assert sum(words["rank_bytes"].values()) + (out / "model.safetensors").stat().st_size == sum(
        written.values()
    )
    assert words["num_bytes_out"] == sum(written.values())
    assert words["other_files"] == ["tokenizer.json"]
    assert words["notes"] == []
    assert "--tp 1" in words["warnings"][0]  # no server
    assert words["tensors"]["converted"]["num_tensors"] == 24
    assert words["tensors"]["copied"]["num_tensors"] == 5
    assert words["peak_memory_bytes"] == words["num_workers"] * words["worker_bytes"] <= 4 << 30


def test_dry_run_for_people(model: Path, tmp_path: Path) -> None:
    options = ("--schema", "nvfp4", "--layout", "checkpoint", "--dry-run")
    stdout = succeed("convert", model, "-o", tmp_path / "out", *options)
    for text in (
        "qwen_moe (model_type qwen3_moe",
        "float4e2m1, float8e4m3 scale per group 16",
        "24 converted",
    ):
        assert text in stdout
    for text in (
        "0 dropped",
        "model.layers.[0-1].mlp.experts",
        "warning: vLLM",
        "nothing was written",
    ):
        assert text in stdout
    assert not list(tmp_path.iterdir())


def test_dry_run_notes_what_stands_in_the_way(model: Path, made: Path, tmp_path: Path) -> None:
    assert "finished artifact" in plan_of(model, "-o", made)["notes"][0]
    assert plan_of(model, "-o", made, "--overwrite")["notes"] == []
    (tmp_path / "file").write_text("")
    assert "found: a file" in plan_of(model, "-o", tmp_path / "file")["notes"][0]
    assert "did not make" in plan_of(model, "-o", tmp_path, "--overwrite")["notes"][0]
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / ".hqconv-progress.jsonl").write_text("{}\n")
    assert "--resume" in plan_of(model, "-o", tmp_path / "unfinished")["notes"][0]
    assert plan_of(model, "-o", tmp_path / "unfinished", "--resume")["notes"] == []
    assert "lie in the source" in plan_of(model, "-o", model / "out")["notes"][0]


def test_dry_run_of_a_huge_checkpoint_is_quick(tmp_path: Path) -> None:
    """60 layers of 384 experts, 2 TB of holes."""
    make = [sys.executable, REPO / "scripts/make_checkpoint.py", tmp_path / "big", "--sparse"]
    make += ["--model-type", "deepseek_v3", "--layers", "61", "--experts", "384"]
    make += ["--hidden", "7168", "--intermediate", "2048", "--shard-size", "10GB"]
    processes.run([str(a) for a in make], check=True, capture_output=True)
    dry_run = [
        sys.executable,
        "-m",
        "hqconv",
        "convert",
        tmp_path / "big",
        "--schema",
        "mxfp4",
        "--tp",
        8,
    ]
    dry_run += ["--target", "sm90", "--dry-run", "--json", "-o", tmp_path / "out"]
    started = time.monotonic()
    done = processes.run([str(a) for a in dry_run], cwd=REPO, check=False, capture_output=True)
    assert done.returncode in (0, 4), done.stderr  # few disks have room for it
    seconds = time.monotonic() - started
    words = json.loads(done.stdout)
    assert words["tensors"]["converted"]["num_tensors"] == 60 * 384 * 3
    assert words["blocks"][0]["name"] == "model.layers.[1-60].mlp.experts"
    assert len(words["files"]) > 60 * 8
    assert seconds < 300  # a guard against hangs: it reads no tensor


# --- inspect -----------------------------------------------------------------------------------------------


def test_inspect_source(model: Path) -> None:
    words = inspect(str(model))
    assert (words["kind"], words["model_type"], words["family"]) == (
        "source",
        "qwen3_moe",
        "qwen_moe",
    )
    assert words["bytes_by_dtype"] == {"BF16": words["num_bytes"]}
    (block,) = words["blocks"]
    sizes = {
        "num_blocks": 2,
        "num_experts": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "top_k": 2,
    }
    assert block == layer(**sizes, name="model.layers.[0-1].mlp.experts")
    assert (words["quant_method"], words["direct_schemas"]) == (None, [])
    assert set(words["tp_sizes"]) == set(PRESETS)
    assert words["tp_sizes"]["mxfp4"] == [1, 2, 4, 8]
    assert words["tp_sizes"]["int4"] == [1, 2]
    stdout = succeed("inspect", model)
    assert "--tp sizes that work" in stdout
    assert "direct" not in stdout
    assert "BF16" in stdout
    assert document("inspect", model) == words


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
    words = inspect(str(folder))
    assert words["quant_method"] == method
    assert [layer["source_format"] for layer in words["blocks"]] == [stored]
    assert words["direct_schemas"] == direct
    stdout = succeed("inspect", folder)
    assert stored in stdout
    assert "direct" in stdout
    assert document("inspect", folder) == words
    if name == "nvfp4":  # ModelOpt writes a file of its own
        config = json.loads((folder / "config.json").read_text())
        algorithm = config.pop("quantization_config")["quant_algo"]
        (folder / "config.json").write_text(json.dumps(config))
        quantization = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
        (folder / "hf_quant_config.json").write_text(
            json.dumps({"producer": {}, "quantization": quantization})
        )
        again = inspect(str(folder))
        assert (again["quant_method"], again["direct_schemas"]) == (method, words["direct_schemas"])


def test_inspect_of_layers_that_differ(tmp_path: Path) -> None:
    """One layer in fp8, one left in bf16: two entries; `source` keeps the one and leaves the other."""
    tensors, config = GOOD["fp8_blocks"][0]()
    for name, tensor in GOOD["plain"][0]()[0].items():
        if ".experts." in name:
            tensors[name.replace("layers.0", "layers.1")] = tensor
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.mlp"]
    folder = save(tmp_path / "src", (tensors, {**config, "num_hidden_layers": 2}))
    words = inspect(str(folder))
    formats = [layer["source_format"] for layer in words["blocks"]]
    assert formats == ["fp8: float8e4m3, float32 scale per 128x128", "not quantized"]
    assert words["direct_schemas"] == ["source (fp8-block: 1 layer; left as they are: 1)"]
    planned = plan_of(folder, "-o", tmp_path / "out", "--schema", "fp8-block")
    assert planned["conversion"] == {"direct": 1, "quantized": 1}
    stdout = succeed("convert", folder, "--schema", "source", "--target", "sm90", "--dry-run")
    assert "1 layer left as in the source" in stdout


CONVERSIONS = [
    ("fp8_blocks", "source", "direct", "direct: codes and scales kept (1 layer)"),
    ("fp8_blocks", "fp8-block", "direct", "direct: codes and scales kept (1 layer)"),
    ("fp8_blocks", "int4", "requantized", "requantized from exactly decoded float32 (1 layer)"),
    ("gptq", "int4", "requantized", "requantized from exactly decoded float32 (1 layer)"),
    ("plain", "int4", "quantized", "quantized (1 layer)"),
]


@pytest.mark.parametrize(("name", "schema", "conversion", "text"), CONVERSIONS)
def test_dry_run_says_how_layers_are_converted(
    name: str, schema: str, conversion: str, text: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / name, GOOD[name][0]())
    words = plan_of(folder, "-o", tmp_path / "out", "--schema", schema)
    assert words["conversion"] == {conversion: 1}
    assert words["source"]["quant_method"] == inspect(str(folder))["quant_method"]
    assert words["blocks"][0]["source_format"] == inspect(str(folder))["blocks"][0]["source_format"]
    arguments = (
        "convert",
        folder,
        "-o",
        tmp_path / "out",
        "--schema",
        schema,
        "--target",
        "sm90",
        "--dry-run",
    )
    assert text in succeed(*arguments)
    assert not (tmp_path / "out").exists()


def test_inspect_of_an_artifact_of_a_quantized_source(tmp_path: Path) -> None:
    folder = save(tmp_path / "src", GOOD["fp8_blocks"][0]())
    for schema, conversion in (("source", "direct"), ("int8", "requantized")):
        out = tmp_path / schema
        succeed("convert", folder, "-o", out, "--schema", schema, "--target", "sm90")
        words = inspect(str(out))
        assert words["conversion"] == {conversion: 1}
        assert words["blocks"][0]["source_format"] == "fp8: float8e4m3, float32 scale per 128x128"
        assert words["quant_method"] == "hqconv"
        stdout = succeed("inspect", out)
        assert "float32 scale per 128x128" in stdout
        assert ("requantized scale groups" in stdout) == (conversion == "requantized")
    assert words["requantized"]["num_matrices"] == 3 * E


def test_inspect_says_why_a_source_cannot_be_converted(tmp_path: Path) -> None:
    folder = write_qwen3_moe(tmp_path / "model", num_experts=1, num_layers=1)
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_act"]
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    words = inspect(str(folder))
    assert not words["convertible"]
    assert "activation is not known" in words["obstacle"]
    assert "activation is not known" in succeed("inspect", folder)


def test_inspect_artifact(made: Path) -> None:
    words = inspect(str(made))
    assert (words["kind"], words["layout"], words["target"], words["tp"]) == (
        "artifact",
        "kernel",
        "sm90",
        2,
    )
    assert words["schema"]["weight_schema"] == PRESETS["mxfp4"].humming_fields()
    assert words["tensors"] == {"converted": 24, "copied": 5, "dropped": 0}
    assert words["quant_method"] == "hqconv"
    assert words["missing_or_resized_files"] == []
    assert set(words["rank_bytes"]) == {"experts/tp0-ep0", "experts/tp1-ep0"}
    assert 0.1 < words["quantization_error"]["w2"]["median"] < 0.13
    stdout = succeed("inspect", made)
    for text in ("humming-kernels", "2 ranks", "down (w2)", "model.layers.[0-1].mlp.experts"):
        assert text in stdout
    assert document("inspect", made) == words


def test_inspect_unfinished(tmp_path: Path) -> None:
    with FolderJournal(tmp_path) as journal:
        journal.begin({"identity": 1})
        for unit in ("a", "b"):
            journal.record(JournalEntry(unit, [], {}))
    words = inspect(str(tmp_path))
    assert (words["kind"], words["num_units_done"]) == ("unfinished", 2)
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
    words = {
        "activation": "silu",
        "gated": True,
        "source_format": "not quantized",
        "source_dtype": "BF16",
    }
    return {**sizes, **words, **more}


def test_layers_are_collapsed() -> None:
    layers = {f"model.layers.{i}.mlp.experts": layer() for i in (3, 4, 5, 7)}
    layers |= {f"model.layers.{i}.mlp.experts": layer(num_experts=2) for i in range(11, 31, 2)}
    layers |= {"mtp.layers.0.mlp.experts": layer(), "experts": layer()}
    layers |= {f"model.layers.{i}.mlp.experts": layer(source_format="fp8") for i in (40, 41)}
    assert [(run["name"], run["num_blocks"]) for run in layer_runs(layers)] == [
        ("model.layers.[3-5,7].mlp.experts", 4),
        ("model.layers.[11,13,…,29].mlp.experts", 10),
        ("mtp.layers.0.mlp.experts", 1),
        ("experts", 1),
        ("model.layers.[40-41].mlp.experts", 2),
    ]


def test_errors_are_summarized() -> None:
    errors = {
        name: {"w1": {"relative_error": e}} for name, e in (("a", 0.1), ("b", 0.3), ("c", 0.2))
    }
    errors["direct"] = {}
    summary = summarize_errors(errors)
    assert summary == {"w1": {"min": 0.1, "median": 0.2, "max": 0.3, "worst_block": "b"}}


def test_schemas() -> None:
    words = describe_schemas()
    assert [schema["name"] for schema in words["presets"]] == list(PRESETS)
    served = {s["name"]: s["stock_vllm_serves_checkpoint_layout"] for s in words["presets"]}
    assert served["mxfp4"]
    assert not served["nvfp4"]
    dtypes = {s["name"]: s["stock_vllm_param_dtypes"] for s in words["presets"]}
    assert dtypes["mxfp4"] == ["bfloat16"]
    assert dtypes["int4"] == ["bfloat16", "float16"]
    assert dtypes["fp6-e3m2"] == []
    stdout = succeed("schemas")
    for name in (
        *PRESETS,
        words["shorthand"]["name"],
        words["scaled_shorthand"]["name"],
        *RECOMMENDED,
    ):
        assert name in stdout
    assert "with bfloat16 only" in " ".join(stdout.split())
    assert document("schemas") == words


def test_a_stock_vllm_serves_what_is_said_of_8_bit_scales() -> None:
    """`intN (N >= 2) and fp4 with e4m3-row, e8m0 and e8m0-row; fp8-g32 with e8m0 and e8m0-row`, in bfloat16."""
    codes = (
        *(f"int{bits}" for bits in range(1, 9)),
        "fp4",
        "fp6-e3m2",
        "fp6-e2m3",
        "fp8",
        "fp8-e5m2",
    )
    for code, size, scale, row in itertools.product(
        codes, (16, 32), ("e4m3", "e5m2", "e8m0"), ("", "-row")
    ):
        schema = resolve_schema(f"{code}-g{size}-{scale}{row}")
        is_small = code == "fp4" or (code.startswith("int") and code != "int1")
        said = (is_small and scale + row in ("e4m3-row", "e8m0", "e8m0-row")) or (
            (code, size, scale) == ("fp8", 32, "e8m0")
        )
        assert (ENGINE.checkpoint_layout_obstacle(schema, "bfloat16") is None) == said, schema.name
        if (scale, row) == ("e8m0", ""):
            assert ENGINE.checkpoint_layout_obstacle(schema, "float16")


def test_input_schemas_are_listed() -> None:
    """With the targets and weights that run with them, as a plan has it."""
    listed = {one["name"]: one for one in describe_schemas()["input_schemas"]}
    assert list(listed) == list(INPUT_PRESETS)
    stdout = " ".join(succeed("schemas").split())
    for name, inputs in INPUT_PRESETS.items():
        words = listed[name]
        assert words["description"] == inputs.describe()
        assert {key: words[key] for key in inputs.humming_fields()} == inputs.humming_fields()
        assert f"{name} {inputs.describe()}" in stdout
    runs = {name: (one["targets"], one["schemas"]) for name, one in listed.items()}
    assert runs["a16"] == ([f"sm{number}" for number in TARGETS], list(PRESETS))
    assert runs["int8"] == (runs["a16"][0], ["mxfp4", "int8", "int4"])
    assert runs["int4"] == (["sm75", "sm80", "sm86", "sm89"], ["int4"])
    assert runs["nvfp4"] == (["sm100", "sm103", "sm120", "sm121"], ["nvfp4"])
    assert runs["fp8"][0][0] == "sm89"
    assert "nvfp4" not in runs["fp8"][1]
    for phrase in ("from sm75 on every schema above", "sm75 – sm89 int4", "from sm100 on nvfp4"):
        assert phrase in stdout


def test_targets_in_short() -> None:
    for text in ("sm90", "sm120, sm121", "sm89, sm90, sm120, sm121"):
        assert render.targets_text(text.split(", ")) == text
