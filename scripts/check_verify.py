"""Verify an artifact on a GPU and on the CPU: the same findings and figures, and how long each check takes.

    python scripts/check_verify.py [--work FOLDER] [--size 7.25] [--schema mxfp4] [--tp 1] [--device cuda:0]

Makes a Qwen3-MoE-shaped bfloat16 checkpoint of about `--size` GB of experts ([768, 2048], 128 a layer), converts it,
and runs `hqconv verify` with all checks as whole processes, with an empty kernel cache and again with the one that
this left. Then the weights check runs on both devices, on the good artifact and on damaged ones; what they find must be
the same, and what they measure to 1e-9. Exit code 1 where it is not. With `--device cpu` the batches that a GPU would
get run on torch's CPU tensors, and there is no kernel check.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hqconv.artifact.reader import Artifact
from hqconv.schemas import artifact_names as names
from hqconv.sources.opening import open_source
from hqconv.verification.result import CheckResult
from hqconv.verification.weights import check_weights
from scripts.bench import EXPERT_BYTES, default_threads
from scripts.bench_limits import read_all
from scripts.shared import make_source

MAX_MEMORY_BYTES = 4 << 30
TOLERANCE = 1e-9


def hqconv(*words: str, **environment: str) -> tuple[int, dict[str, Any], float]:
    """The command's exit code, its JSON, and the wall time of the whole process."""
    command = [sys.executable, "-m", "hqconv", *words, "--json"]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, **environment})
    return done.returncode, json.loads(done.stdout or "{}"), time.monotonic() - started


def make_artifact(work: Path, args: argparse.Namespace) -> tuple[Path, Path]:
    """A source, in the page cache, and the artifact made of it."""
    num_experts = max(8, min(128, round(args.size * 1e9 / EXPERT_BYTES)))
    layers = max(1, round(args.size * 1e9 / EXPERT_BYTES / num_experts))
    source, out = work / f"source-{args.size:g}", work / f"out-{args.size:g}-{args.schema}-tp{args.tp}"
    if not source.exists():
        sizes = {"hidden": 2048, "intermediate": 768, "layers": layers, "experts": num_experts, "top_k": 8}
        make_source(source, **sizes, vocab=1024)
    read_all(source, default_threads())
    if not out.exists():
        words = ["--schema", args.schema, "--target", args.target, "--tp", str(args.tp)]
        code, _, seconds = hqconv("convert", str(source), "-o", str(out), "--device", args.device, *words)
        print(f"converted {layers} layers of {num_experts} experts in {seconds:.1f} s", flush=True)
        if code:
            raise SystemExit("the conversion failed")
    return source, out


def time_processes(source: Path, out: Path, args: argparse.Namespace) -> bool:
    """Whole processes with a cold and with a warm kernel cache; whether all passed."""
    passed = True
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm", "warm"):
            words = ["verify", str(out), "--source", str(source), "--device", args.device]
            code, report, seconds = hqconv(*words, HUMMING_CACHE_DIR=cache)
            checks = {name: f"{c['status']} {c['seconds']:.2f} s" for name, c in report["checks"].items()}
            print(f"verify, {state} kernel cache: {seconds:.2f} s in all, {checks}", flush=True)
            print(f"    {[note for c in report['checks'].values() for note in c['notes']]}", flush=True)
            passed = passed and code == 0
    return passed


def compare(what: str, source: Path, out: Path, device: torch.device) -> bool:
    """The weights check on the CPU and on the device; whether they agree."""
    results: list[CheckResult] = []
    for where in (None, device):
        with Artifact(out) as artifact, open_source(source) as opened:
            started = time.monotonic()
            result = check_weights(artifact, opened, None, default_threads(), MAX_MEMORY_BYTES, where)
            results.append(result)
            print(f"    {result.notes[-1]}: {time.monotonic() - started:.2f} s", flush=True)
    first, second = results
    agree = first.findings == second.findings and are_close(first.measured, second.measured)
    print(f"{what}: {len(first.findings)} findings, {'the same' if agree else 'NOT THE SAME'}", flush=True)
    for finding in [] if agree else [f for f in second.findings if f not in first.findings][:5]:
        print("    only on the device:", finding, flush=True)
    return agree and bool(first.findings) == (what != "good")


def are_close(left: Any, right: Any) -> bool:
    """Equal words, numbers but for the order of summing."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(are_close(left[key], right[key]) for key in left)
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=1e-30)
    return bool(left == right)


# --- damage ------------------------------------------------------------------------------------------------


def places(out: Path, tensor: str, layer: int) -> tuple[Path, int, int]:
    """The file of a layer's first rank, a tensor's first byte in it, and the bytes of one expert."""
    with Artifact(out) as artifact:
        name = list(artifact.layers)[layer]
        path = names.rank_file(name, 0, 0)
        ref = artifact.header(path)[0][f"{name}.{tensor}"]
    return out / path, ref.offset_bytes, ref.num_bytes // ref.shape[0]


@contextmanager
def edited(path: Path, edits: dict[int, bytes]) -> Iterator[None]:
    """A file with other bytes at some offsets, for a while."""
    kept = {}
    with path.open("r+b") as file:
        for offset, data in edits.items():
            file.seek(offset)
            kept[offset] = file.read(len(data))
            file.seek(offset)
            file.write(data)
    try:
        yield
    finally:
        with path.open("r+b") as file:
            for offset, data in kept.items():
                file.seek(offset)
                file.write(data)


def damages(out: Path) -> Iterator[tuple[str, Path, dict[int, bytes]]]:
    """What is done to the artifact: where, and the bytes."""
    for tensor, expert, at in (("w13_weight", 3, 4097), ("w2_weight", 0, 0), ("w2_weight_scale", 5, 77)):
        path, begin, size = places(out, tensor, -1)
        offset = begin + expert * size + at
        with path.open("rb") as file:
            file.seek(offset)
            yield f"one bit of {tensor}", path, {offset: bytes([file.read(1)[0] ^ 4])}
    path, begin, size = places(out, "w13_weight", 0)
    with path.open("rb") as file:
        file.seek(begin + size)
        first, second = file.read(size), file.read(size)
    yield "two experts swapped", path, {begin + size: second, begin + 2 * size: first}
    rolled = first[64:] + first[:64]
    yield "an expert shifted", path, {begin + size: rolled}
    yield "an expert of zeros", path, {begin + size: bytes(size)}


def main() -> None:
    """Measure, compare, damage and compare; exit 1 where anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--size", type=float, default=7.25)
    parser.add_argument("--schema", default="mxfp4")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--target", default="sm90")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    device = torch.device(args.device)
    print(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", f"torch {torch.__version__}")
    source, out = make_artifact(args.work or Path(tempfile.mkdtemp(prefix="hqconv-verify-")), args)
    passed = time_processes(source, out, args)
    passed = compare("good", source, out, device) and passed
    for what, path, edits in damages(out):
        with edited(path, edits):
            passed = compare(what, source, out, device) and passed
    print("all as it should be" if passed else "FAILED", flush=True)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
