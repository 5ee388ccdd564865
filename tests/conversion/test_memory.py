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

from hqconv.conversion.resources import Resources, cpu_need, plan_staging
from hqconv.schemas.grid import Grid
from tests.make.conversions import open_plan
from tests.make.formats import write
from tests.make.models import save_big
from tests.make.places import REPO

MIB = 1 << 20

DRIVER = """
import json, os, sys, threading
from pathlib import Path
from hqconv.humming_ops.runtime import humming
from hqconv.schemas.grid import Grid
from tests.make.conversions import run

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
            count = lambda progress: files.append(len(os.listdir("/proc/self/fd")))
            summary = run(
                Path(job["src"]), Path(job["out"]), job["schema"], grid, **words,
                max_memory=job["limit"], progress=count,
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

    def measure(
        self, src: Path, out: Path, schema: str, limit: int, **words: Any
    ) -> dict[str, int]:
        """How far memory rose (bytes), the most open files, and the number of workers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {
            "src": str(src),
            "out": str(out),
            "schema": schema,
            "limit": limit,
            "tiny": str(self.tiny),
        }
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
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of 101 MB; 12.6 MB an expert."""
    folder = tmp_path_factory.mktemp("large") / "src"
    return save_big(folder, 8, 8, 2048, 1024, torch.bfloat16)


def planned_bytes(src: Path, schema: str, tp: int, layout: str, limit: int = 0) -> int:
    """What `cpu_need` says one lane needs: for one expert at a time, or for as many as `limit` allows."""
    source, plan = open_plan(src, schema, Grid(tp), layout)
    source.close()
    resources = Resources("cpu", limit, 1)
    num_experts = plan_staging(plan.layers, resources).num_experts if limit else 1
    return cpu_need(plan.layers[0]).num_bytes(num_experts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schema", "layout", "tp", "ep"), [("mxfp4", "kernel", 2, 2), ("nvfp4", "checkpoint", 1, 1)]
)
def test_memory_stays_under_the_tightest_limit_for_two_workers(
    schema: str, layout: str, tp: int, ep: int, meter: Meter, large: Path, tmp_path: Path
) -> None:
    limit = 2 * planned_bytes(large, schema, tp, layout)
    found = meter.measure(
        large, tmp_path / "out", schema, limit, layout=layout, tp=tp, ep=ep, threads=4
    )
    print(schema, layout, f"measured {found['bytes'] / MIB:.1f} MiB, limit {limit / MIB:.1f} MiB")
    assert found["workers"] == 2
    assert sum(p.stat().st_size for p in large.glob("*.safetensors")) > 4 * limit
    assert found["bytes"] < limit, f"{found['bytes'] / MIB:.1f} MiB"
    # The source's shards, the files of the group in work and of the one being flushed, what Python has open.
    assert found["files"] <= 8 + 2 * tp * ep + 16


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(tiny: Path, large: Path, tmp_path: Path) -> None:
    """Without what the C library keeps for later, and with one worker, so that the figures repeat.

    Fewer than four layers end before reading, writing and hashing all have their buffers: 31 MiB for two layers, 33 for
    three, 34 for four, 35 for eight and 37 for sixteen, each with 1.5 MiB more or less.
    """
    half = save_big(tmp_path / "half", 4, 8, 2048, 1024, torch.bfloat16)
    meter = Meter(tiny, MALLOC_MMAP_THRESHOLD_="65536")
    small, big = (
        meter.measure(src, tmp_path / f"{src.name}-out", "mxfp4", 100 * MIB, threads=1)["bytes"]
        for src in (half, large)
    )
    meter.close()
    # Four layers more, of 101 MB each; buffers of a few MiB (of digests, say) may or may not fall together.
    assert big < small + 6 * MIB


CASES = [
    ("mxfp4", torch.bfloat16, 4, "kernel"),
    ("nvfp4", torch.float16, 1, "kernel"),
    ("int3-g64", torch.bfloat16, 1, "checkpoint"),
    ("int4-g64-zp", torch.float32, 1, "kernel"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("schema", "source", "tp", "layout"), CASES, ids=str)
def test_one_worker_needs_no_more_than_planned(
    schema: str, source: torch.dtype, tp: int, layout: str, meter: Meter, tmp_path: Path
) -> None:
    """`cpu_need` is an upper bound of what one expert takes, and not a wild one."""
    src = save_big(tmp_path / "src", 1, 4, 2048, 2048, source)
    # The warm-up has the same dtype: else numba may compile while memory is measured.
    tiny = save_big(tmp_path / "tiny", 1, 2, 1024, 1024, source)
    bound = planned_bytes(src, schema, tp, layout, 1 << 30)
    words = {"layout": layout, "tp": tp, "tiny": str(tiny)}
    found = meter.measure(src, tmp_path / "out", schema, 1 << 30, threads=1, **words)
    figures = f"measured {found['bytes'] / MIB:.1f} MiB, planned {bound / MIB:.1f} MiB"
    print(schema, source, tp, layout, figures)
    assert found["bytes"] <= bound, figures
    assert found["bytes"] > bound / 4, figures


# --- quantized and fused sources


@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ("fp8-block", "source"),
        ("gptq-int4", "nvfp4"),
        ("ct-int4-g32", "int4"),
        ("mxfp4-gpt-oss", "int4"),
        ("fused-fp8-expert", "int4"),
    ],
)
def test_a_coded_or_fused_expert_needs_no_more_than_planned(
    form: str, schema: str, meter: Meter, tmp_path: Path
) -> None:
    src = write(tmp_path / "src", form, hidden=2048, inner=2048, experts=2).folder
    tiny = write(tmp_path / "tiny", form, hidden=256, inner=256, experts=2).folder
    bound = planned_bytes(src, schema, 1, "kernel", 1 << 30)
    found = meter.measure(src, tmp_path / "out", schema, 1 << 30, threads=1, tiny=str(tiny))
    figures = f"measured {found['bytes'] / MIB:.1f} MiB, planned {bound / MIB:.1f} MiB"
    print(form, schema, figures)
    assert found["bytes"] <= bound, figures
    assert found["bytes"] > bound / 6, figures
