"""JSON document of a report, from the manifest and the result of `verify`; the file of its page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import Manifest, ManifestLayer, read_manifest
from hqconv.artifact.model_card import evaluation_in_card
from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.reports.documents import config_of, describe_artifact
from hqconv.reports.texts import Document
from hqconv.schemas.artifact_names import rank_file
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.model_config import attention_heads
from hqconv.schemas.untrusted_files import read_json

NUM_WORST = 12  # experts listed
OfExperts = Mapping[str, Mapping[str, list[float]]]


def page_document(
    root: Path,
    verification: Document | None = None,
    of_experts: OfExperts | None = None,
    *,
    allocation: Path | None = None,
    evaluation: Document | None = None,
    manifest: Manifest | None = None,
) -> Document:
    """Document of a report on the artifact at `root`, for `page` and programs; deterministic for the same input.

    verification: the document of `hqconv.verify`'s report; None: no check was run. of_experts: layer → projection →
    each expert's relative error against the source, as the check of weights measures it. allocation: the document that
    `hqconv allocate` wrote beside the artifact's recipe. evaluation: the document of `hqconv.evaluate`; None for the
    one in the model card, if there is one. manifest: of the artifact, if it was read before; it was sealed.

    If `verification` failed, unreadable parts are left out, with the reason under `unreadable`. Otherwise raises
    RequestError if `root` is no artifact, VerificationError if it is damaged. Raises RequestError for the document of
    another allocation.
    """
    places = _places(root, verification)
    document: Document = {"kind": "page", "name": root.resolve().name, "verification": _renamed(verification, places)}
    document |= {"artifact": None, "blocks": [], "provenance": {}, "unreadable": []}
    document |= {"allocation": None, "evaluation": None}
    may_fail = verification is not None and not verification["passed"]
    try:
        manifest = manifest or read_manifest(root, is_sealed=not may_fail)
        document["allocation"] = None if allocation is None else read_allocation(allocation, manifest)
        document["artifact"] = describe_artifact(root, manifest=manifest) | _at_home(root, manifest)
        document["blocks"] = [_layer(name, layer, manifest) for name, layer in manifest.blocks.items()]
        document["provenance"] = _provenance(manifest)
        found = evaluation_in_card(root, manifest) if evaluation is None else evaluation
        document["evaluation"] = _renamed(found, places)
    except (VerificationError, OSError) as error:
        if not may_fail:
            raise
        said = error.message() if isinstance(error, HqconvError) else str(error)
        document["unreadable"].append(_renamed(said, places))
    of_experts = {name: roles for name, roles in (of_experts or {}).items() if roles}
    document["experts"] = {"is_measured": bool(of_experts), "worst": _worst(document, of_experts)}
    return document


def read_allocation(path: Path, manifest: Manifest) -> Document:
    """Read the document of an allocation: its budget, its choice, its curve and one schema for all layers.

    Raises RequestError for another kind of file, and where the artifact does not have the chosen schemas and sizes.
    """
    try:
        found = read_json(path)
        if found["kind"] != "allocation":
            raise ValueError("another kind of document")
        points = [found["chosen"], *found["curve"], *found["uniform"].values()]
        keys = ("bits_per_weight", "size_bytes", "token_bytes", "relative_error")
        if not all(math.isfinite(point[key]) for point in points for key in keys):
            raise ValueError("a point without numbers")
        budget = {"limit_bytes": int(found["budget"]["limit_bytes"]), "objective": str(found["budget"]["objective"])}
        chosen = {name: layer["candidates"][layer["chosen"]] for name, layer in found["layers"].items()}
        promised = {name: (one["schema"], one["size_bytes"]) for name, one in chosen.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            "The allocation cannot be read.",
            where=str(path),
            expected="the .allocation.json file of hqconv allocate",
            found=f"no key {error}" if isinstance(error, KeyError) else str(error),
        ) from error
    written = {name: _schema_and_size(name, layer, manifest) for name, layer in manifest.blocks.items()}
    if promised != written:
        other = next(name for name in {**written, **promised} if written.get(name) != promised.get(name))
        raise RequestError(
            "The allocation is not the one of this artifact.",
            where=f"{path}, {other}",
            expected=_schema_text(written.get(other)),
            found=_schema_text(promised.get(other)),
            remedy="Name the file beside the recipe of this artifact.",
        )
    more = {key: found[key] for key in ("chosen", "curve", "uniform")}
    return {**more, "budget": budget, "least_possible_error": float(found["least_possible_error"])}


def _schema_and_size(name: str, layer: ManifestLayer, manifest: Manifest) -> tuple[str | None, int]:
    """Return the schema of a layer, and the bytes of its files."""
    paths = (rank_file(name, *rank) for rank in manifest.grid.ranks)
    sizes = (manifest.files[path].size_bytes for path in paths if path in manifest.files)
    return layer.schema_name or manifest.schema_name, sum(sizes)


def _schema_text(found: tuple[str | None, int] | None) -> str:
    return "no such layer" if found is None else f"{found[0]}, {found[1]} bytes"


def _renamed(document: Any, places: Mapping[str, str]) -> Any:
    """Replace folders of this machine by names in a document, since a page is read elsewhere. `places`: path → name."""
    if isinstance(document, str):
        for path, name in places.items():
            document = document.replace(path, name)
        return document
    if isinstance(document, Mapping):
        return {_renamed(key, places): _renamed(value, places) for key, value in document.items()}
    return [_renamed(one, places) for one in document] if isinstance(document, list) else document


def _places(root: Path, verification: Document | None) -> dict[str, str]:
    """Folders of the artifact and of the source that appear as absolute paths, with their names."""
    source = (verification or {}).get("source")
    paths = [root.resolve(), root, *([Path(source).resolve(), Path(source)] if source else [])]
    return {str(path): path.name for path in paths if path.is_absolute() and path.name and path.is_dir()}


def _at_home(root: Path, manifest: Manifest) -> Document:
    """Entries with the folder's name only: the folder, and the command that serves it."""
    name, heads = root.resolve().name, attention_heads(config_of(root))
    return {"folder": name, "serve_command": ENGINE.serve_command(name, manifest.layout, manifest.grid, heads)}


