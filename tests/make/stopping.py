"""The command in processes that are sent a signal at a chosen moment, and whether what they say then is true."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from hqconv.__main__ import MESSAGE
from hqconv.conversion.output_folder import side_folder
from hqconv.schemas.artifact_names import JOURNAL, MANIFEST
from tests.make.places import REPO
from tests.make.qwen import read_tree

_PROGRESS_LINE = re.compile(r"[\d.:]+( s)?  [\d.]+ [kMGT]?B of [\d.]+ [kMGT]?B  ")

# One process imports everything once; each command runs in a fork of it, with signals as it takes them at its start.
DRIVER = """
import json, os, signal, sys, tempfile, time
from pathlib import Path
import hqconv.cli.app, hqconv.cli.render
from hqconv.humming_ops.runtime import humming
from hqconv.__main__ import MESSAGE, SIGNALS, listen, run as run_command
from hqconv.schemas.grid import Grid
from tests.make.conversions import run

def command(arguments, go):
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    sys.argv = ["hqconv", *arguments]
    code = 1
    try:
        listen()
        os.write(go, b"x")
        code = run_command()
    except SystemExit as end:  # a signal just before the command
        code = end.code
        print(MESSAGE, file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)

humming()
with tempfile.TemporaryDirectory() as folder:  # loads what is compiled, once for all children
    run(Path(sys.argv[1]), Path(folder) / "warm", "mxfp4", Grid(2))
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        command(job["arguments"], go)
    os.read(ready, 1)
    os.close(ready)
    os.close(go)
    begun = time.monotonic()
    if job["number"]:
        time.sleep(job["seconds"])
        os.kill(child, job["number"])
    sent = time.monotonic()
    _, status = os.waitpid(child, 0)
    now = time.monotonic()
    print(json.dumps([os.waitstatus_to_exitcode(status), now - sent, now - begun]), flush=True)
"""


def environment(**more: str) -> dict[str, str]:
    """A command's, as users have it."""
    kept = {key: value for key, value in os.environ.items() if key != "HQCONV_DEBUG"}
    return {**kept, "PYTHONPATH": str(REPO), **more}


@dataclass(frozen=True)
class Ended:
    """How a command ended. seconds_after: since its signal; seconds: since its start."""

    code: int
    seconds_after: float
    seconds: float
    stdout: str
    stderr: str


class Commands:
    """Runs commands in forks of a process that imported everything once. `work` is theirs to write their output to."""

    def __init__(self, src: Path, work: Path) -> None:
        self._work = work
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(src)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=work,
            env=environment(OMP_NUM_THREADS="1"),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def run(self, *arguments: object, number: int = 0, seconds: float = 0.0) -> Ended:
        """The command, which is sent signal `number` (0: none) after so many seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"arguments": [*map(str, arguments)], "number": int(number), "seconds": seconds}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        code, after, whole = json.loads(self.process.stdout.readline())
        said = [(self._work / name).read_text() for name in ("stdout", "stderr")]
        return Ended(code, after, whole, *said)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def without_progress(stderr: str) -> str:
    """stderr without progress lines: a busy machine shows some, because one is due every five seconds."""
    return "".join(
        line for line in stderr.splitlines(keepends=True) if not _PROGRESS_LINE.match(line)
    )


def problem_of(
    ended: Ended, number: Signals, out: Path, new: dict[str, bytes], old: dict[str, bytes] | None
) -> str:
    """What is wrong about a conversion that was sent a signal, "" for nothing.

    new: the artifact that it makes. old: the one that it replaces, if any.
    """
    lines = without_progress(ended.stderr).splitlines()
    if ended.seconds_after >= 60:  # a hang guard
        return f"it took {ended.seconds_after:.1f} s"
    if ended.code == 0:
        return "" if lines == [] and read_tree(out) == new else "exit 0 without the whole artifact"
    if ended.code != 128 + number or ended.stdout.count("{") != ended.stdout.count("}"):
        return f"exit {ended.code}: {ended.stderr}"
    if lines != [MESSAGE]:
        return f"not one line: {ended.stderr!r}"
    found = {name: data for name, data in read_tree(out).items() if name != JOURNAL}
    return (
        ""
        if MANIFEST not in found or found in (new, old)
        else "what is unfinished passes for an artifact"
    )


def is_begun(out: Path, new: dict[str, bytes]) -> bool:
    """Whether there is something that `--resume` goes on with, or, beside the finished artifact `new`, tidies up."""
    side = side_folder(out)
    return (
        (out / JOURNAL).exists()
        or (side / JOURNAL).exists()
        or (side.exists() and read_tree(out) == new)
    )
