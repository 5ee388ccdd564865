"""Published models by their real names: headers through the plan, and twins through conversion and verification.

A new model is a file in tests/data/models, and a row that `python scripts/models_table.py` writes to docs/models.md.
"""

from __future__ import annotations

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


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_a_published_model(path: Path, tmp_path: Path) -> None:
    """It is seen as it is, and its twin converts and verifies; or it is refused with the reason that is true for it."""
    model = load(path)
    outcome = outcome_of(path, model, tmp_path)
    assert outcome.row(model, path.parent.name) in PAGE.read_text(encoding="utf-8").splitlines()
    if model.name in REFUSED:
        assert REFUSED[model.name] in outcome.refused
        return
    assert (outcome.refused, outcome.damage) == ("", [])
    assert outcome.twin, "no twin was converted"
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
    rows = [
        line.split(" | ")[0][2:]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line[:2] == "| "
    ]
    assert sorted(row for row in rows if row not in ("model", "---")) == sorted(
        path.stem for path in paths()
    )
