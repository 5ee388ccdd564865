"""JSON documents of checkpoints, plans, artifacts and schemas (`inspect`, `convert --dry-run`, `schemas`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqconv.artifact.error_summary import requantized, scale_changes, summarize_errors
from hqconv.artifact.manifest import (
    Manifest,
    ManifestLayer,
    damaged,
    is_artifact,
    is_unfinished,
    read_manifest,
)
from hqconv.conversion.journal import parse_entry, part_journals
from hqconv.conversion.output_folder import (
    FINISHED,
    FOREIGN_FOLDER,
    UNFINISHED,
    cannot_use,
    check_replaceable,
    check_strays,
    files_in,
    listed_files,
    unfinished_folder,
)
from hqconv.conversion.resources import Resources, plan_staging, time_text
from hqconv.errors import InputError, OutputError, RequestError, VerificationError, number_runs
from hqconv.formats.source_format import SourceFormat
from hqconv.io.checkpoint_files import readable
from hqconv.io.durable_files import check_space, size_of
from hqconv.io.hub import Listing
from hqconv.kernel_layout.compatibility import why_overflow
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.checks import check_matrix_scales, is_served_with
from hqconv.planning.layer_encoding import EncodingOptions, direct_schemas
from hqconv.planning.notices import source_notices
from hqconv.planning.plan import ConversionPlan, SourceFacts, source_facts
from hqconv.planning.spec import DenseSchemas, default_param_dtype
from hqconv.schemas import artifact_names
from hqconv.schemas.engine import ENGINE, AttentionHeads, attention_heads
from hqconv.schemas.gpu_target import GpuTarget, class_of, gpu_named, parse_target
from hqconv.schemas.grid import EVEN, GROUPS, Grid, hidden_unit, working_tp_sizes
from hqconv.schemas.input_schema import INPUT_PRESETS, InputSchema, KernelSpec
from hqconv.schemas.options import group_by_schema
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
    resolve_schema,
)
from hqconv.sources.opening import locate_source, open_location

Document = dict[str, Any]  # for JSON

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
    runs: dict[tuple[str, str], list[str]] = {}
    for name, document in layers.items():
        pattern = re.sub(r"\b\d+\b", "[]", name, count=1)
        shape = {key: document[key] for key in SHAPE_KEYS if key in document}
        runs.setdefault((pattern, json.dumps(shape)), []).append(name)
    entries = []
    for (pattern, shape_text), names in runs.items():
        name = names[0]
        if len(names) > 1:
            numbers = [int(number[0]) for each in names if (number := re.search(r"\b\d+\b", each))]
            name = pattern.replace("[]", f"[{','.join(number_runs(numbers))}]", 1)
        entries.append({"name": name, "num_blocks": len(names), **json.loads(shape_text)})
    return entries


def quant_method(quantization: Any) -> Any:
    """Method that a quantization config names; hf_quant_config.json, which names none, is ModelOpt's."""
    if not isinstance(quantization, dict):
        return None
    return quantization.get("quant_method", "modelopt" if "quantization" in quantization else None)


def schema_to_dict(schema: LayerSchema) -> Document:
    """Document of a schema."""
    return {
        "name": schema.name,
        "description": schema.describe(),
        "bits_per_weight": schema.bits_per_weight(),
        "weight_schema": schema.to_dict(),
    }


