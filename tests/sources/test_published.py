"""Published models by their real names: headers through the plan, and twins through conversion and verification.

A new model is a file in tests/data/models, and a row that `python scripts/models_table.py` writes to docs/models.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.make.published import load, paths
from tests.make.published_outcome import outcome_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
# Every other one converts.
REFUSED = {
    "ernie4_5_moe_vl": "of different sizes, in one module",
    "hunyuan_image3": "gate and up of an expert are one tensor",
}
FORMATS = {
    "plain": ["not quantized"],
    "fp8 block": ["float8e4m3", "128x128"],
    "fp8 channel": ["float8e4m3", "per 1xall"],
    "mxfp8": ["float8e4m3", "float8e8m0 scale per 1x32"],
    "mxfp4": ["float4e2m1", "float8e8m0 scale per 1x32"],
    "nvfp4": ["float4e2m1", "float8e4m3 scale per 1x16"],
    "int4 g32": ["int4", "scale per 1x32"],
    "int8": ["int8", "per 1xall"],
}


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[1:-1]]


def rows() -> dict[str, list[str]]:
    """The cells of each model's row in the table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [cells_of(line) for line in lines if line[:2] == "| "]
    return {row[0]: row for row in cells if row[0] not in ("model", "---")}


def firsts() -> set[str]:
    """The first model of each family and source format: the others' twins would be the same."""
    found: dict[tuple[str, str], str] = {}
    for name, cells in rows().items():
        found.setdefault((cells[2], cells[4]), name)
    return set(found.values())


FIRSTS = firsts()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_a_published_model(path: Path, tmp_path: Path) -> None:
    """It is seen as it is, and its twin converts and verifies; or it is refused with the reason that is true for it."""
    model = load(path)
    outcome = outcome_of(path, model, tmp_path, with_twin=path.stem in FIRSTS)
    found, expected = cells_of(outcome.row(model, path.parent.name)), rows()[path.stem]
    if path.stem not in FIRSTS and model.name not in REFUSED:
        found.pop(), expected.pop()
    assert found == expected
    if model.name in REFUSED:
        assert REFUSED[model.name] in outcome.refused
        return
    assert (outcome.refused, outcome.damage) == ("", [])
    assert bool(outcome.twin) == (path.stem in FIRSTS)
    assert all(outcome.twin.values()), outcome.findings
    expect, layers = model.expect, outcome.experts.layers
    if expect:
        assert (outcome.experts.family, len(layers)) == (expect["family"], expect["blocks"])
        assert {layer.num_experts for layer in layers} == {expect["experts"]}
        assert {layer.activation.label for layer in layers} == {expect["activation"]}
        assert all(word in outcome.formats()[0] for word in FORMATS[expect["format"]])
        assert (len(outcome.formats()) > 1) == bool(expect.get("mixed"))
        assert (outcome.experts.layers[0].dtype == "BF16") == (expect["format"] == "plain")


def test_every_model_is_in_the_table_once() -> None:
    names = re.findall(r"^\| (\S+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted({*names} - {"model", "---"}) == sorted(path.stem for path in paths())
