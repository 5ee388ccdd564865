"""JSON documents of checkpoints, plans, artifacts and schemas (`inspect`, `convert --dry-run`, `schemas`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from hqconv.artifact.error_summary import requantized, scale_changes, summarize_errors
from hqconv.artifact.manifest import (
    Manifest,
    ManifestLayer,
    is_artifact,
    is_unfinished,
    read_manifest,
)
from hqconv.conversion.journal import parse_entry, part_journals
from hqconv.conversion.output_folder import (
    FOREIGN_FOLDER,
    cannot_use,
    check_replaceable,
    check_strays,
    files_in,
    listed_files,
    unfinished_folder,
)
from hqconv.conversion.resources import Resources, plan_staging
from hqconv.errors import (
    HqconvError,
    InputError,
    OutputError,
    RequestError,
    VerificationError,
    number_runs,
)
from hqconv.formats.source_format import SourceFormat
from hqconv.io.checkpoint_files import has_tokenizer, readable
from hqconv.io.durable_files import check_space, partial, size_of
from hqconv.io.hub import Listing
from hqconv.io.safetensors_header import read_header
from hqconv.kernel_layout.compatibility import why_not
from hqconv.models.config_facts import layer_notices
from hqconv.models.expert_map import ExpertMap
from hqconv.models.families import BY_NAME
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.checks import check_matrix_scales, is_served_with
from hqconv.planning.layer_encoding import EncodingOptions
from hqconv.planning.notices import no_tokenizer, source_notices
from hqconv.planning.plan import (
    ConversionPlan,
    GpuMemory,
    SourceFacts,
    expert_bytes,
    other_bytes_on_gpu,
    source_facts,
)
from hqconv.planning.source_schema import direct_schemas
from hqconv.planning.spec import default_param_dtype
from hqconv.reports.parts import Document
from hqconv.schemas import artifact_names
from hqconv.schemas.artifact_names import MANIFEST
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import TARGETS, GpuTarget
from hqconv.schemas.grid import EVEN, GROUPS, Grid, hidden_unit, working_tp_sizes
from hqconv.schemas.input_schema import INPUT_PRESETS, InputSchema, KernelSpec, LayerSpec
from hqconv.schemas.model_config import AttentionHeads, attention_heads, text_config
from hqconv.schemas.options import group_by_schema
from hqconv.schemas.sum_factors import SUMS
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import RECIPES, SCHEMAS, read_json, shipped
from hqconv.schemas.weight_schema import (
    CODES,
    PAIR,
    PARAM_DTYPES,
    PRESETS,
    RECOMMENDED,
    SCALED_SHORTHAND,
    SHORTHAND,
    LayerSchema,
    WeightSchema,
)
from hqconv.sources.opening import locate_source, open_location

SHAPE_KEYS = (
    "num_experts",
    "hidden_size",
    "intermediate_size",
    "top_k",
    "activation",
    "activation_parameters",
    "activation_is_known",
    "gated",
    "source_format",
    "source_dtype",
)


def layer_runs(layers: Mapping[str, Mapping[str, Any]]) -> list[Document]:
    """Layers of the same shape and naming, each set as one entry named like `model.layers.[3-60].mlp.experts`."""
    runs: dict[tuple[str, str, str], list[int]] = {}
    for name, document in layers.items():
        parts = re.split(r"\b(\d+)\b", name, maxsplit=1)
        before, number, after = parts if len(parts) == 3 else (name, "", "")
        key = (before, after, json.dumps({k: document[k] for k in SHAPE_KEYS if k in document}))
        runs.setdefault(key, []).extend([int(number)] if number else [])
    entries = []
    for (before, after, shape), numbers in runs.items():
        count = max(len(numbers), 1)
        middle = (
            str(numbers[0]) if len(numbers) == 1 else f"[{_ranges(numbers)}]" if numbers else ""
        )
        name = f"{before}{middle}{after}"
        entries.append({"name": name, "num_blocks": count, **json.loads(shape)})
    return entries


def _ranges(numbers: list[int]) -> str:
    """`3-60`, `0-3,7`, or `1,3,…,59` for a regular step."""
    numbers = sorted(numbers)
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]},{numbers[1]},…,{numbers[-1]}"
    return ",".join(number_runs(numbers))


def quant_method(quantization: Any) -> Any:
    """Method that a quantization config names; hf_quant_config.json, which names none, is ModelOpt's."""
    if not isinstance(quantization, dict):
        return None
    return quantization.get("quant_method", "modelopt" if "quantization" in quantization else None)


