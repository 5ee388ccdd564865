"""The rates of check_serving.py read: the files are rank files in form, and every byte of them is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from scripts import bench_reading

CPU = torch.device("cpu")


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(bench_reading, "PIECE", 8192)
    return bench_reading.write_files(tmp_path / "files", 0.0003, num_files=3)


def test_files_are_those_that_the_library_reads(paths: list[Path]) -> None:
    for path in paths:
        assert path.stat().st_size == 100_000
        with safe_open(path, framework="pt") as file:
            assert [name.rpartition(".")[2] for name in file.keys()] == [  # noqa: SIM118 - no dict
                *("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
            ]
    written = [path.stat().st_mtime_ns for path in paths]
    assert bench_reading.write_files(paths[0].parent, 0.0003, num_files=3) == paths
    assert [path.stat().st_mtime_ns for path in paths] == written


@pytest.mark.parametrize("is_direct", [False, True])
def test_the_limit_reads_every_byte(paths: list[Path], is_direct: bool) -> None:
    copies, seen = bench_reading._Copies(CPU), []
    total = bench_reading._read_all(paths, lambda _, count: seen.append(count), is_direct=is_direct, copies=copies)
    assert total == sum(seen) == 300_000
    assert max(seen) == 8192


def test_a_report_has_ours_and_the_limit(paths: list[Path]) -> None:
    found = bench_reading.measure(paths, CPU, 1, is_cold=False)
    assert {"ours", "safetensors", "limit: read", "limit: read_and_copy", "limit: copy"} <= found["rates"].keys()
    assert "ours" not in found["failed"]
    assert found["ours_of_limit"] == found["rates"]["ours"] / found["rates"]["limit: read_and_copy"]


def test_wrong_bytes_are_no_rate(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_reading.ParameterLoader, "fill", lambda *_: None)
    found = bench_reading.measure(paths, CPU, 1, is_cold=False)
    assert found["failed"]["ours"].startswith("AssertionError")
    assert found["ours_of_limit"] == 0
