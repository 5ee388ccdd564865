"""Push an artifact to a repo of the Hub, its manifest last, so that a partial upload is not taken for an artifact.

The first commit removes the manifest of an older artifact in the repo, and the files that only that one lists. Other
files are never removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import Manifest, read_manifest
from hqconv.artifact.sha256sums import is_own_card
from hqconv.errors import HqconvError, OutputError, RequestError, VerificationError, first_few
from hqconv.io.file_access import sha256_of
from hqconv.io.hub_upload import BranchFiles, HubBranch
from hqconv.schemas.artifact_names import CARD, COMPANIONS, MANIFEST, SUMS

_MAX_FILES, _MAX_BYTES = 50, 20 << 30  # of a commit; committed files are not sent again


@dataclass(frozen=True)
class PushReport:
    """The result of a push. num_files, num_bytes: sent, 0 where the repo was complete. commit: the branch's last."""

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

    def words(self) -> dict[str, Any]:
        """`to_dict` under its name of version 0.1."""
        return self.to_dict()


def push(
    root: Path, repo: HubBranch, *, private: bool = False, announce: Callable[[str], None] | None = None
) -> PushReport:
    """Put the artifact at `root` into the repo's branch; see `hqconv.api.push`."""
    manifest = read_manifest(root)
    digests = _digests(root, manifest)
    repo.create(private=private)
    state = repo.state()
    is_same = MANIFEST in state.files and state.files[MANIFEST].holds(root / MANIFEST, manifest.sha256)
    before = set(digests) if is_same else _listed(repo, state)
    _check_strays(repo, state, {*digests, *before})
    # One that was edited there stays, one that was edited here is sent.
    keeps_card = is_same and is_own_card(root, manifest)
    missing = _missing(root, state, digests, keeps_card=keeps_card)
    obsolete = sorted((before & state.files.keys()) - digests.keys())
    if is_same and not missing:
        return PushReport(str(root), repo.repo_id, repo.branch, state.commit, 0, 0, manifest.sha256)
    if MANIFEST in state.files:
        repo.commit("Take the old artifact away", {}, [MANIFEST, *obsolete])
    for batch in _batches(root, missing):
        if announce is not None:
            announce(f"sending {len(batch)} files: {first_few(list(batch))}")
        repo.commit(f"Add {len(batch)} files of an artifact", batch)
    state = repo.state()
    _check_arrived(repo, root, state, digests, keeps_card=keeps_card)
    commit = repo.commit("Add the manifest: the artifact is whole", {MANIFEST: root / MANIFEST}, (), state.commit)
    num_bytes = sum((root / name).stat().st_size for name in (*missing, MANIFEST))
    return PushReport(str(root), repo.repo_id, repo.branch, commit, len(missing) + 1, num_bytes, manifest.sha256)


def _digests(root: Path, manifest: Manifest) -> dict[str, str]:
    """Return every file to send but the manifest, with its SHA-256; files that people may edit in their present state.

    Raises VerificationError where one is missing or has another size.
    """
    digests = {}
    for name, entry in manifest.files.items():
        path = root / name
        found = "no such file" if not path.is_file() else f"{path.stat().st_size} bytes"
        if name != CARD and found != f"{entry.size_bytes} bytes":
            what, remedy = (
                "The artifact is not whole.",
                "Verify it; convert again, or copy it from where it is whole.",
            )
            expected = f"{entry.size_bytes} bytes"
            raise VerificationError(what, where=str(path), expected=expected, found=found, remedy=remedy)
        digests[name] = entry.sha256
    return digests | {name: sha256_of(root / name) for name in (CARD, SUMS) if (root / name).is_file()}


def _listed(repo: HubBranch, state: BranchFiles) -> set[str]:
    """Return the files of the artifact in the repo; none where there is none, or its manifest is unreadable."""
    if MANIFEST not in state.files:
        return set()
    try:
        return {*read_manifest(repo.read(MANIFEST, state.commit).parent).files, SUMS}
    except (RequestError, VerificationError):  # of a newer hqconv, or damaged
        return set()


def _check_strays(repo: HubBranch, state: BranchFiles, known: set[str]) -> None:
    """Refuse a repo with foreign files, which would make the artifact fail its verification."""
    strays = sorted(name for name in state.files if name not in {MANIFEST, *known} and name not in COMPANIONS)
    if strays:
        raise OutputError(
            "The repo holds files that are not the artifact's.",
            where=repo.repo_id + (f", branch {repo.branch}" if repo.branch else ""),
            expected="an empty repo, or an artifact of hqconv",
            found=first_few(strays),
            remedy="Remove them, or push to another repo or branch.",
        )


def _missing(root: Path, state: BranchFiles, digests: Mapping[str, str], *, keeps_card: bool) -> list[str]:
    """Return the files that the repo lacks or has with other bytes; keeps_card: a card in the repo stays."""
    return [
        name
        for name, sha256 in digests.items()
        if name not in state.files
        or not ((name == CARD and keeps_card) or state.files[name].holds(root / name, sha256))
    ]


def _batches(root: Path, names: list[str]) -> Iterator[dict[str, Path]]:
    """Yield the files of each commit: the small ones first, so that a refusal of the Hub comes early."""
    batch: dict[str, Path] = {}
    num_bytes = 0
    for name in sorted(names, key=lambda name: (name.endswith(".safetensors"), name)):
        size = (root / name).stat().st_size
        if batch and (len(batch) >= _MAX_FILES or num_bytes + size > _MAX_BYTES):
            yield batch
            batch, num_bytes = {}, 0
        batch[name] = root / name
        num_bytes += size
    if batch:
        yield batch


def _check_arrived(
    repo: HubBranch, root: Path, state: BranchFiles, digests: Mapping[str, str], *, keeps_card: bool
) -> None:
    """Check that the repo has every file of the manifest with the right bytes, before the manifest is sent."""
    wrong = _missing(root, state, digests, keeps_card=keeps_card)
    if wrong:
        is_there = wrong[0] in state.files
        what = (
            "A file arrived with other bytes than the manifest lists." if is_there else "The repo did not take a file."
        )
        remedy = (
            "Verify the artifact, then push again."
            if is_there
            else "Look for a .gitignore in the repo, then push again."
        )
        kind: type[HqconvError] = VerificationError if is_there else OutputError
        raise kind(what, where=f"{repo.repo_id}: {first_few(wrong)}", remedy=remedy)
