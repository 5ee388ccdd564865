"""Reads of a file through the page cache or past it give the same bytes; a file system may refuse the latter."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from hqconv.io import file_access
from hqconv.io.file_access import PieceReader, Reads, is_cached

SIZE = 50_001


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(os.urandom(SIZE))
    return tmp_path / "f"


def read(reader: PieceReader, begin: int, end: int) -> tuple[bytes, int]:
    """Bytes of a range, as far as the file goes, and the offset reached."""
    buffer = memoryview(mmap.mmap(-1, 65536))  # at a page boundary
    position, reached = reader.fill_buffer(buffer, begin, end)
    return bytes(buffer[position : position + max(0, reached - begin)]), reached


RANGES = [
    (0, 1),
    (0, SIZE),
    (1, 4096),
    (4095, 4097),
    (4096, 8192),
    (5000, 5001),
    (49_000, SIZE),
    (50_000, SIZE),
]


@pytest.mark.parametrize("reads", ["cached", "direct", "auto"])
def test_any_range(path: Path, reads: Reads) -> None:
    data, reader = path.read_bytes(), PieceReader(path, reads)
    for begin, end in RANGES:
        assert read(reader, begin, end) == (data[begin:end], end)
    assert reader.is_direct == (reads == "direct")
    reader.close()
    reader.close()


@pytest.mark.parametrize("step", [512, 1000, 4096])
def test_calls_that_return_less(path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Also where they end inside a block, at which no direct read can begin."""
    own, reader = os.preadv, PieceReader(path, "direct")
    offsets = []

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        own(descriptor, [views[0]], offset)
        return min(len(views[0]), SIZE - offset, (len(offsets) % 2) * step + 4096)

    monkeypatch.setattr(file_access.os, "preadv", short)
    data = path.read_bytes()
    assert read(reader, 100, 30_000) == (data[100:30_000], 30_000)
    assert len(offsets) > 3
    assert not any(offset % 4096 for offset in offsets)
    reader.close()


def refuse_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fcntl.fcntl

    def fcntl_(descriptor: int, command: int, flags: int = 0) -> Any:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return own(descriptor, command, flags)

    monkeypatch.setattr(file_access.fcntl, "fcntl", fcntl_)


def refuse_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.preadv

    def preadv(descriptor: int, views: list[memoryview], offset: int, *flags: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return own(descriptor, views, offset, *flags)

    monkeypatch.setattr(file_access.os, "preadv", preadv)


@pytest.mark.parametrize("refuse", [refuse_switch, refuse_reads])
def test_a_file_system_without_direct_reads(
    path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Any
) -> None:
    refuse(monkeypatch)
    data, reader = path.read_bytes(), PieceReader(path, "direct")
    assert reader.is_direct == (refuse is refuse_reads)
    for begin, end in RANGES:
        assert read(reader, begin, end) == (data[begin:end], end)
    assert not reader.is_direct
    reader.close()


def test_another_error_is_none_to_go_on_after(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PieceReader(path, "direct")

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_access.os, "preadv", failing)
    with pytest.raises(OSError, match="Input/output"):
        read(reader, 0, 10)
    reader.close()


def sampled(monkeypatch: pytest.MonkeyPatch, path: Path, answer: Any) -> bool:
    """Run is_cached with a page cache that answers for an offset."""

    def preadv(_: int, views: list[bytearray], offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        assert len(views[0]) == 1
        if not answer(offset):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return 1

    monkeypatch.setattr(file_access.os, "preadv", preadv)
    with path.open("rb") as file:
        return is_cached(file.fileno())


def cannot_tell(_: int) -> bool:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda _: True, True),
        (lambda _: False, False),
        (cannot_tell, True),
        (lambda offset: offset < SIZE * 0.7, True),
        (lambda offset: offset < SIZE * 0.3, False),
        (lambda offset: offset < 10, False),  # the header, which was read before
    ],
)
def test_most_of_a_file_decides(
    monkeypatch: pytest.MonkeyPatch, path: Path, answer: Any, expected: bool
) -> None:
    assert sampled(monkeypatch, path, answer) == expected


def test_a_file_that_was_dropped_from_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(8 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        assert is_cached(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(file.fileno()):
            pytest.skip("the file system keeps its files in memory, or cannot tell")
    reader = PieceReader(path)
    assert reader.is_direct
    reader.close()
