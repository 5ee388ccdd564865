"""A power cut at any moment: all comes after what it relies on is synced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hqconv.conversion.journal import FolderJournal
from hqconv.errors import OutputError
from hqconv.io.durable_files import exchange, make_folder, settle
from hqconv.schemas.artifact_names import JOURNAL
from tests.make.disks import Disk, played
from tests.make.power import SCENARIOS, model, out_of_order, recorded, renames_only
from tests.make.recording import Recorder
from tests.make.tensors import snapshot


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("power") / "src")


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_comes_before_what_it_relies_on_is_synced(
    name: str, src: Path, tmp_path: Path
) -> None:
    """Data before names, files before journal lines, all before the manifest, and that before an exchange."""
    recording = recorded(tmp_path, name, src)
    assert {"open", "write", "size", "sync", "rename", "mkdir"} <= {op.kind for op in recording.ops}
    assert out_of_order(recording) == []
    (tmp_path / "end").mkdir()
    played(recording.disk(), recording.ops).write_to(tmp_path / "end")
    assert (
        snapshot(tmp_path / "end/out") == recording.new
    )  # nothing that changed the disk was missed


def test_new_folders_last_with_those_above_them(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with recorder.at_work():
        make_folder(tmp_path / "above/between/out")
        make_folder(tmp_path / "above/between/out")  # which is there
    disk = played(Disk(), recorder.ops)
    assert disk.find("above/between/out")
    assert disk.is_safe("above/between/out")


@pytest.mark.parametrize("parked", [False, True])
def test_folders_that_changed_places_stay_there(parked: bool, tmp_path: Path) -> None:
    new, old, place = tmp_path / "new", tmp_path / "old", tmp_path / "parked"
    for folder in (new, place if parked else old):
        folder.mkdir()
        (folder / folder.name).touch()
    recorder, before = Recorder(tmp_path), Disk.of(tmp_path)
    with recorder.at_work(), renames_only():
        settle(new, old, place) if parked else exchange(new, old, place)
    disk = played(before, recorder.ops)
    assert disk.is_safe("old/new")
    assert disk.is_safe("new/parked" if parked else "new/old")


@pytest.mark.parametrize("size", [512, 1024])
def test_half_an_identity_is_no_journal(size: int, tmp_path: Path) -> None:
    """The first line was not synced, so that nothing was written yet: its end may be there without its beginning."""
    whole = json.dumps({"source files": ["x" * 2000]}).encode() + b"\n"
    path = tmp_path / JOURNAL
    path.write_bytes(bytes(size) + whole[size:])
    with FolderJournal(tmp_path) as journal:
        assert (journal.identity, journal.entries) == (None, [])
    assert path.read_bytes() == b""
    path.write_bytes(b"{not json\n")  # which no power cut makes
    with pytest.raises(OutputError, match="cannot be read"):
        FolderJournal(tmp_path)


def test_a_journal_that_starts_anew_is_empty_before_it_is_written(tmp_path: Path) -> None:
    """Else a power cut may leave lines of both conversions."""
    with FolderJournal(tmp_path) as journal:
        journal.begin({"a": 1})
        recorder, before = Recorder(tmp_path), Disk.of(tmp_path)
        with recorder.at_work():
            recorder.adopt(journal._descriptor, JOURNAL)
            journal.restart()
    node = played(before, recorder.ops).find(JOURNAL)
    assert node is not None
    assert (node.safe, node.is_synced) == (b"", True)
