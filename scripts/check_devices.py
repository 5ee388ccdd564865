"""Prove that a CPU and a CUDA conversion give the same artifact, byte for byte.

    python scripts/check_devices.py [--work FOLDER] [--schemas mxfp4,int4-g64-zp] [--log FILE.md]

Converts one small checkpoint for every schema, both parameter dtypes, tp 1 and 2, ep 1 and 3 and both layouts
on both devices, and compares every file of the artifacts, the manifest included. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from scripts.shared import SCHEMAS, make_source

GRIDS: list[dict[str, Any]] = [{"tp": tp, "ep": ep} for tp in (1, 2) for ep in (1, 3)]
GRIDS += [{"tp": 2, "ep": 3, "expert_placement": "round_robin", "redundant_experts": 2}]
GRIDS += [{"tp": 3, "tp_split": "groups"}]
GRIDS += [{"layout": "checkpoint"}]


def artifact_bytes(root: Path) -> dict[str, bytes]:
    """Every file of an artifact."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def compare(source: Path, work: Path, name: str, dtype: str) -> list[str]:
    """Convert on both devices for all grids; returns what differs."""
    wrong = []
    for grid in GRIDS:
        made = []
        for device in ("cpu", "cuda:0"):
            out = work / device.replace(":", "")
            request = {"schema": name, "dtype": dtype, "target": "sm90", **grid}
            words: dict[str, Any] = {"device": device, "threads": 8, "overwrite": out.exists(), "allow_unserved": True}
            hqconv.convert(source, out, **request, **words)
            made.append(artifact_bytes(out))
        cpu, cuda = made
        if cpu.keys() != cuda.keys():
            wrong.append(f"{grid}: files differ")
        wrong += [f"{grid}: {path}" for path in cpu if cpu[path] != cuda.get(path)]
    return wrong


def main() -> None:
    """Compare everything; exit 1 on any difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--schemas", default=",".join(SCHEMAS))
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp())
    sizes = {"hidden": 512, "intermediate": 512, "layers": 2, "experts": 5, "top_k": 2, "vocab": 512}
    source = make_source(work / "source", **sizes, shard_size="8MB")
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
