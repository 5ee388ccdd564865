"""Description of a plan as a document, and obstacles to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hqconv.artifact.manifest import is_artifact
from hqconv.conversion.output_folder import check_replaceable, check_strays, files_in, listed_files, unfinished_folder
from hqconv.conversion.resources import Resources, plan_staging
from hqconv.errors import OutputError
from hqconv.io.durable_files import check_space, partial
from hqconv.planning.plan import ConversionPlan
from hqconv.reports.documents import Words, layer_runs, otherwise, schema_to_dict
from hqconv.reports.source import layer_to_dict, source_to_dict, tensors_to_dict


def describe_plan(plan: ConversionPlan, resources: Resources) -> Words:
    """Describe a conversion's output and resources. Raises RequestError if memory is not enough for one expert."""
    spec, experts = plan.spec, plan.experts
    staging = plan_staging(plan.layers, resources)
    return {
        "kind": "plan",
        "source": source_to_dict(plan.source),
        "family": experts.family,
        "family_chosen_because": experts.chosen_because,
        "schema": schema_to_dict(spec.schema, spec.param_dtype),
        "otherwise": otherwise((n, k.schema.name, k.inputs.name) for n, k in spec.of_layers.items()),
        "left_blocks": list(experts.left),
        "layout": spec.layout,
        "target": spec.target.name,
        "dtype": spec.param_dtype,
        "input_schema": spec.inputs.name,
        **spec.encoding.summary(),
        "tp": spec.grid.tp,
        "ep": spec.grid.ep,
        "expert_placement": spec.grid.placement,
        "redundant_experts": spec.grid.redundant,
        "tensors": tensors_to_dict(plan.source, experts),
        "blocks": layer_runs({layer.name: layer_to_dict(layer) for layer in experts.layers}),
        "files": [{"path": f.path, "size_bytes": f.size_bytes} for g in plan.units for f in g.files],
        "other_files": list(plan.other_files),
        "conversion": dict(Counter(layer.encoding.conversion for layer in plan.layers)),
        "num_bytes_in": plan.source.num_bytes,
        "num_bytes_out": plan.num_bytes_out,
        "rank_bytes": plan.rank_bytes(),
        "num_workers": staging.num_lanes,
        "worker_bytes": staging.lane_bytes,
        "peak_memory_bytes": staging.num_lanes * staging.lane_bytes,
        "warnings": list(plan.warnings),
    }


def output_notes(out: Path, plan: ConversionPlan, *, resume: bool, overwrite: bool) -> list[str]:
    """Obstacles to the plan in the folder `out`, for a dry run; reads only.

    For a resumed conversion only the files are compared, not the options.
    """
    notes = []
    found, remedy = _occupied(out, resume=resume, overwrite=overwrite)
    if remedy:
        notes.append(f"{out} {found}: {remedy}.")
    place = unfinished_folder(out)
    try:
        if overwrite and is_artifact(out) and place is None:
            check_replaceable(out)
            check_strays(out, listed_files(out), plan.paths)
        if not (resume and place is None and is_artifact(out)):
            check_space(out, _num_bytes_left(plan, place if resume else None))
    except OutputError as error:
        notes.append(error.message())
    return notes


def _num_bytes_left(plan: ConversionPlan, place: Path | None) -> int:
    """Bytes that are still to be written; place: folder of an unfinished conversion that is resumed.

    Output units whose files all exist are kept, and half-written files are removed before anything is written.
    """
    units = [[(file.path, file.size_bytes) for file in unit.files] for unit in plan.units]
    if place is None:
        return sum(size for files in units for _, size in files) + plan.num_bytes_beside
    missing = [files for files in units if any(_size(place / path) != size for path, size in files)]
    halves = (partial(place / path) for files in units for path, _ in files)
    num_bytes = sum(size for files in missing for _, size in files) + plan.num_bytes_beside
    return num_bytes - sum(half.stat().st_blocks * 512 for half in halves if half.is_file())


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _occupied(out: Path, *, resume: bool, overwrite: bool) -> tuple[str, str]:
    """Description of an existing `out`, and the remedy; an empty remedy if the conversion would begin."""
    if out.exists() and not out.is_dir():
        return "is a file", "choose another place with -o"
    place = unfinished_folder(out)
    if place is not None:
        done = resume or overwrite
        beside = "" if place == out else f" (in {place})"
        remedy = "" if done else "go on with --resume or start anew with --overwrite"
        return f"holds an unfinished conversion{beside}", remedy
    if is_artifact(out):
        return "holds a finished artifact", "" if overwrite or resume else "replace it with --overwrite"
    if out.is_dir() and files_in(out):
        return "is a folder that hqconv did not make", "choose another with -o"
    return "", ""