# --- sources and plans


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
        return {**document, "convertible": False, "obstacle": str(error)}
    try:
        scale_notices = check_matrix_scales(checkpoint, experts.layers)
    except InputError as error:
        return {**document, "convertible": False, "obstacle": str(error)}
    facts = source_facts(checkpoint, experts)
    heads = facts.heads
    return {
        **document,
        "convertible": True,
        "family": experts.family,
        "family_chosen_because": experts.chosen_because,
        "tensors": tensors_to_dict(facts, experts),
        "blocks": layer_runs({layer.name: layer_to_dict(layer) for layer in experts.layers}),
        "direct_schemas": direct_schemas(experts, default_param_dtype(checkpoint.config, experts)),
        "attention": {key: count for key, count in vars(heads).items() if count is not None},
        "tp_sizes": _tp_sizes(experts, heads, EVEN),
        "tp_sizes_of_groups": _tp_sizes(experts, heads, GROUPS),
        "warnings": [*source_notices(checkpoint, experts), *scale_notices],
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
    names = {"converted": experts.converted, "copied": experts.copied, "dropped": experts.dropped}
    document: Document = {
        kind: {"num_tensors": len(names[kind]), "num_bytes": facts.bytes_of[kind]} for kind in names
    }
    document["dropped"]["reasons"] = dict(experts.dropped)
    return document


def layer_to_dict(layer: MoeLayer) -> Document:
    """Facts of a layer by which `layer_runs` groups layers."""
    document = {key: getattr(layer, key) for key in SHAPE_KEYS if hasattr(layer, key)}
    document |= layer.activation.to_dict(layer.gated)
    return document | {"source_dtype": layer.dtype, "source_format": layer.format.describe()}


def _tp_sizes(experts: ExpertMap, heads: AttentionHeads, split: str) -> dict[str, list[int]]:
    """Preset → TP sizes that cut no scale group of any layer, and that share the attention heads evenly.

    With the split `groups` only sizes with which the engine's MoE layers start.
    """
    shapes = {(b.hidden_size, b.intermediate_size, b.pads_last_rank) for b in experts.layers}
    sizes = {}
    for name, schema in PRESETS.items():
        works = [_layer_tp_sizes(*shape, schema, split) for shape in shapes]
        common = sorted(set.intersection(*works))
        sizes[name] = [size for size in common if is_served_with(size, heads)]
    return sizes


def _layer_tp_sizes(
    hidden_size: int, intermediate_size: int, pads_last_rank: bool, schema: WeightSchema, split: str
) -> set[int]:
    if hidden_size % hidden_unit(schema):
        return set()
    works = working_tp_sizes(intermediate_size, schema, pads_last_rank=pads_last_rank, split=split)
    if split == EVEN:
        return set(works)
    return {size for size in works if not ENGINE.inner_obstacle(intermediate_size, Grid(size))}


def describe_plan(plan: ConversionPlan, resources: Resources) -> Document:
    """Describe a conversion's output and resources. Raises RequestError if memory is not enough for one expert."""
    spec = plan.spec
    experts = plan.experts
    staging = plan_staging(plan.encoded, resources)
    return {
        "kind": "plan",
        "source": source_to_dict(plan.source),
        "family": experts.family,
        "family_chosen_because": experts.chosen_because,
        "schema": schema_to_dict(spec.schema),
        "otherwise": spec.otherwise(),
        "left_blocks": list(experts.left),
        "dense": plan.dense,
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
            {"path": file.path, "size_bytes": file.size_bytes}
            for unit in plan.units
            for file in unit.files
        ],
        "other_files": list(plan.other_files),
        "conversion": dict(Counter(layer.encoding.conversion for layer in plan.layers)),
        "num_bytes_in": plan.source.num_bytes,
        "num_bytes_out": plan.num_bytes_out,
        "rank_bytes": plan.rank_bytes(),
        "num_workers": staging.num_lanes,
        "worker_bytes": staging.lane_bytes,
        "peak_memory_bytes": staging.num_lanes * staging.lane_bytes,
        "estimated_time": time_text(plan.layers, resources),
        "warnings": [*plan.warnings, *plan.notices],
    }


def output_notes(out: Path, plan: ConversionPlan, *, resume: bool, overwrite: bool) -> list[str]:
    """Obstacles to the plan in the folder `out`, for a dry run; reads only.

    Of a resumed conversion neither the options nor the disk are checked.
    """
    unfinished = unfinished_folder(out)
    notes = []
    obstacle = _obstacle(out, is_unfinished=unfinished is not None, continues=resume or overwrite)
    if obstacle is not None:
        notes.append(str(cannot_use(out, obstacle)))
    try:
        if overwrite and is_artifact(out) and unfinished is None:
            check_replaceable(out)
            check_strays(out, listed_files(out), plan.paths)
        if not resume:
            check_space(out, plan.num_bytes_out + plan.other_bytes)
    except OutputError as error:
        notes.append(str(error))
    return notes


def _obstacle(out: Path, *, is_unfinished: bool, continues: bool) -> str | None:
    """Return what prevents a conversion into `out`. continues: with --resume or --overwrite."""
    if out.exists() and not out.is_dir():
        return "a file"
    if is_unfinished or is_artifact(out):
        return None if continues else UNFINISHED if is_unfinished else FINISHED
    return FOREIGN_FOLDER if out.is_dir() and files_in(out) else None


