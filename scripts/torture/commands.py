"""Commands of hqconv that are killed, starved or stopped at a chosen moment, some hundred in a minute."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.make.places import REPO

HANG = -1000  # the exit code of what did not end in time
COUNT, KILL_BEFORE, KILL_WITHIN, KILL_AFTER, FAIL, FAIL_ON, SHORT = range(7)  # as in calls.c


@dataclass(frozen=True)
class Watch:
    """What happens to the `number`-th call on files below a folder; with `looks` those that change nothing count too,
    and those below `source`. no_exchange: folders cannot change places at once.
    """

    below: Path
    number: int = 0
    how: int = COUNT
    error: int = 0
    looks: bool = False
    source: Path | None = None
    no_exchange: bool = False


@dataclass(frozen=True)
class Job:
    """A command, and what happens to it: a watched call, limits, a signal after some seconds, the end."""

    arguments: tuple[str, ...]
    watch: Watch | None = None
    limits: dict[str, int] = field(default_factory=dict)
    signal: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ended:
    """How a command ended. call: the watched call that was chosen, and its path."""

    code: int
    stdout: str
    stderr: str
    call: str
    num_calls: int


class Zygote:
    """The process that forks. `work`: a folder of its own. `in_mounts`: it can put file systems in place."""

    def __init__(self, work: Path, model: Path, *, in_mounts: bool = False) -> None:
        self._work = work / "said"
        self._work.mkdir(exist_ok=True)
        library = build_calls(work)
        command = [sys.executable, "-m", "scripts.torture.zygote", str(model)]
        self._process = subprocess.Popen(
            (["unshare", "-rm"] if in_mounts else []) + command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env=_environment(LD_PRELOAD=str(library), OMP_NUM_THREADS="1"),
        )
        if self._hear() != "ready\n":
            raise RuntimeError("the process that runs commands did not start")

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _say(self, words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words, default=str) + "\n")
        self._process.stdin.flush()

    def seen(self, path: Path) -> Path:
        """A path as this process sees it: it has mounts of its own."""
        return Path(f"/proc/{self._process.pid}/root{path}")

    def mount(self, place: Path, size_bytes: int) -> None:
        """Put an empty file system of that size there. Raises RuntimeError where that is not allowed."""
        self._say({"mount": str(place), "size": size_bytes})
        if json.loads(self._hear()) is not True:
            raise RuntimeError("file systems cannot be put in place here: it needs `unshare -rm`")

    def begin(self, *jobs: Job) -> None:
        """Start commands; `end` waits for them."""
        words = []
        for number, job in enumerate(jobs):
            for old in self._work.glob(f"{number}.*"):
                old.unlink()
            words.append({**asdict(job), "said": self._work / str(number)})
        self._say(words)

    def end(self) -> list[Ended]:
        """How they ended, in their order."""
        answer = self._hear()
        if not answer:
            raise RuntimeError("the process that runs commands is gone")
        return [self._ended(number, code) for number, code in enumerate(json.loads(answer))]

    def run(self, *jobs: Job) -> list[Ended]:
        """Run commands at the same time."""
        self.begin(*jobs)
        return self.end()

    def _ended(self, number: int, code: int) -> Ended:
        def text(name: str) -> str:
            path = self._work / f"{number}.{name}"
            return path.read_text(errors="replace") if path.exists() else ""

        count = int(text("count") or 0)
        return Ended(code, text("stdout"), text("stderr"), text("note").rpartition(" ")[0], count)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def _environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "HQCONV_DEBUG"}
    return {**kept, "PYTHONPATH": str(REPO), **more}


def build_calls(work: Path) -> Path:
    """Compile `calls.c`, with which calls are watched. Raises RuntimeError where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("a C compiler (cc) is needed to watch system calls")
    library = work / "calls.so"
    source = Path(__file__).with_name("calls.c")
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library
