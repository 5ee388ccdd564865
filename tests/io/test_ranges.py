"""Byte ranges that adjoin are read by one call, and calls that return less than asked go on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hqconv.io import file_access
from hqconv.io.file_access import adjoining, fill
from hqconv.schemas.tensors import TensorRef


def ref(file: int, offset: int, size: int) -> TensorRef:
    return TensorRef(f"{file}-{offset}", "U8", (size,), file, offset, size)


def test_runs_are_what_lies_side_by_side_in_a_file() -> None:
    refs = [ref(1, 0, 4), ref(0, 8, 2), ref(0, 0, 5), ref(0, 5, 3), ref(0, 12, 1), ref(0, 10, 0)]
    runs = list(adjoining((one, bytearray(one.num_bytes)) for one in refs))
    assert [[(r.file, r.offset_bytes) for r, _ in run] for run in runs] == [
        [(0, 0), (0, 5), (0, 8)],
        [(0, 12)],
        [(1, 0)],
    ]


def test_a_run_has_no_more_buffers_than_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_access, "_MAX_BUFFERS", 2)
    runs = list(adjoining((ref(0, i, 1), bytearray(1)) for i in range(5)))
    assert [len(run) for run in runs] == [2, 2, 1]


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_short_reads_go_on_where_they_ended(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(40)
    (tmp_path / "file").write_bytes(data)
    real = os.preadv

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        taken, room = [], most
        for view in views:
            taken.append(view[:room])
            room -= len(taken[-1])
            if not room:
                break
        return real(descriptor, taken, offset)

    monkeypatch.setattr(os, "preadv", short)
    buffers = [bytearray(n) for n in (5, 1, 12, 9)]
    with (tmp_path / "file").open("rb") as file:
        assert fill(file.fileno(), map(memoryview, buffers), 3) == 30
        assert b"".join(buffers) == data[3:30]
        assert fill(file.fileno(), [memoryview(bytearray(30))], 20) == 40  # the file ends
