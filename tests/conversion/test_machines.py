"""Two torchrun agents with one folder stand for two machines: the same bytes, and nobody outlives a lost machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hqconv.schemas.artifact_names import JOURNAL, member_journal
from hqconv.schemas.grid import Grid
from tests.make.conversions import run
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

NUM_LAYERS = 8
HANG_S = 150.0  # a hang guard, not a measured time
# The command itself. With a folder in PACED, each rank says its process there after its first unit, and then waits.
COMMAND = """
import os, pathlib, sys, time
from hqconv.conversion import distributed, shared_folder
from hqconv.conversion.torchrun import silence_torch

silence_torch()
from hqconv.conversion import executor
from hqconv.conversion.executor import Executor

distributed._GONE_S = float(os.environ["GONE_S"])
distributed._BEAT_S = distributed._GONE_S / 15  # as in hqconv
shared_folder._VISIBLE_S = 2.0
publish, place = Executor._publish, os.environ.get("PACED")
if place:
    executor._OPEN_UNITS = 1  # or a rank takes all of these small units
def paced(self, job):
    publish(self, job)
    if place:
        path = pathlib.Path(place, os.environ["RANK"])
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        while not self._stages._is_cancelled:
            time.sleep(0.05)
Executor._publish = paced
sys.argv[0] = "hqconv"
from hqconv.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("machines") / "model", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def alone(src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The artifact of one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    run(src, out, "int4-g64", Grid(2))
    return snapshot(out)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Machine:
    """A torchrun agent, and its processes."""

    def __init__(self, words: list[str], log: Path, paced: Path | None, gone_s: float, wrap: tuple[str, ...]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment |= {"GONE_S": str(gone_s)} | ({} if paced is None else {"PACED": str(paced)})
        self._log = log
        command = [*wrap, sys.executable, "-m", "torch.distributed.run", *words]
        with log.open("w") as stderr, log.with_suffix(".out").open("w") as stdout:
            self.agent = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, cwd=REPO)

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    @property
    def stdout(self) -> str:
        return self._log.with_suffix(".out").read_text()

    @property
    def messages(self) -> list[str]:
        """First lines of the messages of hqconv."""
        return [line for line in self.stderr.splitlines() if line.startswith(("error:", "Interrupted", "internal"))]

    def processes(self) -> list[int]:
        threads = Path(f"/proc/{self.agent.pid}/task").glob("*/children")
        return [int(child) for children in threads for child in children.read_text().split()]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., tuple[Machine, Machine]]]:
    """Start two machines with one command; whatever is left of them at the end is killed."""
    started = list[Machine]()
    script = tmp_path / "command.py"
    script.write_text(COMMAND)

    def start(
        src: Path,
        out: Path,
        *options: str,
        num: int = 1,
        paced: Path | None = None,
        gone_s: float = 30.0,
        wraps: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    ) -> tuple[Machine, Machine]:
        port = free_port()
        words = ["--nnodes", "2", "--nproc-per-node", str(num), "--rdzv-backend", "c10d", "--rdzv-id", str(port)]
        words += ["--rdzv-endpoint", f"localhost:{port}", str(script), "convert", str(src), "-o", str(out), "-q"]
        words += ["--schema", "int4-g64", "--target", "sm90", "--tp", "2", "--threads", "1", "--json", *options]
        if paced is not None:
            paced.mkdir()
        for number in (0, 1):  # the first one holds torchrun's stores: ranks go by process ids
            log, own = tmp_path / f"machine-{port}-{number}.log", ["--rdzv-conf", f"is_host={1 - number}"]
            started.append(Machine([*own, *words], log, paced, gone_s, wraps[number]))
        return started[-2], started[-1]

    yield start
    for machine in started:
        left = machine.processes() if machine.agent.poll() is None else []
        for process in (machine.agent.pid, *left):
            if is_alive(process):
                os.kill(process, signal.SIGKILL)
        machine.agent.wait()


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + HANG_S
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def ranks_at_work(paced: Path, num_ranks: int) -> dict[int, int]:
    """Wait until every rank has finished a unit; their processes."""
    paths = [paced / str(rank) for rank in range(num_ranks)]
    assert wait_until(lambda: all(path.exists() for path in paths))
    return {rank: int(path.read_text()) for rank, path in enumerate(paths)}


