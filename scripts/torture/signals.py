"""Signals to the real command at random moments, its first included: SIGINT, SIGTERM, SIGHUP and SIGKILL.

Each run is a process of its own that starts anew, replaces an artifact, or goes on with what was stopped before. It
ends within two seconds with 130, 143 or 129 and one line that is true; a run that is not stopped then gives the
undisturbed bytes. A signal that comes before hqconv's first line is Python's, and counted apart.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from random import Random

from hqconv.conversion.output_folder import side_folder
from hqconv.schemas.artifact_names import JOURNAL
from scripts.torture.commands import Ended, real_command
from scripts.torture.tally import Tally
from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.stopping import Ended as Stopped
from tests.make.stopping import problem_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
_OPTIONS = ("--target", "sm90", "--device", "cpu", "--tp", "2", "--threads", "2")


def run(work: Path, count: int, tally: Tally) -> None:
    """`count` signals."""
    torture = _Torture(work, tally)
    while tally.cases < count:
        torture.once()
    tally.counts["slowest end in ms"] = round(1000 * torture.slowest_s)


class _Torture:
    """Conversions of one model to one place, stopped at random."""

    def __init__(self, work: Path, tally: Tally) -> None:
        self.src = write_qwen3_moe(work / "model", num_layers=8, num_experts=8)
        self.old, self.out = work / "old", work / "place" / "out"
        self.draw, self.tally, self.slowest_s = Random(tally.seed), tally, 0.0
        self.convert(work / "new")
        self.seconds = self.convert(work / "new", "--overwrite").seconds
        self.convert(self.old, schema="int8")
        self.new = read_tree(work / "new")

    def convert(
        self, out: Path, *mode: str, schema: str = "mxfp4", number: int = 0, seconds: float = 0.0
    ) -> Ended:
        """`hqconv convert`, which is sent signal `number` (0: none) after so many seconds."""
        words = ("convert", str(self.src), "-o", str(out), "--schema", schema, *_OPTIONS, *mode)
        return real_command(words, number, seconds)

    def once(self) -> None:
        """One place, stopped up to three times, then finished."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir()
        old = None
        if self.draw.random() < 0.5:
            shutil.copytree(self.old, self.out)
            old = read_tree(self.old)
        for _ in range(self.draw.randint(1, 3)):
            if self._stopped(self._mode(old), old) or read_tree(self.out) == self.new:
                return
        done = self.convert(self.out, *self._mode(old))
        self.tally.note("finished afterwards")
        expected = {f"out/{name}": data for name, data in self.new.items()}
        if done.code or read_tree(self.out.parent) != expected:
            self.tally.problem(f"it could not be finished: exit {done.code} {done.stderr}")

    def _mode(self, old: dict[str, bytes] | None) -> tuple[str, ...]:
        is_begun = any((folder / JOURNAL).exists() for folder in (self.out, side_folder(self.out)))
        return ("--resume",) if is_begun else ("--overwrite",) if old else ()

    def _stopped(self, mode: tuple[str, ...], old: dict[str, bytes] | None) -> bool:
        """Whether something was wrong."""
        number, seconds = self.draw.choice(_SIGNALS), self.draw.uniform(0, self.seconds)
        ended = self.convert(self.out, *mode, number=number, seconds=seconds)
        if number != signal.SIGKILL and _is_of_python(ended, number):
            self.tally.case("before hqconv's first line")
            return False
        if ended.code:
            self.slowest_s = max(self.slowest_s, ended.seconds_after)
        else:  # the machine is faster by now
            self.seconds = min(self.seconds, ended.seconds)
        if number == signal.SIGKILL:
            found = read_tree(self.out)
            is_true = "hqconv.json" not in found or _artifact(found) in (self.new, old)
            problem = (
                "" if is_true and ended.code in (0, -9) else f"exit {ended.code}, a false artifact"
            )
        else:
            stopped = Stopped(
                ended.code, ended.seconds_after, ended.seconds, ended.stdout, ended.stderr
            )
            problem = problem_of(stopped, number, self.out, self.new, old)
        self.tally.case(
            f"{number.name}, exit {ended.code}",
            problem and f"after {seconds:.3f} s, {mode}: {problem}",
        )
        return bool(problem)


def _artifact(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if not name.startswith(".")}


def _is_of_python(ended: Ended, number: signal.Signals) -> bool:
    """Ended as any program, or by a traceback of the interpreter's own start."""
    if ended.code == -number:
        return True
    is_traceback = ended.stderr.rstrip().endswith(("KeyboardInterrupt", "<no Python frame>"))
    return number == signal.SIGINT and is_traceback and "hqconv/cli/app" not in ended.stderr
