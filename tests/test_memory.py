"""Peak memory and open files of conversions many times larger than the memory limit.

Each conversion runs in a fork of one process that has imported everything, warms itself up with a tiny
conversion, resets the kernel's high-water mark, and reports by how much memory then rose.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hqconv.checkpoint import Checkpoint
from hqconv.experts import map_experts
from hqconv.pipeline import working_bytes
from hqconv.plan import Request
from hqconv.sharding import Grid
from tests.models import save_big, schema_of

REPO = Path(__file__).parent.parent
MIB = 1 << 20

DRIVER = """
import json, os, sys, threading
from pathlib import Path
from hqconv.backends.humming_runtime import humming
from hqconv.sharding import Grid
from tests.models import run

def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024

humming()
for line in sys.stdin:
    job = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            words = {"layout": job["layout"], "threads": job["threads"]}
            grid = Grid(job["tp"], job["ep"])
            run(Path(job["tiny"]), Path(job["out"] + "-tiny"), job["schema"], grid, **words)
            before = status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
            files = []
            count = lambda group, size: files.append(len(os.listdir("/proc/self/fd")))
            summary = run(
                Path(job["src"]), Path(job["out"]), job["schema"], grid, **words,
                max_memory=job["limit"], report=count,
            )
            answer = {"bytes": status("VmHWM") - before, "files": max(files), "workers": summary.num_workers}
        except BaseException as error:
            answer = {"error": repr(error)}
        os.write(write, json.dumps(answer).encode() + b"\\n")
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    print(os.fdopen(read).readline(), end="", flush=True)
"""


class Meter:
    """Measures conversions in a process of their own."""

    def __init__(self, tiny: Path, **environment: str) -> None:
        self.tiny = tiny
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **environment},
        )

    def measure(self, src: Path, out: Path, schema: str, limit: int, **words: Any) -> dict[str, int]:
        """How far memory rose (bytes), the most open files, and the number of workers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"src": str(src), "out": str(out), "schema": schema, "limit": limit, "tiny": str(self.tiny)}
        job = {"layout": "kernel", "threads": 2, "tp": 1, "ep": 1, **job, **words}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = dict(json.loads(self.process.stdout.readline()))
        assert "error" not in answer, answer
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_big(tmp_path_factory.mktemp("tiny") / "tiny", 1, 2, 256, 256, torch.bfloat16)


@pytest.fixture(scope="module")
def meter(tiny: Path) -> Iterator[Meter]:
    made = Meter(tiny)
    yield made
    made.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of layers; 12.6 MB an expert, 101 MB a layer."""
    folder = tmp_path_factory.mktemp("big")
    return {n: save_big(folder / str(n), n, 8, 2048, 1024, torch.bfloat16) for n in (2, 8)}


def planned_bytes(src: Path, schema: str, tp: int, layout: str) -> int:
    """What `working_bytes` says one worker needs."""
    checkpoint = Checkpoint.open(str(src))
    block = map_experts(checkpoint.tensors, checkpoint.config).blocks[0]
    dtype = "float16" if block.dtype == "F16" else "bfloat16"
    return working_bytes(block, Request(schema_of(schema), dtype, 90, Grid(tp), layout))


@pytest.mark.parametrize(
    ("schema", "layout", "tp", "ep"), [("mxfp4", "kernel", 2, 2), ("nvfp4", "checkpoint", 1, 1)]
)
def test_memory_stays_under_the_tightest_limit_for_two_workers(
    schema: str, layout: str, tp: int, ep: int, meter: Meter, models: dict[int, Path], tmp_path: Path
) -> None:
    src = models[8]
    limit = 2 * planned_bytes(src, schema, tp, layout)
    found = meter.measure(src, tmp_path / "out", schema, limit, layout=layout, tp=tp, ep=ep, threads=4)
    print(schema, layout, f"measured {found['bytes'] / MIB:.1f} MiB, limit {limit / MIB:.1f} MiB")
    assert found["workers"] == 2
    assert sum(p.stat().st_size for p in src.glob("*.safetensors")) > 8 * limit
    assert found["bytes"] < limit, f"{found['bytes'] / MIB:.1f} MiB"
    # The source's shards, the files of the group in work and of the one being flushed, what Python has open.
    assert found["files"] <= 8 + 2 * tp * ep + 16


def test_memory_does_not_grow_with_the_model(tiny: Path, models: dict[int, Path], tmp_path: Path) -> None:
    """Without what the C library keeps for later, and with one worker, so that the figures repeat."""
    meter = Meter(tiny, MALLOC_MMAP_THRESHOLD_="65536")
    rise = {
        layers: meter.measure(src, tmp_path / f"out{layers}", "mxfp4", 80 * MIB, threads=1)["bytes"]
        for layers, src in models.items()
    }
    meter.close()
    print({layers: f"{value / MIB:.1f} MiB" for layers, value in rise.items()})
    assert rise[8] < 1.1 * rise[2]


CASES = [
    ("mxfp4", torch.bfloat16, 1, "kernel"),
    ("mxfp4", torch.bfloat16, 4, "kernel"),
    ("mxfp4", torch.bfloat16, 1, "checkpoint"),
    ("mxfp4", torch.float16, 1, "checkpoint"),
    ("nvfp4", torch.bfloat16, 1, "kernel"),
    ("int3-g64", torch.bfloat16, 1, "checkpoint"),
    ("int4-g64-zp", torch.bfloat16, 2, "kernel"),
    ("int8-g128-zp", torch.bfloat16, 1, "kernel"),
    ("fp8", torch.float32, 1, "kernel"),
    ("fp8-block", torch.bfloat16, 1, "kernel"),
    ("int4-g64-zp", torch.float16, 1, "kernel"),
]


@pytest.mark.parametrize(("schema", "source", "tp", "layout"), CASES, ids=str)
def test_one_worker_needs_no_more_than_planned(
    schema: str, source: torch.dtype, tp: int, layout: str, meter: Meter, tmp_path: Path
) -> None:
    """`working_bytes` is an upper bound of what one expert takes, and not a wild one."""
    src = save_big(tmp_path / "src", 1, 4, 2048, 2048, source)
    bound = planned_bytes(src, schema, tp, layout)
    found = meter.measure(src, tmp_path / "out", schema, 1 << 30, threads=1, layout=layout, tp=tp)
    figures = f"measured {found['bytes'] / MIB:.1f} MiB, planned {bound / MIB:.1f} MiB"
    print(schema, source, tp, layout, figures)
    assert found["bytes"] <= bound, figures
    assert found["bytes"] > bound / 4, figures
