"""Replacing an artifact, killed at any call: either the old or the new one is there, whole, and it can be finished."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hqconv.conversion.output_folder import parked_folder, side_folder
from hqconv.errors import OutputError
from hqconv.schemas.grid import Grid
from tests.make.conversions import run
from tests.make.killing import Driver, counts
from tests.make.models import save_model
from tests.make.tensors import snapshot

JOURNAL = ".hqconv-progress.jsonl"
Files = dict[str, str]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    made = Driver(
        save_model(tmp_path_factory.mktemp("overwrite") / "src", "qwen3_moe", num_hidden_layers=1, num_experts=3)
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def old(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yesterday's artifact: another schema, other ranks, and what its owner published beside it."""
    out = tmp_path_factory.mktemp("old") / "out"
    run(driver.src, out, "int4-g32", Grid(1, 2))
    (out / ".gitattributes").write_text("* -text")
    return out


@pytest.fixture(scope="module")
def new(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Files:
    out = tmp_path_factory.mktemp("new") / "out"
    assert driver.convert(out) == 0
    (out / ".gitattributes").write_text("* -text")
    return snapshot(out)


@pytest.fixture(scope="module")
def num_calls(driver: Driver, old: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, int]:
    """How many calls touch the disk when an artifact is replaced, at once and by renames."""
    found = {}
    for by_renames in (False, True):
        out = tmp_path_factory.mktemp("counted") / "out"
        shutil.copytree(old, out)
        assert driver.convert(out, overwrite=True, by_renames=by_renames) == 0
        found[by_renames] = counts(out)[0]
    return found


def without_journal(out: Path) -> Files:
    return {path: digest for path, digest in snapshot(out).items() if path != JOURNAL}


def assert_old_or_new(out: Path, old: Path, new: Files, by_renames: bool) -> bool:
    """Whether it is the new one. By renames there is a moment in which neither has its name."""
    if not out.exists():
        assert by_renames
        assert snapshot(parked_folder(out)) == snapshot(old)
        return True
    found = without_journal(out)
    whole = {path: digest for path, digest in new.items() if path != ".gitattributes"}
    if {path: digest for path, digest in found.items() if path != ".gitattributes"} == whole:
        places = (out, side_folder(out), parked_folder(out))
        assert sum((place / ".gitattributes").exists() for place in places) == 1
        return True
    assert found == snapshot(old)
    return False


def check_killed(driver: Driver, old: Path, new: Files, out: Path, fatal: int, when: str, by_renames: bool) -> None:
    shutil.copytree(old, out)
    assert driver.convert(out, fatal, when, overwrite=True, by_renames=by_renames) == -9
    is_new = assert_old_or_new(out, old, new, by_renames)
    is_begun = is_new or (side_folder(out) / JOURNAL).exists()
    status = driver.convert(out, resume=is_begun, overwrite=not is_begun, by_renames=by_renames)
    assert status == 0
    assert snapshot(out) == new
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "out.count"]


@pytest.mark.full
@pytest.mark.parametrize("by_renames", [False, True], ids=["exchange", "renames"])
def test_killed_in_each_of_the_last_steps(
    by_renames: bool, driver: Driver, old: Path, new: Files, num_calls: dict[bool, int], tmp_path: Path
) -> None:
    """Call by call: the manifest, the exchange, the old files' removal, the journal's."""
    for back in range(36):
        folder = tmp_path / str(back)
        folder.mkdir()
        check_killed(driver, old, new, folder / "out", num_calls[by_renames] - back, "before", by_renames)


def test_a_replacement_that_never_began_cannot_be_resumed(driver: Driver, old: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(old, out)
    with pytest.raises(OutputError, match="a finished artifact that differs from this request") as caught:
        run(driver.src, out, "mxfp4", Grid(2, 2), resume=True)
    assert "--overwrite" in caught.value.remedy
    assert snapshot(out) == snapshot(old)


def test_an_unfinished_replacement_belongs_to_its_artifact(
    driver: Driver, old: Path, new: Files, tmp_path: Path
) -> None:
    """Without --resume or --overwrite it is in the way; another request does not resume it."""
    out = tmp_path / "out"
    shutil.copytree(old, out)
    assert driver.convert(out, 40, "before", overwrite=True) == -9
    assert (side_folder(out) / JOURNAL).exists()
    with pytest.raises(OutputError, match="cannot be used") as caught:
        run(driver.src, out, "mxfp4", Grid(2, 2))
    assert caught.value.found == "an unfinished conversion"
    with pytest.raises(OutputError, match="differs from this one in: --schema"):
        run(driver.src, out, "mxfp8", Grid(2, 2), resume=True)
    run(driver.src, out, "mxfp8", Grid(2, 2), overwrite=True)
    assert not side_folder(out).exists()
    assert run(driver.src, out, "mxfp8", Grid(2, 2), resume=True).was_finished
