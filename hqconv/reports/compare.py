"""Comparison of two artifacts of one model: schemas, sizes and quantization errors, as a document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import Manifest, ManifestLayer, read_manifest
from hqconv.errors import InputError, RequestError, VerificationError, first_few
from hqconv.io.safetensors_header import read_header
from hqconv.reports.documents import Words, config_of, describe_artifact
from hqconv.schemas import artifact_names as names
from hqconv.schemas.model_config import attention_heads
from hqconv.serving.chosen_engine import ENGINE

_SIZES = ("num_experts", "hidden_size", "intermediate_size", "gated")
_NUM_WORST = 10  # layers and projections of one artifact
_SAME = ("name", "revision", "index_sha256")
Measured = Mapping[str, Mapping[str, Mapping[str, Any]]]  # layer → projection → figures


def compare(roots: Sequence[Path], measured: Sequence[Measured] | None = None) -> Words:
    """Describe two artifacts, their errors by projection and layer, and the layers that differ most.

    roots: two artifacts. measured: for each, the errors that the check of weights measured against the source; None:
    the errors that the conversions recorded.

    Raises RequestError if one is no artifact, or they are of different models; VerificationError if one is
    damaged. Reads no weights.
    """
    manifests = [read_manifest(root, is_sealed=True) for root in roots]
    described = [describe_artifact(root) for root in roots]
    _check_models(roots, manifests)
    errors = [_recorded(one) for one in manifests] if measured is None else [_measured(one) for one in measured]
    common = [key for key in errors[0] if key in errors[1]]
    sides = zip(roots, manifests, described, errors, strict=True)
    return {
        "kind": "comparison",
        "measured_against_source": measured is not None,
        "artifacts": [_artifact(*side, common) for side in sides],
        "notes": _notes(manifests, errors, common),
        "projections": _projections(errors, common, manifests[0]),
        "blocks": _layers(errors, common),
        **({} if measured is None else {"figures": [_figures(one) for one in measured]}),
    }


def _check_models(roots: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    """Refuse artifacts of different models: missing layers, or layers of other sizes."""
    every = [{*one.blocks, *one.left} for one in manifests]
    where, remedy = f"{roots[0]}, {roots[1]}", "Compare two artifacts of one model."
    what = "The artifacts are of different models."
    if alone := sorted(every[0] ^ every[1]):
        found = f"only in one of them: {first_few(alone)}"
        raise RequestError(what, where=where, expected="the same MoE layers", found=found, remedy=remedy)
    for name, layer in manifests[0].blocks.items():
        other = manifests[1].blocks.get(name)
        sizes = [{key: getattr(one, key) for key in _SIZES} for one in (layer, other) if one]
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            texts = [", ".join(f"{key} {value}" for key, value in one.items()) for one in sizes]
            inside = f"{where}: {name}"
            raise RequestError(what, where=inside, expected=texts[0], found=texts[1], remedy=remedy)


Errors = dict[tuple[str, str], float]  # layer and projection → relative error


def _recorded(manifest: Manifest) -> Errors:
    """Errors that the conversion measured."""
    return {
        (name, role): error.relative_error
        for name, layer in manifest.blocks.items()
        for role, error in layer.quantization_error.items()
        if error.relative_error is not None
    }


def _measured(measured: Measured) -> Errors:
    return {
        (layer, role): math.nan if one["relative_error"] is None else float(one["relative_error"])
        for layer, roles in measured.items()
        for role, one in roles.items()
        if "relative_error" in one
    }


def _artifact(root: Path, manifest: Manifest, described: Words, errors: Errors, common: Sequence[Any]) -> Words:
    """Document of one artifact: schemas, size, serving engine, overall error."""
    keys = ("folder", "layout", "dtype", "input_schema", "target", "tp", "ep", "redundant_experts", "quantizer")
    return {
        **{key: described[key] for key in keys},
        "name": root.resolve().name,
        "schema": described["schema"]["name"],
        "description": described["schema"]["description"],
        "bits_per_weight": described["schema"]["bits_per_weight"],
        "otherwise": described["otherwise"],
        "left_blocks": described["left_blocks"],
        "conversion": described["conversion"],
        "source": described["source"],
        "num_bytes": described["num_bytes"],
        "expert_bytes": _expert_bytes(root, manifest),
        "rank_bytes": described["rank_bytes"],
        "serve_command": described["serve_command"],
        "vllm_obstacles": _obstacles(root, manifest),
        "relative_error": _overall(errors, common, manifest),
        "worst": [
            {"block": layer, "projection": role, "relative_error": errors[layer, role]}
            for layer, role in sorted(common, key=lambda key: -errors[key])[:_NUM_WORST]
        ],
    }


def _expert_bytes(root: Path, manifest: Manifest) -> int:
    """Size of the experts in bytes: whole rank files; in the checkpoint layout the tensors that were not copied.

    Raises VerificationError if a shard's header cannot be read.
    """
    if manifest.is_kernel:
        folder = f"{names.EXPERTS_FOLDER}/"
        return sum(one.size_bytes for name, one in manifest.files.items() if name.startswith(folder))
    copied, total = set(manifest.tensors.copied), 0
    for name in manifest.files:
        if "/" not in name and name.endswith(".safetensors") and name != names.IMPORTANCE:
            try:
                entries = read_header(root / name)[0]
            except InputError as error:
                raise VerificationError(error.what, where=name, expected=error.expected, found=error.found) from error
            total += sum(ref.num_bytes for tensor, ref in entries.items() if tensor not in copied)
    return total


def _obstacles(root: Path, manifest: Manifest) -> list[str]:
    """Known reasons why the engine does not serve an artifact."""
    if manifest.is_kernel:
        counts = [layer.num_experts for layer in manifest.blocks.values()]
        return ENGINE.kernel_layout_obstacles(manifest.family, manifest.grid, attention_heads(config_of(root)), counts)
    schema = manifest.kernel_spec.schema
    reasons = [ENGINE.checkpoint_layout_obstacle(schema, manifest.dtype)]
    reasons += [ENGINE.checkpoint_family_obstacle(manifest.family, name, schema) for name in manifest.blocks]
    return list(dict.fromkeys(reason for reason in reasons if reason))


def _overall(errors: Errors, keys: Sequence[tuple[str, str]], manifest: Manifest) -> float | None:
    """Root mean square of relative errors, each weighted with its number of weights; None without errors."""
    weights = [_num_weights(manifest.blocks[layer]) for layer, _ in keys]
    total = sum(weights)
    squares = math.fsum(weight * errors[key] ** 2 for key, weight in zip(keys, weights, strict=True))
    return math.sqrt(squares / total) if total else None


def _num_weights(layer: ManifestLayer) -> int:
    return layer.num_experts * layer.hidden_size * layer.intermediate_size


def _projections(errors: Sequence[Errors], common: Sequence[tuple[str, str]], manifest: Manifest) -> Words:
    """Error of each artifact by projection, over all layers that both have."""
    roles = list(dict.fromkeys(role for _, role in common))
    of_role = {role: [key for key in common if key[1] == role] for role in roles}
    return {role: [_overall(one, keys, manifest) for one in errors] for role, keys in of_role.items()}


def _layers(errors: Sequence[Errors], common: Sequence[tuple[str, str]]) -> list[Words]:
    """Errors of every layer and projection that both have, sorted by difference, the largest first."""
    found = [
        {
            "block": layer,
            "projection": role,
            "relative_errors": [one[layer, role] for one in errors],
            "difference": errors[1][layer, role] - errors[0][layer, role],
        }
        for layer, role in common
    ]
    return sorted(found, key=lambda one: -abs(one["difference"]))


def _figures(measured: Measured) -> dict[str, Words]:
    """Least SQNR and cosine of any layer by projection, for one artifact; None without quantization error."""
    found: dict[str, Words] = {}
    for roles in measured.values():
        for role, one in roles.items():
            known = found.setdefault(role, {"least_sqnr_db": None, "least_cosine": None})
            for key, name in (("sqnr_db", "least_sqnr_db"), ("cosine", "least_cosine")):
                value = one.get(key)
                if value is not None:
                    known[name] = value if known[name] is None else min(known[name], value)
    return found


def _notes(manifests: Sequence[Manifest], errors: Sequence[Errors], common: Sequence[Any]) -> list[str]:
    """Notes about differences other than the schemas, which limit the comparison."""
    pairs = {key: [getattr(one.source, key) for one in manifests] for key in _SAME}
    notes = [
        f"The sources differ in {key.replace('index_sha256', 'index')}: {pair[0]}, {pair[1]}."
        for key, pair in pairs.items()
        if pair[0] != pair[1]
    ]
    if alone := sorted({layer for one in errors for layer, role in one if (layer, role) not in set(common)}):
        notes.append(f"Left as they are in one of them, and not compared: {first_few(alone)}.")
    return notes
