"""Files under their final names only when complete and on the disk; the journal; the folder's rules."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from hqconv.errors import OutputError
from hqconv.pipeline import writer as module
from hqconv.pipeline.writer import (
    FileRecord,
    GroupWriter,
    JournalEntry,
    OutputFolder,
    check_space,
    sha256_of,
    write_whole,
)
from hqconv.plan.plan import OutFile, Place, build_file

IDENTITY = {"schema": "a", "grid": [1, 2], "source files": [{"name": "x", "size_bytes": 1}]}


def two_files() -> tuple[OutFile, OutFile]:
    first = build_file("experts/tp0-ep0/b.safetensors", [("a", "U8", (1000,)), ("b", "I32", (50,))], {})
    return first, build_file("experts/tp0-ep1/b.safetensors", [("c", "F32", (7, 9))], {"format": "pt"})


def write_all(writer: GroupWriter, files: tuple[OutFile, ...], shuffle: int = 0) -> dict[str, bytes]:
    """Fill every tensor with random bytes, in pieces, in a random order."""
    generator = random.Random(shuffle)
    contents, jobs = {}, []
    for index, file in enumerate(files):
        for name, tensor in file.tensors.items():
            contents[name] = generator.randbytes(tensor.num_bytes)
            for start in range(0, tensor.num_bytes, 100):
                piece = contents[name][start : start + 100]
                jobs.append((Place(index, tensor.offset_bytes + start, len(piece)), piece))
    generator.shuffle(jobs)
    for place, piece in jobs:
        writer.write(place, piece)
    return contents


def names(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


# --- files -------------------------------------------------------------------------------------------------


def test_files_appear_whole_and_only_at_the_end(tmp_path: Path) -> None:
    files = two_files()
    writer = GroupWriter(tmp_path, files)
    partials = [file.path + ".partial" for file in files]
    assert names(tmp_path) == partials
    assert [(tmp_path / p).stat().st_size for p in partials] == [file.size_bytes for file in files]
    contents = write_all(writer, files)
    assert names(tmp_path) == partials
    records = writer.finish()
    assert names(tmp_path) == [file.path for file in files]
    for file, record in zip(files, records, strict=True):
        data = (tmp_path / file.path).read_bytes()
        assert record == FileRecord(file.path, len(data), hashlib.sha256(data).hexdigest())
        parsed = dict(safetensors.deserialize(data))
        assert {name: bytes(t["data"]) for name, t in parsed.items()} == {
            n: contents[n] for n in file.tensors
        }
        assert stat.S_IMODE((tmp_path / file.path).stat().st_mode) & 0o600 == 0o600


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that survives a power cut: contents, names, folders, journal, and the manifest last."""
    events: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(("fsync", target.relative_to(tmp_path).as_posix()))
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append(("name", target.relative_to(tmp_path).as_posix()))
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    folder = OutputFolder(tmp_path, IDENTITY)
    folder.start(resume=False, overwrite=False)
    files = two_files()
    writer = GroupWriter(tmp_path, files)
    write_all(writer, files)
    folder.record(JournalEntry("b", writer.finish(), {}))
    folder.seal(b"{}\n")
    first, second = (file.path for file in files)
    journal, manifest = ".hqconv-progress.jsonl", "hqconv.json"
    assert events == [
        ("fsync", journal + ".partial"),
        ("name", journal),
        ("fsync", "."),
        ("fsync", first + ".partial"),
        ("fsync", second + ".partial"),
        ("name", first),
        ("name", second),
        ("fsync", "experts/tp0-ep0"),
        ("fsync", "experts/tp0-ep1"),
        ("fsync", journal),
        ("fsync", manifest + ".partial"),
        ("name", manifest),
        ("fsync", "."),
        ("fsync", "."),
    ]
    assert names(tmp_path) == [first, second, manifest]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:37], offset))
    files = two_files()
    writer = GroupWriter(tmp_path, files)
    contents = write_all(writer, files, 1)
    writer.finish()
    parsed = dict(safetensors.deserialize((tmp_path / files[0].path).read_bytes()))
    assert {n: bytes(t["data"]) for n, t in parsed.items()} == {n: contents[n] for n in ("a", "b")}


