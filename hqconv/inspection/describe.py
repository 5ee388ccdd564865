"""Describes sources, plans, artifacts and schemas as plain words, ready for JSON or a table; loads no torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from hqconv.artifact.manifest import is_artifact, is_unfinished, read_manifest
from hqconv.checkpoint.folder import Checkpoint
from hqconv.checkpoint.gguf import holds_gguf
from hqconv.errors import HqconvError, OutputError, RequestError, VerificationError
from hqconv.experts.block import ExpertBlock
from hqconv.experts.map import ExpertMap, map_checkpoint
from hqconv.formats.format import SourceFormat, conversion_of
from hqconv.pipeline.writer import check_space
from hqconv.plan.own_schema import direct_schemas
from hqconv.plan.plan import CopyGroup, Plan, Request, default_param_dtype
from hqconv.schemas import artifact
from hqconv.schemas.grid import slice_unit, working_tp_sizes
from hqconv.schemas.target import PRESETS, SHORTHAND, TargetSchema

Words = dict[str, Any]
# What the manifest counts per projection, and what the sum over projections counts.
REQUANTIZED_COUNTS = {
    "num_experts_requantized": "num_matrices",
    "num_groups": "num_groups",
    "num_exact_groups": "num_exact_groups",
}
_SHAPE_KEYS = (
    "num_experts",
    "hidden_size",
    "intermediate_size",
    "top_k",
    "activation",
    "gated",
    "source_format",
    "source_dtype",
)


def describe(path: str) -> Words:
    """What a folder or Hub repo is. `kind` is source, artifact or unfinished.

    Raises what `Checkpoint.open` and `read_manifest` raise.
    """
    root = Path(path)
    if is_artifact(root):
        return describe_artifact(root)
    if is_unfinished(root):
        return describe_unfinished(root)
    with _open(path) as checkpoint:
        if _quant_method(checkpoint.quantization) == "hqconv":
            return describe_artifact(checkpoint.root)  # from the Hub, or it says that the manifest is lost
        return describe_source(checkpoint)


def _open(path: str) -> Checkpoint:
    if not path or not holds_gguf(Path(path)):
        return Checkpoint.open(path)
    from hqconv.sources.gguf import open_with_gguf

    return open_with_gguf(Path(path))


# --- source and plan ---------------------------------------------------------------------------------------


def describe_source(checkpoint: Checkpoint) -> Words:
    """A checkpoint: sizes, formats, family and blocks, or why it cannot be converted."""
    words: Words = {"kind": "source", **_source_words(checkpoint)}
    words["bytes_by_dtype"] = _bytes_by_dtype(checkpoint)
    try:
        experts = map_checkpoint(checkpoint)
    except RequestError as error:
        return {**words, "convertible": False, "obstacle": error.message()}
    sizes = _bytes_of(checkpoint, experts.converted)
    return {
        **words,
        "convertible": True,
        "family": experts.family,
        "family_chosen_because": experts.chosen_because,
        "tensors": _tensor_words(checkpoint, experts),
        "num_bytes_experts": sizes,
        "blocks": block_runs({block.name: _block_words(block) for block in experts.blocks}),
        "direct_schemas": direct_schemas(experts, default_param_dtype(checkpoint.config, experts)),
        "tp_sizes": {name: _tp_sizes(experts.blocks, schema) for name, schema in PRESETS.items()},
    }


def describe_plan(checkpoint: Checkpoint, plan: Plan, *, num_workers: int, worker_bytes: int) -> Words:
    """All that a conversion will do and need, from the plan alone."""
    request, experts = plan.request, plan.experts
    return {
        "kind": "plan",
        "source": _source_words(checkpoint),
        "family": experts.family,
        "family_chosen_because": experts.chosen_because,
        "schema": _schema_words(request.schema, request.param_dtype),
        "layout": request.layout,
        "target": f"sm{request.sm_version}",
        "dtype": request.param_dtype,
        "input_schema": request.input_schema,
        "tp": request.grid.tp,
        "ep": request.grid.ep,
        "expert_placement": request.grid.placement,
        "redundant_experts": request.grid.redundant,
        "tensors": _tensor_words(checkpoint, experts),
        "blocks": block_runs({block.name: _block_words(block) for block in experts.blocks}),
        "files": [{"path": f.path, "size_bytes": f.size_bytes} for g in plan.groups for f in g.files],
        "other_files": list(plan.other_files),
        "conversion": conversions(experts, request),
        "num_bytes_in": checkpoint.total_bytes,
        "num_bytes_out": plan.num_bytes_out,
        "rank_bytes": plan.rank_bytes(),
        "num_workers": num_workers,
        "worker_bytes": worker_bytes,
        "peak_memory_bytes": num_workers * worker_bytes,
        "warnings": list(plan.warnings),
    }


def num_planned_bytes(plan: Plan) -> int:
    """Source bytes that a conversion reads: all experts and all copied tensors."""
    copied = (ref.num_bytes for g in plan.groups if isinstance(g, CopyGroup) for ref in g.refs)
    return plan.num_bytes_experts + sum(copied)


def output_notes(out: Path, num_bytes: int, *, resume: bool, overwrite: bool) -> list[str]:
    """What stands in the way of writing `num_bytes` to `out`, for a dry run; reads only."""
    notes = []
    if out.is_dir() and any(out.iterdir()):
        if is_artifact(out):
            found, remedy = "holds a finished artifact", "" if overwrite else "replace it with --overwrite"
        elif is_unfinished(out):
            done = resume or overwrite
            found = "holds an unfinished conversion"
            remedy = "" if done else "go on with --resume or start anew with --overwrite"
        else:
            found, remedy = "is a folder that hqconv did not make", "choose another with -o"
        if remedy:
            notes.append(f"{out} {found}: {remedy}.")
    elif out.exists() and not out.is_dir():
        notes.append(f"{out} is a file: choose another place with -o.")
    if not resume:
        try:
            check_space(out, num_bytes)
        except OutputError as error:
            notes.append(error.message())
    return notes


def _source_words(checkpoint: Checkpoint) -> Words:
    return {
        "name": checkpoint.repo_id or checkpoint.name,
        "folder": str(checkpoint.root),
        "revision": checkpoint.revision,
        "model_type": checkpoint.config.get("model_type"),
        "quant_method": _quant_method(checkpoint.quantization),
        "num_files": len(checkpoint.files),
        "num_tensors": len(checkpoint.tensors),
        "num_bytes": checkpoint.total_bytes,
    }


def _quant_method(quantization: Any) -> Any:
    """The method that a quantization config names; hf_quant_config.json, which names none, is ModelOpt's."""
    if not isinstance(quantization, dict):
        return None
    return quantization.get("quant_method", "modelopt" if "quantization" in quantization else None)


