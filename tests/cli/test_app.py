"""The command line: options, exit codes, what goes to which stream, interruption and resumption."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import hqconv
from hqconv.cli.render import ShownProgress, human_bytes, human_seconds
from hqconv.conversion.option_values import parse_bytes, place_of
from hqconv.conversion.stages import Meter, Progress
from hqconv.errors import RequestError
from hqconv.schemas.options import LayerChoice, Override, load_recipe
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.command import call
from tests.make.qwen import write_qwen3_moe
from tests.make.stopping import without_progress


def convert(model: Path, out: Path, *more: object) -> Any:
    return call("convert", model, "-o", out, "--schema=mxfp4", "--target=sm90", *more)


# --- options and values ------------------------------------------------------------------------------------


def test_help_and_version() -> None:
    assert call().exit_code == 0
    assert "convert" in call().stdout
    assert re.fullmatch(r"hqconv \d+\.\d+\.\d+\n", call("--version").stdout)
    for command in ("convert", "allocate", "publish"):
        usual, every = (call(command, flag).stdout for flag in ("--help", "--help-all"))
        assert usual.count("\n") <= 60
        assert "--expert-placement" not in usual
        assert "--expert-placement" in every


def test_sizes() -> None:
    sizes = {"1": 1, "4096": 4096, "512MiB": 512 << 20, "4GiB": 4 << 30, "4gib": 4 << 30}
    sizes |= {"2GB": 2 * 10**9, "1.5G": 3 << 29, "3 kB": 3000}
    assert {text: parse_bytes(text, "--size") for text in sizes} == sizes
    for text in ("", "GiB", "-1", "4 GiBs", "4iB", "1e9", "four", "0GB"):
        with pytest.raises(RequestError, match="--size"):
            parse_bytes(text, "--size")


def test_default_names(tmp_path: Path) -> None:
    """Artifacts that differ have different names, and usual ones short ones; some have a recipe's name."""
    model = write_qwen3_moe(tmp_path / "m", num_layers=3)

    def name(schema: str = "mxfp4", **options: Any) -> str:
        plan = hqconv.plan(model, **{"schema": schema, "target": "sm90", **options})
        return place_of(plan, None).name

    def recipe(file: str, text: str) -> Any:
        (tmp_path / file).write_text(f'[[override]]\nlayers = {text}"\n')
        return load_recipe(tmp_path / file).overrides

    assert name() == name(target="h200") == "m-mxfp4"
    assert name("int4-g64-zp", tp=2, ep=2) == "m-int4-g64-zp-tp2-ep2"
    for target in ("sm90", "sm80"):
        assert name(layout="checkpoint", target=target) == "m-mxfp4-checkpoint"
    assert name(target="sm80", dtype="float16", tp=2) == "m-mxfp4-tp2-sm80-float16"
    assert name("fp8", target="sm89", cuda="13.0", input_schema="fp8") == "m-fp8-act-fp8-sm89"
    assert name("int4", quantizer="mse") == "m-int4-mse"
    ends = recipe("ends in 8.toml", '"0, -1"\nschema = "fp8')
    assert name(overrides=ends, tp=2) == "m-mxfp4-ends-in-8-tp2"
    assert name(overrides=recipe("plain.toml", '"0"\nschema = "mxfp4')) == "m-mxfp4"
    assert name(overrides=recipe("left.toml", '"0"\nschema = "none')) == "m-mxfp4-left"
    own = [Override("*.0.*", (), LayerChoice(*[resolve_schema("int8")] * 2), "a test")]
    assert name(overrides=own) == "m-mxfp4-mixed"


# --- convert -----------------------------------------------------------------------------------------------


def test_summary_goes_to_stdout(model: Path, tmp_path: Path) -> None:
    result = convert(model, tmp_path / "out", "--tp", 2)
    assert result.exit_code == 0, result.stderr
    # Nothing but progress, of which there is a line only where compiling the loops takes seconds.
    assert without_progress(result.stderr) == ""
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


def test_the_profile_tells_what_every_stage_did(model: Path, tmp_path: Path) -> None:
    assert convert(model, tmp_path / "out", "--profile", tmp_path / "profile.json").exit_code == 0
    profile = json.loads((tmp_path / "profile.json").read_text())
    stages = profile["stages"]
    assert list(stages) == ["read", "encode", "write", "finish"]
    for stage in stages.values():
        assert stage["tasks"] > 0
        assert 0 <= stage["busy_seconds"] <= profile["seconds"] * stage["threads"]
    source = sum(t.nbytes for path in model.glob("*.safetensors") for t in load_file(path).values())
    assert stages["read"]["gigabytes"] == pytest.approx(source / 1e9, abs=1e-3)


