"""Conversion plans: output units, sidecar files and warnings of one source and spec."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hqconv.errors import InputError, RequestError, plural
from hqconv.io.checkpoint_files import are_all_shards
from hqconv.io.sidecar_files import FrontMatter, has_tokenizer
from hqconv.models.config_facts import layer_notices
from hqconv.models.expert_map import ExpertMap
from hqconv.models.families import BY_NAME
from hqconv.models.source_protocol import Source
from hqconv.planning.checks import check_copied, check_request, refuse_unserved, request_warnings
from hqconv.planning.gpu_memory import GpuMemory, other_bytes
from hqconv.planning.importance import Importance
from hqconv.planning.input_scales import static_layers
from hqconv.planning.output_units import (
    MoeLayerPlan,
    OutputUnit,
    Shard,
    copy_shards,
    expert_shards,
    kernel_unit,
    shard_units,
)
from hqconv.planning.source_schema import plain_layers
from hqconv.planning.spec import ConversionOptions, ConversionSpec, make_spec
from hqconv.schemas import artifact_names
from hqconv.schemas.gpu_target import GPUS, GpuTarget
from hqconv.schemas.model_config import NO_HEADS, AttentionHeads, attention_heads, text_config
from hqconv.schemas.options import GPTQ, RTN
from hqconv.schemas.overrides import assign


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
    kinds = {"converted": experts.converted, "copied": experts.copied, "dropped": experts.dropped} if experts else {}
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
        bytes_of={kind: sum(tensors[name].num_bytes for name in names) for kind, names in kinds.items()},
    )


_FEW_BITS = 2
_MAX_NAME, _MAX_PATH = 255, 3072  # bytes, of most file systems; of a path with room for that of the output
_OURS = (
    *(
        artifact_names.CONFIG,
        artifact_names.INDEX,
        artifact_names.MANIFEST,
        artifact_names.IMPORTANCE,
        artifact_names.JOURNAL,
    ),
    *(artifact_names.CARD, artifact_names.SUMS),
)


def check_sidecar_files(other_files: Iterable[str], planned: Collection[str], layout: str) -> None:
    """Refuse a source whose other files would lie where the artifact's own are or come, or have no room for a name.

    planned: the files of tensors. Raises InputError that names the file.
    """
    names = list(other_files)
    taken = {*planned, *_OURS, *(name + artifact_names.PARTIAL for name in (*planned, *_OURS, *names))}
    # A folder may not lie where any file comes, and a file not where the artifact's folders come.
    folders = {folder.as_posix() for path in planned for folder in Path(path).parents}
    for path in names:
        above = {folder.as_posix() for folder in Path(path).parents}
        is_theirs = layout == artifact_names.KERNEL and path.split("/")[0] == artifact_names.EXPERTS_FOLDER
        if path in taken or path in folders or above & taken or is_theirs:
            what, expected = "A file of the source has a name that the artifact needs.", "another name"
            remedy = "Rename the file, or leave it out of the source."
            raise InputError(what, where=path, expected=expected, remedy=remedy)
        _check_length(path)


def _check_length(path: str) -> None:
    longest = max(len(part.encode()) for part in Path(path + artifact_names.PARTIAL).parts)
    for num_bytes, most in ((longest, _MAX_NAME), (len(path.encode()), _MAX_PATH)):
        if num_bytes > most:
            what, expected = "The name of a file of the source is too long.", f"at most {most} bytes"
            found = f"{num_bytes} bytes, with {artifact_names.PARTIAL} while it is written"
            raise InputError(what, where=path, expected=expected, found=found, remedy="Rename the file.")


@dataclass(frozen=True)
class ConversionPlan:
    """The result of planning. `other_files`, of `other_bytes` together, are copied unchanged.

    notices: warnings about the source and the server, which a manifest does not record. other_bytes_per_gpu: see
    `gpu_memory.other_bytes`. overridden_by: name of the recipe whose overrides make layers differ, `mixed` for
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
        text = (
            f"{spec.schema.name}, {spec.layout} layout, tp {grid.tp}, ep {grid.ep}, {plural(len(self.layers), 'layer')}"
        )
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
    def num_bytes_beside(self) -> int:
        """Bytes of the sidecar files, which are copied unchanged."""
        importance = self.spec.encoding.importance
        return self.other_bytes + (0 if importance is None else importance.num_bytes)

    @property
    def num_ranks(self) -> int:
        """Ranks with files of their own; 1 in the checkpoint layout."""
        return len(self.spec.grid.ranks) if self.spec.layout == artifact_names.KERNEL else 1

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The model index of the ordinary shards: tensor name to file."""
        shards = [file for unit in self.units for file in unit.files if "/" not in file.path]
        return {name: file.path for file in sorted(shards, key=lambda f: f.path) for name in file.tensors}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every file of the artifact, the manifest last."""
        files = [file.path for unit in self.units for file in unit.files]
        metadata_files = [
            artifact_names.CARD,
            artifact_names.CONFIG,
            *([artifact_names.INDEX] if self._has_index else []),
        ]
        importance = [] if self.spec.encoding.importance is None else [artifact_names.IMPORTANCE]
        return (
            *files,
            *self.other_files,
            *self.made_files,
            *importance,
            *metadata_files,
            artifact_names.SUMS,
            artifact_names.MANIFEST,
        )

    @property
    def _has_index(self) -> bool:
        """True beside other safetensors files, even for a single shard: without an index loaders take all of them."""
        num_shards = len(set(self.weight_map.values()))
        is_alone = self.spec.layout == artifact_names.CHECKPOINT and self.spec.encoding.importance is None
        return num_shards > (1 if is_alone else 0)

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
            "--schema": {"name": spec.schema.name, **spec.schema.humming_fields()},
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