# --- artifacts


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
    layers = manifest.blocks
    errors = manifest.errors()
    altered = None if manifest.alteration is None else manifest.alteration.what
    missing = manifest.missing_files(
        lambda name: size_of(root / name) if listing is None else listing.sizes.get(name)
    )
    config = _config_of(root)
    accounting = manifest.tensors
    overridden = [
        (name, layer.schema_name or "", layer.input_schema or "")
        for name, layer in layers.items()
        if layer.is_overridden
    ]
    serve_command = ENGINE.serve_command(
        repo_id or str(root), manifest.layout, manifest.grid, attention_heads(config)
    )
    return {
        "kind": "artifact",
        "folder": str(root),
        **({} if repo_id is None else {"repo": repo_id, "commit": root.name}),
        "schema": schema_to_dict(manifest.layer_spec.schema),
        "otherwise": group_by_schema(overridden),
        "left_blocks": list(manifest.left),
        "dense": dense_of(manifest),
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
        "source": {"name": manifest.source.name, "revision": manifest.source.revision},
        "manifest_sha256": manifest.sha256,
        "warnings": list(manifest.warnings or ()),
        "quant_method": quant_method(config.get("quantization_config")),
        "tensors": {
            "converted": len(accounting.converted),
            "copied": len(accounting.copied),
            "dropped": len(accounting.dropped),
        },
        "blocks": layer_runs({name: _stored_layer(layer) for name, layer in layers.items()}),
        "conversion": dict(Counter(layer.conversion for layer in layers.values())),
        "quantization_error": summarize_errors(errors),
        "requantized": requantized(errors),
        "largest_scale_change": scale_changes(errors),
        "num_files": len(manifest.files),
        "num_bytes": sum(entry.size_bytes for entry in manifest.files.values()),
        "rank_bytes": _rank_bytes(manifest),
        "missing_or_resized_files": missing,
        "altered_manifest": altered,
        "is_damaged": bool(missing or altered),
        "serve_command": serve_command,
    }


def dense_of(manifest: Manifest) -> Document | None:
    """Return numbers and bytes of an artifact's quantized linear layers. Raises VerificationError for damaged ones."""
    linear = manifest.linear_layers or {}
    try:
        return DenseSchemas.from_dict(manifest.request.get("dense")).summary(
            (name, group.source_dtype, group.shapes.values()) for name, group in linear.items()
        )
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(f"{manifest.path}: request: dense", "schemas", error) from error


def _config_of(root: Path) -> Document:
    """Return the config.json of an artifact; {} if it cannot be read."""
    try:
        document = read_json(root / artifact_names.CONFIG)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _stored_layer(layer: ManifestLayer) -> Document:
    """Document of a layer of the manifest, with its source's format in one line."""
    try:
        source_format = SourceFormat.from_dict(layer.source_format).describe()
    except (AttributeError, KeyError, TypeError, ValueError):
        source_format = "unknown"
    activation = layer.activation_function.to_dict(layer.gated)
    return {**layer.to_dict(), **activation, "source_format": source_format}


def _rank_bytes(manifest: Manifest) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, entry in manifest.files.items():
        if name.startswith(f"{artifact_names.EXPERTS_FOLDER}/"):
            totals[name.rsplit("/", 1)[0]] += entry.size_bytes
    return dict(totals)


def describe_unfinished(root: Path) -> Document:
    """Describe the progress of a conversion that stopped or is still running."""
    paths = [root / artifact_names.JOURNAL, *part_journals(root)]
    entries = [parse_entry(line) for path in paths for line in path.read_bytes().split(b"\n")]
    return {
        "kind": "unfinished",
        "folder": str(root),
        "num_units_done": len({entry.unit for entry in entries if entry is not None}),
        "remedy": "Run the `hqconv convert` command that wrote it once more, with --resume to go on "
        "or --overwrite to start anew.",
    }


def inspect(path: str | Path, revision: str | None = None) -> Document:
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
            if quant_method(source.quantization) == "hqconv":
                raise VerificationError(
                    "The artifact has lost its manifest.",
                    where=source.root,
                    expected=artifact_names.MANIFEST,
                    found="a config.json that hqconv made, and no manifest",
                    remedy="Copy it from where it is whole, or convert again.",
                )
            return describe_source(source)


# --- schemas