def schema_to_dict(schema: LayerSchema, param_dtype: str) -> Document:
    """Document of a schema, with the support of its checkpoint layout by the engine without hqconv's plugin."""
    obstacle = ENGINE.checkpoint_layout_obstacle(schema, param_dtype)
    return {
        "name": schema.name,
        "description": schema.describe(),
        "bits_per_weight": schema.bits_per_weight(),
        "weight_schema": schema.to_dict(),
        "stock_vllm_serves_checkpoint_layout": obstacle is None,
        "stock_vllm_obstacle": obstacle,
        "stock_vllm_param_dtypes": [
            dtype for dtype in PARAM_DTYPES if not ENGINE.checkpoint_layout_obstacle(schema, dtype)
        ],
    }


def describe_source(checkpoint: Source) -> Document:
    """Describe a checkpoint: sizes, formats, family and layers, or why it cannot be converted.

    Raises InputError if the checkpoint contradicts itself.
    """
    document: Document = {"kind": "source", **source_to_dict(source_facts(checkpoint, None))}
    totals: Counter[str] = Counter()
    for ref in checkpoint.tensors.values():
        totals[ref.dtype] += ref.num_bytes
    document["bytes_by_dtype"] = dict(totals.most_common())
    try:
        experts = checkpoint.map_experts()
    except RequestError as error:
        return {**document, "convertible": False, "obstacle": error.message()}
    try:
        notices = check_matrix_scales(checkpoint, experts.layers)
    except InputError as error:
        return {**document, "convertible": False, "obstacle": error.message()}
    facts = source_facts(checkpoint, experts)
    heads = facts.heads
    sizes = {name: _tp_sizes(experts.layers, schema, heads) for name, schema in PRESETS.items()}
    dealt = {
        name: _tp_sizes(experts.layers, schema, heads, GROUPS) for name, schema in PRESETS.items()
    }
    of_groups = {name: [tp for tp in dealt[name] if tp not in sizes[name]] for name in sizes}
    obstacles = {
        str(tp): reason
        for tp in _TP_SIZES
        if (reason := ENGINE.heads_obstacle(Grid(tp), heads)) is not None
    }
    refused = [
        f"{ENGINE.name} does not start with --tp {tp}: {reason}."
        for tp, reason in obstacles.items()
    ]
    return {
        **document,
        "convertible": True,
        "family": experts.family,
        "family_chosen_because": experts.chosen_because,
        "tensors": tensors_to_dict(facts, experts),
        "num_bytes_experts": facts.bytes_of["converted"],
        "blocks": layer_runs({layer.name: layer_to_dict(layer) for layer in experts.layers}),
        "direct_schemas": direct_schemas(experts, default_param_dtype(checkpoint.config, experts)),
        "attention": {key: count for key, count in vars(heads).items() if count is not None},
        "tp_sizes": sizes,
        "tp_sizes_of_groups": of_groups,
        "gpu_memory": _gpu_memory(checkpoint, experts, heads, sizes),
        "gpu_memory_of_groups": _gpu_memory(checkpoint, experts, heads, of_groups),
        "tp_obstacles": obstacles,
        "warnings": [
            *experts.config_warnings,
            *source_notices(checkpoint, experts),
            *refused[:1],
            *notices,
        ],
    }


_TP_SIZES = (2, 4, 8, 16)  # of a node or two
_MAX_TP_SHOWN = 16
_ANY_GPU = GpuTarget(90)  # sizes in memory are the same on all


def _gpu_memory(
    checkpoint: Source, experts: ExpertMap, heads: AttentionHeads, sizes: Mapping[str, list[int]]
) -> dict[str, dict[str, int]]:
    """Bytes of weights on each GPU: preset → TP size, of those that work, up to 16; see `gpu_memory`."""
    param_dtype = default_param_dtype(checkpoint.config, experts)
    specs = {name: LayerSpec(schema, param_dtype, _ANY_GPU) for name, schema in PRESETS.items()}
    others = {
        tp: other_bytes_on_gpu(checkpoint.tensors, experts.copied, experts.left, Grid(tp), heads)
        or 0
        for tp in sorted(
            {size for of_schema in sizes.values() for size in of_schema if size <= _MAX_TP_SHOWN}
        )
    }
    return {
        name: {
            str(tp): expert_bytes(experts.layers, specs[name], tp) + others[tp]
            for tp in others
            if tp in of_schema
        }
        for name, of_schema in sizes.items()
    }


