"""Record what tests compare with, and what documents quote: golden outputs, layouts, artifacts, divergences, speeds.

    python scripts/record.py artifacts      tests/golden/artifacts.json: digests of whole artifacts, on the CPU
    python scripts/record.py golden         tests/golden/golden.json, *.npz: Humming's ops on hard inputs, on a GPU
    python scripts/record.py layouts        tests/golden/layouts.json: every kernel layout, on a GPU
    python scripts/record.py divergence     docs/measured/divergence.json: KL of a real model, on a GPU
                             [--schemas …] [--real FOLDER] [--texts FOLDER]
    python scripts/record.py speeds         docs/measured/speeds.json: times of kernels on this GPU
                             [--schemas …]

Run the first three only where a change of bytes is meant: with the record, the change is in the commit. They print what
differs from the record before. The last two are figures of README and docs/quality.md, from which the table of GPUs
in hqconv/schemas/gpu_target.py was made. scripts/record_publishers.py records what other packages write.

`divergence`: the model of `scripts/real_model.py FOLDER --texts FOLDER` is converted with every schema that its sizes
allow, rounded to nearest and calibrated (14,336 tokens of calib.txt in contexts of 512), and evaluated on 8,192 tokens
of held-out.txt. Other schemas on record stay.

`speeds`: one layer with Gaussian weights is converted for each pair of schema and activations, and the time is that of
w13, the activation and w2 with the quantization of their inputs, in CUDA graphs. Each step has other tokens, and copies
of the weights take turns, so that weights are read from memory, not from the L2 cache. A fast kernel that is wrong does
not count: above verify's limit of the error against decoded weights there is no time. A run takes the place of an older
one of the same GPU and model.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import multiprocessing
import platform
import re
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from hqconv.artifact.load import decoded_experts
from hqconv.artifact.reader import Artifact
from hqconv.errors import RequestError
from hqconv.kernel_layout import fused_moe as moe
from hqconv.kernel_layout.compatibility import why_overflow
from hqconv.kernel_layout.transform import why_not
from hqconv.schemas.activation import Activation
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.input_schema import KernelSpec, resolve_inputs
from hqconv.schemas.options import RTN
from hqconv.schemas.tensors import torch_dtype_of
from hqconv.schemas.weight_schema import PRESETS, resolve_schema
from hqconv.verification.kernel import LayerInputs, in_order
from hqconv.verification.reference import EXACT, Routing, moe_forwards
from hqconv.verification.tolerances import Tolerances
from scripts.bench import make_source
from scripts.check_gpu import target_here
from tests.make import artifacts, golden, layout_cases, matrices

ROOT = Path(__file__).resolve().parents[1]
GOLDEN, MEASURED = ROOT / "tests" / "golden", ROOT / "docs" / "measured"
SPEEDS, DIVERGENCE = MEASURED / "speeds.json", MEASURED / "divergence.json"
CALIBRATED = "calibrated"  # beside `rtn` in DIVERGENCE
RANKED = [*dict.fromkeys([*PRESETS, *json.loads(DIVERGENCE.read_bytes())["schemas"]])]
TIMED = (
    "mxfp4,nvfp4,fp4-g32-e4m3,int4-g32-e4m3,int4-g16-e4m3,int4-g32-e4m3-row,int4-g64,int4-g32,int4,int3-g64,"
    "int3-g32-e4m3,fp8,int8,mxfp8,int3-g64-h64,int4-g32-e4m3-h32,mxfp4-h32"
)
ABOUT = "w13, activation and w2 of one layer with the quantization of their inputs, in CUDA graphs"
LAYER, ACTIVATION, DTYPE = "model.layers.0.mlp.experts", Activation("silu"), "bfloat16"
NUM_COMPARED = 32  # tokens of each batch size that are held to the reference
NUM_REPLAYS = 30
NUM_PROCESSES = 8  # that convert at a time
NUM_TOKENS = 14_336  # of a calibration of the real model
L2_FACTOR = 4  # bytes of weights that are read before the same ones again, in sizes of the L2 cache
Row = dict[str, Any]


# --- digests -----------------------------------------------------------------------------------------------


def record_artifacts() -> None:
    """Digests of every conversion of every source, for tests/conversion/test_golden_artifacts.py."""
    place = GOLDEN / "artifacts.json"
    before = json.loads(place.read_text())["cases"]
    cases: dict[str, list[str]] = {}
    for name in artifacts.SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            source = artifacts.make_source(name, Path(folder) / "source")
            for conversion, options in artifacts.conversions_of(name):
                cases[f"{name}/{conversion}"] = list(
                    artifacts.record(source, Path(folder) / "out", options)
                )
    tell_changes(before, cases)
    facts = {"torch": torch.__version__, "machine": platform.machine()}
    write_lines(place, facts, "cases", cases)


def record_golden() -> None:
    """Outputs of Humming's CUDA ops, for tests of the CPU's ops and of the reader of kernel layouts."""
    before = json.loads((GOLDEN / "golden.json").read_text())["cases"]
    cases: dict[str, Any] = {}
    for name in (*matrices.SCHEMAS, *matrices.SECOND_SCALES):
        for dtype, shape in itertools.product(("bfloat16", "float16"), golden.SHAPES):
            tensors, sums = golden.outputs(name, dtype, shape, "cuda")
            digests = {key: golden.digest(value) for key, value in tensors.items()}
            cases[golden.case_name(name, dtype, shape)] = {"sha256": digests, "sums": sums}
        small, _ = golden.outputs(name, "bfloat16", golden.SHAPES[0], "cuda")
        arrays = {
            k: v.cpu().contiguous().flatten().view(torch.uint8).numpy() for k, v in small.items()
        }
        np.savez_compressed(GOLDEN / f"{name}.npz", allow_pickle=False, **arrays)
    tell_changes(before, cases)
    document = {
        "recorded_on": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cases": cases,
    }
    (GOLDEN / "golden.json").write_text(json.dumps(document, indent=1) + "\n")


def record_layouts() -> None:
    """Kernel layouts as Humming's ops give them; laying out moves data, so any GPU gives the layout of any target."""
    before = json.loads((GOLDEN / "layouts.json").read_text())["cases"]
    cases: dict[str, Any] = {}
    for seed, (name, case) in enumerate(layout_cases.cases().items()):
        on_gpu, here = (
            {
                key: golden.digest(tensor)
                for key, tensor in layout_cases.laid_out(case, seed, device).items()
            }
            for device in ("cuda", "cpu")
        )
        if on_gpu != here:
            raise SystemExit(f"{name}: the CPU's layout is another")
        cases[name] = on_gpu
    tell_changes(before, cases)
    document = {"recorded_on": torch.cuda.get_device_name(), "cases": cases}
    (GOLDEN / "layouts.json").write_text(json.dumps(document, indent=1) + "\n")