def describe_gpu(text: str) -> Document:
    """Describe the schemas for a GPU: the recommended ones, and those that run with each input schema.

    text: a GPU's name or architecture, as of `--target`. Raises RequestError for an unknown name.
    """
    target = parse_target(text)
    name = gpu_named(text) or target.name
    gpu_class = class_of(target)
    schemas = [resolve_schema(schema) for schema in (*PRESETS, *RECOMMENDED)]
    runs = {
        inputs.name: [schema.name for schema in schemas if _runs(schema, target, inputs)]
        for inputs in INPUT_PRESETS.values()
    }
    return {
        "kind": "gpu",
        "gpu": name,
        "target": target.name,
        "gpus": gpu_class.gpus,
        "schema": RECOMMENDED[0],
        "fp8_schema": gpu_class.fp8_schema,
        "command": gpu_class.command(name),
        "runs": runs,
    }


def _runs(schema: WeightSchema, target: GpuTarget, inputs: InputSchema) -> bool:
    """Return whether a schema runs with some parameter dtype."""
    from hqconv.kernel_layout.transform import why_not  # with torch

    specs = [KernelSpec(schema, dtype, target, inputs) for dtype in PARAM_DTYPES]
    return any(why_not(spec) is None and why_overflow(spec) is None for spec in specs)


def describe_schemas() -> Document:
    """Describe every preset, the shorthands, and every input schema."""
    return {
        "kind": "schemas",
        "presets": [_preset(schema) for schema in PRESETS.values()],
        "shorthands": [
            {
                "name": SHORTHAND,
                "description": "uintN codes, N = 1..8; a scale per G columns (-gG, 128 if left out; int8: channel) "
                "or per channel (-c); zero points as integers (-zp) or floats (-fpzp)",
                "bits_per_weight": "N + 16/G, + N/G with -zp, + 16/G with -fpzp",
                "stock_vllm": "without zero points, N >= 2",
            },
            {
                "name": SCALED_SHORTHAND,
                "description": f"CODE is {', '.join(CODES[:-1])} or {CODES[-1]}; a scale in 8 bits per G columns, and "
                "over e4m3 and e5m2 scales a second one per tensor (float32), or with -row per row (16 bits); over "
                f"e8m0 scales with -row only. Good ones: {', '.join(RECOMMENDED)}. fp4-g16-e4m3 is nvfp4, "
                "fp4-g32-e8m0 is mxfp4. -h64 after any name rotates the weights in blocks of 64 columns",
                "bits_per_weight": "those of CODE + 8/G",
                "stock_vllm": "intN (N >= 2) and fp4 with e4m3-row, e8m0 and e8m0-row; fp8-g32 with e8m0 and e8m0-row; "
                "e8m0 with bfloat16 only",
            },
            {
                "name": PAIR,
                "description": "two of the above, of w13 (gate and up) and of w2 (down) of each layer, such as "
                "int3-g64+int4-g32-e4m3",
                "bits_per_weight": "two thirds of the first, one third of the second",
                "stock_vllm": "not the checkpoint layout; the kernel layout through hqconv's plugin",
            },
        ],
        "input_schemas": [
            {"name": inputs.name, "description": inputs.describe(), **inputs.humming_fields()}
            for inputs in INPUT_PRESETS.values()
        ],
    }


def _preset(schema: WeightSchema) -> Document:
    """Document of a preset, with the parameter dtypes with which an engine without the plugin serves it."""
    obstacles = {dtype: ENGINE.checkpoint_layout_obstacle(schema, dtype) for dtype in PARAM_DTYPES}
    return {
        **schema_to_dict(schema),
        "stock_vllm_param_dtypes": [dtype for dtype in PARAM_DTYPES if obstacles[dtype] is None],
        "stock_vllm_obstacle": obstacles["bfloat16"],
    }


def describe_recipes() -> Document:
    """Describe the recipes and schema files that come with hqconv: option value and purpose."""
    recipes = shipped(RECIPES)
    schemas = shipped(SCHEMAS)
    return {
        "kind": "recipes",
        "folder": str(SCHEMAS),
        "recipes": [
            {"option": f"--config {name.removesuffix('.toml')}", "description": recipes[name]}
            for name in recipes
        ],
        "schemas": [
            {"option": f"--schema {name}", "description": schemas[name]} for name in schemas
        ],
    }
