"""The `files` check's look at what lies beside the files of the manifest, and at those that people may edit."""

from __future__ import annotations

from hqconv.artifact.opened import Artifact
from hqconv.artifact.sums import is_own_card, is_own_sums
from hqconv.schemas import artifact as names
from hqconv.verification.result import CheckResult


def check_beside(artifact: Artifact, result: CheckResult) -> None:
    """Nothing lies in the folder that the manifest does not list; links to folders are not looked into.

    What publishing brings along may lie there, and the journal of a conversion that was killed when all was written.
    """
    listed = {names.MANIFEST, *artifact.manifest["files"]}
    paths = artifact.paths()
    tops = {path.split("/")[0] for path in paths} | {path.name for path in artifact.root.iterdir()}
    beside = [name for name in names.COMPANIONS if name not in listed and name in tops]
    others = [name for name in beside if name != names.SUMS]
    if others:
        result.notes.append(f"beside the artifact's own files: {', '.join(others)}")
    _note_edited(artifact, result)
    if names.JOURNAL in paths:
        result.notes.append(
            "a killed conversion left its journal: repeat its command with --resume to tidy up"
        )
    listed |= {names.JOURNAL}
    for path in paths:
        if path.split("/")[0] in beside or names.is_member_journal(path):
            continue
        inside = (
            any(file.startswith(f"{path}/") for file in listed) if (artifact.root / path).is_dir() else False
        )
        if path not in listed and not inside:
            result.add(path, "A file is not in the manifest.", "no such file", "present")


def _note_edited(artifact: Artifact, result: CheckResult) -> None:
    """A model card that people edited, and sums that are not of this manifest: no faults, and said."""
    root, files = artifact.root, artifact.manifest["files"]
    if names.CARD in files and (root / names.CARD).is_file() and not is_own_card(root, files):
        result.notes.append(f"{names.CARD} was edited since the conversion")
    if names.SUMS not in files and (root / names.SUMS).is_file() and not is_own_sums(root, files):
        result.notes.append(f"{names.SUMS} does not say what the manifest does")
