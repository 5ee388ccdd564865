"""Measure the compiled loops that quantize on the CPU, and this machine's memory, by one thread and by several.

    python scripts/bench_loops.py [--schemas mxfp4,int4,fp8-block,nvfp4] [--threads 1,16] [--runs 10]
                                  [--processors host,znver4,skylake-avx512]

Experts [768, 2048] of bfloat16 are quantized and laid out in the kernel's tiles, as conversions on the CPU do. Prints a
JSON line for each processor, schema and number of threads: nanoseconds per weight, of the slowest thread's processor
time and of the wall time, and the former where codes are packed in rows instead. Every thread has matrices of its own:
where several take longer than one, they share a core or the memory. `copy_gb_per_s` is the memory that all threads
together copy meanwhile, counted once. Each figure is the best of `--runs` calls.

`--processors` compiles for processors of LLVM's list, but with no instruction that this one lacks: a look at LLVM's
tuning for a processor that is not at hand. `host` is this one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HOST = "host"
ROWS, COLUMNS, EXPERTS = 768, 2048, 3


def main() -> None:
    """Print one JSON line for each processor, schema and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", default="mxfp4,int4,fp8-block,nvfp4")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--processors", default=HOST)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for schema in args.schemas.split(","):
            for count in map(int, args.threads.split(",")):
                print(json.dumps({"schema": schema, "threads": count, **measure(schema, count, args.runs)}), flush=True)
        return
    with tempfile.TemporaryDirectory() as cache:
        for processor in args.processors.split(","):
            command = [sys.executable, __file__, "--child", "--schemas", args.schemas, "--threads", args.threads]
            settings = settings_of(processor) | {"NUMBA_CACHE_DIR": cache}
            found = subprocess.run(
                [*command, "--runs", str(args.runs)],
                env=os.environ | settings,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for line in found.stdout.splitlines():
                print(json.dumps({"processor": processor, **json.loads(line)}), flush=True)


def settings_of(processor: str) -> dict[str, str]:
    """Environment by which numba compiles for a processor of LLVM's list, with no instruction that this one lacks."""
    if processor == HOST:
        return {}
    from llvmlite import binding

    here = binding.get_host_cpu_features()
    missing = [f"-{name}" for name, is_there in here.items() if not is_there]
    return {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ",".join(missing)}


def measure(schema_name: str, num_threads: int, num_runs: int) -> dict[str, float]:
    """Figures of one schema, by as many threads."""
    import numpy as np
    import torch

    from hqconv.kernel_layout.weight_tiles import StackTiles
    from hqconv.quantization.quantize import quantize_stacks
    from hqconv.schemas.weight_schema import resolve_schema

    schema = resolve_schema(schema_name)
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(EXPERTS, ROWS, COLUMNS, generator=generator).mul_(0.02).bfloat16()
    stacks = [one.clone() for _ in range(num_threads)]
    num_words = ROWS * COLUMNS * schema.num_bits // 64
    tiles = [
        StackTiles(
            np.empty(EXPERTS * num_words, np.uint64),
            np.array([(0, ROWS // 64, 0, COLUMNS // 64, 0, num_words, ROWS * schema.num_bits)], np.int64),
            False,
        )
        for _ in stacks
    ]
    blocks = [(np.ones(1 << 23, np.int64), np.ones(1 << 23, np.int64)) for _ in stacks]

    def whole(number: int) -> None:
        quantize_stacks([stacks[number]], schema, "bfloat16", tiles=[tiles[number]])

    def packed(number: int) -> None:
        quantize_stacks([stacks[number]], schema, "bfloat16")

    def copy(number: int) -> None:
        np.copyto(*blocks[number])

    weights = one.numel()
    cpu, wall = least(whole, num_threads, num_runs)
    return {
        "ns_per_weight": round(cpu / weights * 1e9, 3),
        "wall_ns_per_weight": round(wall / weights * 1e9, 3),
        "packed": round(least(packed, num_threads, num_runs)[0] / weights * 1e9, 3),
        "copy_gb_per_s": round(num_threads * blocks[0][0].nbytes / least(copy, num_threads, num_runs)[1] / 1e9, 1),
    }


def least(work: Callable[[int], Any], num_threads: int, num_runs: int) -> tuple[float, float]:
    """Processor time of a thread, and the wall time of all of them together; the least of some calls after one."""
    work(0)
    found = []
    for _ in range(num_runs):
        seconds = [0.0] * num_threads

        def timed(number: int, seconds: list[float] = seconds) -> None:
            begun = time.thread_time()
            work(number)
            seconds[number] = time.thread_time() - begun

        threads = [threading.Thread(target=timed, args=(number,)) for number in range(num_threads)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append((max(seconds), time.monotonic() - started))
    return min(cpu for cpu, _ in found), min(wall for _, wall in found)


if __name__ == "__main__":
    main()
