"""The documents of an artifact: manifest, config.json and index of shards, planned first and completed by measurements.

The documents follow from an `Origin`, i.e. the facts about a source that matter, a spec and the planned files. An
origin is made of a source, or of what an artifact has recorded about its source (`artifact/expected`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from hqconv.artifact.manifest import (
    GEMM_SIZES,
    CalibrationEntry,
    FileEntry,
    GemmEntry,
    Manifest,
    ManifestLayer,
    ManifestLinear,
    ManifestSource,
    ProjectionError,
    SourceFileEntry,
    TensorAccounting,
)
from hqconv.io.durable_files import FileRecord
from hqconv.kernel_layout.transform import layout_fingerprint
from hqconv.models.expert_map import ExpertMap
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import MoeLayerPlan, OutputUnit
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas import artifact_names as names
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.grid import EVEN
from hqconv.schemas.weight_schema import SchemaPair
from hqconv.version import __version__


@dataclass(frozen=True)
class Origin:
    """Facts about a source that decide an artifact's documents.

    config: config.json. sorted_layers: layers whose intermediate columns were sorted before.
    """

    source: ManifestSource
    config: Mapping[str, Any]
    sorted_layers: Collection[str]

    @classmethod
    def of(cls, source: Source) -> Origin:
        """Return the facts about an opened source."""
        entry = ManifestSource(
            name=source.repo_id or source.name,
            revision=source.revision,
            quantization_config=source.quantization,
            index_sha256=source.index_sha256,
            files=[
                SourceFileEntry(
                    name=file.name, size_bytes=file.size_bytes, header_sha256=file.header_sha256
                )
                for file in source.files
            ],
        )
        return cls(entry, source.config, source.sorted_layers)


def is_mixed(experts: ExpertMap, spec: ConversionSpec) -> bool:
    """Return whether layers or their GEMMs differ, which readers of format version 1 do not expect."""
    return bool(spec.of_layers or experts.left) or isinstance(spec.schema, SchemaPair)


def artifact_config(origin: Origin, experts: ExpertMap, spec: ConversionSpec) -> dict[str, Any]:
    """Return config.json with the artifact's quantization_config; transformers refuses that of the kernel layout."""
    document = copy.deepcopy(dict(origin.config))
    if spec.layout == names.CHECKPOINT:
        layers = [layer.name for layer in experts.layers]
        config = ENGINE.checkpoint_config(spec.schema, layers, experts.left)
        if experts.linear:
            config = dense_config(experts, spec, config)
    else:
        document = names.refuse_transformers(document)
        source_config = origin.source.quantization_config
        if experts.linear:
            linear = dense_config(experts, spec)
            source_config = (
                {**source_config, names.DENSE_CONFIG: linear} if source_config else linear
            )
        config = names.hqconv_quantization_config(
            spec.layer_spec, source_config, is_mixed=is_mixed(experts, spec)
        )
    document["quantization_config"] = config
    return document


def dense_config(
    experts: ExpertMap, spec: ConversionSpec, of_experts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the engine's config of the linear layers. of_experts: that of experts, which they are added to."""

    groups = (*experts.linear, *experts.left_linear)
    modules = {group.name: group.roles for group in groups}
    schemas = {
        group.name: spec.layer_spec_of(group.name).schema.of("w13") for group in experts.linear
    }
    return ENGINE.dense_config(modules, schemas, of_experts)


def shard_index(units: Sequence[OutputUnit]) -> dict[str, Any]:
    """Return the index of the ordinary shards: the file of each tensor."""
    shards = [file for unit in units for file in unit.files if "/" not in file.path]
    weight_map = {name: file.path for file in shards for name in file.tensors}
    total_bytes = sum(file.size_bytes - len(file.header) for file in shards)
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}


def planned_manifest(
    origin: Origin, experts: ExpertMap, spec: ConversionSpec, units: Sequence[OutputUnit]
) -> Manifest:
    """Return the manifest as far as it is known before the conversion: without files, errors and measured scales.

    Fingerprints of layouts are left out too: `with_fingerprints` adds them.
    """
    encoding = spec.encoding.to_dict()
    if "calibration" in encoding:
        encoding["calibration"] = CalibrationEntry(**encoding["calibration"])
    mixed = is_mixed(experts, spec)
    return Manifest(
        format_version=names.MIXED_VERSION if mixed else names.FORMAT_VERSION,
        hqconv_version=__version__,
        humming_kernels_version=version("humming-kernels"),
        source=origin.source,
        request=spec.request(experts.left),
        layout=spec.layout,
        schema_name=spec.schema.name,
        **names.kernel_spec_to_dict(spec.layer_spec),
        **encoding,
        dtype=spec.param_dtype,
        tp=spec.grid.tp,
        tp_split=None if spec.grid.split == EVEN else spec.grid.split,
        ep=spec.grid.ep,
        expert_placement=spec.grid.placement,
        redundant_experts=spec.grid.redundant,
        left_blocks=list(experts.left) or None,
        family=experts.family,
        blocks={
            unit.name: _planned_layer(unit, origin, spec)
            for unit in units
            if isinstance(unit, MoeLayerPlan)
        },
        linear_layers={
            layer.name: ManifestLinear(
                source_dtype=layer.dtype,
                shapes={role: list(layer.shape(role)) for role in layer.roles},
                quantization_error={},
            )
            for layer in experts.linear
        }
        or None,
        files={},
        tensors=TensorAccounting(
            converted=experts.converted, copied=list(experts.copied), dropped=experts.dropped
        ),
    )