def _layer(name: str, layer: ManifestLayer, manifest: Manifest) -> Document:
    """Document of one layer: its number, its schema, and the errors that the conversion measured."""
    return {
        "name": name,
        "layer": layer.layer,
        "num_experts": layer.num_experts,
        "schema": layer.schema_name or manifest.schema_name,
        "conversion": layer.conversion,
        "errors": layer.errors(),
    }


def _provenance(manifest: Manifest) -> Document:
    """Document of the source and its files, ancestor artifacts, and the versions that wrote the artifact."""
    source = manifest.source
    return {
        "source": {"name": source.name, "revision": source.revision, "index_sha256": source.index_sha256},
        "source_files": [one.to_dict() for one in source.files],
        "digest": manifest.digest,
        "derived_from": [one.to_dict() for one in manifest.ancestors],
        "family_chosen_because": manifest.family_chosen_because,
        "files": [{"name": name, **entry.to_dict()} for name, entry in manifest.files.items()],
    }


def _worst(document: Document, of_experts: OfExperts) -> list[Document]:
    """Experts with the largest errors; without the source the worst one of each layer and projection."""
    found: list[Document] = [
        {"block": name, "projection": role, "expert": expert, "relative_error": value}
        for name, roles in of_experts.items()
        for role, errors in roles.items()
        for expert, value in enumerate(errors)
    ] or [
        {
            "block": layer["name"],
            "projection": role,
            "expert": error["worst_expert"],
            "relative_error": error["worst_relative_error"],
        }
        for layer in document["blocks"]
        for role, error in layer["errors"].items()
        if "worst_expert" in error and "worst_relative_error" in error
    ]
    found = [one for one in found if one["relative_error"] != 0]
    found.sort(key=lambda one: -_rank(one["relative_error"]))
    return found[:NUM_WORST]


def _rank(value: float) -> float:
    """Sort key of an error: values that are no number rank as the worst."""
    return math.inf if math.isnan(value) else value
