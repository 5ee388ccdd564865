"""Conversions and loads by one process for each GPU, at Qwen3-235B-A22B's expert shape: scripts/check_gpu.py eight.

torchrun --nproc-per-node N scripts/many_gpus.py discard convert SRC -o OUT …   hqconv, without writing experts
torchrun --nproc-per-node N scripts/many_gpus.py load ARTIFACT                  every rank onto its GPU, at once
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import load, make_source, size_of

REPO = Path(__file__).resolve().parents[1]
SHAPE = {"hidden": 4096, "intermediate": 1536, "experts": 128, "top_k": 8, "vocab": 4096}
SCHEMAS = ("mxfp4", "int4-g32-e4m3")
MANIFEST = "hqconv.json"


# --- cases -------------------------------------------------------------------------------------------------


def cases(args: argparse.Namespace) -> dict[tuple[str, ...], Any]:
    """Every conversion, verification and load, in this order; each gives the cells of a row.

    args: schemas, processes and sinks; ranks, size_gb and work.
    """
    import torch

    args.work.mkdir(parents=True, exist_ok=True)
    args.gpus = torch.cuda.device_count()
    args.device = "cuda" if args.gpus else "cpu"
    found: dict[tuple[str, ...], Any] = {}
    for schema in args.schemas:
        for sink in args.sinks.split(","):
            for num in map(int, args.processes.split(",")):
                found[schema, f"convert, {num} processes", sink] = partial(
                    conversion, schema, num, sink, args
                )
        for kind in ("tp", "ep"):
            found[schema, f"verify, {kind} {args.ranks}", ""] = partial(
                verification, schema, kind, args
            )
        found[schema, f"load, tp {args.ranks}", ""] = partial(loaded, schema, args)
    return found


def source_of(args: argparse.Namespace) -> Path:
    """The model, whose layers have the same weights: sooner made."""
    layer_bytes = 6 * SHAPE["experts"] * SHAPE["hidden"] * SHAPE["intermediate"]
    layers = max(1, round(args.size_gb * 1e9 / layer_bytes))
    return make_source(
        args.work / "source", **SHAPE, layers=layers, distinct_layers=1, shard_size="4GB"
    )


def conversion(schema: str, num: int, sink: str, args: argparse.Namespace, _: Path) -> list[str]:
    """Convert by so many processes; every number of them must give the same artifact, byte for byte."""
    source, out, profile = source_of(args), args.work / "out", args.work / "profile.json"
    words = [
        "convert",
        source,
        "-o",
        out,
        *words_of(schema, args),
        "--tp",
        args.ranks,
        "--profile",
        profile,
        "-q",
    ]
    script = ["-m", "hqconv"] if sink == "files" else [__file__, "discard"]
    seconds = torchrun(num, *script, *words)
    profiles = [json.loads(path.read_text()) for path in args.work.glob(f"{profile.name}*")]
    for path in args.work.glob(f"{profile.name}*"):
        path.unlink()
    kept = args.work / f"{schema}-tp"
    if sink == "files":  # the manifest has the SHA-256 of every file
        assert (
            not kept.exists() or (out / MANIFEST).read_bytes() == (kept / MANIFEST).read_bytes()
        ), "other bytes"
        shutil.rmtree(kept, ignore_errors=True)
        out.rename(kept)
    else:
        shutil.rmtree(out)
    gigabytes, stages = size_of(source) / 1e9, max(one["seconds"] for one in profiles)
    shares = {
        name: max(one["stages"][name]["share"] for one in profiles)
        for name in profiles[0]["stages"]
    }
    busiest = ", ".join(
        f"{name} {share:.2f}" for name, share in sorted(shares.items(), key=lambda n: -n[1])[:3]
    )
    return [
        f"{gigabytes:.1f} GB in {seconds:.1f} s, {gigabytes / seconds:.2f} GB/s",
        f"stages {stages:.1f} s, {gigabytes / stages:.2f} GB/s",
        f"busy: {busiest}",
    ]


def verification(schema: str, kind: str, args: argparse.Namespace, _: Path) -> list[str]:
    """Verify an artifact against its source: files, weights, and the kernel on every rank."""
    source, out = source_of(args), args.work / f"{schema}-{kind}"
    if kind == "ep":
        words = [*words_of(schema, args), "--ep", args.ranks, "--redundant-experts", args.ranks]
        torchrun(args.ranks, "-m", "hqconv", "convert", source, "-o", out, *words, "-q")
    begun = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "hqconv",
        "verify",
        out,
        "--source",
        source,
        "--device",
        args.device,
        "--json",
    ]
    done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, cwd=REPO)
    checks = json.loads(done.stdout)["checks"]
    seconds = time.monotonic() - begun
    assert args.device == "cpu" or checks["kernel"]["status"] == "pass"
    if kind == "ep":
        shutil.rmtree(out)
    layers = checks["kernel"]["measured"].values()
    errors = [
        f"{key} {max(one[key] for one in layers):.4f}"
        for key in ("kernel", "against_source")
        if layers
    ]
    statuses = ", ".join(f"{name} {check['status']}" for name, check in checks.items())
    return [f"{statuses}: {seconds:.1f} s", ", ".join(errors), ""]


def loaded(schema: str, args: argparse.Namespace, _: Path) -> list[str]:
    """Fill tensors of every rank at once; the second of two loads counts."""
    report = args.work / "load"
    torchrun(
        args.gpus or args.ranks, __file__, "load", args.work / f"{schema}-tp", report, args.device
    )
    found = [json.loads(path.read_text()) for path in sorted(args.work.glob("load.*"))]
    for path in args.work.glob("load.*"):
        path.unlink()
    gigabytes, seconds = (
        sum(one["bytes_in"] for one in found) / 1e9,
        max(one["stages_s"] for one in found),
    )
    memory = [f"{key} {max(one[key] for one in found):.2f} GB" for key in ("host_gb", "gpu_gb")]
    told = f"{gigabytes:.1f} GB by {len(found)} processes in {seconds:.3f} s, {gigabytes / seconds:.1f} GB/s"
    return [told, f"largest process: {', '.join(memory)}", ""]


def words_of(schema: str, args: argparse.Namespace) -> list[Any]:
    """Options of every conversion."""
    return ["--schema", schema, "--target", "sm90", "--device", args.device]


def torchrun(num: int, *words: Any) -> float:
    """Run a script or module of this checkout in so many processes; seconds until the last one ended."""
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num),
    ]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, *map(str, words)], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert not done.returncode, f"exit code {done.returncode}"
    return time.monotonic() - begun


# --- in each of torchrun's processes -----------------------------------------------------------------------


def discard(words: list[str]) -> None:
    """Run hqconv; its files of experts are holes, which it still hashes."""
    from hqconv.cli.app import main as hqconv
    from hqconv.conversion.output_folder import UnitWriter

    UnitWriter.write_at = lambda *_: None  # type: ignore[method-assign]
    os.posix_fallocate = lambda file, _, size: os.ftruncate(file, size)
    sys.argv = ["hqconv", *words]
    hqconv()


def load_ranks(artifact: Path, report: Path, device: str) -> None:
    """Load this process's ranks of an artifact onto its GPU, beginning when all processes are ready."""
    import torch
    from torch import distributed

    rank, num = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo")
    if device != "cpu":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    folders = [str(folder) for folder in sorted((artifact / "experts").iterdir())[rank::num]]
    for _ in range(2):
        job = {"folders": folders, "options": {"device": device}, "ready": distributed.barrier}
        found = load(job)
    found["host_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    found["gpu_gb"] = torch.cuda.max_memory_reserved() / 1e9 if device != "cpu" else 0.0
    report.with_suffix(f".{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "discard":
        discard(sys.argv[2:])
    else:
        load_ranks(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