def source_to_dict(facts: SourceFacts) -> Document:
    """Facts of a checkpoint that need no mapping of its experts."""
    return {
        "name": facts.repo_id or facts.name,
        "folder": facts.folder,
        "revision": facts.revision,
        "model_type": facts.model_type,
        "quant_method": quant_method(facts.quantization),
        "num_files": facts.num_files,
        "num_tensors": facts.num_tensors,
        "num_bytes": facts.num_bytes,
    }


def tensors_to_dict(facts: SourceFacts, experts: ExpertMap) -> Document:
    """Numbers of converted, copied and dropped tensors, and the reasons."""
    kinds = {"converted": experts.converted, "copied": experts.copied, "dropped": experts.dropped}
    document: Document = {
        kind: {"num_tensors": len(names), "num_bytes": facts.bytes_of[kind]}
        for kind, names in kinds.items()
    }
    document["dropped"]["reasons"] = dict(experts.dropped)
    return document


def layer_to_dict(layer: MoeLayer) -> Document:
    """Facts of a layer by which `layer_runs` groups layers."""
    document = {key: getattr(layer, key) for key in SHAPE_KEYS if hasattr(layer, key)}
    document |= layer.activation.to_dict(layer.gated)
    return document | {"source_dtype": layer.dtype, "source_format": layer.format.describe()}


def _tp_sizes(
    layers: Iterable[MoeLayer], schema: WeightSchema, heads: AttentionHeads, split: str = EVEN
) -> list[int]:
    """TP sizes that cut no scale group of any layer, and that share the attention heads evenly.

    With the split `groups` only sizes with which the engine's MoE layers start.
    """
    sizes: list[set[int]] = []
    for hidden, inner, pads in {
        (b.hidden_size, b.intermediate_size, b.pads_last_rank) for b in layers
    }:
        works = working_tp_sizes(inner, schema, pads_last_rank=pads, split=split)
        if split == GROUPS:
            works = [size for size in works if ENGINE.inner_obstacle(inner, Grid(size)) is None]
        sizes.append(set() if hidden % hidden_unit(schema) else set(works))
    return (
        [size for size in sorted(set.intersection(*sizes)) if is_served_with(size, heads)]
        if sizes
        else []
    )


def describe_plan(plan: ConversionPlan, resources: Resources) -> Document:
    """Describe a conversion's output and resources. Raises RequestError if memory is not enough for one expert."""
    spec, experts, memory = plan.spec, plan.experts, plan.gpu_memory
    staging = plan_staging(plan.layers, resources)
    return {
        "kind": "plan",
        "source": source_to_dict(plan.source),
        "family": experts.family,
        "family_chosen_because": experts.chosen_because,
        "schema": schema_to_dict(spec.schema, spec.param_dtype),
        "otherwise": spec.otherwise(),
        "left_blocks": list(experts.left),
        "layout": spec.layout,
        "target": spec.target.name,
        "dtype": spec.param_dtype,
        "input_schema": spec.inputs.name,
        **spec.encoding.summary(),
        "tp": spec.grid.tp,
        "tp_split": spec.grid.split,
        "ep": spec.grid.ep,
        "expert_placement": spec.grid.placement,
        "redundant_experts": spec.grid.redundant,
        "tensors": tensors_to_dict(plan.source, experts),
        "blocks": layer_runs({layer.name: layer_to_dict(layer) for layer in experts.layers}),
        "files": [
            {"path": f.path, "size_bytes": f.size_bytes} for g in plan.units for f in g.files
        ],
        "other_files": list(plan.other_files),
        "conversion": dict(Counter(layer.encoding.conversion for layer in plan.layers)),
        "num_bytes_in": plan.source.num_bytes,
        "num_bytes_out": plan.num_bytes_out,
        "rank_bytes": plan.rank_bytes(),
        "gpu_memory": None if memory is None else memory.to_dict(),
        "num_workers": staging.num_lanes,
        "worker_bytes": staging.lane_bytes,
        "peak_memory_bytes": staging.num_lanes * staging.lane_bytes,
        "warnings": [*plan.warnings, *plan.notices],
    }


