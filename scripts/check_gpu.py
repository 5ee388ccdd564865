"""Prove on a GPU what tests can only compute: every schema, source format and check on the real kernels.

    python scripts/check_gpu.py devices [--schemas mxfp4,int4]        CPU and CUDA write the same artifact
    python scripts/check_gpu.py kernels [--inputs a16|quantized|fp8,…] every schema through the fused-MoE kernel
    python scripts/check_gpu.py sources [--formats awq,gptq]          every source format: convert, verify, compare

Needs a CUDA device of the target architecture (`sources` runs without one as well); vLLM's answers are
scripts/check_serving.py's. Every case is a line, and a row of `--log FILE.md`. Exit code 1 where a case fails.
`--jobs N`: processes at a time, as compiling kernels takes the time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import shutil
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
from hqconv.kernel_layout.transform import why_not
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.input_schema import INPUT_PRESETS, LayerSpec, resolve_inputs
from hqconv.schemas.weight_schema import PRESETS, resolve_layer_schema
from scripts.bench import make_source
from tests.make.formats import FORMATS, write
from tests.make.layouts import Sizes
from tests.make.qwen import read_tree

REPO = Path(__file__).resolve().parents[1]
AFFINE = "int4-g64-zp int3-g64 int4-g128-fpzp int7-c int8-g128-zp int4-c int4-g128-zp int2 int5"
SECOND_SCALES = "int4-g32-e4m3 int4-g16-e4m3 int4-g32-e4m3-row fp4-g32-e4m3 fp4-g32-e8m0-row"
SCHEMAS = [*PRESETS, *AFFINE.split(), *SECOND_SCALES.split()]
PAIRS = "int3-g64+int4-g32-e4m3 int4-g32-e4m3+mxfp4 mxfp4+int8 fp8-block+int4-g64-zp int4-g64+fp8"
ROUND_ROBIN: dict[str, Any] = {
    "tp": 2,
    "ep": 3,
    "expert_placement": "round_robin",
    "redundant_experts": 2,
}
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
Row = tuple[str, ...]
Case = Callable[[Path], list[str]]  # cells of a row; an exception is a failure


def target_here() -> GpuTarget:
    """Target of this machine's GPU; an H100's without one."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return GpuTarget(major * 10 + minor)


def check_equal(one: Path, other: Path) -> None:
    """Raise AssertionError with the first files that differ."""
    first, second = read_tree(one), read_tree(other)
    wrong = [name for name in first | second if first.get(name) != second.get(name)]
    assert not wrong, f"{len(wrong)} files differ: {wrong[:3]}"


def check_passed(report: Any) -> None:
    """Raise AssertionError with the first finding."""
    findings = [
        f"{r.name}: {f.where}: {f.what} ({f.expected}; {f.found})"
        for r in report.results
        for f in r.findings
    ]
    assert report.passed, findings[:1]


# --- devices -----------------------------------------------------------------------------------------------


def devices(schema: str, dtype: str, work: Path) -> list[str]:
    """Convert on both devices for all grids; every file must be equal, the manifest included."""
    source = make_source(
        work / "source",
        hidden=512,
        intermediate=512,
        layers=2,
        experts=5,
        top_k=2,
        vocab=512,
        shard_size="8MB",
    )
    for grid in GRIDS:
        outs = [work / "cpu", work / "cuda"]
        for out in outs:
            shutil.rmtree(out, ignore_errors=True)
            words: dict[str, Any] = {"schema": schema, "dtype": dtype, "target": "sm90", **grid}
            hqconv.convert(source, out, **words, device=out.name, threads=8, allow_unserved=True)
        check_equal(*outs)
    return [f"{len(GRIDS)} grids and layouts", "same bytes"]


# --- kernels -----------------------------------------------------------------------------------------------


def kernels(spec: LayerSpec, work: Path) -> list[str]:
    """Convert and verify a pair of schema and activations over all grids; the worst of every figure."""
    worst = dict.fromkeys(FIGURES, 0.0)
    for size, grid in KERNEL_GRIDS:
        source = make_source(
            work / str(size),
            hidden=1024,
            intermediate=size,
            layers=2,
            experts=8,
            top_k=2,
            vocab=512,
            shard_size="16MB",
        )
        words: dict[str, Any] = {
            "schema": spec.schema,
            "dtype": spec.param_dtype,
            "target": spec.target.name,
            **grid,
        }
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


