"""Prove on a GPU, with vLLM, that artifacts are served right; and measure starts and tokens per second.

    python scripts/check_serving.py layouts [--schemas mxfp4,…] [--tp 2 [--ep]]  answers of both layouts; sleep; warm
    python scripts/check_serving.py dense [--schemas int8,…]                     linear layers quantized too: speed
    python scripts/check_serving.py eplb [--schemas …] --tp 2                    answers while experts move
    python scripts/check_serving.py model DIR --calibrate TEXT --text TEXT       a real model: perplexity, answer, speed
    python scripts/check_serving.py reload [--schemas …]                         new weights in place, as in RL
    python scripts/check_serving.py starts                                       with and without `hqconv warm`
    python scripts/check_serving.py server DIR --text TEXT [--cases planted]     verify --server, and planted faults

`layouts` and `eplb` of several ranks run with VLLM_BATCH_INVARIANT=1: else sums are added in any order. `--inputs
fp8`: activations of `layouts`. `model` takes a checkpoint of scripts/real_model.py and its two texts, `server` one of
2,048 positions or more; logs of servers, and each document of `verify`, go to the folder `servers` beside `--log`.
`starts` is for a checkpoint that was not made by hqconv. vLLM for a machine without a network:
scripts/vllm_archive.py. Every case is a line, and a row of `--log FILE.md`. Exit code 1 where a case fails. `--jobs
N`: cases at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from hqconv.calibration.transformers_model import read_text
from hqconv.schemas.artifact_names import MANIFEST
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.weight_schema import resolve_layer_schema
from hqconv.verification.server import VERDICTS
from scripts.bench import make_source
from scripts.check_gpu import REPO, Case, Row, finish, target_here
from scripts.server_faults import FAULTS

SERVED = ("mxfp4", "int4", "fp8", "fp8-block", "int8", "nvfp4", "int4-g64-zp")
PROMPT = "The capital of France is"
NUM_CALIBRATED, NUM_HELD_OUT, CONTEXT = 14_336, 8_192, 512
EAGER: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.1,
}
# Decoding in a CUDA graph, without torch's compiler.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 64]}
FAST: dict[str, Any] = {"compilation_config": GRAPHS, "max_model_len": 1024, "max_num_seqs": 64}
FAST |= {"max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.1}
START_S = 400.0  # no engine takes longer
# A step of one request reads 8 experts of a layer, however many there are. 48 layers of Qwen3-30B-A3B's shapes, and 24
# with DeepSeek's attention: with few layers the host takes longer for a step than the GPU.
DENSE: dict[str, dict[str, int]] = {
    "qwen3_moe": {"hidden": 2048, "intermediate": 768, "layers": 48, "head_dim": 128},
    "deepseek_v3": {"hidden": 4096, "intermediate": 1024, "layers": 24},
}
for sizes in DENSE.values():
    sizes |= {"experts": 16, "top_k": 8, "vocab": 38_000, "distinct_layers": 1}
PERPLEXITY_BOUND = 1.01
EPLB_STEPS, EPLB_ROUNDS, EPLB_COPIES = 32, 5, 8  # steps between two moves; a round has 128
COMMUNICATORS = (
    "torch_nccl",
    None,
)  # None: vLLM's default, which moves beside the steps, without NCCL
PROMPTS = [[1, *range(first, first + 20)] for first in (3, 40, 77, 114)]


def serve(
    model: Path,
    work: Path,
    engine: Mapping[str, Any],
    *,
    cache: Path | None = None,
    kernels: str = "0",
    variables: Mapping[str, str] | None = None,
    **job: Any,
) -> Any:
    """Run scripts/one_server.py on a model; what it reports. cache: of kernels; None: a new one, empty.

    variables: of the environment.
    """
    scratch = Path(tempfile.mkdtemp(dir=work))
    cache = cache or scratch / "cache"
    cache.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "HUMMING_CACHE_DIR": str(cache),
        "HQCONV_WARM_KERNELS": kernels,
        **(variables or {}),
    }
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for functions that workers run
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    if engine.get("tensor_parallel_size", 1) == 1:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    report, path = scratch / "report", scratch / "job.json"
    job |= {
        "model": str(model),
        "engine": dict(engine),
        "report": str(report),
        "begun": time.time(),
    }
    path.write_text(json.dumps(job))
    with (scratch / "log").open("w") as log:
        command = [sys.executable, str(REPO / "scripts/one_server.py"), str(path)]
        subprocess.run(
            command, env=environment, stdout=log, stderr=log, timeout=START_S, check=False
        )
    if not report.exists():
        lines = (scratch / "log").read_text(errors="replace").splitlines()
        raise AssertionError([line for line in lines if "Error" in line][-3:] or lines[-5:])
    return json.loads(report.read_text())


def command(*words: str, **environment: str) -> str:
    """Run a command of hqconv; its output. Raises AssertionError with the end of what it said."""
    words = (sys.executable, "-m", "hqconv", *words)
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (shlex.join(words[2:5]), done.stderr[-400:])
    return done.stdout


# --- layouts -----------------------------------------------------------------------------------------------


def layouts(schema: str, args: argparse.Namespace, work: Path) -> list[str]:
    """Serve the kernel layout; answers must be those of the checkpoint layout where stock vLLM serves it."""
    source = make_source(
        work / "source", hidden=1024, intermediate=768, layers=3, experts=16, vocab=512, top_k=4
    )
    out, engine = work / "kernel", engine_of(args)
    words: dict[str, Any] = {"schema": schema, "target": target_here().name, "device": "cuda"}
    words["input_schema"] = args.inputs
    words["dense"] = args.dense
    hqconv.convert(source, out, **words | ranks_of(args), allow_unserved=True)
    command("warm", str(out), "--kernels", str(work / "warm"), "-q")
    num_warm = len(list((work / "warm").rglob("*.cubin")))
    told: dict[str, Any] = {
        "kernels": str(work / "warm"),
        "cache": work / "cache",
        "prompts": PROMPTS,
    }
    mine = serve(out, work, {**engine, "enable_sleep_mode": True}, sleeps=True, **told)
    assert mine["answers"] == mine["sleep 1"] == mine["sleep 2"], "other answers after sleep"
    num_cold = mine["num_kernels"] - num_warm
    assert args.dense or not num_cold, f"{num_cold} kernels were not warm"
    cells = [f"start with {num_warm} kernels of hqconv warm {mine['started_s']:.0f} s"]
    first, *more = resolve_layer_schema(schema).each
    if not more and not ENGINE.checkpoint_layout_obstacle(first, "bfloat16"):
        hqconv.convert(source, work / "stock", **words, layout="checkpoint")
        variables = inputs_of_stock(args.inputs)
        stock = serve(work / "stock", work, engine, variables=variables, **told)
        assert stock["answers"] == mine["answers"], "other answers than the checkpoint layout"
        cells.append(f"same answers as the checkpoint layout, start {stock['started_s']:.0f} s")
    return cells


def dense(schemas: str, args: argparse.Namespace, work: Path) -> list[str]:
    """Serve two models with linear layers beside the experts in each schema: tokens per second, memory."""
    names = ["none", *schemas.split(",")]
    job: dict[str, Any] = {"speed": [1, 64], "gate": str(work / "gate")}

    def converted(model_type: str) -> dict[str, float]:
        sizes = DENSE[model_type]
        source = make_source(work / f"{model_type}-source", model_type=model_type, **sizes)
        words: dict[str, Any] = {"schema": "int4-g32-e4m3", "target": target_here().name}
        seconds = {}
        for name in names:
            begun, out = time.monotonic(), f"{model_type}-{name}"
            hqconv.convert(source, work / out, **words, dense=name, device="cuda")
            seconds[out] = time.monotonic() - begun
        return seconds

    cells = []
    with ThreadPoolExecutor(len(DENSE) * len(names)) as pool:
        seconds = {out: each for found in pool.map(converted, DENSE) for out, each in found.items()}
        served = {
            f"{model_type}-{name}": pool.submit(
                serve, work / f"{model_type}-{name}", work, FAST, **job
            )
            for model_type in DENSE
            for name in names
        }
        while _ready(work) < len(served) and not any(future.done() for future in served.values()):
            time.sleep(0.2)
        (work / "gate").touch()
        for name, future in served.items():
            report = future.result()
            speeds = [
                f"{speed:.0f} tokens/s for {n}" for n, speed in report["tokens_per_s"].items()
            ]
            took = (
                f"converted in {seconds[name]:.1f} s, first token {report['first_token_s']:.0f} s"
            )
            cells.append(f"{name}: {', '.join(speeds)}; {took}; {report['ranks'][0]}")
            print(cells[-1], flush=True)
    return cells


def ranks_of(args: argparse.Namespace) -> dict[str, int]:
    """The ranks of an artifact, as `hqconv.convert` names them."""
    return {"ep" if args.ep else "tp": args.tp}


def engine_of(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of an engine with these ranks."""
    return {**EAGER, "tensor_parallel_size": args.tp, "enable_expert_parallel": args.ep}


