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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hqconv.artifact import tensor_filler
from hqconv.artifact.tensor_filler import LoadTarget, TensorFiller, check_digests
from hqconv.errors import VerificationError
from hqconv.io import file_access
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
def pieces(num_bytes: int, num_threads: int = 3, delay_s: float = 0) -> Iterator[list[int]]:
    """Pieces of this size, read by so many threads after a delay; the list gets the bytes of each."""
    read = []

    def counting(descriptor: int, views: list[memoryview], begin: int) -> int:
        time.sleep(delay_s)
        read.append(sum(map(len, views)))
        return file_access.fill(descriptor, views, begin)

    with (
        patch.object(tensor_filler, "PIECE_BYTES", num_bytes),
        patch.object(tensor_filler, "NUM_THREADS", num_threads),
        patch.object(tensor_filler, "fill", counting),
    ):
        yield read


def has_ended() -> bool:
    """Whether all threads end soon."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(thread.name.startswith("hqconv-fill") for thread in threading.enumerate()):
            return True
        time.sleep(0.001)
    return False


class SlowGpu:
    """A stream whose copies are done when it is waited for, and no sooner."""

    def __init__(self, device: torch.device) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def synchronize(self) -> None:
        for destination, memory in self.copies:
            destination.numpy()[:] = memory.numpy()
        self.copies.clear()


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Take the way to a GPU; tensors are the CPU's."""
    own = threading.local()

    def using(stream: SlowGpu) -> Any:
        own.stream = stream
        return nullcontext()

    def copy(destination: torch.Tensor, memory: torch.Tensor, *, non_blocking: bool) -> None:
        own.stream.copies.append((destination, memory))

    with (
        patch.object(torch.cuda, "Stream", SlowGpu),
        patch.object(torch.cuda, "stream", using),
        patch.object(torch.Tensor, "copy_", copy),
        patch.object(TensorFiller, "_fill_cpu", TensorFiller._fill_gpu),
    ):
        yield


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)  # () is one number, and some are empty
LAYOUTS = st.lists(
    st.tuples(st.sampled_from(list(DTYPES)), SHAPES, st.sampled_from([0, 0, 0, 1, 40])), max_size=8
)


@settings(
    max_examples=num_examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    data=st.data(),
    layouts=st.lists(LAYOUTS, min_size=1, max_size=3),
    size=st.integers(1, 100),
    is_gpu=st.booleans(),
)
def test_every_byte_arrives_once(
    tmp_path: Path, data: Any, layouts: list[Layout], size: int, is_gpu: bool
) -> None:
    """Any tensors in any order of any number of files, waited for in any order."""
    files = [make_file(tmp_path / str(number), layout) for number, layout in enumerate(layouts)]
    jobs = [(file.name, file, data.draw(st.permutations(targets(file)))) for file in files]
    order, threads = data.draw(st.permutations(jobs)), data.draw(st.integers(1, 4))
    # nothing is drawn from here on: what is begun must be waited for
    with pieces(size, threads) as read, pretended_gpu() if is_gpu else nullcontext():
        filler = TensorFiller(jobs)
        for owner, file, tensors in order:
            assert owner in filler
            filler.wait(owner)
            assert is_full(file, tensors)
            assert owner not in filler
        assert has_ended()
    assert filler.is_done
    total = sum(ref.num_bytes for file in files for ref in file.tensors.values())
    assert sum(read) == filler.num_bytes == total
    assert all(0 < num_bytes <= size for num_bytes in read)


