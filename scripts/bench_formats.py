"""Measure the speed of schemas in Humming's fused MoE GEMMs, for the ranking of `hqconv schemas --for`.

    python scripts/bench_formats.py [--schemas mxfp4,int4-g32] [--inputs a16,fp8,int8] [--tokens 1,16,64,8192]
                                    [--model qwen3-30b-a3b | NAME:EXPERTS:TOP_K:HIDDEN:INTERMEDIATE]
                                    [--jobs N] [--runs 30] [--work FOLDER] [--out FILE.json] [--dry-run]
    python scripts/choosing_table.py --from-data     # then: the table of docs/choosing.md

Needs a CUDA device of the target architecture; `--dry-run` prints the pairs and needs none (`--target h200`). One layer
of the model's shape with Gaussian weights is converted under every schema for each of the activations, and its kernels
are compiled, `--jobs` processes at a time. Then one process alone times the layer: w13, the activation, w2, and the
quantization of inputs before each. Steps are captured in a CUDA graph, as servers run them; each has other tokens, and
the weights of two copies or more take turns, so that weights are read from memory, not from the L2 cache. The figure
is the median over all replays.

A fast kernel that is wrong does not count: the output on up to 32 tokens of each number is compared with the decoded
weights in float64 (activations rounded as the kernel rounds them), and above verify's limit there is no time. Writes
hqconv/reports/measured/speeds.json (or `--out`): a run takes the place of an older one of the same GPU and model. Exit
code 1 where a row failed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from hqconv.artifact.reader import Artifact
from hqconv.kernel_layout import fused_moe as moe
from hqconv.kernel_layout.compatibility import why_not, why_overflow
from hqconv.kernel_layout.fused_moe import Gemm
from hqconv.kernel_layout.transform import kernel_form
from hqconv.reports.ranking import SPEEDS
from hqconv.schemas.activation import Activation
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.gpu_target import GpuTarget, parse_target
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.weight_schema import resolve_schema
from hqconv.verification.decoded_experts import decoded_experts
from hqconv.verification.kernel import LayerInputs
from hqconv.verification.reference import EXACT, Routing, moe_forwards
from hqconv.verification.tolerances import Tolerances
from scripts.shared import make_source

SCHEMAS = (
    *("mxfp4", "nvfp4", "fp4-g32-e4m3", "int4-g32-e4m3", "int4-g16-e4m3", "int4-g32-e4m3-row"),
    *("int4-g64", "int4-g32", "int4", "int3-g64", "int3-g32-e4m3", "fp8", "int8", "mxfp8"),
)
LAYER, ACTIVATION, DTYPE = "model.layers.0.mlp.experts", Activation("silu"), "bfloat16"
NUM_COMPARED = 32  # tokens of each batch size that are held to the reference
LONG = 1024  # tokens from which one step fills the GPU for long
L2_FACTOR = 4  # bytes of weights that are read before the same ones again, in sizes of the L2 cache
TIMED = "w13, activation and w2 of one layer with the quantization of their inputs, in CUDA graphs"
Row = dict[str, Any]


class Model(NamedTuple):
    """The shape of a model's MoE layer."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


MODELS = {
    "qwen3-30b-a3b": Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    "gpt-oss-20b": Model("gpt-oss-20b", 32, 4, 2880, 2880),
    "mixtral-8x7b": Model("Mixtral-8x7B", 8, 2, 4096, 14336),
    "deepseek-v3-ep8": Model("DeepSeek-V3, 32 of 256 experts", 32, 8, 7168, 2048),
}


def parse_model(text: str) -> Model:
    """Return a model of `MODELS`, or the shape NAME:EXPERTS:TOP_K:HIDDEN:INTERMEDIATE. ValueError for others."""
    if text in MODELS:
        return MODELS[text]
    name, *sizes = text.split(":")
    if len(sizes) != 4 or not name or not all(one.isdecimal() and int(one) for one in sizes):
        raise ValueError(f"{text}: expected {', '.join(MODELS)} or NAME:EXPERTS:TOP_K:HIDDEN:INTERMEDIATE")
    model = Model(name, *map(int, sizes))
    if model.top_k > model.num_experts:
        raise ValueError(f"{text}: more experts for a token than there are")
    return model