def inputs_of_stock(name: str) -> dict[str, str]:
    """The variable that has stock vLLM quantize activations, and never fall back to 16 bits."""
    fields = {key: value for key, value in resolve_inputs(name).humming_fields().items() if value}
    return (
        {"VLLM_HUMMING_INPUT_QUANT_CONFIG": json.dumps({**fields, "allow_fallback": False})}
        if fields
        else {}
    )


# --- eplb --------------------------------------------------------------------------------------------------


def eplb(schema: str, args: argparse.Namespace, work: Path) -> list[str]:
    """Move experts between ranks while an engine answers; each token has one expert, so not a bit may change."""
    source = make_source(
        work / "source", hidden=1024, intermediate=768, layers=3, experts=16, vocab=512, top_k=1
    )
    words: dict[str, Any] = {
        "schema": schema,
        "target": target_here().name,
        "device": "cuda",
        "ep": args.tp,
    }
    engine = {**EAGER, "tensor_parallel_size": args.tp, "enable_expert_parallel": True}
    hqconv.convert(source, work / "plain", **words)
    hqconv.convert(source, work / "copies", **words, redundant_experts=EPLB_COPIES)
    for out in ("plain", "copies"):
        command("warm", str(work / out), "--kernels", str(work / "warm"), "-q")
    job: dict[str, Any] = {"kernels": str(work / "warm"), "prompts": PROMPTS}
    with ThreadPoolExecutor(1 + len(COMMUNICATORS)) as pool:
        plain = pool.submit(serve, work / "plain", work, engine, **job)
        moving = {
            name: pool.submit(
                serve, work / "copies", work, engine | eplb_words(name), rounds=EPLB_ROUNDS, **job
            )
            for name in COMMUNICATORS
        }
        expected = plain.result()["answers"]
        reports = {name or "asynchronous": future.result() for name, future in moving.items()}
    told = []
    for name, report in reports.items():
        maps = report["maps"]
        assert all(ranks.count(ranks[0]) == len(ranks) for ranks in maps), "the ranks' maps differ"
        moved = [_num_moved(old[0], new[0]) for old, new in itertools.pairwise(maps)]
        assert sum(moved), f"no expert was moved ({name})"
        different = [
            n for n, one in enumerate([report["answers"], *report["rounds"]]) if one != expected
        ]
        assert not different, f"other answers in rounds {different} ({name}, moved {moved})"
        told.append(f"{name}: {sum(moved)} places changed")
    return [f"same bits in {EPLB_ROUNDS} rounds", "; ".join(told)]