def output_notes(out: Path, plan: ConversionPlan, *, resume: bool, overwrite: bool) -> list[str]:
    """Obstacles to the plan in the folder `out`, for a dry run; reads only.

    For a resumed conversion only the files are compared, not the options.
    """
    place = unfinished_folder(out)
    found = _occupied(out, is_unfinished=place is not None, goes_on=resume or overwrite)
    notes = [] if found is None else [cannot_use(out, found).message()]
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
        return sum(size for files in units for _, size in files) + plan.other_bytes
    missing = [
        files for files in units if any(_size_of(place, path, None) != size for path, size in files)
    ]
    halves = (partial(place / path) for files in units for path, _ in files)
    num_bytes = sum(size for files in missing for _, size in files) + plan.other_bytes
    return num_bytes - sum(half.stat().st_blocks * 512 for half in halves if half.is_file())


def _occupied(out: Path, *, is_unfinished: bool, goes_on: bool) -> str | None:
    """Obstacles to a conversion into `out`. goes_on: with --resume or --overwrite."""
    if out.exists() and not out.is_dir():
        return "a file"
    if is_unfinished or is_artifact(out):
        state = "an unfinished conversion" if is_unfinished else "a finished artifact"
        return None if goes_on else state
    return FOREIGN_FOLDER if out.is_dir() and files_in(out) else None


def describe_artifact(
    root: Path,
    repo_id: str | None = None,
    listing: Listing | None = None,
    *,
    manifest: Manifest | None = None,
) -> Document:
    """Describe a finished artifact from its manifest.

    repo_id, listing: of a repo on the Hub, of which only some files are here; no listing if the Hub is not reachable.
    manifest: of the artifact, if it was read before.
    Raises what `read_manifest` raises, VerificationError if the manifest's schema is invalid.
    """
    manifest = manifest or read_manifest(root)
    layers, errors = manifest.blocks, manifest.errors()
    altered = None if manifest.alteration is None else manifest.alteration.what
    missing = manifest.missing_files(lambda name: _size_of(root, name, listing))
    config = config_of(root)
    heads = attention_heads(config)
    tensors = _ordinary_tensors(root, manifest)
    rank_bytes = _rank_bytes(manifest)
    others = (
        None
        if tensors is None
        else other_bytes_on_gpu(tensors, tensors, manifest.left, manifest.grid, heads)
    )
    # None in the checkpoint layout, and if no server starts.
    memory = (
        None if others is None or not rank_bytes else GpuMemory(max(rank_bytes.values()), others)
    )
    source, *before = (
        {"name": one.source.name, "revision": one.source.revision} for one in manifest.steps
    )
    return {
        "kind": "artifact",
        "folder": str(root),
        **({} if repo_id is None else {"repo": repo_id, "commit": root.name}),
        "schema": schema_to_dict(manifest.layer_spec.schema, manifest.dtype),
        "otherwise": group_by_schema(
            (name, layer.schema_name or "", layer.input_schema or "")
            for name, layer in layers.items()
            if layer.is_overridden
        ),
        "left_blocks": list(manifest.left),
        "layout": manifest.layout,
        "target": manifest.target,
        "dtype": manifest.dtype,
        "input_schema": manifest.input_schema,
        "tp": manifest.tp,
        "tp_split": manifest.grid.split,
        "ep": manifest.ep,
        **EncodingOptions.summary_of(manifest.to_dict()),
        "expert_placement": manifest.expert_placement,
        "redundant_experts": manifest.redundant_experts,
        "family": manifest.family,
        "hqconv_version": manifest.hqconv_version,
        "humming_kernels_version": manifest.humming_kernels_version,
        "format_version": manifest.format_version,
        "source": source,
        "derived_from": [
            {
                "schema_name": one.schema_name,
                "manifest_sha256": one.manifest_sha256,
                "source": of_one,
            }
            for one, of_one in zip(manifest.ancestors, before, strict=True)
        ],
        "manifest_sha256": manifest.sha256,
        "warnings": list(manifest.warnings or ()),
        "notices": _artifact_notices(manifest, config, tensors, heads),
        "quant_method": quant_method(config.get("quantization_config")),
        "tensors": {
            "converted": len(manifest.tensors.converted),
            "copied": len(manifest.tensors.copied),
            "dropped": len(manifest.tensors.dropped),
        },
        "blocks": layer_runs(
            {name: _stored_layer_to_dict(layer) for name, layer in layers.items()}
        ),
        "conversion": dict(Counter(layer.conversion for layer in layers.values())),
        "quantization_error": summarize_errors(errors),
        "requantized": requantized(errors),
        "largest_scale_change": scale_changes(errors),
        "input_scales": _input_scales(layers.values()),
        "num_files": len(manifest.files),
        "num_bytes": sum(entry.size_bytes for entry in manifest.files.values()),
        "rank_bytes": rank_bytes,
        "gpu_memory": None if memory is None else memory.to_dict(),
        "missing_or_resized_files": missing,
        "altered_manifest": altered,
        "is_damaged": bool(missing or altered),
        "serve_command": ENGINE.serve_command(
            repo_id or str(root), manifest.layout, manifest.grid, heads
        ),
    }


