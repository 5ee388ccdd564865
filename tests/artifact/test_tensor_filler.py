"""Tensors are filled from files: every byte once, whatever the pieces and threads; what fails ends it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hqconv.artifact import tensor_filler
from hqconv.artifact.tensor_filler import LoadTarget, TensorFiller, read_tensors
from hqconv.errors import VerificationError
from hqconv.io import host_buffers
from hqconv.io.file_access import PieceReader, Reads
from hqconv.io.host_buffers import HostBuffers
from hqconv.io.safetensors_header import read_header
from hqconv.schemas.tensors import TensorRef
from tests.make import processes
from tests.make.effort import num_examples
from tests.make.places import REPO

DTYPES = {
    "U8": torch.uint8,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
Layout = list[tuple[str, tuple[int, ...], int]]  # dtype, shape, bytes of other tensors before it


@dataclass
class File:
    path: Path
    sha256: str
    tensors: dict[str, TensorRef]

    @property
    def name(self) -> str:
        return self.path.name


def make_file(path: Path, layout: Layout) -> File:
    """A file of noise with tensors where the layout says; as a header names them, not in order."""
    begin, tensors = 16, {}
    for number, (dtype, shape, gap) in enumerate(layout):
        num_bytes = torch.empty(shape, dtype=DTYPES[dtype]).nbytes
        begin += gap
        tensors[f"t{number}"] = TensorRef(f"t{number}", dtype, shape, 0, begin, num_bytes)
        begin += num_bytes
    data = os.urandom(begin)
    path.write_bytes(data)
    return File(path, hashlib.sha256(data).hexdigest(), tensors)


def plain(path: Path, *sizes: int) -> File:
    return make_file(path, [("U8", (size,), 0) for size in sizes])


def targets(file: File) -> list[LoadTarget]:
    """Empty tensors, each byte of which differs from the one it shall have."""
    data = torch.frombuffer(bytearray(file.path.read_bytes()), dtype=torch.uint8)
    found = []
    for ref in file.tensors.values():
        wrong = data[ref.offset_bytes : ref.offset_bytes + ref.num_bytes] ^ 0xFF
        found.append(LoadTarget(ref, wrong.clone().view(DTYPES[ref.dtype]).view(ref.shape)))
    return found


def is_full(file: File, filled: Sequence[LoadTarget]) -> bool:
    data = file.path.read_bytes()
    return all(
        bytes(t.as_bytes().numpy())
        == data[t.ref.offset_bytes : t.ref.offset_bytes + t.ref.num_bytes]
        for t in filled
    )


@contextmanager
def pieces(num_bytes: int, num_threads: int = 3) -> Iterator[list[int]]:
    """Pieces of this size, read by so many threads; the list gets the bytes of each."""
    read = []
    own, own_staged = PieceReader.fill, PieceReader.fill_buffer

    def counting(self: PieceReader, views: list[memoryview], begin: int) -> int:
        read.append(sum(map(len, views)))
        return own(self, views, begin)

    def staged(self: PieceReader, buffer: memoryview, begin: int, end: int) -> tuple[int, int]:
        read.append(end - begin)
        return own_staged(self, buffer, begin, end)

    with (
        patch.object(tensor_filler, "PIECE_BYTES", num_bytes),
        patch.object(tensor_filler, "NUM_THREADS", num_threads),
        patch.object(tensor_filler, "_KEEP_S", 0.0),
        patch.object(PieceReader, "fill", counting),
        patch.object(PieceReader, "fill_buffer", staged),
    ):
        yield read
        if tensor_filler._pools:  # buffers of another size than those of the next test
            assert has_ended()


def num_threads() -> int:
    names = ("hqconv-fill", "hqconv-buffers")
    return sum(thread.name.startswith(names) for thread in threading.enumerate())


def has_ended() -> bool:
    """Whether all threads end soon, and all buffers are freed."""
    deadline = time.monotonic() + 60
    while (num_threads() or tensor_filler._pools) and time.monotonic() < deadline:
        time.sleep(0.001)
    return not num_threads() and not tensor_filler._pools


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)  # () is one number, and some are empty
LAYOUTS = st.lists(
    st.tuples(st.sampled_from(list(DTYPES)), SHAPES, st.sampled_from([0, 0, 0, 1, 40])), max_size=8
)


@settings(
    max_examples=num_examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), layouts=st.lists(LAYOUTS, min_size=1, max_size=3), size=st.integers(1, 100))
def test_every_byte_arrives_once(
    tmp_path: Path, data: Any, layouts: list[Layout], size: int
) -> None:
    """Any tensors in any order of any number of files, waited for in any order."""
    files = [make_file(tmp_path / str(number), layout) for number, layout in enumerate(layouts)]
    jobs = [(file.name, file, data.draw(st.permutations(targets(file)))) for file in files]
    order, threads = data.draw(st.permutations(jobs)), data.draw(st.integers(1, 4))
    with pieces(
        size, threads
    ) as read:  # nothing is drawn from here on: what is begun must be waited for
        begun = TensorFiller(jobs)
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
    """Small tensors that adjoin are read at once, a large one up to multiples of the size; a gap is not read."""
    file = make_file(
        tmp_path / "f", [("U8", (10,), 0), ("U8", (0,), 0), ("I32", (5,), 0), ("U8", (250,), 7)]
    )
    with pieces(100, 1) as read:
        TensorFiller([("a", file, targets(file)[::-1])]).wait("a")
    assert read == [30, 47, 100, 100, 3]


def test_a_tensor_of_another_size_is_a_bug_and_leaves_no_threads(tmp_path: Path) -> None:
    file = plain(tmp_path / "f", 10)
    wrong = LoadTarget(file.tensors["t0"], torch.empty(9, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="9 bytes for 10") as caught:
        TensorFiller([("a", file, targets(file)), ("b", file, [wrong])])
    assert has_ended()
    assert (
        caught
    )  # who holds the error holds all that it came from: nothing ends by being forgotten


@pytest.mark.parametrize("reads", ["cached", "direct"])
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, reads: Reads) -> None:
    file = plain(tmp_path / "f", 300)
    with pieces(100, 1):
        own = PieceReader.__init__

        def cutting(self: PieceReader, path: Path, reads: Reads) -> None:
            os.truncate(file.path, 16 + 150)
            own(self, path, reads)

        with (
            patch.object(PieceReader, "__init__", cutting),
            pytest.raises(VerificationError, match="cut off or lost") as caught,
        ):
            TensorFiller([("a", file, targets(file))], reads=reads).wait("a")
        assert has_ended()
    error = caught.value
    assert (error.where, error.expected, error.found) == ("f", "200 bytes or more", "166 bytes")
    assert "start again" in error.remedy


@pytest.mark.parametrize("kind", ["gone", "a folder"])
def test_a_file_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    file = plain(tmp_path / "f", 30)
    wanted = targets(file)
    file.path.unlink()
    if kind == "a folder":
        file.path.mkdir()
    begun = TensorFiller([("a", file, wanted)])
    with pytest.raises(
        VerificationError, match=r"cut off or lost(.|\n)*where: f\n(.|\n)*a readable file"
    ):
        begun.wait("a")


@contextmanager
def slow_reads(seconds: float) -> Iterator[None]:
    own = PieceReader.fill

    def slow(self: PieceReader, views: list[memoryview], begin: int) -> int:
        time.sleep(seconds)
        return own(self, views, begin)

    with patch.object(PieceReader, "fill", slow):
        yield


def test_what_fails_reaches_its_waiter_and_stops_the_rest(tmp_path: Path) -> None:
    """Of three files the second is gone: the first is full, the third is given up, no thread goes on."""
    first, second, third = (plain(tmp_path / name, 100) for name in ("first", "second", "third"))
    jobs = [(file.name, file, targets(file)) for file in (first, second, third)]
    second.path.unlink()
    with pieces(10, 2) as read, slow_reads(0.02):
        begun = TensorFiller(jobs)
        begun.wait("first")
        assert is_full(first, jobs[0][2])
        with pytest.raises(VerificationError, match="where: second"):
            begun.wait("second")
        assert num_threads() == 0
    assert sum(read) < 200
    assert not is_full(third, jobs[2][2])
    with pytest.raises(BaseException):  # noqa: B017, PT011 - given up, in whatever words
        begun.wait("third")


def test_a_check_fails_before_a_byte_is_loaded(tmp_path: Path) -> None:
    good, bad = plain(tmp_path / "good", 50), plain(tmp_path / "bad", 50)
    jobs = [(file.name, file, targets(file)) for file in (good, bad)]

    def check(file: File) -> None:
        if file is bad:
            raise VerificationError("The file is bad.", where=file.name)

    with pieces(8) as read:
        with pytest.raises(VerificationError, match="where: bad"):
            TensorFiller(jobs, check=check)
        assert has_ended()
        assert read == []
        begun = TensorFiller(jobs[:1], check=check)
        begun.wait("good")
        assert is_full(good, jobs[0][2])


def open_files(folder: Path) -> list[str]:
    """Files of a folder that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return [name for name in found if name.startswith(str(folder))]