def plan_conversion(options: ConversionOptions, source: Source, target: GpuTarget) -> ConversionPlan:
    """Plan the conversion of a source: layers that are copied unchanged, spec, output files.

    Raises RequestError or InputError for options, a source or their combination that no conversion can have.
    """
    experts = source.map_experts()
    choices = assign(options.overrides, {layer.name: layer.index for layer in experts.layers})
    left = {name for name, choice in choices.items() if choice.is_left}
    if options.schema is None:
        left |= {name for name in plain_layers(experts) if name not in choices or choices[name].schema is None}
    if left:
        experts = experts.without(left, source.tensors)
    spec = make_spec(options, experts, source.config, target, choices)
    plan = make_plan(source, experts, spec)
    if not options.allow_unserved:
        refuse_unserved(plan.experts, spec)
    if not (options.overrides and (spec.of_layers or left)):
        return plan
    recipes = dict.fromkeys(re.sub(r"[^\w.-]+", "-", one.recipe) for one in options.overrides)
    return replace(plan, overridden_by="-".join(filter(None, recipes)) or "mixed")


def make_plan(checkpoint: Source, experts: ExpertMap, spec: ConversionSpec) -> ConversionPlan:
    """Plan a conversion. Raises RequestError where request, schema, grid and layers do not fit together."""
    heads = attention_heads(checkpoint.config)
    check_request(experts, spec, heads)
    check_copied(checkpoint, experts, spec)
    experts = experts.with_input_scales({layer.name for layer in static_layers(experts, spec)})
    if spec.encoding.importance is not None:
        _refuse_sorted(checkpoint, spec.encoding.importance)
        needs_hessian = spec.encoding.quantizer == GPTQ
        spec.encoding.importance.check(experts.layers, experts.left, needs_hessian=needs_hessian)
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
        warnings=(*request_warnings(experts, spec, heads), *_left_out(checkpoint), *_card_warnings(checkpoint)),
        other_bytes_per_gpu=other_bytes(checkpoint.tensors, experts.copied, experts.left, spec.grid, heads),
    )
    notices = (*source_notices(checkpoint, experts), *_memory_notices(plan), *_quantizer_notices(spec))
    return replace(plan, notices=notices)


