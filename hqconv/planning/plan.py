"""Conversion plans: output units, sidecar files and warnings of one source and spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hqconv.errors import plural
from hqconv.models.expert_map import ExpertMap
from hqconv.models.linear_layers import linear_groups
from hqconv.models.source_protocol import Source
from hqconv.planning.checks import (
    check_copied,
    check_dense,
    check_matrix_scales,
    check_request,
    check_sidecar_files,
    is_whole,
    refuse_unserved,
)
from hqconv.planning.layer_encoding import plain_layers
from hqconv.planning.notices import (
    calibration_notices,
    dense_notices,
    few_tokens_notices,
    request_warnings,
    source_notices,
    source_warnings,
)
from hqconv.planning.output_units import (
    LinearPlan,
    MoeLayerPlan,
    OutputUnit,
    Shard,
    copy_shards,
    expert_shards,
    has_index,
    kernel_unit,
    layers_of,
    linear_shards,
    shard_units,
)
from hqconv.planning.spec import ConversionOptions, ConversionSpec, make_spec
from hqconv.schemas import artifact_names
from hqconv.schemas.engine import AttentionHeads, attention_heads
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.options import assign
from hqconv.schemas.tensors import TensorRef


@dataclass(frozen=True)
class SourceFacts:
    """A source. name: of the folder, or of the repo without the organisation. bytes_of: converted, copied, dropped."""

    name: str
    repo_id: str | None
    revision: str | None
    folder: str
    model_type: str | None
    quantization: Mapping[str, Any] | None
    num_files: int
    num_tensors: int
    num_bytes: int
    bytes_of: Mapping[str, int]
    heads: AttentionHeads

    @property
    def origin(self) -> dict[str, str | None]:
        """Return the source's entry of a manifest: its name, and the commit of a Hub repo."""
        return {"name": self.repo_id or self.name, "revision": self.revision}


def source_facts(checkpoint: Source, experts: ExpertMap | None) -> SourceFacts:
    """Return the facts of an opened source; `experts` None where they cannot be mapped."""
    kinds = (
        {"converted": experts.converted, "copied": experts.copied, "dropped": experts.dropped}
        if experts
        else {}
    )
    tensors = checkpoint.tensors
    return SourceFacts(
        name=checkpoint.name,
        repo_id=checkpoint.repo_id,
        revision=checkpoint.revision,
        folder=str(checkpoint.place),
        model_type=checkpoint.config.get("model_type"),
        quantization=checkpoint.quantization,
        num_files=len(checkpoint.files),
        num_tensors=len(tensors),
        num_bytes=sum(ref.num_bytes for ref in tensors.values()),
        heads=attention_heads(checkpoint.config),
        bytes_of={
            kind: sum(tensors[name].num_bytes for name in names) for kind, names in kinds.items()
        },
    )