@pytest.mark.parametrize("reads", ["cached", "direct"])
def test_an_interrupted_wait_leaves_nothing(tmp_path: Path, reads: Reads) -> None:
    """No thread, no open file, no buffer; what was not full stays so."""
    files = [plain(tmp_path / str(number), 20_000) for number in range(3)]
    jobs = [(file.name, file, targets(file)) for file in files]
    with pieces(4096, 2):
        own, is_waiting, fillers = PieceReader.__init__, threading.Event(), list[TensorFiller]()
        wait_for = threading.Condition.wait_for

        def waiting(self: threading.Condition, predicate: Any, timeout: float | None = None) -> Any:
            is_waiting.set()
            return wait_for(self, predicate, timeout)

        def interrupting(self: PieceReader, path: Path, reads: Reads) -> None:
            own(self, path, reads)
            if path == files[0].path:
                return
            is_waiting.wait(60)
            if path == files[1].path:
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)
            deadline = time.monotonic() + 60
            while not fillers[0]._is_stopped and time.monotonic() < deadline:
                time.sleep(0.001)

        with (
            patch.object(PieceReader, "__init__", interrupting),
            patch.object(threading.Condition, "wait_for", waiting),
        ):
            fillers.append(TensorFiller(jobs, reads=reads))
            with pytest.raises(KeyboardInterrupt):
                fillers[0].wait("1")
        assert has_ended()
        assert open_files(tmp_path) == []
        assert not is_full(files[2], jobs[2][2])


