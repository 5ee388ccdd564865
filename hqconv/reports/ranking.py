"""The schemas that a GPU runs with given activations, ranked by size and a real model's divergence (`schemas --for`).

Divergences, errors and speeds are data of the package, in the folder `measured`, which scripts/record.py writes.
Nothing is measured here.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError
from hqconv.kernel_layout.compatibility import gemm_bytes, why_overflow
from hqconv.reports.parts import Document
from hqconv.schemas.gpu_target import GpuTarget, gpu_named, parse_target
from hqconv.schemas.input_schema import A16, InputSchema, KernelSpec, resolve_inputs
from hqconv.schemas.weight_schema import resolve_schema

MEASURED = Path(__file__).parent / "measured"
ERRORS, SPEEDS, DIVERGENCE = (
    MEASURED / f"{name}.json" for name in ("errors", "speeds", "divergence")
)
CALIBRATED = "calibrated"  # beside `rtn` in DIVERGENCE
KINDS = ("gaussian", "student_t", "outlier_columns")  # of matrices in ERRORS
SIZES = (
    7168,
    2048,
)  # hidden and intermediate size that bits per weight are worked out for: DeepSeek-V3's
DECODE, PREFILL = 64, 8192  # tokens
RULE = (
    "Size classes in steps of a quarter bit, smallest first. In a class the smallest divergence (KL) of a real model "
    "after calibration first; then what that model's sizes do not allow, by the error of Gaussian weights. Speed does "
    "not change the order."
)
_ROW_SCALES = 0.01  # bits per weight that a class allows besides
_USUAL = 4.25  # bits per weight of the class that is recommended
_FASTER = 1.15  # a ratio of times, or divergences, that counts
_MISREADS = "Humming's kernel misreads some weights (docs/kernels.md)"
_ROUNDS_AGAIN = "small weights are rounded once more in the kernel's layout"


@functools.cache
def measured_errors() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Relative errors: schema → kind of matrix, one of `KINDS` → quantizer (`rtn`, `mse`) → error."""
    found: Mapping[str, Any] = json.loads(ERRORS.read_text(encoding="utf-8"))["schemas"]
    return found


@functools.cache
def measured_divergence() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Figures of a real model: schema → `rtn` or `calibrated` → kl (nats), perplexity, same_token (a share)."""
    found: Mapping[str, Any] = json.loads(DIVERGENCE.read_text(encoding="utf-8"))["schemas"]
    return found


@functools.cache
def speed_runs() -> list[Document]:
    """Runs of `scripts/record.py speeds`: GPU, date, model's shape and rows, at most one for each GPU and model."""
    found: list[Document] = json.loads(SPEEDS.read_text(encoding="utf-8"))["runs"]
    return found


def speed_run_of(target: GpuTarget, gpu: str | None = None) -> Document | None:
    """Return the run on this GPU model (a name in `GPUS`), else on another of the architecture; None without one."""
    of_target = [run for run in speed_runs() if run["sm_version"] == target.sm_version]
    same = [run for run in of_target if gpu is not None and gpu_named(run["gpu"]) == gpu]
    return next(iter([*same, *of_target]), None)


def microseconds(run: Document | None, schema: str, inputs: str) -> dict[str, float]:
    """Return number of tokens → measured time of a layer's GEMMs; kernels with a wrong result have none."""
    rows = [] if run is None else run["rows"]
    mine = (row for row in rows if (row["schema"], row["input_schema"]) == (schema, inputs))
    return {
        str(row["num_tokens"]): row["microseconds"]
        for row in mine
        if row["microseconds"] is not None
    }


def expert_bits(spec: KernelSpec, hidden_size: int, intermediate_size: int) -> int:
    """Bits that one gated expert takes in the kernel layout on one rank, scales and padding included."""
    shapes = ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
    return sum(8 * gemm_bytes(*shape, spec) for shape in shapes)


def size_class(bits: float) -> float:
    """Return the least multiple of a quarter bit that holds `bits`, a scale per row aside."""
    return math.ceil((bits - _ROW_SCALES) * 4) / 4


def rank_schemas(for_gpu: str, input_schema: str | None = None) -> Document:
    """Rank every measured schema that runs on a GPU with these activations, in 16-bit parameters of its usual dtype.

    for_gpu: a GPU's name or architecture, as of `--target`. input_schema: as of `--input-schema`; None for a16.
    Raises RequestError for an unknown name, and where nothing runs.
    """
    from hqconv.kernel_layout.transform import why_not  # with torch

    target, inputs = parse_target(for_gpu), resolve_inputs(input_schema or A16.name)
    dtype = "bfloat16" if target.sm_version >= 80 else "float16"
    name = gpu_named(for_gpu)
    run = speed_run_of(target, name)
    found, refused = [], {}
    for schema in measured_errors():
        spec = KernelSpec(resolve_schema(schema), dtype, target, inputs)
        reason = why_not(spec) or why_overflow(spec)
        if reason is None:
            found.append(_schema_to_dict(spec, microseconds(run, schema, inputs.name)))
        else:
            refused[schema] = reason
    if not found:
        raise RequestError(
            "No schema runs on this GPU with these activations.",
            where="--input-schema",
            found=f"{inputs.name} activations on {target.name}: {next(iter(refused.values()))}",
            remedy="`hqconv schemas` lists the targets of each input schema.",
        )
    found.sort(key=lambda one: (one["size_class"], _kl(one), one["errors"]["gaussian"]["rtn"]))
    return {
        "kind": "ranking",
        "gpu": name if name is not None else target.name,
        "target": target.name,
        "input_schema": inputs.name,
        "dtype": dtype,
        "rule": RULE,
        "schemas": found,
        "refused": refused,
        "speed": None if run is None else _run_to_dict(run),
        **_recommendation(found, run, inputs),
    }