def _ordinary_tensors(root: Path, manifest: Manifest) -> dict[str, TensorRef] | None:
    """Read the headers of the files of copied tensors; None if one is damaged or not on this machine."""
    found: dict[str, TensorRef] = {}
    folder = f"{artifact_names.EXPERTS_FOLDER}/"
    for name in manifest.files:
        if not name.endswith(".safetensors") or name.startswith(folder):
            continue
        try:
            found |= read_header(root / name)[0]
        except (HqconvError, OSError):
            return None
    return found


def _artifact_notices(
    manifest: Manifest,
    config: Document,
    tensors: Mapping[str, TensorRef] | None,
    heads: AttentionHeads,
) -> list[str]:
    """Return what a server of the artifact lacks: layers, a tokenizer, ranks that can share the attention heads."""
    family, notices = BY_NAME.get(manifest.family), []
    layers = [*manifest.blocks, *manifest.left]
    if family is not None and tensors is not None:
        with suppress(HqconvError):  # of a config that is not usable
            names = [*tensors, *(f"{layer}." for layer in layers)]
            notices += layer_notices(family, layers, names, text_config(config))
    if not has_tokenizer(manifest.files):
        notices.append(no_tokenizer("artifact"))
    if manifest.is_kernel and (reason := ENGINE.heads_obstacle(manifest.grid, heads)) is not None:
        notices.append(f"{ENGINE.name} does not start with these ranks: {reason}.")
    return notices


def _size_of(root: Path, name: str, listing: Listing | None) -> int | None:
    """Size in bytes of a file of the folder or of the repo; None if there is none."""
    if listing is not None:
        return listing.sizes.get(name)
    return size_of(root / name)


def describe_unfinished(root: Path) -> Document:
    """Describe the progress of a conversion that stopped or is still running."""
    paths = [root / artifact_names.JOURNAL, *part_journals(root)]
    entries = [parse_entry(line) for path in paths for line in path.read_bytes().split(b"\n")]
    return {
        "kind": "unfinished",
        "folder": str(root),
        "num_groups_done": len({entry.unit for entry in entries if entry is not None}),
        "remedy": "Run the `hqconv convert` command that wrote it once more, with --resume to go on "
        "or --overwrite to start anew.",
    }


def config_of(root: Path) -> Document:
    """Return the config.json of an artifact; {} if it cannot be read."""
    try:
        document = read_json(root / artifact_names.CONFIG)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _rank_bytes(manifest: Manifest) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, entry in manifest.files.items():
        if name.startswith(f"{artifact_names.EXPERTS_FOLDER}/"):
            totals[name.rsplit("/", 1)[0]] += entry.size_bytes
    return dict(totals)


def _input_scales(layers: Iterable[ManifestLayer]) -> dict[str, Document]:
    """Smallest and largest static activation scale of each GEMM over all layers that have one."""
    found: dict[str, list[float]] = {}
    for layer in layers:
        for gemm in artifact_names.GEMMS:
            entry = layer.gemm(gemm)
            if entry is not None and entry.input_scale is not None:
                found.setdefault(gemm, []).append(entry.input_scale)
    return {gemm: {"min": min(scales), "max": max(scales)} for gemm, scales in found.items()}


def _stored_layer_to_dict(layer: ManifestLayer) -> Document:
    """Document of a layer of the manifest, with its source's format in one line."""
    try:
        source = SourceFormat.from_dict(layer.source_format).describe()
    except (AttributeError, KeyError, TypeError, ValueError):
        source = "unknown"
    shown = {key: value for key, value in layer.to_dict().items() if key != SUMS}
    activation = layer.activation_function.to_dict(
        layer.gated
    )  # with numbers that older manifests lack
    return {**shown, **activation, "source_format": source}