@pytest.mark.parametrize("when", ["before it begins", "while it works"])
@pytest.mark.parametrize("reads", ["cached", "direct"])
def test_an_interrupted_start_leaves_nothing(tmp_path: Path, reads: Reads, when: str) -> None:
    """An interrupt may come before `start` has returned: then it is not known whether the thread runs."""
    files = [plain(tmp_path / str(number), 20_000) for number in range(2)]
    jobs = [(file.name, file, targets(file)) for file in files]
    start, is_at_work, has_failed = threading.Thread.start, threading.Event(), threading.Event()
    run, reader = TensorFiller._run, tensor_filler._Job.reader

    def interrupted(self: threading.Thread) -> None:
        start(self)
        if self.name == "hqconv-fill":
            if when == "while it works":
                is_at_work.wait(60)
            raise KeyboardInterrupt

    def late(self: TensorFiller) -> None:
        if when == "before it begins":
            has_failed.wait(60)
        run(self)

    def slow(self: tensor_filler._Job) -> PieceReader:
        is_at_work.set()
        time.sleep(0.2)
        return reader(self)

    def stop(self: TensorFiller) -> None:
        self._is_stopped = True
        has_failed.set()
        own_stop(self)

    own_stop = TensorFiller.stop
    with (
        pieces(4096, 3) as read,
        patch.object(tensor_filler._Job, "reader", slow),
        patch.object(TensorFiller, "_run", late),
        patch.object(TensorFiller, "stop", stop),
    ):
        with patch.object(threading.Thread, "start", interrupted), pytest.raises(KeyboardInterrupt):
            TensorFiller(jobs, reads=reads)
        assert has_ended()
        assert len(read) <= (3 if when == "while it works" else 0)
        assert open_files(tmp_path) == []


def test_a_program_that_ends_does_not_wait_for_all_pieces(tmp_path: Path) -> None:
    code = f"""
import time, torch
from pathlib import Path
from hqconv.artifact import tensor_filler
from hqconv.io.safetensors_header import read_header
from hqconv.io.file_access import PieceReader
from hqconv.io import host_buffers
from hqconv.io.host_buffers import HostBuffers
from tests.artifact.test_tensor_filler import plain, targets
tensor_filler.PIECE_BYTES, own = 10, PieceReader.fill
def slow(self, views, begin):
    time.sleep(0.5)
    print("piece", flush=True)
    return own(self, views, begin)
PieceReader.fill = slow
file = plain(Path({str(tmp_path / "f")!r}), 2_000)
tensor_filler.TensorFiller([("a", file, targets(file))])
time.sleep(0.7)
"""
    done = processes.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=REPO,
        check=True,
        timeout=240,
    )
    assert 0 < done.stdout.count("piece") <= 2 * tensor_filler.NUM_THREADS


# --- through buffers, as to a GPU ----------------------------------------------------------------------------