def _kl(one: Document) -> float:
    """Divergence of an entry after calibration; infinity where it was not measured."""
    return float(one["divergence"].get(CALIBRATED, {}).get("kl", math.inf))


def _schema_to_dict(spec: KernelSpec, times: dict[str, float]) -> Document:
    """Entry of the ranking for one schema that runs."""
    from hqconv.kernel_layout.transform import fuses_exponents  # with torch

    hidden, inner = SIZES
    bits = expert_bits(spec, hidden, inner) / (3 * hidden * inner)
    caution = None
    if fuses_exponents(spec):
        caution = _MISREADS if spec.a_dtype == "int8" else _ROUNDS_AGAIN
    return {
        "name": spec.schema.name,
        "bits_per_weight": round(bits, 4),
        "size_class": size_class(bits),
        "divergence": dict(measured_divergence().get(spec.schema.name, {})),
        "errors": {
            kind: dict(of_kind) for kind, of_kind in measured_errors()[spec.schema.name].items()
        },
        "microseconds": times,
        "caution": caution,
    }


def _run_to_dict(run: Document) -> Document:
    """Facts about a run of speeds, without its rows."""
    model = run["model"]
    shape = f"{model['num_experts']} experts, {model['top_k']} for each token"
    sizes = f"[{model['intermediate_size']}, {model['hidden_size']}]"
    return {
        "gpu": run["gpu"],
        "gpu_name": gpu_named(run["gpu"]),
        "date": run["date"],
        "source": run["source"],
        "timed": run["timed"],
        "model": f"{model['name']}: {shape}, {sizes}",
    }


def _recommendation(found: list[Document], run: Document | None, inputs: InputSchema) -> Document:
    """Return the schema to take at about 4.25 bits, and the reason.

    It has the smallest divergence; with quantized activations, of the schemas that are faster by them.
    """
    sound = [one for one in found if one["caution"] != _MISREADS and _pays_rotation(one, found)]
    largest = [one for one in sound if one["size_class"] <= _USUAL] or sound
    if not largest:
        return {"recommended": None, "reason": None}
    wanted = max(one["size_class"] for one in largest)
    of_class = [one for one in largest if one["size_class"] == wanted]
    quick = [] if inputs == A16 else [one for one in of_class if _gains(one, of_class, run)]
    best = (quick or of_class)[0]
    among = f", whose prefill gains by {inputs.name} activations," if quick else ""
    reason = f"Of the schemas up to {wanted:g} bits{among} it has the smallest divergence after calibration."
    return {
        "recommended": best["name"],
        "reason": " ".join([reason, *_speed_remarks(best, of_class)]),
    }


def _pays_rotation(one: Document, found: list[Document]) -> bool:
    """Return whether an entry is not rotated, or its rotation divides the divergence and costs little time.

    The cost is that of any GPU on which it was measured.
    """
    plain = next(
        (other for other in found if other["name"] == re.sub(r"-h\d+$", "", one["name"])), one
    )
    if plain is one:
        return True
    ratios = []
    for run in speed_runs():
        rotated, before = (microseconds(run, name["name"], A16.name) for name in (one, plain))
        ratios += [
            rotated[n] / before[n]
            for n in (str(DECODE), str(PREFILL))
            if n in rotated and n in before
        ]
    return bool(ratios) and max(ratios) < _FASTER and _kl(one) * _FASTER < _kl(plain)


def _gains(one: Document, of_class: list[Document], run: Document | None) -> bool:
    """Return whether an entry's prefill is faster than that of its whole class with 16-bit activations."""
    count = str(PREFILL)
    plain = [microseconds(run, other["name"], A16.name).get(count, math.inf) for other in of_class]
    return _FASTER * one["microseconds"].get(count, math.inf) < min(plain) and _kl(one) < math.inf


def _speed_remarks(best: Document, of_class: list[Document]) -> list[str]:
    """Sentences about the fastest schema of the class, where it is much faster than the best one."""
    remarks = []
    for what, count in (("decode", str(DECODE)), ("prefill", str(PREFILL))):
        timed = [one for one in of_class if count in one["microseconds"] and _kl(one) < math.inf]
        if count not in best["microseconds"]:
            continue
        fastest = min(timed, key=lambda one: one["microseconds"][count], default=best)
        ratio = best["microseconds"][count] / fastest["microseconds"][count]
        if ratio >= _FASTER:
            remarks.append(
                f"{fastest['name']} has {_kl(fastest) / _kl(best):.1f} times the divergence, and was {ratio:.2f} times "
                f"as fast in {what}: take it where {what} counts most."
            )
    return remarks
