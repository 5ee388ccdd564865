"""The check at the start: all processes share the output folder, with its renames, contents and locks."""

from __future__ import annotations

import errno
import fcntl
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

from hqconv.conversion import distributed, shared_folder
from hqconv.conversion.distributed import ProcessGroup
from hqconv.conversion.journal import Journal
from hqconv.conversion.output_folder import OutputFolder
from hqconv.errors import HqconvError, OutputError, PeerError
from hqconv.io.durable_files import FileRecord
from hqconv.schemas.artifact_names import JOURNAL, folder_check, is_member_file


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "_VISIBLE_S", 0.5)
    monkeypatch.setattr(distributed, "_HEAR_TIMEOUT_S", 2.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / JOURNAL).touch()
    return folder


def check(roots: list[Path], work: Callable[[int], object] = lambda _: None) -> list[HqconvError | None]:
    """Run the check by threads in the place of processes; each one's error. work: of each thread before it."""
    store, errors = HashStore(), list[HqconvError | None]([None] * len(roots))

    def one(rank: int) -> None:
        group = ProcessGroup(store, rank, len(roots))
        try:
            with group:
                work(rank)
                shared_folder.check_shared_folder(group, roots[rank])
        except HqconvError as error:
            errors[rank] = error

    with_lock = Journal(roots[0])
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(roots))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with_lock.close()
    return errors


def test_a_shared_folder_passes_and_stays_clean(root: Path) -> None:
    assert check([root] * 4) == [None] * 4
    assert [path.name for path in root.iterdir()] == [JOURNAL]


@pytest.mark.parametrize("found", ["no such folder", "no such file", "another file"])
def test_another_folder_is_named(found: str, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    if found != "no such folder":
        other.mkdir()
    if found == "another file":  # which an earlier conversion left
        (other / folder_check(0)).write_text("x")
    first, second = check([root, other])
    assert isinstance(second, OutputError)
    assert "do not share the output folder" in second.what
    assert second.where == f"{other} on {socket.gethostname()}"
    assert (folder_check(0) in second.expected, second.found) == (True, found)
    assert isinstance(first, PeerError)
    assert str(other) in first.where
    assert [path.name for path in root.iterdir()] == [JOURNAL]


def test_a_file_that_only_its_writer_sees(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 1 writes is lost on the way; it sees what rank 0 writes."""
    write = shared_folder.write_whole

    def lose(folder: Path, name: str, data: bytes) -> FileRecord:
        return write(folder if name == folder_check(0) else tmp_path / "lost", name, data)

    monkeypatch.setattr(shared_folder, "write_whole", lose)
    first, second = check([root, root])
    assert first is not None
    assert "do not share the output folder" in first.what
    assert folder_check(1) in first.expected
    assert isinstance(second, PeerError)


def test_a_rename_that_leaves_the_old_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = shared_folder.write_whole

    def copy(folder: Path, name: str, data: bytes) -> FileRecord:
        done = write(folder, name, data)
        shutil.copy(folder / name, folder / (name + ".partial"))
        return done

    monkeypatch.setattr(shared_folder, "write_whole", copy)
    second = check([root, root])[1]
    assert second is not None
    assert second.found == "also the file of its temporary name"
    with OutputFolder(root, {}, []) as folder:  # what a killed check left is no foreign file
        folder.start(0, resume=True)
    assert [path.name for path in root.iterdir()] == [JOURNAL]


def test_a_lock_of_one_machine_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of NFS with local_lock: the same lock is given to every machine."""
    monkeypatch.setattr(shared_folder.fcntl, "flock", lambda *_: None)
    second = check([root, root])[1]
    assert second is not None
    assert "does not lock files for all machines" in second.what
    assert "of one machine only" in second.found


@pytest.mark.parametrize("num_machines", [1, 2])
def test_no_locks_at_all(num_machines: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine the conversion goes on with a warning, as a single process does."""
    place = threading.local()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(shared_folder.socket, "gethostname", lambda: place.name)
    found = check([root, root], lambda rank: setattr(place, "name", f"node{rank % num_machines}"))
    assert (found[1] is None) == (num_machines == 1)
    if found[1] is not None:
        assert found[1].found == "no locks (No locks available)"


def test_files_that_come_late(tmp_path: Path) -> None:
    """As on NFS, whose clients keep the answer that a file is missing."""
    record = FileRecord("experts/a.safetensors", 3, "")
    path = tmp_path / record.path

    def write() -> None:
        time.sleep(0.2)
        path.parent.mkdir()
        path.write_bytes(b"abc")

    thread = threading.Thread(target=write)
    thread.start()
    shared_folder.wait_for_files(tmp_path, [record], "rank 1")
    assert path.exists()
    thread.join()
    path.write_bytes(b"ab")
    with pytest.raises(OutputError, match="not seen") as caught:
        shared_folder.wait_for_files(tmp_path, [record], "rank 1")
    assert (caught.value.expected, caught.value.found) == ("3 bytes, which rank 1 wrote", "2 bytes")


def test_names_that_go_with_the_journal() -> None:
    names = [".hqconv-progress.rank0.check", ".hqconv-progress.rank12.check.partial", ".hqconv-progress.rank1.jsonl"]
    assert all(map(is_member_file, names))
    assert not any(map(is_member_file, [JOURNAL, "x.check", ".hqconv-progress.rank0.jsonl", "check.partial"]))
