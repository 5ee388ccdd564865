"""Serve artifacts with vLLM on the GPUs of this machine, and compare what comes out: the proof behind docs/serving.md.

    python scripts/check_serving.py same  --work DIR [--schemas …] [--tp 2 [--ep]]     answers of both layouts
    python scripts/check_serving.py start --work DIR [--layers 4 --experts 64]         starts side by side

`same`: each schema is converted in both layouts. Where a stock vLLM serves the checkpoint layout, tokens and
log-probabilities must be equal, bit for bit; where it does not, the first tokens' log-probabilities are compared with a
16-bit checkpoint of the decoded weights. `start`: kernel layout, checkpoint layout, quantization at every start, and
16-bit weights; and the rate at which the same files can be read into the GPU. Needs vLLM and a GPU of the target.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from hqconv.schemas import artifact as names
from hqconv.schemas.stock_vllm import stock_vllm_obstacle
from hqconv.schemas.target import resolve_schema
from scripts.shared import make_source

ENGINE = Path(__file__).with_name("serve_once.py")
SCHEMAS = (
    *("mxfp4", "mxfp8", "fp8", "fp8-block", "int8", "int4", "int2-g64", "int3-g64", "int5-g128", "int7-c"),
    *("nvfp4", "fp8-tensor", "fp8-e5m2", "fp6-e3m2", "fp6-e2m3", "int4-g64-zp", "int4-g128-fpzp"),
)
ONLINE = {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": 32}  # mxfp4, by vLLM


@dataclass
class Engine:
    """One engine to start: a name for the report, the folder, arguments of serve_once.py, variables."""

    name: str
    model: Path
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Start it, and return what it reports; the last lines of its log where it fails."""
        command = [sys.executable, str(ENGINE), str(self.model), *self.arguments]
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **self.variables})
        lines = done.stdout.strip().splitlines() or [""]
        if done.returncode or not lines[-1].startswith("{"):
            log = (done.stdout + done.stderr).splitlines()
            errors = [line for line in log if "Error" in line or "error" in line][-6:]
            return {"failed": errors or log[-12:]}
        log = [line.partition("] ")[2] for line in (done.stdout + done.stderr).splitlines()]
        said = [
            line
            for line in log
            if line.startswith(("Experts: ", "Model loading took", "Loading weights took"))
        ]
        return {**json.loads(lines[-1]), "said": said, "process_s": time.perf_counter() - begun}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("same", "start"))
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
    parser.add_argument("--both", action="store_true", help="only schemas that a stock vLLM serves as well")
    parser.add_argument("--jobs", type=int, default=4, help="engines at once, for answers alone")
    parser.add_argument("--runs", type=int, default=2, help="starts of each kind; the last is reported")
    parser.add_argument("--words", default="{}", help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, help="write the report there as JSON")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    report = same(a) if a.what == "same" else start(a)
    if a.out:
        a.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("FAILED" if report["failed"] else "all good", flush=True)
    sys.exit(bool(report["failed"]))


def source_of(a: argparse.Namespace) -> Path:
    """The 16-bit checkpoint that everything comes from."""
    folder: Path = a.work / f"{a.model_type}-{a.dtype}-{a.layers}x{a.experts}"
    if not folder.exists():
        sizes = {key: getattr(a, key) for key in ("hidden", "intermediate", "layers", "experts", "dtype")}
        make_source(folder, **sizes, model_type=a.model_type, distinct_layers=2, shard_size="2GB")
    return folder


def convert(a: argparse.Namespace, source: Path, schema: str, layout: str) -> Path:
    """One conversion, unless it is there."""
    grid = {"tp": 1, "ep": a.tp} if a.ep else {"tp": a.tp, "ep": 1}
    if layout == "checkpoint":
        grid = {"tp": 1, "ep": 1}
    out: Path = a.work / f"{source.name}-{schema}-{layout}-tp{grid['tp']}-ep{grid['ep']}"
    if not out.exists():
        hqconv.convert(source, out, schema=schema, layout=layout, dtype=a.dtype, target="sm90", **grid)
    return out


