"""docs/quantizers.md shows what scripts/quantizer_gains.py measures, of every schema, and what is said of it there."""

from __future__ import annotations

import re

import pytest

from scripts.quantizer_gains import COMPENSATED, PAGE, SCHEMAS, WEIGHTED, compensated_row, row, weighted_row, weights

TEXT = PAGE.read_text(encoding="utf-8")


def test_every_schema_has_a_row() -> None:
    assert re.findall(r"^\| `([\w-]+)` \|", TEXT.partition("## What it costs")[0], re.MULTILINE) == [
        *SCHEMAS,
        *WEIGHTED,
        *COMPENSATED,
    ]


@pytest.mark.parametrize("schema", ["mxfp4", "int4"])
def test_a_row_is_what_is_measured(schema: str) -> None:
    assert row(schema, weights()) in TEXT


@pytest.mark.parametrize("schema", ["mxfp4", "int4"])
def test_the_gain_is_about_what_the_changelog_says_for_the_common_schemas(schema: str) -> None:
    """Of Gaussian weights, the squared error."""
    found = re.search(rf"^\| `{schema}` \| [\d.]+ → [\d.]+: [\d.]+ %, ([\d.]+) %", TEXT, re.MULTILINE)
    assert found is not None
    assert float(found[1]) > 8


@pytest.mark.parametrize("schema", ["mxfp4", "int4"])
def test_a_row_by_importance_is_what_is_measured_and_better_than_without(schema: str) -> None:
    line = weighted_row(schema)
    assert line in TEXT
    plain, even, best = (float(number) for number in re.findall(r" (0\.\d{4})", line))
    assert best < even < plain


def test_a_row_by_compensation_is_what_is_measured_and_better_where_inputs_are_correlated() -> None:
    line = compensated_row("nvfp4")
    assert line in TEXT
    plain, even, best, many, few, independent, same = (float(n) for n in re.findall(r" (0\.\d{4})", line))
    assert many < 0.9 * best < best < even < plain
    assert few < best
    assert same < 1.01 * independent