def test_a_tensor_of_another_size_is_a_bug_and_leaves_no_threads(tmp_path: Path) -> None:
    file = plain(tmp_path / "f", 10)
    wrong = LoadTarget(file.tensors["t0"], torch.empty(9, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="9 bytes for 10") as caught:
        TensorFiller([("a", file, targets(file)), ("b", file, [wrong])])
    assert has_ended()
    assert (
        caught
    )  # who holds the error holds all that it came from: nothing ends by being forgotten


@pytest.mark.parametrize(
    ("spoil", "expected", "found"),
    [
        (lambda path: os.truncate(path, 166), "216 bytes or more", "166 bytes"),
        (lambda path: path.unlink(), "a readable file", "No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "a readable file", "Is a directory"),
    ],
    ids=["cut off", "gone", "a folder"],
)
@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_file_that_cannot_be_read(
    tmp_path: Path, spoil: Any, expected: str, found: str, is_gpu: bool
) -> None:
    file = plain(tmp_path / "f", 300)
    tensors = targets(file)
    spoil(file.path)
    with pieces(100, 1), pretended_gpu() if is_gpu else nullcontext():
        with pytest.raises(VerificationError, match="cut off or lost") as caught:
            TensorFiller([("a", file, tensors)]).wait("a")
        assert has_ended()
    error = caught.value
    assert (error.where, error.expected) == ("f", expected)
    assert found in error.found
    assert "start again" in error.remedy


def test_what_fails_reaches_its_waiter_and_stops_the_rest(tmp_path: Path) -> None:
    """Of three files the second is gone: the first is full, the third is given up, no thread goes on."""
    first, second, third = (plain(tmp_path / name, 100) for name in ("first", "second", "third"))
    jobs = [(file.name, file, targets(file)) for file in (first, second, third)]
    second.path.unlink()
    with pieces(10, 2, delay_s=0.02) as read:
        filler = TensorFiller(jobs)
        filler.wait("first")
        assert is_full(first, jobs[0][2])
        with pytest.raises(VerificationError, match="where: second"):
            filler.wait("second")
        assert has_ended()
    assert sum(read) < 200
    assert not is_full(third, jobs[2][2])
    with pytest.raises(VerificationError, match="where: second"):
        filler.wait("third")


def test_digests_of_files(tmp_path: Path) -> None:
    files = [plain(tmp_path / str(number), 50) for number in range(3)]
    check_digests(files)
    files[1].path.write_bytes(files[0].path.read_bytes())
    with pytest.raises(VerificationError, match="not those of the manifest") as caught:
        check_digests(files)
    assert caught.value.where == "1"


def open_files(folder: Path) -> list[str]:
    """Files of a folder that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return [name for name in found if name.startswith(str(folder))]


def test_an_interrupted_wait_leaves_nothing(tmp_path: Path) -> None:
    """No thread, no open file; what was not full stays so."""
    files = [plain(tmp_path / str(number), 20_000) for number in range(3)]
    jobs = [(file.name, file, targets(file)) for file in files]
    with pieces(4096, 2, delay_s=0.05):
        filler = TensorFiller(jobs)
        main = threading.get_ident()
        threading.Timer(0.12, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            filler.wait("2")
        assert has_ended()
        assert open_files(tmp_path) == []
        assert not is_full(files[2], jobs[2][2])


def test_an_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    """An interrupt may come before `start` has returned: then it is not known whether the thread runs."""
    files = [plain(tmp_path / str(number), 20_000) for number in range(2)]
    jobs = [(file.name, file, targets(file)) for file in files]
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        if self.name == "hqconv-fill-1":
            raise KeyboardInterrupt

    with pieces(4096, 3, delay_s=0.2) as read:
        with patch.object(threading.Thread, "start", interrupted), pytest.raises(KeyboardInterrupt):
            TensorFiller(jobs)
        assert has_ended()
        assert len(read) <= 2
        assert open_files(tmp_path) == []


def test_a_program_that_ends_does_not_wait_for_all_pieces(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from hqconv.artifact import tensor_filler
from tests.artifact.test_tensor_filler import plain, targets
tensor_filler.PIECE_BYTES, fill = 10, tensor_filler.fill
def slow(*arguments):
    time.sleep(0.5)
    print("piece", flush=True)
    return fill(*arguments)
tensor_filler.fill = slow
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bytes_on_a_gpu(tmp_path: Path) -> None:
    files = [
        make_file(tmp_path / str(n), [("U8", (40_000_001,), 3), ("BF16", (999, 1001), 0)])
        for n in range(4)
    ]
    jobs, device = [], torch.device("cuda", 0)
    for file in files:
        tensors = [LoadTarget(target.ref, target.tensor.to(device)) for target in targets(file)]
        jobs.append((file.name, file, tensors))
    filler = TensorFiller(jobs)
    for owner, file, tensors in jobs:
        filler.wait(owner)
        assert is_full(file, [LoadTarget(target.ref, target.tensor.cpu()) for target in tensors])
    assert has_ended()
