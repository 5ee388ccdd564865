"""What an artifact says of itself: the words of hqconv.json and config.json, from the plan and what was measured."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from hqconv import __version__
from hqconv.artifact.lineage import DERIVED, derived_from
from hqconv.artifact.manifest import read_manifest
from hqconv.io.durable_files import FileRecord
from hqconv.io.file_access import blob_sha256, sha256_of
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import MoeLayerPlan
from hqconv.planning.plan import ConversionPlan
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas import artifact_names
from hqconv.schemas.content_sums import SUMS
from hqconv.schemas.options import ENCODING_KEYS
from hqconv.serving.engine import ENGINE

# Keys that are there only where they say something.
_OPTIONAL = ("activation_schema", "cuda", "left_blocks", *ENCODING_KEYS)
_OF_BLOCK = ("schema_name", "weight_schema", "input_schema", "activation_schema", "target", "cuda")


@dataclass(frozen=True)
class Measured:
    """What a block's conversion measured: the errors of each projection, and its content sums (`schemas/content`)."""

    errors: dict[str, Any]
    sums: dict[str, Any]


def is_mixed(plan: ConversionPlan) -> bool:
    """Whether blocks differ from each other, which readers of format version 1 do not expect."""
    return bool(plan.spec.of_blocks or plan.experts.left)


def artifact_config(source: Source, plan: ConversionPlan) -> dict[str, Any]:
    """The source's config.json plus the artifact's quantization_config; in the kernel layout not for transformers."""
    spec = plan.spec
    words = copy.deepcopy(source.config)
    if spec.layout == artifact_names.CHECKPOINT:
        names = [block.name for block in plan.experts.blocks]
        words["quantization_config"] = ENGINE.checkpoint_config(spec.schema, names, plan.experts.left)
    else:
        words = artifact_names.refuse_transformers(words)
        words["quantization_config"] = artifact_names.hqconv_quantization_config(
            spec.kind, source.quantization, is_mixed=is_mixed(plan)
        )
    return words


def spec_to_dict(source: Source, plan: ConversionPlan) -> dict[str, Any]:
    """What the manifest says before anything is converted: versions, source and request."""
    spec = plan.spec
    return {
        "format_version": artifact_names.MIXED_VERSION if is_mixed(plan) else artifact_names.FORMAT_VERSION,
        "hqconv_version": __version__,
        "humming_kernels_version": version("humming-kernels"),
        "source": {
            "name": source.repo_id or source.name,
            "revision": source.revision,
            "quantization_config": source.quantization,
            "index_sha256": source.index_sha256,
            "files": [
                {"name": f.name, "size_bytes": f.size_bytes, "header_sha256": f.header_sha256}
                for f in source.files
            ],
        },
        "layout": spec.layout,
        "schema_name": spec.schema.name,
        **artifact_names.schemas_to_dict(spec.kind),
        **spec.encoding.to_dict(),
        "dtype": spec.param_dtype,
        **artifact_names.target_to_dict(spec.target),
        "tp": spec.grid.tp,
        "ep": spec.grid.ep,
        "expert_placement": spec.grid.placement,
        "redundant_experts": spec.grid.redundant,
        **({"left_blocks": list(plan.experts.left)} if plan.experts.left else {}),
        "family": plan.experts.family,
        "family_chosen_because": plan.experts.chosen_because,
    }