def test_many_threads_write_at_once(tmp_path: Path) -> None:
    file = build_file("x.safetensors", [(f"t{i}", "U8", (5000,)) for i in range(16)], {})
    writer = GroupWriter(tmp_path, (file,))

    def fill(number: int) -> None:
        tensor = file.tensors[f"t{number}"]
        for start in range(0, 5000, 50):
            writer.write(Place(0, tensor.offset_bytes + start, 50), bytes([number]) * 50)

    threads = [threading.Thread(target=fill, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.finish()
    for name, tensor in safetensors.deserialize((tmp_path / file.path).read_bytes()):
        assert set(tensor["data"]) == {int(name[1:])}


def test_a_buffer_of_another_size_is_our_own_mistake(tmp_path: Path) -> None:
    writer = GroupWriter(tmp_path, two_files())
    with pytest.raises(AssertionError):
        writer.write(Place(0, 500, 10), bytes(11))
    writer.write(Place(0, 500, 12), np.zeros((3, 2), np.int16))
    writer.abandon()
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "open"])
@pytest.mark.parametrize("at", [1, 2])
def test_what_fails_on_creation_leaves_no_file_and_no_descriptor(
    call: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, os, call, at, errno.ENOSPC)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OutputError, match="The disk is full") as caught:
        GroupWriter(tmp_path, two_files())
    assert caught.value.exit_code == 4
    assert names(tmp_path) == []
    monkeypatch.undo()
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, code: int) -> None:
    """Let the at-th call (from 1) of a function fail with an error number."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("code", "said"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "failed")]
)
def test_an_error_of_the_disk_is_an_output_error(
    code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = GroupWriter(tmp_path, two_files())
    fail_at(monkeypatch, os, "pwrite", 1, code)
    with pytest.raises(OutputError, match=said) as caught:
        writer.write(Place(0, 500, 3), b"abc")
    assert caught.value.exit_code == 4
    assert "b.safetensors" in str(caught.value)
    assert "--resume" in str(caught.value)
    writer.abandon()


def test_a_small_file_is_old_or_new_never_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sub" / "config.json"
    write_whole(path, b"old")
    fail_at(monkeypatch, os, "fsync", 1, errno.EIO)
    with pytest.raises(OutputError):
        write_whole(path, b"new and longer")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_whole(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert names(tmp_path) == ["sub/config.json"]


def test_sha256_of_a_file_larger_than_its_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(0).randbytes(10_001)
    (tmp_path / "x").write_bytes(data)
    monkeypatch.setattr(module, "_HASH_CHUNK_BYTES", 1 << 10)
    assert sha256_of(tmp_path / "x") == hashlib.sha256(data).hexdigest()


# --- the folder --------------------------------------------------------------------------------------------


def started(root: Path) -> OutputFolder:
    folder = OutputFolder(root, IDENTITY)
    folder.start(resume=False, overwrite=False)
    return folder


def record_group(folder: OutputFolder, name: str) -> None:
    file = build_file(f"{name}.safetensors", [("t", "U8", (64,))], {})
    writer = GroupWriter(folder.root, (file,))
    writer.write(Place(0, file.tensors["t"].offset_bytes, 64), name.encode().ljust(64))
    folder.record(JournalEntry(name, writer.finish(), {"w1": {"relative_error": 0.1}}))


def resumed(root: Path, identity: dict[str, Any] = IDENTITY) -> OutputFolder:
    folder = OutputFolder(root, identity)
    folder.start(resume=True, overwrite=False)
    return folder


def test_a_resumed_folder_knows_what_is_done(tmp_path: Path) -> None:
    folder = started(tmp_path)
    for name in "abc":
        record_group(folder, name)
    again = resumed(tmp_path)
    assert again.done == folder.done
    assert again.done["b"].measured == {"w1": {"relative_error": 0.1}}


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove", "folder"])
def test_a_damaged_file_is_not_done(tmp_path: Path, damage: str) -> None:
    folder = started(tmp_path)
    for name in "abc":
        record_group(folder, name)
    path = tmp_path / "b.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "grow":
        path.write_bytes(data + b"x")
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    assert list(resumed(tmp_path).done) == ["a", "c"]


@pytest.mark.parametrize("cut", [1, 2, 30, 100])
def test_a_torn_last_line_is_forgotten_for_good(tmp_path: Path, cut: int) -> None:
    """And what a resumed run records next does not get glued to it."""
    folder = started(tmp_path)
    for name in "ab":
        record_group(folder, name)
    journal = tmp_path / ".hqconv-progress.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    again = resumed(tmp_path)
    assert list(again.done) == ["a"]
    record_group(again, "c")
    assert list(resumed(tmp_path).done) == ["a", "c"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": "a"}', b"\xff\n", b"[1]\n", b"7\n"])
def test_a_journal_without_a_first_line_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".hqconv-progress.jsonl").write_bytes(content)
    with pytest.raises(OutputError, match="nothing to resume"):
        resumed(tmp_path)


@pytest.mark.parametrize(
    "line",
    [b"nonsense", b"{}", b"[]", b'{"group": "x", "files": [{"path": 1}], "measured": {}}', b"\xff\xfe"],
)
def test_a_line_that_makes_no_sense_is_skipped(tmp_path: Path, line: bytes) -> None:
    folder = started(tmp_path)
    record_group(folder, "a")
    with (tmp_path / ".hqconv-progress.jsonl").open("ab") as file:
        file.write(line + b"\n")
    record_group(folder, "b")
    assert list(resumed(tmp_path).done) == ["a", "b"]


@pytest.mark.parametrize("key", IDENTITY)
def test_another_conversion_is_not_resumed(tmp_path: Path, key: str) -> None:
    started(tmp_path)
    before = (tmp_path / ".hqconv-progress.jsonl").read_bytes()
    with pytest.raises(OutputError, match=f"differs from this one in: {key}") as caught:
        resumed(tmp_path, {**IDENTITY, key: "changed"})
    assert "changed" in str(caught.value)
    assert (tmp_path / ".hqconv-progress.jsonl").read_bytes() == before


def test_partial_files_are_cleared_on_resume(tmp_path: Path) -> None:
    folder = started(tmp_path)
    record_group(folder, "a")
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts" / "x.safetensors.partial").write_bytes(b"half")
    resumed(tmp_path)
    assert names(tmp_path) == [".hqconv-progress.jsonl", "a.safetensors"]


def test_what_may_be_started_in(tmp_path: Path) -> None:
    started(tmp_path / "new" / "deep")
    (tmp_path / "empty").mkdir()
    started(tmp_path / "empty")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo.jpg").write_bytes(b"x")
    for name, found in (
        ("file", "a file"),
        ("foreign", "not empty"),
        ("empty", "an unfinished conversion"),
    ):
        with pytest.raises(OutputError, match=found) as caught:
            started(tmp_path / name)
        assert caught.value.exit_code == 4
    with pytest.raises(OutputError, match="nothing to resume"):
        resumed(tmp_path / "foreign")
    assert resumed(tmp_path / "fresh").done == {}  # nothing there yet: --resume simply starts


def test_a_finished_artifact_is_neither_resumed_nor_silently_replaced(tmp_path: Path) -> None:
    folder = started(tmp_path)
    folder.seal(b"{}")
    with pytest.raises(OutputError, match="a finished artifact"):
        resumed(tmp_path)
    with pytest.raises(OutputError, match="not empty"):
        started(tmp_path)


def test_overwrite_replaces_ours_and_nothing_else(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "sub").mkdir(parents=True)
    (foreign / "sub" / "photo.jpg").write_bytes(b"x")
    (foreign / "config.json").write_bytes(b"{}")
    with pytest.raises(OutputError, match="only what hqconv made"):
        OutputFolder(foreign, IDENTITY).start(resume=False, overwrite=True)
    assert names(foreign) == ["config.json", "sub/photo.jpg"]

    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    for finished in (True, False):
        ours = tmp_path / f"ours-{finished}"
        folder = started(ours)
        record_group(folder, "a")
        (ours / "experts").mkdir()
        (ours / "experts" / "old").write_bytes(b"x")
        (ours / "link").symlink_to(outside)
        if finished:
            folder.seal(b"{}")
        OutputFolder(ours, IDENTITY).start(resume=False, overwrite=True)
        assert names(ours) == [".hqconv-progress.jsonl"]
        assert json.loads((ours / ".hqconv-progress.jsonl").read_bytes()) == IDENTITY
        assert names(outside) == ["kept"]


def test_overwrite_takes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run killed while it clears leaves nothing that looks whole."""
    folder = started(tmp_path)
    for name in "abc":
        record_group(folder, name)
    folder.seal(b"{}")
    removed: list[str] = []
    real = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        removed.append(self.name)
        real(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    OutputFolder(tmp_path, IDENTITY).start(resume=False, overwrite=True)
    assert removed[0] == "hqconv.json"
    assert {"a.safetensors", "b.safetensors", "c.safetensors"} <= set(removed)


# --- space and permissions ---------------------------------------------------------------------------------


def test_space_is_checked_where_the_folder_will_be(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "yet", 1000)
    with pytest.raises(OutputError, match="cannot hold") as caught:
        check_space(tmp_path / "not" / "yet", 10**18)
    assert caught.value.exit_code == 4
    assert "GB free" in str(caught.value)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OutputError, match="cannot be written"):
        check_space(tmp_path / "file" / "out", 10)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere, so no chmod here
    with pytest.raises(OutputError, match="cannot be written"):
        check_space(tmp_path / "out", 10)
