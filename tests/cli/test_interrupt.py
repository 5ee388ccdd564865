"""Stop means stop: any signal, at any moment, ends the command at once; nothing half-written passes for an artifact."""

from __future__ import annotations

import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, Signals

import pytest

from hqconv.cli.interrupt import MESSAGE, SIGNALS
from hqconv.conversion.output_folder import side_folder
from tests.make.places import REPO
from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.stopping import Commands, environment, is_begun, problem_of, without_progress

NUM_MOMENTS = int(os.environ.get("HQCONV_NUM_MOMENTS", "6"))  # for each signal
OPTIONS = (
    "--schema",
    "mxfp4",
    "--target",
    "sm90",
    "--device",
    "cpu",
    "--tp",
    "2",
    "--threads",
    "2",
)
LINE = f"{MESSAGE}\n"
HANG_S = 60.0  # a hang guard, not a measured time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "model", num_layers=8, num_experts=8)


@pytest.fixture(scope="module")
def commands(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    made = Commands(model, tmp_path_factory.mktemp("commands"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(
    model: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, float]:
    """An undisturbed artifact, and the seconds that it takes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    for mode in ((), ("--overwrite",)):
        done = commands.run("convert", model, "-o", out, *OPTIONS, *mode)
        assert done.code == 0, done.stderr
    return out, done.seconds


@pytest.fixture(scope="module")
def older(model: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another artifact, to be replaced."""
    out = tmp_path_factory.mktemp("older") / "out"
    assert commands.run("convert", model, "-o", out, *OPTIONS, "--schema", "int8").code == 0
    return out


# --- conversions -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_conversion_stops_at_any_moment_and_can_be_resumed(
    number: Signals,
    model: Path,
    commands: Commands,
    whole: tuple[Path, float],
    older: Path,
    tmp_path: Path,
) -> None:
    """Every other one replaces an artifact, and every third is stopped again when it goes on."""
    new, seconds = read_tree(whole[0]), whole[1]
    draw, num_stopped, out = random.Random(f"stop {number}"), 0, tmp_path / "out"
    for moment in range(NUM_MOMENTS):
        shutil.rmtree(out, ignore_errors=True)
        old = read_tree(older) if moment % 2 else None
        if old is not None:
            shutil.copytree(older, out)
        modes = [("--overwrite",) if old else ()] + [("--resume",)] * (moment % 3 == 0)
        for mode in modes:
            if mode == ("--resume",) and not is_begun(out, new):
                continue
            at = draw.uniform(0, seconds)
            ended = commands.run(
                "convert", model, "-o", out, *OPTIONS, *mode, number=number, seconds=at
            )
            problem = problem_of(ended, number, out, new, old)
            assert problem == "", f"moment {moment}, at {at:.3f} s, {mode}"
            num_stopped += ended.code != 0
            seconds = seconds if ended.code else ended.seconds
        mode = ("--resume",) if is_begun(out, new) else ("--overwrite",) if old else ()
        if read_tree(out) != new or side_folder(out).exists():
            again = commands.run("convert", model, "-o", out, *OPTIONS, *mode)
            assert again.code == 0, again.stderr
        assert read_tree(out) == new
        assert os.listdir(tmp_path) == ["out"]  # noqa: PTH208
    assert num_stopped >= NUM_MOMENTS / 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_verification_stops(
    number: Signals, model: Path, commands: Commands, whole: tuple[Path, float]
) -> None:
    asked = ("verify", whole[0], "--source", model, "--device", "cpu", "--threads", "2")
    draw, seconds, num_stopped = random.Random(f"verify {number}"), commands.run(*asked).seconds, 0
    for _ in range(9):
        ended = commands.run(*asked, number=number, seconds=draw.uniform(0, 0.9 * seconds))
        assert ended.seconds_after < HANG_S
        if ended.code == 0:  # quicker this time, and done already
            assert ended.stdout.endswith("kernel\n")
            seconds = ended.seconds - ended.seconds_after
            continue
        assert (ended.code, without_progress(ended.stderr)) == (128 + number, LINE)
        assert ended.stdout == "" or ended.stdout.startswith(
            "files    PASS"
        )  # the results were being printed
        num_stopped += 1
        if num_stopped == 3:
            return
    raise AssertionError("it was stopped less than three times in nine")


# --- the start of a process --------------------------------------------------------------------------------


def default_signals() -> None:
    """Shells start background jobs without SIGINT."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def start(*words: object, **streams: object) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, *map(str, words)],
        env=environment(),
        text=True,
        cwd=REPO,
        preexec_fn=default_signals,
        **streams,
    )


def wait_until_it_listens(process: subprocess.Popen[str], deadline_s: float = HANG_S) -> None:
    """SigCgt of /proc is the set of signals that have a handler."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(status.split("SigCgt:")[1].split()[0], 16) >> (SIGHUP - 1) & 1:
            return
        assert process.poll() is None
        time.sleep(0.001)
    raise AssertionError("it does not listen")


def stopped(
    process: subprocess.Popen[str], number: Signals, seconds: float = 0.0
) -> tuple[int, str, str]:
    """Send a signal so long after the process began to listen: exit code and streams."""
    wait_until_it_listens(process)
    time.sleep(seconds)
    process.send_signal(number)
    sent = time.monotonic()
    out, error = process.communicate(timeout=HANG_S)
    assert time.monotonic() - sent < HANG_S
    return process.returncode, out, error


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_start_of_a_command_can_be_stopped(
    number: Signals, model: Path, tmp_path: Path
) -> None:
    draw, out = random.Random(f"start {number}"), tmp_path / "out"
    for most in (0.0, 0.05, 0.2, 0.6):
        process = start("-m", "hqconv", "convert", model, "-o", out, *OPTIONS)
        assert stopped(process, number, draw.uniform(0, most)) == (128 + number, "", LINE)
        assert not out.exists()


def test_nothing_is_loaded_before_signals_are_heard() -> None:
    code = "import sys\nbefore = {*sys.modules}\nimport hqconv.__main__\nprint(*{*sys.modules} - before)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO
    )
    ours = {name for name in loaded.stdout.split() if name.startswith("hqconv")}
    assert ours == {*("hqconv", "hqconv.__main__", "hqconv.cli", "hqconv.cli.interrupt")}
    assert not {"typer", "rich", "dataclasses", "json", "inspect"} & {*loaded.stdout.split()}


# --- whatever a process is at ------------------------------------------------------------------------------

AT_WORK = {
    "a compiled loop in the main thread": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'x', b'y', (1 << 31) - 1)",
    "what catches everything": """
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
""",
    "threads": """
import hashlib, threading
threads = [threading.Thread(target=hashlib.pbkdf2_hmac, args=('sha256', b'x', b'y', (1 << 31) - 1)) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
    "deep recursion": """
def deeper(n):
    return deeper(n + 1) if n < 900 else [time.sleep(0.001) for _ in range(60000)]
deeper(0)
""",
    "a handler at the end": "import atexit; atexit.register(time.sleep, 60)",
}
LISTEN = "import time\nfrom hqconv.cli import interrupt\ninterrupt.listen()\n"


@pytest.mark.parametrize("work", AT_WORK)
def test_whatever_it_is_at(work: str) -> None:
    for number in (SIGINT, SIGTERM):
        assert stopped(start("-c", LISTEN + AT_WORK[work]), number, 0.05) == (
            128 + number,
            "",
            LINE,
        )


def test_two_signals_are_one_stop() -> None:
    process = start("-c", LISTEN + "time.sleep(60)")
    wait_until_it_listens(process)
    for _ in range(20):
        process.send_signal(SIGTERM)
        process.send_signal(SIGINT)
    _, error = process.communicate(timeout=HANG_S)
    assert (process.returncode in (130, 143), error) == (True, LINE)


def test_what_it_had_started_ends_too() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    process = start("-c", LISTEN + code)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert stopped(process, SIGTERM)[0] == 143
    end = time.monotonic() + HANG_S
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_fork_does_not_stop_its_parent() -> None:
    code = """
import os, signal
child = os.fork()
if child == 0:
    time.sleep(60)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
time.sleep(0.2)
"""
    out, error = start("-c", LISTEN + code).communicate(timeout=HANG_S)
    assert (out, error) == ("-15\n", "")


def test_ignored_signals_stay_ignored() -> None:
    """`nohup`, and jobs in the background of a script."""
    code = f"import os, signal; signal.signal(1, signal.SIG_IGN)\n{LISTEN}os.kill(os.getpid(), 1); print('on')"
    out, _ = start("-c", code).communicate(timeout=HANG_S)
    assert out == "on\n"


def test_nobody_who_reads_is_no_reason_to_stay() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    process = start("-c", LISTEN + "time.sleep(60)", stderr=writer)
    assert stopped(process, SIGTERM)[0] == 143
    os.close(reader)
    os.close(writer)


def test_a_terminal_gets_its_cursor_back() -> None:
    primary, secondary = pty.openpty()
    code = "import os\nfrom hqconv.cli.progress_bar import ShownProgress\n"
    code += "with ShownProgress(quiet=False):\n    os.write(1, b'go\\n')\n    time.sleep(60)"
    process = start("-c", LISTEN + code, stderr=secondary)
    os.close(secondary)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    assert stopped(process, SIGINT)[0] == 130
    seen = b""
    try:
        while chunk := os.read(primary, 65536):
            seen += chunk
    except OSError:  # EIO: the other side is closed and everything was read
        os.close(primary)
    assert b"\x1b[?25l" in seen  # it was hidden
    assert seen.endswith(f"\r\x1b[2K\x1b[?25h{MESSAGE}\r\n".encode())
