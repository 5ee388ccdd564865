"""Push an artifact to a repo of the Hub: one commit adds its files, and removes those of an older artifact alone.

Every state of the branch holds the old artifact or the new one, each complete. Files of others stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import Manifest, read_manifest
from hqconv.artifact.model_card import read_evaluation, sums_bytes
from hqconv.artifact.reference_predictions import has_reference
from hqconv.errors import OutputError, RequestError, VerificationError, first_few, plural
from hqconv.io import hub
from hqconv.io.durable_files import output_errors, size_of
from hqconv.io.file_access import sha256_of
from hqconv.io.hub import Listing
from hqconv.schemas.artifact_names import CARD, COMPANIONS, EVALUATION, MANIFEST, REFERENCE, SUMS


@dataclass(frozen=True)
class PushReport:
    """Result of a push. num_files, num_bytes: of the artifact, 0 where the repo held it. commit: the branch's last."""

    out: str
    repo: str
    branch: str | None
    commit: str
    num_files: int
    num_bytes: int
    manifest_sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {"kind": "push", **asdict(self)}


def push(
    root: Path,
    repo_id: str,
    branch: str | None = None,
    *,
    private: bool = False,
    announce: Callable[[str], None] | None = None,
    manifest_sha256: str | None = None,
) -> PushReport:
    """Put the artifact at `root` into a repo's branch; see `hqconv.api.push`.

    manifest_sha256: of the artifact that is meant, where it was verified before.
    """
    manifest = read_manifest(root, is_sealed=True)
    if manifest_sha256 not in (None, manifest.sha256):
        raise OutputError(
            "The artifact was replaced before it was published.",
            where=root,
            expected=f"manifest sha256 {manifest_sha256}",
            found=manifest.sha256,
            remedy="Nothing was published. Run the same command again, when no other process writes to the folder.",
        )
    if missing := manifest.missing_files(lambda name: size_of(root / name)):
        raise VerificationError(
            "The artifact is not whole: files are missing or have another size.",
            where=f"{root}: {first_few(missing)}",
            remedy="Verify it; convert again, or copy it from where it is whole.",
        )
    files: dict[str, bytes | Path] = {}
    with output_errors(root):
        for name in (*manifest.files, MANIFEST):
            path = root / name  # of small files the bytes that are hashed are those that are sent
            files[name] = path if path.suffix == ".safetensors" else path.read_bytes()
        card_sha256 = sha256_of(root / CARD)
        if read_evaluation(root, manifest) is not None:
            files[EVALUATION] = (root / EVALUATION).read_bytes()
        if has_reference(root / REFERENCE, manifest.sha256):
            files[REFERENCE] = root / REFERENCE
    files[SUMS] = sums_bytes(manifest.files, manifest.sha256)
    digests = {name: entry.sha256 for name, entry in manifest.files.items() if name != CARD}

    hub.create_branch(repo_id, branch, private=private)
    before = Listing.of(repo_id, branch)
    published = _manifest_at(before)
    listed = set() if published is None else {*published.files, MANIFEST}
    is_published = published is not None and published.sha256 == manifest.sha256
    if is_published and card_sha256 == manifest.files[CARD].sha256:
        del files[CARD]  # it may have been edited on the Hub
    _check_collisions(before, {*files, ".gitignore"} - listed)
    obsolete = sorted((listed & before.sizes.keys()) - {*files, *COMPANIONS})
    if announce is not None:
        announce(f"hashing and sending {plural(len(files), 'file')}")
    title = f"Artifact {manifest.sha256[:12]}: {manifest.schema_name} of {manifest.source.name}"
    digests[MANIFEST] = manifest.sha256
    commit = hub.commit_files(repo_id, branch, title, files, digests, obsolete, before.commit)
    num_files = 0 if commit == before.commit else len(files)
    num_bytes = sum(entry.size_bytes for entry in manifest.files.values()) if num_files else 0
    return PushReport(str(root), repo_id, branch, commit, num_files, num_bytes, manifest.sha256)


def published_artifact(
    repo_id: str, branch: str | None, *, private: bool
) -> tuple[Manifest, str, dict[str, Any] | None] | None:
    """Return manifest, commit and evaluation of the complete artifact in a repo's branch; None without one.

    The evaluation is None without one that names the manifest's digest. private: refuse a public repo, with
    RequestError.
    """
    if not hub.branch_exists(repo_id, branch):
        return None
    if private:
        hub.check_private(repo_id)
    listing = Listing.of(repo_id, branch)
    manifest = _manifest_at(listing)
    if manifest is None or manifest.alteration is not None or SUMS not in listing.sizes:
        return None
    if manifest.missing_files(listing.sizes.get):
        return None
    for name, entry in manifest.files.items():
        if listing.digests.get(name, entry.sha256) != entry.sha256:
            return None
    evaluation = None
    if EVALUATION in listing.sizes:
        path = hub.fetch_file(repo_id, listing.commit, EVALUATION)
        evaluation = read_evaluation(path.parent, manifest)
    return manifest, listing.commit, evaluation


def _manifest_at(listing: Listing) -> Manifest | None:
    """Read the manifest in a repo; None where there is none, or none of this version that can be read."""
    if MANIFEST not in listing.sizes:
        return None
    try:
        path = hub.fetch_file(listing.repo_id, listing.commit, MANIFEST)
        return read_manifest(path.parent, allow_links=True)
    except (RequestError, VerificationError):
        return None


def _check_collisions(listing: Listing, names: set[str]) -> None:
    """Refuse to replace files of others, and a .gitignore, for which the Hub would leave out files."""
    collisions = sorted((names & listing.sizes.keys()) - {*COMPANIONS})
    if collisions:
        raise OutputError(
            "The repo holds files of others under names that the artifact needs.",
            where=listing.repo_id,
            expected="an empty repo, or an artifact of hqconv",
            found=first_few(collisions),
            remedy="Remove them, or push to another repo or branch.",
        )
