"""Convert a checkpoint for every schema and verify each artifact with the production kernel, on a GPU.

    python scripts/check_kernels.py [--work FOLDER] [--schemas mxfp4,int4-g64-zp] [--jobs 8] [--log FILE.md]
    python scripts/check_kernels.py --inputs quantized --jobs 8 --log FILE.md

`--inputs`: activations, by name; `quantized` for all that are, over the schemas that run with them on the GPU's target.
Needs a CUDA device of the target architecture. Prints and logs the measured kernel errors; exit 1 on a failure.
`--jobs`: processes at a time; what takes the time is compiling kernels.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from hqconv.kernel_layout.compatibility import why_not
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.input_schema import INPUT_PRESETS, resolve_inputs
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.weight_schema import resolve_schema
from scripts.shared import SCHEMAS, make_source

# Intermediate size of the experts, and the ranks. 352 columns are two groups of 128 and a smaller one.
SMALL, UNEVEN = 512, 352
GRIDS: tuple[tuple[int, dict[str, Any]], ...] = (
    (SMALL, {}),
    (SMALL, {"tp": 2, "ep": 3, "expert_placement": "round_robin", "redundant_experts": 2}),
    (UNEVEN, {"tp": 2, "tp_split": "groups"}),
)


# Integers that have kernels of their own under quantized activations, and second scales.
MORE_SCHEMAS = (
    *("int4-c", "int4-g128-zp", "int2", "int5", "int6", "int8-g128"),
    *("int4-g32-e4m3", "int4-g16-e4m3", "int4-g32-e4m3-row", "fp4-g32-e4m3", "fp4-g32-e8m0-row"),
)
FIGURES = ("rounded_kernel", "rounded_channel", "kernel", "channel", "against_source")
HEAD = (
    "| activations | schema | dtype | kernel vs rounded | worst channel | kernel vs decoded | worst channel "
    "| decoded vs source | verdict |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)


def check(source: Path, work: Path, kind: KernelSpec) -> tuple[str, bool]:
    """Convert and verify one pair over all grids; returns a table row and whether all passed."""
    started = time.monotonic()
    try:
        worst, passed = measure(source, work / f"out-{os.getpid()}", kind)
        figures = [f"{worst[key]:.4f}" if worst[key] else "-" for key in FIGURES]
    except (hqconv.HqconvError, RuntimeError, ValueError, AssertionError, OSError) as error:
        traceback.print_exc()
        figures, passed = [f"{type(error).__name__}: {str(error)[:200]}".replace("|", "/")], False
    words = (kind.inputs.name, kind.schema.name, kind.param_dtype, *figures, "pass" if passed else "FAIL")
    row = f"| {' | '.join(words)} |"
    print(row, f"{time.monotonic() - started:.1f} s", flush=True)
    return row, passed


def measure(source: Path, out: Path, kind: KernelSpec) -> tuple[dict[str, float], bool]:
    """The worst of every figure over all grids, and whether all passed. source: one checkpoint of each size."""
    worst = dict.fromkeys(FIGURES, 0.0)
    passed = True
    for size, grid in GRIDS:
        request = {"schema": kind.schema, "dtype": kind.param_dtype, "target": kind.target.name, **grid}
        words = {**request, "input_schema": kind.inputs, "overwrite": out.exists()}
        hqconv.convert(source / str(size), out, **words, device="cuda:0", threads=2, allow_unserved=True)
        report = hqconv.verify(out, source / str(size), threads=2)
        for result in report.results:
            for finding in result.findings[:5]:
                print("   ", result.name, finding, flush=True)
            for measured in result.measured.values() if result.name == "kernel" else ():
                for key in worst:
                    found = measured.get(key, 0.0)
                    worst[key] = worst[key] if found <= worst[key] else found
        passed = passed and report.passed
    return worst, passed


def pairs(inputs: str, schemas: str, dtypes: str) -> list[KernelSpec]:
    """What is asked for and runs on this GPU's target."""
    major, minor = torch.cuda.get_device_capability()
    target = GpuTarget(major * 10 + minor)
    chosen = [name for name in INPUT_PRESETS if name != "a16"] if inputs == "quantized" else inputs.split(",")
    asked = itertools.product(dtypes.split(","), chosen, schemas.split(","))
    kinds = [KernelSpec(resolve_schema(s), d, target, resolve_inputs(i)) for d, i, s in asked]
    return [kind for kind in kinds if why_not(kind) is None]


def main() -> None:
    """Check everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--inputs", default="a16")
    parser.add_argument("--schemas", default=",".join((*SCHEMAS, *MORE_SCHEMAS)))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp())
    sizes = {"hidden": 1024, "layers": 2, "experts": 8, "top_k": 2, "vocab": 512}
    source = work / "source"
    for size in (SMALL, UNEVEN):
        make_source(source / str(size), **sizes, intermediate=size, shard_size="16MB")
    kinds = pairs(args.inputs, args.schemas, args.dtypes)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(check, source, work, kind) for kind in kinds]
        for _ in as_completed(running):
            if args.log:
                rows = [one.result()[0] for one in running if one.done()]
                title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n"
                args.log.write_text(title + HEAD + "\n".join(rows) + "\n")
    done = [one.result() for one in running]
    sys.exit(0 if done and all(passed for _, passed in done) else 1)


if __name__ == "__main__":
    main()
