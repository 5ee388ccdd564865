"""What lies in an output folder, and what of it may be removed: files that a manifest or a journal lists, no others."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hqconv.artifact.manifest import is_artifact, read_manifest
from hqconv.artifact.sha256sums import are_sums, is_own_card
from hqconv.errors import HqconvError, OutputError, first_few
from hqconv.io.durable_files import output_errors, partial, sync_folders
from hqconv.schemas.artifact_names import (
    CARD,
    COMPANIONS,
    JOURNAL,
    MANIFEST,
    PARTIAL,
    SUMS,
    is_member_journal,
)


def listed_files(root: Path) -> set[str]:
    """The files that an artifact's manifest lists, and its SHA256SUMS; none where there is no manifest.

    Not a model card that somebody edited, nor sums that list no manifest. Raises OutputError where the manifest
    cannot be read: then nobody can tell which files are the artifact's.
    """
    if not is_artifact(root):
        return set()
    try:
        files = read_manifest(root)["files"]
    except HqconvError as error:
        raise OutputError(
            "The manifest of the artifact to replace cannot be read: it must say which files are the artifact's.",
            where=str(root / MANIFEST),
            found=error.what,
            remedy="Choose another folder with -o, or remove this one yourself.",
        ) from error
    with output_errors(root):
        others = {CARD} if CARD in files and not is_own_card(root, files) else set()
        return {MANIFEST, *files, *([SUMS] if are_sums(root) else [])} - others


def files_in(root: Path) -> set[str]:
    """The files, links and empty folders in a folder; what lies below the folders of others that may be there is not
    looked at.
    """
    found = set()
    for folder, folders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        if relative == Path():
            found |= {name for name in folders if name in COMPANIONS}
            folders[:] = [name for name in folders if name not in COMPANIONS]
            names = [name for name in names if not is_member_journal(name)]  # they go with the journal
        found |= {(relative / name).as_posix() for name in (*names, *links)}
        if not names and not folders and relative != Path():
            found.add(relative.as_posix())
    return found


def check_strays(root: Path, listed: Collection[str], planned: Collection[str] = ()) -> None:
    """Refuse to replace a folder that holds files which are neither `listed` nor may lie beside ours.

    Raises OutputError that names them; `planned` are files that the new artifact will have.
    """
    ours = {JOURNAL, MANIFEST, *listed, *(path + PARTIAL for path in listed), *_folders_of(listed)}
    kept = {name for name in COMPANIONS if name not in planned}
    strays = sorted(files_in(root) - ours - kept)
    if strays:
        raise OutputError(
            "The output folder holds files that hqconv did not make.",
            where=str(root),
            expected="nothing but the files that its manifest lists",
            found=first_few(strays),
            remedy="Move the files elsewhere, or choose another folder with -o.",
        )


def check_replaceable(out: Path) -> None:
    """Raises OutputError for an artifact that no other folder can take the place of."""
    if out.is_mount():
        what, remedy = (
            "A mount point cannot be replaced.",
            "Convert to a folder inside it, or empty it yourself.",
        )
        raise OutputError(what, where=str(out), remedy=remedy)


def remove_listed(root: Path, listed: Sequence[str]) -> None:
    """Remove listed files, finished or not, in their order, and the folders that are then empty. What is gone stays so,
    power cut or not.

    Raises OutputError where the system refuses.
    """
    with output_errors(root):
        for path in listed:
            full = root / path
            if not _lies_in(root, path) or (full.is_dir() and not full.is_symlink()):
                continue
            full.unlink(missing_ok=True)
            partial(full).unlink(missing_ok=True)
        for folder in sorted(_folders_of(listed), key=lambda folder: -folder.count("/")):
            if _lies_in(root, folder):
                with suppress(OSError):
                    (root / folder).rmdir()
        left = (root / folder for folder in _folders_of(listed) if _lies_in(root, folder))
        sync_folders(root, [folder for folder in left if folder.is_dir() and not folder.is_symlink()])


def _lies_in(root: Path, path: str) -> bool:
    """Whether a listed path is one of the folder's own; a manifest may say anything."""
    return "\0" not in path and (root / path).parent.resolve().is_relative_to(root.resolve())


def _folders_of(paths: Iterable[str]) -> set[str]:
    """The folders that paths lie in."""
    return {folder.as_posix() for path in paths for folder in Path(path).parents if folder != Path()}
