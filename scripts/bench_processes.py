"""Measure how a conversion gets faster with several processes, such as one for each GPU of a machine.

    python scripts/bench_processes.py [--processes 1,2] [--device cuda] [--size 64] [--schemas mxfp4] [--runs 3]
                                      [--sinks null,files] [--threads N] [--work FOLDER] [--no-warm-up]
                                      [--traces FOLDER]

Makes a Qwen3-MoE-shaped checkpoint (experts [768, 2048]) of about `--size` GB in the folder, reads it into the page
cache, and alternates conversions by one process with conversions by several (torchrun on this machine), `--runs` times
after one uncounted round. `--threads` is the sum of all processes. With the sink `null` no weights are written:
processes that write into one file system in memory are limited by it. `--traces FOLDER` keeps a trace of each process
of the last run, for ui.perfetto.dev. Prints one JSON line for each schema and sink; for each number of processes:

    launch_s   from the start of the command to the first line of the last process: the difference is torchrun's time
    load_s     until all processes are at work: imports, CUDA, planning, and the check of the shared folder
    work_s     from the first process at work to the end of the last one
    cpu_s      core-seconds of all processes in that time
    steady     GB/s of the source after the first batch of any process, without the bytes written or in flight then
    whole      GB/s of the source by the time of the whole command

`ratios` are those of the medians: several processes to one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import cached_source, convert, default_threads

FIGURES = ("launch_s", "load_s", "work_s", "cpu_s", "steady_gb_per_s", "whole_gb_per_s")


def child(job: dict[str, Any]) -> None:
    """One process of a run: writes the moments of its work to a file."""
    moments = {"started": time.monotonic()}
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from hqconv.conversion.torchrun import silence_torch

        silence_torch()
    from hqconv.conversion.executor import Executor

    run = Executor.run

    def timed(self: Executor, units: Any) -> None:
        moments["began"], cpu_s = time.monotonic(), core_seconds()
        run(self, units)
        moments["ended"], moments["cpu_s"] = time.monotonic(), core_seconds() - cpu_s
        moments["warm"] = self._profile._warm_at or moments["ended"]  # a process may get no unit

    Executor.run = timed  # type: ignore[method-assign]
    options = {**job["options"], "distributed": True}
    if job["trace"]:
        options["trace"] = f"{job['trace']}-{os.environ.get('RANK', '0')}.trace.json"
    found = convert(job["source"], job["out"], options, job["sink"])
    staging = found["profile"]["staging"]
    in_flight = staging["num_slots"] * staging["slot_bytes"] * (2 if staging["out_bytes"] else 1)
    in_flight += found["profile"]["warm_up_gigabytes"] * 1e9
    document = {**moments, "bytes_in": found["bytes_in"], "in_flight": in_flight}
    Path(job["moments"], os.environ.get("RANK", "0")).write_text(json.dumps(document))


def core_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(num_processes: int, job: dict[str, Any]) -> dict[str, float]:
    """One conversion, and its figures."""
    shutil.rmtree(job["out"], ignore_errors=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command = [sys.executable, *(torchrun if num_processes > 1 else ())]
    with tempfile.TemporaryDirectory() as moments:
        words = [str(Path(__file__).resolve()), "--child", json.dumps({**job, "moments": moments})]
        launched = time.monotonic()
        done = subprocess.run([*command, *words], stdout=subprocess.DEVNULL, check=False)
        seconds = time.monotonic() - launched
        if done.returncode:
            raise SystemExit(f"failed: {num_processes} processes, {job}")
        found = [json.loads(path.read_text()) for path in Path(moments).iterdir()]
    assert len(found) == num_processes
    began, ended = min(one["began"] for one in found), max(one["ended"] for one in found)
    num_bytes, in_flight = found[0]["bytes_in"], sum(one["in_flight"] for one in found)
    steady_bytes = max(num_bytes - in_flight, num_bytes / 2)
    return {
        "launch_s": max(one["started"] for one in found) - launched,
        "load_s": max(one["began"] for one in found) - min(one["started"] for one in found),
        "work_s": ended - began,
        "cpu_s": sum(one["cpu_s"] for one in found),
        "steady_gb_per_s": steady_bytes / 1e9 / (ended - min(one["warm"] for one in found)),
        "whole_gb_per_s": num_bytes / 1e9 / seconds,
    }


def rounds(source: Path, schema: str, sink: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of every number of processes for one schema and sink."""
    numbers = [int(number) for number in args.processes.split(",")]
    found: dict[int, list[dict[str, float]]] = {number: [] for number in numbers}
    for count in range(args.no_warm_up, args.runs + 1):
        for number, results in found.items():
            options = {"schema": schema, "target": "sm90", "device": args.device, "max_memory": args.max_memory}
            options["threads"] = max(1, args.threads // number)
            trace = "" if args.traces is None else str(args.traces.resolve() / f"{schema}-{sink}-{number}")
            job = {
                "source": str(source),
                "out": str(args.work / "out"),
                "options": options,
                "sink": sink,
                "trace": trace,
            }
            result = measure(number, job)
            if count:
                results.append(result)
    shutil.rmtree(args.work / "out", ignore_errors=True)
    medians = {n: {name: statistics.median(one[name] for one in found[n]) for name in FIGURES} for n in numbers}
    speeds = ("steady_gb_per_s", "whole_gb_per_s")
    ratios = {n: {name: round(medians[n][name] / medians[numbers[0]][name], 2) for name in speeds} for n in numbers[1:]}
    return {
        "schema": schema,
        "sink": sink,
        "device": args.device,
        "threads": args.threads,
        "runs": args.runs,
        "processes": {n: {name: round(value, 2) for name, value in one.items()} for n, one in medians.items()},
        "ratios": ratios,
    }


def main() -> None:
    """Measure, and print one JSON line for each schema and sink."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2", help="numbers of processes; ratios are to the first one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=float, default=64.0, help="GB of the source")
    parser.add_argument("--schemas", default="mxfp4")
    parser.add_argument("--sinks", default="null,files")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of all processes together")
    parser.add_argument("--max-memory", default="4GiB", help="of each process")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-warm-up", action="store_true", help="kernels are compiled already")
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--traces", type=Path, default=None)
    args = parser.parse_args()
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        args.work = Path(folder) if args.work is None else args.work
        args.work.mkdir(parents=True, exist_ok=True)
        source = cached_source(args.work / f"source-{args.size:g}", args.size)
        for schema in args.schemas.split(","):
            for sink in args.sinks.split(","):
                print(json.dumps(rounds(source, schema, sink, args)), flush=True)


if __name__ == "__main__":
    main()
