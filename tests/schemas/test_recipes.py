"""Every recipe in configs/recipes loads, and can be planned for a checkpoint of the model that it is for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hqconv.cli.app import app
from hqconv.schemas.recipe import load_recipe
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


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path: Path, tmp_path: Path) -> None:
    assert path.read_text().startswith("# ")
    load_recipe(path)
    make, conversion, target, inputs, num_ranks = EXPECTED[path.stem]
    model = make(tmp_path / "model")
    done = CliRunner().invoke(app, ["convert", str(model), "--config", str(path), "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    words = json.loads(done.stdout)
    assert set(words["conversion"]) == {conversion}
    assert (words["target"], words["input_schema"], len(words["rank_bytes"])) == (target, inputs, num_ranks)


def test_flags_win(tmp_path: Path) -> None:
    model, recipe = write_qwen3_moe(tmp_path / "model"), CONFIGS / "recipes" / "mixtral-fp8-l40s.toml"
    command = ["convert", str(model), "--config", str(recipe), "--dry-run", "--json"]
    done = CliRunner().invoke(app, [*command, "--tp", "1", "--schema", "int4", "--input-schema", "int8"])
    words = json.loads(done.stdout)
    assert (words["target"], words["input_schema"], len(words["rank_bytes"])) == ("sm89", "int8", 1)
    assert words["schema"]["name"] == "int4"
