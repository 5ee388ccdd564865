"""The script that compares numbers of processes: figures come from real conversions, alone and by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.make.places import REPO


@pytest.mark.full
def test_two_processes_are_compared_with_one(tmp_path: Path) -> None:
    options = ["--size", "0.3", "--device", "cpu", "--threads", "2", "--runs", "1", "--work", str(tmp_path)]
    options += ["--traces", str(tmp_path / "traces")]
    command = [sys.executable, str(REPO / "scripts/bench_processes.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["sink"] for row in rows] == ["null", "files"]
    for row in rows:
        assert list(row["processes"]) == ["1", "2"]
        assert all(value > 0 for figures in row["processes"].values() for value in figures.values())
        assert row["ratios"]["2"].keys() == {"steady_gb_per_s", "whole_gb_per_s"}
    traces = {path.name: json.loads(path.read_text()) for path in (tmp_path / "traces").iterdir()}
    runs = ("1-0", "2-0", "2-1")  # processes and rank
    assert traces.keys() == {f"mxfp4-{sink}-{run}.trace.json" for sink in ("null", "files") for run in runs}
    encoding = {name.rpartition("-")[0] for name, spans in traces.items() if any(s["name"] == "encode" for s in spans)}
    assert encoding == {f"mxfp4-{sink}-{number}" for sink in ("null", "files") for number in (1, 2)}  # by some process
    assert not (tmp_path / "out").exists()
