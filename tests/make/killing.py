"""Conversions in a process of their own, which die on command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.make.places import REPO

# One process imports everything once; each conversion runs in a fork of it, which kills itself by SIGKILL
# before, in the middle of, or after the n-th call that touches the output.
DRIVER = """
import json, os, signal, sys, tempfile, threading
from pathlib import Path
from hqconv.humming_ops.runtime import humming
from hqconv.schemas.grid import Grid
from tests.make.conversions import run
import hqconv.planning.output_units
import hqconv.io.durable_files

humming()
hqconv.planning.output_units.MAX_SHARD_BYTES = 70_000
lock, count, fatal, when = threading.Lock(), 0, 0, ""

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def touch(owner, name):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        global count
        with lock:
            count += 1
            mine = count == fatal
        if mine and when == "before":
            die()
        if mine and when == "during" and name in ("pwrite", "write"):
            descriptor, data, *offset = args
            real(descriptor, data[: len(data) // 2], *offset)
            die()
        try:
            return real(*args, **kwargs)
        finally:
            if mine:
                die()
    setattr(owner, name, call)

for name in ("pwrite", "fsync", "posix_fallocate", "write", "ftruncate", "truncate"):
    touch(os, name)
for name in ("replace", "unlink", "rename", "rmdir", "mkdir"):
    touch(Path, name)
touch(hqconv.io.durable_files, "_exchange_at_once")

with tempfile.TemporaryDirectory() as folder:  # loads what is compiled, once for all children
    run(Path(sys.argv[1]), Path(folder) / "warm", "mxfp4", Grid(2, 2))
count = 0

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        fatal, when = job["fatal"], job["when"]
        if job["by_renames"]:
            hqconv.io.durable_files._exchange_at_once = lambda *_: False
        try:
            modes = {"resume": job["resume"], "overwrite": job["overwrite"]}
            summary = run(Path(job["src"]), Path(job["out"]), job["schema"], Grid(2, 2), **modes)
            Path(job["out"] + ".count").write_text(f"{count} {summary.num_groups_resumed}")
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(repr(error) + "\\n")
            os._exit(1)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Driver:
    """Converts one source, by a process that imports everything once and forks."""

    def __init__(self, src: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        self.src = src
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(src)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env=environment,
        )

    def convert(
        self,
        out: Path,
        fatal: int = 0,
        when: str = "",
        *,
        resume: bool = False,
        overwrite: bool = False,
        by_renames: bool = False,
    ) -> int:
        """The exit status: 0, or -9 if it was killed at its `fatal`-th call (0 for never)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"src": str(self.src), "out": str(out), "schema": "mxfp4", "fatal": fatal, "when": when}
        job |= {"resume": resume, "overwrite": overwrite, "by_renames": by_renames}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def counts(out: Path) -> list[int]:
    """Of a finished conversion: calls that touched the output, and groups that were done before."""
    return [int(word) for word in Path(f"{out}.count").read_text().split()]
