"""Tensors are filled from files: every byte once, whatever the pieces and threads; what fails ends it."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hqconv.errors import VerificationError
from hqconv.schemas.tensors import TensorRef
from hqconv.serving import parameter_loader
from hqconv.serving.parameter_loader import LoadTarget, ParameterFiller
from hqconv.serving.rank_file import RankFile
from tests.make.effort import num_examples

DTYPES = {"U8": torch.uint8, "I32": torch.int32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
Layout = list[tuple[str, tuple[int, ...], int]]  # dtype, shape, bytes of other tensors before it


def make_file(path: Path, layout: Layout) -> RankFile:
    """A file of noise with tensors where the layout says; as a header names them, not in order."""
    begin, tensors = 16, {}
    for number, (dtype, shape, gap) in enumerate(layout):
        num_bytes = torch.empty(shape, dtype=DTYPES[dtype]).nbytes
        begin += gap
        tensors[f"t{number}"] = TensorRef(f"t{number}", dtype, shape, 0, begin, num_bytes)
        begin += num_bytes
    data = os.urandom(begin)
    path.write_bytes(data)
    return RankFile(path, path.name, "", hashlib.sha256(data).hexdigest(), tensors, {})


def plain(path: Path, *sizes: int) -> RankFile:
    return make_file(path, [("U8", (size,), 0) for size in sizes])


def targets(file: RankFile) -> list[LoadTarget]:
    """Empty tensors, each byte of which differs from the one it shall have."""
    data = torch.frombuffer(bytearray(file.path.read_bytes()), dtype=torch.uint8)
    found = []
    for ref in file.tensors.values():
        wrong = data[ref.offset_bytes : ref.offset_bytes + ref.num_bytes] ^ 0xFF
        found.append(LoadTarget(ref, wrong.clone().view(DTYPES[ref.dtype]).view(ref.shape)))
    return found


def is_full(file: RankFile, filled: Sequence[LoadTarget]) -> bool:
    data = file.path.read_bytes()
    return all(
        bytes(t.as_bytes().numpy()) == data[t.ref.offset_bytes : t.ref.offset_bytes + t.ref.num_bytes] for t in filled
    )


@contextmanager
def pieces(num_bytes: int, num_threads: int = 3) -> Iterator[list[int]]:
    """Pieces of this size, read by so many threads; the list gets the bytes of each read."""
    read, own = [], parameter_loader.fill

    def counting(descriptor: int, views: list[memoryview], offset: int) -> int:
        read.append(sum(map(len, views)))
        return own(descriptor, views, offset)

    with (
        patch.object(parameter_loader, "PIECE_BYTES", num_bytes),
        patch.object(parameter_loader, "NUM_THREADS", num_threads),
        patch.object(parameter_loader, "fill", counting),
    ):
        yield read


def num_threads() -> int:
    return sum(thread.name.startswith("hqconv-fill") for thread in threading.enumerate())


def has_ended() -> bool:
    """Whether all threads end soon."""
    deadline = time.monotonic() + 60
    while num_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    return num_threads() == 0


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)  # () is one number, and some are empty
LAYOUTS = st.lists(st.tuples(st.sampled_from(list(DTYPES)), SHAPES, st.sampled_from([0, 0, 0, 1, 40])), max_size=8)


@settings(max_examples=num_examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), layouts=st.lists(LAYOUTS, min_size=1, max_size=3), size=st.integers(1, 100))
def test_every_byte_arrives_once(tmp_path: Path, data: Any, layouts: list[Layout], size: int) -> None:
    """Any tensors in any order of any number of files, waited for in any order."""
    files = [make_file(tmp_path / str(number), layout) for number, layout in enumerate(layouts)]
    jobs = [(file.name, file, data.draw(st.permutations(targets(file)))) for file in files]
    order, threads = data.draw(st.permutations(jobs)), data.draw(st.integers(1, 4))
    with pieces(size, threads) as read:  # nothing is drawn from here on: what is begun must be waited for
        begun = ParameterFiller(jobs)
        for owner, file, wanted in order:
            assert owner in begun
            begun.wait(owner)
            assert is_full(file, wanted)
            assert owner not in begun
    assert begun.is_done
    total = sum(ref.num_bytes for file in files for ref in file.tensors.values())
    assert sum(read) == begun.num_bytes == total
    assert all(0 < part <= size for part in read)


def test_a_piece_is_as_large_as_it_may_be(tmp_path: Path) -> None:
    """Small tensors that adjoin are read at once, a large one in pieces; a gap is not read."""
    file = make_file(tmp_path / "f", [("U8", (10,), 0), ("U8", (0,), 0), ("I32", (5,), 0), ("U8", (250,), 7)])
    with pieces(100, 1) as read:
        ParameterFiller([("a", file, targets(file)[::-1])]).wait("a")
    assert read == [30, 100, 100, 50]


def test_tensors_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    file = plain(tmp_path / "f", 10, 20, 30)
    wanted = targets(file)[1:2]
    with pieces(1000) as read:
        ParameterFiller([("a", file, wanted)]).wait("a")
    assert read == [20]
    assert is_full(file, wanted)


def test_an_owner_of_nothing_is_full_at_once(tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", [("I32", (3, 0), 0)])
    with pieces(8) as read:
        begun = ParameterFiller([("empty", file, targets(file)), ("none", file, [])])
        begun.wait("empty")
        begun.wait("none")
    assert begun.is_done
    assert read == []


def test_files_are_read_in_the_order_given(tmp_path: Path) -> None:
    files = [plain(tmp_path / str(size), size) for size in (3, 2, 1)]
    with pieces(8, 1) as read:
        begun = ParameterFiller([(file.name, file, targets(file)) for file in files])
        begun.wait("1")
    assert read == [3, 2, 1]
    assert 0 <= begun.begun_s <= begun.ended_s <= time.perf_counter()
    assert has_ended()


def test_a_tensor_of_another_size_is_a_bug_and_leaves_no_threads(tmp_path: Path) -> None:
    file = plain(tmp_path / "f", 10)
    wrong = LoadTarget(file.tensors["t0"], torch.empty(9, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="9 bytes for 10") as caught:
        ParameterFiller([("a", file, targets(file)), ("b", file, [wrong])])
    assert has_ended()
    assert caught  # who holds the error holds all that it came from: nothing ends by being forgotten


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    file = plain(tmp_path / "f", 300)
    with pieces(100, 1):
        own = parameter_loader.fill

        def cutting(descriptor: int, views: list[memoryview], offset: int) -> int:
            os.truncate(file.path, 16 + 150)
            return own(descriptor, views, offset)

        with (
            patch.object(parameter_loader, "fill", cutting),
            pytest.raises(VerificationError, match="cut off or lost") as caught,
        ):
            ParameterFiller([("a", file, targets(file))]).wait("a")
    error = caught.value
    assert (error.where, error.expected, error.found) == ("f", "216 bytes or more", "166 bytes")
    assert "start the server again" in error.remedy


@pytest.mark.parametrize("kind", ["gone", "a folder"])
def test_a_file_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    file = plain(tmp_path / "f", 30)
    wanted = targets(file)
    file.path.unlink()
    if kind == "a folder":
        file.path.mkdir()
    begun = ParameterFiller([("a", file, wanted)])
    with pytest.raises(VerificationError, match=r"cut off or lost(.|\n)*where: f\n(.|\n)*a readable file"):
        begun.wait("a")


def test_what_fails_reaches_its_waiter_and_stops_the_rest(tmp_path: Path) -> None:
    """Of three files the second is gone: the first is full, the third is given up, no thread goes on."""
    first, second, third = (plain(tmp_path / name, 100) for name in ("first", "second", "third"))
    jobs = [(file.name, file, targets(file)) for file in (first, second, third)]
    second.path.unlink()
    with pieces(10, 2) as read:
        own = parameter_loader.fill

        def slow(descriptor: int, views: list[memoryview], offset: int) -> int:
            time.sleep(0.02)
            return own(descriptor, views, offset)

        with patch.object(parameter_loader, "fill", slow):
            begun = ParameterFiller(jobs)
            begun.wait("first")
            assert is_full(first, jobs[0][2])
            with pytest.raises(VerificationError, match="where: second"):
                begun.wait("second")
            assert num_threads() == 0
    assert sum(read) < 200
    assert not is_full(third, jobs[2][2])
    with pytest.raises(BaseException):  # noqa: B017, PT011 - given up, in whatever words
        begun.wait("third")


def test_digests_are_found_right_before_a_byte_is_loaded(tmp_path: Path) -> None:
    good, bad = plain(tmp_path / "good", 50), plain(tmp_path / "bad", 50)
    data = bytearray(bad.path.read_bytes())
    data[3] ^= 1  # of no tensor
    bad.path.write_bytes(data)
    with pieces(8) as read:
        for _ in range(2):
            jobs = [(file.name, file, targets(file)) for file in (good, bad)]
            with pytest.raises(VerificationError, match=r"damaged(.|\n)*where: bad(.|\n)*sha256"):
                ParameterFiller(jobs, digests=True)
            assert has_ended()
        assert read == []
        begun = ParameterFiller(jobs)  # without digests nobody knows
        begun.wait("bad")
        assert is_full(bad, jobs[1][2])
        begun = ParameterFiller(jobs[:1], digests=True)
        begun.wait("good")
        assert is_full(good, jobs[0][2])
