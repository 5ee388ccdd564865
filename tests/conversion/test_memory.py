"""Peak memory and open files of conversions many times larger than the memory limit.

Each conversion runs in a fork of one process that has imported everything, warms itself up with a tiny
conversion, resets the kernel's high-water mark, and reports by how much memory then rose.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hqconv.conversion.resources import Resources, cpu_need, plan_staging
from hqconv.schemas.grid import Grid
from tests.make.conversions import open_plan
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
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of layers; 12.6 MB an expert, 101 MB a layer."""
    folder = tmp_path_factory.mktemp("big")
    return {n: save_big(folder / str(n), n, 8, 2048, 1024, torch.bfloat16) for n in (4, 8)}


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
    schema: str,
    layout: str,
    tp: int,
    ep: int,
    meter: Meter,
    models: dict[int, Path],
    tmp_path: Path,
) -> None:
    src = models[8]
    limit = 2 * planned_bytes(src, schema, tp, layout)
    found = meter.measure(
        src, tmp_path / "out", schema, limit, layout=layout, tp=tp, ep=ep, threads=4
    )
    print(schema, layout, f"measured {found['bytes'] / MIB:.1f} MiB, limit {limit / MIB:.1f} MiB")
    assert found["workers"] == 2
    assert sum(p.stat().st_size for p in src.glob("*.safetensors")) > 4 * limit
    assert found["bytes"] < limit, f"{found['bytes'] / MIB:.1f} MiB"
    # The source's shards, the files of the group in work and of the one being flushed, what Python has open.
    assert found["files"] <= 8 + 2 * tp * ep + 16


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(
    tiny: Path, models: dict[int, Path], tmp_path: Path
) -> None:
    """Without what the C library keeps for later, and with one worker, so that the figures repeat.

    Fewer than four layers end before reading, writing and hashing all have their buffers: 31 MiB for two layers, 33 for
    three, 34 for four, 35 for eight and 37 for sixteen, each with 1.5 MiB more or less.
    """
    meter = Meter(tiny, MALLOC_MMAP_THRESHOLD_="65536")
    rise = {
        layers: meter.measure(src, tmp_path / f"out{layers}", "mxfp4", 100 * MIB, threads=1)[
            "bytes"
        ]
        for layers, src in models.items()
    }
    meter.close()
    print({layers: f"{value / MIB:.1f} MiB" for layers, value in rise.items()})
    # Four layers more, of 101 MB each; buffers of a few MiB (of digests, say) may or may not fall together.
    assert rise[8] < rise[4] + 6 * MIB


CASES = [
    ("mxfp4", torch.bfloat16, 4, "kernel"),
    ("mxfp4", torch.float16, 1, "checkpoint"),
    ("nvfp4", torch.bfloat16, 1, "kernel"),
    ("int3-g64", torch.bfloat16, 1, "checkpoint"),
    ("int4-g64-zp", torch.float16, 1, "kernel"),
    ("int8-g128-zp", torch.bfloat16, 1, "kernel"),
    ("fp8", torch.float32, 1, "kernel"),
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


# --- quantized and fused sources ---------------------------------------------------------------------------


def _fp8(n: int, k: int) -> dict[str, torch.Tensor]:
    codes = (torch.arange(n * k) % 120).to(torch.uint8).view(n, k).view(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": torch.full((n // 128, k // 128), 0.001)}


def _packed(n: int, k: int) -> dict[str, torch.Tensor]:
    words = torch.arange(n * k // 8, dtype=torch.int32).view(n, k // 8) * 40503
    scales = torch.full((n, k // 32), 0.01, dtype=torch.bfloat16)
    return {".weight_packed": words, ".weight_scale": scales, ".weight_shape": torch.tensor([n, k])}


def _gptq(n: int, k: int) -> dict[str, torch.Tensor]:
    words = torch.arange(n * k // 8, dtype=torch.int32).view(k // 8, n) * 40503
    zeros = torch.full((k // 128, n // 8), 0x77777777, dtype=torch.int32)
    groups = torch.arange(k, dtype=torch.int32) // 128
    scales = torch.full((k // 128, n), 0.01, dtype=torch.float16)
    return {".qweight": words, ".qzeros": zeros, ".scales": scales, ".g_idx": groups}


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
QUANTIZED: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8": (_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "packed": (
        _packed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
        },
    ),
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    ),
}


def save_quantized(folder: Path, kind: str, experts: int, hidden: int, inner: int) -> Path:
    """One layer in a quantized format."""
    make, quantization = QUANTIZED[kind]
    src = save_big(
        folder, 1, experts, hidden, inner, torch.float16 if kind == "gptq" else torch.bfloat16
    )
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(experts):
        for name, (n, k) in {
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }.items():
            base = f"model.layers.0.mlp.experts.{expert}.{name}_proj"
            tensors |= {base + part: tensor for part, tensor in make(n, k).items()}
    return _rewrite(src, tensors, {"quantization_config": quantization})


def save_fused(folder: Path, experts: int, hidden: int, inner: int) -> Path:
    """One layer of gpt_oss in bfloat16: an expert's gate and up are read together, and turned."""
    src = save_big(folder, 1, experts, hidden, inner, torch.bfloat16)
    layer = "model.layers.0.mlp.experts"
    shapes = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
    tensors = {
        f"{layer}.{name}": torch.ones(experts, *shape).bfloat16() for name, shape in shapes.items()
    }
    tensors |= {f"{layer}.gate_up_proj_bias": torch.zeros(experts, 2 * inner).bfloat16()}
    tensors |= {f"{layer}.down_proj_bias": torch.zeros(experts, hidden).bfloat16()}
    sizes = {"model_type": "gpt_oss", "intermediate_size": inner, "num_local_experts": experts}
    return _rewrite(src, tensors, sizes)


def _rewrite(src: Path, tensors: dict[str, torch.Tensor], words: dict[str, Any]) -> Path:
    (src / "model.safetensors.index.json").unlink()
    next(src.glob("model-*.safetensors")).unlink()
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps(config | words))
    return src


@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        *((kind, "source") for kind in QUANTIZED),
        *(("fp8", "nvfp4"), ("gptq", "nvfp4"), ("packed", "int4"), ("fused", "int4")),
    ],
)
def test_a_coded_or_fused_expert_needs_no_more_than_planned(
    kind: str, schema: str, meter: Meter, tmp_path: Path
) -> None:
    save = save_fused if kind == "fused" else functools.partial(save_quantized, kind=kind)
    src = save(tmp_path / "src", experts=4, hidden=2048, inner=2048)
    tiny = save(tmp_path / "tiny", experts=2, hidden=256, inner=256)
    bound = planned_bytes(src, schema, 1, "kernel", 1 << 30)
    found = meter.measure(src, tmp_path / "out", schema, 1 << 30, threads=1, tiny=str(tiny))
    figures = f"measured {found['bytes'] / MIB:.1f} MiB, planned {bound / MIB:.1f} MiB"
    print(kind, schema, figures)
    assert found["bytes"] <= bound, figures
    assert found["bytes"] > bound / 6, figures
