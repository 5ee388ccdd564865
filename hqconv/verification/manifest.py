"""The `files` check's look at the manifest as a file: its digest, and words that nothing else is compared with."""

from __future__ import annotations

from hqconv.artifact.lineage import DERIVED, is_lineage
from hqconv.artifact.opened import Artifact
from hqconv.artifact.own_digest import DIGEST, alteration
from hqconv.checkpoint.loose import WEIGHT_FOLDERS, WEIGHT_SUFFIXES
from hqconv.schemas import artifact as names
from hqconv.verification.result import CheckResult


def check_manifest(artifact: Artifact, result: CheckResult) -> None:
    """The manifest's bytes are those of its digest, it lists no stray weights, and its worst experts can be."""
    _check_digest(artifact, result)
    _check_listed(artifact, result)
    warnings = artifact.manifest.get("warnings", [])
    if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
        where = f"{names.MANIFEST}: warnings"
        result.add(where, "The manifest's warnings are no sentences.", "a list of them", repr(warnings)[:80])
    if not is_lineage(artifact.manifest.get(DERIVED, [])):
        where, found = f"{names.MANIFEST}: {DERIVED}", repr(artifact.manifest[DERIVED])[:80]
        result.add(
            where, "The manifest does not say where the artifact comes from.", "a list of artifacts", found
        )
    for name, block in artifact.blocks.items():
        for role, error in block["quantization_error"].items():
            worst = error.get("worst_expert") if isinstance(error, dict) else None
            if type(worst) is not int or not 0 <= worst < block["num_experts"]:
                where = f"{names.MANIFEST}: {name}: quantization_error: {role}: worst_expert"
                result.add(where, "The worst expert is none of the block's.", "one of them", repr(worst)[:80])


def _check_digest(artifact: Artifact, result: CheckResult) -> None:
    """Older manifests have no digest."""
    wrong = alteration((artifact.root / names.MANIFEST).read_bytes(), artifact.manifest)
    if wrong is not None:
        result.add(f"{names.MANIFEST}: {DIGEST}", *wrong)
    elif DIGEST not in artifact.manifest:
        result.notes.append(
            "the manifest has no digest of itself, as of an older hqconv: words that nothing else tells may differ"
        )


def _check_listed(artifact: Artifact, result: CheckResult) -> None:
    """Weights are in shards, rank files (which are looked at with the blocks) and the importance file, nowhere else."""
    is_kernel = artifact.manifest["layout"] == names.KERNEL
    for path in artifact.manifest["files"]:
        is_weights = path.endswith((*WEIGHT_SUFFIXES, ".index.json")) or path.split("/")[0] in WEIGHT_FOLDERS
        is_own = path in (names.INDEX, names.IMPORTANCE) or artifact.is_shard(path)
        is_ranks = is_kernel and "/" in path and path.endswith(".safetensors")
        if is_weights and not (is_own or is_ranks):
            result.add(path, "The manifest lists weights where no artifact has any.", "not listed", "listed")