ODD = st.lists(
    st.tuples(
        st.sampled_from(list(DTYPES)),
        st.tuples(st.integers(0, 9_000)),
        st.sampled_from([0, 0, 1, 40, 5_000]),
    ),
    max_size=6,
)


@settings(
    max_examples=num_examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    layouts=st.lists(ODD, min_size=1, max_size=3),
    blocks=st.integers(1, 4),
    threads=st.integers(1, 4),
)
def test_direct_reads_at_any_offset(
    tmp_path: Path, layouts: list[Layout], blocks: int, threads: int
) -> None:
    """Sizes and offsets are odd, pieces cross tensors, files end inside a block."""
    files = [make_file(tmp_path / str(number), layout) for number, layout in enumerate(layouts)]
    jobs = [(file.name, file, targets(file)) for file in files]
    with pieces(4096 * blocks, threads) as read:
        begun = TensorFiller(jobs, reads="direct")
        for owner, file, wanted in jobs:
            begun.wait(owner)
            assert is_full(file, wanted)
        assert has_ended()
    assert sum(read) == begun.num_bytes


def test_two_at_once_share_few_buffers(tmp_path: Path) -> None:
    """More threads than buffers: who waits for a buffer holds none."""
    files = [plain(tmp_path / str(number), 200_000) for number in range(4)]
    jobs = [(file.name, file, targets(file)) for file in files]
    with pieces(4096, 4), patch.object(HostBuffers, "grow", lambda self, _: own_grow(self, 2)):
        begun = [TensorFiller([job], reads="direct") for job in jobs]
        for filler, (owner, file, wanted) in zip(begun, jobs, strict=True):
            filler.wait(owner)
            assert is_full(file, wanted)
        assert has_ended()


own_grow = HostBuffers.grow


def test_buffers_are_kept_for_the_next_files_and_freed_later(tmp_path: Path) -> None:
    file = plain(tmp_path / "f", 50_000)
    with pieces(4096, 2), patch.object(tensor_filler, "_KEEP_S", 0.3):
        TensorFiller([("a", file, targets(file))], reads="direct").wait("a")
        (pool,) = tensor_filler._pools.values()
        TensorFiller([("b", file, targets(file))], reads="direct").wait("b")
        assert tensor_filler._pools[torch.device("cpu")] is pool
        assert has_ended()


def test_buffers_that_cannot_be_created_end_the_work(tmp_path: Path) -> None:
    file = plain(tmp_path / "f", 50_000)
    failing = patch.object(
        host_buffers, "_Memory", side_effect=OSError(12, "Cannot allocate memory")
    )
    with pieces(4096, 2), failing:
        with pytest.raises(OSError, match="Cannot allocate"):
            TensorFiller([("a", file, targets(file))], reads="direct").wait("a")
        assert has_ended()


@pytest.mark.parametrize("reads", ["auto", "direct"])
def test_tensors_are_those_of_the_safetensors_library(tmp_path: Path, reads: Reads) -> None:
    """An independent reader; sizes that no block divides, a scalar and an empty tensor."""
    torch.manual_seed(0)
    tensors = {
        "a": torch.randint(-9, 9, (3, 1001), dtype=torch.int32),
        "b": torch.randn(7, 13).to(torch.bfloat16),
        "c": torch.randn(70_001).to(torch.float8_e4m3fn),
        "d": torch.tensor(2.5),
        "e": torch.empty(0, 3, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "f.safetensors")
    refs = read_header(tmp_path / "f.safetensors")[0]
    with pieces(8192, 3):
        found = read_tensors(
            File(tmp_path / "f.safetensors", "", refs), refs, torch.device("cpu"), reads
        )
        assert has_ended()
    for name, expected in load_file(tmp_path / "f.safetensors").items():
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
        assert torch.equal(
            found[name].view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)
        )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reads", ["auto", "cached", "direct"])
def test_bytes_on_a_gpu(tmp_path: Path, reads: Reads) -> None:
    files = [
        make_file(tmp_path / str(n), [("U8", (40_000_001,), 3), ("BF16", (999, 1001), 0)])
        for n in range(4)
    ]
    jobs, device = [], torch.device("cuda", 0)
    for file in files:
        wanted = [LoadTarget(target.ref, target.tensor.to(device)) for target in targets(file)]
        jobs.append((file.name, file, wanted))
    with patch.object(tensor_filler, "_KEEP_S", 0.0):
        begun = TensorFiller(jobs, reads=reads)
        for owner, file, wanted in jobs:
            begun.wait(owner)
            assert is_full(file, [LoadTarget(target.ref, target.tensor.cpu()) for target in wanted])
        assert has_ended()
