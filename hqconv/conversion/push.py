"""Puts an artifact into a repo of the Hub, its manifest last: what was sent half is no artifact there either.

An artifact that is there already is no longer one from the first commit on: that takes its manifest away, and the files
which only it has. Files of nobody's manifest are never removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.sha256sums import is_own_card
from hqconv.errors import HqconvError, OutputError, RequestError, VerificationError, first_few
from hqconv.io.digests import sha256_of
from hqconv.io.hub_upload import BranchFiles, HubBranch
from hqconv.schemas.artifact_names import CARD, COMPANIONS, MANIFEST, SUMS

_MAX_FILES, _MAX_BYTES = 50, 20 << 30  # of a commit; what a commit has is not sent again


@dataclass(frozen=True)
class PushReport:
    """What a push did. num_files, num_bytes: that were sent, 0 where all was there. commit: the branch's last."""

    out: str
    repo: str
    branch: str | None
    commit: str
    num_files: int
    num_bytes: int
    manifest_sha256: str

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON words."""
        return {"kind": "push", **asdict(self)}

    def words(self) -> dict[str, Any]:
        """`to_dict`, by its name of version 0.1."""
        return self.to_dict()


def push(
    root: Path, repo: HubBranch, *, private: bool = False, announce: Callable[[str], None] | None = None
) -> PushReport:
    """Put the artifact at `root` into the repo's branch; see `hqconv.api.push`."""
    digests = _digests(root)
    manifest = sha256_of(root / MANIFEST)
    repo.create(private=private)
    state = repo.state()
    is_same = MANIFEST in state.files and state.files[MANIFEST].holds(root / MANIFEST, manifest)
    before = set(digests) if is_same else _listed(repo, state)
    _check_strays(repo, state, {*digests, *before})
    # One that was edited there stays, one that was edited here is sent.
    keeps_card = is_same and is_own_card(root, read_manifest(root)["files"])
    missing = _missing(root, state, digests, keeps_card=keeps_card)
    obsolete = sorted((before & state.files.keys()) - digests.keys())
    if is_same and not missing:
        return PushReport(str(root), repo.repo_id, repo.branch, state.commit, 0, 0, manifest)
    if MANIFEST in state.files:
        repo.commit("Take the old artifact away", {}, [MANIFEST, *obsolete])
    for batch in _batches(root, missing):
        if announce is not None:
            announce(f"sending {len(batch)} files: {first_few(list(batch))}")
        repo.commit(f"Add {len(batch)} files of an artifact", batch)
    state = repo.state()
    _check_arrived(repo, root, state, digests, keeps_card=keeps_card)
    commit = repo.commit(
        "Add the manifest: the artifact is whole", {MANIFEST: root / MANIFEST}, (), state.commit
    )
    num_bytes = sum((root / name).stat().st_size for name in (*missing, MANIFEST))
    return PushReport(str(root), repo.repo_id, repo.branch, commit, len(missing) + 1, num_bytes, manifest)


def _digests(root: Path) -> dict[str, str]:
    """Every file to send but the manifest, with its SHA-256; of those that people may edit as they are now.

    Raises VerificationError where one is missing or has another size, RequestError where there is no artifact.
    """
    files = read_manifest(root)["files"]
    digests = {}
    for name, words in files.items():
        path = root / name
        found = "no such file" if not path.is_file() else f"{path.stat().st_size} bytes"
        if name != CARD and found != f"{words['size_bytes']} bytes":
            what, remedy = (
                "The artifact is not whole.",
                "Verify it; convert again, or copy it from where it is whole.",
            )
            expected = f"{words['size_bytes']} bytes"
            raise VerificationError(what, where=str(path), expected=expected, found=found, remedy=remedy)
        digests[name] = words["sha256"]
    return digests | {name: sha256_of(root / name) for name in (CARD, SUMS) if (root / name).is_file()}


def _listed(repo: HubBranch, state: BranchFiles) -> set[str]:
    """The files of the artifact that is in the repo by now; none where there is none, or nobody can tell."""
    if MANIFEST not in state.files:
        return set()
    try:
        return {*read_manifest(repo.read(MANIFEST, state.commit).parent)["files"], SUMS}
    except (RequestError, VerificationError):  # of a newer hqconv, or damaged
        return set()


def _check_strays(repo: HubBranch, state: BranchFiles, known: set[str]) -> None:
    """Refuse a repo whose other files would be taken for the artifact's, or make it fail its verification."""
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
    """What the repo has not yet, or otherwise; keeps_card: a card that is there stays."""
    return [
        name
        for name, sha256 in digests.items()
        if name not in state.files
        or not ((name == CARD and keeps_card) or state.files[name].holds(root / name, sha256))
    ]


def _batches(root: Path, names: list[str]) -> Iterator[dict[str, Path]]:
    """Files commit by commit: the small ones first, so that what the Hub refuses is refused early."""
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
    """Before the manifest is sent: the repo has every file, with the bytes that the manifest lists."""
    wrong = _missing(root, state, digests, keeps_card=keeps_card)
    if wrong:
        is_there = wrong[0] in state.files
        what = (
            "A file arrived with other bytes than the manifest lists."
            if is_there
            else "The repo did not take a file."
        )
        remedy = (
            "Verify the artifact, then push again."
            if is_there
            else "Look for a .gitignore in the repo, then push again."
        )
        kind: type[HqconvError] = VerificationError if is_there else OutputError
        raise kind(what, where=f"{repo.repo_id}: {first_few(wrong)}", remedy=remedy)