def specs(inputs: str, schemas: Iterable[str]) -> list[LayerSpec]:
    """Pairs of schema and activations that run on this GPU's target, in both dtypes."""
    chosen = (
        [name for name in INPUT_PRESETS if name != "a16"]
        if inputs == "quantized"
        else inputs.split(",")
    )
    asked = itertools.product(("bfloat16", "float16"), chosen, schemas)
    target = target_here()
    found = [
        LayerSpec(resolve_layer_schema(s), dtype, target, resolve_inputs(i))
        for dtype, i, s in asked
    ]
    return [spec for spec in found if not any(map(why_not, spec.each))]


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
        if schema == "source" and spec.refused and spec.refused in str(error):
            return ["refused", spec.refused]
        raise
    report = hqconv.verify(work / "out", source, tokens=(64,), threads=4)
    check_passed(report)
    check_passed(hqconv.verify(work / "out", checks=["files", "weights"], threads=4))
    if device == "cuda":
        hqconv.convert(source, work / "again", device="cpu", **words)
        check_equal(work / "out", work / "again")
    worst = max(
        error["relative_error"] for layer in summary.errors.values() for error in layer.values()
    )
    checks = ", ".join(result.name for result in report.results if not result.skipped)
    return [summary.plan.spec.schema.name, f"{checks}; error {worst:.3f}"]


# --- the command -------------------------------------------------------------------------------------------


def cases_of(args: argparse.Namespace) -> dict[Row, Case]:
    """The cases of a subcommand, by the first cells of their rows."""
    schemas = args.schemas.split(",") if args.schemas else [*SCHEMAS, *PAIRS.split()]
    if args.what == "devices":
        return {(s, d): partial(devices, s, d) for s in schemas for d in ("bfloat16", "float16")}
    if args.what == "kernels":
        return {
            (s.inputs.name, s.schema.name, s.param_dtype): partial(kernels, s)
            for s in specs(args.inputs, schemas)
        }
    names = args.formats.split(",") if args.formats else list(FORMATS)
    needs = {name: FORMATS[name].needs for name in names}
    there = [
        name
        for name in names
        if not needs[name] or importlib.util.find_spec(needs[name]) is not None
    ]
    return {(n, s): partial(sources, n, s) for n in there for s in ("source", FORMATS[n].target)}


def run(name: Row, case: Case) -> tuple[Row, bool]:
    """Run one case in a folder of its own; its row, and whether it passed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as work:
        try:
            cells, passed = case(Path(work)), True
        except Exception as error:  # noqa: BLE001 - a case that fails is a row
            traceback.print_exc()
            cells, passed = (
                [
                    f"{type(error).__name__}: {str(error)[:300]}".replace("|", "/").replace(
                        "\n", " "
                    )
                ],
                False,
            )
    row = (*name, *cells, "pass" if passed else "FAIL")
    print(f"| {' | '.join(row)} | {time.monotonic() - begun:.1f} s", flush=True)
    return row, passed


def main(arguments: Sequence[str] | None = None) -> None:
    """Check everything; exit 1 on any failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("devices", "kernels", "sources"))
    parser.add_argument("--schemas", default="")
    parser.add_argument("--inputs", default="a16")
    parser.add_argument("--formats", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args(arguments)
    cases = cases_of(args)
    finish(args.what, cases, args)


def finish(what: str, cases: dict[Row, Case], args: argparse.Namespace) -> None:
    """Run the cases, write the log, and exit."""
    if args.jobs == 1:
        done = [run(name, case) for name, case in cases.items()]
    else:
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            done = list(pool.map(run, cases, cases.values()))
    if args.log:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "without a GPU"
        lines = "".join(f"| {' | '.join(row)} |\n" for row, _ in done)
        args.log.write_text(
            f"{Path(sys.argv[0]).name} {what}: {where}, torch {torch.__version__}\n\n{lines}"
        )
    sys.exit(0 if done and all(passed for _, passed in done) else 1)


if __name__ == "__main__":
    main()
