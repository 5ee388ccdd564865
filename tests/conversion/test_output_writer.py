"""Files under their final names only when complete and on the disk; the journal; the folder's rules."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors

from hqconv.conversion.output_folder import UnitWriter
from hqconv.errors import OutputError
from hqconv.io import durable_files
from hqconv.io.durable_files import FileRecord, check_space, write_whole
from hqconv.planning.output_units import OutFile, build_file
from hqconv.schemas.tensors import TensorSpec
from tests.make.conversions import finished
from tests.make.tensors import names_below


def two_files() -> tuple[OutFile, OutFile]:
    first = [TensorSpec("a", "U8", (1000,)), TensorSpec("b", "I32", (50,))]
    second = [TensorSpec("c", "F32", (7, 9))]
    return (
        build_file("experts/tp0-ep0/b.safetensors", first, {}),
        build_file("experts/tp0-ep1/b.safetensors", second, {"format": "pt"}, 1),
    )


def write_all(writer: UnitWriter, files: tuple[OutFile, ...], shuffle: int = 0) -> dict[str, bytes]:
    """Fill every tensor with random bytes, in pieces, in a random order."""
    generator = random.Random(shuffle)
    contents, jobs = {}, []
    for file in files:
        for name, tensor in file.tensors.items():
            contents[name] = generator.randbytes(tensor.num_bytes)
            for start in range(0, tensor.num_bytes, 100):
                piece = contents[name][start : start + 100]
                jobs.append((tensor.file, tensor.offset_bytes + start, piece))
    generator.shuffle(jobs)
    for index, offset_bytes, piece in jobs:
        writer.write_at(index, offset_bytes, piece)
    return contents


def test_two_writers_of_one_file_wait_for_each_other(tmp_path: Path) -> None:
    """The first one's file is whole at any time, though the second begins beside it."""
    has_begun, may_end = threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        yield b"first, "
        has_begun.set()
        assert may_end.wait(30)
        yield b"whole"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(durable_files._write_chunks, tmp_path, "file", chunks())
        assert has_begun.wait(30)
        second = pool.submit(write_whole, tmp_path, "file", b"second")
        time.sleep(0.2)
        assert not second.done()
        may_end.set()
        assert first.result().size_bytes == len(b"first, whole")
        second.result()
    assert names_below(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"second"


# --- files -------------------------------------------------------------------------------------------------


def test_files_appear_whole_and_only_at_the_end(tmp_path: Path) -> None:
    files = two_files()
    writer = UnitWriter(tmp_path, files)
    partials = [file.path + ".partial" for file in files]
    assert names_below(tmp_path) == partials
    assert [(tmp_path / p).stat().st_size for p in partials] == [file.size_bytes for file in files]
    contents = write_all(writer, files)
    assert names_below(tmp_path) == partials
    records = finished(writer, files)
    assert names_below(tmp_path) == [file.path for file in files]
    for file, record in zip(files, records, strict=True):
        data = (tmp_path / file.path).read_bytes()
        assert record == FileRecord(file.path, len(data), hashlib.sha256(data).hexdigest())
        parsed = dict(safetensors.deserialize(data))
        assert {name: bytes(t["data"]) for name, t in parsed.items()} == {
            n: contents[n] for n in file.tensors
        }
        assert stat.S_IMODE((tmp_path / file.path).stat().st_mode) & 0o600 == 0o600


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:37], offset))
    files = two_files()
    writer = UnitWriter(tmp_path, files)
    contents = write_all(writer, files, 1)
    finished(writer, files)
    parsed = dict(safetensors.deserialize((tmp_path / files[0].path).read_bytes()))
    assert {n: bytes(t["data"]) for n, t in parsed.items()} == {n: contents[n] for n in ("a", "b")}


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "open"])
@pytest.mark.parametrize("at", [1, 2])
def test_what_fails_on_creation_leaves_no_file_and_no_descriptor(
    call: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, os, call, at, errno.ENOSPC)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OutputError, match="The disk is full") as caught:
        UnitWriter(tmp_path, two_files())
    assert caught.value.exit_code == 4
    assert names_below(tmp_path) == []
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
    writer = UnitWriter(tmp_path, two_files())
    fail_at(monkeypatch, os, "pwrite", 1, code)
    with pytest.raises(OutputError, match=said) as caught:
        writer.write_at(0, 500, b"abc")
    assert caught.value.exit_code == 4
    assert "b.safetensors" in str(caught.value)
    assert "--resume" in str(caught.value)
    writer.abandon()


def test_a_small_file_is_old_or_new_never_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sub" / "config.json"
    write_whole(tmp_path, "sub/config.json", b"old")
    fail_at(monkeypatch, os, "fsync", 1, errno.EIO)
    with pytest.raises(OutputError):
        write_whole(tmp_path, "sub/config.json", b"new and longer")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    record = write_whole(tmp_path, "sub/config.json", b"new and longer")
    assert record == FileRecord(
        "sub/config.json", 14, hashlib.sha256(b"new and longer").hexdigest()
    )
    assert path.read_bytes() == b"new and longer"
    assert names_below(tmp_path) == ["sub/config.json"]


# --- space and permissions ---------------------------------------------------------------------------------


def test_space_is_checked_where_the_folder_will_be(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "yet", 1000)
    with pytest.raises(OutputError, match="cannot hold") as caught:
        check_space(tmp_path / "not" / "yet", 10**18)
    assert caught.value.exit_code == 4
    assert "MB free" in str(caught.value)
    assert names_below(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OutputError, match="cannot be written"):
        check_space(tmp_path / "file" / "out", 10)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere, so no chmod here
    with pytest.raises(OutputError, match="cannot be written"):
        check_space(tmp_path / "out", 10)
