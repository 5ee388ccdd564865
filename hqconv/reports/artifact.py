"""Description of an artifact, finished or not, as a document; only hqconv.json and config.json are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from hqconv.artifact.error_summary import requantized, scale_changes, summarize_errors
from hqconv.artifact.manifest import Manifest, ManifestLayer, read_manifest
from hqconv.formats.source_format import SourceFormat
from hqconv.io.hub import Listing
from hqconv.planning.encoding import EncodingOptions
from hqconv.reports.documents import Words, layer_runs, otherwise, quant_method, schema_to_dict
from hqconv.schemas import artifact_names
from hqconv.schemas.content_sums import SUMS
from hqconv.schemas.untrusted_files import read_json
from hqconv.serving.engine import ENGINE


def describe_artifact(root: Path, repo_id: str | None = None, listing: Listing | None = None) -> Words:
    """Describe a finished artifact from its manifest.

    repo_id, listing: of a repo on the Hub, of which only some files are here; no listing if the Hub is not reachable.
    Raises what `read_manifest` raises, VerificationError if the manifest's schema is invalid.
    """
    manifest = read_manifest(root)
    layers, errors = manifest.blocks, manifest.errors()
    altered = None if manifest.alteration is None else manifest.alteration.what
    missing = _missing(root, manifest, listing)
    source, *before = ({"name": one.source.name, "revision": one.source.revision} for one in manifest.steps)
    return {
        "kind": "artifact",
        "folder": str(root),
        **({} if repo_id is None else {"repo": repo_id, "commit": root.name}),
        "schema": schema_to_dict(manifest.kernel_spec.schema, manifest.dtype),
        "otherwise": otherwise(
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
            {"schema_name": one.schema_name, "manifest_sha256": one.manifest_sha256, "source": of_one}
            for one, of_one in zip(manifest.ancestors, before, strict=True)
        ],
        "manifest_sha256": manifest.sha256,
        "warnings": list(manifest.warnings or ()),
        "quant_method": quant_method(_config_of(root).get("quantization_config")),
        "tensors": {
            "converted": len(manifest.tensors.converted),
            "copied": len(manifest.tensors.copied),
            "dropped": len(manifest.tensors.dropped),
        },
        "blocks": layer_runs({name: _layer_to_dict(layer) for name, layer in layers.items()}),
        "conversion": dict(Counter(layer.conversion for layer in layers.values())),
        "quantization_error": summarize_errors(errors),
        "requantized": requantized(errors),
        "largest_scale_change": scale_changes(errors),
        "input_scales": _input_scales(layers.values()),
        "num_files": len(manifest.files),
        "num_bytes": sum(entry.size_bytes for entry in manifest.files.values()),
        "rank_bytes": _rank_bytes(manifest),
        "missing_or_resized_files": missing,
        "altered_manifest": altered,
        "is_damaged": bool(missing or altered),
        "serve_command": ENGINE.serve_command(repo_id or str(root), manifest.layout, manifest.grid),
    }


def _missing(root: Path, manifest: Manifest, listing: Listing | None) -> list[str]:
    """Files that are missing or have another size; people may edit the card."""
    return [
        name
        for name, entry in manifest.files.items()
        if (size := _size_of(root, name, listing)) is None or (name != artifact_names.CARD and size != entry.size_bytes)
    ]


def _size_of(root: Path, name: str, listing: Listing | None) -> int | None:
    """Size in bytes of a file of the folder or of the repo; None if there is none."""
    if listing is not None:
        return listing.sizes.get(name)
    return (root / name).stat().st_size if (root / name).is_file() else None


def describe_unfinished(root: Path) -> Words:
    """Describe the progress of a conversion that stopped or is still running."""
    lines = (root / artifact_names.JOURNAL).read_bytes().split(b"\n")[1:]
    return {
        "kind": "unfinished",
        "folder": str(root),
        "num_groups_done": sum(_is_group(line) for line in lines),
        "remedy": "Run the `hqconv convert` command that wrote it once more, with --resume to go on "
        "or --overwrite to start anew.",
    }


def _is_group(line: bytes) -> bool:
    """Return whether a journal line records a finished output unit; half a line of a killed run does not."""
    try:
        return "group" in json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return False


def _config_of(root: Path) -> Words:
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


def _input_scales(layers: Iterable[ManifestLayer]) -> dict[str, Words]:
    """Smallest and largest static activation scale of each GEMM over all layers that have one."""
    found: dict[str, list[float]] = {}
    for layer in layers:
        for gemm in artifact_names.GEMMS:
            entry = layer.gemm(gemm)
            if entry is not None and entry.input_scale is not None:
                found.setdefault(gemm, []).append(entry.input_scale)
    return {gemm: {"min": min(scales), "max": max(scales)} for gemm, scales in found.items()}


def _layer_to_dict(layer: ManifestLayer) -> Words:
    """Document of a layer of the manifest, with its source's format in one line."""
    try:
        source = SourceFormat.from_dict(layer.source_format).describe()
    except (AttributeError, KeyError, TypeError, ValueError):
        source = "unknown"
    shown = {key: value for key, value in layer.to_dict().items() if key != SUMS}
    activation = layer.activation_function.to_dict(layer.gated)  # with numbers that older manifests lack
    return {**shown, **activation, "source_format": source}
