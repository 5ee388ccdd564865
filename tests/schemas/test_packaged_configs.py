"""The files of configs/ come with hqconv: they are in the wheel, and can be named from anywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import hqconv
from hqconv.errors import RequestError
from hqconv.schemas.options import load_recipe
from hqconv.schemas.untrusted_files import RECIPES, SCHEMAS, or_shipped, shipped
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.command import call
from tests.make.places import CONFIGS, REPO
from tests.make.qwen import write_qwen3_moe

FILES = {
    path.relative_to(CONFIGS).as_posix(): path.read_bytes() for path in CONFIGS.rglob("*.toml")
}


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built without a network, of a copy."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("hqconv", "configs"):
        shutil.copytree(REPO / name, source / name, symlinks=True, ignore=ignored)
    for name in ("README.md", "LICENSE", "setup.py", "pyproject.toml"):
        shutil.copy(REPO / name, source / name)
    command = f"{sys.executable} -m pip wheel --no-deps --no-build-isolation --no-index -w".split()
    done = subprocess.run(
        [*command, folder, source], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> dict[str, bytes]:
    """Its files."""
    with zipfile.ZipFile(wheel_file) as unpacked:
        return {name: unpacked.read(name) for name in unpacked.namelist()}


def test_a_wheel_has_all_that_the_package_has(wheel: dict[str, bytes]) -> None:
    there = {p.relative_to(REPO).as_posix() for p in (REPO / "hqconv").rglob("*") if p.is_file()}
    links = {
        f"hqconv/schemas/configs/{name}" for name in FILES
    }  # rglob does not follow the link to configs/
    packed = {name for name in wheel if name.startswith("hqconv/")}
    assert all(wheel[f"hqconv/schemas/configs/{name}"] == data for name, data in FILES.items())
    assert packed == {name for name in there if "__pycache__" not in name} | links
    assert {"hqconv/py.typed", "hqconv/calibration/builtin.txt"} <= packed
    (points,) = (
        data.decode()
        for name, data in wheel.items()
        if name.endswith(".dist-info/entry_points.txt")
    )
    assert "[console_scripts]" in points
    assert "[vllm.general_plugins]" in points


def test_an_installed_wheel_has_its_command_and_recipes(wheel_file: Path, tmp_path: Path) -> None:
    """In a fresh environment, which finds what hqconv needs where this one does: but no hqconv of this one."""
    venv.create(tmp_path / "venv")
    bins = tmp_path / "venv/bin"
    needed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}

    def run(*command: object) -> str:
        words = [str(word) for word in command]
        environment = {**os.environ, "PYTHONPATH": ""}
        return subprocess.check_output(words, text=True, cwd=tmp_path, env=environment)

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", bins / "python")
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel_file)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(bins / "python", "-c", where).strip())
    (site / "of_the_tests.pth").write_text("".join(f"{folder}\n" for folder in needed))
    imported = run(bins / "python", "-c", "import hqconv; print(hqconv.__file__)")
    assert Path(imported.strip()).is_relative_to(site)
    assert run(bins / "hqconv", "--version").startswith(f"hqconv {hqconv.__version__}\n")
    listed = json.loads(run(bins / "hqconv", "schemas", "--recipes", "--json"))
    assert len(listed["recipes"]) + len(listed["schemas"]) == len(FILES)


def metadata(wheel: dict[str, bytes]) -> Message:
    (data,) = (data for name, data in wheel.items() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(data)


def test_a_wheel_says_who_made_it_and_what_it_needs(wheel: dict[str, bytes]) -> None:
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("hqconv", hqconv.__version__)
    assert f"\n## {hqconv.__version__}\n" in (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    assert found["Description-Content-Type"] == "text/markdown"


def test_links_in_the_description_work_outside_of_the_repository(wheel: dict[str, bytes]) -> None:
    """The repository has no public address: the description has the files' names instead."""
    text = str(metadata(wheel).get_payload())
    assert text.startswith("# hqconv")
    links = re.findall(r"\[[^\]]*\]\(([^)]+)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)
    assert "(`docs/usage.md`)" in text


def test_they_are_listed_with_what_they_are_for() -> None:
    document = json.loads(call("schemas", "--recipes", "--json").stdout)
    text = call("schemas", "--recipes").stdout
    listed = {}
    for recipe in (*document["recipes"], *document["schemas"]):
        flag, name = recipe["option"].split()
        listed[name if flag == "--schema" else f"{name}.toml"] = recipe["description"]
        assert recipe["option"] in text
        assert recipe["description"] in text
    assert listed == {**shipped(RECIPES), **shipped(SCHEMAS)}
    assert len(listed) == len(FILES)


@pytest.mark.parametrize("name", ["ends-in-8-bits", "ends-in-8-bits.toml"])
def test_a_recipe_goes_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_qwen3_moe(tmp_path / "model")
    command = ["convert", model, "--config", name, "--dry-run", "--json"]
    words = json.loads(call(*command).stdout)
    assert (words["schema"]["name"], list(words["otherwise"])) == (
        "int4-g32-e4m3",
        ["fp8, a16 activations"],
    )
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


def test_other_names_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to nothing as well: it is a file of one's own."""
    monkeypatch.chdir(tmp_path)
    for text in ("", ".", "~", "nosuch", "nosuch.toml", "away/w3-g64.toml"):
        assert or_shipped(Path(text), RECIPES) == Path(text)
        with pytest.raises(RequestError, match="cannot be read"):
            load_recipe(Path(text) if text else Path("nothing"))
    (tmp_path / "w3-g64.toml").symlink_to(tmp_path / "gone")
    with pytest.raises(RequestError, match=r"w3-g64\.toml"):
        resolve_schema("w3-g64.toml")
