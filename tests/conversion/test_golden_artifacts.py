"""Whole artifacts are the same, byte for byte, as those on record: of every schema, format and grid.

The record was made by the code before the rooms were built (commit 2fc4a68), and every later change of a byte
has to say so in it (`scripts/record.py artifacts`).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.make.artifacts import SOURCES, Record, conversions_of, make_source, record
from tests.make.formats import KINDS
from tests.make.places import GOLDEN

RECORDED = json.loads((GOLDEN / "artifacts.json").read_text())


def test_every_conversion_is_on_record() -> None:
    assert list(RECORDED["cases"]) == [
        f"{name}/{words}" for name in SOURCES for words, _ in conversions_of(name)
    ]
    refused = [case for case, digests in RECORDED["cases"].items() if digests[1].endswith("Error")]
    assert len(refused) < 0.1 * len(RECORDED["cases"])


def assert_recorded(name: str, folder: Path, num_cases: int | None = None) -> None:
    src = make_source(name, folder / "source")
    for conversion, options in itertools.islice(conversions_of(name), num_cases):
        recorded = Record(*RECORDED["cases"][f"{name}/{conversion}"])
        found = record(src, folder / "out", options)
        if found.source != recorded.source and torch.__version__ != RECORDED["torch"]:
            pytest.skip(f"the source is made of other numbers than by torch {RECORDED['torch']}")
        assert found == recorded, conversion


@pytest.mark.sampled(36)
@pytest.mark.parametrize("name", SOURCES[::-1])  # the first, of every schema, is not in the sample
def test_artifacts_are_those_on_record(name: str, tmp_path: Path) -> None:
    assert_recorded(name, tmp_path)


OF_EACH_KIND = [n for n in SOURCES if n != "plain" and (n[:7] != "format/" or n[7:] in KINDS)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_checks_that_are_judged_together_change_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: experts are decoded without a look at their values, and again where one look found something."""
    monkeypatch.setattr("hqconv.conversion.encode._ASYNCHRONOUS", ("cpu",))
    assert_recorded(name, tmp_path, 1)
