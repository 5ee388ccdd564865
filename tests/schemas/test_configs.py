"""Every file of configs/ loads: schemas are quantized and laid out for a kernel, recipes planned for their model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hqconv.kernel_layout.transform import kernel_form
from hqconv.schemas.options import load_recipe
from hqconv.schemas.weight_schema import WeightSchema, load_schema, resolve_schema
from tests.make.command import call
from tests.make.conversions import kernel_spec_of
from tests.make.families import save_family
from tests.make.formats import write
from tests.make.places import CONFIGS
from tests.make.quantized import quantize
from tests.make.qwen import write_qwen3_moe

RECIPES = sorted((CONFIGS / "recipes").iterdir())
Make = Callable[[Path], Path]


def of_format(name: str) -> Make:
    return lambda folder: write(folder, name, experts=8).folder


def qwen(**sizes: int) -> Make:
    return lambda folder: write_qwen3_moe(folder, **sizes)


def mixtral(folder: Path) -> Path:
    save_family(folder, "mixtral", inner=64)
    return folder


# What it is for, and what the plan must say: blocks' conversion, target, activations, ranks.
PLANNED: dict[str, tuple[Make, str, str, str, int]] = {
    "deepseek-v4-w4a8-h200": (of_format("mxfp4-deepseek-v4"), "direct", "sm90", "fp8-g128", 8),
    "deepseek-v3-int4-ep8": (of_format("fp8-block"), "requantized", "sm90", "a16", 8),
    "qwen3-235b-int4-tp8": (qwen(intermediate_size=1536), "quantized", "sm90", "a16", 8),
    "gpt-oss-direct": (of_format("mxfp4-gpt-oss"), "direct", "sm90", "a16", 1),
    "kimi-k2-int4-direct": (of_format("ct-int4-g32"), "direct", "sm90", "a16", 8),
    "mixtral-fp8-l40s": (mixtral, "quantized", "sm89", "fp8", 2),
    "ends-in-8-bits": (qwen(num_layers=4), "quantized", "sm90", "a16", 1),
}


def test_every_file_is_listed() -> None:
    assert {path.name for path in CONFIGS.iterdir() if path.is_file()} == {
        f"{name}.toml" for name in EXPECTED
    }
    assert [path.name for path in RECIPES] == sorted(f"{name}.toml" for name in PLANNED)


def planned(model: Path, recipe: Path, *more: str) -> Any:
    done = call("convert", model, "--config", recipe, "--dry-run", "--json", *more)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path: Path, tmp_path: Path) -> None:
    assert path.read_text().startswith("# ")
    load_recipe(path)
    make, conversion, target, inputs, num_ranks = PLANNED[path.stem]
    model = make(tmp_path / "model")
    plan = planned(model, path)
    assert set(plan["conversion"]) == {conversion}
    assert (plan["target"], plan["input_schema"], len(plan["rank_bytes"])) == (
        target,
        inputs,
        num_ranks,
    )
    if path.stem == "mixtral-fp8-l40s":  # flags win
        plan = planned(model, path, "--tp", "1", "--schema", "int4-g64", "--input-schema", "int8")
        assert (plan["target"], plan["input_schema"], len(plan["rank_bytes"])) == (
            "sm89",
            "int8",
            1,
        )
        assert plan["schema"]["name"] == "int4-g64"


# --- schemas -----------------------------------------------------------------------------------------------

EXPECTED = {
    "int4-g64-zp": WeightSchema(
        "int4-g64-zp", "uint4", weight_scale_group_size=64, has_zero_point=True
    ),
    "w3-g64": WeightSchema("w3-g64", "uint3", weight_scale_group_size=64),
    "fp8-block-64": WeightSchema("fp8-block-64", "float8e4m3", "float32", "block", 64, 64),
    "nvfp4-channel": WeightSchema(
        "nvfp4-channel", "float4e2m1", "float8e4m3", "group", 16, weight_scale_2_type="channel"
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_schema(name: str) -> None:
    path = CONFIGS / f"{name}.toml"
    assert load_schema(path) == EXPECTED[name] == resolve_schema(str(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines) if line.startswith("#")] == [0]
    assert name != "int4-g64-zp" or EXPECTED[name] == resolve_schema(name)  # the shorthand
    schema = load_schema(path)
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    (result,) = quantize([matrix], schema, "bfloat16")
    assert result.error_sums.is_finite
    limit = {3: 0.25, 4: 0.12, 8: 0.03}[schema.num_bits]
    assert 0 < (result.error_sums.error / result.error_sums.power) ** 0.5 < limit
    assert "weight" in kernel_form(256, 512, kernel_spec_of(schema, "bfloat16", 90)).tensors
