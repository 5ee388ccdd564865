"""Measure conversions, verifications and loads, of this checkout alone or in turn with another one.

    python scripts/bench.py convert|verify|load [--sizes 2,8] [--schemas mxfp4,int4] [--devices cpu,cuda:0] [--runs 3]
                            [--against OTHER_CHECKOUT] [--threads N] [--work FOLDER]

The source is a Qwen3-MoE-shaped checkpoint (experts [768, 2048]) of about so many GB, read into the
page cache. Each run is a process of its own; after one uncounted round the checkouts take turns. One
JSON line for each case: medians in seconds of the whole process (`whole_s`), of the call in it with its imports
(`call_s`) and of the executor's stages (`stages_s`), processor time (`cpu_s`, which other work on the machine changes
least), GB/s of the source's bytes, and memory. With `--against`, `ratio` is the median over the rounds of OTHER's
seconds by this checkout's: more than 1 is faster here; `differing` names weight files of the two artifacts that are not
equal.

`load` fills tensors on the device from all rank files, as vLLM's plugin does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
EXPERT_BYTES = 3 * 768 * 2048 * 2
EXPERTS_PER_LAYER = 32
Found = dict[str, Any]


# --- one run, in a process of its own, of whichever checkout PYTHONPATH names -------------------------------


def convert(job: Found) -> Found:
    """One conversion."""
    import hqconv

    report = hqconv.convert(job["source"], job["out"], **job["options"])
    return {
        "stages_s": report.profile.get("seconds"),
        "bytes_in": report.num_bytes_in,
        "bytes_out": report.num_bytes_out,
    }


def verify(job: Found) -> Found:
    """One verification, with all checks that this machine can do."""
    import hqconv

    report = hqconv.verify(job["out"], job["source"], device=job["options"]["device"])
    if not report.passed:
        raise SystemExit(f"not verified: {report.to_dict()}")
    return {"bytes_in": size_of(Path(job["source"]))}


def load(job: Found) -> Found:
    """Tensors on the device, filled from all rank files; they are there before the time begins."""
    import torch

    from hqconv.artifact.rank_file import RankFile
    from hqconv.artifact.tensor_filler import LoadTarget, TensorFiller
    from hqconv.io.safetensors_header import read_header
    from hqconv.schemas.tensors import torch_dtype

    device = torch.device(job["options"]["device"])
    files = []
    for path in sorted(Path(job["out"], "experts").rglob("*.safetensors")):
        refs = read_header(path)[0].values()
        tensors = [
            torch.zeros(ref.shape, dtype=torch_dtype(ref.dtype), device=device) for ref in refs
        ]
        targets = [LoadTarget(ref, tensor) for ref, tensor in zip(refs, tensors, strict=True)]
        files.append((str(path), RankFile(path, path.name, "", "", {}, {}), targets))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.monotonic()
    filler = TensorFiller(files)
    for owner, _, _ in files:
        filler.wait(owner)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - begun
    return {"bytes_in": sum(file.path.stat().st_size for _, file, _ in files), "stages_s": seconds}


RUNS: dict[str, Callable[[Found], Found]] = {"convert": convert, "verify": verify, "load": load}


def child(job: Found) -> None:
    """The process of one run: prints what it found as JSON."""
    begun = time.monotonic()
    found = RUNS[job["what"]](job)
    found["call_s"], found["cpu_s"] = time.monotonic() - begun, time.process_time()
    found["peak_host_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["peak_gpu_mb"] = torch.cuda.max_memory_reserved() // 10**6
    print(json.dumps(found))


def measure(what: str, checkout: Path, source: Path, out: Path, options: Found) -> Found:
    """One run from outside: a process that uses a checkout."""
    job = {"what": what, "source": str(source), "out": str(out), "options": options}
    found = os.environ.get("PYTHONPATH", "")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(checkout), found))),
    }
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=environment,
        cwd=checkout,
    )
    seconds = time.monotonic() - begun
    if done.returncode:
        raise SystemExit(f"failed in {checkout}: {job}")
    return {"whole_s": seconds, **json.loads(done.stdout.splitlines()[-1])}


# --- rounds ------------------------------------------------------------------------------------------------


def case(what: str, source: Path, schema: str, device: str, args: argparse.Namespace) -> Found:
    """All that is said of one source, schema and device."""
    options = {"schema": schema, "target": "sm90", "device": device, "threads": args.threads}
    outs = {name: args.work / f"out-{name}" for name in args.checkouts}
    for name, out in outs.items():
        shutil.rmtree(out, ignore_errors=True)
        if what != "convert":
            measure("convert", args.checkouts[name], source, out, options)
    runs = rounds(what, source, outs, options, args)
    report: Found = {
        "what": what,
        "schema": schema,
        "device": device,
        "source_gb": round(size_of(source) / 1e9, 2),
    }
    report |= {name: summary(found) for name, found in runs.items()}
    if args.against:
        report["ratio"] = {
            key: ratio(runs, key) for key in ("whole_s", "call_s", "stages_s", "cpu_s")
        }
        report["differing"] = differing(outs["this"], outs["against"])
    for out in outs.values():
        shutil.rmtree(out)
    return report


def rounds(
    what: str, source: Path, outs: dict[str, Path], options: Found, args: argparse.Namespace
) -> dict[str, list[Found]]:
    """Runs of each checkout in turn, after one uncounted round; neither is always the first."""
    runs: dict[str, list[Found]] = {name: [] for name in outs}
    for number in range(args.runs + 1):
        for name in list(outs)[:: 1 if number % 2 else -1]:
            if what == "convert":
                shutil.rmtree(outs[name], ignore_errors=True)
            fill_cache(outs[name] / "experts" if what == "load" else source)
            found = measure(what, args.checkouts[name], source, outs[name], options)
            if number:
                runs[name].append(found)
    return runs


def summary(runs: list[Found]) -> Found:
    """Medians, and GB/s by them."""
    middle: Found = {
        key: statistics.median(run[key] for run in runs)
        for key in runs[0]
        if runs[0][key] is not None
    }
    speeds = {
        f"gb_per_{key}": middle["bytes_in"] / 1e9 / middle[key]
        for key in middle
        if key.endswith("_s")
    }
    return {key: round(value, 3) for key, value in (middle | speeds).items()}


def ratio(runs: dict[str, list[Found]], key: str) -> float | None:
    """Median over the rounds of the other's seconds by ours."""
    if runs["this"][0].get(key) is None or runs["against"][0].get(key) is None:
        return None
    pairs = zip(runs["this"], runs["against"], strict=True)
    return round(float(statistics.median(other[key] / ours[key] for ours, other in pairs)), 3)


