"""Files that are hashed in other processes: the same digests and errors, and nothing is left running."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.errors import OutputError
from hqconv.io import digest_processes
from hqconv.io.digest_processes import DigestProcesses, _Worker
from tests.make.places import REPO
from tests.make.qwen import read_tree, write_qwen3_moe


def workers(of: int | None = None) -> list[int]:
    """Processes that hash for a process, this one if none is named."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_one = b"digest_worker" in (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if is_one and parent == (of or os.getpid()):
            found.append(int(entry.name))
    return found


@pytest.fixture
def processes() -> Iterator[DigestProcesses]:
    with DigestProcesses() as processes:
        yield processes
    assert not workers()


@pytest.mark.parametrize("name", ["file", "with\nline", "ünï", "-I", "a b"])
@pytest.mark.parametrize("size", [0, 1, (3 << 20) + 7])
def test_digests(name: str, size: int, processes: DigestProcesses, tmp_path: Path) -> None:
    data = os.urandom(size)
    (tmp_path / name).write_bytes(data)
    assert processes.sha256_of(tmp_path / name) == hashlib.sha256(data).hexdigest()
    assert len(workers()) == 1


def test_names_that_are_no_text(processes: DigestProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path, too."""
    monkeypatch.chdir(tmp_path)
    path = Path(os.fsdecode(b"caf\xe9"))
    path.write_bytes(b"x")
    assert processes.sha256_of(path) == hashlib.sha256(b"x").hexdigest()


def test_one_process_for_each_thread_at_work(processes: DigestProcesses, tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (1 << 20))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(processes.sha256_of, paths))
    assert found == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert 1 <= len(workers()) <= 3


def test_errors_are_the_system_s(processes: DigestProcesses, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        processes.sha256_of(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        processes.sha256_of(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    assert processes.sha256_of(tmp_path / "file") == hashlib.sha256(b"x").hexdigest()


def test_a_killed_process_costs_only_time(processes: DigestProcesses, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"y" * 1000)
    expected = processes.sha256_of(path)
    os.kill(workers()[0], signal.SIGKILL)
    assert processes.sha256_of(path) == expected
    assert processes.sha256_of(path) == expected


def test_one_that_is_killed_while_it_hashes(
    processes: DigestProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, killed = _Worker._answer, list[int]()

    def kill_first(self: _Worker, keep_on: Any, limit_s: float | None) -> str:
        if limit_s is None:
            killed.append(self._process.pid)
            self._process.kill()
            self._process.wait()
        return answer(self, keep_on, limit_s)

    monkeypatch.setattr(_Worker, "_answer", kill_first)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(64 << 20)
    assert processes.sha256_of(tmp_path / "file") == hashlib.sha256(bytes(64 << 20)).hexdigest()
    assert len(killed) == 1


def test_a_cancelled_thread_does_not_wait(processes: DigestProcesses, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    asked = list[None]()

    def keep_on() -> None:
        asked.append(None)
        if len(asked) > 3:
            raise KeyError("cancelled")

    with pytest.raises(KeyError, match="cancelled"):
        processes.sha256_of(tmp_path / "pipe", keep_on)
    assert not workers()


@pytest.mark.parametrize("program", [None, "", "/bin/false", "/bin/cat", "/nowhere/python"])
def test_without_a_python(program: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program with an interpreter inside: threads hash."""
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr(digest_processes, "_START_S", 0.3)
    with DigestProcesses() as processes:
        for _ in range(2):
            assert processes.sha256_of(tmp_path / "file") == hashlib.sha256(b"x").hexdigest()
    assert not workers()


def test_nothing_runs_on_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    program = f"""
import time
from pathlib import Path
from hqconv.io.digest_processes import DigestProcesses
DigestProcesses().sha256_of(Path({str(tmp_path / "file")!r}))
print("done", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=REPO) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"done\n"
        (worker,) = workers(one.pid)
        one.kill()
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists() or not Path(f"/proc/{worker}/cmdline").read_bytes():
            return
        time.sleep(0.1)
    pytest.fail("the process that hashes runs on")


# --- in a conversion


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that processes were asked for, on however small a machine."""
    monkeypatch.setattr(digest_processes, "_MIN_THREADS", 1)
    asked, ask = list[str](), _Worker.ask

    def noted(self: _Worker, path: Path, *arguments: object) -> str:
        asked.append(path.name)
        return ask(self, path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_Worker, "ask", noted)
    return asked


def test_a_conversion_has_the_same_bytes(tmp_path: Path, always: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=3)
    words = {"schema": "int4", "target": "sm90", "device": "cpu"}
    hqconv.convert(model, tmp_path / "processes", **words)
    assert len(always) == 3  # a copied shard is hashed while it is written
    assert not workers()
    always.clear()
    assert hqconv.verify(tmp_path / "processes", checks=["files"], device="cpu").passed
    assert len(always) >= 4
    assert not workers()
    monkeypatch.setattr(digest_processes, "_MIN_THREADS", 1 << 20)
    always.clear()
    hqconv.convert(model, tmp_path / "threads", **words)
    assert not always
    assert read_tree(tmp_path / "processes") == read_tree(tmp_path / "threads")


def test_damage_is_found(tmp_path: Path, always: list[str]) -> None:
    hqconv.convert(write_qwen3_moe(tmp_path / "model"), tmp_path / "out", schema="int4", target="sm90", device="cpu")
    path = next((tmp_path / "out").rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = hqconv.verify(tmp_path / "out", checks=["files"], device="cpu")
    assert not found.passed
    assert path.name in always


@pytest.mark.parametrize(("num_threads", "limit", "expected"), [(7, 512, False), (8, 512, True), (64, 63, False)])
def test_few_threads_or_files_hash_themselves(
    num_threads: int, limit: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_processes, "open_limit", lambda: limit)
    assert (digest_processes.digest_processes(num_threads) is not None) == expected


def test_a_conversion_that_fails_leaves_no_process(
    tmp_path: Path, always: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=3)
    monkeypatch.setattr(_Worker, "ask", lambda *_: "errno 5")
    with pytest.raises(OutputError, match="Writing the output failed"):
        hqconv.convert(model, tmp_path / "out", schema="int4", target="sm90", device="cpu")
    assert not workers()
    assert not (tmp_path / "out" / "hqconv.json").exists()
