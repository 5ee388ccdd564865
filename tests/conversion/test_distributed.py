"""Several processes at one conversion: the same bytes as one, whoever is killed, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore

from hqconv.conversion import distributed
from hqconv.conversion.distributed import MemberFolder, ProcessGroup
from hqconv.conversion.journal import Journal, JournalEntry
from hqconv.conversion.output_folder import OutputFolder
from hqconv.conversion.torchrun import is_distributed, is_rank_zero, local_rank
from hqconv.errors import InputError, OutputError, PeerError
from hqconv.io.durable_files import FileRecord
from hqconv.schemas.artifact_names import JOURNAL, member_journal
from tests.make.conversions import run
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

NUM_LAYERS = 6
# Rank 1 ends itself where it is told to; the others are as they are.
SCRIPT = """
import os, signal, sys, time
import hqconv
from hqconv.conversion.distributed import MemberFolder, ProcessGroup

src, out, schema, at, mode = sys.argv[1:]
if os.environ["RANK"] == "1" and at == "recorded":
    record = MemberFolder.record
    def last(self, entry):
        record(self, entry)
        os.kill(os.getpid(), signal.SIGKILL)
    MemberFolder.record = last
elif os.environ["RANK"] == "1" and at == "begun":
    MemberFolder.__init__ = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
elif os.environ["RANK"] == "1" and at == "another":
    schema = "int8-g64"
elif os.environ["RANK"] == "0" and at == "recorded":  # rank 1 takes the first unit
    take_next = ProcessGroup.take_next
    def wait(self, items):
        while self.count("dealt", 0) == 0:
            time.sleep(0.01)
        yield from take_next(self, items)
    ProcessGroup.take_next = wait
modes = {mode: True} if mode else {}
hqconv.convert(src, out, schema=schema, target="sm90", device="cpu", threads=1, tp=2, distributed=True, **modes)
"""


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("team") / "model", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def alone(src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one process makes of it."""
    from hqconv.schemas.grid import Grid

    out = tmp_path_factory.mktemp("alone") / "out"
    run(src, out, "int4-g64", Grid(2))
    return snapshot(out)


def torchrun(*command: str, num: int = 2) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num), *command]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300, cwd=REPO)