def eplb_words(communicator: str | None) -> dict[str, Any]:
    """Arguments of an engine whose experts are moved in every round."""
    config: dict[str, Any] = {"step_interval": EPLB_STEPS, "window_size": EPLB_STEPS}
    config |= {
        "num_redundant_experts": EPLB_COPIES,
        "communicator": communicator,
        "use_async": communicator is None,
    }
    return {"enable_eplb": True, "eplb_config": config}


def _num_moved(old: list[list[int]], new: list[list[int]]) -> int:
    return sum(
        a != b
        for left, right in zip(old, new, strict=True)
        for a, b in zip(left, right, strict=True)
    )


# --- model -------------------------------------------------------------------------------------------------


def real_model(args: argparse.Namespace, work: Path) -> list[str]:
    """Convert and serve a real model in each schema, and as it is; perplexities must be `hqconv evaluate`'s."""
    import transformers

    text = read_text(transformers, args.model, args.text, NUM_HELD_OUT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    job: dict[str, Any] = {
        "prompts": [tokenizer(PROMPT)["input_ids"]],
        "sequences": text.sequences(CONTEXT),
    }
    job |= {"speed": [1, 64], "gate": str(work / "gate"), "cache": work / "cache"}
    schemas = args.schemas.split(",") if args.schemas else ["int4-g32-e4m3", "int3-g64-h64"]
    with ThreadPoolExecutor(2 * len(schemas) + 1) as pool:
        served = {"bf16": pool.submit(serve, args.model, work, FAST, **job)}
        told = [pool.submit(calibrated, schema, args, work) for schema in schemas]
        figures = dict(zip(schemas, (future.result() for future in told), strict=True))
        served |= {
            schema: pool.submit(serve, work / schema, work, FAST, **job) for schema in schemas
        }
        while _ready(work) < len(served) and not any(future.done() for future in served.values()):
            time.sleep(0.2)
        (work / "gate").touch()
        reports = {name: future.result() for name, future in served.items()}
    lines = []
    expected = {name: one["perplexity"]["artifact"] for name, one in figures.items()}
    expected["bf16"] = figures[schemas[0]]["perplexity"]["source"]
    for name, report in reports.items():
        found, wanted = math.exp(report["mean_nll"]), expected[name]
        answer = tokenizer.decode([token for token, _ in report["answers"][0]][:12])
        speed = ", ".join(
            f"{value:.0f} tokens/s for {n}" for n, value in report["tokens_per_s"].items()
        )
        kl = f", KL {figures[name]['kl']['mean']:.4f}" if name in figures else ""
        lines.append(
            f"{name}: perplexity {found:.4f}, evaluate's {wanted:.4f}{kl}; {speed}; {answer!r}"
        )
        print(lines[-1], flush=True)
    wrong = [
        name
        for name in reports
        if not _is_near(math.exp(reports[name]["mean_nll"]), expected[name])
    ]
    assert not wrong, f"other perplexities than evaluate's: {wrong}"
    return lines


def _ready(work: Path) -> int:
    return len(list(work.glob("*/report.ready")))


def _is_near(one: float, other: float) -> bool:
    return max(one / other, other / one) <= PERPLEXITY_BOUND


def calibrated(schema: str, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Convert the real model with calibration; the document of its evaluation."""
    out, sizes = (
        str(work / schema),
        ["--calibrate-tokens", str(NUM_CALIBRATED), "--calibrate-context", str(CONTEXT)],
    )
    made = ["--calibrate", str(args.calibrate), *sizes] if args.calibrate else []
    command(
        "convert",
        str(args.model),
        "-o",
        out,
        "--schema",
        schema,
        *made,
        "--target",
        target_here().name,
        "-q",
    )
    words = ["--text", str(args.text), "--tokens", str(NUM_HELD_OUT), "--context", str(CONTEXT)]
    document = json.loads(command("evaluate", out, "--source", str(args.model), *words, "--json"))
    assert isinstance(document, dict)
    return document


# --- reload ------------------------------------------------------------------------------------------------


def in_kernel_layout(
    source: Path, layers: list[str], schema: str
) -> tuple[dict[str, torch.Tensor], float]:
    """Lay out a trainer's weights on the GPU, by vLLM's names of the parameters; and the seconds of a layer."""
    config = json.loads((source / "config.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file, device="cuda")
    words: dict[str, Any] = {"schema": schema, "target": target_here().name, "model_config": config}
    found: dict[str, torch.Tensor] = {}
    seconds = []
    for layer in (layers[0], *layers):  # once to load what is loaded once
        own = {name: tensor for name, tensor in weights.items() if name.startswith(f"{layer}.")}
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for gemm, of in hqconv.to_kernel(own, **words).items():
            found |= {
                f"{layer}.routed_experts.{gemm}_{name}": tensor
                for name, tensor in of.tensors.items()
            }
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return found, min(seconds)


def reload(schema: str, work: Path) -> list[str]:
    """Give a server the experts of another training step in place; answers must be those of a new start with them."""
    words: dict[str, Any] = {"schema": schema, "target": target_here().name, "device": "cuda"}
    sizes = {
        "hidden": 1024,
        "intermediate": 768,
        "layers": 3,
        "experts": 16,
        "vocab": 512,
        "top_k": 4,
    }
    outs = [work / "first", work / "second"]
    sources = [make_source(work / "source", **sizes), work / "trained"]
    trained(*sources)
    for source, out in zip(sources, outs, strict=True):
        hqconv.convert(source, out, **words)
    parameters = work / "parameters.safetensors"
    new, seconds = in_kernel_layout(
        sources[1], list(json.loads((outs[1] / MANIFEST).read_text())["blocks"]), schema
    )
    save_file(new, parameters)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(serve, outs[0], work, EAGER, prompts=PROMPTS, weights=[str(parameters)])
        second = pool.submit(serve, outs[1], work, EAGER, prompts=PROMPTS)
        mine, fresh = first.result(), second.result()
    [reloaded] = mine["reloaded"]
    assert mine["answers"] != fresh["answers"], "both training steps give the same answers"
    assert reloaded["answers"] == fresh["answers"], "other answers than a new start"
    text = f"same answers as a new start, {parameters.stat().st_size / 1e6:.0f} MB in {reloaded['seconds']:.3f} s"
    return [f"{text}; to_kernel: {1e3 * seconds:.1f} ms a layer"]


def trained(source: Path, out: Path) -> None:
    """Copy a checkpoint with other experts: each is multiplied by noise."""
    out.mkdir()
    generator = torch.Generator().manual_seed(1)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if ".experts." in name:
                noise = 1 + 0.3 * torch.randn(tensor.shape, generator=generator)
                tensors[name] = (tensor.float() * noise).to(tensor.dtype)
        save_file(tensors, out / path.name, {"format": "pt"})


# --- starts ------------------------------------------------------------------------------------------------


def starts(work: Path) -> list[str]:
    """Time from a process's start to its first token, of a compressed-tensors checkpoint in stock vLLM."""
    sizes = {
        "hidden": 2048,
        "intermediate": 768,
        "layers": 8,
        "experts": 64,
        "vocab": 2048,
        "top_k": 8,
    }
    source = make_source(work / "source", **sizes, distinct_layers=1)
    packed(source)
    gpu = ["--gpu", str(gpu_facts(work))]
    cold = serve(source, work, EAGER)
    cache = work / "warm"
    begun = time.monotonic()
    command("warm", str(source), *gpu, "-q", HUMMING_CACHE_DIR=str(cache), CUDA_VISIBLE_DEVICES="")
    seconds = time.monotonic() - begun
    num_warm = len(list(cache.glob("*/kernel.cubin")))
    warm = serve(source, work, EAGER, cache=cache)
    again = serve(source, work, EAGER, cache=cache)
    told = [
        f"first token after {one['first_token_s']:.1f} s ({one['num_kernels']} kernels)"
        for one in (cold, warm)
    ]
    told[1] += f" with {num_warm} of hqconv warm, which took {seconds:.0f} s"
    told.append(f"second start {again['first_token_s']:.1f} s")
    assert warm["num_kernels"] == num_warm, (
        f"{warm['num_kernels'] - num_warm} kernels were compiled all the same",
        told,
    )
    return told


def packed(source: Path) -> None:
    """Make the experts of a checkpoint those of compressed-tensors: 4 bits in groups of 128, any codes."""
    path = source / "config.json"
    config = json.loads(path.read_text())
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 128,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.gate$"],
        "config_groups": {"group_0": group},
    }
    path.write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    for shard in sorted(source.glob("*.safetensors")):
        found: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(shard).items():
            if ".experts." not in name:
                found[name] = tensor
                continue
            rows, columns = tensor.shape
            codes = torch.randint(
                -(2**31), 2**31, (rows, columns // 8), dtype=torch.int64, generator=generator
            )
            found[f"{name}_packed"] = codes.int()
            found[f"{name}_scale"] = torch.full((rows, columns // 128), 0.005, dtype=torch.bfloat16)
            found[f"{name}_shape"] = torch.tensor([rows, columns])
        save_file(found, shard, {"format": "pt"})
        places |= dict.fromkeys(found, shard.name)
    index = source / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


def gpu_facts(work: Path) -> Path:
    """Write the facts of this machine's GPU, for a command that does not see it."""
    path = work / "gpu.json"
    words = [sys.executable, "-m", "hqconv.warm.gpus"]
    path.write_text(
        subprocess.run(words, cwd=REPO, check=True, capture_output=True, text=True).stdout
    )
    return path


# --- server ------------------------------------------------------------------------------------------------

SERVER_SCHEMAS = "mxfp4,int4-g32-e4m3,int8,nvfp4"
QUANTIZED_INPUTS = ("mxfp4", "int8")  # schemas that are served with fp8 activations, too
VERIFY_S = 120.0


def server_model(name: str, args: argparse.Namespace, work: Path) -> Path:
    """Make a model with reference predictions: `source`, or `SCHEMA` or `SCHEMA checkpoint` or `SCHEMA fp8`."""
    text = [str(args.text), "--tokens", "16384", "-q"]
    source = work / "source"
    if not source.exists():
        shutil.copytree(args.model, source)
        command("evaluate", str(source), "--write-reference", "--text", *text)
    if name == "source":
        return source
    schema, _, kind = name.partition(" ")
    out = work / name.replace(" ", "-")
    if not out.exists():
        layout = ["--layout", kind] if kind == "checkpoint" else ["--tp", str(args.tp)]
        inputs = ["--input-schema", kind] if kind == "fp8" else []
        options = ["--schema", schema, "--target", target_here().name, "-q"]
        command(
            "convert", str(source), "-o", str(out), *options, *layout, *inputs, "--allow-unserved"
        )
        command("evaluate", str(out), "--source", str(source), "--text", *text)
    return out


@contextmanager
def api_server(
    model: Path, log: Path, args: argparse.Namespace, words: Sequence[str], **variables: str
) -> Iterator[str]:
    """Start vLLM's API server on a model; yield its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1", **variables}
    started = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    started += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "served"]
    started += [
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        "64",
        "--kv-cache-memory-bytes",
        str(1 << 30),
    ]
    started += ["--gpu-memory-utilization", "0.1", "--tensor-parallel-size", str(args.tp), *words]
    with log.open("w") as file:
        process = subprocess.Popen(
            started, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            end = time.monotonic() + START_S
            while not answers(url):
                lines = log.read_text(errors="replace").splitlines()
                errors = [line for line in lines if "Error" in line][-3:] or lines[-5:]
                assert process.poll() is None, f"the server ended: {errors}"
                assert time.monotonic() < end, f"no answer in {START_S} s: {errors}"
                time.sleep(0.5)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    """Whether a server lists its models."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def server_verdict(title: str, out: Path, url: str, log: Path) -> tuple[str, str]:
    """Run `hqconv verify --server`; the verdict, "" for none, and the figures. The document goes to a file."""
    words = [sys.executable, "-m", "hqconv", "verify", str(out), "--server", url, "--json", "-q"]
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=VERIFY_S,
        check=False,
    )
    assert done.returncode in (0, 1), f"{title}: exit code {done.returncode}: {done.stderr[-400:]}"
    check = json.loads(done.stdout)["checks"]["server"]
    with (log / "documents.jsonl").open("a") as file:
        file.write(json.dumps({"title": title, **check}) + "\n")
    figures = [f"{check['seconds']:.0f} s"]
    for name, one in check["measured"].items():
        mark = "" if one["status"] != "fail" else "!"
        if name == "identity":
            figures.append(f"{mark}identity {one['beta']:.2f} {one['whose']}")
        else:
            ratios = one["mean"] / one["noise_mean"], one["p999"] / one["noise_p999"]
            figures.append(f"{mark}{name} {ratios[0]:.2f} {ratios[1]:.2f}")
    sentence = check["findings"][0]["what"] if check["findings"] else ""
    verdicts = {text: name for name, text in VERDICTS.items()}
    return verdicts.get(sentence, sentence), ", ".join(figures)


def server_starts(args: argparse.Namespace) -> list[tuple[str, list[str], dict[str, str]]]:
    """Model, options and variables of each healthy server."""
    eager, graphs = ["--enforce-eager"], ["--compilation-config", json.dumps(GRAPHS)]
    invariant = {"VLLM_BATCH_INVARIANT": "1"}
    schemas = (args.schemas or SERVER_SCHEMAS).split(",")
    models = ["source", *schemas]
    models += [
        f"{schema} checkpoint"
        for schema in schemas
        if not ENGINE.checkpoint_layout_obstacle(resolve_layer_schema(schema).each[0], "bfloat16")
    ]
    models += [f"{schema} fp8" for schema in schemas if schema in QUANTIZED_INPUTS]
    return [
        (model, mode, variables)
        for model in models
        for mode in (eager, graphs)
        for variables in ({}, invariant)
    ]


def server_healthy(args: argparse.Namespace, work: Path) -> list[str]:
    """Check healthy servers, none of which may be found wrong; and each with another model's reference."""
    log = server_log(args, work)
    starts = server_starts(args)
    folders: dict[str, Path] = {"source": server_model("source", args, work)}

    def make(name: str) -> None:
        try:
            folders[name] = server_model(name, args, work)
        except AssertionError as error:
            print(f"not made: {name}: {error}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(make, dict.fromkeys(model for model, *_ in starts)))

    def check(start: tuple[str, list[str], dict[str, str]]) -> tuple[str, str]:
        model, mode, variables = start
        title = f"{model}, {'eager' if len(mode) == 1 else 'graphs'}{', invariant' if variables else ''}"
        path = log / f"{title.replace(', ', '-').replace(' ', '-')}.log"
        outcome = "not made"
        if model in folders:
            try:
                with api_server(folders[model], path, args, mode, **variables) as url:
                    verdict, figures = server_verdict(title, folders[model], url, log)
                    outcome = "false alarm" if verdict else "right"
                    print(f"{outcome}: {title}: {verdict} {figures}", flush=True)
                    if len(mode) == 1 and not variables and " " not in model:
                        outcome = " ".join([outcome, *crossed(model, folders, url, log)])
            except (AssertionError, subprocess.TimeoutExpired) as error:
                outcome = "not started"
                print(f"{outcome}: {title}: {error}", flush=True)
        return title, outcome

    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(check, starts))
    alarms = [title for title, outcome in found if outcome.startswith("false")]
    mistaken = [title for title, outcome in found if "mistaken" in outcome]
    num_right = sum(outcome.startswith("right") for _, outcome in found)
    assert not alarms, f"false alarms {alarms}"
    assert not mistaken, f"other weights were not found: {mistaken}"
    assert num_right, "no server started"
    return [f"{num_right} of {len(found)} starts right, no false alarm"]


def crossed(served: str, folders: Mapping[str, Path], url: str, log: Path) -> list[str]:
    """Compare a server with the references of the other models: the source's weights, another quantization."""
    mistaken = []
    for name, out in folders.items():
        if " " in name or name in (served, "source"):
            continue
        title = f"{served} in place of {name}"
        verdict, figures = server_verdict(title, out, url, log)
        expected = ("source",) if served == "source" else ("source", "another quantization")
        outcome = "named" if verdict in expected else "found" if verdict else "mistaken"
        if outcome == "mistaken" and "unknown" in figures:  # both are too near to the source
            outcome = "not told apart"
        print(f"{outcome}: {title}: {verdict or 'nothing'}; {figures}", flush=True)
        mistaken += [f"mistaken for {name}"] * (outcome == "mistaken")
    return mistaken


def server_planted(args: argparse.Namespace, work: Path) -> list[str]:
    """Plant faults in a running engine, one after the other; and one start with a KV cache in fp8."""
    log = server_log(args, work)
    model = (args.schemas or "int4-g32-e4m3").split(",")[0]
    out = server_model(model, args, work)
    words = ["--enforce-eager", "--worker-extension-cls", "scripts.server_faults.Faults"]
    rows: list[tuple[str, str, str, str]] = []

    def row(name: str, expected: Sequence[str], verdict: str, figures: str) -> None:
        outcome = "named" if verdict in expected else "found" if verdict else "MISSED"
        rows.append((outcome, name, verdict or "nothing", figures))
        print(f"{outcome}: {name}: {verdict or 'nothing'}; {figures}", flush=True)

    with api_server(out, log / "planted.log", args, words) as url:
        for name, expected in FAULTS.items():
            try:
                remote(url, "plant_fault", name)
                row(name, expected, *server_verdict(name, out, url, log))
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                rows.append(("ERROR", name, "", str(error)))
                print(f"ERROR: {name}: {error}", flush=True)
            remote(url, "undo_fault")
        verdict, figures = server_verdict("undone", out, url, log)
        print(f"after all: {verdict or 'right'}; {figures}", flush=True)
        assert not verdict, "the faults were not undone"
    name, words = "KV cache of fp8 without scales", ["--enforce-eager", "--kv-cache-dtype", "fp8"]
    try:
        with api_server(out, log / "kv-fp8.log", args, words) as url:
            row(name, ("weights", "larger"), *server_verdict(name, out, url, log))
    except AssertionError as error:  # not every build of vLLM has this kernel
        print(f"not run: {name}: {error}", flush=True)
    num_found = sum(outcome in ("named", "found") for outcome, *_ in rows)
    num_named = sum(outcome == "named" for outcome, *_ in rows)
    assert num_found >= 0.95 * len(rows), [
        name for outcome, name, *_ in rows if outcome in ("MISSED", "ERROR")
    ]
    return [f"{num_found} of {len(rows)} found, {num_named} named by their condition"]


def remote(url: str, method: str, *arguments: str) -> None:
    """Call a method of the workers."""
    body = json.dumps({"method": method, "args": arguments, "timeout": 60}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/collective_rpc", body, headers)
    with urllib.request.urlopen(request, timeout=90) as answer:
        answer.read()


def server_log(args: argparse.Namespace, work: Path) -> Path:
    """The folder of logs and documents."""
    log = (args.log.parent if args.log else work) / "servers"
    log.mkdir(parents=True, exist_ok=True)
    return log


# --- the command -------------------------------------------------------------------------------------------


def cases_of(args: argparse.Namespace) -> dict[Row, Case]:
    """The cases of a subcommand, by the first cells of their rows."""
    if args.what == "layouts":
        return {
            (s,): partial(layouts, s, args)
            for s in (args.schemas.split(",") if args.schemas else SERVED)
        }
    if args.what == "dense":
        return {("dense",): partial(dense, args.schemas or "int8", args)}
    if args.what == "eplb":
        case = eplb
        return {
            (s,): partial(case, s, args) for s in (args.schemas or "mxfp4,int4-g32-e4m3").split(",")
        }
    if args.what == "reload":
        return {(s,): partial(reload, s) for s in (args.schemas or "mxfp4").split(",")}
    if args.what == "server":
        cases: dict[str, Case] = {
            "healthy": partial(server_healthy, args),
            "planted": partial(server_planted, args),
        }
        return {(name,): case for name, case in cases.items() if args.cases in (name, "all")}
    if args.what == "model":
        return {("model",): partial(real_model, args)}
    return {("compressed-tensors int4-g128",): starts}


def main(arguments: Sequence[str] | None = None) -> None:
    """Check everything; exit 1 on any failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whats = ("layouts", "dense", "eplb", "model", "reload", "starts", "server")
    parser.add_argument("what", choices=whats)
    parser.add_argument("--cases", choices=("all", "healthy", "planted"), default="all")
    parser.add_argument("model", type=Path, nargs="?", help="folder of the real model")
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--schemas", default="")
    parser.add_argument("--inputs", default="a16")
    parser.add_argument("--dense", help="schema of linear layers beside the experts, of `layouts`")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args(arguments)
    if args.tp > 1 and args.what in ("layouts", "eplb"):
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if args.what in ("model", "server") and not (args.model and args.text):
        parser.error(f"`{args.what}` needs the model's folder and --text")
    cases = cases_of(args)
    if args.what == "server":  # its jobs are servers
        args = argparse.Namespace(**{**vars(args), "jobs": 1})
    finish(args.what, cases, args)


if __name__ == "__main__":
    main()
