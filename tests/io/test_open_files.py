"""Open files: no more than the process may have, whatever the number of ranks and shards."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from hqconv.io.file_access import Descriptors
from tests.make import processes
from tests.make.places import REPO


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_the_command_raises_the_soft_limit(tmp_path: Path) -> None:
    code = (
        "import resource, hqconv.io.file_access as d\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))\n"
        "d.raise_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 512:
        pytest.skip("the hard limit here is lower than 512")
    done = processes.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "512"


def test_the_least_recently_used_are_closed_first(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text(name)
    opened: list[str] = []

    def opener(name: str) -> int:
        opened.append(name)
        return os.open(tmp_path / name, os.O_RDONLY)

    before, files = num_open(), Descriptors(opener, limit=2)
    for name in "abacbd":
        with files.using(name) as descriptor:
            assert os.pread(descriptor, 1, 0) == name.encode()
            assert num_open() <= before + 2
    assert opened == ["a", "b", "c", "b", "d"]
    files.close()
    assert num_open() == before


def test_a_file_in_use_is_not_closed(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    files = Descriptors(lambda name: os.open(tmp_path / name, os.O_RDONLY), limit=1)
    with files.using("a") as first, files.using("b") as second:
        assert (os.pread(first, 1, 0), os.pread(second, 1, 0)) == (b"a", b"b")
    files.close()


def test_a_file_that_is_dropped_in_use_is_closed_after_it(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    before = num_open()
    files = Descriptors(lambda name: os.open(tmp_path / name, os.O_RDONLY))
    with files.using("a") as first:
        files.drop("a")
        files.drop("a")
        (tmp_path / "a").unlink()
        (tmp_path / "a").write_text("x")
        with files.using("b"), files.using("a") as anew:
            assert (os.pread(first, 1, 0), os.pread(anew, 1, 0)) == (b"a", b"x")
    assert num_open() == before + 2
    files.drop("a")
    assert num_open() == before + 1
    files.close()
    assert num_open() == before