def differing(one: Path, other: Path) -> list[str]:
    """Weight files that the two artifacts do not share, byte for byte, by their manifests."""
    first, second = (
        {
            (name, file["sha256"])
            for name, file in json.loads((out / "hqconv.json").read_text())["files"].items()
            if name.endswith(".safetensors")
        }
        for out in (one, other)
    )
    return sorted({name for name, _ in first ^ second})


# --- sources -----------------------------------------------------------------------------------------------


def make_source(folder: Path, **options: object) -> Path:
    """A checkpoint of scripts/make_checkpoint.py; `hidden=512` is its option `--hidden 512`."""
    if not folder.exists():
        words = [
            text
            for name, value in options.items()
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]
        script = Path(__file__).with_name("make_checkpoint.py")
        subprocess.run(
            [sys.executable, str(script), str(folder), *words],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return folder


def sized_source(work: Path, size_gb: float) -> Path:
    """A checkpoint of about this size."""
    layers = max(1, round(size_gb * 1e9 / (EXPERT_BYTES * EXPERTS_PER_LAYER)))
    return make_source(
        work / f"source-{size_gb:g}",
        hidden=2048,
        intermediate=768,
        layers=layers,
        experts=EXPERTS_PER_LAYER,
        vocab=1024,
        distinct_layers=8,
        shard_size="4GB",
    )


def weight_files(folder: Path) -> list[Path]:
    """All safetensors files below a folder."""
    return sorted(folder.rglob("*.safetensors"))


def size_of(folder: Path) -> int:
    """Bytes of its weight files."""
    return sum(path.stat().st_size for path in weight_files(folder))


def fill_cache(folder: Path) -> None:
    """Read a folder's weight files into the page cache."""
    subprocess.check_call(["cat", *weight_files(folder)], stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure, and print one JSON line for each case."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=RUNS)
    parser.add_argument("--sizes", "--size", default="2")
    parser.add_argument("--schemas", "--schema", default="mxfp4,int4")
    parser.add_argument("--devices", "--device", default="cpu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=lambda text: Path(text).resolve())
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    args.checkouts = {"this": REPO} | ({"against": args.against} if args.against else {})
    with tempfile.TemporaryDirectory(prefix="hqconv-bench-") as folder:
        args.work = args.work or Path(folder)
        args.work.mkdir(parents=True, exist_ok=True)
        cases = itertools.product(
            args.sizes.split(","), args.schemas.split(","), args.devices.split(",")
        )
        for size, schema, device in cases:
            source = sized_source(args.work, float(size))
            print(json.dumps(case(args.what, source, schema, device, args)), flush=True)


if __name__ == "__main__":
    main()
