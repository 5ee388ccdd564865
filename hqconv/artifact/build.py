"""The manifest and config.json of a new artifact, from the plan and the measurements of the conversion."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib.metadata import version
from typing import Any

from hqconv import __version__
from hqconv.artifact.manifest import (
    OVERRIDE_KEYS,
    CalibrationEntry,
    FileEntry,
    GemmEntry,
    Manifest,
    ManifestLayer,
    ManifestSource,
    ProjectionError,
    SourceFileEntry,
    TensorAccounting,
    read_manifest,
)
from hqconv.errors import differences
from hqconv.io.durable_files import FileRecord
from hqconv.kernel_layout.fingerprint import layout_fingerprint
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import CopiedShardPlan, MoeLayerPlan
from hqconv.planning.plan import ConversionPlan
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas import artifact_names
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.grid import EVEN
from hqconv.schemas.options import ENCODING_KEYS
from hqconv.schemas.sum_factors import COPIED
from hqconv.schemas.weight_schema import SchemaPair


@dataclass(frozen=True)
class Measured:
    """Measurements of an output unit: errors of each projection of a layer, content sums (`schemas/sum_factors`)."""

    errors: dict[str, Any]
    sums: dict[str, Any]


def is_mixed(plan: ConversionPlan) -> bool:
    """Return whether layers or their GEMMs differ, which readers of format version 1 do not expect."""
    return bool(plan.spec.of_layers or plan.experts.left) or isinstance(
        plan.spec.schema, SchemaPair
    )


def artifact_config(source: Source, plan: ConversionPlan) -> dict[str, Any]:
    """Return config.json with the artifact's quantization_config; transformers refuses that of the kernel layout."""
    spec = plan.spec
    document = copy.deepcopy(source.config)
    if spec.layout == artifact_names.CHECKPOINT:
        names = [layer.name for layer in plan.experts.layers]
        document["quantization_config"] = ENGINE.checkpoint_config(
            spec.schema, names, plan.experts.left
        )
    else:
        document = artifact_names.refuse_transformers(document)
        document["quantization_config"] = artifact_names.hqconv_quantization_config(
            spec.layer_spec, source.quantization, is_mixed=is_mixed(plan)
        )
    return document


def _facts(source: Source, plan: ConversionPlan) -> dict[str, Any]:
    """Return the manifest fields that are known before the conversion: versions, source and request."""
    spec, experts = plan.spec, plan.experts
    encoding = spec.encoding.to_dict()
    if "calibration" in encoding:
        encoding["calibration"] = CalibrationEntry(**encoding["calibration"])
    return {
        "format_version": artifact_names.MIXED_VERSION
        if is_mixed(plan)
        else artifact_names.FORMAT_VERSION,
        "hqconv_version": __version__,
        "humming_kernels_version": version("humming-kernels"),
        "source": ManifestSource(
            name=source.repo_id or source.name,
            revision=source.revision,
            quantization_config=source.quantization,
            index_sha256=source.index_sha256,
            files=[
                SourceFileEntry(name=f.name, size_bytes=f.size_bytes, header_sha256=f.header_sha256)
                for f in source.files
            ],
        ),
        "layout": spec.layout,
        "schema_name": spec.schema.name,
        **dict.fromkeys(("activation_schema", "cuda", *ENCODING_KEYS)),
        **artifact_names.kernel_spec_to_dict(spec.layer_spec),
        **encoding,
        "dtype": spec.param_dtype,
        "tp": spec.grid.tp,
        "tp_split": None if spec.grid.split == EVEN else spec.grid.split,
        "ep": spec.grid.ep,
        "expert_placement": spec.grid.placement,
        "redundant_experts": spec.grid.redundant,
        "left_blocks": list(experts.left) or None,
        "family": experts.family,
        "family_chosen_because": experts.chosen_because,
    }


def build_manifest(
    source: Source,
    plan: ConversionPlan,
    measured: Mapping[str, Measured],
    files: Iterable[FileRecord],
    scales: Mapping[str, Mapping[str, float]],
    digests: Mapping[str, str],
) -> Manifest:
    """Build the manifest, in an order that does not depend on the order of the work.

    `measured`: of each output unit. `files`: every file but the manifest and the model card. `scales`: layer → GEMM →
    the static scale of its activations, of the layers that have them. `digests`: name → SHA-256 of the source's files
    that were hashed.
    """
    facts, experts = _facts(source, plan), plan.experts
    of_files = [
        replace(file, sha256=digests.get(file.name), hub_sha256=hub_digest(source, file.name))
        for file in facts["source"].files
    ]
    facts["source"] = replace(facts["source"], files=of_files)
    parent = read_manifest(source.root, is_sealed=True) if source.guard.is_held else None
    return Manifest(
        **facts,
        derived_from=None if parent is None else [parent.as_ancestor(), *parent.ancestors],
        warnings=list(plan.warnings) or None,
        blocks={
            unit.name: _layer(
                unit, measured[unit.name], scales.get(unit.name, {}), source, plan.spec
            )
            for unit in plan.layers
        },
        content_sums=_copied_sums(plan, measured) or None,
        files=_files(files),
        tensors=TensorAccounting(
            converted=experts.converted, copied=list(experts.copied), dropped=experts.dropped
        ),
    )