def _bytes_by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for ref in checkpoint.tensors.values():
        totals[ref.dtype] += ref.num_bytes
    return dict(totals.most_common())


def _bytes_of(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    return sum(checkpoint.tensors[name].num_bytes for name in names)


def _tensor_words(checkpoint: Checkpoint, experts: ExpertMap) -> Words:
    kinds = {"converted": experts.converted, "copied": experts.copied, "dropped": experts.dropped}
    words: Words = {
        kind: {"num_tensors": len(names), "num_bytes": _bytes_of(checkpoint, names)}
        for kind, names in kinds.items()
    }
    words["dropped"]["reasons"] = dict(experts.dropped)
    return words


def _block_words(block: ExpertBlock) -> Words:
    words = {key: getattr(block, key) for key in _SHAPE_KEYS if hasattr(block, key)}
    return words | {"source_dtype": block.dtype, "source_format": block.format.describe()}


def conversions(experts: ExpertMap, request: Request) -> dict[str, int]:
    """How the blocks are converted: quantized, requantized or direct, and how many each."""
    return dict(Counter(conversion_of(b.format, request.schema, request.param_dtype) for b in experts.blocks))


def summarize_requantized(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Over all blocks and projections of a quantized source: what was quantized anew, and what of it is exact."""
    totals: Counter[str] = Counter()
    for projections in errors.values():
        for words in projections.values():
            totals.update({name: words[key] for key, name in REQUANTIZED_COUNTS.items() if key in words})
    return dict(totals)


def _manifest_block_words(words: Mapping[str, Any]) -> Words:
    """A manifest's block with its source's format in one line."""
    try:
        source = SourceFormat(**words["source_format"]).describe()
    except TypeError:
        source = "unknown"
    return {**words, "source_format": source}


def _tp_sizes(blocks: Iterable[ExpertBlock], schema: TargetSchema) -> list[int]:
    """TP sizes that work for every block."""
    sizes: list[set[int]] = []
    for hidden, inner, pads in {(b.hidden_size, b.intermediate_size, b.pads_last_rank) for b in blocks}:
        works = working_tp_sizes(inner, schema, pads_last_rank=pads)
        sizes.append(set() if hidden % slice_unit(schema) else set(works))
    return sorted(set.intersection(*sizes)) if sizes else []


# --- blocks and errors -------------------------------------------------------------------------------------


def block_runs(blocks: Mapping[str, Mapping[str, Any]]) -> list[Words]:
    """Blocks of the same shape and naming, each set as one entry named like `model.layers.[3-60].mlp.experts`."""
    runs: dict[tuple[Any, ...], list[int]] = {}
    for name, words in blocks.items():
        parts = re.split(r"\b(\d+)\b", name, maxsplit=1)
        before, number, after = parts if len(parts) == 3 else (name, "", "")
        key = (before, after, tuple(words[k] for k in _SHAPE_KEYS))
        runs.setdefault(key, []).extend([int(number)] if number else [])
    entries = []
    for (before, after, shape), numbers in runs.items():
        count = max(len(numbers), 1)
        middle = str(numbers[0]) if len(numbers) == 1 else f"[{_ranges(numbers)}]" if numbers else ""
        name = f"{before}{middle}{after}"
        entries.append({"name": name, "num_blocks": count, **dict(zip(_SHAPE_KEYS, shape, strict=True))})
    return entries


def _ranges(numbers: list[int]) -> str:
    """`3-60`, `0-3,7`, or `1,3,…,59` for a regular step."""
    numbers = sorted(numbers)
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]},{numbers[1]},…,{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def summarize_errors(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, Words]:
    """projection → min, median and max over blocks of the relative error, and the block with the largest."""
    found: dict[str, dict[str, float]] = {}
    for block, projections in errors.items():
        for projection, measured in projections.items():
            value = measured.get("relative_error") if isinstance(measured, dict) else None
            if isinstance(value, int | float):
                found.setdefault(projection, {})[block] = float(value)
    return {
        projection: {
            "min": min(values.values()),
            "median": median(values.values()),
            "max": max(values.values()),
            "worst_block": max(values, key=values.__getitem__),
        }
        for projection, values in found.items()
    }


# --- artifact ----------------------------------------------------------------------------------------------


def describe_artifact(root: Path) -> Words:
    """A finished artifact, from its manifest; no file but hqconv.json and config.json is read."""
    manifest = read_manifest(root)
    missing = [
        name
        for name, entry in manifest["files"].items()
        if not (root / name).is_file() or (root / name).stat().st_size != entry["size_bytes"]
    ]
    return {
        "kind": "artifact",
        "folder": str(root),
        "schema": _schema_words(_schema_of(root, manifest), manifest["dtype"]),
        **{key: manifest[key] for key in ("layout", "target", "dtype", "input_schema", "tp", "ep")},
        **{key: manifest[key] for key in ("expert_placement", "redundant_experts", "family")},
        **{key: manifest[key] for key in ("hqconv_version", "humming_kernels_version", "format_version")},
        "source": {key: manifest["source"].get(key) for key in ("name", "revision")},
        "quant_method": _quant_method(_config_of(root).get("quantization_config")),
        "tensors": {kind: len(names) for kind, names in manifest["tensors"].items()},
        "blocks": block_runs({name: _manifest_block_words(b) for name, b in manifest["blocks"].items()}),
        "conversion": dict(Counter(block["conversion"] for block in manifest["blocks"].values())),
        "quantization_error": summarize_errors(
            {name: block["quantization_error"] for name, block in manifest["blocks"].items()}
        ),
        "requantized": summarize_requantized(
            {name: block["quantization_error"] for name, block in manifest["blocks"].items()}
        ),
        "num_files": len(manifest["files"]),
        "num_bytes": sum(entry["size_bytes"] for entry in manifest["files"].values()),
        "rank_bytes": _rank_bytes(manifest),
        "missing_or_resized_files": missing,
    }


def describe_unfinished(root: Path) -> Words:
    """A conversion that stopped, or is still running: how far it came."""
    lines = (root / artifact.JOURNAL).read_bytes().split(b"\n")
    return {
        "kind": "unfinished",
        "folder": str(root),
        "num_groups_done": max(0, len([line for line in lines if line]) - 1),
        "remedy": "Run the `hqconv convert` command that wrote it once more, with --resume to go on "
        "or --overwrite to start anew.",
    }


def _schema_of(root: Path, manifest: Words) -> TargetSchema:
    known = {field.name for field in fields(TargetSchema)} - {"name"}
    words = {key: value for key, value in manifest["weight_schema"].items() if key in known}
    try:
        return TargetSchema(name=manifest["schema_name"], **words)
    except (HqconvError, TypeError) as error:
        where = f"{root / artifact.MANIFEST}: weight_schema"
        what = "The artifact's manifest is damaged."
        raise VerificationError(what, where=where, found=error, remedy="Convert the source again.") from error


def _config_of(root: Path) -> Words:
    try:
        words = json.loads((root / artifact.CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return words if isinstance(words, dict) else {}


def _rank_bytes(manifest: Words) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, entry in manifest["files"].items():
        if name.startswith(f"{artifact.EXPERTS_FOLDER}/"):
            totals[name.rsplit("/", 1)[0]] += entry["size_bytes"]
    return dict(totals)


# --- schemas -----------------------------------------------------------------------------------------------


def describe_schemas() -> Words:
    """Every preset, and the integer shorthand."""
    return {
        "kind": "schemas",
        "presets": [_schema_words(schema, "bfloat16") for schema in PRESETS.values()],
        "shorthand": {
            "name": SHORTHAND,
            "description": "uintN codes, N = 1..8; a scale per G columns (-gG, 128 if left out; int8: channel) "
            "or per channel (-c); zero points as integers (-zp) or floats (-fpzp)",
            "bits_per_weight": "N + 16/G, + N/G with -zp, + 16/G with -fpzp",
            "stock_vllm": "without zero points, N >= 2",
        },
    }


def _schema_words(schema: TargetSchema, param_dtype: str) -> Words:
    obstacle = artifact.stock_vllm_obstacle(schema, param_dtype)
    return {
        "name": schema.name,
        "description": schema.describe(),
        "bits_per_weight": schema.bits_per_weight(),
        "weight_schema": schema.humming_fields(),
        "stock_vllm_serves_checkpoint_layout": obstacle is None,
        "stock_vllm_obstacle": obstacle,
    }
