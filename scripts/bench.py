"""Time whole `hqconv convert` processes on a page-cached checkpoint.

    python scripts/bench.py [--schemas mxfp4,int4] [--runs 5] [--device cpu] [--size 4.8] [--work FOLDER]
                            [--quantized fp8-block]

Makes a Qwen3-MoE-shaped checkpoint (experts [768, 2048]) of about `--size` GB, reads it once into the page cache,
converts it once uncounted (compiles the loops), then `--runs` times, and prints the median wall time, GB/s of
source bytes and the peak resident memory of the process. With `--quantized` the source is that checkpoint in the
checkpoint layout of this schema, so that `--schemas source` keeps its codes and any other schema requantizes them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.shared import make_source

EXPERT_BYTES = 3 * 768 * 2048 * 2
EXPERTS_PER_LAYER = 32


def cached_source(folder: Path, size_gb: float) -> None:
    """Write the checkpoint if it is not there, and read it through the page cache."""
    layers = max(1, round(size_gb * 1e9 / (EXPERT_BYTES * EXPERTS_PER_LAYER)))
    if not folder.exists():
        sizes = {"hidden": 2048, "intermediate": 768, "layers": layers, "experts": EXPERTS_PER_LAYER}
        make_source(folder, **sizes, vocab=1024)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def quantize_source(source: Path, schema: str) -> Path:
    """The checkpoint in the checkpoint layout of a schema; read through the page cache by having been written."""
    out = source.with_name(f"source-{schema}")
    if not out.exists():
        command = [sys.executable, "-m", "hqconv", "convert", str(source), "-o", str(out), "-q"]
        subprocess.run([*command, "--schema", schema, "--layout", "checkpoint"], check=True)
    return out


def run(command: list[str]) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of one process."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    return time.monotonic() - started, usage.ru_maxrss * 1024


def main() -> None:
    """Time every schema and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", default="mxfp4,int4")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tp", default="1")
    parser.add_argument("--size", type=float, default=4.8)
    parser.add_argument("--max-memory", default="4GiB")
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--quantized", default="")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp())
    source = work / "source"
    cached_source(source, args.size)
    if args.quantized:
        source = quantize_source(source, args.quantized)
    num_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    for schema in args.schemas.split(","):
        out = work / f"out-{schema}"
        command = [sys.executable, "-m", "hqconv", "convert", str(source), "-o", str(out), "--schema", schema]
        command += ["--target", "sm90", "--tp", args.tp, "--device", args.device, "-q", "--overwrite"]
        command += ["--max-memory", args.max_memory]
        run(command)
        results = [run(command) for _ in range(args.runs)]
        seconds = [r[0] for r in results]
        median = statistics.median(seconds)
        print(
            json.dumps(
                {
                    "schema": schema,
                    "source": args.quantized or "bfloat16",
                    "device": args.device,
                    "tp": args.tp,
                    "source_gb": round(num_bytes / 1e9, 3),
                    "median_s": round(median, 2),
                    "min_s": round(min(seconds), 2),
                    "max_s": round(max(seconds), 2),
                    "gb_per_s": round(num_bytes / 1e9 / median, 3),
                    "peak_rss_mb": round(max(r[1] for r in results) / 1e6),
                }
            ),
            flush=True,
        )
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