def _copied_sums(plan: ConversionPlan, measured: Mapping[str, Measured]) -> dict[str, str]:
    """Return the content sum of every copied tensor, by name."""
    of_units = (
        measured[unit.name].sums[COPIED] for unit in plan.units if isinstance(unit, CopiedShardPlan)
    )
    return dict(sorted((name, one) for sums in of_units for name, one in sums.items()))


def hub_digest(source: Source, name: str) -> str | None:
    """Return a source file's SHA-256 as the Hub lists it, or offline as its cache names the bytes; else None."""
    return None if source.repo_id is None else source.guard.listed.get(name)


def _files(records: Iterable[FileRecord]) -> dict[str, FileEntry]:
    entries = (
        (one.path, FileEntry(size_bytes=one.size_bytes, sha256=one.sha256)) for one in records
    )
    return dict(sorted(entries, key=lambda entry: entry[0]))


def with_file(manifest: Manifest, record: FileRecord) -> Manifest:
    """Return the manifest with one more file."""
    return replace(
        manifest,
        files=dict(sorted({**manifest.files, **_files([record])}.items(), key=lambda one: one[0])),
    )


def _override(layer: str, spec: ConversionSpec) -> dict[str, Any]:
    """Return the fields of a layer that is quantized in another way than the others."""
    own = spec.of_layers.get(layer)
    return (
        {}
        if own is None
        else {"schema_name": own.schema.name, **artifact_names.kernel_spec_to_dict(own)}
    )


def first_difference(
    source: Source, plan: ConversionPlan, manifest: Manifest
) -> tuple[str, str, str] | None:
    """Return the first key in which a finished artifact's manifest differs from one of this source and plan.

    Beside the key: texts of the artifact's value and of the one that a new conversion would have.
    """
    facts = _facts(source, plan)
    del facts["humming_kernels_version"]  # versions with the same layout make the same artifact
    for key in (one.name for one in fields(Manifest) if one.name in facts):
        found, expected = getattr(manifest, key), facts[key]
        if key == "source":  # a conversion may leave out the digests of its files
            found = replace(
                found, files=[replace(f, sha256=None, hub_sha256=None) for f in found.files]
            )
        if found != expected:
            return key, *differences(_plain(found), _plain(expected))
    for unit in plan.layers:
        own, layer = _override(unit.name, plan.spec), manifest.blocks.get(unit.name)
        for key in OVERRIDE_KEYS:
            if (found := getattr(layer, key, None)) != own.get(key):
                return f"{key} of {unit.name}", *differences(found, own.get(key))
        for gemm in unit.forms:
            entry = None if layer is None else layer.gemm(gemm)
            expected = layout_fingerprint(plan.spec.layer_spec_of(unit.name).of(gemm))
            if entry is not None and entry.fingerprint != expected:
                return (
                    "humming_kernels_version",
                    manifest.humming_kernels_version,
                    version("humming-kernels"),
                )
    return None


def _plain(value: Any) -> Any:
    """Return the JSON value of a manifest field."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _layer(
    unit: MoeLayerPlan,
    measured: Measured,
    scales: Mapping[str, float],
    source: Source,
    spec: ConversionSpec,
) -> ManifestLayer:
    layer = unit.layer
    is_sorted = unit.encoding.sorts_columns or layer.name in source.sorted_layers
    gemms = {
        gemm: GemmEntry(
            **{
                key: form.config[key]
                for key in ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k")
            },
            flags=form.flags,
            fingerprint=layout_fingerprint(spec.layer_spec_of(layer.name).of(gemm)),
            input_scale=scales.get(gemm),
        )
        for gemm, form in unit.forms.items()
    }
    return ManifestLayer(
        **_override(unit.name, spec),
        layer=layer.index,
        num_experts=layer.num_experts,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        **layer.activation.to_dict(layer.gated),
        gated=layer.gated,
        top_k=layer.top_k,
        w13_order=["gate", "up"] if layer.gated else ["up"],
        intermediate_order=artifact_names.G_IDX if is_sorted else None,
        source_dtype=layer.dtype,
        source_format=layer.format.to_dict(),
        source_parts=layer.parts_to_dict(),
        conversion=unit.encoding.conversion,
        quantization_error={
            role: ProjectionError.from_dict(one) for role, one in measured.errors.items()
        },
        content_sums=measured.sums,
        w13=gemms.get("w13"),
        w2=gemms.get("w2"),
    )
