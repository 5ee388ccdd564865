"""The text of `--calibrate builtin`: its bytes, its kinds, and its place in the package."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from hqconv.planning.calibration import BUILTIN_TEXT
from scripts import make_builtin_text

# Another text gives other bytes of artifacts: say it in the changelog.
SHA256 = "16a8e2dcbed53c40d5bce5d4a5d590236d7b478e023124e9ae34f4b0c5591b30"
KINDS = {
    "prose": "Alice",
    "documentation": ".. code-block::",
    "Python": r"^    def \w+\(self",
    "JavaScript": r"^\s+const \w+ = ",
    "chat": "^Assistant: ",
}
RARER = {
    "tool calls": "<tool_call>",
    "German": r"\b(und|oder|nicht)\b",
    "Chinese": "[\u4e00-\u9fff]{6}",
    "Japanese": "[\u3040-\u30ff]{4}",
    "Korean": "[\uac00-\ud7a3]{2}",
    "Cyrillic": "[\u0400-\u04ff]{5}",
    "Arabic": "[\u0600-\u06ff]{4}",
}


def test_the_text_is_the_recorded_one() -> None:
    assert hashlib.sha256(BUILTIN_TEXT.read_bytes()).hexdigest() == SHA256
    assert make_builtin_text.TEXT == BUILTIN_TEXT
    assert 180_000 < BUILTIN_TEXT.stat().st_size < 240_000


@pytest.mark.parametrize(("kind", "parts"), [*((one, 4) for one in KINDS), *((one, 2) for one in RARER)])
def test_each_part_has_every_kind(kind: str, parts: int) -> None:
    text = BUILTIN_TEXT.read_text("utf-8")
    size = len(text) // parts
    for start in range(0, parts * size, size):
        assert re.search((KINDS | RARER)[kind], text[start : start + size], re.MULTILINE), start


def test_the_text_names_nobody_and_holds_no_notice() -> None:
    text = BUILTIN_TEXT.read_text("utf-8")
    assert not re.search(r"[\w.-]+@[\w-]+\.\w+|Gutenberg|[Cc]opyright|\r|\x00|\ufffd", text)


def test_the_package_holds_the_text_and_its_licences() -> None:
    root = Path(make_builtin_text.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["hqconv.calibration"] == ["builtin.txt", "builtin.md"]
    assert "hqconv/calibration/builtin.md" in project["project"]["license-files"]
    licences = BUILTIN_TEXT.with_suffix(".md").read_text("utf-8")
    for source in make_builtin_text.SOURCES:
        assert source.replace("-", " ") in licences.lower(), source
