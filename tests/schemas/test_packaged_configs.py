"""The files of configs/ come with hqconv: they are in the wheel, and can be named from anywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hqconv.cli.app import app
from hqconv.errors import RequestError
from hqconv.schemas.config_files import RECIPES, SCHEMAS, or_shipped, shipped
from hqconv.schemas.recipe import load_recipe
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.places import CONFIGS, REPO
from tests.make.qwen import write_qwen3_moe

FILES = {path.relative_to(CONFIGS).as_posix(): path.read_bytes() for path in CONFIGS.rglob("*.toml")}


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_wheel_has_them(tmp_path: Path) -> None:
    """Built without a network, of a copy, so that no build folder is left here."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("hqconv", "configs"):
        shutil.copytree(REPO / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", tmp_path, source], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    place = SCHEMAS.relative_to(REPO).as_posix()
    with zipfile.ZipFile(wheel) as unpacked:
        found = {name: unpacked.read(name) for name in unpacked.namelist() if name.endswith(".toml")}
        templates = {Path(name).name for name in unpacked.namelist() if name.startswith("hqconv/reports/templates/")}
    assert templates == {path.name for path in (REPO / "hqconv/reports/templates").iterdir()}
    assert found == {f"{place}/{name}": data for name, data in FILES.items()}


def test_they_are_listed_with_what_they_are_for() -> None:
    words = json.loads(call("schemas", "--recipes", "--json").stdout)
    assert {Path(one["path"]).name: one["description"] for one in words["recipes"]} == shipped(RECIPES)
    listed = [*words["recipes"], *words["schemas"]]
    assert len(listed) == len(FILES)
    text = call("schemas", "--recipes").stdout
    for one in listed:
        first = Path(one["path"]).read_bytes().splitlines()[0].decode()
        assert first == f"# {one['description']}"
        assert one["option"] in text
        assert one["description"] in text


@pytest.mark.parametrize("name", ["ends-in-8-bits", "ends-in-8-bits.toml"])
def test_a_recipe_goes_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_qwen3_moe(tmp_path / "model")
    command = ["convert", model, "--config", name, "--dry-run", "--json"]
    words = json.loads(call(*command).stdout)
    assert (words["schema"]["name"], list(words["otherwise"])) == ("mxfp4", ["fp8, a16 activations"])
    (tmp_path / name).write_text('schema = "int8"\ntarget = "sm90"\n')  # a file of one's own wins
    words = json.loads(call(*command).stdout)
    assert (words["schema"]["name"], words["otherwise"]) == ("int8", {})


def test_a_schema_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line, in programs, and in a recipe that lies elsewhere."""
    monkeypatch.chdir(tmp_path)
    assert resolve_schema("w3-g64.toml").b_dtype == "uint3"
    (tmp_path / "w3-g64.toml").write_text('b_dtype = "uint5"\n')
    assert resolve_schema("w3-g64.toml").b_dtype == "uint5"
    recipe = tmp_path / "away" / "recipe.toml"
    recipe.parent.mkdir()
    recipe.write_text('schema = "w3-g64.toml"\ntarget = "sm90"\n')
    assert load_recipe(recipe).options["schema"] == str(SCHEMAS / "w3-g64.toml")
    (recipe.parent / "w3-g64.toml").write_text('b_dtype = "uint6"\n')
    assert load_recipe(recipe).options["schema"] == str(recipe.parent / "w3-g64.toml")


@pytest.mark.parametrize("text", ["", ".", "~", "nosuch", "nosuch.toml", "away/w3-g64.toml"])
def test_other_names_stay_as_they_are(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert or_shipped(Path(text), RECIPES) == Path(text)
    with pytest.raises(RequestError, match="cannot be read"):
        load_recipe(Path(text) if text else Path("nothing"))


def test_a_link_to_nothing_is_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w3-g64.toml").symlink_to(tmp_path / "gone")
    with pytest.raises(RequestError, match=r"w3-g64\.toml"):
        resolve_schema("w3-g64.toml")
