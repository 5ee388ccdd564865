"""The command line: options, exit codes, what goes to which stream, interruption and resumption."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hqconv
from hqconv.cli.progress_bar import ShownProgress, human_bytes, human_seconds
from hqconv.conversion.option_values import default_out, parse_bytes, place_of
from hqconv.conversion.stages import Progress
from hqconv.errors import RequestError
from hqconv.planning.layer_encoding import EncodingOptions
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import NAMED_INPUTS
from hqconv.schemas.options import LayerChoice, Override
from hqconv.schemas.recipe import load_recipe
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.command import call
from tests.make.formats import write
from tests.make.qwen import write_qwen3_moe


def convert(model: Path, out: Path, *more: object) -> Any:
    return call("convert", model, "-o", out, "--schema", "mxfp4", "--target", "sm90", *more)


# --- options and values ------------------------------------------------------------------------------------


def test_help_and_version() -> None:
    assert call().exit_code == 0
    assert "convert" in call().stdout
    assert re.fullmatch(r"hqconv \d+\.\d+\.\d+\n", call("--version").stdout)
    assert "--expert-placement" in call("convert", "--help").stdout


def test_sizes() -> None:
    sizes = {
        "1": 1,
        "4096": 4096,
        "512MiB": 512 << 20,
        "4GiB": 4 << 30,
        "4gib": 4 << 30,
        "2GB": 2 * 10**9,
    }
    sizes |= {"1.5G": 3 << 29, "3 kB": 3000}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GiB", "-1", "4 GiBs", "4iB", "1e9", "four"):
        with pytest.raises(RequestError, match="--max-memory"):
            parse_bytes(text)


def test_default_out() -> None:
    """Artifacts that differ have different names, and usual ones short ones."""

    def name(schema: str = "mxfp4", sm: int = 90, dtype: str = "bfloat16", **words: Any) -> str:
        cuda = words.pop("cuda", None)
        request = ConversionSpec(resolve_schema(schema), dtype, GpuTarget(sm, cuda), **words)
        return str(default_out("m", schema, request))

    assert name() == "m-mxfp4"
    assert name("int4-g64-zp", grid=Grid(8, 2)) == "m-int4-g64-zp-tp8-ep2"
    assert name(layout="checkpoint") == name(layout="checkpoint", sm=80) == "m-mxfp4-checkpoint"
    assert name(sm=80, dtype="float16", grid=Grid(2)) == "m-mxfp4-tp2-sm80-float16"
    assert (
        name(sm=100, cuda=(12, 9), inputs=NAMED_INPUTS["mxfp8"])
        == "m-mxfp4-act-mxfp8-sm100-cuda12.9"
    )
    assert name("int4", encoding=EncodingOptions(quantizer="mse")) == "m-int4-mse"


def test_the_default_name_says_that_layers_differ(tmp_path: Path) -> None:
    """A recipe's name is in it, if its overrides change a layer; other overrides are `mixed`."""
    model = write_qwen3_moe(tmp_path / "m", num_layers=3)

    def name(**options: Any) -> str:
        return place_of(hqconv.plan(model, target="sm90", **options), None).name

    def recipe(file: str, text: str) -> Any:
        (tmp_path / file).write_text(text)
        return load_recipe(tmp_path / file).overrides

    ends = recipe("ends in 8.toml", '[[override]]\nlayers = "0, -1"\nschema = "fp8"\n')
    none = recipe("plain.toml", '[[override]]\nlayers = "0"\nschema = "mxfp4"\n')
    left = recipe("left.toml", '[[override]]\nlayers = "0"\nschema = "none"\n')
    assert name(schema="mxfp4") == "m-mxfp4"
    assert name(schema="mxfp4", overrides=ends, tp=2) == "m-mxfp4-ends-in-8-tp2"
    assert name(schema="int4", overrides=ends) == "m-int4-ends-in-8"
    assert name(schema="mxfp4", overrides=none) == "m-mxfp4"
    assert name(schema="mxfp4", overrides=left) == "m-mxfp4-left"
    own = [Override("*.0.*", (), LayerChoice(*[resolve_schema("int8")] * 2), "a test")]
    assert name(schema="mxfp4", overrides=own) == "m-mxfp4-mixed"