@dataclass(frozen=True)
class ConversionPlan:
    """The result of planning. `other_files`, of `other_bytes` together, are copied unchanged.

    notices: warnings about the source and the server, which a manifest does not record. overridden_by: name of the
    recipe whose overrides make layers differ, `mixed` for overrides without a recipe; "" where no override changes a
    layer. made_files: those of the tokenizer that are made from metadata.
    """

    source: SourceFacts
    spec: ConversionSpec
    experts: ExpertMap
    units: tuple[OutputUnit, ...]
    other_files: tuple[str, ...]
    other_bytes: int
    warnings: tuple[str, ...]
    notices: tuple[str, ...]
    made_files: tuple[str, ...]
    overridden_by: str = ""

    def __repr__(self) -> str:
        """Name the source, the schema and the sizes; the rest is in the attributes."""
        grid = self.spec.grid
        spec = self.spec
        text = f"{spec.schema.name}, {spec.layout} layout, tp {grid.tp}, ep {grid.ep}"
        text += f", {plural(len(self.layers), 'layer')}"
        return f"<ConversionPlan of {self.source.name!r}: {text}, {self.num_bytes_read} → {self.num_bytes_out} bytes>"

    @property
    def layers(self) -> tuple[MoeLayerPlan, ...]:
        """The output units of MoE layers."""
        return tuple(unit for unit in self.units if isinstance(unit, MoeLayerPlan))

    @property
    def encoded(self) -> tuple[MoeLayerPlan, ...]:
        """MoE layers and linear groups, in the order of the work."""
        return tuple(layer for unit in self.units for layer in layers_of(unit))

    @property
    def dense(self) -> dict[str, Any] | None:
        """Numbers and bytes of the linear layers beside the experts that are quantized: `DenseSchemas.summary`."""
        groups = self.experts.linear
        return self.spec.dense.summary(
            (group.name, group.dtype, [group.shape(role) for role in group.roles])
            for group in groups
        )

    @cached_property
    def num_bytes_read(self) -> int:
        """Source bytes that are read: of all experts and all copied tensors."""
        return sum(unit.num_bytes_read for unit in self.units)

    @cached_property
    def num_bytes_out(self) -> int:
        """Bytes of all safetensors files."""
        return sum(file.size_bytes for unit in self.units for file in unit.files)

    @property
    def num_ranks(self) -> int:
        """Ranks with files of their own; 1 in the checkpoint layout."""
        return len(self.spec.grid.ranks) if self.spec.layout == artifact_names.KERNEL else 1

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every file of the artifact, the manifest last."""
        files = [file.path for unit in self.units for file in unit.files]
        metadata_files = [
            artifact_names.CARD,
            artifact_names.CONFIG,
            *([artifact_names.INDEX] if has_index(self.units, self.spec.layout) else []),
        ]
        return (
            *files,
            *self.other_files,
            *self.made_files,
            *metadata_files,
            artifact_names.SUMS,
            artifact_names.MANIFEST,
        )

    def rank_bytes(self) -> dict[str, int]:
        """Bytes of expert tensors that each rank will load (kernel layout)."""
        if self.spec.layout != artifact_names.KERNEL:
            return {}
        totals = {artifact_names.rank_folder(t, p): 0 for t, p in self.spec.grid.ranks}
        for layer in self.layers:
            for file in layer.files:
                totals[file.path.rsplit("/", 1)[0]] += file.size_bytes
        return totals


def plan_conversion(
    options: ConversionOptions, source: Source, target: GpuTarget
) -> ConversionPlan:
    """Plan the conversion of a source: layers that are copied unchanged, spec, output files.

    Raises RequestError or InputError for options, a source or their combination that no conversion can have.
    """
    experts = source.map_experts()
    options = options.with_schema(experts, source.config, target)
    choices = assign(options.overrides, {layer.name: layer.index for layer in experts.layers})
    left = {name for name, choice in choices.items() if choice.is_left}
    if options.schema is None:
        left |= plain_layers(experts) - choices.keys()
    if left:
        experts = experts.without(left, source.tensors)
    spec = make_spec(options, experts, source.config, target, choices)
    if spec.dense:
        check_dense(source, spec)
        experts = with_dense(experts, source.tensors, spec)
    plan = make_plan(source, experts, spec)
    if not options.allow_unserved:
        refuse_unserved(plan.experts, spec)
    if spec.encoding.calibration is not None:
        calibration = spec.encoding.calibration.counted(source)
        encoding = replace(spec.encoding, calibration=calibration)
        few = few_tokens_notices(calibration, experts.layers)
        plan = replace(plan, spec=replace(spec, encoding=encoding), notices=(*plan.notices, *few))
    if not (options.overrides and (spec.of_layers or left)):
        return plan
    recipes = dict.fromkeys(re.sub(r"[^\w.-]+", "-", one.recipe) for one in options.overrides)
    return replace(plan, overridden_by="-".join(filter(None, recipes)) or "mixed")


def with_dense(
    experts: ExpertMap, tensors: Mapping[str, TensorRef], spec: ConversionSpec
) -> ExpertMap:
    """Return the map with the linear layers converted that have a schema and are whole scale groups of it."""
    groups, unknown = linear_groups(experts, tensors)
    chosen = [
        group
        for group in groups
        if (schema := spec.dense.of(group.name)) is not None and is_whole(group, schema)
    ]
    names = {group.name for group in chosen}
    left = [group for group in groups if group.name not in names]
    return replace(experts.with_linear(chosen, left), unknown_linear=tuple(unknown))


def make_plan(checkpoint: Source, experts: ExpertMap, spec: ConversionSpec) -> ConversionPlan:
    """Plan a conversion. Raises RequestError where request, schema, grid and layers do not fit together."""
    heads = attention_heads(checkpoint.config)
    check_request(experts, spec, heads)
    check_copied(checkpoint, experts, spec)
    scale_notices = check_matrix_scales(checkpoint, experts.layers)
    experts = experts.with_input_scales({layer.name for layer in spec.static_layers(experts)})
    units = plan_units(experts, checkpoint.tensors, spec)
    planned = {file.path for unit in units for file in unit.files}
    beside = checkpoint.sidecar_files
    check_sidecar_files((*beside.names, *beside.generated), planned, spec.layout)
    return ConversionPlan(
        source=source_facts(checkpoint, experts),
        spec=spec,
        experts=experts,
        units=units,
        other_files=beside.names,
        other_bytes=beside.num_bytes,
        made_files=beside.generated,
        warnings=(
            *request_warnings(experts, spec, checkpoint.config, heads),
            *source_warnings(checkpoint),
        ),
        notices=(
            *source_notices(checkpoint, experts),
            *calibration_notices(spec.encoding.calibration, checkpoint.config),
            *dense_notices(experts, spec.dense),
            *scale_notices,
        ),
    )


def plan_units(
    experts: ExpertMap, tensors: Mapping[str, TensorRef], spec: ConversionSpec
) -> tuple[OutputUnit, ...]:
    """Lay out every safetensors file of an artifact. tensors: of the source, by name."""
    layers: list[MoeLayerPlan | LinearPlan] = []
    shards: list[Shard] = []
    for layer in experts.layers:
        if spec.layout == artifact_names.KERNEL:
            layers.append(kernel_unit(layer, spec))
        else:
            shards += expert_shards(layer, spec)
    shards += linear_shards(experts.linear, spec)
    shards += copy_shards(tensors[name] for name in experts.copied)
    packed, copies = shard_units(shards, spec)
    encoded = [*packed, *layers]
    if experts.linear:  # a calibration goes through the model once
        encoded.sort(key=lambda unit: layers_of(unit)[0].layer.index)
    return (*encoded, *copies)
