"""scripts/check_gpu.py eight, on the CPU: two processes, a conversion whose experts are not written, two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import check_gpu, many_gpus


def test_every_case_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2, "vocab": 64}
    monkeypatch.setattr(many_gpus, "SHAPE", small)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(many_gpus, "verification", lambda *_: ["", "", ""])  # two commands, in turn
    words = [
        "--work",
        str(tmp_path / "work"),
        "--size-gb",
        "0.001",
        "--ranks",
        "2",
        "--schemas",
        "mxfp4",
    ]
    with pytest.raises(SystemExit) as ended:
        check_gpu.main(["eight", *words, "--processes", "2", "--sinks", "files,discarded"])
    rows = [line for line in capfd.readouterr().out.splitlines() if line.startswith("| mxfp4")]
    assert not ended.value.code, rows
    assert [row.split(" | ")[1] for row in rows] == [
        *["convert, 2 processes"] * 2,
        "verify, tp 2",
        "verify, ep 2",
        "load, tp 2",
    ]
    assert re.search(r"by 2 processes in [\d.]+ s", rows[-1])
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"source", "mxfp4-tp"}
