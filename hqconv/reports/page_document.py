"""What a report says, as JSON words: from the manifest, from experts read back, and from what `verify` found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import Manifest, ManifestLayer, read_manifest
from hqconv.errors import HqconvError, VerificationError
from hqconv.reports.artifact import describe_artifact
from hqconv.reports.documents import Words
from hqconv.schemas.artifact_names import GEMMS
from hqconv.serving.engine import ENGINE

PROJECTIONS = {"w1": "gate (w1)", "w3": "up (w3)", "w2": "down (w2)"}
ROLES = tuple(PROJECTIONS)
NUM_WORST = 12  # experts listed
OfExperts = Mapping[str, Mapping[str, list[float]]]


def page_document(
    root: Path,
    verification: Words | None = None,
    of_experts: OfExperts | None = None,
    *,
    sample: int | None = None,
    num_threads: int = 1,
) -> Words:
    """The words of a report on the artifact at `root`, for `page` and programs; the same input gives the same words.

    verification: the words of `hqconv.verify`'s report; None: no check was run. of_experts: block → projection → each
    expert's relative error against the source, as the check of weights measures it. sample: experts of each block to
    read for `usage`, as in `hqconv.artifact.code_usage`; num_threads: at once.

    Where `verification` failed, what cannot be read is left out, with the reason under `unreadable`. Otherwise raises
    RequestError where `root` is no artifact, VerificationError where it is damaged.
    """
    from hqconv.artifact.code_usage import read_usage  # with numpy

    places = _places(root, verification)
    words: Words = {
        "kind": "page",
        "name": root.resolve().name,
        "verification": _renamed(verification, places),
    }
    words |= {"artifact": None, "blocks": [], "provenance": {}, "usage": None, "unreadable": []}
    may_fail = verification is not None and not verification["passed"]
    try:
        manifest = read_manifest(root)
        words["artifact"] = describe_artifact(root) | _at_home(words["name"], manifest)
        words["blocks"] = [_block(name, layer, manifest) for name, layer in manifest.blocks.items()]
        words["provenance"] = _provenance(manifest)
        words["usage"] = read_usage(root, sample, num_threads)
    except (VerificationError, OSError) as error:
        if not may_fail:
            raise
        said = error.message() if isinstance(error, HqconvError) else str(error)
        words["unreadable"].append(_renamed(said, places))
    words["experts"] = _experts(words, of_experts or {})
    return words


def _renamed(words: Any, places: Mapping[str, str]) -> Any:
    """JSON words with names for folders of this machine, since a page is read on others. `places`: path → name."""
    if isinstance(words, str):
        for path, name in places.items():
            words = words.replace(path, name)
        return words
    if isinstance(words, Mapping):
        return {_renamed(key, places): _renamed(value, places) for key, value in words.items()}
    return [_renamed(one, places) for one in words] if isinstance(words, list) else words


def _places(root: Path, verification: Words | None) -> dict[str, str]:
    """The folders of the artifact and of the source, where they are told by whole paths."""
    source = (verification or {}).get("source")
    paths = [root.resolve(), root, *([Path(source).resolve(), Path(source)] if source else [])]
    return {str(path): path.name for path in paths if path.is_absolute() and path.name and path.is_dir()}


def _at_home(name: str, manifest: Manifest) -> Words:
    """The folder, and how it is served, by its name only."""
    return {"folder": name, "serve_command": ENGINE.serve_command(name, manifest.layout, manifest.grid)}


def _block(name: str, layer: ManifestLayer, manifest: Manifest) -> Words:
    """One layer: its number, its schema, and the errors that the conversion measured."""
    flags = [entry.flags for gemm in GEMMS if (entry := layer.gemm(gemm)) is not None]
    return {
        "name": name,
        "layer": layer.layer,
        "num_experts": layer.num_experts,
        "schema": layer.schema_name or manifest.schema_name,
        "conversion": layer.conversion,
        "has_fused_scales": any(one.get("use_fused_e8m0_scale") is True for one in flags),
        "errors": layer.errors(),
    }


def _provenance(manifest: Manifest) -> Words:
    """The source and its files, the artifacts on the way, and what made the artifact."""
    source, ancestors = manifest.source, manifest.derived_from
    return {
        "source": {"name": source.name, "revision": source.revision, "index_sha256": source.index_sha256},
        "source_files": [one.to_dict() for one in source.files],
        "digest": manifest.digest,
        "derived_from": None if ancestors is None else [one.to_dict() for one in ancestors],
        "family_chosen_because": manifest.family_chosen_because,
        "warnings": list(manifest.warnings or ()),
        "files": [{"name": name, **entry.to_dict()} for name, entry in manifest.files.items()],
    }


def _experts(words: Words, of_experts: OfExperts) -> Words:
    """What can be told of single experts: errors where the source was there, else the size of their weights.

    `values`: projection → a row for each block, a number for each expert, None where nothing is known.
    """
    usage = words["usage"] or {"rms": {}}
    measure = "relative error" if of_experts else "root mean square"
    table: Mapping[str, Mapping[str, list[Any]]] = of_experts or usage["rms"]
    names = [block["name"] for block in words["blocks"] if table.get(block["name"])]
    values = {
        role: [list(table[name].get(role, [])) for name in names]
        for role in ROLES
        if any(table[name].get(role) for name in names)
    }
    return {"measure": measure, "blocks": names, "values": values, "worst": _worst(words, of_experts)}


def _worst(words: Words, of_experts: OfExperts) -> list[Words]:
    """The experts with the largest errors; without the source the worst one of each block and projection."""
    found: list[Words] = [
        {"block": name, "projection": role, "expert": expert, "relative_error": value}
        for name, roles in of_experts.items()
        for role, errors in roles.items()
        for expert, value in enumerate(errors)
    ] or [
        {
            "block": block["name"],
            "projection": role,
            "expert": error["worst_expert"],
            "relative_error": error["worst_relative_error"],
        }
        for block in words["blocks"]
        for role, error in block["errors"].items()
        if "worst_expert" in error and "worst_relative_error" in error
    ]
    found = [one for one in found if one["relative_error"] != 0]
    found.sort(key=lambda one: -_rank(one["relative_error"]))
    return found[:NUM_WORST]


def _rank(value: float) -> float:
    """What is no number is worse than any."""
    return math.inf if math.isnan(value) else value


def entropy_bits(counts: list[int]) -> float:
    """How many bits a code carries on average where codes are as frequent as counted; 0 where there are none."""
    total = sum(counts)
    return sum(-n / total * math.log2(n / total) for n in counts if n)
