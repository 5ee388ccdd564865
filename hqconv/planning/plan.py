"""Conversion plans: output units, sidecar files, memory on GPUs and warnings of one source and spec.

Memory: experts are counted as in the rank files. Of the other tensors, embeddings and the matrices of attention and MLP
are cut for the tensor parallel ranks of attention, as vLLM's parallel layers cut them. All others are counted whole:
norms, routers, latent projections of MLA, vision and audio towers, and every name that is not known here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hqconv.errors import plural
from hqconv.kernel_layout.compatibility import gemm_bytes
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.checks import (
    check_copied,
    check_matrix_scales,
    check_request,
    check_sidecar_files,
    refuse_unserved,
)
from hqconv.planning.notices import (
    calibration_notices,
    request_warnings,
    source_notices,
    source_warnings,
)
from hqconv.planning.output_units import (
    MoeLayerPlan,
    OutputUnit,
    Shard,
    copy_shards,
    expert_shards,
    gemm_shapes,
    kernel_unit,
    shard_units,
)
from hqconv.planning.source_schema import plain_layers
from hqconv.planning.spec import ConversionOptions, ConversionSpec, make_spec
from hqconv.schemas import artifact_names
from hqconv.schemas.engine import ENGINE, NO_HEADS, AttentionHeads, attention_heads
from hqconv.schemas.gpu_target import GPUS, GpuTarget
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import LayerSpec
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
    heads: AttentionHeads = NO_HEADS

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
        num_bytes=checkpoint.total_bytes,
        heads=attention_heads(checkpoint.config),
        bytes_of={
            kind: sum(tensors[name].num_bytes for name in names) for kind, names in kinds.items()
        },
    )


# Modules that vLLM builds as column, row or vocabulary parallel layers: the last part of a module's name.
_KV = ("k_proj", "v_proj")
_CUT = (
    *(
        "q_proj",
        *_KV,
        "qkv_proj",
        "query_key_value",
        "o_proj",
        "q_b_proj",
        "kv_b_proj",
        "wq_b",
        "wo_b",
    ),
    *("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "out_proj"),
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"),
    *("embed_tokens", "embed", "wte", "word_embeddings", "lm_head", "head"),
)
_TOWERS = ("vision", "visual", "audio")


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of weights on the GPU of the largest rank: its experts, and its part of the other tensors."""

    experts: int
    other_tensors: int

    @property
    def total(self) -> int:
        """Bytes of all weights of the rank."""
        return self.experts + self.other_tensors

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by name, with the total."""
        return {"experts": self.experts, "other_tensors": self.other_tensors, "total": self.total}


def other_bytes_on_gpu(
    tensors: Mapping[str, TensorRef],
    copied: Iterable[str],
    left: Collection[str],
    grid: Grid,
    heads: AttentionHeads,
) -> int | None:
    """Return the bytes of the copied tensors on each GPU; None for a grid that the engine cannot start.

    left: MoE layers whose experts are copied; they are dealt to all ranks.
    """
    tp = ENGINE.attention_tp(grid)
    if tp is None:
        return None
    if tp == 1:
        return sum(tensors[name].num_bytes for name in copied)
    prefixes = tuple(f"{layer}." for layer in left)
    total = 0
    for name in copied:
        ref = tensors[name]
        total += -(-ref.num_bytes // (tp if name.startswith(prefixes) else _parts(ref, tp, heads)))
    return total


def _parts(ref: TensorRef, tp: int, heads: AttentionHeads) -> int:
    """Return the number of parts into which `tp` ranks cut a tensor; 1 for a tensor that every rank has whole."""
    if len(ref.shape) < 2:
        return 1
    path = ref.name.split(".")
    if any(tower in part for part in path for tower in _TOWERS):
        return 1
    module = next((part for part in reversed(path[-3:]) if part in _CUT), None)
    if module is None:
        return 1
    is_replicated = module in _KV and heads.num_kv_heads is not None
    return min(tp, heads.num_kv_heads or tp) if is_replicated else tp


def expert_bytes(layers: Iterable[MoeLayer], spec: LayerSpec, tp: int) -> int:
    """Return the bytes of all experts on each of `tp` tensor parallel ranks, all layers with one spec."""
    of_expert: dict[tuple[int, int, bool, bool], int] = {}
    total = 0
    for layer in layers:
        key = (layer.hidden_size, layer.intermediate_size, layer.gated, layer.has_bias)
        if key not in of_expert:
            shapes = gemm_shapes(layer, tp, spec.schema)
            of_expert[key] = sum(
                gemm_bytes(n, k, spec.of(gemm), has_bias=layer.has_bias)
                for gemm, (n, k) in shapes.items()
            )
        total += of_expert[key] * layer.num_experts
    return total


@dataclass(frozen=True)
class ConversionPlan:
    """The result of planning. `other_files`, of `other_bytes` together, are copied unchanged.

    notices: warnings about the source and the server, which a manifest does not record. other_bytes_per_gpu: see
    `other_bytes_on_gpu`. overridden_by: name of the recipe whose overrides make layers differ, `mixed` for
    overrides without a recipe; "" where no override changes a layer. made_files: those of the tokenizer
    that are made from metadata.
    """

    source: SourceFacts
    spec: ConversionSpec
    experts: ExpertMap
    units: tuple[OutputUnit, ...]
    other_files: tuple[str, ...]
    other_bytes: int
    warnings: tuple[str, ...]
    notices: tuple[str, ...] = ()
    other_bytes_per_gpu: int | None = None
    overridden_by: str = ""
    made_files: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Name the source, the schema and the sizes; the rest is in the attributes."""
        grid, spec = self.spec.grid, self.spec
        text = f"{spec.schema.name}, {spec.layout} layout, tp {grid.tp}, ep {grid.ep}"
        text += f", {plural(len(self.layers), 'layer')}"
        return f"<ConversionPlan of {self.source.name!r}: {text}, {self.num_bytes_read} → {self.num_bytes_out} bytes>"

    @property
    def layers(self) -> tuple[MoeLayerPlan, ...]:
        """The output units of MoE layers."""
        return tuple(unit for unit in self.units if isinstance(unit, MoeLayerPlan))

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
    def weight_map(self) -> dict[str, str]:
        """The model index of the ordinary shards: tensor name to file."""
        shards = [file for unit in self.units for file in unit.files if "/" not in file.path]
        return {
            name: file.path
            for file in sorted(shards, key=lambda f: f.path)
            for name in file.tensors
        }

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every file of the artifact, the manifest last."""
        files = [file.path for unit in self.units for file in unit.files]
        metadata_files = [
            artifact_names.CARD,
            artifact_names.CONFIG,
            *([artifact_names.INDEX] if self._has_index else []),
        ]
        return (
            *files,
            *self.other_files,
            *self.made_files,
            *metadata_files,
            artifact_names.SUMS,
            artifact_names.MANIFEST,
        )

    @property
    def _has_index(self) -> bool:
        """True beside other safetensors files, even for a single shard: without an index loaders take all of them."""
        num_shards = len(set(self.weight_map.values()))
        return num_shards > (1 if self.spec.layout == artifact_names.CHECKPOINT else 0)

    def rank_bytes(self) -> dict[str, int]:
        """Bytes of expert tensors that each rank will load (kernel layout)."""
        if self.spec.layout != artifact_names.KERNEL:
            return {}
        totals = {artifact_names.rank_folder(t, p): 0 for t, p in self.spec.grid.ranks}
        for layer in self.layers:
            for file in layer.files:
                totals[file.path.rsplit("/", 1)[0]] += file.size_bytes
        return totals

    @cached_property
    def gpu_memory(self) -> GpuMemory | None:
        """GPU memory for the weights of the largest rank; None in the checkpoint layout, and if no server starts."""
        experts = max(self.rank_bytes().values(), default=None)
        if experts is None or self.other_bytes_per_gpu is None:
            return None
        return GpuMemory(experts, self.other_bytes_per_gpu)

    def fingerprint(self) -> dict[str, str]:
        """Return what a resumed run must share besides source and versions: the request and the output layout."""
        digest = hashlib.sha256()
        for unit in self.units:
            for file in unit.files:
                digest.update(f"{file.path}\0{file.size_bytes}\0".encode() + file.header)
        spec = self.spec
        options = {
            "--schema": {"name": spec.schema.name, **spec.schema.to_dict()},
            "--dtype": spec.param_dtype,
            "--target, --cuda": str(spec.target),
            "--tp": spec.grid.tp,
            "--tp-split": spec.grid.split,
            "--ep": spec.grid.ep,
            "--expert-placement": spec.grid.placement,
            "--redundant-experts": spec.grid.redundant,
            "--layout": spec.layout,
            "--input-schema": {"name": spec.inputs.name, **spec.inputs.humming_fields()},
            **spec.encoding.identity(),
            "the overrides": {
                layer: {"schema": one.schema.name, **artifact_names.kernel_spec_to_dict(one)}
                for layer, one in spec.of_layers.items()
            },
        }
        document = {key: json.dumps(value, sort_keys=True) for key, value in options.items()}
        return {**document, "layout of the output files": digest.hexdigest()}


def plan_conversion(
    options: ConversionOptions, source: Source, target: GpuTarget
) -> ConversionPlan:
    """Plan the conversion of a source: layers that are copied unchanged, spec, output files.

    Raises RequestError or InputError for options, a source or their combination that no conversion can have.
    """
    experts = source.map_experts()
    choices = assign(options.overrides, {layer.name: layer.index for layer in experts.layers})
    left = {name for name, choice in choices.items() if choice.is_left}
    if options.schema is None:
        left |= {
            name
            for name in plain_layers(experts)
            if name not in choices or choices[name].schema is None
        }
    if left:
        experts = experts.without(left, source.tensors)
    spec = make_spec(options, experts, source.config, target, choices)
    plan = make_plan(source, experts, spec)
    if not options.allow_unserved:
        refuse_unserved(plan.experts, spec)
    if spec.encoding.calibration is not None:
        encoding = replace(spec.encoding, calibration=spec.encoding.calibration.counted(source))
        plan = replace(plan, spec=replace(spec, encoding=encoding))
    if not (options.overrides and (spec.of_layers or left)):
        return plan
    recipes = dict.fromkeys(re.sub(r"[^\w.-]+", "-", one.recipe) for one in options.overrides)
    return replace(plan, overridden_by="-".join(filter(None, recipes)) or "mixed")


def make_plan(checkpoint: Source, experts: ExpertMap, spec: ConversionSpec) -> ConversionPlan:
    """Plan a conversion. Raises RequestError where request, schema, grid and layers do not fit together."""
    heads = attention_heads(checkpoint.config)
    check_request(experts, spec, heads)
    check_copied(checkpoint, experts, spec)
    scale_notices = check_matrix_scales(checkpoint, experts.layers)
    experts = experts.with_input_scales({layer.name for layer in spec.static_layers(experts)})
    layers: list[MoeLayerPlan] = []
    shards: list[Shard] = []
    for layer in experts.layers:
        if spec.layout == artifact_names.KERNEL:
            layers.append(kernel_unit(layer, spec))
        else:
            shards += expert_shards(layer, spec)
    shards += copy_shards(checkpoint.tensors[name] for name in experts.copied)
    packed, copies = shard_units(shards, spec)
    units: tuple[OutputUnit, ...] = (*packed, *layers, *copies)
    planned = {file.path for unit in units for file in unit.files}
    check_sidecar_files((*checkpoint.other_files, *checkpoint.made.planned), planned, spec.layout)
    plan = ConversionPlan(
        source=source_facts(checkpoint, experts),
        spec=spec,
        experts=experts,
        units=units,
        other_files=checkpoint.other_files,
        other_bytes=checkpoint.loose.num_bytes,
        made_files=checkpoint.made.planned,
        warnings=(
            *request_warnings(experts, spec, checkpoint.config, heads),
            *source_warnings(checkpoint),
        ),
        other_bytes_per_gpu=other_bytes_on_gpu(
            checkpoint.tensors, experts.copied, experts.left, spec.grid, heads
        ),
    )
    notices = (
        *source_notices(checkpoint, experts),
        *_memory_notices(plan.gpu_memory, spec),
        *calibration_notices(spec.encoding.calibration, checkpoint.config),
        *scale_notices,
    )
    return replace(plan, notices=notices)


def _memory_notices(memory: GpuMemory | None, spec: ConversionSpec) -> list[str]:
    """Warn of weights that no known GPU of the target can hold."""
    models = [gpu.memory_gb for gpu in GPUS.values() if gpu.sm_version == spec.target.sm_version]
    if memory is None or memory.total <= max(models, default=0) * 10**9:
        return []
    return [
        f"each GPU needs about {memory.total / 1e9:.0f} GB for weights alone, and the largest known GPU of "
        f"{spec.target.name} has {max(models)} GB: use a larger --tp or --ep, or a schema with fewer bits."
    ]
