"""The benchmark: every mode runs on a small source, alone and in turn with another checkout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench
from tests.make import processes
from tests.make.places import REPO


def measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> list[dict[str, Any]]:
    monkeypatch.setattr(bench, "EXPERTS_PER_LAYER", 4)
    monkeypatch.setattr("scripts.bench.subprocess.run", forked)
    monkeypatch.setattr(sys, "argv", ["bench.py", *options, "--runs", "1", "--threads", "2"])
    bench.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def forked(command: list[str], stdout: int, **options: Any) -> Any:
    return processes.run(command, stdout=stdout, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["convert", "load"])
def test_pairs(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--work", str(tmp_path), "--size=0.04", "--schema=int4", "--against", str(REPO))
    [found] = measured(monkeypatch, capsys, what, *options)
    assert 0 < found["this"]["call_s"] < found["this"]["whole_s"]
    assert found["ratio"]["whole_s"] > 0
    assert found["differing"] == []
    assert not list(tmp_path.glob("out-*"))


def test_files_that_differ(tmp_path: Path) -> None:
    manifests: list[dict[str, Any]] = [
        {"a.safetensors": "1", "README.md": "2"},
        {"a.safetensors": "3", "b.safetensors": "4"},
    ]
    for number, digests in enumerate(manifests):
        (tmp_path / str(number)).mkdir()
        files = {name: {"sha256": digest} for name, digest in digests.items()}
        (tmp_path / str(number) / "hqconv.json").write_text(json.dumps({"files": files}))
    assert bench.differing(tmp_path / "0", tmp_path / "1") == ["a.safetensors", "b.safetensors"]
