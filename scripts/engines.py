"""vLLM engines in processes of their own, one after the other, several at once, or in turns: for check_serving.py
and bench_serving.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 240.0  # no start takes longer
TURN_S = 90.0  # nor a turn
READY, GO = "ready", "go"  # files by which engines take turns
SCRIPT = Path(__file__).with_name("serve_once.py")
THREADS = {"OMP_NUM_THREADS": "2"}  # engines that start beside each other would wait for each other's


@dataclass
class Engine:
    """One engine to start: a name for the report, the folder, arguments of the script (serve_once.py), variables."""

    name: str
    model: Path
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    script: Path = SCRIPT

    def run(self) -> dict[str, Any]:
        """Start it, and return what it reports; the last lines of its log where it fails."""
        with tempfile.TemporaryDirectory() as scratch:
            return Started(self, Path(scratch)).end(START_S)


class Started:
    """An engine in a process of its own. scratch: folder for its log and its report."""

    def __init__(self, engine: Engine, scratch: Path) -> None:
        self.engine, self.scratch = engine, scratch
        self._report, self._log = scratch / "report.json", scratch / "log"
        command = [sys.executable, str(engine.script), str(engine.model), str(self._report), *engine.arguments]
        environment = {**os.environ, **THREADS, **engine.variables}
        self._begun = time.perf_counter()
        with self._log.open("wb") as out:  # no pipe: workers that outlive their parent would keep it open
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    @property
    def is_waiting(self) -> bool:
        """True if the engine is ready for its turn."""
        return self._process.poll() is None and (self.scratch / READY).exists()

    @property
    def has_ended(self) -> bool:
        """True if the process is gone."""
        return self._process.poll() is not None

    def end(self, within_s: float) -> dict[str, Any]:
        """Return the report, once the process has ended or the time is over; then nothing of it is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        seconds = time.perf_counter() - self._begun
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        if not self._report.is_file():
            errors = [line for line in lines if "Error" in line][-6:]
            return {"failed": [f"after {seconds:.0f} s", *(errors or lines[-12:])]}
        told = [line.partition("] ")[2] for line in lines]
        said = [x for x in told if x.startswith(("Experts: ", "Model loading took", "Loading weights", "Using "))]
        profile = lines[_profile_at(lines) :][:60]
        found: dict[str, Any] = json.loads(self._report.read_text(encoding="utf-8"))
        return {**found, "said": said, "process_s": seconds, "profile": profile}


def run_in_turns(
    engines: Sequence[Engine], jobs: int, prepare: Callable[[Engine], None]
) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """What each engine reports: `jobs` of them start beside each other, and then each works while the others wait.

    Their script writes READY into its report's folder, waits for GO there, and then works. prepare: makes an engine's
    model; for the next engines while these start. An exception of it is the engine's report.
    """
    groups = [engines[n : n + jobs] for n in range(0, len(engines), jobs)]
    failed = _prepared(groups[0], prepare) if groups else {}
    for number, group in enumerate(groups):
        with tempfile.TemporaryDirectory() as scratch:
            alive = [engine for engine in group if engine.name not in failed]
            started = []
            for n, engine in enumerate(alive):
                (folder := Path(scratch, str(n))).mkdir()
                started.append(Started(engine, folder))
            yield from ((engine, failed[engine.name]) for engine in group if engine.name in failed)
            failed = _prepared(groups[number + 1], prepare) if number + 1 < len(groups) else {}
            end = time.monotonic() + START_S
            while time.monotonic() < end and not all(one.is_waiting or one.has_ended for one in started):
                time.sleep(0.1)
            late = [one for one in started if not one.is_waiting]
            for one in [*late, *(one for one in started if one not in late)]:  # the late would disturb the others
                (one.scratch / GO).touch()
                yield one.engine, one.end(TURN_S if one not in late else 0)


def _prepared(engines: Sequence[Engine], prepare: Callable[[Engine], None]) -> dict[str, dict[str, Any]]:
    """Reports of those that could not be prepared, by name."""
    failed = {}
    for engine in engines:
        try:
            prepare(engine)
        except Exception as error:  # noqa: BLE001 - a row of the table
            failed[engine.name] = {"failed": [f"{type(error).__name__}: {error}"]}
    return failed


def take_plugin(work: Path, module: str) -> None:
    """Have all engines that this process starts run `register` of a module of scripts, as a plugin of vLLM."""
    os.environ |= plugin_variables(work, module)


def plugin_variables(work: Path, module: str) -> dict[str, str]:
    """Environment of one engine that runs `register` of a module of scripts, as a plugin of vLLM."""
    root, found = Path(__file__).resolve().parents[1], os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(map(str, (install_plugin(work / module, module), root, found)))}


def install_plugin(folder: Path, module: str) -> Path:
    """Write what makes vLLM find a plugin; the folder belongs into PYTHONPATH."""
    place = folder / f"{module}-0.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    name = module.replace("_", "-")
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n", encoding="ascii")
    entry = f"[vllm.general_plugins]\n{module} = scripts.{module}:register\n"
    (place / "entry_points.txt").write_text(entry, encoding="ascii")
    return folder


def run_all(engines: Iterable[Engine], jobs: int) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """What each engine reports, as it ends, `jobs` of them at once."""
    with ThreadPoolExecutor(jobs) as pool:
        waited = {pool.submit(engine.run): engine for engine in engines}
        for one in as_completed(waited):
            yield waited[one], one.result()


def _profile_at(lines: list[str]) -> int:
    return next((n for n, line in enumerate(lines) if "function calls" in line), len(lines))