def test_a_recipe_does_not_take_the_name_of_the_plain_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_qwen3_moe(tmp_path / "m", num_layers=3)
    monkeypatch.chdir(tmp_path)
    assert call("convert", "m", "--schema", "mxfp4", "--target", "sm90", "-q").exit_code == 0
    shown = call("convert", "m", "--config", "ends-in-8-bits")
    assert shown.exit_code == 0
    assert "but fp8, a16 activations in 2 layers" in " ".join(shown.stdout.split())
    assert "The artifact is in m-mxfp4-ends-in-8-bits" in shown.stdout
    again = call("convert", "m", "--config", "ends-in-8-bits", "--overwrite", "--json")
    words = json.loads(again.stdout)
    first, last = (f"model.layers.{i}.mlp.experts" for i in (0, 2))
    assert (words["otherwise"], words["left_blocks"]) == (
        {"fp8, a16 activations": [first, last]},
        [],
    )


# --- convert -----------------------------------------------------------------------------------------------


def test_summary_goes_to_stdout(model: Path, tmp_path: Path) -> None:
    result = convert(model, tmp_path / "out", "--tp", 2)
    assert result.exit_code == 0, result.stderr
    # Nothing but progress, of which there is a line only where compiling the loops takes seconds.
    assert all(" GB/s " in line for line in result.stderr.splitlines())
    for text in (
        "mxfp4",
        "2 rank",
        "gate (w1)",
        "down (w2)",
        "model.layers.1.mlp.experts",
        "hqconv inspect",
    ):
        assert text in result.stdout
    assert (tmp_path / "out" / "hqconv.json").is_file()