def plan_pairs(
    schemas: Sequence[str], inputs: Sequence[str], target: GpuTarget
) -> tuple[list[KernelSpec], dict[tuple[str, str], str]]:
    """Kernel specs that run on the target, and the reasons against the others, by schema and activations."""
    asked = [
        KernelSpec(resolve_schema(schema), DTYPE, target, resolve_inputs(one))
        for schema, one in itertools.product(schemas, inputs)
    ]
    reasons = {spec: why_not(spec) or why_overflow(spec) for spec in asked}
    refused = {(spec.schema.name, spec.inputs.name): reason for spec, reason in reasons.items() if reason}
    return [spec for spec, reason in reasons.items() if reason is None], refused


# --- tokens and their routes -------------------------------------------------------------------------------


def num_copies(layer_bytes: int, l2_bytes: int) -> int:
    """Copies of the weights that take turns: two at least, and more than the L2 cache holds."""
    return max(2, math.ceil(L2_FACTOR * l2_bytes / layer_bytes))


def num_steps(model: Model, num_tokens: int, copies: int) -> int:
    """Steps of one graph: few tokens go through all experts of each copy, many through each copy once."""
    if num_tokens * model.top_k < model.num_experts:
        return copies * math.ceil(model.num_experts / (num_tokens * model.top_k))
    return copies if num_tokens >= LONG else 4 * copies


def make_routes(model: Model, num_tokens: int, steps: int, copies: int, seed: int = 0) -> list[torch.Tensor]:
    """Experts of each step's tokens, int64 [T, k], without an expert twice in a token.

    Where tokens reach a part of the experts only, steps of one copy reach others in turn; else experts are drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    if num_tokens * model.top_k >= model.num_experts:
        scores = (torch.rand(num_tokens, model.num_experts, generator=generator) for _ in range(steps))
        return [one.topk(model.top_k, dim=-1).indices for one in scores]
    order = torch.randperm(model.num_experts, generator=generator)
    count = num_tokens * model.top_k
    places = [torch.arange(step // copies * count, (step // copies + 1) * count) for step in range(steps)]
    return [order[one % model.num_experts].view(num_tokens, model.top_k) for one in places]


@dataclass(frozen=True)
class Step:
    """One step: tokens [T, H], routes [T, k], which copy of the weights, and room for both GEMMs' outputs."""

    x: torch.Tensor
    ids: torch.Tensor
    copy: int
    wide: torch.Tensor
    out: torch.Tensor


def make_steps(model: Model, num_tokens: int, copies: int, device: torch.device) -> list[Step]:
    """Steps with seeded tokens; those of one size share the room for outputs."""
    steps = num_steps(model, num_tokens, copies)
    generator = torch.Generator().manual_seed(num_tokens)
    dtype, rows = torch_dtype_of(DTYPE), num_tokens * model.top_k
    wide = torch.zeros(rows, 2 * model.intermediate_size, dtype=dtype, device=device)
    out = torch.zeros(rows, model.hidden_size, dtype=dtype, device=device)
    x = torch.randn(num_tokens, model.hidden_size, generator=generator).to(device, dtype)
    routes = make_routes(model, num_tokens, steps, copies)
    return [Step(x, ids.to(device), number % copies, wide, out) for number, ids in enumerate(routes)]


# --- on the GPU --------------------------------------------------------------------------------------------


def launcher(copies: Sequence[dict[str, Gemm]], steps: Sequence[Step], device: torch.device) -> Callable[[Step], None]:
    """Return a function that launches a step without waiting; all that depends on routes is prepared here."""
    num_routes, top_k = steps[0].ids.numel(), steps[0].ids.size(1)
    entries = {name: moe.tuning_entry(gemm.config, num_routes) for name, gemm in copies[0].items()}
    num_experts, locks = copies[0]["w13"].config.num_experts, moe.new_locks(device)
    prepared = {
        id(step): {name: moe.align(step.ids, num_experts, entry["block_shape"][0]) for name, entry in entries.items()}
        for step in steps
    }
    between = moe.humming_activation(ACTIVATION, gated=True)

    def launch(step: Step) -> None:
        w13, w2 = copies[step.copy]["w13"], copies[step.copy]["w2"]
        routes = prepared[id(step)]
        inputs = moe.process_input(w13, step.x)
        moe.launch_gemm(w13, inputs, routes["w13"], top_k, step.wide, num_routes, entries["w13"], locks)
        hidden = moe.process_input(w2, step.wide, **between)
        moe.launch_gemm(w2, hidden, routes["w2"], 1, step.out, num_routes, entries["w2"], locks)

    return launch


