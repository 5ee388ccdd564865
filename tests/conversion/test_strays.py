"""What others put into an output folder, and what a source brings that an artifact cannot hold."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.api import describe_plan
from hqconv.conversion.stages import Progress
from hqconv.errors import HqconvError, OutputError
from tests.make.command import call
from tests.make.conversions import assert_verified, manifest
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

OPTIONS: dict[str, Any] = {"schema": "int4", "target": "sm90", "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("strays") / "model")


@pytest.fixture(scope="module")
def example(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    hqconv.convert(model, out, **OPTIONS)
    return out


def after_first_group(act: Callable[[], object]) -> Callable[[Progress], None]:
    """A listener that acts once, when files are finished."""
    calls: list[int] = []

    def listen(progress: Progress) -> None:
        if progress.num_units_done and not calls:
            calls.append(1)
            act()

    return listen


@pytest.mark.parametrize("action", ["removed", "cut"])
def test_what_goes_meanwhile_is_noticed(
    action: str, model: Path, example: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def act() -> None:
        path = next(out.rglob("*.safetensors"))  # of whichever group was the first
        path.unlink() if action == "removed" else path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(OutputError, match="removed or cut"):
        hqconv.convert(model, out, **OPTIONS, progress=after_first_group(act))
    hqconv.convert(model, out, **OPTIONS, resume=True)
    assert snapshot(out) == snapshot(example)


def test_the_side_folder_is_not_adopted(model: Path, example: Path, tmp_path: Path) -> None:
    shutil.copytree(example, tmp_path / "out")
    (tmp_path / ".out.hqconv").mkdir()
    (tmp_path / ".out.hqconv/mine.txt").write_text("the user's")
    with pytest.raises(OutputError, match="not empty"):
        hqconv.convert(model, tmp_path / "out", **OPTIONS, overwrite=True)
    assert snapshot(tmp_path / "out") == snapshot(example)
    assert (tmp_path / ".out.hqconv/mine.txt").read_text() == "the user's"


def test_an_old_artifact_that_cannot_be_removed_is_a_warning(
    model: Path, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(example, out)
    real = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if (
            ".out.hqconv" in str(self)
            and not self.name.startswith(".")
            and self.suffix == ".safetensors"
        ):
            raise PermissionError(13, "Permission denied", str(self))
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    report = hqconv.convert(model, out, **OPTIONS, overwrite=True)
    assert any("could not be removed" in warning for warning in report.warnings)
    assert snapshot(out) == snapshot(example)
    assert not list(out.glob(".hqconv*"))


def test_a_mount_point_is_refused_before_the_work(
    model: Path, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(example, tmp_path / "out")
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "out")
    with pytest.raises(OutputError, match="mount point"):
        hqconv.convert(model, tmp_path / "out", **OPTIONS, overwrite=True)
    notes = describe_plan(
        hqconv.plan(model, schema="int4", target="sm90"), tmp_path / "out", overwrite=True
    )["notes"]
    assert any("mount point" in note for note in notes)
    assert snapshot(tmp_path / "out") == snapshot(example)


def test_places_that_no_file_can_have(model: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out in (tmp_path / "loop", tmp_path / ("x" * 250), tmp_path / "a\0b"):
        with pytest.raises(HqconvError) as caught:
            hqconv.convert(model, out, **OPTIONS)
        assert caught.value.exit_code == 4


LATIN_1 = os.fsdecode(b"caf\xe9")


def test_folders_and_schema_files_with_names_in_another_encoding(
    model: Path, tmp_path: Path
) -> None:
    """Source, output and schema file: the manifest has the name's bytes written out."""
    src, out = tmp_path / LATIN_1 / f"model {LATIN_1}", tmp_path / f"out {LATIN_1}"
    shutil.copytree(model, src)
    file = tmp_path / f"{LATIN_1}.toml"
    file.write_text('b_dtype = "uint4"\nweight_scale_group_size = 64\n')
    options = {**OPTIONS, "schema": str(file)}
    hqconv.convert(src, out, **options)
    document = manifest(out)
    assert (document["source"]["name"], document["schema_name"]) == (r"model caf\xe9", r"caf\xe9")
    assert hqconv.convert(src, out, **options, resume=True).was_finished
    assert_verified(out, src)
    assert hqconv.inspect(out)["source"]["name"] == r"model caf\xe9"
    hqconv.convert(out, tmp_path / "again", **{**OPTIONS, "schema": "source"})
    plan = ("convert", src, "--schema", file, "--target", "sm90", "--dry-run")
    for command in (("report", out, "-o", tmp_path / f"{LATIN_1}.html"), plan, (*plan, "--json")):
        done = call(*command)
        assert done.exit_code == 0, done.output
