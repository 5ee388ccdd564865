"""Prove on a GPU what tests can only compute: every schema, source format and check on the real kernels, and vLLM.

    python scripts/check_gpu.py devices [--schemas mxfp4,int4]        CPU and CUDA write the same artifact
    python scripts/check_gpu.py kernels [--inputs a16|quantized|fp8,…] every schema through the fused-MoE kernel
    python scripts/check_gpu.py sources [--formats awq,gptq]          every source format: convert, verify, compare
    python scripts/check_gpu.py verify                                 damage has the same findings on both devices
    python scripts/check_gpu.py serving [--schemas …] [--tp 2 [--ep]]  vLLM's answers, sleep, and kernels of `warm`

Needs a CUDA device of the target architecture (`sources` runs without one as well), and `serving` vLLM
(scripts/vllm_archive.py packs it for a machine without a network). Every case is a line, and a row of `--log FILE.md`.
Exit code 1 where a case fails. `--jobs N`: processes at a time, as compiling kernels takes the time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from hqconv.kernel_layout.compatibility import why_not
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.input_schema import INPUT_PRESETS, KernelSpec, resolve_inputs
from hqconv.schemas.weight_schema import PRESETS, resolve_schema
from scripts.bench import make_source
from tests.make.formats import FORMATS, write
from tests.make.layouts import Sizes

REPO = Path(__file__).resolve().parents[1]
SCHEMAS = (
    *PRESETS,
    *("int4-g64-zp", "int3-g64", "int4-g128-fpzp", "int7-c", "int8-g128-zp", "int4-c", "int4-g128-zp", "int2", "int5"),
    *("int4-g32-e4m3", "int4-g16-e4m3", "int4-g32-e4m3-row", "fp4-g32-e4m3", "fp4-g32-e8m0-row"),
)
SERVED = ("mxfp4", "int4", "fp8", "fp8-block", "int8", "nvfp4", "int4-g64-zp")
ROUND_ROBIN: dict[str, Any] = {"tp": 2, "ep": 3, "expert_placement": "round_robin", "redundant_experts": 2}
GRIDS: tuple[dict[str, Any], ...] = (
    *({"tp": tp, "ep": ep} for tp in (1, 2) for ep in (1, 3)),
    *(ROUND_ROBIN, {"tp": 3, "tp_split": "groups"}, {"layout": "checkpoint"}),
)
# Intermediate size of the experts, and the ranks. 352 columns are two groups of 128 and a smaller one.
KERNEL_GRIDS: tuple[tuple[int, dict[str, Any]], ...] = (
    (512, {}),
    (512, ROUND_ROBIN),
    (352, {"tp": 2, "tp_split": "groups"}),
)
FIGURES = ("rounded_kernel", "rounded_channel", "kernel", "channel", "against_source")
START_S = 300.0  # no start of a server takes longer
Row = tuple[str, ...]
Case = Callable[[Path], list[str]]  # cells of a row; an exception is a failure


def target_here() -> GpuTarget:
    """Target of this machine's GPU; an H100's without one."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return GpuTarget(major * 10 + minor)