def time_steps(launch: Callable[[Step], None], steps: Sequence[Step], runs: int) -> float:
    """Return the median time of a step in microseconds, over replays of a graph of all steps."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            launch(step)
    for _ in range(3):
        graph.replay()

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    pairs = [(event(), event()) for _ in range(runs)]
    for begin, end in pairs:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    milliseconds: float = statistics.median(begin.elapsed_time(end) for begin, end in pairs)
    return 1e3 * milliseconds / len(steps)


class Sample(NamedTuple):
    """Some tokens [t, H] of one batch size, their routes, and the kernel's output float64 [t, H]."""

    x: torch.Tensor
    routing: Routing
    found: torch.Tensor


def sample_of(step: Step) -> Sample:
    """Take tokens of a step that has run, evenly; their routes weigh the same."""
    (num_tokens, top_k), device = step.ids.shape, step.x.device
    chosen = torch.linspace(0, num_tokens - 1, min(num_tokens, NUM_COMPARED), device=device).round().long()
    weights = torch.full((len(chosen), top_k), 1 / top_k, device=device)
    found = step.out.view(num_tokens, top_k, -1)[chosen].double().mean(1)
    return Sample(step.x[chosen], Routing(step.ids[chosen], weights), found)


def kernel_errors(out: Path, samples: Sequence[Sample], device: torch.device) -> list[float]:
    """Return the relative error of each sample against the artifact's decoded weights in float64."""
    with Artifact(out) as artifact, ThreadPoolExecutor(2) as pool:
        decoded = decoded_experts(artifact, artifact.moe_layer(LAYER), device, pool)
        inputs = LayerInputs.of(artifact, LAYER, device)
        ids, weights = ([getattr(sample.routing, name) for sample in samples] for name in ("ids", "weights"))
        routing = Routing(torch.cat(ids), torch.cat(weights))
        x = torch.cat([sample.x for sample in samples]).double()
        rounding = EXACT if inputs is None else inputs.reference()
        [(expected, _)] = moe_forwards(x, routing, decoded, ACTIVATION, [rounding])
    parts = torch.split(expected, [len(sample.x) for sample in samples])
    return [float((sample.found - part).norm() / part.norm()) for sample, part in zip(samples, parts, strict=True)]


def measure_pair(
    spec: KernelSpec, out: Path, model: Model, tokens: Sequence[int], runs: int, device: torch.device
) -> list[Row]:
    """Load a pair's artifact, run and time it for each number of tokens; one row each."""
    loaded = hqconv.load(out, layer=LAYER, device=str(device), check_digests=False)
    gemms = {name: moe.load_gemm(one.config, one.tensors) for name, one in loaded.items()}
    layer_bytes = sum(one.numel() * one.element_size() for gemm in gemms.values() for one in gemm.tensors.values())
    count = num_copies(layer_bytes, l2_bytes(device))
    copies = [gemms] + [
        {
            name: Gemm(one.config, {key: value.clone() for key, value in one.tensors.items()})
            for name, one in gemms.items()
        }
        for _ in range(count - 1)
    ]
    samples, times = [], []
    for num_tokens in tokens:
        steps = make_steps(model, num_tokens, count, device)
        launch = launcher(copies, steps, device)
        for step in steps[::-1]:  # the first one last: its outputs are compared
            launch(step)
        samples.append(sample_of(steps[0]))
        times.append(time_steps(launch, steps, runs))
    errors = kernel_errors(out, samples, device)
    return [row_of(spec, *one) for one in zip(tokens, times, errors, strict=True)]


def l2_bytes(device: torch.device) -> int:
    """Size of the GPU's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def row_of(spec: KernelSpec, num_tokens: int, time: float | None, error: float, failed: str | None = None) -> Row:
    """Return a row of the file; a kernel error above verify's limit, or a failure, leaves it without a time."""
    limits = Tolerances.of(spec.inputs, spec.param_dtype)
    limit = limits.kernel if limits.rounded is None else limits.rounded
    if failed is None and not error <= limit:
        failed = f"kernel error {error:.4f}, limit {limit:.4f}"
    return {
        "schema": spec.schema.name,
        "input_schema": spec.inputs.name,
        "num_tokens": num_tokens,
        "microseconds": None if failed or time is None else round(time, 1),
        "kernel_error": round(error, 5) if math.isfinite(error) else None,
        **({"failed": failed} if failed else {}),
    }