def _planned_layer(unit: MoeLayerPlan, origin: Origin, spec: ConversionSpec) -> ManifestLayer:
    layer = unit.layer
    own = spec.of_layers.get(layer.name)
    override = {}
    if own is not None:
        override = {"schema_name": own.schema.name, **names.kernel_spec_to_dict(own)}
    is_sorted = unit.encoding.sorts_columns or layer.name in origin.sorted_layers
    gemms = {
        gemm: GemmEntry(
            **{key: form.config[key] for key in GEMM_SIZES}, flags=form.flags, fingerprint=""
        )
        for gemm, form in unit.forms.items()
    }
    return ManifestLayer(
        **override,
        layer=layer.index,
        num_experts=layer.num_experts,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        **layer.activation.to_dict(layer.gated),
        gated=layer.gated,
        top_k=layer.top_k,
        w13_order=["gate", "up"] if layer.gated else ["up"],
        intermediate_order=names.G_IDX if is_sorted else None,
        source_dtype=layer.dtype,
        source_format=layer.format.to_dict(),
        source_parts={
            role: {part: tensor_slice.to_dict() for part, tensor_slice in slices.items()}
            for role, slices in layer.slices.items()
        },
        conversion=unit.encoding.conversion,
        quantization_error={},
        w13=gemms.get("w13"),
        w2=gemms.get("w2"),
    )


def with_fingerprints(manifest: Manifest, spec: ConversionSpec) -> Manifest:
    """Return a planned manifest with the fingerprints of its layouts.

    The first one loads the loops that lay out, which takes 0.2 s of processor time before a conversion, and none after.
    """
    blocks = {}
    for name, layer in manifest.blocks.items():
        gemms: dict[str, Any] = {}
        for gemm in names.GEMMS:
            if (entry := layer.gemm(gemm)) is not None:
                kernel_spec = spec.layer_spec_of(name).of(gemm)
                gemms[gemm] = replace(entry, fingerprint=layout_fingerprint(kernel_spec))
        blocks[name] = replace(layer, **gemms)
    return replace(manifest, blocks=blocks)


def completed_manifest(
    planned: Manifest,
    errors: Mapping[str, Mapping[str, Any]],
    scales: Mapping[str, Mapping[str, float]],
    files: Iterable[FileRecord],
    source_files: Sequence[SourceFileEntry],
    warnings: Sequence[str],
) -> Manifest:
    """Complete a planned manifest, in an order that does not depend on the order of the work.

    errors: layer → projection → its quantization error. scales: layer → GEMM → the static scale of its activations,
    where there is one. files: every file but the manifest and the model card. source_files: with their digests.
    """

    def projections(name: str) -> dict[str, ProjectionError]:
        return {role: ProjectionError.from_dict(error) for role, error in errors[name].items()}

    blocks = {}
    for name, layer in planned.blocks.items():
        gemms: dict[str, Any] = {}
        for gemm, scale in scales.get(name, {}).items():
            entry = layer.gemm(gemm)
            assert entry is not None  # only the kernel layout has static scales
            gemms[gemm] = replace(entry, input_scale=scale)
        blocks[name] = replace(layer, quantization_error=projections(name), **gemms)
    linear_layers = {
        name: replace(layer, quantization_error=projections(name))
        for name, layer in (planned.linear_layers or {}).items()
    }
    return replace(
        planned,
        source=replace(planned.source, files=list(source_files)),
        warnings=list(warnings) or None,
        blocks=blocks,
        linear_layers=linear_layers or None,
        files=_files(files),
    )


def hub_digest(source: Source, name: str) -> str | None:
    """Return a source file's SHA-256 as the Hub lists it, or offline as its cache names the bytes; else None."""
    return None if source.repo_id is None else source.guard.listed.get(name)


def _files(records: Iterable[FileRecord]) -> dict[str, FileEntry]:
    entries = {
        record.path: FileEntry(size_bytes=record.size_bytes, sha256=record.sha256)
        for record in records
    }
    return dict(sorted(entries.items()))


def with_file(manifest: Manifest, record: FileRecord) -> Manifest:
    """Return the manifest with one more file."""
    return replace(manifest, files=dict(sorted({**manifest.files, **_files([record])}.items())))