def scripted(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return torchrun(str(script), *map(str, arguments))


# --- whole conversions -------------------------------------------------------------------------------------


def test_processes_together_make_the_same_bytes(src: Path, alone: dict[str, str], tmp_path: Path) -> None:
    options = ["--schema", "int4-g64", "--target", "sm90", "--tp", "2", "--threads", "1", "--json"]
    done = torchrun("-m", "hqconv", "convert", str(src), "-o", str(tmp_path / "out"), *options, num=3)
    assert done.returncode == 0, done.stderr[-2000:]
    assert snapshot(tmp_path / "out") == alone
    words = json.loads(done.stdout)  # the first process speaks, and no other
    assert (words["num_blocks"], words["num_ranks"]) == (NUM_LAYERS, 2)
    assert os.listdir(tmp_path) == ["out"]  # noqa: PTH208


@pytest.mark.full
@pytest.mark.parametrize("at", ["begun", "recorded"])
def test_a_killed_process_is_survived(at: str, src: Path, alone: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert scripted(tmp_path, src, out, "int4-g64", at, "").returncode != 0
    assert not (out / "hqconv.json").exists()
    assert (out / JOURNAL).exists()
    done = scripted(tmp_path, src, out, "int4-g64", "", "resume")
    assert done.returncode == 0, done.stderr[-2000:]
    assert snapshot(out) == alone


@pytest.mark.full
def test_one_process_goes_on_where_several_were(src: Path, alone: dict[str, str], tmp_path: Path) -> None:
    from hqconv.schemas.grid import Grid

    out = tmp_path / "out"
    assert scripted(tmp_path, src, out, "int4-g64", "recorded", "").returncode != 0
    of_dead, of_first = ((out / name).read_text().count('"unit"') for name in (member_journal(1), JOURNAL))
    report = run(src, out, "int4-g64", Grid(2), resume=True)
    assert report.num_groups_resumed == of_first + of_dead
    assert of_dead == 1
    assert snapshot(out) == alone


def test_processes_that_see_different_things_are_refused(src: Path, tmp_path: Path) -> None:
    done = scripted(tmp_path, src, tmp_path / "out", "int4-g64", "another", "")
    assert done.returncode != 0
    assert "do not see the same source, request and versions" in done.stderr
    assert not (tmp_path / "out/hqconv.json").exists()


# --- a killed torchrun -------------------------------------------------------------------------------------

# Both ranks end soon after torchrun: one is at work that nothing interrupts, the other waits for the store.
ORPHANS = """
import os, sys, time
from pathlib import Path
from hqconv.conversion import distributed

distributed._LOOK_S, distributed._GRACE_S = 0.1, 0.5
distributed.ParentWatch()
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "1":
    time.sleep(600)
while True:
    time.sleep(1)
    distributed.ProcessGroup.of_environment()
"""


def begin_torchrun(*command: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=REPO)


def wait_until(is_so: Callable[[], bool], seconds: float = 180.0) -> bool:
    for _ in range(int(seconds * 10)):
        if is_so():
            return True
        time.sleep(0.1)
    return False


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_end_after_a_killed_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    agent = begin_torchrun(str(script), str(tmp_path))
    files = [tmp_path / "0", tmp_path / "1"]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    agent.kill()
    agent.wait()
    assert wait_until(lambda: not any(is_alive(int(file.read_text())) for file in files))


@pytest.mark.full
@pytest.mark.parametrize("is_loaded", [False, True])
def test_commands_end_after_a_torchrun_that_was_killed_early(is_loaded: bool, src: Path, tmp_path: Path) -> None:
    """While they load their libraries, or as soon as they have begun."""
    out = tmp_path / "out"
    options = ["-o", str(out), "--schema", "int4-g64", "--target", "sm90", "--threads", "1"]
    agent = begin_torchrun("-m", "hqconv", "convert", str(src), *options)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    assert wait_until(lambda: len(children.read_text().split()) == 2)
    assert not is_loaded or wait_until(lambda: (out / JOURNAL).exists() or (out / "hqconv.json").exists())
    ranks = [int(child) for child in children.read_text().split()]
    agent.kill()
    agent.wait()
    assert wait_until(lambda: not any(map(is_alive, ranks)))


def test_a_process_that_is_loaded_after_torchrun_ended(tmp_path: Path) -> None:
    """Its parent is process 1 by then, which is not torchrun."""
    script = """
import os, sys, time
while os.getppid() != 1 and time.monotonic() < float(sys.argv[2]):
    time.sleep(0.01)
from hqconv.conversion.torchrun import parent
open(sys.argv[1], "w").write(f"{os.getppid()} {parent()}")
"""
    names = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {**os.environ, "PYTHONPATH": str(REPO), **dict.fromkeys(names, "2")}
    command = shlex.join([sys.executable, "-c", script, str(tmp_path / "out"), str(time.monotonic() + 60)])
    subprocess.run(["sh", "-c", f"{command} &"], env=environment, check=True)
    assert wait_until(lambda: (tmp_path / "out").is_file() and bool((tmp_path / "out").read_text()))
    parent_now, watched = (tmp_path / "out").read_text().split()
    if parent_now != "1":
        pytest.skip("another process than process 1 takes over orphans here")
    assert watched == "0"


def test_a_fork_of_a_process_watches_its_own_parent() -> None:
    from hqconv.conversion import torchrun

    assert torchrun.parent() == os.getppid()
    child = os.fork()
    if not child:
        os._exit(0 if torchrun.parent() == os.getppid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- signs of life -----------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_BEAT_S": 0.02, "_GONE_S": 1.0, "_JOIN_TIMEOUT_S": 1.0, "_HEAR_TIMEOUT_S": 0.1}.items():
        monkeypatch.setattr(distributed, name, value)


class Peers:
    """Processes in one store, without torchrun: the last ranks of `world_size` may not come."""

    def __init__(self, num: int, world_size: int) -> None:
        store = HashStore()
        self.groups = [ProcessGroup(store, rank, world_size) for rank in range(num)]
        self.cancelled: list[tuple[int, PeerError]] = []

    def __enter__(self) -> Peers:
        for group in self.groups:
            group.join()
        return self

    def __exit__(self, *_: object) -> None:
        for group in self.groups:
            group._stop_watches()

    def work(self, rank: int) -> Any:
        return self.groups[rank].interrupting(lambda error: self.cancelled.append((rank, error)))


def test_processes_that_live_are_left_alone(quick: None) -> None:
    with Peers(3, 3) as peers, peers.work(0), peers.work(1), peers.work(2):
        time.sleep(2.0)
        assert not peers.cancelled
        for group in peers.groups:
            group.check()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_process_without_signs_of_life_ends_the_others(lost: int, quick: None) -> None:
    with Peers(3, 3) as peers:
        left = [rank for rank in range(3) if rank != lost]
        with peers.work(left[0]), peers.work(left[1]):
            time.sleep(0.2)
            assert not peers.cancelled
            peers.groups[lost]._stop_watches()
            assert wait_until(lambda: len(peers.cancelled) == 2, 20)
        for _, error in peers.cancelled:
            assert error.what == "A process of this conversion is gone."
            assert error.where == f"rank {lost} (process {os.getpid()} on {socket.gethostname()})"
        for rank in left:
            with pytest.raises(PeerError, match="is gone"):
                peers.groups[rank].receive("anything")


def test_a_process_that_never_comes(quick: None) -> None:
    with Peers(2, 3) as peers, peers.work(0), peers.work(1):
        assert wait_until(lambda: len(peers.cancelled) == 2, 20)
        assert {(error.what, error.where) for _, error in peers.cancelled} == {
            ("A process of this conversion did not come.", "rank 2")
        }


def test_work_hears_of_a_failure_elsewhere(quick: None) -> None:
    """Also work that begins after that; a failure that follows is not told."""
    with Peers(2, 2) as peers:
        with peers.work(0):
            peers.groups[1].fail(InputError("The file is bad.", where="tensor x"))
            assert wait_until(lambda: bool(peers.cancelled), 20)
        with peers.work(0):
            assert len(peers.cancelled) == 2
        error = peers.cancelled[0][1]
        assert (error.what, error.found) == ("Another process of this conversion failed.", "The file is bad.")
        assert error.where.endswith(", tensor x")
        peers.groups[0].fail(error)
        assert peers.groups[0].count("failures", 0) == 1


@pytest.mark.full
def test_processes_of_a_suspended_job_go_on(tmp_path: Path) -> None:
    """For longer than a process may be silent; both are threads of one process here."""
    script = """
import sys, time
from pathlib import Path
from torch.distributed import HashStore
from hqconv.conversion import distributed

distributed._BEAT_S, distributed._GONE_S = 0.05, 1.0
store = HashStore()
groups = [distributed.ProcessGroup(store, rank, 2) for rank in range(2)]
for group in groups:
    group.join()
Path(sys.argv[1], "joined").touch()
while not Path(sys.argv[1], "resumed").exists():
    time.sleep(0.05)
time.sleep(1.0)
for group in groups:
    group.check()
"""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment)
    assert wait_until((tmp_path / "joined").exists)
    time.sleep(0.5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    process.send_signal(signal.SIGCONT)
    (tmp_path / "resumed").touch()
    assert process.wait(60) == 0


def test_a_process_that_does_not_end_by_itself_is_ended(tmp_path: Path) -> None:
    """With the reason in the log, and by SIGTERM; if that has no effect, at once."""
    script = """
import logging, signal, sys, time
from torch.distributed import HashStore
from hqconv.conversion import distributed

logging.basicConfig(format="%(message)s")
distributed._BEAT_S, distributed._GONE_S, distributed._JOIN_TIMEOUT_S, distributed._GRACE_S = 0.05, 0.2, 0.2, 0.2
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
distributed.ProcessGroup(HashStore(), 0, 2).join()
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    for how, code in (("hears", -15), ("deaf", 143)):
        words = [sys.executable, "-c", script, how]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == code
        assert "A process of this conversion did not come." in done.stderr


def test_values_of_all_processes_are_gathered_by_rank() -> None:
    store, found = HashStore(), dict[int, list[str]]()

    def work(rank: int) -> None:
        found[rank] = ProcessGroup(store, rank, 3).gather("names", f"of {rank}")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rank: ["of 0", "of 1", "of 2"] for rank in range(3)}


# --- the team ----------------------------------------------------------------------------------------------


def test_every_item_is_dealt_once() -> None:
    store, taken = HashStore(), list[tuple[int, int]]()

    def work(rank: int) -> None:
        for item in ProcessGroup(store, rank, 4).take_next(range(100)):
            taken.append((item, rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(item for item, _ in taken) == list(range(100))


def test_who_waits_hears_that_another_failed(quick: None) -> None:
    store = HashStore()
    first, second = (ProcessGroup(store, rank, 2) for rank in range(2))
    second.fail(ValueError("the disk is gone\nand more"))
    first.fail(ValueError("because of that"))  # the first failure is the one that is told
    for wait in (
        lambda: first.receive("anything"),
        lambda: list(first.take_next([1])),
        lambda: list(first.receive_finished()),
    ):
        with pytest.raises(OutputError, match="Another process") as caught:
            wait()
        assert (caught.value.where, caught.value.found) == ("rank 1", "the disk is gone")
        assert isinstance(caught.value, PeerError)
        assert "--resume" in caught.value.remedy


def test_a_store_that_is_gone_is_one_message_and_hides_no_other() -> None:
    class Gone(HashStore):
        def check(self, *_: object) -> bool:
            raise DistNetworkError("Connection reset by peer\nlong story")

        add = set = get = check  # type: ignore[assignment]

    group = ProcessGroup(Gone(), 1, 2)
    for call in (lambda: group.receive("x"), lambda: next(group.take_next([1])), lambda: group.send("x", 1)):
        with pytest.raises(OutputError, match="lost each other") as caught:
            call()
        assert caught.value.found == "Connection reset by peer"
    group.fail(ValueError("what really happened"))  # and is raised after this


def test_only_torchrun_makes_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers leave a rank and a world size in shells, too: nobody may wait there for others."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert (is_distributed(), is_rank_zero(), local_rank()) == (False, True, (0, 1))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (is_distributed(), is_rank_zero(), local_rank()) == (True, False, (1, 4))


def test_what_was_finished_arrives_whole() -> None:
    store = HashStore()
    entry = JournalEntry("block", [FileRecord("a", 3, "ab")], {"w1": {"relative_error": 0.1}})
    ProcessGroup(store, 1, 3).send_finished([entry])
    ProcessGroup(store, 2, 3).send_finished([])
    assert list(ProcessGroup(store, 0, 3).receive_finished()) == [(1, entry)]


# --- journals ----------------------------------------------------------------------------------------------


IDENTITY: dict[str, Any] = {"hqconv version": "1"}


def unfinished(root: Path) -> JournalEntry:
    """A folder that rank 0 began, and in which rank 1 finished a group."""
    with OutputFolder(root, IDENTITY, ["a.safetensors"]) as folder:
        folder.start(100)
        with MemberFolder(root, 1) as share:
            (root / "a.safetensors").write_bytes(b"abc")
            digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
            entry = JournalEntry("a", [FileRecord("a.safetensors", 3, digest)], {})
            share.record(entry)
    return entry


def test_the_journals_of_the_others_are_taken_over_once(tmp_path: Path) -> None:
    entry = unfinished(tmp_path)
    for _ in range(2):
        with OutputFolder(tmp_path, IDENTITY, ["a.safetensors"]) as folder:
            folder.start(100, resume=True)
            assert folder.done == {"a": entry}
        assert not (tmp_path / member_journal(1)).exists()
    journal = Journal(tmp_path)
    journal.close()
    assert journal.entries == [entry]


def test_starting_anew_forgets_what_the_others_did(tmp_path: Path) -> None:
    unfinished(tmp_path)
    with OutputFolder(tmp_path, IDENTITY, ["a.safetensors"]) as folder:
        folder.start(100, overwrite=True)
        assert not folder.done
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]


def test_a_process_that_is_still_at_work_keeps_the_folder(tmp_path: Path) -> None:
    unfinished(tmp_path)
    still = Journal(tmp_path, member_journal(1))
    with (
        pytest.raises(OutputError, match="Another process is at work"),
        OutputFolder(tmp_path, IDENTITY, ["a.safetensors"]) as folder,
    ):
        folder.start(100, resume=True)
    still.close()
    with OutputFolder(tmp_path, IDENTITY, ["a.safetensors"]) as folder:
        folder.start(100, resume=True)
        assert folder.done


def test_a_journal_of_another_conversion_is_not_taken_over(tmp_path: Path) -> None:
    unfinished(tmp_path)
    (tmp_path / member_journal(1)).rename(tmp_path / "lines")
    with closing(Journal(tmp_path, member_journal(1))) as other:
        other.begin({**IDENTITY, "version": "2"})
    lines = (tmp_path / "lines").read_bytes().split(b"\n", 1)
    (tmp_path / "lines").unlink()
    with (tmp_path / member_journal(1)).open("ab") as file:
        file.write(lines[1])
    with OutputFolder(tmp_path, IDENTITY, ["a.safetensors"]) as folder:
        folder.start(100, resume=True)
        assert not folder.done
