"""Runs commands of hqconv in forks of one process that has imported everything; `commands.Zygote` talks to it.

Each line of stdin is a list of commands that are run at the same time; what is to happen to each is in `commands.Job`.
The answer is a line for all of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import hqconv.cli.app
import hqconv.cli.render
import hqconv.planning.output_units
from hqconv.__main__ import MESSAGE, SIGNALS, listen
from hqconv.__main__ import run as run_command
from hqconv.humming_ops.runtime import humming
from hqconv.schemas.grid import Grid
from scripts.torture.commands import HANG
from tests.make.conversions import run

_DEADLINE_S = 60.0
_LIMITS = {
    "files": resource.RLIMIT_NOFILE,
    "file_bytes": resource.RLIMIT_FSIZE,
    "address_bytes": resource.RLIMIT_AS,
}


def _command(job: dict[str, Any], go: int) -> None:
    """Become the command; does not return."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(f"{job['said']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = ["hqconv", *job["arguments"]]
    code = 1
    try:
        listen()
        os.write(go, b"x")
        _restrict(job)
        code = run_command()
    except SystemExit as end:  # a signal just before the command
        code = end.code if isinstance(end.code, int) else 0
        print(MESSAGE, file=sys.stderr)
    finally:
        _unwatch(job)
        os._exit(code)


def _restrict(job: dict[str, Any]) -> None:
    for name, value in job["limits"].items():
        if name == "address_bytes":  # beside what the libraries take already
            value += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(_LIMITS[name], (value, value))
    if job["watch"] is not None:
        watch = job["watch"]
        note = os.open(f"{job['said']}.note", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        ctypes.CDLL(os.environ["LD_PRELOAD"]).watch_calls(
            os.fsencode(watch["below"]),
            os.fsencode(watch["source"] or ""),
            ctypes.c_long(watch["number"]),
            *(watch[name] for name in ("how", "error", "looks", "no_exchange")),
            note,
        )


def _unwatch(job: dict[str, Any]) -> None:
    if job["watch"] is not None:
        count = ctypes.CDLL(os.environ["LD_PRELOAD"]).num_calls
        count.restype = ctypes.c_long
        Path(f"{job['said']}.count").write_text(str(count()))


def _fork(job: dict[str, Any]) -> int:
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        _command(job, go)
    os.close(go)
    os.read(ready, 1)
    os.close(ready)
    return child


def _run_all(jobs: list[dict[str, Any]]) -> list[int]:
    """Run commands at the same time; the exit code of each."""
    begun = {_fork(job): (job, time.monotonic()) for job in jobs}
    codes: dict[int, int] = {}
    signalled: set[int] = set()
    late: set[int] = set()
    while running := begun.keys() - codes.keys():
        for pid in running:
            job, start = begun[pid]
            seconds = time.monotonic() - start
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = HANG if pid in late else os.waitstatus_to_exitcode(status)
            elif job["signal"] and pid not in signalled and seconds >= job["seconds"]:
                os.kill(pid, job["signal"])
                signalled.add(pid)
            elif seconds > _DEADLINE_S:
                late.add(pid)
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)
    return [codes[pid] for pid in begun]


def _mount(words: dict[str, Any]) -> None:
    """A file system of its own for a folder, of so many bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    place, size = os.fsencode(words["mount"]), f"size={words['size']}".encode()
    libc.umount2(place, 2)
    if libc.mount(b"torture", place, b"tmpfs", 0, size):
        raise OSError(ctypes.get_errno(), "mount", words["mount"])


def main() -> None:
    """Answer until stdin ends."""
    humming()
    hqconv.planning.output_units.MAX_SHARD_BYTES = 70_000
    with tempfile.TemporaryDirectory() as folder:  # loads what is compiled, once for all commands
        for number, schema in enumerate(("mxfp4", "int8")):
            run(Path(sys.argv[1]), Path(folder) / str(number), schema, Grid(2))
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = None
        if isinstance(asked, dict):
            with suppress(OSError):
                _mount(asked)
                answer = True
        else:
            answer = _run_all(asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