BAD = {
    "--schema int9": "no schema named 'int9'",
    "--tp 3": "TP sizes that work: 1, 2, 4",
    "--target h10": "Did you mean h100?",
    "--target sm87": "b200, gb200 (sm100)",
    "--dtype bf16": "is not one of 'bfloat16', 'float16'",
    "--target sm75": "--dtype float16",
    "--target sm100 --dtype float16": "--cuda 13.0",
    "--cuda 13": "such as 13.0",
    "--max-memory lots": "512MiB",
    "--max-memory 1MB": "does not fit into the memory limit",
    "--device tpu": "auto, cuda, cuda:N or cpu",
    "--device cuda:99": "no such CUDA device",
    "--resume --overwrite": "exclude each other",
    "--part 1/2 --overwrite": "exclude each other",
    "--cache-limit 1GB --keep-source": "exclude each other",
    "--layout checkpoint --tp 2": "unsharded",
    "--input-schema fp9": "fp8-g128",
    "--input-schema mxfp4": "float4e2m1 activations, with bfloat16 parameters",
    "--revision main": "no revisions",
    "--max-error -1": "greater than or equal to 0",
    "-v -q": "exclude each other",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_requests_exit_with_2(options: str, model: Path, tmp_path: Path) -> None:
    result = convert(model, tmp_path / "out", "--json", *options.split())
    assert (result.exit_code, json.loads(result.stdout)["exit_code"]) == (2, 2)
    assert BAD[options] in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_the_target_is_sm90(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command that anyone types works, and a line says for which GPU, and how to choose another."""
    monkeypatch.setattr("hqconv.conversion.option_values.has_driver", lambda: False)
    monkeypatch.chdir(tmp_path)
    line = "Target sm90 (H100, H200), since this machine has no GPU; choose another with --target, e.g. --target l40s."
    done = call("convert", model, "--schema=int4", "--json")
    assert (done.exit_code, without_progress(done.stderr)) == (0, f"{line}\n")
    assert json.loads(done.stdout)["target"] == "sm90"
    assert (tmp_path / f"{model.name}-int4").is_dir()
    for more, lines in (((), [line]), (("-q",), []), (("--target=l40s",), [])):
        planned = call("convert", model, "--schema=int4", "-o", "new", "--dry-run", *more)
        assert (planned.exit_code, planned.stderr.splitlines()) == (0, lines)


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
    line = "6.0 s  1.50 GB of 4.00 GB  writing (0/2) layer.0\n"
    assert capsys.readouterr().err == line


def test_a_step_before_the_first_bytes_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with ShownProgress(quiet=False) as progress:
        meter = Meter(30, 2, progress.update, {"layer.0": 20})
        for _ in range(2):
            meter.announce("calibrating layer 1 of 1, 9 tokens")
    assert capsys.readouterr().err == "0.0 s  0 B of 30 B  calibrating layer 1 of 1, 9 tokens\n"


def test_the_time_that_is_left_follows_from_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied files, which are faster, tell nothing."""
    now, seen = 100.0, []
    monkeypatch.setattr("time.monotonic", lambda: now)
    meter = Meter(80, 4, seen.append, {"layer.0": 20, "layer.1": 20, "layer.2": 30})
    meter.resume("layer.0", 20)
    now += 4
    meter.advance("copied", 10)
    meter.finish("copied")
    meter.advance("layer.1", 20)
    meter.finish("layer.1")
    assert [progress.left_s for progress in seen] == [None, None, None, None, 6.0]


def test_progress_survives_a_closed_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("hqconv.cli.render._PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr("sys.stderr", Broken())
    with ShownProgress(quiet=False) as progress:
        progress.update(Progress("a", 5, 10, 0, 0, 1))


def test_human_units() -> None:
    sizes = {0: "0 B", 999: "999 B", 1500: "1.50 kB", 7e9: "7.00 GB", 2.05e12: "2.05 TB"}
    assert {size: human_bytes(size) for size in sizes} == sizes
    seconds = {0.04: "0.0 s", 59.9: "59.9 s", 61: "1:01", 3723: "1:02:03"}
    assert {passed: human_seconds(passed) for passed in seconds} == seconds


# --- verify ------------------------------------------------------------------------------------------------


def test_verify_passes_and_says_what_it_did(model: Path, made: Path) -> None:
    result = call("verify", made, "--source", model, "--device=cpu")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"PASS  files, weights against {model}")
    assert "SKIPPED" in result.stdout
    alone = call("verify", made, "--device=cpu", "--checks", "files,weights", "--layers", "0")
    assert alone.exit_code == 0
    assert alone.stdout.splitlines()[-1] == "PASS  files, weights, without the source"
    assert "against the source" not in alone.stdout  # no table without rows


def test_another_source_is_said_first_and_in_short(made: Path, tmp_path: Path) -> None:
    sizes = write_qwen3_moe(tmp_path / "sizes", num_layers=3, intermediate_size=256)
    weights = write_qwen3_moe(tmp_path / "weights", seed=5)
    for source, what in {
        sizes: "The source is another one than the artifact was converted from.",
        weights: "No expert has the source's weights",
    }.items():
        command = ("verify", made, "--source", source, "--device=cpu", "--checks", "weights")
        shown = call(*command)
        (found,) = (line for line in shown.stdout.splitlines() if line.startswith("  ✗"))
        assert (shown.exit_code, found.startswith(f"  ✗ --source: {what}")) == (1, True)
        findings = json.loads(call(*command, "--json").stdout)["checks"]["weights"]["findings"]
        assert findings[0]["what"].startswith(what)
        assert len(findings) > 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--checks file", "no such check"),
        ("--layers 7", "no MoE layer of this number"),
        ("--layers 3-1", "--layers"),
        ("--layers x", "--layers"),
        ("--tokens 0", "--tokens"),
        ("--checks kernel --device cpu", "cannot run here"),
    ],
)
def test_verify_requests_that_cannot_be_met(made: Path, options: str, text: str) -> None:
    result = call("verify", made, *options.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr
