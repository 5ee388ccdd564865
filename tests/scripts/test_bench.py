"""The benchmark: every mode runs on a small source, and the sink `null` writes no weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench
from tests.make import artifacts

SIZE_GB = 0.04  # one layer


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of all runs, so that the source is made once."""
    return tmp_path_factory.mktemp("bench")


def measured(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> list[dict[str, Any]]:
    """Run the script on a source of four experts; return its lines of JSON."""
    monkeypatch.setattr(bench, "EXPERTS_PER_LAYER", 4)
    common = ["--work", str(work), "--size", str(SIZE_GB), "--runs", "1", "--no-warm-up", "--skip-bytes"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *common, "--threads", "2", *options])
    bench.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_both_sinks_are_measured_and_logged(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, num_files = bench.measure, {}

    def counting(job: dict[str, Any]) -> dict[str, Any]:
        result = measure(job)
        num_files[job["sink"]] = len(list(Path(job["out"]).rglob("*.safetensors")))
        return result

    monkeypatch.setattr(bench, "measure", counting)
    options = ("--schemas", "mxfp4", "--sinks", "files,null", "--log", str(work / "log"))
    options += ("--traces", str(work / "traces"))
    found = measured(work, monkeypatch, capsys, *options)
    assert [one["sink"] for one in found] == ["files", "null"]
    assert num_files == {"files": 2, "null": 0}
    for one in found:
        assert SIZE_GB < one["source_gb"] < 2 * SIZE_GB  # with the tensors that are copied
        assert one["steady_gb_per_s"] > one["whole_gb_per_s"]["hqconv"] > 0
        assert one["profile"]["stages"]["write"]["gigabytes"] > 0
        assert one["limits_gb_per_s"]["together"] > 0
    assert json.loads((work / "log.json").read_text()) == found
    assert (work / "log.svg").read_text().startswith("<svg")
    assert not list(work.glob("out-*"))
    traces = {path.name: json.loads(path.read_text()) for path in (work / "traces").iterdir()}
    assert traces.keys() == {f"mxfp4-cpu-{sink}-source-{SIZE_GB}-hqconv.trace.json" for sink in ("files", "null")}
    assert all(any(span["name"] == "write" for span in trace) for trace in traces.values())


@pytest.mark.full
def test_variants_of_a_constant_are_measured(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "conversion.resources._CPU_BATCH_BYTES"
    options = (
        "--schemas",
        "int8",
        "--sinks",
        "null",
        "--vary",
        f"{name}={10**7},{10**8}",
        "--traces",
        str(work / "varied"),
    )
    (one,) = measured(work, monkeypatch, capsys, *options)
    labels = [f"{name}={value}" for value in (10**7, 10**8)]
    assert list(one["steady_gb_per_s_of"]) == list(one["whole_gb_per_s"]) == labels
    assert one["profile"]["staging"]["num_experts"] == 1  # of the first value
    batches = []
    for label in labels:
        (path,) = (work / "varied").glob(f"*-{label}.trace.json")
        batches.append(sum(span["name"] == "encode" and span["pid"] == 2 for span in json.loads(path.read_text())))
    assert batches == [4, 1]
    with pytest.raises(SystemExit, match="failed"):
        measured(work, monkeypatch, capsys, "--schemas", "int8", "--vary", "conversion.resources._MISSING=1")


@pytest.mark.full
def test_peers_are_measured_from_a_cold_source(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = measured(work, monkeypatch, capsys, "--schemas", "int4", "--cold", "--peers")
    assert one["cache"] == "cold"
    assert one["whole_gb_per_s"].keys() >= {bench.HQCONV, bench.VLLM}
    assert one["ratio_to_peers"][bench.VLLM] > 0


@pytest.mark.full
def test_a_quantized_source_is_measured(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = measured(work, monkeypatch, capsys, "--schemas", "source", "--quantized", "fp8-block")
    assert (one["source"], one["schema"]) == ("fp8-block", "source")
    assert one["source_gb"] < 1.5 * SIZE_GB


@pytest.mark.full
def test_allocations_are_measured(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = measured(work, monkeypatch, capsys, "--allocate", "mxfp4,int8")
    assert one["convert_steady_gb_per_s"].keys() == {"mxfp4", "int8"}
    assert one["share_of_convert"] > 0


def test_headers_alone_are_measured(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure_headers", lambda *given: [{"given": [str(one) for one in given]}])
    found = measured(work, monkeypatch, capsys, "--headers", "--tensors", "3000,5000", "--formats", "bf16")
    assert found == [{"given": [str(work), "[3000, 5000]", "['bf16']", "1"]}]  # its own tests: test_bench_headers.py


def test_small_conversions_are_held_to_the_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(one for one in artifacts.conversions_of("plain") if one[1]["schema"] == "mxfp4")
    monkeypatch.setattr(artifacts, "conversions_of", lambda _: [case])
    bench.check_bytes(["cpu"], ["mxfp4"])
    assert "as on record on cpu" in capsys.readouterr().out
    other = (case[0], {**case[1], "tp": 2})  # another artifact under the name of this one
    monkeypatch.setattr(artifacts, "conversions_of", lambda _: [other])
    with pytest.raises(SystemExit, match="other bytes"):
        bench.check_bytes(["cpu"], ["mxfp4"])
