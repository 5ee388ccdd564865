"""The script that measures copying: its figures come from real commands, and what was copied is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import bench_copies


def test_every_small_tensor_is_copied_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_copies, "PER_SHARD", 700)
    rows = {row["look"]: row for row in bench_copies.measure_copies(tmp_path, 2000, 1)}
    assert rows["compared"]["copied"] == 2000 - 3 * bench_copies.EXPERTS
    assert rows["convert"]["cpu_seconds"] >= rows["dry-run"]["cpu_seconds"] > 0
    assert not any(tmp_path.iterdir())


def test_a_wrong_copy_is_found(tmp_path: Path) -> None:
    bench_copies.make(tmp_path / "source", 100)
    bench_copies.make(tmp_path / "out", 100)
    (tmp_path / "out/hqconv.json").write_text('{"files": {}}')
    assert bench_copies.compare(tmp_path / "source", tmp_path / "out") == 100
    path = tmp_path / "out/model-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(SystemExit, match="copied wrongly"):
        bench_copies.compare(tmp_path / "source", tmp_path / "out")
