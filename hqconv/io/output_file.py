"""The rule for every file that a command writes outside of its artifact: checked before any work."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hqconv.errors import OutputError
from hqconv.schemas.untrusted_files import open_regular, what_instead

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
        found = _obstacle(path, place, kind, folders)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a circle of links, a name that no file can have
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


def _obstacle(path: Path, place: Path, kind: FileKind, folders: Iterable[Path]) -> str | None:
    for folder in folders:
        if place.is_relative_to(folder.resolve()):
            return f"a path inside {folder}"
    if path.exists():  # through links, also those of /proc/self/fd, which lead to no name
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return what_instead(status.st_mode)
        if _is_standard_stream(status):
            return "a file that is the input, the output or the error stream of this process"
        with open(open_regular(place), "rb") as file:  # noqa: PTH123
            head = file.read(_HEAD_BYTES)
        if head and not kind.has_head(head):
            return f"a file that is not {kind.name}"
    if not os.access(place.parent, os.W_OK | os.X_OK):
        return (
            f"a folder that cannot be written: {place.parent}"
            if place.parent.is_dir()
            else "no such folder"
        )
    return None


def _is_standard_stream(status: os.stat_result) -> bool:
    """Return whether a redirection of the shell reads or writes the file, as /dev/stdout may tell."""
    for descriptor in range(3):
        with suppress(OSError):  # closed by the shell
            if os.path.samestat(os.fstat(descriptor), status):
                return True
    return False
