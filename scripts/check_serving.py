"""Serve artifacts with vLLM on the GPUs of this machine, and compare what comes out: the proof behind docs/serving.md.

    python scripts/check_serving.py same  --work DIR [--schemas …] [--tp 2 [--ep]]     answers of both layouts
    python scripts/check_serving.py models --work DIR [--cases deepseek,draft]         kinds of models, side by side
    python scripts/check_serving.py modes --work DIR                                   sleep, weights by name only
    python scripts/check_serving.py start --work DIR [--layers 4 --experts 64]         starts side by side
    python scripts/check_serving.py split --work DIR --sizes 15,60                     a start by its stages
    python scripts/check_serving.py read  --work DIR [--size 16]                       rank files into the GPU

`--one-gpu` puts all ranks of an engine on one GPU (scripts/one_gpu.py), `--few-kernels` spares compiling.

`models`: the cases of scripts/serving_cases.py, several engines at once (`--jobs`), ranks on one GPU. Answers must be
identical beside the checkpoint layout in stock vLLM, or near to 16-bit weights where stock vLLM has none. A case that
fails is a line.

`same`: each schema is converted in both layouts. Where a stock vLLM serves the checkpoint layout, tokens and
log-probabilities must be equal, bit for bit; where it does not, the first tokens' log-probabilities are compared with a
16-bit checkpoint of the decoded weights; how far such answers are apart by arithmetic alone, two schemas show that a
stock vLLM serves as well (`CONTROLS`): without one of them in `--schemas` that is not judged, and the last line says so
(exit 1, as for what is wrong).
`start`: kernel layout, checkpoint layout, quantization at every start, and 16-bit weights; and the rates at which the
same files can be read into the GPU. `split`: process start to first token of large artifacts
(scripts/large_artifact.py), by the functions that take the time (scripts/start_stages.py), with no kernels, with
Humming's cache and with those of `hqconv warm`. These need vLLM and a GPU of the target.
`read` needs neither: rank files of random bytes, in the page cache and dropped from it, through the plugin's loader,
through other loaders that can be imported, and as fast as the machine can (scripts/bench_reading.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hqconv.schemas import artifact_names as names
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.weight_schema import resolve_schema
from scripts import bench_reading, few_kernels, one_gpu
from scripts.engines import Engine, run_all
from scripts.serving_answers import CONTROLS, DECODED, GOOD, all_near, compare, verdict, write
from scripts.serving_cases import CASES, Comparison, comparisons, place_of
from scripts.serving_models import convert, decoded, large, source_of

SCHEMAS = (
    *("mxfp4", "mxfp8", "fp8", "fp8-block", "int8", "int4", "int2-g64", "int3-g64", "int5-g128", "int7-c"),
    *("nvfp4", "fp8-tensor", "fp8-e5m2", "fp6-e3m2", "fp6-e2m3", "int4-g64-zp", "int4-g128-fpzp"),
)
STAGES_SCRIPT = Path(__file__).with_name("serve_stages.py")
ONLINE = {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": 32}  # mxfp4, by vLLM


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("same", "models", "modes", "start", "split", "read"))
    parser.add_argument("--work", type=Path, required=True, help="folder for models, on a RAM disk")
    parser.add_argument("--schemas", type=lambda text: text.split(","), default=SCHEMAS)
    parser.add_argument("--model-type", default="qwen3_moe")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks of an engine on one GPU (scripts/one_gpu.py)")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help="of `models`")
    parser.add_argument("--device", default="auto", help="of the conversions of `models`")
    parser.add_argument("--dry-run", action="store_true", help="`models`: convert, and print the engines")
    parser.add_argument("--both", action="store_true", help="only schemas that a stock vLLM serves as well")
    parser.add_argument("--jobs", type=int, default=4, help="engines at once, for answers alone")
    parser.add_argument("--runs", type=int, default=2, help="starts of each kind; the last is reported")
    parser.add_argument("--few-kernels", action="store_true", help="two tile sizes for each GEMM: fewer to compile")
    parser.add_argument("--size", type=float, default=16, help="GB of rank files to read, of random bytes")
    parser.add_argument("--sizes", type=_numbers, default=[15.0, 60.0], help="GB of the artifacts of `split`")
    kernels = "starts of `split`: with no kernels, with Humming's cache of that start, with those of hqconv warm"
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=["none", "cache", "warm"], help=kernels)
    parser.add_argument("--profile", action="store_true", help="one more start, by what its load does")
    parser.add_argument("--words", default="{}", help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, help="write the report there as JSON")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    if a.few_kernels:
        few_kernels.use(a.work)
    if a.one_gpu:
        one_gpu.use(a.work)
        a.words = json.dumps(one_gpu.words_of(json.loads(a.words)))
    beside = {"same": same, "models": models, "modes": modes}
    report = {**beside, "start": start, "split": split, "read": read}[a.what](a)
    if a.out:
        write(a.out, report)
    print(said := verdict(report), flush=True)
    sys.exit(said != GOOD)


def same(a: argparse.Namespace) -> dict[str, Any]:
    """Answers of the kernel layout beside those of the checkpoint layout, and of the decoded weights."""
    pairs = pairs_of(a)
    torch.cuda.empty_cache()
    ordered = [pair[which] for which in (0, 1) for pair in pairs.values()]  # the second find compiled kernels
    engines = list({engine.name: engine for engine in ordered}.values())
    place(engines, 1 if a.one_gpu else a.tp)
    report: dict[str, Any] = {"same": {}, "near": {}, "engines": {}, "failed": False}
    found = report["engines"]
    for engine, answers in run_all(engines, a.jobs):
        found[engine.name] = answers
        if "failed" in answers:
            print(engine.name, *answers["failed"], sep="\n    ", flush=True)
        for name, pair in pairs.items():
            if engine in pair and all(one.name in found for one in pair):
                kind = "near" if pair[1].name.endswith(DECODED) else "same"
                report[kind][name] = compare(*(found[one.name] for one in pair))
                print(f"{a.model_type} {a.dtype} {name}: {report[kind][name]}", flush=True)
        if a.out:
            write(a.out, report)
    report["failed"] = not (all(one["identical"] for one in report["same"].values()) and all_near(report))
    return report


def models(a: argparse.Namespace) -> dict[str, Any]:
    """One line for each comparison of the cases: dtypes, model classes, activations, a draft, ranks."""
    report: dict[str, Any] = {"models": {}, "engines": {}, "failed": False}
    asked: list[Comparison] = []

    def engines() -> Iterator[Engine]:  # those that are made start while others are being made
        begun: set[str] = set()
        for one in comparisons(place_of(a), a.cases):
            if not isinstance(one, Comparison):
                tell(a, report, one[0], {"good": False, "why": one[1]})
                continue
            asked.append(one)
            new = [engine for engine in (one.mine, one.other) if engine.name not in begun]
            begun.update(engine.name for engine in new)
            yield from new

    if a.dry_run:
        for engine in engines():
            print(engine.name, engine.model, *engine.arguments, flush=True)
        return report
    for engine, answers in run_all(engines(), a.jobs):
        found = report["engines"]
        found[engine.name] = answers
        if "failed" in answers:
            print(engine.name, *answers["failed"], sep="\n    ", flush=True)
        for one in [x for x in asked if x.name not in report["models"] and {x.mine.name, x.other.name} <= found.keys()]:
            tell(a, report, one.name, judged(one, found))
    return report


def judged(one: Comparison, found: dict[str, Any]) -> dict[str, Any]:
    """How a comparison's engines agree, and whether that is enough."""
    words = compare(found[one.mine.name], found[one.other.name])
    drafts = {name: found[name]["drafts"] for name in (one.mine.name, one.other.name) if "drafts" in found[name]}
    is_good = words["identical"] if one.limit is None else words.get("first_log_p", math.inf) <= one.limit
    if drafts:
        words["drafts"] = drafts
        is_good &= len(drafts) == 1 or len({json.dumps(each) for each in drafts.values()}) == 1
    return {"good": is_good, **({} if one.limit is None else {"limit": one.limit}), **words}


