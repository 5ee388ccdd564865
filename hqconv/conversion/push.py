"""Push an artifact to a repo of the Hub: large files are uploaded first, then one commit changes the branch.

Every state of the branch holds the old artifact or the new one, each complete. The commit adds the new files and
removes those that only the old artifact lists. Files of others are never removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import Manifest, read_manifest
from hqconv.artifact.model_card import is_own_card, read_evaluation, sums_bytes
from hqconv.errors import OutputError, RequestError, VerificationError, first_few, plural
from hqconv.io.file_access import sha256_of
from hqconv.io.hub_upload import BranchFiles, FileToSend, HubBranch
from hqconv.schemas.artifact_names import CARD, COMPANIONS, EVALUATION, MANIFEST, SUMS

_MAX_FILES, _MAX_BYTES = 50, 20 << 30  # of one upload; uploaded files are not sent again


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


def push(
    root: Path,
    repo: HubBranch,
    *,
    private: bool = False,
    announce: Callable[[str], None] | None = None,
    manifest_sha256: str | None = None,
) -> PushReport:
    """Put the artifact at `root` into the repo's branch; see `hqconv.api.push`.

    manifest_sha256: of the artifact that is meant, where it was verified before.
    """
    manifest = read_manifest(root, is_sealed=True)
    check_same_artifact(root, manifest_sha256 or manifest.sha256, manifest.sha256)
    files = _files_to_send(root, manifest)
    repo.create(private=private)
    state = repo.state()
    before = _listed(repo, state)
    _check_strays(repo, state, {*before, *(file.name for file in files)})
    is_same = files[-1].is_at(state.files.get(MANIFEST))
    # A card that was edited on the Hub stays; a card that was edited here is sent.
    keeps_card = is_same and CARD in state.files and is_own_card(root, manifest)
    wanted = [file for file in files if file.name != CARD or not keeps_card]
    missing = [file for file in wanted if not file.is_at(state.files.get(file.name))]
    obsolete = sorted((before & state.files.keys()) - {file.name for file in files})
    commit, num_bytes = state.commit, 0
    if missing or obsolete:
        operations = []
        for batch in _batches(missing):
            if announce is not None:
                announce(
                    f"sending {plural(len(batch), 'file')}: {first_few([file.name for file in batch])}"
                )
            operations += repo.prepare(batch)
            num_bytes += sum(file.size_bytes for file in batch)
        _manifest_bytes(root, manifest)  # refuses an artifact that was replaced during the uploads
        title = f"Artifact {manifest.sha256[:12]}: {manifest.schema_name} of {manifest.source.name}"
        commit = _commit(repo, title, operations, obsolete, state.commit, files)
        _check_arrived(repo, commit, wanted)
    return PushReport(
        str(root), repo.repo_id, repo.branch, commit, len(missing), num_bytes, manifest.sha256
    )


def published_manifest(
    repo: HubBranch, planned: Collection[str], *, private: bool
) -> tuple[Manifest, str] | None:
    """Return the manifest of the complete artifact in a repo's branch, and the branch's commit; None without one.

    planned: files of the artifact that would be pushed. private: refuse a public repo, with RequestError.
    Raises OutputError for files of others, which a push would refuse after all the work.
    """
    if not repo.exists(private=private):
        return None
    state = repo.state()
    _check_strays(repo, state, {*_listed(repo, state), *planned})
    manifest = _manifest_at(repo, state)
    if manifest is None or manifest.alteration is not None or SUMS not in state.files:
        return None
    for name, entry in manifest.files.items():
        remote = state.files.get(name)
        if remote is None:
            return None
        if name == CARD:  # people may edit it
            continue
        # A file outside of LFS is small, and is downloaded for its digest.
        if entry.sha256 != (
            remote.digest if remote.is_lfs else sha256_of(repo.read(name, state.commit))
        ):
            return None
    return manifest, state.commit


def published_evaluation(repo: HubBranch, manifest: Manifest) -> dict[str, Any] | None:
    """Return the evaluation in a repo's branch; None without one that names the manifest's digest."""
    state = repo.state()
    if EVALUATION not in state.files:
        return None
    return read_evaluation(repo.read(EVALUATION, state.commit).parent, manifest)


def _commit(
    repo: HubBranch,
    title: str,
    operations: Sequence[Any],
    obsolete: Sequence[str],
    parent: str,
    files: Sequence[FileToSend],
) -> str:
    """Make the commit; return its hash, or that of another commit that has the same files by now.

    Another push of the artifact may have been faster, or the answer to a repeated request got lost.
    """
    try:
        return repo.commit(title, operations, obsolete, parent)
    except RequestError:
        state = repo.state()
        is_there = all(file.is_at(state.files.get(file.name)) for file in files)
        if state.commit == parent or not is_there or state.files.keys() & set(obsolete):
            raise
        return state.commit


def _files_to_send(root: Path, manifest: Manifest) -> list[FileToSend]:
    """Return every file of the artifact, the manifest last. Those that may be edited or are made here are in memory.

    Raises VerificationError where one is missing or has another size.
    """
    files = []
    for name, entry in manifest.files.items():
        path = root / name
        found = "no such file" if not path.is_file() else f"{path.stat().st_size} bytes"
        if name != CARD and found != f"{entry.size_bytes} bytes":
            what, remedy = (
                "The artifact is not whole.",
                "Verify it; convert again, or copy it from where it is whole.",
            )
            expected = f"{entry.size_bytes} bytes"
            raise VerificationError(
                what, where=str(path), expected=expected, found=found, remedy=remedy
            )
        if name != CARD:
            files.append(FileToSend(name, entry.sha256, entry.size_bytes, path))
    if (root / CARD).is_file():
        files.append(FileToSend.of_bytes(CARD, root / CARD, (root / CARD).read_bytes()))
    if read_evaluation(root, manifest) is not None:
        path = root / EVALUATION
        files.append(FileToSend.of_bytes(EVALUATION, path, path.read_bytes()))
    if SUMS not in manifest.files:
        sums = sums_bytes(manifest.files, manifest.sha256)
        files.append(FileToSend.of_bytes(SUMS, root / SUMS, sums))
    return [*files, FileToSend.of_bytes(MANIFEST, root / MANIFEST, _manifest_bytes(root, manifest))]


def _manifest_bytes(root: Path, manifest: Manifest) -> bytes:
    """Return the manifest's bytes. Raises OutputError if the artifact was replaced since its manifest was read."""
    data = b""
    try:
        data = (root / MANIFEST).read_bytes()
        found = hashlib.sha256(data).hexdigest()
    except OSError as error:
        found = error.strerror or str(error)
    check_same_artifact(root, manifest.sha256, found)
    return data


