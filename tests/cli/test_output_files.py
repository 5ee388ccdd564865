"""Files that commands write outside of artifacts: nothing of anybody is lost, and nothing waits for a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.make.command import call
from tests.make.conversions import run
from tests.make.places import REPO
from tests.make.qwen import read_tree, write_qwen3_moe


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` and its artifact `out`; do not change them."""
    root = tmp_path_factory.mktemp("files")
    run(write_qwen3_moe(root / "model", num_layers=1), root / "out", "mxfp4")
    (root / "out.json").write_text(json.dumps({"kind": "artifact"}))
    return root


COMMANDS = {
    "inspect --log-file": "inspect {root}/model --log-file {file}",
    "verify --log-file": "verify {root}/out --source {root}/model --checks files --device cpu --log-file {file}",
    "verify --report": "verify {root}/out --source {root}/model --checks files --device cpu --report {file}",
    "report -o": "report {root}/out -o {file}",
    "convert --profile": "convert {root}/model --schema mxfp4 --target sm90 --device cpu -o {tmp}/new --profile {file}",
    "convert --log-file": "convert {root}/model --schema mxfp4 --target sm90 -o {tmp}/new --log-file {file} --dry-run",
    "allocate -o": "allocate {root}/model --bits 9 --candidates mxfp4,fp8 --target sm90 --device cpu -o {file}",
}


def fifo(root: Path, tmp: Path) -> Path:
    os.mkfifo(tmp / "pipe")
    return tmp / "pipe"


def link(to: str, tmp: Path) -> Path:
    (tmp / "link").symlink_to(to)
    return tmp / "link"


def hard_link(root: Path, tmp: Path) -> Path:
    (tmp / "hard").hardlink_to(root / "model/model.safetensors")
    return tmp / "hard"


def folder(root: Path, tmp: Path) -> Path:
    (tmp / "folder").mkdir()
    return tmp / "folder"


PLACES: dict[str, Callable[[Path, Path], Path]] = {
    "in the source": lambda root, _: root / "model/new.txt",
    "in the artifact": lambda root, _: root / "out/new.txt",
    "weights of the source": lambda root, _: root / "model/model.safetensors",
    "the manifest": lambda root, _: root / "out/hqconv.json",
    "a link to weights": lambda root, tmp: link(f"{root}/model/model.safetensors", tmp),
    "a link into the artifact": lambda root, tmp: link(f"{root}/out/new.txt", tmp),
    "a hard link to weights": hard_link,
    "another kind of file": lambda root, _: root / "out.json",
    "a pipe": fifo,
    "a folder": folder,
    "a device": lambda *_: Path("/dev/null"),
    "a circle of links": lambda _, tmp: link(f"{tmp}/link", tmp),
}
ALLOWED = {  # the artifact is no option of the command
    (command, place)
    for command in ("allocate -o", "inspect --log-file")
    for place in ("in the artifact", "a link into the artifact")
}
ALLOWED |= {("report -o", "in the source")}
ALLOWED |= {
    (command, place)
    for command in ("convert --profile", "convert --log-file")
    for _, place in tuple(ALLOWED)
} | {("report -o", "in the source")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_others_stay(command: str, place: str, root: Path, tmp_path: Path) -> None:
    if (command, place) in ALLOWED:
        pytest.skip("no file of this command's source or artifact")
    file = PLACES[place](root, tmp_path)
    before = read_tree(root)
    done = call(*COMMANDS[command].format(root=root, tmp=tmp_path, file=file).split())
    assert done.exit_code == 4, done.output
    assert "error: " in done.stderr
    assert "what to do" in done.stderr
    assert "PASS" not in done.stdout  # before the work
    assert not (tmp_path / "new").exists()
    assert read_tree(root) == before
    assert os.path.lexists("/dev/null")


@pytest.mark.parametrize(
    "command",
    [
        "convert {root}/model --schema mxfp4 -o {tmp}/new --profile {tmp}/x --log-file {tmp}/x",
        "report {root}/out -o {tmp}/x --log-file {tmp}/x",
        "allocate {root}/model --bits 9 -o {tmp}/x --log-file {tmp}/x",
    ],
)
def test_two_options_never_name_one_file(command: str, root: Path, tmp_path: Path) -> None:
    done = call(*command.format(root=root, tmp=tmp_path).split())
    assert (done.exit_code, "cannot be written there" in done.stderr) == (4, True), done.output
    assert {path.name for path in tmp_path.iterdir()} <= {"x"}


def test_the_default_folder_of_an_artifact_takes_no_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (place := tmp_path / "model-mxfp4").mkdir()
    for option in ("--profile", "--log-file"):
        command = (
            f"convert {root}/model --schema mxfp4 --target sm90 --device cpu {option} {place}/file"
        )
        assert call(*command.split()).exit_code == 4
    assert not (place / "hqconv.json").exists()


def test_output_of_the_shell_is_no_file(root: Path, tmp_path: Path) -> None:
    """`> FILE` has emptied it: it looks like a new one. A pipe is no file either."""
    places = ("/dev/stdout", tmp_path / "1.json", "/proc/self/fd/1")
    for number, place in enumerate(places):
        command = ["inspect", str(root / "out"), "--json", "--log-file", str(place)]
        with (tmp_path / f"{number}.json").open("w") as file:
            done = in_python(*command, stdout=file)
        assert (done.returncode, "stream of this process" in done.stderr) == (4, True), done.stderr
        assert json.loads((tmp_path / f"{number}.json").read_text())["kind"] == "error"
    done = in_python(
        "inspect", str(root / "out"), "--log-file", "/dev/stdout", stdout=subprocess.PIPE
    )
    assert (done.returncode, "a pipe" in done.stderr) == (4, True), done.stderr


def in_python(*arguments: str, stdout: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hqconv", *arguments]
    streams = {"stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.run(command, cwd=REPO, text=True, check=False, **streams)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_temporary_names_are_no_way_into_other_files(kind: str, root: Path, tmp_path: Path) -> None:
    before, place = read_tree(root), tmp_path / "page.html.partial"
    place.symlink_to(root / "model/model.safetensors") if kind == "link" else os.mkfifo(place)
    assert call("report", root / "out", "-o", tmp_path / "page.html").exit_code == 0
    assert read_tree(root) == before
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_own_files_are_replaced_and_links_kept(root: Path, tmp_path: Path) -> None:
    profile, log = tmp_path / "profile", tmp_path / "log"
    (tmp_path / "real").touch()
    log.symlink_to("real")
    for out in ("a", "b"):
        command = (
            f"convert {root}/model --schema mxfp4 --target sm90 --device cpu -q -o {tmp_path}/{out}"
        )
        assert call(*command.split(), "--profile", profile, "--log-file", log).exit_code == 0
    assert json.loads(profile.read_text())["profile_of"] == "hqconv convert"
    assert log.is_symlink()
    assert (tmp_path / "real").read_text().count("Python ") == 2


def test_kernels_lie_outside_of_the_artifact(root: Path) -> None:
    done = call("warm", root / "out", "--gpu", "h100", "--kernels", root / "out/kernels")
    assert (done.exit_code, "inside the artifact" in done.stderr) == (4, True), done.output
    assert not (root / "out/kernels").exists()
