"""The `files` check of sidecar files: files that the manifest does not list, and files that people may edit."""

from __future__ import annotations

from hqconv.artifact.reader import Artifact
from hqconv.artifact.sha256sums import is_own_card, is_own_sums
from hqconv.io.sidecar_files import WEIGHT_FOLDERS, WEIGHT_SUFFIXES
from hqconv.schemas import artifact_names as names
from hqconv.verification.result import CheckResult


def check_beside(artifact: Artifact, result: CheckResult) -> None:
    """Check that the folder holds no file that the manifest does not list; links to folders are not followed.

    Allowed are files of publishing, and the journal of a conversion that was killed when all was written.
    """
    listed = {names.MANIFEST, *artifact.manifest.files}
    paths = artifact.paths()
    tops = {path.split("/")[0] for path in paths} | {path.name for path in artifact.root.iterdir()}
    beside = [name for name in names.COMPANIONS if name not in listed and name in tops]
    others = [name for name in beside if name != names.SUMS]
    if others:
        result.notes.append(f"beside the artifact's own files: {', '.join(others)}")
    _note_edited(artifact, result)
    if names.JOURNAL in paths:
        result.notes.append("a killed conversion left its journal: repeat its command with --resume to tidy up")
    listed |= {names.JOURNAL}
    for path in paths:
        if path.split("/")[0] in beside or names.is_member_journal(path):
            continue
        inside = any(file.startswith(f"{path}/") for file in listed) if (artifact.root / path).is_dir() else False
        if path not in listed and not inside:
            result.add(path, "A file is not in the manifest.", "no such file", "present")


def _note_edited(artifact: Artifact, result: CheckResult) -> None:
    """Note an edited model card and checksums of another manifest, which are no faults."""
    root, manifest = artifact.root, artifact.manifest
    files = manifest.files
    if names.CARD in files and (root / names.CARD).is_file() and not is_own_card(root, manifest):
        result.notes.append(f"{names.CARD} was edited since the conversion")
    if names.SUMS not in files and (root / names.SUMS).is_file() and not is_own_sums(root, manifest):
        result.notes.append(f"{names.SUMS} does not say what the manifest does")


def check_manifest(artifact: Artifact, result: CheckResult) -> None:
    """Check the manifest: its digest, no stray weights in its list, and worst experts that exist."""
    _check_digest(artifact, result)
    _check_listed(artifact, result)
    for name, layer in artifact.manifest.blocks.items():
        for role, error in layer.quantization_error.items():
            worst = error.worst_expert
            if worst is None or not 0 <= worst < layer.num_experts:
                where = f"{names.MANIFEST}: {name}: quantization_error: {role}: worst_expert"
                result.add(where, "The worst expert is none of the layer's.", "one of them", repr(worst)[:80])


def _check_digest(artifact: Artifact, result: CheckResult) -> None:
    """Check the manifest's digest; older manifests have none."""
    if artifact.manifest.alteration is not None:
        result.add(f"{names.MANIFEST}: digest", *artifact.manifest.alteration)
    elif artifact.manifest.digest is None:
        result.notes.append(
            "the manifest has no digest of itself, as of an older hqconv: words that nothing else tells may differ"
        )


def _check_listed(artifact: Artifact, result: CheckResult) -> None:
    """Check that weights are only in shards, rank files (checked with the layers) and the importance file."""
    for path in artifact.manifest.files:
        is_weights = path.endswith((*WEIGHT_SUFFIXES, ".index.json")) or path.split("/")[0] in WEIGHT_FOLDERS
        is_own = path in (names.INDEX, names.IMPORTANCE) or artifact.is_shard(path)
        is_ranks = artifact.manifest.is_kernel and "/" in path and path.endswith(".safetensors")
        if is_weights and not (is_own or is_ranks):
            result.add(path, "The manifest lists weights where no artifact has any.", "not listed", "listed")
