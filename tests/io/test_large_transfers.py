"""Long reads and writes are those of the plain calls: any pieces, the end of a file, and errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hqconv.io import large_transfers
from hqconv.io.file_access import fill
from hqconv.io.large_transfers import fill_large, write_fully

SIZE = 3 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture(autouse=True)
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several calls for a piece, and the compiled loop for all but the smallest transfers."""
    monkeypatch.setattr(large_transfers, "_CALL_BYTES", 1000)
    monkeypatch.setattr(large_transfers, "_LARGE_BYTES", 2000)


@given(offset=st.integers(0, SIZE + 10), sizes=st.lists(st.integers(1, 4000), max_size=6))
def test_pieces_are_those_of_plain_reads(path: Path, offset: int, sizes: list[int]) -> None:
    found, expected = ([bytearray(size) for size in sizes] for _ in range(2))
    with path.open("rb") as file:
        reached = fill_large(file.fileno(), [memoryview(one) for one in found], offset)
        assert reached == fill(file.fileno(), [memoryview(one) for one in expected], offset)
    assert found == expected
    assert reached <= max(offset, SIZE)


@pytest.mark.parametrize("missing", [0, 1, 1500, 2500])
def test_the_end_of_a_file(path: Path, missing: int) -> None:
    data = bytearray(2500)
    with path.open("rb") as file:
        assert fill_large(file.fileno(), [memoryview(data)], SIZE - len(data) + missing) == SIZE
    assert data[: len(data) - missing] == path.read_bytes()[SIZE - len(data) + missing :]
    assert not any(data[len(data) - missing :])


@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=4))
def test_writes_are_at_their_places(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    place = tmp_path_factory.mktemp("written") / "file"
    pieces = [os.urandom(size) for size in sizes]
    with place.open("wb", buffering=0) as file:
        for number in reversed(range(len(pieces))):
            write_fully(file.fileno(), pieces[number], sum(sizes[:number]))
    assert place.read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("size", [10, 5000])
def test_errors_are_the_system_s(path: Path, size: int) -> None:
    with path.open("rb") as file:
        with pytest.raises(OSError, match="Bad file descriptor"):
            write_fully(file.fileno(), bytes(size), 0)
        descriptor = os.dup(file.fileno())
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        fill_large(descriptor, [memoryview(bytearray(size))], 0)


def test_a_full_disk_is_told() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write_fully(file.fileno(), bytes(5000), 0)