def tell(a: argparse.Namespace, report: dict[str, Any], name: str, words: dict[str, Any]) -> None:
    """Put a comparison into the report."""
    report["models"][name] = words
    report["failed"] |= not words["good"]
    print(name, words, flush=True)
    if a.out:
        write(a.out, report)


def place(engines: list[Engine], num_gpus: int) -> None:
    """Give each engine its GPUs, in turn."""
    places = max(1, torch.cuda.device_count() // num_gpus)
    for number, engine in enumerate(engines):
        first = number % places * num_gpus
        engine.variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + num_gpus)))


def pairs_of(a: argparse.Namespace) -> dict[str, tuple[Engine, Engine]]:
    """The engines to compare, by what the comparison is called."""
    source = source_of(a)
    arguments = ["--tp", str(a.tp), *(["--ep"] if a.ep else []), "--words", a.words]
    pairs: dict[str, tuple[Engine, Engine]] = {}
    if a.model_type == "gpt_oss":
        mine = Engine("source, kernel", convert(a, source, "source", "kernel"), arguments)
        stock = [*arguments[:-1], json.dumps({**json.loads(a.words), "moe_backend": "humming"})]
        return {"source against stock vLLM": (mine, Engine("source, stock", source, stock))}
    for schema in a.schemas:
        is_stock = ENGINE.checkpoint_layout_obstacle(resolve_schema(schema), a.dtype) is None
        if a.both and not is_stock:
            continue
        kernel = convert(a, source, schema, "kernel")
        mine = Engine(f"{schema}, kernel", kernel, arguments)
        if is_stock:
            packed = convert(a, source, schema, "checkpoint")
            pairs[f"{schema} against checkpoint"] = mine, Engine(f"{schema}, checkpoint", packed, arguments)
        if not is_stock or (schema in CONTROLS and not a.both):
            weights = decoded(a, source, kernel)
            pairs[f"{schema} against{DECODED}"] = mine, Engine(f"{schema},{DECODED}", weights, arguments)
    return pairs