def check_same_artifact(root: Path, expected: str, found: str | None) -> None:
    """Raise OutputError where a step finds the manifest of another artifact than the step before."""
    if found != expected:
        raise OutputError(
            "The artifact was replaced before it was published.",
            where=str(root),
            expected=f"manifest sha256 {expected}",
            found=found,
            remedy="Nothing was published. Run the same command again, when no other process writes to the folder.",
        )


def _listed(repo: HubBranch, state: BranchFiles) -> set[str]:
    """Return the files of the artifact in the repo; none where there is none, or its manifest is unreadable."""
    manifest = _manifest_at(repo, state)
    return {MANIFEST} if manifest is None else {*manifest.files, SUMS, MANIFEST}


def _manifest_at(repo: HubBranch, state: BranchFiles) -> Manifest | None:
    """Read the manifest in the repo; None where there is none, or none of this version that can be read."""
    if MANIFEST not in state.files:
        return None
    try:
        return read_manifest(repo.read(MANIFEST, state.commit).parent, allow_links=True)
    except (RequestError, VerificationError):
        return None


def _check_strays(repo: HubBranch, state: BranchFiles, known: set[str]) -> None:
    """Refuse a repo with foreign files, which would make the artifact fail its verification."""
    strays = sorted(
        name
        for name in state.files
        if name not in known and name.partition("/")[0] not in COMPANIONS
    )
    if strays:
        raise OutputError(
            "The repo holds files that are not the artifact's.",
            where=str(repo),
            expected="an empty repo, or an artifact of hqconv",
            found=first_few(strays),
            remedy="Remove them, or push to another repo or branch.",
        )


def _batches(files: Sequence[FileToSend]) -> Iterator[list[FileToSend]]:
    """Yield the files of each upload: the small ones first, so that a refusal of the Hub comes early."""
    batch: list[FileToSend] = []
    num_bytes = 0
    for file in sorted(files, key=lambda file: (file.name.endswith(".safetensors"), file.name)):
        if batch and (len(batch) >= _MAX_FILES or num_bytes + file.size_bytes > _MAX_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(file)
        num_bytes += file.size_bytes
    if batch:
        yield batch


def _check_arrived(repo: HubBranch, commit: str, files: Sequence[FileToSend]) -> None:
    """Compare the commit's files with those that were sent, as the Hub lists them. Raises VerificationError."""
    state = repo.state()
    if state.commit != commit:  # somebody else's commit followed
        return
    wrong = [file.name for file in files if not file.is_at(state.files.get(file.name))]
    if wrong:
        what = "The Hub lists other bytes for a file than were sent."
        remedy = "Push again; if this stays so, tell the people who run the Hub."
        raise VerificationError(what, where=f"{repo.repo_id}: {first_few(wrong)}", remedy=remedy)