def build_manifest(
    source: Source,
    plan: ConversionPlan,
    measured: Mapping[str, Measured],
    files: Iterable[FileRecord],
    scales: Mapping[str, Mapping[str, float]],
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """The words of hqconv.json, in an order that does not depend on how the conversion went.

    `measured`: of each block. `files`: every file but the manifest and the model card. `scales`: block → GEMM → the
    static scale of its activations, of the blocks that have them. `digests`: name → SHA-256 of the source's files,
    those that were hashed.
    """
    words = spec_to_dict(source, plan)
    words["source"]["files"] = [
        {**file, **_digests(source, file["name"], digests)} for file in words["source"]["files"]
    ]
    return {
        **words,
        **({DERIVED: _lineage(source)} if source.guard.is_held else {}),
        **({"warnings": list(plan.warnings)} if plan.warnings else {}),
        "blocks": {
            block.name: override_to_dict(block.name, plan.spec)
            | _layer_to_dict(block, measured[block.name], scales.get(block.name, {}))
            for block in plan.blocks
        },
        "files": dict(sorted(_file_to_dict(record) for record in files)),
        "tensors": {
            "converted": plan.experts.converted,
            "copied": list(plan.experts.copied),
            "dropped": plan.experts.dropped,
        },
    }


def _digests(source: Source, name: str, digests: Mapping[str, str]) -> dict[str, str]:
    """A source file's SHA-256 as it was read, and as the Hub says that it is, where these are known."""
    of_hub = None if source.repo_id is None else blob_sha256(source.root / name)
    if source.listing is not None:  # the file may have left the cache by now
        of_hub = source.listing.digests.get(name)
    found = {"sha256": digests.get(name), "hub_sha256": of_hub}
    return {key: sha256 for key, sha256 in found.items() if sha256 is not None}


def _lineage(source: Source) -> list[dict[str, Any]]:
    return derived_from(read_manifest(source.root), sha256_of(source.root / artifact_names.MANIFEST))


def with_file(words: Mapping[str, Any], record: FileRecord) -> dict[str, Any]:
    """The words of hqconv.json with one file more."""
    return {**words, "files": dict(sorted([*words["files"].items(), _file_to_dict(record)]))}


def _file_to_dict(record: FileRecord) -> tuple[str, dict[str, Any]]:
    return record.path, {"size_bytes": record.size_bytes, "sha256": record.sha256}


def override_to_dict(block: str, spec: ConversionSpec) -> dict[str, Any]:
    """What a block has for itself."""
    kind = spec.of_blocks.get(block)
    return (
        {} if kind is None else {"schema_name": kind.schema.name, **artifact_names.kernel_spec_to_dict(kind)}
    )


def first_difference(source: Source, plan: ConversionPlan, manifest: Mapping[str, Any]) -> str | None:
    """What a finished artifact's manifest says otherwise than one of this source and plan would."""
    words = spec_to_dict(source, plan)
    found = {**manifest, "source": without_digests(manifest["source"])}
    for key in (*words, *_OPTIONAL):
        if found.get(key) != words.get(key):
            return key
    for block in plan.blocks:
        own, found = override_to_dict(block.name, plan.spec), manifest["blocks"].get(block.name, {})
        for key in _OF_BLOCK:
            if found.get(key) != own.get(key):
                return f"{key} of {block.name}"
    return None


def without_digests(source: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's `source` without the digests of its files, which a conversion may leave out."""
    files = source.get("files")
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        return dict(source)
    keys = ("sha256", "hub_sha256")
    return {**source, "files": [{k: v for k, v in file.items() if k not in keys} for file in files]}


def _layer_to_dict(unit: MoeLayerPlan, measured: Measured, scales: Mapping[str, float]) -> dict[str, Any]:
    block = unit.block
    words: dict[str, Any] = {
        "layer": block.layer,
        "num_experts": block.num_experts,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        **block.activation.to_dict(block.gated),
        "gated": block.gated,
        "top_k": block.top_k,
        "w13_order": ["gate", "up"] if block.gated else ["up"],
        "source_dtype": block.dtype,
        "source_format": block.format.to_dict(),
        "source_parts": block.parts_to_dict(),
        "conversion": unit.encoding.conversion,
        "quantization_error": measured.errors,
        SUMS: measured.sums,
    }
    for gemm, form in unit.forms.items():
        words[gemm] = {
            "shape_n": form.config["shape_n"],
            "shape_k": form.config["shape_k"],
            "pad_shape_n": form.config["pad_shape_n"],
            "pad_shape_k": form.config["pad_shape_k"],
            "flags": form.flags,
            **({artifact_names.INPUT_SCALE: scales[gemm]} if gemm in scales else {}),
        }
    return words