def files_of(root: Path) -> dict[str, bytes]:
    """Content of every file of an artifact."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def check_equal(one: Path, other: Path) -> None:
    """Raise AssertionError with the first files that differ."""
    first, second = files_of(one), files_of(other)
    wrong = [name for name in first | second if first.get(name) != second.get(name)]
    assert not wrong, f"{len(wrong)} files differ: {wrong[:3]}"


def check_passed(report: Any) -> None:
    """Raise AssertionError with the first finding."""
    findings = [f"{r.name}: {f.where}: {f.what} ({f.expected}; {f.found})" for r in report.results for f in r.findings]
    assert report.passed, findings[:1]


# --- devices -----------------------------------------------------------------------------------------------


def devices(schema: str, dtype: str, work: Path) -> list[str]:
    """Convert on both devices for all grids; every file must be equal, the manifest included."""
    sizes = {"hidden": 512, "intermediate": 512, "layers": 2, "experts": 5, "top_k": 2, "vocab": 512}
    source = make_source(work / "source", **sizes, shard_size="8MB")
    for grid in GRIDS:
        outs = [work / "cpu", work / "cuda"]
        for out in outs:
            shutil.rmtree(out, ignore_errors=True)
            words: dict[str, Any] = {"schema": schema, "dtype": dtype, "target": "sm90", **grid}
            hqconv.convert(source, out, **words, device=out.name, threads=8, allow_unserved=True)
        check_equal(*outs)
    return [f"{len(GRIDS)} grids and layouts", "same bytes"]


# --- kernels -----------------------------------------------------------------------------------------------


def kernels(spec: KernelSpec, work: Path) -> list[str]:
    """Convert and verify a pair of schema and activations over all grids; the worst of every figure."""
    worst = dict.fromkeys(FIGURES, 0.0)
    for size, grid in KERNEL_GRIDS:
        sizes = {"hidden": 1024, "layers": 2, "experts": 8, "top_k": 2, "vocab": 512, "intermediate": size}
        source = make_source(work / str(size), **sizes, shard_size="16MB")
        words: dict[str, Any] = {"schema": spec.schema, "dtype": spec.param_dtype, "target": spec.target.name, **grid}
        out = work / "out"
        words |= {"input_schema": spec.inputs, "overwrite": out.exists(), "allow_unserved": True}
        hqconv.convert(source, out, **words, device="cuda", threads=2)
        report = hqconv.verify(out, source, threads=2)
        check_passed(report)
        [kernel] = [result for result in report.results if result.name == "kernel"]
        assert not kernel.skipped
        for measured in kernel.measured.values():
            worst = {key: max(value, measured.get(key, 0.0)) for key, value in worst.items()}
    return [f"{value:.4f}" if value else "-" for value in worst.values()]


def specs(inputs: str, schemas: Iterable[str]) -> list[KernelSpec]:
    """Pairs of schema and activations that run on this GPU's target, in both dtypes."""
    chosen = [name for name in INPUT_PRESETS if name != "a16"] if inputs == "quantized" else inputs.split(",")
    asked = itertools.product(("bfloat16", "float16"), chosen, schemas)
    target = target_here()
    found = [KernelSpec(resolve_schema(s), dtype, target, resolve_inputs(i)) for dtype, i, s in asked]
    return [spec for spec in found if why_not(spec) is None]


# --- sources -----------------------------------------------------------------------------------------------


def sources(name: str, schema: str, work: Path) -> list[str]:
    """Convert a checkpoint of a format, verify it with and without the source, and compare CPU with CUDA."""
    spec = FORMATS[name]
    sizes = {"hidden": 512, "inner": 256, "experts": 4} if spec.sizes == Sizes() else {"experts": 4}
    source = write(work / "source", name, **sizes).folder
    tp = 1 if schema == "source" else spec.tp
    words: dict[str, Any] = {"schema": schema, "tp": tp, "target": "sm90", "threads": 4}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        summary = hqconv.convert(source, work / "out", device=device, **words)
    except hqconv.HqconvError as error:
        if schema == "source" and spec.refused and spec.refused in error.message():
            return ["refused", spec.refused]
        raise
    report = hqconv.verify(work / "out", source, tokens=(64,), threads=4)
    check_passed(report)
    check_passed(hqconv.verify(work / "out", checks=["files", "weights"], threads=4))
    if device == "cuda":
        hqconv.convert(source, work / "again", device="cpu", **words)
        check_equal(work / "out", work / "again")
    worst = max(error["relative_error"] for layer in summary.errors.values() for error in layer.values())
    checks = ", ".join(result.name for result in report.results if not result.skipped)
    return [summary.plan.spec.schema.name, f"{checks}; error {worst:.3f}"]


# --- verify ------------------------------------------------------------------------------------------------


