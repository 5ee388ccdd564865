"""Open files: no more than the process may have, whatever the number of ranks and shards."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from hqconv.io.file_access import Descriptors
from tests.make import processes
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import load_file

FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.argv = ["hqconv", *sys.argv[1:]]
from hqconv.cli.app import main
main()
"""


def limited(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process that may have 64 files open."""
    command = [sys.executable, "-c", FEW_FILES, *map(str, arguments)]
    return processes.run(command, cwd=REPO, capture_output=True, text=True, check=False)


def a_shard_a_tensor(model: Path) -> Path:
    """The same checkpoint, every tensor in a file of its own."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, model / weight_map[name], {"format": "pt"})
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.full
def test_64_ranks_and_many_shards_with_64_open_files(tmp_path: Path) -> None:
    """128 rank files, and gate, up and down of every expert in shards of their own."""
    out = tmp_path / "out"
    model = a_shard_a_tensor(write_qwen3_moe(tmp_path / "model", num_experts=16, intermediate_size=256))
    assert len(list(model.glob("*.safetensors"))) > 64
    words = ["--schema", "mxfp4", "--target", "sm90", "--tp", 8, "--ep", 8, "--threads", 4, "-q"]
    done = limited("convert", model, "-o", out, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((out / "experts").rglob("*.safetensors"))) == 128
    for more in ([], ["--source", model]):
        done = limited("verify", out, "--device", "cpu", "--threads", 4, *more)
        assert done.returncode == 0, done.stdout + done.stderr
    done = limited("convert", out, "-o", tmp_path / "again", "--schema", "source", "--target", "sm90", "-q")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_raises_the_soft_limit(tmp_path: Path) -> None:
    code = (
        "import resource, hqconv.io.file_access as d\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))\n"
        "d.raise_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 512:
        pytest.skip("the hard limit here is lower than 512")
    done = processes.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
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
