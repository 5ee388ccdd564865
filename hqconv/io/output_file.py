"""The rule for every file that a command writes outside of its artifact: checked before any work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hqconv.errors import OutputError
from hqconv.schemas.untrusted_files import open_regular

_HEAD_BYTES = 512


@dataclass(frozen=True)
class FileKind:
    """A kind of file that hqconv writes: its name for people, and a test of its first bytes."""

    name: str
    has_head: Callable[[bytes], bool]


def output_file(path: Path, option: str, kind: FileKind, folders: Iterable[Path] = ()) -> Path:
    """Return where the file `path` will be written, links followed.

    It is a new file, or replaces a regular file that is empty or of the same kind, and lies in none of `folders`: the
    source and the artifact. Raises OutputError, which names `option`.
    """
    try:
        place = path.resolve()
        found = _obstacle(place, kind, folders)
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a name that no file can have
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if found is None:
        return place
    raise OutputError(
        f"The file of {option} cannot be written there.",
        where=str(path),
        expected=f"a new file, or {kind.name}, outside of source and artifact",
        found=found,
        remedy=f"Name another path with {option}.",
    )


def _obstacle(place: Path, kind: FileKind, folders: Iterable[Path]) -> str | None:
    for folder in folders:
        if place.is_relative_to(folder.resolve()):
            return f"a path inside {folder}"
    if not os.access(place.parent, os.W_OK | os.X_OK):
        return f"a folder that cannot be written: {place.parent}" if place.parent.is_dir() else "no such folder"
    if not os.path.lexists(place):
        return None
    if not place.is_file():
        return "a folder" if place.is_dir() else "a pipe, a device or a socket"
    if _is_standard_stream(place):
        return "a file that is the input, the output or the error stream of this process"
    with open(open_regular(place), "rb") as file:  # noqa: PTH123
        head = file.read(_HEAD_BYTES)
    return f"a file that is not {kind.name}" if head and not kind.has_head(head) else None


def _is_standard_stream(place: Path) -> bool:
    """Return whether a redirection of the shell writes to (or reads from) the file, as with /dev/stdout."""
    for descriptor in range(3):
        try:
            if os.path.samestat(os.fstat(descriptor), place.stat()):
                return True
        except OSError:  # closed by the shell
            continue
    return False
