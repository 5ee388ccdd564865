"""Which of a source's other files an artifact can have beside its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from hqconv.errors import InputError
from hqconv.schemas import artifact

_MAX_NAME, _MAX_PATH = 255, 3072  # bytes, of most file systems; of a path with room for that of the output
_OURS = (
    *(artifact.CONFIG, artifact.INDEX, artifact.MANIFEST, artifact.IMPORTANCE, artifact.JOURNAL),
    *(artifact.CARD, artifact.SUMS),
)


def check_loose(other_files: Iterable[str], planned: Collection[str], layout: str) -> None:
    """Refuse a source whose other files would lie where the artifact's own are or come, or have no room for a name.

    planned: the files of tensors. Raises InputError that names the file.
    """
    names = list(other_files)
    taken = {*planned, *_OURS, *(name + artifact.PARTIAL for name in (*planned, *_OURS, *names))}
    # A folder may not lie where any file comes, and a file not where folders of ours come.
    folders = {folder.as_posix() for path in planned for folder in Path(path).parents}
    for path in names:
        above = {folder.as_posix() for folder in Path(path).parents}
        is_theirs = layout == artifact.KERNEL and path.split("/")[0] == artifact.EXPERTS_FOLDER
        if path in taken or path in folders or above & taken or is_theirs:
            what, expected = "A file of the source has a name that the artifact needs.", "another name"
            remedy = "Rename the file, or leave it out of the source."
            raise InputError(what, where=path, expected=expected, remedy=remedy)
        _check_length(path)


def _check_length(path: str) -> None:
    longest = max(len(part.encode()) for part in Path(path + artifact.PARTIAL).parts)
    for num_bytes, most in ((longest, _MAX_NAME), (len(path.encode()), _MAX_PATH)):
        if num_bytes > most:
            what, expected = "The name of a file of the source is too long.", f"at most {most} bytes"
            found = f"{num_bytes} bytes, with {artifact.PARTIAL} while it is written"
            raise InputError(what, where=path, expected=expected, found=found, remedy="Rename the file.")
