"""The watch and the judge of scripts/check_weight_cache.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.check_weight_cache import Opened, judge

ENGINE: dict[str, Any] = {"answers": [[[1, -0.5]]], "first": [{"1": -0.5}], "read_bytes": 10}


def test_opened_files_are_told_once(tmp_path: Path) -> None:
    """In folders of folders; files that are there but not opened are not told."""
    (tmp_path / "experts" / "tp0-ep0").mkdir(parents=True)
    deep, other = tmp_path / "experts" / "tp0-ep0" / "a.safetensors", tmp_path / "b.json"
    for path in (deep, other):
        path.write_bytes(b"1")
    opened = Opened([tmp_path])
    assert opened.take() == set()
    deep.read_bytes()
    assert opened.take() == {deep}
    assert opened.take() == set()


@pytest.mark.parametrize(
    ("changes", "files", "is_good"),
    [
        ({}, {"a"}, True),
        ({"answers": [[[2, -0.5]]]}, {"a"}, False),
        ({"read_bytes": 90}, {"a"}, False),
        ({}, {"a", "stranger"}, False),
        ({"failed": ["why"]}, {"a"}, False),
    ],
)
def test_the_verdict(changes: dict[str, Any], files: set[str], is_good: bool) -> None:
    own = {Path("a"), Path("b")}
    assert judge(ENGINE, {**ENGINE, **changes}, set(map(Path, files)), own, 100)["good"] is is_good