def _refuse_sorted(checkpoint: Source, importance: Importance) -> None:
    """Refuse an importance file for an artifact whose w2 has other columns than the model that it was measured on."""
    if checkpoint.sorted_layers:
        raise RequestError(
            "The importance file does not fit the artifact: the columns of w2 were sorted by group.",
            where=f"{importance.where}, {min(checkpoint.sorted_layers)}",
            expected="the model that the artifact was made from",
            found=f"{artifact_names.G_IDX} as intermediate_order in {artifact_names.MANIFEST}",
            remedy="Convert the original model, or leave --importance out.",
        )


def source_notices(checkpoint: Source, experts: ExpertMap) -> list[str]:
    """Warn of a model that hqconv knows by its names only, and of a checkpoint that a server may not load whole."""
    names = [layer.name for layer in experts.layers] + list(experts.left)
    family, text = BY_NAME.get(experts.family), text_config(checkpoint.config)
    notices = [] if family is None else layer_notices(family, names, checkpoint.tensors, text)
    if not experts.is_own_row:
        activations = ", ".join(dict.fromkeys(layer.activation.describe() for layer in experts.layers))
        notices.append(
            f"hqconv does not know the model_type {checkpoint.config.get('model_type')}: its experts were found by the "
            f"names of {experts.family}, and their numbers by its config keys. Compare the activation ({activations}) "
            "and the number of experts per token with the model's code."
        )
    if checkpoint.index_sha256 is None and are_all_shards([file.name for file in checkpoint.files]):
        notices.append(
            f"the source has no {artifact_names.INDEX}: its tensors are those of its {len(checkpoint.files)} numbered "
            "shards. The artifact has an index of its own; a server of the source needs one."
        )
    if checkpoint.made.planned:
        notices.append(checkpoint.made.notice)
    elif not has_tokenizer(checkpoint.other_files):
        made = checkpoint.made
        if made.obstacle:
            notices.append(f"no tokenizer can be made from the metadata of {made.origin}: {made.obstacle}.")
        if checkpoint.place == checkpoint.root:
            notices.append(no_tokenizer("source"))
        else:
            remedy = "put the GGUF file and the publisher's files into a folder, and convert the folder"
            notices.append(no_tokenizer("source", remedy))
    return notices


def no_tokenizer(folder: str, remedy: str = "copy the publisher's files into it") -> str:
    """Return the warning of a folder, or a file, without a tokenizer."""
    return (
        f"the {folder} has no tokenizer (tokenizer.json, tokenizer.model, vocab.json …): {remedy}, or start the server "
        "with --tokenizer."
    )


def _memory_notices(plan: ConversionPlan) -> list[str]:
    """Warn of weights that no known GPU of the target can hold."""
    memory, sm_version = plan.gpu_memory, plan.spec.target.sm_version
    models = [gpu.memory_gb for gpu in GPUS.values() if gpu.sm_version == sm_version]
    if memory is None or memory.total <= max(models, default=0) * 10**9:
        return []
    return [
        f"each GPU needs about {memory.total / 1e9:.0f} GB for weights alone, and the largest known GPU of "
        f"{plan.spec.target.name} has {max(models)} GB: use a larger --tp or --ep, or a schema with fewer bits."
    ]


def _quantizer_notices(spec: ConversionSpec) -> list[str]:
    """Warn of a search where it made predictions worse: at 1 and 2 bits (docs/quantizers.md)."""
    few = sorted({one.schema.name for one in spec.kernel_specs if one.schema.num_bits <= _FEW_BITS})
    if spec.encoding.quantizer == RTN or not few:
        return []
    return [
        f"--quantizer {spec.encoding.quantizer} lowers the error of weights, but at 2 bits ({', '.join(few)}) it made "
        "predictions worse than rtn in all models that were measured: compare both with `hqconv evaluate`."
    ]


def _left_out(checkpoint: Source) -> list[str]:
    """List the files of the source that are not taken along."""
    return [f"{name} is left out: {reason}." for name, reason in checkpoint.loose.left_out.items()]


def _card_warnings(checkpoint: Source) -> list[str]:
    """Warn if the source's license and tags are not taken over."""
    problem = FrontMatter.of(checkpoint.loose.card or b"").problem
    return [f"The front matter of {artifact_names.CARD} was not taken over: {problem}."] if problem else []
