"""The script that measures looking: its models are what they say, and its figures come from real commands."""

from __future__ import annotations

from pathlib import Path

import pytest

import hqconv
from scripts import bench_headers


@pytest.mark.parametrize(("fmt", "source_format"), [("bf16", "not quantized"), ("fp8-block", "fp8")])
def test_models_are_models(tmp_path: Path, fmt: str, source_format: str) -> None:
    count = bench_headers.make_headers(tmp_path / "m", fmt, 2000, 16)
    words = hqconv.inspect(tmp_path / "m")
    assert words["convertible"]
    assert words["num_tensors"] == count
    assert abs(count - 2000) <= 16 * bench_headers.FORMATS[fmt]
    assert words["num_files"] > 1
    (layers,) = words["blocks"]
    assert layers["num_experts"] == 16
    assert layers["source_format"].startswith(source_format)
    on_disk = sum(512 * path.stat().st_blocks for path in (tmp_path / "m").iterdir())
    assert on_disk < 1e-4 * words["num_bytes"]


@pytest.mark.full
def test_figures_are_of_whole_commands(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    found = list(bench_headers.measure_headers(tmp_path / "big", [7000], ["bf16"], 1))
    assert [row["look"] for row in found] == [*bench_headers.LOOKS, bench_headers.ARTIFACT, *bench_headers.REPORTS]
    for row in found:
        assert row["tensors"] == 6 * (3 * bench_headers.EXPERTS + 1) + 1
        assert 0 < row["cpu_seconds"] < 60
        assert row["start_seconds"] > 0.05
        assert row["peak_mb"] > 20
    assert not any((tmp_path / "big").iterdir())