def write_lines(place: Path, facts: Row, name: str, entries: Row) -> None:
    """Write JSON with a line for each fact, and one for each entry of what has the name."""
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    lines = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()
    )
    place.write_text(f'{{\n{head} "{name}": {{\n{lines}\n }}\n}}\n')


def tell_changes(before: dict[str, Any], cases: dict[str, Any]) -> None:
    """Print what is not as it was."""
    for name in [name for name in before | cases if before.get(name) != cases.get(name)]:
        print("differs, new or gone:", name)
    print(len(cases), "cases on record")


# --- divergence --------------------------------------------------------------------------------------------


def divergence_of(
    real: Path, schema: str, held_out: Path, calibrate: str | None, num_tokens: int
) -> dict[str, float]:
    """Convert and evaluate the real model: mean KL in nats, perplexities, and the share of equal top tokens."""
    words: dict[str, Any] = {
        "calibrate": calibrate,
        "calibrate_tokens": num_tokens,
        "calibrate_context": 512,
    }
    words |= {"schema": schema, "target": "sm90", "threads": 2}
    with tempfile.TemporaryDirectory() as folder:
        found = hqconv.convert(
            real, Path(folder, "out"), evaluate=held_out, max_kl=1e6, **words
        ).evaluation
    assert found is not None
    return {
        "kl": round(found["kl"]["mean"], 6),
        "perplexity": round(found["perplexity"]["artifact"], 4),
        "source_perplexity": round(found["perplexity"]["source"], 4),
        "same_token": round(found["top1_agreement"], 4),
    }


