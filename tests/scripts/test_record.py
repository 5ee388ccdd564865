"""What scripts/record.py records is what docs/measured holds; times alone need a GPU. And the picture of quality."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.weight_schema import resolve_schema
from scripts import picture, record
from scripts.record import DIVERGENCE, SPEEDS
from tests.make.calibrated import write_text
from tests.make.families import save_family
from tests.make.tokenizer import write_tokenizer


def test_a_divergence_is_measured_by_a_conversion_and_its_evaluation(tmp_path: Path) -> None:
    save_family(tmp_path / "real", "mixtral", inner=64)
    write_tokenizer(tmp_path / "real")
    text = write_text(tmp_path / "calib.txt")
    found = [
        record.divergence_of(tmp_path / "real", "int3-g64", text, calibrate, 48)
        for calibrate in (None, str(text))
    ]
    assert all(
        {*found[1]} == {"kl", "perplexity", "source_perplexity", "same_token"} for one in found
    )
    assert 0 < found[1]["kl"] < found[0]["kl"]
    assert json.loads(DIVERGENCE.read_bytes())["schemas"].keys() <= {*record.RANKED}


def test_every_timed_schema_runs_with_16_bits_and_has_rows() -> None:
    timed = record.TIMED.split(",")
    specs = record.specs_of(timed, GpuTarget(90))
    assert [one.schema.name for one in specs if one.inputs.name == "a16"] == timed
    [run] = json.loads(SPEEDS.read_text())["runs"]
    rows, pairs = (
        {(one["schema"], one["input_schema"]) for one in run["rows"]},
        {(one.schema, one.inputs) for one in specs},
    )
    assert {pair for pair in rows if not resolve_schema(pair[0]).rotation} == {
        (schema.name, inputs.name) for schema, inputs in pairs if not schema.rotation
    }
    assert {schema for schema, _ in rows} <= {*record.RANKED}


def test_a_wrong_kernel_has_no_time() -> None:
    spec = record.specs_of(["mxfp4"], GpuTarget(90))[0]
    assert record.row_of(spec, 64, 12.34, 0.004)["microseconds"] == 12.3
    for error in (0.5, math.nan):
        row = record.row_of(spec, 64, 12.34, error)
        assert row["microseconds"] is None
        assert row["failed"].startswith("kernel error")


def test_the_picture_is_drawn_from_the_tables() -> None:
    page = picture.PAGE.read_text(encoding="utf-8")
    drawn = picture.picture(page)
    assert drawn == picture.PAGE.with_suffix(".svg").read_text(encoding="utf-8")
    assert drawn != picture.picture(page.replace("| 0.0180 |", "| 0.0280 |"))
    assert drawn.count("<circle") == 17 + 10  # the marks of both models and of their legends
