"""What a server's log says of a vLLM that hqconv was not tested with."""

from __future__ import annotations

import logging
import tomllib

import pytest

from hqconv.serving.vllm import refusals
from tests.make.places import REPO


@pytest.mark.parametrize(
    ("found", "is_told"),
    [
        ("0.33.0", False),
        ("0.33.2+cu130", False),
        ("0.33.1rc2.dev3+g1234567", False),
        ("0.32.9", True),
        ("0.34.0", True),
        ("0.34.0rc1", True),
        ("1.33.0", True),
        ("dev", True),
    ],
)
def test_other_versions_than_the_tested_are_told_of(
    found: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refusals, "version", {"vllm": found}.__getitem__)
    monkeypatch.setattr(refusals.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, refusals.logger.name):
        refusals.warn_of_untested()
    assert [f"this is {found}." in record.getMessage() for record in caplog.records] == [True] * is_told


def test_the_tested_versions_are_those_that_pyproject_asks_for() -> None:
    words = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    least, below = (".".join(map(str, numbers)) for numbers in refusals.TESTED)
    assert words == [f"vllm>={least},<{below}"]
