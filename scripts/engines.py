"""vLLM engines in processes of their own, one after the other or several at once: for check_serving.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

START_S = float(os.environ.get("START_S", "200"))  # no start takes longer
SCRIPT = Path(__file__).with_name("serve_once.py")


@dataclass
class Engine:
    """One engine to start: a name for the report, the folder, arguments of serve_once.py, variables."""

    name: str
    model: Path
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


class Engines:
    """A process that has imported vLLM, and forks engines: importing takes longer than most starts."""

    def __init__(self) -> None:
        """Start it; what its environment lacks an engine's variables may still add."""
        self._lock = threading.Lock()
        self._fresh = os.environ.get("FRESH") == "1"
        self._server = subprocess.Popen(
            ["cat"] if self._fresh else [sys.executable, str(SCRIPT), "--requests"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._server.stdin is not None
        self._requests: IO[bytes] = self._server.stdin

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; every engine has ended before."""
        self._server.kill()
        self._server.wait()

    def run_all(self, engines: Sequence[Engine], jobs: int) -> Iterator[tuple[Engine, dict[str, Any]]]:
        """What each engine reports, as it ends, `jobs` of them at once."""
        with ThreadPoolExecutor(jobs) as pool:
            waited = {pool.submit(self.run, engine): engine for engine in engines}
            for one in as_completed(waited):
                yield waited[one], one.result()

    def run(self, engine: Engine) -> dict[str, Any]:
        """Start an engine, and return what it reports; the last lines of its log where it fails."""
        with tempfile.TemporaryDirectory() as scratch:
            report, log, pid = (Path(scratch, name) for name in ("report", "log", "pid"))
            log.touch()
            words = {
                "arguments": [str(engine.model), str(report), *engine.arguments],
                "variables": engine.variables,
                "log": str(log),
                "pid": str(pid),
            }
            if self._fresh:
                with log.open("wb") as out:
                    started = subprocess.Popen(
                        [sys.executable, str(SCRIPT), *words["arguments"]],
                        stdout=out,
                        stderr=out,
                        env={**os.environ, "OMP_NUM_THREADS": "2", **engine.variables},
                        start_new_session=True,
                    )
                pid.write_text(str(started.pid))
                threading.Thread(target=started.wait, daemon=True).start()
            else:
                with self._lock:
                    self._requests.write(json.dumps(words).encode() + b"\n")
                    self._requests.flush()
            begun = time.perf_counter()
            _wait(report, pid, begun + START_S)
            seconds = time.perf_counter() - begun
            if pid.is_file():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(pid.read_text(encoding="ascii")), signal.SIGKILL)
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            if not report.is_file():
                errors = [line for line in lines if "Error" in line][-6:]
                return {"failed": [f"after {seconds:.0f} s", *(errors or lines[-12:])]}
            told = [line.partition("] ")[2] for line in lines]
            said = [x for x in told if x.startswith(("Experts: ", "Model loading took", "Loading weights"))]
            profile = lines[_profile_at(lines) :][:60]
            found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            return {**found, "said": said, "process_s": seconds, "profile": profile}


def _profile_at(lines: list[str]) -> int:
    return next((n for n, line in enumerate(lines) if "function calls" in line), len(lines))


def _wait(report: Path, pid: Path, until: float) -> None:
    """Until there is a report, or the engine has ended without one."""
    while time.perf_counter() < until and not report.is_file():
        time.sleep(0.05)
        if pid.is_file():
            try:
                os.kill(int(pid.read_text(encoding="ascii")), 0)
            except ProcessLookupError:
                return
