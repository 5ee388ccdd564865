"""Many ranks, several groups under way at once, and few open files allowed."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

import hqconv
from hqconv.errors import HqconvError, InputError, OutputError, VerificationError
from hqconv.io.file_access import Descriptors
from tests.make import processes
from tests.make.conversions import run
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.shards import split_by_layer

SCRIPT = """
import os, resource, sys, time
import hqconv
from hqconv.conversion.output_folder import UnitWriter

src, out = sys.argv[1:]
request = {"schema": "int4-c", "target": "sm90", "tp": 4, "ep": 32}
hqconv.plan(src, **request)  # everything is loaded
finish, most = UnitWriter.finish_file, []

def slow(self, file, *rest):  # so that as many groups as may be are open at once
    time.sleep(0.002)
    most.append(len(os.listdir("/proc/self/fd")))
    return finish(self, file)

UnitWriter.finish_file = slow
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
hqconv.convert(src, out, **request, device="cpu", threads=8)
print(max(most))
"""


def test_many_ranks_and_groups_with_128_open_files(tmp_path: Path) -> None:
    sizes = {"num_layers": 5, "num_experts": 32, "hidden_size": 128, "intermediate_size": 256}
    src = write_qwen3_moe(tmp_path / "src", **sizes)
    command = [sys.executable, "-c", SCRIPT, str(src), str(tmp_path / "out")]
    done = processes.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        int(done.stdout) < 96
    )  # the rest is for more source shards, and threads that need one more
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 5 * 4 * 32 + 1


# --- files that cannot be closed -----------------------------------------------------------------------------


def refuse_to_close(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ending: str = ".safetensors"
) -> list[str]:
    """Let `close` of the files below a folder fail, as a network's file system may; the list gets their names."""
    close, failed = os.close, list[str]()

    def fail(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        close(descriptor)
        if path.is_relative_to(folder) and path.name.endswith(ending):
            failed.append(path.name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.close", fail)
    return failed


def test_a_source_file_need_not_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost of a file that was only read; where room is needed for others, it is a read that fails."""
    src = write_qwen3_moe(tmp_path / "src", num_layers=6)
    split_by_layer(src)
    failed = refuse_to_close(monkeypatch, src)
    run(src, tmp_path / "out", "mxfp4")
    assert failed
    monkeypatch.setattr("hqconv.io.file_access.open_limit", lambda: 4)
    with pytest.raises(InputError, match="A file of the source cannot be read"):
        run(src, tmp_path / "again", "mxfp4")


def test_files_of_an_artifact_and_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, out = write_qwen3_moe(tmp_path / "src", num_layers=1), tmp_path / "out"
    with monkeypatch.context() as patch:
        refuse_to_close(patch, out, "experts.safetensors.partial")
        with pytest.raises(OutputError, match="Writing the output failed") as written:
            run(src, out, "mxfp4")
    assert "model.layers.0" in written.value.where
    run(src, out, "mxfp4", resume=True)
    refuse_to_close(monkeypatch, out)
    for error, read in (
        (VerificationError, lambda: hqconv.verify(out, checks=["weights"])),
        (InputError, lambda: run(out, tmp_path / "again", "source")),
    ):
        with pytest.raises(HqconvError, match="cannot be closed") as caught:
            read()
        assert type(caught.value) is error
        assert str(out) in caught.value.where


def test_every_file_of_a_pool_is_closed_though_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    pool = Descriptors(lambda name: os.open(tmp_path / name, os.O_RDONLY))
    for name in "abc":
        with pool.using(name):
            pass
    failed = refuse_to_close(monkeypatch, tmp_path, "")
    with pytest.raises(OSError, match="Input/output error"):
        pool.close()
    assert failed == ["a", "b", "c"]