# --- preparation, side by side -----------------------------------------------------------------------------


def artifact_folder(work: Path, spec: KernelSpec) -> Path:
    """Return the folder of a pair's artifact."""
    return work / f"{spec.schema.name}-{spec.inputs.name}"


def convert_pair(source: Path, work: Path, spec: KernelSpec, device: str) -> None:
    """Convert the layer for one pair."""
    words: dict[str, Any] = {"schema": spec.schema, "input_schema": spec.inputs, "dtype": spec.param_dtype}
    out = artifact_folder(work, spec)
    hqconv.convert(source, out, **words, target=spec.target.name, device=device, threads=2, allow_unserved=True)


def layer_documents(spec: KernelSpec, model: Model) -> dict[str, dict[str, Any]]:
    """LayerConfigs of both GEMMs, as an artifact of the layer has them: w13, w2 → document."""
    sizes = {
        "w13": (2 * model.intermediate_size, model.hidden_size),
        "w2": (model.hidden_size, model.intermediate_size),
    }
    return {name: json.loads(kernel_form(*n_k, spec).config_json(model.num_experts)) for name, n_k in sizes.items()}


def compile_pair(spec: KernelSpec, model: Model, num_tokens: int) -> None:
    """Compile the kernels of one pair and number of tokens into Humming's cache."""
    device = torch.device("cuda:0")
    configs = {name: moe.layer_config(document) for name, document in layer_documents(spec, model).items()}
    moe.compile_kernels(configs.values(), num_tokens * model.top_k, device)
    dtype, top_k = torch_dtype_of(spec.param_dtype), model.top_k
    moe.compile_input_kernels(configs["w13"], configs["w2"], ACTIVATION, True, [num_tokens], top_k, dtype, device)


def prepare(
    specs: Sequence[KernelSpec], model: Model, tokens: Sequence[int], source: Path, work: Path, jobs: int
) -> dict[tuple[str, str], str]:
    """Convert and compile everything, `jobs` processes at a time; returns the failures of conversions by pair.

    A kernel that does not compile here fails again when it is measured, with its own message.
    """
    failed: dict[tuple[str, str], str] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        compiled = [
            pool.submit(compile_pair, spec, model, count) for count in sorted(tokens, reverse=True) for spec in specs
        ]
        converted = {spec: pool.submit(convert_pair, source, work, spec, "cuda:0") for spec in specs}
        for spec, one in converted.items():
            if (reason := _reason(one)) is not None:
                failed[spec.schema.name, spec.inputs.name] = reason
        for number, one in enumerate(compiled, 1):
            reason = _reason(one)
            print(f"compiled {number} of {len(compiled)}{'' if reason is None else f': {reason}'}", flush=True)
    return failed


def _reason(job: Future[None]) -> str | None:
    error = job.exception()
    return None if error is None else f"{type(error).__name__}: {str(error)[:300]}"


# --- the file ----------------------------------------------------------------------------------------------


def new_run(model: Model, rows: Sequence[Row], gpu: str, sm_version: int, versions: dict[str, str]) -> dict[str, Any]:
    """Return the document of a run: its rows, and where they come from."""
    return {
        "gpu": gpu,
        "sm_version": sm_version,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "source": "scripts/bench_formats.py",
        "timed": TIMED,
        "versions": versions,
        "model": model._asdict(),
        "rows": [*rows],
    }


def merged(document: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Return the file's document with a run in place of those of the same GPU and model; the others stay."""
    key = (run["gpu"], run["model"]["name"])
    others = [one for one in document["runs"] if (one["gpu"], one["model"]["name"]) != key]
    return {**document, "runs": [*others, run]}


def speeds_text(document: dict[str, Any]) -> str:
    """Return the file's text: a row on each line."""
    texts = []
    for run in document["runs"]:
        facts = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in run.items() if key != "rows"]
        rows = ",\n".join(f"    {json.dumps(row)}" for row in run["rows"])
        texts.append("  {\n" + ",\n".join([*facts, f'   "rows": [\n{rows}\n   ]']) + "\n  }")
    return '{\n "runs": [\n' + ",\n".join(texts) + "\n ]\n}\n"