def test_scales_are_rounded_where_asked_and_said_so(tmp_path: Path) -> None:
    source = write(tmp_path / "src", "quark-int8", hidden=128, inner=128).folder
    request = ("convert", source, "--schema", "source", "--target", "sm90", "--device", "cpu")
    refused = call(*request, "-o", tmp_path / "out")
    assert refused.exit_code == 2
    assert "what to do: Add --round-scales" in refused.stderr
    planned = call(*request, "--round-scales", "--dry-run", "--json", "-o", tmp_path / "out")
    assert json.loads(planned.stdout)["conversion"] == {"direct, scales rounded": 1}
    done = call(*request, "--round-scales", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "warning" not in done.stderr
    for said in (done, call("inspect", tmp_path / "out")):
        text = " ".join(said.stdout.split())
        assert "direct, scales rounded: codes kept, scales in the parameter dtype (1 layer)" in text
        assert re.search(r"scales rounded, changed by at most 0\.3\d\d% \(w1\), 0\.3", text), text
    by_itself = call(*request[:3], "int8", *request[4:], "-o", tmp_path / "int8")
    assert (
        "warning: the source's codes are kept, and its float32 scales rounded to bfloat16"
        in by_itself.stderr
    )
    assert call("inspect", source).stdout.count("--round-scales") == 1


def test_quiet_says_nothing(model: Path, tmp_path: Path) -> None:
    layout = ("--layout", "checkpoint", "--schema", "nvfp4")
    result = convert(model, tmp_path / "a", "-q", *layout)
    assert (result.exit_code, result.output) == (0, "")
    result = convert(model, tmp_path / "b", *layout)
    assert result.stderr.startswith("warning: vLLM")
    result = convert(model, tmp_path / "c", "-q", "--json")
    assert json.loads(result.stdout)["num_blocks"] == 2
    result = convert(model, tmp_path / "a", "-q")
    assert result.exit_code == 4
    assert result.stderr


def test_the_profile_tells_what_every_stage_did(model: Path, tmp_path: Path) -> None:
    assert convert(model, tmp_path / "out", "--profile", tmp_path / "profile.json").exit_code == 0
    words = json.loads((tmp_path / "profile.json").read_text())
    stages = words["stages"]
    assert list(stages) == ["open", "read", "encode", "collect", "write", "finish", "publish"]
    assert all(
        (stage["tasks"] > 0) == (name != "collect") for name, stage in stages.items()
    )  # that is a GPU's
    assert all(stage["queued_seconds"] >= 0 for stage in stages.values())
    assert 0 < words["warm_up_seconds"] < words["seconds"]
    assert words["waits"].keys() <= {"a free slot", "files to write into"}
    assert all(
        0 <= stage["busy_seconds"] <= words["seconds"] * stage["threads"]
        for stage in stages.values()
    )
    source = sum(t.nbytes for path in model.glob("*.safetensors") for t in load_file(path).values())
    assert stages["read"]["gigabytes"] == pytest.approx(source / 1e9, abs=1e-3)
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.safetensors"))
    assert stages["finish"]["gigabytes"] == pytest.approx(written / 1e9, abs=1e-3)


def test_a_profile_that_could_not_be_written_is_refused_before_the_work(
    model: Path, tmp_path: Path
) -> None:
    for place in ("missing/profile.json", "."):
        result = convert(model, tmp_path / "out", "--profile", tmp_path / place)
        assert (result.exit_code, "--profile" in result.stderr) == (4, True)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schema", "int9"), "no schema named 'int9'"),
        (("--tp", 3), "TP sizes that work: 1, 2, 4"),
        (("--target", "h10"), "Did you mean h100?"),
        (("--target", "sm87"), "b200, gb200 (sm100)"),
        (("--dtype", "bf16"), "is not one of 'bfloat16', 'float16'"),
        (("--target", "sm75"), "--dtype float16"),
        (("--target", "sm100", "--dtype", "float16"), "--cuda 13.0"),
        (("--cuda", "13"), "such as 13.0"),
        (("--max-memory", "lots"), "512MiB"),
        (("--max-memory", "1MB"), "does not fit into the memory limit"),
        (("--device", "tpu"), "auto, cuda, cuda:N or cpu"),
        (("--device", "cuda:99"), "no such CUDA device"),
        (("--resume", "--overwrite"), "exclude each other"),
        (("--layout", "checkpoint", "--tp", 2), "unsharded"),
        (("--input-schema", "fp9"), "fp8-g128"),
        (("--input-schema", "mxfp4"), "float4e2m1 activations begin with sm100"),
        (("--revision", "main"), "no revisions"),
    ],
)
def test_bad_requests_exit_with_2(
    arguments: Sequence[object], message: str, model: Path, tmp_path: Path
) -> None:
    result = convert(model, tmp_path / "out", "--json", *arguments)
    assert (result.exit_code, json.loads(result.stdout)["exit_code"]) == (2, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_the_target_must_be_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = call("convert", model, "-o", tmp_path / "out", "--schema", "int4")
    assert result.exit_code == 2
    for text in (
        "t4 (sm75)",
        "b200, gb200 (sm100)",
        "rtx-pro-6000",
        "--target h100",
        "nvidia-smi",
        "9.0 is sm90",
    ):
        assert text in result.stderr


def test_with_a_gpu_the_target_is_its_architecture(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hqconv.conversion.option_values.has_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (8, 9 - 3 * index))
    for device, target in (("cpu", "sm89"), ("auto", "sm89"), ("cuda:1", "sm86")):
        assert hqconv.plan(model, schema="int4", device=device).spec.target.name == target


def test_output_and_source_do_not_lie_in_one_another(tmp_path: Path) -> None:
    source = write_qwen3_moe(tmp_path / "around" / "model", num_layers=1)
    for out in (source / "out", source, source.parent):
        result = convert(source, out, "--overwrite")
        assert (result.exit_code, "The output would lie in the source" in result.stderr) == (
            4,
            True,
        )


def test_what_is_no_source_and_no_artifact(model: Path, made: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(made, tmp_path / "a")
    (damaged / "hqconv.json").unlink()
    for result, text in (
        (convert(damaged, tmp_path / "b"), "kernel layout"),
        (call("verify", model), "not an hqconv artifact"),
    ):
        assert (result.exit_code, text in result.stderr) == (2, True)
    assert not (tmp_path / "b").exists()


# --- progress ----------------------------------------------------------------------------------------------


def test_elsewhere_plain_lines_come_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with ShownProgress(quiet=False) as progress:
        for step in range(1, 5):
            now += 2
            progress.update(Progress("layer.0", step * 500_000_000, 4_000_000_000, 0, 0, 2))
        progress.update(Progress("layer.0", 2_000_000_000, 4_000_000_000, 0, 1, 2))
    assert capsys.readouterr().err == "1.50 GB of 4.00 GB  375 MB/s  (0/2) layer.0\n"


def test_progress_is_silent_if_quiet_and_survives_a_closed_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("hqconv.cli.progress_bar._PLAIN_INTERVAL_S", 0.0)
    half = Progress("a", 5, 10, 0, 0, 1)
    with ShownProgress(quiet=True) as progress:
        progress.update(half)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr", Broken())
    with ShownProgress(quiet=False) as progress:
        progress.update(half)
        progress.update(half)


def test_human_units() -> None:
    sizes = {
        0: "0 B",
        999: "999 B",
        1500: "1.50 kB",
        2.5e6: "2.50 MB",
        7e9: "7.00 GB",
        2.05e12: "2.05 TB",
    }
    assert {size: human_bytes(size) for size in sizes} == sizes
    assert [human_seconds(s) for s in (0.04, 59.9, 61, 3723)] == [
        "0.0 s",
        "59.9 s",
        "1:01",
        "1:02:03",
    ]


# --- verify ------------------------------------------------------------------------------------------------


def test_verify_passes_and_says_what_it_did(model: Path, made: Path) -> None:
    result = call("verify", made, "--source", model, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"PASS  files, weights against {model}")
    assert "SKIPPED" in result.stdout
    alone = call("verify", made, "--device", "cpu", "--checks", "files,weights", "--layers", "0")
    assert alone.exit_code == 0
    assert alone.stdout.splitlines()[-1] == "PASS  files, weights, without the source"
    assert "against the source" not in alone.stdout  # no table without rows


def test_another_source_is_said_first_and_in_short(model: Path, made: Path, tmp_path: Path) -> None:
    """One damaged file does not make another source."""
    sizes = write_qwen3_moe(tmp_path / "sizes", num_layers=3, intermediate_size=256)
    weights = write_qwen3_moe(tmp_path / "weights", seed=5)
    another = "The source is another one than the artifact was converted from."
    for source, checks, what in (
        (sizes, "files,weights", another),
        (sizes, "weights", another),
        (weights, "weights", "No expert has the source's weights"),
    ):
        command = ("verify", made, "--source", source, "--device", "cpu", "--checks", checks)
        shown = call(*command)
        found = [line for line in shown.stdout.splitlines() if line.startswith("  ✗")]
        assert shown.exit_code == 1
        assert [line.startswith(f"  ✗ --source: {what}") for line in found] == [True] * (
            checks.count(",") + 1
        )
        assert "more; --json lists all" in shown.stdout
        first = json.loads(call(*command, "--json").stdout)["checks"]["weights"]["findings"]
        assert first[0]["what"].startswith(what)
        assert len(first) > 3
    shard = shutil.copytree(model, tmp_path / "model") / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 1000] = bytes(1000)
    shard.write_bytes(data)
    shown = call("verify", made, "--source", shard.parent, "--device", "cpu", "--checks", "weights")
    assert (shown.exit_code, "--source:" in shown.stdout) == (1, False)


def test_verify_names_the_damage_and_exits_with_1(model: Path, made: Path, tmp_path: Path) -> None:
    out = shutil.copytree(made, tmp_path / "damaged")
    path = out / "experts" / "tp1-ep0" / "model.layers.1.mlp.experts.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)
    result = call("verify", out, "--source", model, "--device", "cpu")
    assert result.exit_code == 1
    verdict = result.stdout.splitlines()[-1]
    assert verdict.startswith("FAIL  files: ")
    assert "tp1-ep0/model.layers.1.mlp.experts.safetensors" in verdict
    words = json.loads(call("verify", out, "--source", model, "--device", "cpu", "--json").stdout)
    assert words["passed"] is False
    statuses = {name: check["status"] for name, check in words["checks"].items()}
    assert statuses == {"files": "fail", "weights": "fail", "kernel": "skipped"}
    assert words["checks"]["weights"]["findings"][0]["where"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--checks", "file"), "no such check"),
        (("--layers", "7"), "no MoE layer of this number"),
        (("--layers", "3-1"), "--layers"),
        (("--tokens", "0"), "--tokens"),
        (("--checks", "kernel", "--device", "cpu"), "cannot run here"),
    ],
)
def test_verify_requests_that_cannot_be_met(
    made: Path, options: tuple[str, ...], text: str
) -> None:
    if torch.cuda.is_available() and "kernel" in options:
        pytest.skip("the kernel can run here")
    result = call("verify", made, *options)
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert result.stdout == ""
