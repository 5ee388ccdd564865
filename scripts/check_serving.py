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
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
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

ENGINE_S = 240.0  # no start takes longer
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
        with tempfile.TemporaryDirectory() as scratch:
            report, log = Path(scratch, "report.json"), Path(scratch, "log")
            command = [sys.executable, str(ENGINE), str(self.model), str(report), *self.arguments]
            begun = time.perf_counter()
            with log.open("wb") as out:  # no pipe: workers that outlive their parent would keep it open
                started = subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=out,
                    env={**os.environ, **self.variables},
                    start_new_session=True,
                )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(ENGINE_S)
            seconds = time.perf_counter() - begun
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            if not report.is_file():
                errors = [line for line in lines if "Error" in line][-6:]
                return {"failed": [f"after {seconds:.0f} s", *(errors or lines[-12:])]}
            said = [line.partition("] ")[2] for line in lines]
            told = [
                line
                for line in said
                if line.startswith(("Experts: ", "Model loading took", "Loading weights"))
            ]
            return {**json.loads(report.read_text(encoding="utf-8")), "said": told, "process_s": seconds}


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
        write(a.out, report)
    print("FAILED" if report["failed"] else "all good", flush=True)
    sys.exit(bool(report["failed"]))


def source_of(a: argparse.Namespace) -> Path:
    """The 16-bit checkpoint that everything comes from."""
    folder: Path = a.work / f"{a.model_type}-{a.dtype}-{a.layers}x{a.experts}"
    if not folder.exists() and a.model_type == "gpt_oss":
        write_gpt_oss(folder, a)
    elif not folder.exists():
        sizes = {key: getattr(a, key) for key in ("hidden", "intermediate", "layers", "experts", "dtype")}
        make_source(folder, **sizes, model_type=a.model_type, distinct_layers=2, shard_size="2GB")
    return folder


def write_gpt_oss(folder: Path, a: argparse.Namespace) -> None:
    """A tiny GPT-OSS whose experts are mxfp4 of random codes, with biases, as the original is stored."""
    import transformers

    config = transformers.GptOssConfig(
        hidden_size=a.hidden,
        intermediate_size=a.intermediate,
        num_hidden_layers=a.layers,
        num_local_experts=a.experts,
        num_experts_per_tok=4,
        num_attention_heads=a.hidden // 64,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=2048,
        max_position_embeddings=4096,
        torch_dtype=a.dtype,
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).to(getattr(torch, a.dtype))
    tensors = {name: t for name, t in model.state_dict().items() if not name.endswith("_proj")}
    for layer in range(a.layers):
        for name, rows, columns in (
            ("gate_up_proj", 2 * a.intermediate, a.hidden),
            ("down_proj", a.hidden, a.intermediate),
        ):
            shape, prefix = (a.experts, rows, columns // 32), f"model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{prefix}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{prefix}_scales"] = torch.randint(117, 122, shape, dtype=torch.uint8)
            tensors[f"{prefix}_bias"] = torch.randn(a.experts, rows).mul(0.1).to(getattr(torch, a.dtype))
    folder.mkdir()
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"],
    }
    config.save_pretrained(folder)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


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
    pairs: dict[str, tuple[str | None, list[Engine]]] = {}
    if a.model_type == "gpt_oss":
        kernel = convert(a, source, "source", "kernel")
        stock = [*arguments[:-1], json.dumps({**json.loads(a.words), "moe_backend": "humming"})]
        pairs["source"] = (
            None,
            [Engine("source: kernel", kernel, arguments), Engine("source: stock", source, stock)],
        )
    for schema in a.schemas if not pairs else ():
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
    places = max(1, torch.cuda.device_count() // a.tp)
    for number, engine in enumerate(engines):
        first = number % places * a.tp
        engine.variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + a.tp)))
    report: dict[str, Any] = {"schemas": {}, "engines": {}, "failed": False}
    found = report["engines"]
    with ThreadPoolExecutor(a.jobs) as pool:
        for engine, answers in zip(engines, pool.map(Engine.run, engines), strict=True):
            found[engine.name] = answers
            if "failed" in answers:
                print(engine.name, *answers["failed"], sep="\n    ", flush=True)
            schema = engine.name.partition(":")[0]
            if engine is not pairs[schema][1][1]:
                continue
            obstacle, pair = pairs[schema]
            words = compare(*(found[one.name] for one in pair), must_equal=obstacle is None)
            report["schemas"][schema] = words
            report["failed"] |= not words["passed"]
            against = "the checkpoint layout" if obstacle is None else "the decoded weights"
            print(f"{a.model_type} {a.dtype} {schema} against {against}: {words}", flush=True)
            if a.out:
                write(a.out, report)
    return report


def write(path: Path, report: dict[str, Any]) -> None:
    """What is known so far."""
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


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
