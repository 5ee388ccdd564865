"""Signals at any moment: one sentence, the signal's exit code, and nothing half-written that passes for an artifact."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT, Signals

import pytest

from hqconv.__main__ import MESSAGE, SIGNALS
from hqconv.conversion.output_folder import side_folder
from tests.make.places import REPO
from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.stopping import Commands, environment, is_begun, problem_of, without_progress

NUM_MOMENTS = int(os.environ.get("HQCONV_NUM_MOMENTS", "6"))  # for each signal
OPTIONS = ("--schema=mxfp4", "--target=sm90", "--device=cpu", "--tp=2", "--threads=2")
LINE = f"{MESSAGE}\n"
HANG_S = 60.0  # a hang guard, not a measured time
each_signal = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)


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
    done = commands.run("convert", model, "-o", out, *OPTIONS)
    assert done.code == 0, done.stderr
    return out, done.seconds


@pytest.mark.full
@each_signal
def test_a_conversion_stops_at_any_moment_and_can_be_resumed(
    number: Signals, model: Path, commands: Commands, whole: tuple[Path, float], tmp_path: Path
) -> None:
    """Every other one replaces an artifact."""
    new, seconds = read_tree(whole[0]), whole[1]
    draw, num_stopped, out = random.Random(f"stop {number}"), 0, tmp_path / "out"
    convert = ("convert", model, "-o", out, *OPTIONS)
    for moment in range(NUM_MOMENTS):
        shutil.rmtree(out, ignore_errors=True)
        old = None
        if moment % 2:
            assert commands.run(*convert, "--schema", "int8").code == 0
            old = read_tree(out)
        at = draw.uniform(0, seconds)
        mode = ("--overwrite",) if old else ()
        ended = commands.run(*convert, *mode, number=number, seconds=at)
        assert problem_of(ended, number, out, new, old) == "", f"moment {moment}, at {at:.3f} s"
        num_stopped += ended.code != 0
        seconds = seconds if ended.code else ended.seconds
        mode = ("--resume",) if is_begun(out, new) else mode
        if read_tree(out) != new or side_folder(out).exists():
            again = commands.run(*convert, *mode)
            assert again.code == 0, again.stderr
        assert read_tree(out) == new
        assert os.listdir(tmp_path) == ["out"]  # noqa: PTH208
    assert num_stopped >= NUM_MOMENTS / 3


@pytest.mark.sampled(3)
@each_signal
def test_a_verification_stops(
    number: Signals, model: Path, commands: Commands, whole: tuple[Path, float]
) -> None:
    command = ("verify", whole[0], "--source", model, "--device", "cpu", "--threads", "2")
    draw, seconds, codes = random.Random(f"verify {number}"), commands.run(*command).seconds, set()
    for _ in range(6):
        ended = commands.run(*command, number=number, seconds=draw.uniform(0, 0.7 * seconds))
        codes.add(ended.code)
        if ended.code:  # else it was quicker this time, and done already
            assert without_progress(ended.stderr) == LINE
    assert codes in ({128 + number}, {128 + number, 0})


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


def stopped(
    process: subprocess.Popen[str], number: Signals, seconds: float = 0.0
) -> tuple[int, str, str]:
    """Send a signal so long after the process began to listen: exit code and streams."""
    end = time.monotonic() + HANG_S
    while True:  # SigCgt of /proc is the set of signals that have a handler
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(status.split("SigCgt:")[1].split()[0], 16) >> (SIGHUP - 1) & 1:
            break
        assert process.poll() is None
        assert time.monotonic() < end, "it does not listen"
        time.sleep(0.001)
    time.sleep(seconds)
    process.send_signal(number)
    out, error = process.communicate(timeout=HANG_S)
    return process.returncode, out, error


@each_signal
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
    assert "hqconv.cli.app" not in ours
    assert not {"typer", "rich", "dataclasses", "json", "inspect"} & {*loaded.stdout.split()}


# `run` with another command in the place of hqconv's.
AS_COMMAND = """
import os, sys, time, types
from hqconv.__main__ import main

def work():
{}

sys.modules["hqconv.cli.app"] = types.SimpleNamespace(main=work)
main()
"""


def test_what_a_command_had_begun_is_cleaned_up_and_the_second_signal_is_the_last() -> None:
    tidy = "    try:\n        time.sleep(600)\n    finally:\n        print('tidy', flush=True)"
    assert stopped(start("-c", AS_COMMAND.format(tidy)), SIGINT, 0.3) == (130, "tidy\n", LINE)
    slow = tidy + "\n        time.sleep(600)"
    process = start("-c", AS_COMMAND.format(slow))
    assert process.stdout is not None
    time.sleep(0.5)
    process.send_signal(SIGINT)
    assert process.stdout.readline() == "tidy\n"
    assert stopped(process, SIGINT)[0] == -SIGINT


def test_a_lost_signal_is_raised_again(tmp_path: Path) -> None:
    """humming drops every exception while it asks nvcc its version; in an import C++ may abort."""
    lost = "import time\ntry:\n    time.sleep(600)\nexcept BaseException:\n    pass\n"
    (tmp_path / "lost.py").write_text(lost)
    tidy = "    try:\n        time.sleep(600)\n    finally:\n        time.sleep(1.2)\n        print('tidy')"
    code = AS_COMMAND.format(f"    exec({lost!r})\n{tidy}")
    assert stopped(start("-c", code), SIGINT, 0.3) == (130, "tidy\n", LINE)
    code = AS_COMMAND.format(f"    sys.path.append({str(tmp_path)!r})\n    import lost\n{tidy}")
    assert stopped(start("-c", code), SIGINT, 0.3) == (130, "", LINE)


def test_ignored_signals_stay_ignored() -> None:
    """`nohup`, and jobs in the background of a script."""
    code = "import os, signal; signal.signal(1, signal.SIG_IGN)\n"
    code += AS_COMMAND.format("    os.kill(os.getpid(), 1); print('on')")
    out, _ = start("-c", code).communicate(timeout=HANG_S)
    assert out == "on\n"
