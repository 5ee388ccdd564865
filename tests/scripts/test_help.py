"""Each script under scripts/ can say what it does: its arguments agree with each other, and its imports exist."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WITH_ARGUMENTS = sorted(
    path.stem
    for path in SCRIPTS.glob("*.py")
    if re.search(r"ArgumentParser\(", path.read_text(encoding="utf-8"))
)


def test_some_scripts_take_arguments() -> None:
    assert {"bench", "make_checkpoint", "plant_faults"} <= set(WITH_ARGUMENTS)


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"scripts.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")