def inspect(path: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Describe a model folder, a Hub repo or an artifact; reads headers only. See `hqconv.inspect`.

    Raises VerificationError if the manifest is damaged, or config.json is an artifact's and there is no manifest.
    """
    root = Path(path)
    if revision is None and is_artifact(root):
        return describe_artifact(root)
    if revision is None and is_unfinished(root):
        return describe_unfinished(root)
    with readable(path):
        location = locate_source(path, revision)
        if location.repo_id is not None and is_artifact(location.root):
            return describe_artifact(location.root, location.repo_id, location.listing)
        with open_location(location, is_lazy=True) as source:
            if quant_method(source.quantization) == "hqconv":  # the manifest is lost
                raise VerificationError(
                    "The artifact has lost its manifest.",
                    where=str(source.root),
                    expected=MANIFEST,
                    found="a config.json that hqconv made, and no manifest",
                    remedy="Copy it from where it is whole, or convert again.",
                )
            return describe_source(source)


def describe_schemas() -> Document:
    """Describe every preset, both shorthands, and every input schema."""
    return {
        "kind": "schemas",
        "presets": [schema_to_dict(schema, "bfloat16") for schema in PRESETS.values()],
        "shorthand": {
            "name": SHORTHAND,
            "description": "uintN codes, N = 1..8; a scale per G columns (-gG, 128 if left out; int8: channel) "
            "or per channel (-c); zero points as integers (-zp) or floats (-fpzp)",
            "bits_per_weight": "N + 16/G, + N/G with -zp, + 16/G with -fpzp",
            "stock_vllm": "without zero points, N >= 2",
        },
        "scaled_shorthand": {
            "name": SCALED_SHORTHAND,
            "description": f"CODE is {', '.join(CODES[:-1])} or {CODES[-1]}; a scale in 8 bits per G columns, and over "
            "e4m3 and e5m2 scales a second one per tensor (float32), or with -row per row (16 bits); over e8m0 scales "
            f"with -row only. Good ones: {', '.join(RECOMMENDED)}. fp4-g16-e4m3 is nvfp4, fp4-g32-e8m0 is mxfp4. "
            "-h64 after any name rotates the weights in blocks of 64 columns",
            "bits_per_weight": "those of CODE + 8/G",
            "stock_vllm": "intN (N >= 2) and fp4 with e4m3-row, e8m0 and e8m0-row; fp8-g32 with e8m0 and e8m0-row; "
            "e8m0 with bfloat16 only",
        },
        "pair_shorthand": {
            "name": PAIR,
            "description": "two of the above, of w13 (gate and up) and of w2 (down) of each layer, such as "
            "int3-g64+int4-g32-e4m3",
            "bits_per_weight": "two thirds of the first, one third of the second",
            "stock_vllm": "not the checkpoint layout; the kernel layout through hqconv's plugin",
        },
        "input_schemas": [_input_schema_to_dict(inputs) for inputs in INPUT_PRESETS.values()],
    }


def describe_recipes() -> Document:
    """Describe the recipes and schema files that come with hqconv: option value, purpose, and path."""
    return {
        "kind": "recipes",
        "folder": str(SCHEMAS),
        "recipes": [
            {
                "option": f"--config {name.removesuffix('.toml')}",
                "description": text,
                "path": str(RECIPES / name),
            }
            for name, text in shipped(RECIPES).items()
        ],
        "schemas": [
            {"option": f"--schema {name}", "description": text, "path": str(SCHEMAS / name)}
            for name, text in shipped(SCHEMAS).items()
        ],
    }


def _input_schema_to_dict(inputs: InputSchema) -> Document:
    """Document of an input schema, with the targets and the presets that it runs with."""
    pairs = [
        (schema.name, target)
        for schema in PRESETS.values()
        for target in map(GpuTarget, TARGETS)
        if any(why_not(KernelSpec(schema, dtype, target, inputs)) is None for dtype in PARAM_DTYPES)
    ]
    return {
        "name": inputs.name,
        "description": inputs.describe(),
        **inputs.humming_fields(),
        "targets": [
            target.name for target in map(GpuTarget, TARGETS) if target in {t for _, t in pairs}
        ],
        "schemas": [name for name in PRESETS if name in {schema for schema, _ in pairs}],
    }
