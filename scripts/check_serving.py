"""Prove on a GPU, with vLLM, that artifacts are served right; and measure starts and tokens per second.

    python scripts/check_serving.py layouts [--schemas mxfp4,…] [--tp 2 [--ep]]  answers of both layouts; sleep; warm
    python scripts/check_serving.py dense [--schemas int8,…]                     linear layers quantized too: speed
    python scripts/check_serving.py eplb [--schemas …] --tp 2                    answers while experts move
    python scripts/check_serving.py model DIR --calibrate TEXT --text TEXT       a real model: perplexity, answer, speed
    python scripts/check_serving.py reload [--schemas …]                         new weights in place, as in RL
    python scripts/check_serving.py starts                                       with and without `hqconv warm`

`layouts` and `eplb` of several ranks run with VLLM_BATCH_INVARIANT=1: else sums are added in any order. `--inputs fp8`:
activations of `layouts`. `model` takes a checkpoint of scripts/real_model.py and its two texts. `starts` is for a
checkpoint that was not made by hqconv. vLLM for a machine without a network: scripts/vllm_archive.py. Every case is a
line, and a row of `--log FILE.md`. Exit code 1 where a case fails. `--jobs N`: cases at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from scripts.bench import make_source
from scripts.check_gpu import REPO, Case, Row, finish, target_here

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
    if args.what == "model":
        return {("model",): partial(real_model, args)}
    return {("compressed-tensors int4-g128",): starts}


def main(arguments: Sequence[str] | None = None) -> None:
    """Check everything; exit 1 on any failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("layouts", "dense", "eplb", "model", "reload", "starts"))
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
    if args.what == "model" and not (args.model and args.text):
        parser.error("`model` needs the model's folder and --text")
    finish(args.what, cases_of(args), args)


if __name__ == "__main__":
    main()
