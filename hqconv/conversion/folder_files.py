"""The files of an output folder: which are hqconv's, which are foreign, and the removal of listed ones alone."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hqconv.artifact.manifest import is_artifact, read_manifest
from hqconv.artifact.sha256sums import are_sums, is_own_card
from hqconv.errors import HqconvError, OutputError, first_few
from hqconv.io.durable_files import output_errors, partial, sync_folders
from hqconv.schemas.artifact_names import CARD, COMPANIONS, JOURNAL, MANIFEST, PARTIAL, SUMS, journal_part


def listed_files(root: Path) -> set[str]:
    """Return the files that an artifact's manifest lists, and SHA256SUMS; none where there is no manifest.

    An edited model card and sums without the manifest are left out. Raises OutputError where the manifest cannot be
    read: then the artifact's files are unknown.
    """
    if not is_artifact(root):
        return set()
    try:
        manifest = read_manifest(root, allow_links=True)  # a link is removed, not its target
    except HqconvError as error:
        raise OutputError(
            "The manifest of the artifact to replace cannot be read: it must say which files are the artifact's.",
            where=str(root / MANIFEST),
            found=error.what,
            remedy="Choose another folder with -o, or remove this one yourself.",
        ) from error
    with output_errors(root):
        others = {CARD} if CARD in manifest.files and not is_own_card(root, manifest, with_evaluation=True) else set()
        return {MANIFEST, *manifest.files, *([SUMS] if are_sums(root) else [])} - others


def files_in(root: Path) -> set[str]:
    """Return the files, links and empty folders in a folder; companion folders such as `.git` are not searched."""
    found = set()
    for folder, folders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        if relative == Path():
            found |= {name for name in folders if name in COMPANIONS}
            folders[:] = [name for name in folders if name not in COMPANIONS]
            names = [name for name in names if not journal_part(name)]  # they go with the journal
        found |= {(relative / name).as_posix() for name in (*names, *links)}
        if not names and not folders and relative != Path():
            found.add(relative.as_posix())
    return found


def check_strays(root: Path, listed: Collection[str], planned: Collection[str] = ()) -> None:
    """Refuse to replace a folder with foreign files: neither `listed` nor companions such as `.gitattributes`.

    planned: files of the new artifact. Raises OutputError that names the foreign files.
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
    """Raise OutputError for an artifact whose folder cannot be exchanged: a mount point."""
    if out.is_mount():
        what, remedy = ("A mount point cannot be replaced.", "Convert to a folder inside it, or empty it yourself.")
        raise OutputError(what, where=str(out), remedy=remedy)


def remove_listed(root: Path, listed: Sequence[str]) -> None:
    """Remove listed files and their partial forms in order, then empty folders, and flush the folders.

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
    """Return whether a listed path lies in the folder; a manifest may hold any path."""
    return "\0" not in path and (root / path).parent.resolve().is_relative_to(root.resolve())


def _folders_of(paths: Iterable[str]) -> set[str]:
    """Return the folders of relative paths."""
    return {folder.as_posix() for path in paths for folder in Path(path).parents if folder != Path()}
