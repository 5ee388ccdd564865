"""Measure conversions against the limits of this machine and against other ways to the same result.

    python scripts/bench.py [--sizes 2,8,29] [--schemas mxfp4,int4] [--devices cpu,cuda:0] [--threads N] [--runs 3]
                            [--sinks files,null] [--cold] [--peers] [--quantized fp8-block] [--quantizer mse]
                            [--work FOLDER] [--log NAME] [--traces FOLDER] [--vary MODULE.NAME=1,2]
    python scripts/bench.py --allocate mxfp4,int4-g32-e4m3,fp8 [--sizes 8] [--devices cuda:0] [--quantizer mse]
    python scripts/bench.py --headers [--tensors 45000,178000,370000] [--formats bf16,fp8-block] [--runs 3]

The first makes Qwen3-MoE-shaped checkpoints (experts [768, 2048]) of about `--size` GB each, reads them into the page
cache, alternates hqconv with its peers, `--runs` times after one uncounted round, and then measures what this machine
can do (reading the source in parallel, writing as many bytes as come out to the same folder, SHA-256, copies to and
from the GPU; *together* is reading, writing and hashing at once with all threads, which any converter has to do). Every
figure is of a process of its own. GB/s count the source's bytes; *steady* leaves out start-up and planning, and begins
when the first batch came through: what was in flight then does not count. The last form measures how long looking at
headers takes, and nothing else (`bench_headers.py`).
With the sink `null` files are made up and forgotten. `--cold` drops the source from the page cache before each run.
`--allocate` compares `hqconv allocate` with `convert` to each of its candidates, in steady GB/s of the source times the
number of candidates.
`--peers` adds vLLM's load path, rebuilt from Humming's calls, and llm-compressor's `model_free_ptq` where installed.
`--log NAME` writes NAME.json, and a plot to NAME.svg. `--traces FOLDER` keeps a trace of the last run of each kind of
conversion, for ui.perfetto.dev; taking it costs a little time. `--vary conversion.executor._OPEN_UNITS=4,8` alternates
conversions under several values of a constant of hqconv; the first value is the one beside limits and peers.

First it proves that nothing was bought with other bytes: small conversions to the schemas, on every device, must be
those on record (tests/golden/artifacts.json). Exit code 1 where they are not.
"""

from __future__ import annotations

import argparse
import importlib
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
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_headers import measure_headers
from scripts.bench_limits import measure_limits, read_all
from scripts.bench_plot import plot
from scripts.shared import make_source

EXPERT_BYTES = 3 * 768 * 2048 * 2
EXPERTS_PER_LAYER = 32
HQCONV, VLLM, LLM_COMPRESSOR = "hqconv", "vllm-load-path", "llm-compressor"
ALLOCATE = "hqconv allocate"


# --- one run, in a process of its own ----------------------------------------------------------------------


def convert(source: str, out: str, words: dict[str, Any], sink: str) -> dict[str, Any]:
    """One conversion; what its stages did."""
    import hqconv

    if sink == "null":
        from hqconv.conversion import collect_input_scales, output_folder
        from hqconv.conversion import convert as convert_module
        from hqconv.io.durable_files import FileRecord

        class Nothing:
            """Takes what is written, and forgets it."""

            def __init__(self, *_: object) -> None: ...
            def write_at(self, *_: object) -> None: ...
            def finish_file(self, file: Any, *_: object) -> FileRecord:
                return FileRecord(file.path, file.size_bytes, "0" * 64)

            def publish(self) -> None: ...
            def abandon(self) -> None: ...

        def forget(self: Any, _: bytes) -> None:
            self._journal.remove()

        for owner, name, value in (
            (collect_input_scales, "UnitWriter", Nothing),
            (output_folder.OutputFolder, "seal", forget),
            (convert_module, "sha256_of", lambda _: ""),  # of a manifest that is not written
            (convert_module, "wait_for_files", lambda *_: None),  # of other processes
        ):
            mock.patch.object(owner, name, value).start()  # fails where the name is no longer there
    report = hqconv.convert(source, out, **words)
    return {"bytes_in": report.num_bytes_in, "bytes_out": report.num_bytes_out, "profile": report.profile}


