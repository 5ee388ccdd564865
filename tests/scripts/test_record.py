"""What scripts/record.py records is what docs/measured holds; times alone need a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.weight_schema import resolve_schema
from scripts import record
from scripts.record import DIVERGENCE, ERRORS, SPEEDS
from tests.make.calibrated import write_text
from tests.make.families import save_family
from tests.make.tokenizer import write_tokenizer


@pytest.mark.parametrize("schema", ["mxfp4", "int4-g64-zp", "fp8-e5m2"])
def test_the_errors_of_the_package_are_what_is_measured(schema: str) -> None:
    measured = json.loads(ERRORS.read_bytes())["schemas"]
    assert [*measured] == [*record.RANKED]
    assert measured[schema] == record.errors_of(schema)
    assert "record.py" in ERRORS.read_text()


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
    specs = record.specs_of(record.TIMED, ["a16", "fp8", "int8"], GpuTarget(90))
    assert [one.schema.name for one in specs if one.inputs.name == "a16"] == [*record.TIMED]
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
    [spec] = record.specs_of(["mxfp4"], ["a16"], GpuTarget(90))
    assert record.row_of(spec, 64, 12.34, 0.004)["microseconds"] == 12.3
    for error in (0.5, math.nan):
        row = record.row_of(spec, 64, 12.34, error)
        assert row["microseconds"] is None
        assert row["failed"].startswith("kernel error")
