"""docs/sources.md says what the lists of formats and families say, and that everything passed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hqconv.models.families import FAMILIES
from scripts.check_sources import (
    TABLE,
    check_format,
    document,
    family_rows,
    find_row,
    format_row,
    missing_rows,
    proof_rows,
)
from scripts.check_sources import Outcome as Done
from tests.make.formats import FORMATS

LINES = TABLE.read_text(encoding="utf-8").splitlines()


def test_every_format_and_family_is_in_the_table() -> None:
    assert missing_rows(LINES) == []


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_passed(name: str) -> None:
    row = find_row(LINES, name)
    assert "FAILED" not in row
    assert row.count("files, weights") == (2 if FORMATS[name].direct or FORMATS[name].rounded else 1)


@pytest.mark.parametrize("name", ["quark-int8", "fp8-channel-f32"])
def test_rows_of_rounded_scales_are_what_comes_of_it(name: str, tmp_path: Path) -> None:
    """But for the kernel's figure, which needs a GPU."""
    found = format_row(name, *check_format(name, tmp_path, "cpu"))
    assert " with `--round-scales`; else refused: " in found
    assert found == re.sub(r", kernel [\d.]+", "", find_row(LINES, name))


def test_there_is_no_row_without_a_format() -> None:
    start = LINES.index("## Formats")
    names = [line.split("|")[1].strip() for line in LINES[start + 4 : LINES.index("### Act order")] if line]
    assert names == list(FORMATS)
    proofs = [line for line in LINES[LINES.index("## Proven by") :] if line.startswith("|")]
    assert proofs[2:] == list(proof_rows())


def test_families_have_one_row_each() -> None:
    assert [row.split("|")[1].strip() for row in family_rows()] == [family.name for family in FAMILIES]


def test_the_table_is_written_as_it_is_read(tmp_path: Path) -> None:
    made = document([find_row(LINES, name) for name in FORMATS], "a device").splitlines()
    assert [line for line in made if line.startswith("|")] == [line for line in LINES if line.startswith("|")]
    assert missing_rows(made) == []


def test_a_missing_or_different_row_is_found() -> None:
    name = next(iter(FORMATS))
    other = format_row(name, Done("mxfp4", "files, weights"), Done("int4", "files, weights", "0.1"))
    rest = [line for line in LINES if line != find_row(LINES, name)]
    for lines in (rest, [*rest, other]):
        (problem,) = missing_rows(lines)
        assert problem.startswith(f"| {name} |")
    assert len(missing_rows([line for line in LINES if not line.startswith("| dbrx |")])) == 1