def allocate(source: str, out: str, words: dict[str, Any], _: str) -> dict[str, Any]:
    """One allocation; `words["schema"]`: its candidates. Steady from the first progress to the last."""
    import hqconv

    seen: list[tuple[float, int]] = []
    words = {name: word for name, word in words.items() if name != "schema"} | {"candidates": words["schema"]}
    recipe = Path(out, "recipe.toml")
    Path(out).mkdir()
    hqconv.allocate(
        source, recipe, bits=8.0, **words, progress=lambda step: seen.append((time.monotonic(), step.done_bytes))
    )
    (begun, first), (ended, last) = seen[0], seen[-1]
    return {"bytes_in": last, "steady_gb_per_s": (last - first) / max(ended - begun, 1e-9) / 1e9}


def vllm_load_path(source: str, _: str, words: dict[str, Any], __: str) -> dict[str, Any]:
    """What vLLM does at every start: each matrix quantized alone, put into parameters, and these transformed."""
    from scripts.bench_peers import load_like_vllm

    return load_like_vllm(source, words["schema"], words.get("device", "cpu"))


def llm_compressor(source: str, out: str, words: dict[str, Any], _: str) -> dict[str, Any]:
    """llm-compressor's conversion without a model."""
    from scripts.bench_peers import compress_model_free

    return compress_model_free(source, out, words["schema"], words.get("device", "cpu"))


RUNS: dict[str, Callable[[str, str, dict[str, Any], str], dict[str, Any]]] = {
    HQCONV: convert,
    ALLOCATE: allocate,
    VLLM: vllm_load_path,
    LLM_COMPRESSOR: llm_compressor,
}


