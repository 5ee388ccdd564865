"""Convert a checkpoint for every schema and verify each artifact with the production kernel, on a GPU.

    python scripts/check_kernels.py [--work FOLDER] [--schemas mxfp4,int4-g64-zp] [--log FILE.md]

Needs a CUDA device of the target architecture. Prints and logs the measured kernel errors; exit 1 on a failure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from scripts.shared import SCHEMAS, make_source

GRIDS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2, "ep": 3, "expert_placement": "round_robin", "redundant_experts": 2},
)


def check(source: Path, work: Path, name: str, dtype: str) -> tuple[str, bool]:
    """Convert and verify one schema over all grids; returns a table row and whether all passed."""
    worst = {"kernel": 0.0, "channel": 0.0, "against_source": 0.0}
    passed = True
    started = time.monotonic()
    for grid in GRIDS:
        out = work / "out"
        request = {"schema": name, "dtype": dtype, "target": "sm90", **grid}
        hqconv.convert(source, out, **request, device="cuda:0", threads=8, overwrite=out.exists())
        report = hqconv.verify(out, source, threads=8)
        for result in report.results:
            for finding in result.findings[:5]:
                print("   ", result.name, finding, flush=True)
            for measured in result.measured.values() if result.name == "kernel" else ():
                for key in worst:
                    worst[key] = worst[key] if measured[key] <= worst[key] else measured[key]
        passed = passed and report.passed
    figures = " | ".join(f"{worst[key]:.4f}" for key in worst)
    row = f"| {name} | {dtype} | {figures} | {'pass' if passed else 'FAIL'} |"
    print(row, f"{time.monotonic() - started:.1f} s", flush=True)
    return row, passed


def main() -> None:
    """Check everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--schemas", default=",".join(SCHEMAS))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp())
    sizes = {"hidden": 1024, "intermediate": 512, "layers": 2, "experts": 8, "top_k": 2, "vocab": 512}
    source = make_source(work / "source", **sizes, shard_size="16MB")
    done = [check(source, work, n, d) for d in args.dtypes.split(",") for n in args.schemas.split(",")]
    if args.log:
        head = "| schema | dtype | kernel vs decoded | worst channel | decoded vs source | verdict |\n"
        head += "| --- | --- | --- | --- | --- | --- |\n"
        title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n"
        args.log.write_text(title + head + "\n".join(row for row, _ in done) + "\n")
    sys.exit(0 if all(passed for _, passed in done) else 1)


if __name__ == "__main__":
    main()