def write_run(run: dict[str, Any], out: Path) -> None:
    """Write a run into the file; one that does not exist starts from the package's."""
    known = out if out.exists() else SPEEDS
    text = speeds_text(merged(json.loads(known.read_text(encoding="utf-8")), run))
    out.write_text(text, encoding="utf-8")


# --- the command -------------------------------------------------------------------------------------------


def measure_all(
    specs: Sequence[KernelSpec],
    model: Model,
    tokens: Sequence[int],
    work: Path,
    runs: int,
    failed: dict[tuple[str, str], str],
) -> list[Row]:
    """Measure pair after pair, alone on the GPU; a pair that fails has rows with the reason."""
    rows: list[Row] = []
    for spec in specs:
        reason = failed.get((spec.schema.name, spec.inputs.name))
        try:
            if reason is None:
                out = artifact_folder(work, spec)
                found = measure_pair(spec, out, model, tokens, runs, torch.device("cuda:0"))
                shutil.rmtree(out)
        except Exception as error:  # noqa: BLE001 - one pair must not cost the others their rows
            traceback.print_exc()
            reason = f"{type(error).__name__}: {str(error)[:300]}"
        if reason is not None:
            found = [row_of(spec, count, None, math.nan, reason) for count in tokens]
        for row in found:
            print(json.dumps(row), flush=True)
        rows += found
        torch.cuda.empty_cache()
    return rows


def target_here() -> GpuTarget:
    """Return the target of this machine's GPU."""
    major, minor = torch.cuda.get_device_capability()
    return GpuTarget(major * 10 + minor)


def versions_here() -> dict[str, str]:
    """Return the versions that a speed depends on."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("humming-kernels", "torch")}
    return {"hqconv": hqconv.__version__, **found, "cuda": str(torch.version.cuda)}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", default=",".join(SCHEMAS))
    parser.add_argument("--inputs", default="a16,fp8,int8", help="activations, by name")
    parser.add_argument("--tokens", default="1,16,64,8192", help="batch sizes")
    parser.add_argument("--model", type=parse_model, default="qwen3-30b-a3b")
    parser.add_argument("--jobs", type=int, default=max(1, 3 * len(os.sched_getaffinity(0)) // 4))
    parser.add_argument("--runs", type=int, default=30, help="replays of each graph")
    parser.add_argument("--work", type=Path, default=None, help="folder for artifacts, a RAM disk at best")
    parser.add_argument("--out", type=Path, default=SPEEDS)
    parser.add_argument("--target", default=None, help="with --dry-run: the GPU, instead of this machine's")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; exit 1 where a row failed."""
    args = parse_arguments(arguments)
    tokens = [int(count) for count in args.tokens.split(",")]
    target = parse_target(args.target) if args.dry_run and args.target else target_here()
    specs, refused = plan_pairs(args.schemas.split(","), args.inputs.split(","), target)
    for (schema, inputs), why in refused.items():
        print(f"does not run: {schema} with {inputs}: {why}")
    if args.dry_run:
        for spec in specs:
            print(f"{spec.schema.name} with {spec.inputs.name}: {args.tokens} tokens")
        print(f"{len(specs)} pairs, {len(specs) * len(tokens)} rows of {args.model.name} on {target.name}")
        return
    ram = Path("/dev/shm")
    root = args.work or Path(tempfile.mkdtemp(prefix="bench-formats-", dir=ram if ram.is_dir() else None))
    try:
        model = args.model
        sizes = {"hidden": model.hidden_size, "intermediate": model.intermediate_size, "top_k": model.top_k}
        source = make_source(root / "source", layers=1, experts=model.num_experts, vocab=256, **sizes)
        failed = prepare(specs, model, tokens, source, root, args.jobs)
        rows = measure_all(specs, model, tokens, root, args.runs, failed)
    finally:
        if args.work is None:
            shutil.rmtree(root, ignore_errors=True)
    write_run(new_run(model, rows, torch.cuda.get_device_name(), target.sm_version, versions_here()), args.out)
    print(f"{args.out}. Then run: python scripts/choosing_table.py --from-data")
    sys.exit(1 if any("failed" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
