"""Prove that a CPU and a CUDA conversion give the same artifact, byte for byte.

    python scripts/check_devices.py [--work FOLDER] [--schemas mxfp4,int4-g64-zp] [--log FILE.md]

Converts one small checkpoint for every schema, both parameter dtypes, tp 1 and 2, ep 1 and 3 and both layouts
on both devices, and compares every file of the artifacts, the manifest included. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hqconv.checkpoint.folder import Checkpoint
from hqconv.experts.map import map_checkpoint
from hqconv.pipeline.run import convert
from hqconv.pipeline.workers import Resources
from hqconv.plan.plan import Request, make_plan
from hqconv.schemas.grid import Grid
from hqconv.schemas.target import PRESETS, resolve_schema

SHORTHAND = ("int4-g64-zp", "int3-g64", "int4-g128-fpzp", "int7-c", "int8-g128-zp")
GRIDS = [("kernel", Grid(tp, ep)) for tp in (1, 2) for ep in (1, 3)]
GRIDS += [("kernel", Grid(2, 3, "round_robin", 2)), ("checkpoint", Grid())]


def artifact_bytes(root: Path) -> dict[str, bytes]:
    """Every file of an artifact."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def compare(source: Path, work: Path, name: str, dtype: str) -> list[str]:
    """Convert on both devices for all grids; returns what differs."""
    wrong = []
    for layout, grid in GRIDS:
        made = []
        for device in ("cpu", "cuda:0"):
            with Checkpoint.open(str(source)) as checkpoint:
                experts = map_checkpoint(checkpoint)
                plan = make_plan(checkpoint, experts, Request(resolve_schema(name), dtype, 90, grid, layout))
                out = work / device.replace(":", "")
                resources = Resources(torch.device(device), 4 << 30, 8)
                convert(checkpoint, plan, out, resources, overwrite=out.exists())
            made.append(artifact_bytes(out))
        cpu, cuda = made
        if cpu.keys() != cuda.keys():
            wrong.append(f"{layout} {grid}: files differ")
        wrong += [f"{layout} {grid}: {path}" for path in cpu if cpu[path] != cuda.get(path)]
    return wrong


def main() -> None:
    """Compare everything; exit 1 on any difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--schemas", default=",".join([*PRESETS, *SHORTHAND]))
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp())
    source = work / "source"
    script = Path(__file__).with_name("make_checkpoint.py")
    sizes = ["--hidden", "512", "--intermediate", "512", "--layers", "2", "--experts", "5", "--top-k", "2"]
    sizes += ["--vocab", "512", "--shard-size", "8MB"]
    subprocess.run([sys.executable, str(script), str(source), *sizes], check=True, stdout=subprocess.DEVNULL)
    failures = 0
    rows = []
    for name, dtype in itertools.product(args.schemas.split(","), ("bfloat16", "float16")):
        started = time.monotonic()
        wrong = compare(source, work, name, dtype)
        failures += len(wrong)
        verdict = "same bytes" if not wrong else f"{len(wrong)} files differ: {wrong[0]}"
        rows.append(f"| {name} | {dtype} | {len(GRIDS)} | {verdict} |")
        print(rows[-1], f"{time.monotonic() - started:.1f} s", flush=True)
    if args.log:
        head = f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n"
        head += "| schema | dtype | layouts and grids | CPU and CUDA |\n| --- | --- | --- | --- |\n"
        args.log.write_text(head + "\n".join(rows) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
