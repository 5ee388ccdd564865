"""An artifact in words, finished or not; no file but hqconv.json and config.json is read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqconv.artifact.error_summary import requantized, scale_changes, summarize_errors
from hqconv.artifact.lineage import ancestors
from hqconv.artifact.manifest import check_details, read_manifest, schema_of
from hqconv.artifact.manifest_digest import alteration
from hqconv.formats.source_format import SourceFormat
from hqconv.io.file_access import sha256_of
from hqconv.io.hub import Listing
from hqconv.planning.encoding import EncodingOptions
from hqconv.reports.documents import Words, block_runs, otherwise, quant_method, schema_to_dict
from hqconv.schemas import artifact_names
from hqconv.schemas.activation import Activation
from hqconv.schemas.content_sums import SUMS
from hqconv.schemas.grid import Grid
from hqconv.schemas.untrusted_files import read_json
from hqconv.serving.engine import ENGINE


def describe_artifact(root: Path, repo_id: str | None = None, listing: Listing | None = None) -> Words:
    """A finished artifact, from its manifest.

    repo_id, listing: of a repo on the Hub, of which only some files are here; no listing where nobody can be asked.
    Raises what `read_manifest` raises, VerificationError where the manifest's schema is none.
    """
    manifest = read_manifest(root)
    check_details(root, manifest)
    errors = {name: block["quantization_error"] for name, block in manifest["blocks"].items()}
    missing, altered = _missing(root, manifest, listing), _alteration(root, manifest)
    return {
        "kind": "artifact",
        "folder": str(root),
        **({} if repo_id is None else {"repo": repo_id, "commit": root.name}),
        "schema": schema_to_dict(schema_of(root, manifest), manifest["dtype"]),
        "otherwise": otherwise(
            (name, block["schema_name"], block["input_schema"])
            for name, block in manifest["blocks"].items()
            if "weight_schema" in block
        ),
        "left_blocks": manifest.get("left_blocks", []),
        **{key: manifest[key] for key in ("layout", "target", "dtype", "input_schema", "tp", "ep")},
        **EncodingOptions.summary_of(manifest),
        **{key: manifest[key] for key in ("expert_placement", "redundant_experts", "family")},
        **{key: manifest[key] for key in ("hqconv_version", "humming_kernels_version", "format_version")},
        **_origin(root, manifest),
        "quant_method": quant_method(_config_of(root).get("quantization_config")),
        "tensors": {kind: len(names) for kind, names in manifest["tensors"].items()},
        "blocks": block_runs({name: _manifest_layer_to_dict(b) for name, b in manifest["blocks"].items()}),
        "conversion": dict(Counter(block["conversion"] for block in manifest["blocks"].values())),
        "quantization_error": summarize_errors(errors),
        "requantized": requantized(errors),
        "largest_scale_change": scale_changes(errors),
        "input_scales": _input_scales(manifest["blocks"]),
        "num_files": len(manifest["files"]),
        "num_bytes": sum(entry["size_bytes"] for entry in manifest["files"].values()),
        "rank_bytes": _rank_bytes(manifest),
        "missing_or_resized_files": missing,
        "altered_manifest": altered,
        "is_damaged": bool(missing or altered),
        "warnings": list(manifest.get("warnings", [])),
        "serve_command": ENGINE.serve_command(repo_id or str(root), manifest["layout"], _grid(manifest)),
    }


def _origin(root: Path, manifest: Words) -> Words:
    """What an artifact comes from, and the digest of its manifest, which stands for all of it."""
    source, *before = [
        {key: one["source"].get(key) for key in ("name", "revision")}
        for one in (manifest, *ancestors(manifest))
    ]
    steps = zip(ancestors(manifest), before, strict=True)
    return {
        "source": source,
        "derived_from": [
            {"schema_name": one["schema_name"], "manifest_sha256": one["manifest_sha256"], "source": of_one}
            for one, of_one in steps
        ],
        "manifest_sha256": sha256_of(root / artifact_names.MANIFEST),
        "warnings": list(manifest.get("warnings", [])),
    }


def _alteration(root: Path, manifest: Words) -> str | None:
    """What is wrong with the manifest's bytes by its own digest, or None."""
    found = alteration((root / artifact_names.MANIFEST).read_bytes(), manifest)
    return None if found is None else found[0]


def _missing(root: Path, manifest: Words, listing: Listing | None) -> list[str]:
    """Files that are not there, or have another size; people may edit the card."""
    return [
        name
        for name, entry in manifest["files"].items()
        if (size := _size_of(root, name, listing)) is None
        or (name != artifact_names.CARD and size != entry["size_bytes"])
    ]


def _size_of(root: Path, name: str, listing: Listing | None) -> int | None:
    """Bytes of a file of the folder, or of the repo; None where there is none."""
    if listing is not None:
        return listing.sizes.get(name)
    return (root / name).stat().st_size if (root / name).is_file() else None


def _grid(manifest: Words) -> Grid:
    words = (manifest[key] for key in ("tp", "ep", "expert_placement", "redundant_experts"))
    return Grid(*words)


def describe_unfinished(root: Path) -> Words:
    """A conversion that stopped, or is still running: how far it came."""
    lines = (root / artifact_names.JOURNAL).read_bytes().split(b"\n")[1:]
    return {
        "kind": "unfinished",
        "folder": str(root),
        "num_groups_done": sum(_is_group(line) for line in lines),
        "remedy": "Run the `hqconv convert` command that wrote it once more, with --resume to go on "
        "or --overwrite to start anew.",
    }


def _is_group(line: bytes) -> bool:
    """Whether a line of a journal is a finished group's; half a line of a killed run is none."""
    try:
        return "group" in json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return False


def _config_of(root: Path) -> Words:
    try:
        words = read_json(root / artifact_names.CONFIG)
    except (OSError, ValueError):
        return {}
    return words if isinstance(words, dict) else {}


def _rank_bytes(manifest: Words) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, entry in manifest["files"].items():
        if name.startswith(f"{artifact_names.EXPERTS_FOLDER}/"):
            totals[name.rsplit("/", 1)[0]] += entry["size_bytes"]
    return dict(totals)


def _input_scales(blocks: Mapping[str, Mapping[str, Any]]) -> dict[str, Words]:
    """GEMM → the smallest and largest static activation scale of all blocks that have one."""
    found: dict[str, list[float]] = {}
    for words in blocks.values():
        for gemm in artifact_names.GEMMS:
            scale = words[gemm].get(artifact_names.INPUT_SCALE) if isinstance(words.get(gemm), dict) else None
            if isinstance(scale, float):
                found.setdefault(gemm, []).append(scale)
    return {gemm: {"min": min(scales), "max": max(scales)} for gemm, scales in found.items()}


def _manifest_layer_to_dict(words: Mapping[str, Any]) -> Words:
    """A manifest's block with its source's format in one line."""
    try:
        source = SourceFormat.from_dict(words["source_format"]).describe()
    except (AttributeError, KeyError, TypeError, ValueError):
        source = "unknown"
    activation = Activation.from_dict(words).to_dict(words["gated"])  # with what older manifests do not say
    shown = {key: value for key, value in words.items() if key != SUMS}
    return {**shown, **activation, "source_format": source}
