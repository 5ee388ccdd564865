"""vLLM engines in processes of their own, one after the other or several at once: for check_serving.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 240.0  # no start takes longer
SCRIPT = Path(__file__).with_name("serve_once.py")
THREADS = {"OMP_NUM_THREADS": "2"}  # engines that start beside each other would wait for each other's


@dataclass
class Engine:
    """One engine to start: a name for the report, the folder, arguments of serve_once.py, variables."""

    name: str
    model: Path
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Start it, and return what it reports; the last lines of its log where it fails."""
        with tempfile.TemporaryDirectory() as scratch:
            report, log = Path(scratch, "report.json"), Path(scratch, "log")
            command = [sys.executable, str(SCRIPT), str(self.model), str(report), *self.arguments]
            environment = {**os.environ, **THREADS, **self.variables}
            begun = time.perf_counter()
            with log.open("wb") as out:  # no pipe: workers that outlive their parent would keep it open
                started = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(START_S)
            seconds = time.perf_counter() - begun
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            if not report.is_file():
                errors = [line for line in lines if "Error" in line][-6:]
                return {"failed": [f"after {seconds:.0f} s", *(errors or lines[-12:])]}
            told = [line.partition("] ")[2] for line in lines]
            said = [x for x in told if x.startswith(("Experts: ", "Model loading took", "Loading weights"))]
            profile = lines[_profile_at(lines) :][:60]
            found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            return {**found, "said": said, "process_s": seconds, "profile": profile}


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
