"""docs/choosing.md shows what scripts/choosing_table.py works out, of every schema, and says nothing else of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hqconv.schemas.weight_schema import resolve_schema
from scripts.choosing_table import MODELS, PAGE, SCHEMAS, Model, row, stored_bytes
from scripts.quantizer_gains import weights
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = {name: cells.split(" | ") for name, cells in re.findall(r"^\| `([\w-]+)` \| (.*) \|$", TEXT, re.MULTILINE)}


def test_every_schema_has_a_row() -> None:
    assert list(ROWS) == list(SCHEMAS)


@pytest.mark.parametrize("schema", ["mxfp4", "int4-g64-zp"])
def test_a_row_is_what_is_measured(schema: str) -> None:
    assert row(schema, weights()) in TEXT


def test_sizes_in_16_bits_are_as_it_is_told() -> None:
    small, large = (2 * model.num_weights / 1e9 for model in MODELS)
    assert f"{small:.1f} and {large:.0f} GB in bfloat16" in TEXT


@pytest.mark.parametrize("schema", ["nvfp4", "int4-g64-zp", "fp8"])
def test_sizes_are_those_of_real_artifacts(schema: str, tmp_path: Path) -> None:
    """Of ranks' files without their headers, padding included."""
    src = write_qwen3_moe(tmp_path / "src", num_layers=2, hidden_size=256, intermediate_size=192)
    run(src, tmp_path / "out", schema)
    model = Model("small", num_layers=2, num_experts=4, hidden_size=256, intermediate_size=192)
    found = 0
    for path in (tmp_path / "out" / "experts").rglob("*.safetensors"):
        data = path.read_bytes()
        found += len(data) - 8 - int.from_bytes(data[:8], "little")
    assert stored_bytes(model, resolve_schema(schema)) == found


def test_what_the_list_says_is_in_the_table() -> None:
    bits = {name: float(cells[0]) for name, cells in ROWS.items()}
    assert (bits["mxfp4"], bits["nvfp4"], bits["int4-g32"], bits["int4-g16-e4m3"]) == (4.25, 4.5, 4.5, 4.5)
    errors = [{name: float(cells[column]) for name, cells in ROWS.items()} for column in (3, 4, 5)]
    for most, expected in (
        (3.25, ["int3-g32-e4m3"] * 3),
        (4.25, ["int4-g32-e4m3", "fp4-g32-e4m3", "fp4-g32-e4m3"]),
        (4.5, ["int4-g16-e4m3", "nvfp4", "nvfp4"]),
    ):
        fitting = [name for name in bits if bits[name] <= most]
        assert [min(fitting, key=of_kind.__getitem__) for of_kind in errors] == expected
    assert 0.74 < errors[0]["int4-g32-e4m3"] / errors[0]["mxfp4"] < 0.76
    even, _, large = ({name: of_kind[name] for name in ("fp8", "int8")} for of_kind in errors)
    assert even["int8"] < even["fp8"] / 3
    assert large["int8"] > large["fp8"]
    assert ROWS["nvfp4"][6:] == ["–", "no"]
    assert ROWS["int4-g16-e4m3"][6:] == ["–", "no"]
    assert ROWS["int4-g32-e4m3-row"][6:] == ["fp8, fp8-e5m2, int8", "yes"]
    assert [name for name in ("mxfp4", "int4-g32", "fp8") if ROWS[name][7] == "yes"] == ["mxfp4", "int4-g32", "fp8"]