def flip(path: Path, share: float) -> None:
    """Turn round one bit of a file, at a share of its length."""
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def verify(schema: str, work: Path) -> list[str]:
    """Damage one rank file in several places; both devices must find the same, in the same words."""
    source = make_source(work / "source", hidden=1024, intermediate=512, layers=1, experts=8, vocab=512)
    hqconv.convert(source, work / "good", schema=schema, target=target_here().name, tp=2, device="cuda")
    seconds = []
    for share in (None, 0.3, 0.6, 0.9, 0.999):
        out = work / "damaged"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(work / "good", out)
        if share is not None:
            flip(next((out / "experts").rglob("*.safetensors")), share)
        told = []
        for device in ("cpu", "cuda"):
            begun = time.monotonic()
            report = hqconv.verify(out, source, device=device, checks=["weights"])
            seconds.append(time.monotonic() - begun)
            told.append([vars(finding) for result in report.results for finding in result.findings])
            assert report.passed == (share is None), share
        assert told[0] == told[1], told
    return ["same findings", f"CPU {min(seconds[::2]):.1f} s, CUDA {min(seconds[1::2]):.1f} s"]


# --- serving -----------------------------------------------------------------------------------------------

# One engine: its answers to four prompts, again after each kind of sleep, and how many kernels were compiled.
SERVER = """
import json, os, sys, time
from pathlib import Path
job = json.loads(sys.argv[1])
from vllm import LLM, SamplingParams
words = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, max_num_seqs=8, seed=0,
             enable_prefix_caching=False, kv_cache_memory_bytes=2 << 30, gpu_memory_utilization=0.3,
             tensor_parallel_size=job["tp"], enable_expert_parallel=job["ep"], enable_sleep_mode=job["sleeps"])
begun = time.monotonic()
llm = LLM(job["model"], **words)
sampling = SamplingParams(temperature=0, max_tokens=32, logprobs=5, ignore_eos=True, detokenize=False)
def ask():  # one at a time: what is computed together would depend on when each one arrives
    prompts = [[1, *range(first, first + 20)] for first in (3, 40, 77, 114)]
    outputs = [llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0].outputs[0] for p in prompts]
    return [[[t, lp[t].logprob] for t, lp in zip(o.token_ids, o.logprobs)] for o in outputs]
found = {"start_s": time.monotonic() - begun, "answers": ask()}
for level in (1, 2) if job["sleeps"] else ():
    llm.sleep(level)
    llm.wake_up(["weights"])
    if level == 2:
        llm.collective_rpc("reload_weights")
    llm.wake_up(["kv_cache"])
    found[f"sleep {level}"] = ask()
cache = Path(os.environ["HUMMING_CACHE_DIR"])
found["num_kernels"] = len(list(cache.glob("*/kernel.cubin")))  # with those that were put there
Path(job["report"]).write_text(json.dumps(found))
os._exit(0)
"""


def serve(model: Path, work: Path, args: argparse.Namespace, *, sleeps: bool = False, kernels: str = "0") -> Any:
    """Start vLLM on a model with an empty cache of kernels; what it reports."""
    scratch = Path(tempfile.mkdtemp(dir=work))
    job = {"model": str(model), "report": str(scratch / "report"), "tp": args.tp, "ep": args.ep, "sleeps": sleeps}
    environment = {**os.environ, "HUMMING_CACHE_DIR": str(scratch / "cache"), "HQCONV_WARM_KERNELS": kernels}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    (scratch / "cache").mkdir()
    with (scratch / "log").open("w") as log:
        command = [sys.executable, "-c", SERVER, json.dumps(job)]
        subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=START_S, check=False)
    if not (scratch / "report").exists():
        lines = (scratch / "log").read_text(errors="replace").splitlines()
        raise AssertionError([line for line in lines if "Error" in line][-3:] or lines[-5:])
    return json.loads((scratch / "report").read_text())


