"""A power cut at any moment: all comes after what it relies on is synced, and whatever is left can be finished."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hqconv.conversion.journal import FolderJournal
from hqconv.errors import OutputError
from hqconv.io.durable_files import exchange, make_folder, settle
from hqconv.schemas.artifact_names import JOURNAL
from tests.make.disks import ANY, FATES, KEPT, LOST, ZEROS, Disk, Node, played
from tests.make.power import SCENARIOS, model, out_of_order, recorded, renames_only
from tests.make.power_cuts import cuts
from tests.make.recording import Op, Recorder
from tests.make.tensors import snapshot

NUM_CUTS = 40


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("power") / "src")


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_comes_before_what_it_relies_on_is_synced(name: str, src: Path, tmp_path: Path) -> None:
    """Data before names, files before journal lines, all before the manifest, and that before an exchange."""
    recording = recorded(tmp_path, name, src)
    assert {"open", "write", "size", "sync", "rename", "mkdir"} <= {op.kind for op in recording.ops}
    assert out_of_order(recording) == []
    (tmp_path / "end").mkdir()
    played(recording.disk(), recording.ops).after_a_cut(tmp_path / "end", KEPT, random.Random(0))
    assert snapshot(tmp_path / "end/out") == recording.new  # nothing that changed the disk was missed


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_a_power_cut_leaves_is_finished_to_the_same_bytes(name: str, src: Path, tmp_path: Path) -> None:
    recording = recorded(tmp_path, name, src, seed=1)
    found = list(cuts(recording, tmp_path / "cuts", NUM_CUTS, random.Random(1)))
    assert len(found) == NUM_CUTS
    assert [(where, wrong) for where, wrong in found if wrong] == []


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


# --- the recorder and the model themselves


def disk_of(*ops: Op) -> Disk:
    return played(Disk(), ops)


def left(disk: Disk, tmp_path: Path, fate: str) -> set[tuple[tuple[str, bytes], ...]]:
    """All trees that cuts of the power leave."""
    trees = set()
    for number in range(200 if fate == ANY else 1):
        folder = tmp_path / f"{fate}-{number}"
        folder.mkdir()
        disk.after_a_cut(folder, fate, random.Random(number))
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        trees.add(tuple((path.relative_to(folder).as_posix(), path.read_bytes()) for path in files))
    return trees


CREATE = [Op("open", "x", handle=1, size=1), Op("write", handle=1, data=b"data")]
SYNC_ROOT = [Op("open", ".", handle=9), Op("sync", handle=9)]


def test_only_what_is_synced_lasts(tmp_path: Path) -> None:
    empty, zeros, whole = (), (("x", b"\0\0\0\0"),), (("x", b"data"),)
    unsynced = disk_of(*CREATE)
    assert left(unsynced, tmp_path, LOST) == {empty}
    assert left(unsynced, tmp_path, KEPT) == {whole}
    assert left(unsynced, tmp_path, ZEROS) == {zeros}
    assert left(unsynced, tmp_path, ANY) == {empty, zeros, whole, (("x", b""),)}
    (tmp_path / "2").mkdir()
    assert left(disk_of(*CREATE, Op("sync", handle=1)), tmp_path / "2", ANY) == {empty, whole}
    (tmp_path / "3").mkdir()
    both = disk_of(*CREATE, Op("sync", handle=1), *SYNC_ROOT)
    assert both.is_safe("x")
    assert left(both, tmp_path / "3", ANY) == {whole}


def test_sectors_are_lost_one_by_one() -> None:
    from tests.make.disks import remains

    node = Node(is_folder=False, data=bytearray(b"n" * 1500), safe=b"o" * 600, is_synced=False)
    found = {remains(node, ANY, random.Random(seed)) for seed in range(100)}
    sectors = {(one[:512][:1], one[512:600][:1], one[1024:][:1]) for one in found}
    assert sectors == {(a, b, c) for a in (b"n", b"o") for b in (b"n", b"o") for c in (b"n", b"\0")}
    assert {len(one) for one in found} == {1500}
    assert set(FATES) == {LOST, KEPT, ZEROS, ANY}
