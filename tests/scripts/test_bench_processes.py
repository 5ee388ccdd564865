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
    command = [sys.executable, str(REPO / "scripts/bench_processes.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["sink"] for row in rows] == ["null", "files"]
    for row in rows:
        assert list(row["processes"]) == ["1", "2"]
        assert all(value > 0 for figures in row["processes"].values() for value in figures.values())
        assert row["ratios"]["2"].keys() == {"steady_gb_per_s", "whole_gb_per_s"}
    assert not (tmp_path / "out").exists()