def serving(schema: str, args: argparse.Namespace, work: Path) -> list[str]:
    """Serve the kernel layout; answers must be those of the checkpoint layout where stock vLLM serves it."""
    source = make_source(work / "source", hidden=1024, intermediate=768, layers=3, experts=16, vocab=512, top_k=4)
    out, ranks = work / "kernel", {"ep": args.tp} if args.ep else {"tp": args.tp}
    words: dict[str, Any] = {"schema": schema, "target": target_here().name, "device": "cuda"}
    hqconv.convert(source, out, **words, **ranks, allow_unserved=True)
    mine = serve(out, work, args, sleeps=True)
    assert mine["answers"] == mine["sleep 1"] == mine["sleep 2"], "other answers after sleep"
    cells = [f"start {mine['start_s']:.0f} s"]
    if ENGINE.checkpoint_layout_obstacle(resolve_schema(schema), "bfloat16") is None:
        hqconv.convert(source, work / "stock", **words, layout="checkpoint")
        assert serve(work / "stock", work, args)["answers"] == mine["answers"], (
            "other answers than the checkpoint layout"
        )
        cells.append("same answers as the checkpoint layout")
    command = [sys.executable, "-m", "hqconv", "warm", str(out), "--kernels", str(work / "warm"), "-q"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(REPO)})
    num_warm = len(list((work / "warm").rglob("*.cubin")))
    warm = serve(out, work, args, kernels=str(work / "warm"))
    assert warm["answers"] == mine["answers"], "other answers with kernels of hqconv warm"
    assert warm["num_kernels"] == num_warm, f"{num_warm} of {warm['num_kernels']} kernels were warm"
    return [*cells, f"with {num_warm} kernels of hqconv warm {warm['start_s']:.0f} s"]


# --- the command -------------------------------------------------------------------------------------------


def cases_of(args: argparse.Namespace) -> dict[Row, Case]:
    """The cases of a subcommand, by the first cells of their rows."""
    schemas = args.schemas.split(",") if args.schemas else SERVED if args.what in ("serving", "verify") else SCHEMAS
    if args.what == "devices":
        return {(s, d): partial(devices, s, d) for s in schemas for d in ("bfloat16", "float16")}
    if args.what == "kernels":
        return {(s.inputs.name, s.schema.name, s.param_dtype): partial(kernels, s) for s in specs(args.inputs, schemas)}
    if args.what == "sources":
        names = args.formats.split(",") if args.formats else list(FORMATS)
        needs = {name: FORMATS[name].needs for name in names}
        there = [name for name in names if not needs[name] or importlib.util.find_spec(needs[name]) is not None]
        return {(n, s): partial(sources, n, s) for n in there for s in ("source", FORMATS[n].target)}
    if args.what == "verify":
        return {(schema,): partial(verify, schema) for schema in schemas}
    return {(schema,): partial(serving, schema, args) for schema in schemas}


def run(name: Row, case: Case) -> tuple[Row, bool]:
    """Run one case in a folder of its own; its row, and whether it passed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as work:
        try:
            cells, passed = case(Path(work)), True
        except Exception as error:  # noqa: BLE001 - a case that fails is a row
            traceback.print_exc()
            cells, passed = [f"{type(error).__name__}: {str(error)[:300]}".replace("|", "/").replace("\n", " ")], False
    row = (*name, *cells, "pass" if passed else "FAIL")
    print(f"| {' | '.join(row)} | {time.monotonic() - begun:.1f} s", flush=True)
    return row, passed


def main(arguments: Sequence[str] | None = None) -> None:
    """Check everything; exit 1 on any failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("devices", "kernels", "sources", "verify", "serving"))
    parser.add_argument("--schemas", default="")
    parser.add_argument("--inputs", default="a16")
    parser.add_argument("--formats", default="")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args(arguments)
    cases = cases_of(args)
    if args.jobs == 1:
        done = [run(name, case) for name, case in cases.items()]
    else:
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            done = list(pool.map(run, cases, cases.values()))
    if args.log:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "without a GPU"
        lines = "".join(f"| {' | '.join(row)} |\n" for row, _ in done)
        args.log.write_text(f"check_gpu.py {args.what}: {where}, torch {torch.__version__}\n\n{lines}")
    sys.exit(0 if done and all(passed for _, passed in done) else 1)


if __name__ == "__main__":
    main()