def resume_alone(src: Path, out: Path) -> int:
    """Go on by one process; the number of units that were done before."""
    return int(run(src, out, "int4-g64", Grid(2), resume=True).num_groups_resumed)


@pytest.mark.full
def test_two_machines_make_the_same_bytes(
    machines: Callable[..., tuple[Machine, Machine]], src: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    both = machines(src, tmp_path / "out")
    for machine in both:
        assert machine.agent.wait(HANG_S) == 0, machine.stderr
    assert snapshot(tmp_path / "out") == alone
    assert sorted(machine.stdout.count('"kind": "summary"') for machine in both) == [0, 1]  # rank 0's alone


@pytest.mark.full
def test_a_lost_machine_ends_the_other_and_more_processes_go_on(
    machines: Callable[..., tuple[Machine, Machine]], src: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    """Nobody tells of a machine that lost its power: its processes give no more signs of life."""
    out = tmp_path / "out"
    both = machines(src, out, paced=tmp_path / "paced", gone_s=3.0)
    ranks = ranks_at_work(tmp_path / "paced", 2)
    left, lost = both
    assert ranks[1] in lost.processes()
    for process in (lost.agent.pid, ranks[1]):
        os.kill(process, signal.SIGKILL)
    assert wait_until(lambda: left.agent.poll() is not None)
    assert left.messages == ["error: A process of this conversion is gone."]
    assert f"where: rank 1 (process {ranks[1]} on {socket.gethostname()})" in left.stderr
    assert "[c10d]" not in left.stderr
    assert not is_alive(ranks[0])
    assert all((out / name).read_text().count('"unit"') == 1 for name in (JOURNAL, member_journal(1)))
    again = machines(src, out, "--resume", num=2)
    for machine in again:
        assert machine.agent.wait(HANG_S) == 0, machine.stderr
    assert sum(machine.stdout.count('"num_groups_resumed": 2') for machine in again) == 1
    assert snapshot(out) == alone


@pytest.mark.full
@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "agent 0", "agent 1"])
def test_whoever_is_killed_nobody_stays(
    victim: str, machines: Callable[..., tuple[Machine, Machine]], src: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    """Two processes on each machine. agent 0 holds the store; a rank is killed beside another one of its machine."""
    out = tmp_path / "out"
    both = machines(src, out, num=2, paced=tmp_path / "paced")
    ranks = ranks_at_work(tmp_path / "paced", 4)
    of_rank = {rank: next(m for m in both if process in m.processes()) for rank, process in ranks.items()}
    rank = 0 if victim.endswith("0") else 3
    machine, left = of_rank[rank], of_rank[3 - rank]
    os.kill(ranks[rank] if victim.startswith("rank") else machine.agent.pid, signal.SIGKILL)
    everybody = [*ranks.values(), *(m.agent.pid for m in both)]
    assert wait_until(lambda: [m.agent.poll() for m in both] and not any(map(is_alive, everybody)))
    assert [len(m.messages) for m in (left, machine)] == [1, 0 if victim == "rank 0" else 1], (
        left.stderr,
        machine.stderr,
    )
    assert resume_alone(src, out) == 4
    assert snapshot(out) == alone


@pytest.mark.full
def test_a_folder_of_the_same_name_on_each_machine(
    machines: Callable[..., tuple[Machine, Machine]], src: Path, tmp_path: Path
) -> None:
    """The second machine has another file system at the place of the output."""
    shared = tmp_path / "shared"
    shared.mkdir()
    mount = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {shared} && exec "$@"', "sh")
    if subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mounts here")
    both = machines(src, shared / "out", wraps=((), mount))
    for machine in both:
        assert machine.agent.wait(HANG_S) != 0
    assert all(len(machine.messages) == 1 for machine in both)
    found = "".join(machine.stderr for machine in both)
    assert "error: The processes of this conversion do not share the output folder." in found
    assert "found: no such folder" in found
    assert "error: Another process of this conversion failed." in found
    assert not (shared / "out/hqconv.json").exists()