def decoded(a: argparse.Namespace, source: Path, artifact: Path) -> Path:
    """The source with the artifact's experts, decoded and rounded to 16 bits."""
    out: Path = a.work / f"{artifact.name}-decoded"
    if out.exists():
        return out
    out.mkdir()
    dtype, shards = getattr(torch, a.dtype), sorted(source.glob("*.safetensors"))
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    for block in json.loads((artifact / names.MANIFEST).read_text(encoding="utf-8"))["blocks"]:
        experts = hqconv.dequantize(artifact, block=block)
        for role, word in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            for index, matrix in enumerate(experts[role]):
                name = f"{block}.{index}.{word}.weight"
                assert name in tensors
                tensors[name] = matrix.to(dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for path in source.glob("*.json"):
        if path.name != names.INDEX:
            (out / path.name).write_bytes(path.read_bytes())
    return out


def same(a: argparse.Namespace) -> dict[str, Any]:
    """Answers of the kernel layout beside those of the checkpoint layout or of the decoded weights."""
    source = source_of(a)
    arguments = ["--tp", str(a.tp), *(["--ep"] if a.ep else []), "--words", a.words]
    pairs = {}
    for schema in a.schemas:
        obstacle = stock_vllm_obstacle(resolve_schema(schema), a.dtype)
        if obstacle and a.both:
            continue
        kernel = convert(a, source, schema, "kernel")
        other = decoded(a, source, kernel) if obstacle else convert(a, source, schema, "checkpoint")
        pair = [Engine(f"{schema}: kernel", kernel, arguments), Engine(f"{schema}: other", other, arguments)]
        pairs[schema] = (obstacle, pair)
    torch.cuda.empty_cache()
    engines = [
        pair[which] for which in (0, 1) for _, pair in pairs.values()
    ]  # the second find compiled kernels
    for number, engine in enumerate(engines):
        if a.tp == 1:
            engine.variables["CUDA_VISIBLE_DEVICES"] = str(number % torch.cuda.device_count())
    with ThreadPoolExecutor(a.jobs) as pool:
        found = dict(zip([e.name for e in engines], pool.map(Engine.run, engines), strict=True))
    report: dict[str, Any] = {"schemas": {}, "engines": found, "failed": False}
    for schema, (obstacle, pair) in pairs.items():
        answers = [found[engine.name] for engine in pair]
        words = compare(*answers, must_equal=obstacle is None)
        report["schemas"][schema] = words
        report["failed"] |= not words["passed"]
        print(
            schema,
            "against",
            "the decoded weights" if obstacle else "the checkpoint layout",
            words,
            flush=True,
        )
        for engine in pair:
            if "failed" in found[engine.name]:
                print(engine.name, *found[engine.name]["failed"], sep="\n    ", flush=True)
    return report


def compare(mine: dict[str, Any], other: dict[str, Any], *, must_equal: bool) -> dict[str, Any]:
    """How far two engines' answers agree; log-probabilities up to the first token that differs."""
    if "failed" in mine or "failed" in other:
        return {"passed": False, "why": "an engine did not start"}
    num_tokens = equal = 0
    first, later = 0.0, 0.0
    for left, right in zip(mine["answers"], other["answers"], strict=True):
        first = max(first, abs(left[0][1] - right[0][1])) if left[0][0] == right[0][0] else max(first, 1.0)
        num_tokens += len(left)
        for (token, log_p), (other_token, other_p) in zip(left, right, strict=True):
            if token != other_token:
                break
            equal += 1
            later = max(later, abs(log_p - other_p))
    repeats = mine["answers"] == mine["again"] and other["answers"] == other["again"]
    is_same = mine["answers"] == other["answers"]
    return {
        "passed": is_same if must_equal else first < 0.25,
        "identical": is_same,
        "tokens": f"{equal}/{num_tokens}",
        "first_log_p": first,
        "log_p": later,
        "repeats": repeats,
    }


def start(a: argparse.Namespace) -> dict[str, Any]:
    """Starts side by side: times and memory of each kind of start, and the rate of reading into the GPU."""
    source, schema = source_of(a), a.schemas[0] if len(a.schemas) == 1 else "mxfp4"
    kernel = convert(a, source, schema, "kernel")
    packed = convert(a, source, schema, "checkpoint")
    arguments = ["--memory", "0.6", "--words", a.words]
    online = {"VLLM_HUMMING_ONLINE_QUANT_CONFIG": json.dumps(ONLINE)}
    quantizing = [
        "--memory",
        "0.6",
        "--words",
        json.dumps({**json.loads(a.words), "quantization": "humming"}),
    ]
    engines = [
        Engine("kernel layout", kernel, arguments),
        Engine("checkpoint layout", packed, arguments),
        Engine("quantized at the start", source, quantizing, online),
        Engine("16-bit weights", source, arguments),
    ]
    files = sorted((kernel / names.EXPERTS_FOLDER).rglob("*.safetensors"))
    torch.cuda.empty_cache()
    limits = [reading_rate(files) for _ in range(3)]
    report: dict[str, Any] = {
        "limit_gb_s": max(limits),
        "limits_gb_s": limits,
        "failed": False,
        "engines": {},
    }
    report["rank_bytes"] = sum(path.stat().st_size for path in files)
    print({key: report[key] for key in ("rank_bytes", "limits_gb_s")}, flush=True)
    for engine in engines:
        for found in (engine.run() for _ in range(a.runs)):
            report["engines"].setdefault(engine.name, []).append(found)
            report["failed"] |= "failed" in found
            kept = {key: value for key, value in found.items() if key not in ("answers", "again")}
            print(engine.name, kept, flush=True)
    return report


def reading_rate(files: Sequence[Path], threads: int = 16, piece: int = 8 << 20) -> float:
    """GB/s of the files' bytes from the page cache through pinned memory into one buffer of the GPU."""
    buffer = torch.empty(piece, dtype=torch.uint8, device="cuda")

    def pieces() -> Iterator[tuple[Path, int]]:
        for path in files:
            for begin in range(0, path.stat().st_size, piece):
                yield path, begin

    pinned = [torch.empty(piece, dtype=torch.uint8, pin_memory=True) for _ in range(threads)]
    streams: list[Any] = [_stream() for _ in range(threads)]

    def work(number: int) -> int:
        total = 0
        for path, begin in list(pieces())[number::threads]:
            with path.open("rb", buffering=0) as file:
                count = os.preadv(file.fileno(), [pinned[number].numpy().data], begin)
            with torch.cuda.stream(streams[number]):
                buffer[:count].copy_(pinned[number][:count], non_blocking=True)
            streams[number].synchronize()
            total += count
        return total

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(work, range(threads)))
    return total / 1e9 / (time.perf_counter() - begun)


def _stream() -> Any:
    new: Any = torch.cuda.Stream  # which says nothing of its types
    return new()


if __name__ == "__main__":
    main()
