"""Every recipe in configs/recipes loads, and can be planned for a checkpoint of the model that it is for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hqconv.schemas.recipe import load_recipe
from tests.make.command import call
from tests.make.families import save_family
from tests.make.formats import write
from tests.make.places import CONFIGS
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
EXPECTED: dict[str, tuple[Make, str, str, str, int]] = {
    "deepseek-v4-w4a8-h200": (of_format("mxfp4-deepseek-v4"), "direct", "sm90", "fp8-g128", 8),
    "deepseek-v3-mxfp4-ep8": (of_format("fp8-block"), "requantized", "sm90", "a16", 8),
    "qwen3-235b-int4-tp8": (qwen(intermediate_size=1536), "quantized", "sm90", "a16", 8),
    "gpt-oss-direct": (of_format("mxfp4-gpt-oss"), "direct", "sm90", "a16", 1),
    "kimi-k2-int4-direct": (of_format("ct-int4-g32"), "direct", "sm90", "a16", 8),
    "mixtral-fp8-l40s": (mixtral, "quantized", "sm89", "fp8", 2),
    "ends-in-8-bits": (qwen(num_layers=4), "quantized", "sm90", "a16", 1),
}


def test_every_recipe_is_listed() -> None:
    assert [path.name for path in RECIPES] == sorted(f"{name}.toml" for name in EXPECTED)


def planned(model: Path, recipe: Path, *more: str) -> Any:
    done = call("convert", model, "--config", recipe, "--dry-run", "--json", *more)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path: Path, tmp_path: Path) -> None:
    assert path.read_text().startswith("# ")
    load_recipe(path)
    make, conversion, target, inputs, num_ranks = EXPECTED[path.stem]
    model = make(tmp_path / "model")
    words = planned(model, path)
    assert set(words["conversion"]) == {conversion}
    assert (words["target"], words["input_schema"], len(words["rank_bytes"])) == (target, inputs, num_ranks)
    if path.stem == "mixtral-fp8-l40s":  # flags win
        words = planned(model, path, "--tp", "1", "--schema", "int4-g64", "--input-schema", "int8")
        assert (words["target"], words["input_schema"], len(words["rank_bytes"])) == ("sm89", "int8", 1)
        assert words["schema"]["name"] == "int4-g64"