def child(job: dict[str, Any]) -> None:
    """The process of one run: prints what it found as JSON."""
    for name, value in job.get("constants", {}).items():
        module, _, constant = f"hqconv.{name}".rpartition(".")
        mock.patch.object(importlib.import_module(module), constant, value).start()
    found = RUNS[job["who"]](job["source"], job["out"], job["words"], job["sink"])
    found["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        found["peak_gpu_bytes"] = sys.modules["torch"].cuda.max_memory_reserved()
    print(json.dumps(found))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One run from outside: the wall time of the whole process, and what it printed."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(job)]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"failed: {job}")
    return {"wall_seconds": seconds, **json.loads(done.stdout.splitlines()[-1])}


# --- rounds ------------------------------------------------------------------------------------------------


def cached_source(folder: Path, size_gb: float) -> Path:
    """A checkpoint of about this size, in the page cache."""
    layers = max(1, round(size_gb * 1e9 / (EXPERT_BYTES * EXPERTS_PER_LAYER)))
    if not folder.exists():
        sizes = {"hidden": 2048, "intermediate": 768, "layers": layers, "experts": EXPERTS_PER_LAYER}
        make_source(folder, **sizes, vocab=1024, distinct_layers=8, shard_size="4GB")
    read_all(folder, default_threads())
    return folder


def quantized_source(source: Path, schema: str) -> Path:
    """The checkpoint in the checkpoint layout of a schema; in the page cache by having been written."""
    out = source.with_name(f"{source.name}-{schema}")
    if not out.exists():
        command = [sys.executable, "-m", "hqconv", "convert", str(source), "-o", str(out), "-q"]
        subprocess.run([*command, "--schema", schema, "--layout", "checkpoint"], check=True)
    return out


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Measured = dict[tuple[str, int, str], dict[str, float]]  # limits by source, bytes of output and device


def rounds(
    source: Path, schema: str, device: str, sink: str, args: argparse.Namespace, known: Measured, *, is_warm: bool
) -> dict[str, Any]:
    """All that is said of one schema, size, device and sink; `is_warm`: no uncounted round is needed."""
    words = {"schema": schema, "target": "sm90", "device": device, "tp": args.tp, "threads": args.threads}
    words |= {"max_memory": args.max_memory, "quantizer": args.quantizer}
    out = args.work / f"out-{schema}"
    variants = variants_of(args.vary)
    runs = {label: (HQCONV, constants) for label, constants in variants.items()}
    runs |= {who: (who, {}) for who in peers(args) if who != HQCONV}
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in runs}
    for number in range(is_warm, args.runs + 1):
        for label, (who, constants) in runs.items():
            shutil.rmtree(out, ignore_errors=True)
            if args.cold:
                forget(source)
            job = {"who": who, "source": str(source), "out": str(out), "words": words, "sink": sink}
            if who == HQCONV and args.traces is not None:
                name = f"{schema}-{device.replace(':', '')}-{sink}-{source.name}-{label}.trace.json"
                job["words"] = words | {"trace": str(args.traces.resolve() / name)}
            result = measure(job | {"constants": constants})
            if number:
                found[label].append(result)
    shutil.rmtree(out, ignore_errors=True)
    first = next(iter(variants))
    ours = found[first]
    key = (str(source), ours[0]["bytes_out"], device)
    if key not in known:
        known[key] = measure_limits(source, args.work, key[1], args.threads, device, cold=args.cold)
    limits = known[key]
    gigabytes = ours[0]["bytes_in"] / 1e9
    middle = sorted(ours, key=steady_speed)[len(ours) // 2]
    steady = statistics.median(map(steady_speed, ours))
    whole = {who: gigabytes / statistics.median(r["wall_seconds"] for r in rs) for who, rs in found.items()}
    written = () if sink == "null" else ("write", "digest")
    alone = min(limits[name] for name in ("read", "copy_in", "copy_out", *written))
    at_once = min(alone, limits["read" if sink == "null" else "together"])
    return {
        "schema": schema,
        "source": args.quantized or "bfloat16",
        "quantizer": args.quantizer,
        "device": device,
        "threads": args.threads,
        "sink": sink,
        "cache": "cold" if args.cold else "warm",
        "source_gb": round(gigabytes, 2),
        "steady_gb_per_s": round(steady, 5),
        "whole_gb_per_s": {who: round(speed, 3) for who, speed in whole.items()},
        "steady_gb_per_s_of": {
            label: round(statistics.median(map(steady_speed, found[label])), 5) for label in variants
        },
        "ratio_to_peers": {who: round(whole[first] / s, 2) for who, s in whole.items() if who not in variants},
        "limits_gb_per_s": {name: round(limit, 2) for name, limit in limits.items() if limit < float("inf")},
        "share_of_nearest_limit": round(steady / alone, 2),
        "share_of_limits_together": round(steady / at_once, 2),
        "peak_host_mb": round(max(r["peak_host_bytes"] for r in ours) / 1e6),
        "peak_gpu_mb": round(max(r.get("peak_gpu_bytes", 0) for r in ours) / 1e6),
        "profile": middle["profile"],
    }


def allocation_rounds(source: Path, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Speeds of an allocation for each of its candidates, and of conversions to them."""
    words = {"target": "sm90", "device": device, "tp": args.tp, "threads": args.threads}
    words |= {"max_memory": args.max_memory, "quantizer": args.quantizer}
    out, candidates = args.work / "out-allocate", args.allocate.split(",")
    found: dict[str, list[float]] = {}
    for number in range(args.no_warm_up, args.runs + 1):
        for who, schema in ((ALLOCATE, args.allocate), *((HQCONV, one) for one in candidates)):
            shutil.rmtree(out, ignore_errors=True)
            named = words | {"schema": schema}
            done = measure({"who": who, "source": str(source), "out": str(out), "words": named, "sink": "files"})
            if number:
                speed = done["steady_gb_per_s"] * len(candidates) if who == ALLOCATE else steady_speed(done)
                found.setdefault(schema if who == HQCONV else who, []).append(speed)
    shutil.rmtree(out, ignore_errors=True)
    speeds = {name: round(statistics.median(each), 5) for name, each in found.items()}
    per_candidate = speeds.pop(ALLOCATE)
    mean = statistics.harmonic_mean(speeds.values())
    return {
        "allocate": candidates,
        "quantizer": args.quantizer,
        "device": device,
        "threads": args.threads,
        "steady_gb_per_s_and_candidate": per_candidate,
        "convert_steady_gb_per_s": speeds,
        "share_of_convert": round(per_candidate / mean, 2),
    }


def steady_speed(result: dict[str, Any]) -> float:
    """GB/s of the source once the first batch has come through."""
    profile = result["profile"]
    staging = profile["staging"]
    in_flight = staging["num_slots"] * staging["slot_bytes"] * (2 if staging["out_bytes"] else 1)
    num_bytes = max(result["bytes_in"] - in_flight - profile["warm_up_gigabytes"] * 1e9, result["bytes_in"] / 2)
    return float(num_bytes / (profile["seconds"] - profile["warm_up_seconds"]) / 1e9)


def variants_of(vary: str) -> dict[str, dict[str, int]]:
    """The variants of hqconv that run in turn: label → values of constants."""
    if not vary:
        return {HQCONV: {}}
    name, _, values = vary.partition("=")
    return {f"{name}={value}": {name: int(value)} for value in values.split(",")}


def peers(args: argparse.Namespace) -> list[str]:
    """Who runs: hqconv, and with --peers what is there to compare it with."""
    if not args.peers:
        return [HQCONV]
    from importlib.util import find_spec

    return [HQCONV, VLLM, *([LLM_COMPRESSOR] if find_spec("llmcompressor") else [])]


def check_bytes(devices: list[str], schemas: list[str]) -> None:
    """Hold small conversions to the artifacts on record. Raises SystemExit where one differs."""
    from scripts.bench_peers import differences

    wrong = differences(devices, schemas)
    if wrong:
        raise SystemExit("other bytes than those on record:\n" + "\n".join(wrong))
    print(f"bytes: as on record on {' and '.join(devices)}", flush=True)


def default_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def measure_others(args: argparse.Namespace) -> None:
    """The forms with --headers and --allocate: print one JSON line each."""
    if args.headers:
        sizes = [int(size) for size in args.tensors.split(",")]
        for found in measure_headers(args.work, sizes, args.formats.split(","), args.runs):
            print(json.dumps(found), flush=True)
        return
    for size, device in itertools.product(map(float, args.sizes.split(",")), args.devices.split(",")):
        source = cached_source(args.work / f"source-{size:g}", size)
        print(json.dumps(allocation_rounds(source, device, args)), flush=True)


def main() -> None:
    """Measure, and print one JSON line for each schema and size."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", default="mxfp4,int4")
    parser.add_argument("--sizes", "--size", default="4.8")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--devices", "--device", default="cpu")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sinks", "--sink", default="files")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--no-warm-up", action="store_true", help="count the first round: kernels are compiled")
    parser.add_argument("--skip-bytes", action="store_true", help="another run has proved the bytes")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--max-memory", default="4GiB")
    parser.add_argument("--quantized", default="")
    parser.add_argument("--quantizer", default="rtn")
    parser.add_argument("--allocate", default="", help="candidates: the speed of hqconv allocate, and nothing else")
    parser.add_argument("--headers", action="store_true", help="how long looking takes, and nothing else")
    parser.add_argument("--tensors", default="45000,178000,370000")
    parser.add_argument("--formats", default="bf16,fp8-block")
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--traces", type=Path, default=None)
    parser.add_argument("--vary", default="")
    args = parser.parse_args()
    args.work = args.work or Path(tempfile.mkdtemp(prefix="hqconv-bench-"))
    if args.headers or args.allocate:
        measure_others(args)
        return
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    schemas, devices, sinks = (one.split(",") for one in (args.schemas, args.devices, args.sinks))
    if not args.skip_bytes:
        check_bytes(sorted({"cpu", *devices}), schemas)
    results = []
    warm: set[tuple[str, str]] = set()
    known: Measured = {}
    for size in map(float, args.sizes.split(",")):
        source = cached_source(args.work / f"source-{size:g}", size)
        if args.quantized:
            source = quantized_source(source, args.quantized)
        for schema, device, sink in itertools.product(schemas, devices, sinks):
            is_warm = args.no_warm_up or ((schema, device) in warm and not args.peers)
            results.append(rounds(source, schema, device, sink, args, known, is_warm=is_warm))
            warm.add((schema, device))
            print(json.dumps(results[-1]), flush=True)
            if args.log:
                args.log.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
                args.log.with_suffix(".svg").write_text(plot(results))


if __name__ == "__main__":
    main()