def modes(a: argparse.Namespace) -> dict[str, Any]:
    """Answers after sleeping, lightly and deeply, must be those of before; a dummy load must start."""
    kernel = convert(a, source_of(a), a.schemas[0], "kernel")
    dummy = json.dumps({**json.loads(a.words), "load_format": "dummy"})
    engines = [Engine("sleep", kernel, ["--sleep", "--words", a.words]), Engine("dummy", kernel, ["--words", dummy])]
    found = {engine.name: answers for engine, answers in run_all(engines, 2)}
    report: dict[str, Any] = {"engines": found}
    slept = found["sleep"]
    same_after = {level: slept.get(f"after_sleep_{level}") == slept.get("answers") for level in (1, 2)}
    report["failed"] = "failed" in slept or not all(same_after.values()) or "failed" in report["engines"]["dummy"]
    print("the same after sleep:", same_after, *slept.get("failed", ()), flush=True)
    print("dummy:", *report["engines"]["dummy"].get("failed", ["started"]), sep="\n    ", flush=True)
    return report


def start(a: argparse.Namespace) -> dict[str, Any]:
    """Starts side by side: times and memory of each kind of start, and the rate of reading into the GPU."""
    source, schema = source_of(a), a.schemas[0] if len(a.schemas) == 1 else "mxfp4"
    kernel = convert(a, source, schema, "kernel")
    packed = convert(a, source, schema, "checkpoint")
    arguments = ["--memory", "0.6", "--words", a.words]
    online = {"VLLM_HUMMING_ONLINE_QUANT_CONFIG": json.dumps(ONLINE)}
    quantizing = ["--memory", "0.6", "--words", json.dumps({**json.loads(a.words), "quantization": "humming"})]
    engines = [
        Engine("kernel layout", kernel, arguments),
        Engine("checkpoint layout", packed, arguments),
        Engine("quantized at the start", source, quantizing, online),
        Engine("16-bit weights", source, arguments),
    ]
    if a.profile:
        engines.append(Engine("kernel layout, profiled", kernel, [*arguments, "--profile"]))
    files = sorted((kernel / names.EXPERTS_FOLDER).rglob("*.safetensors"))
    torch.cuda.empty_cache()
    report: dict[str, Any] = {"reading": bench_reading.measure(files, torch.device("cuda", 0), 3, is_cold=False)}
    report |= {"failed": False, "engines": {}, "rank_bytes": sum(path.stat().st_size for path in files)}
    print(report["rank_bytes"], json.dumps(report["reading"]["rates"], indent=1), flush=True)
    torch.cuda.empty_cache()
    for engine, found in run_all([engine for engine in engines for _ in range(a.runs)], 1):
        report["engines"].setdefault(engine.name, []).append(found)
        report["failed"] |= "failed" in found
        left_out = ("answers", "again", "first", "profile")
        print(engine.name, {key: value for key, value in found.items() if key not in left_out}, flush=True)
        print(*found.get("profile", ()), sep="\n", flush=True)
        if a.out:
            write(a.out, report)
    return report


