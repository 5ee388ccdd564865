"""Stops the real command at random moments, its first included, and checks what it says and that it can go on.

    python scripts/torture_signals.py [--count 300] [--seed 0] [--work FOLDER]

Each run is a process of its own: SIGINT, SIGTERM or SIGHUP after a random part of the time that an undisturbed run
takes; it starts anew, replaces an artifact, or goes on with what was stopped before. It must end within two seconds
with 130, 143 or 129 and one line that is true, and a run that is not stopped must then give the undisturbed bytes. A
signal that comes before hqconv's first line is Python's, and counted apart. Prints counts as JSON; exit code 1 on a
failure.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.stopping import Ended, environment, is_begun, problem_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OPTIONS = ("--target", "sm90", "--device", "cpu", "--tp", "2", "--threads", "2")


class Torture:
    """Conversions of one model to one place, stopped at random."""

    def __init__(self, work: Path, seed: int) -> None:
        self.src = write_qwen3_moe(work / "model", num_layers=8, num_experts=8)
        self.old, self.out = work / "old", work / "place" / "out"
        self.draw, self.counts, self.slowest_s = random.Random(seed), Counter[str](), 0.0
        self.convert(work / "new")
        self.seconds = self.convert(work / "new", "--overwrite").seconds
        self.convert(self.old, schema="int8")
        self.new = read_tree(work / "new")

    def convert(
        self, out: Path, *mode: str, schema: str = "mxfp4", number: int = 0, seconds: float = 0.0
    ) -> Ended:
        """`hqconv convert` in a process of its own, which is sent signal `number` (0: none) after so many seconds."""
        words = ["convert", str(self.src), "-o", str(out), "--schema", schema, *OPTIONS, *mode]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        begun = time.monotonic()
        # Shells start background jobs without SIGINT.
        process = subprocess.Popen(
            [sys.executable, "-m", "hqconv", *words],
            env=environment(),
            preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in SIGNALS] and None,
            **pipes,
        )
        if number:
            time.sleep(seconds)
            process.send_signal(number)
        sent = time.monotonic()
        said = process.communicate()
        now = time.monotonic()
        return Ended(process.returncode, now - sent, now - begun, *said)

    def once(self) -> str:
        """One place, stopped up to three times, then finished: what was wrong, "" for nothing."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir()
        old = None
        if self.draw.random() < 0.5:
            shutil.copytree(self.old, self.out)
            old = read_tree(self.old)
        for _ in range(self.draw.randint(1, 3)):
            problem = self._stopped(self._mode(old), old)
            if problem or read_tree(self.out) == self.new:
                return problem
        done = self.convert(self.out, *self._mode(old))
        self.counts["finished afterwards"] += 1
        if done.code or read_tree(self.out.parent) != {
            f"out/{name}": data for name, data in self.new.items()
        }:
            return f"it could not be finished: exit {done.code} {done.stderr}"
        return ""

    def _mode(self, old: dict[str, bytes] | None) -> tuple[str, ...]:
        return ("--resume",) if is_begun(self.out) else ("--overwrite",) if old else ()

    def _stopped(self, mode: tuple[str, ...], old: dict[str, bytes] | None) -> str:
        number, seconds = self.draw.choice(SIGNALS), self.draw.uniform(0, self.seconds)
        before = read_tree(self.out.parent)
        ended = self.convert(self.out, *mode, number=number, seconds=seconds)
        if ended.code == -number or (number == signal.SIGINT and _is_of_python(ended.stderr)):
            self.counts["before hqconv's first line"] += 1
            return ""
        self.counts[f"exit {ended.code}"] += 1
        self.slowest_s = max(self.slowest_s, ended.seconds_after if ended.code else 0.0)
        problem = problem_of(ended, number, self.out, self.new, old, before)
        return problem and f"{number.name} after {seconds:.3f} s, {' '.join(mode)}: {problem}"


def _is_of_python(said: str) -> bool:
    """A traceback of the interpreter's own start."""
    return said.rstrip().endswith(("KeyboardInterrupt", "<no Python frame>")) and "hqconv/cli/app" not in said


def main() -> int:
    """Run, count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="signals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    problems: list[str] = []
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        torture = Torture(Path(name), options.seed)
        while sum(torture.counts.values()) - torture.counts["finished afterwards"] < options.count:
            if problem := torture.once():
                problems.append(problem)
                print(problem, file=sys.stderr, flush=True)
    words = {"seed": options.seed, **torture.counts, "slowest_seconds": round(torture.slowest_s, 2)}
    print(json.dumps({**words, "problems": problems}, indent=2))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