def record_divergence(args: argparse.Namespace) -> None:
    """Measure every schema with and without a calibration, in several processes on one GPU; print each."""
    document = json.loads(DIVERGENCE.read_text()) if DIVERGENCE.is_file() else {"schemas": {}}
    texts = {CALIBRATED: str(args.texts / "calib.txt"), RTN: None}
    with ProcessPoolExecutor(NUM_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        asked = [
            (
                name,
                how,
                pool.submit(
                    divergence_of, args.real, name, args.texts / "held-out.txt", text, NUM_TOKENS
                ),
            )
            for name, (how, text) in itertools.product(args.schemas.split(","), texts.items())
        ]
        for name, how, done in asked:
            try:
                found = done.result()
            except RequestError as error:
                print(f"{name}: {error.what}", flush=True)
                continue
            print(name, how, json.dumps(found), flush=True)
            document["schemas"].setdefault(name, {})[how] = found
    document |= {
        "about": "KL divergence of the next token's distribution from the 16-bit model; written by scripts/record.py",
        "model": "SmolLM2-135M-Instruct with four experts (scripts/real_model.py)",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    write_lines(DIVERGENCE, document, "schemas", document.pop("schemas"))


# --- speeds ------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """The shape of a model's MoE layer."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


MODEL = Model("Qwen3-30B-A3B", num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
INPUTS, TOKENS = ("a16", "fp8", "int8"), (1, 16, 64, 8192)


class Step(NamedTuple):
    """One step: tokens [T, H], routes [T, k], which copy of the weights, and room for both GEMMs' outputs."""

    x: torch.Tensor
    ids: torch.Tensor
    copy: int
    wide: torch.Tensor
    out: torch.Tensor


def make_routes(num_tokens: int, copies: int) -> list[torch.Tensor]:
    """Experts of each step's tokens, int64 [T, k], without an expert twice in a token.

    Where tokens reach a part of the experts only, steps of one copy reach others in turn; else experts are drawn.
    """
    generator, count = torch.Generator().manual_seed(0), num_tokens * MODEL.top_k
    if count >= MODEL.num_experts:
        steps = copies if num_tokens >= 1024 else 4 * copies
        scores = (
            torch.rand(num_tokens, MODEL.num_experts, generator=generator) for _ in range(steps)
        )
        return [one.topk(MODEL.top_k, dim=-1).indices for one in scores]
    order = torch.randperm(MODEL.num_experts, generator=generator)
    turns = (
        torch.arange(turn * count, (turn + 1) * count)
        for turn in range(math.ceil(MODEL.num_experts / count))
    )
    return [
        order[t % MODEL.num_experts].view(num_tokens, MODEL.top_k)
        for t in turns
        for _ in range(copies)
    ]


def make_steps(num_tokens: int, copies: int) -> list[Step]:
    """Steps with seeded tokens; those of one size share the room for outputs."""
    dtype, rows = torch_dtype_of(DTYPE), num_tokens * MODEL.top_k
    wide = torch.zeros(rows, 2 * MODEL.intermediate_size, dtype=dtype, device="cuda")
    out = torch.zeros(rows, MODEL.hidden_size, dtype=dtype, device="cuda")
    x = torch.randn(
        num_tokens, MODEL.hidden_size, generator=torch.Generator().manual_seed(num_tokens)
    )
    routes = make_routes(num_tokens, copies)
    return [
        Step(x.to("cuda", dtype), ids.cuda(), n % copies, wide, out) for n, ids in enumerate(routes)
    ]


def launcher(
    copies: Sequence[dict[str, moe.Gemm]], steps: Sequence[Step]
) -> Callable[[Step], None]:
    """Return a function that launches a step without waiting; all that depends on routes is prepared here."""
    num_routes, top_k = steps[0].ids.numel(), steps[0].ids.size(1)
    entries = {name: moe.tuning_entry(gemm.config, num_routes) for name, gemm in copies[0].items()}
    num_experts, locks = copies[0]["w13"].config.num_experts, moe.new_locks(torch.device("cuda"))
    prepared = {
        id(step): {
            name: moe.align(step.ids, num_experts, entry["block_shape"][0])
            for name, entry in entries.items()
        }
        for step in steps
    }
    between = moe.humming_activation(ACTIVATION, gated=True)

    def launch(step: Step) -> None:
        w13, w2 = copies[step.copy]["w13"], copies[step.copy]["w2"]
        routes = prepared[id(step)]
        inputs = moe.process_input(w13, step.x)
        moe.launch_gemm(
            w13, inputs, routes["w13"], top_k, step.wide, num_routes, entries["w13"], locks
        )
        hidden = moe.process_input(w2, step.wide, **between)
        moe.launch_gemm(w2, hidden, routes["w2"], 1, step.out, num_routes, entries["w2"], locks)

    return launch


def time_steps(launch: Callable[[Step], None], steps: Sequence[Step]) -> float:
    """Return the median time of a step in microseconds, over replays of a graph of all steps."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            launch(step)
    times = []
    for _ in range(NUM_REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(1e3 * statistics.median(times[3:]) / len(steps))


def kernel_error(out: Path, step: Step) -> float:
    """Return the relative error of a step that has run, against the artifact's decoded weights in float64."""
    (num_tokens, top_k), device = step.ids.shape, step.x.device
    chosen = (
        torch.linspace(0, num_tokens - 1, min(num_tokens, NUM_COMPARED), device=device)
        .round()
        .long()
    )
    routing = Routing(step.ids[chosen], torch.full((len(chosen), top_k), 1 / top_k, device=device))
    found = step.out.view(num_tokens, top_k, -1)[chosen].double().mean(1)
    with (
        Artifact(out) as artifact,
        closing(decoded_experts(artifact, artifact.moe_layer(LAYER), device, 2)) as decoded,
    ):
        inputs = LayerInputs.of(artifact, LAYER, device)
        rounding = EXACT if inputs is None else inputs.reference()
        [(expected, _)] = moe_forwards(
            step.x[chosen].double(), routing, in_order(decoded), ACTIVATION, [rounding]
        )
    return float((found - expected).norm() / expected.norm())


def measure_pair(spec: KernelSpec, source: Path) -> list[Row]:
    """Convert the layer for a pair, run and time it for each number of tokens; one row each."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        words: dict[str, Any] = {"schema": spec.schema, "input_schema": spec.inputs, "dtype": DTYPE}
        hqconv.convert(
            source, out, **words, target=spec.target.name, device="cuda", allow_unserved=True
        )
        loaded = hqconv.load(out, layer=LAYER, device="cuda", check_digests=False)
        gemms = {
            name: moe.load_gemm(one.config, one.tensors, one.hadamard_block_size)
            for name, one in loaded.items()
        }
        layer_bytes = sum(
            one.numel() * one.element_size()
            for gemm in gemms.values()
            for one in gemm.tensors.values()
        )
        count = max(
            2,
            math.ceil(L2_FACTOR * torch.cuda.get_device_properties(0).L2_cache_size / layer_bytes),
        )
        copies = [gemms, *(copy_of(gemms) for _ in range(count - 1))]
        for num_tokens in TOKENS:
            steps = make_steps(num_tokens, count)
            launch = launcher(copies, steps)
            for step in steps[::-1]:  # the first one last: its outputs are compared
                launch(step)
            error = kernel_error(out, steps[0])
            rows.append(row_of(spec, num_tokens, time_steps(launch, steps), error))
    return rows


def copy_of(gemms: Mapping[str, moe.Gemm]) -> dict[str, moe.Gemm]:
    """The same weights elsewhere in memory."""
    return {
        n: replace(g, tensors={key: one.clone() for key, one in g.tensors.items()})
        for n, g in gemms.items()
    }


def row_of(
    spec: KernelSpec, num_tokens: int, time: float | None, error: float, failed: str = ""
) -> Row:
    """Return a row of the file; a kernel error above verify's limit, or a failure, leaves it without a time."""
    limits = Tolerances.of(spec.inputs, spec.param_dtype)
    limit = limits.kernel if limits.rounded is None else limits.rounded
    if not failed and not error <= limit:
        failed = f"kernel error {error:.4f}, limit {limit:.4f}"
    return {
        "schema": spec.schema.name,
        "input_schema": spec.inputs.name,
        "num_tokens": num_tokens,
        "microseconds": None if failed or time is None else round(time, 1),
        "kernel_error": round(error, 5) if math.isfinite(error) else None,
        **({"failed": failed} if failed else {}),
    }


def specs_of(schemas: Sequence[str], target: GpuTarget) -> list[KernelSpec]:
    """Pairs that run on a target."""
    pairs = itertools.product(schemas, INPUTS)
    asked = [
        KernelSpec(resolve_schema(schema), DTYPE, target, resolve_inputs(one))
        for schema, one in pairs
    ]
    return [spec for spec in asked if not (why_not(spec) or why_overflow(spec))]


def record_speeds(args: argparse.Namespace) -> None:
    """Measure pair after pair on this GPU; a pair that fails has rows with the reason."""
    specs = specs_of(args.schemas.split(","), target_here())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        source = make_source(
            Path(folder, "source"),
            layers=1,
            experts=MODEL.num_experts,
            top_k=MODEL.top_k,
            hidden=MODEL.hidden_size,
            intermediate=MODEL.intermediate_size,
            vocab=256,
        )
        for spec in specs:
            try:
                rows += measure_pair(spec, source)
            except Exception as error:  # noqa: BLE001 - one pair must not cost the others their rows
                traceback.print_exc()
                rows += [
                    row_of(spec, count, None, math.nan, f"{type(error).__name__}: {error}")
                    for count in TOKENS
                ]
            print(*map(json.dumps, rows[-len(TOKENS) :]), sep="\n", flush=True)
    run = {
        "gpu": torch.cuda.get_device_name(),
        "sm_version": specs[0].target.sm_version,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "source": "scripts/record.py speeds",
        "timed": ABOUT,
        "versions": {name: version(name) for name in ("humming-kernels", "torch")},
        "model": MODEL._asdict(),
        "rows": rows,
    }
    others = [
        other
        for other in json.loads(SPEEDS.read_text())["runs"]
        if (other["gpu"], other["model"]["name"]) != (run["gpu"], MODEL.name)
    ]
    SPEEDS.write_text(speeds_text([*others, run]))
    sys.exit(any("failed" in row for row in rows))


def speeds_text(runs: list[Row]) -> str:
    """Return the file's text: a row on each line."""
    text = json.dumps({"runs": runs}, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda row: json.dumps(json.loads(row[0])), text) + "\n"


def main() -> None:
    """Record one kind of data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("artifacts", "golden", "layouts", "divergence", "speeds"))
    parser.add_argument("--schemas", help="default: all on record, or timed")
    parser.add_argument("--real", type=Path, default=Path("real"), help="folder of the real model")
    parser.add_argument("--texts", type=Path, default=Path(), help="folder of its texts")
    args = parser.parse_args()
    args.schemas = args.schemas or (TIMED if args.what == "speeds" else ",".join(RANKED))
    if args.what in ("speeds", "divergence"):
        {"speeds": record_speeds, "divergence": record_divergence}[args.what](args)
        return
    records = {"artifacts": record_artifacts, "golden": record_golden, "layouts": record_layouts}
    records[args.what]()


if __name__ == "__main__":
    main()