def split(a: argparse.Namespace) -> dict[str, Any]:
    """Starts of large artifacts by their stages; the parts of each sum are the functions' own times."""
    report: dict[str, Any] = {"failed": False, "starts": {}}
    for size in a.sizes:
        artifact = large(a.work, size)
        torch.cuda.empty_cache()
        for engine in starts_of(artifact, a):
            found = engine.run()
            report["failed"] |= "failed" in found
            report["starts"][engine.name] = found
            print("\n".join([engine.name, *stage_lines(found)]), flush=True)
            if a.out:
                write(a.out, report)
        shutil.rmtree(artifact)
    return report


def starts_of(artifact: Path, a: argparse.Namespace) -> Iterator[Engine]:
    """Engines with no kernels, with Humming's cache, and with an empty cache and the folder of `hqconv warm`."""
    words = ["--words", a.words]
    for name in a.kernels:
        cache = artifact.with_name(f"{artifact.name}-cache{'-empty' if name == 'warm' else ''}")
        variables = {"HUMMING_CACHE_DIR": str(cache)}
        if name == "warm":
            begun = time.perf_counter()
            command = [sys.executable, "-m", "hqconv", "warm", str(artifact)]
            done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
            print(f"hqconv warm: {time.perf_counter() - begun:.1f} s, exit {done.returncode}", done.stderr[-500:])
        yield Engine(f"{artifact.name}, kernels: {name}", artifact, words, variables, STAGES_SCRIPT)


def stage_lines(found: dict[str, Any]) -> list[str]:
    """A start as text: totals, then each stage."""
    if "failed" in found:
        return [str(line) for line in found["failed"]]
    totals = ("first_token_s", "second_token_s", "load_s", "engine_s", "not_split_s", "gpu_bytes", "not_watched")
    lines = [f"  {key}: {found[key]}" for key in totals]
    lines += [
        f"  {one['seconds']:9.3f} s  {one['owner']}: {one['what']} ({one['function']})" for one in found["stages"]
    ]
    return [*lines, *(f"  {line}" for line in found["said"])]


def read(a: argparse.Namespace) -> dict[str, Any]:
    """Rates of reading rank files, ours beside the limit."""
    return bench_reading.read(a.work, a.size, a.runs)


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


if __name__ == "__main__":
    main()
