"""Output file of a report. A file that is not a report of hqconv is never overwritten without an option."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from hqconv.errors import OutputError
from hqconv.reports.page import GENERATOR

_HEAD_BYTES = 512
_MARK = f'<meta name="generator" content="{GENERATOR}">'.encode()


def page_place(root: Path, wanted: Path | None, *, overwrite: bool, option: str = "-o") -> Path:
    """Return the path for a report on the artifact at `root`: `wanted`, or OUT.report.html in the current folder.

    overwrite: allow replacing any file. option: name of the option for the path, used in messages.

    Raises OutputError if another kind of file lies there and `overwrite` is not set, if the path is not a file or its
    folder is not writable, and if `wanted` is None and the current folder lies inside the artifact.
    """
    place = Path(f"{root.resolve().name}.report.html") if wanted is None else wanted
    if wanted is None and Path.cwd().is_relative_to(root.resolve()):
        what, remedy = (
            "The page would lie inside the artifact, where only files of the manifest belong.",
            "Name another path with -o.",
        )
        raise OutputError(what, where=str(place), remedy=remedy)
    if not os.access(place.parent, os.W_OK | os.X_OK):
        found = "a folder that cannot be written" if place.parent.is_dir() else "no such folder"
        what, remedy = "The page cannot be written here.", f"Name another path with {option}."
        raise OutputError(what, where=str(place.parent), found=found, remedy=remedy)
    if not os.path.lexists(place):
        return place
    if not place.is_file():
        what = "The page cannot be written here: the path is not a file."
        raise OutputError(
            what, where=str(place), expected="a file, or nothing", remedy=f"Name another path with {option}."
        )
    if not overwrite and not _is_page(place):
        raise OutputError(
            "The file is not a report of hqconv, and is not overwritten.",
            where=str(place),
            remedy=f"Name another path with {option}, or move the file away.",
        )
    return place


def _is_page(place: Path) -> bool:
    try:
        with place.open("rb") as file:
            return _MARK in file.read(_HEAD_BYTES)
    except OSError:
        return False


def write_page(place: Path, text: str) -> None:
    """Write a page through a temporary file, so that the old file stays until the new one is complete.

    Raises OutputError.
    """
    name = ""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=place.parent, prefix=".hqconv-", delete=False
        ) as file:
            name = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(place)
    except OSError as error:
        if name:
            with suppress(OSError):
                Path(name).unlink()
        what, remedy = ("The page cannot be written.", "Free disk space, repair the folder, or name another path.")
        raise OutputError(what, where=str(place), found=error.strerror or str(error), remedy=remedy) from error


def _umask() -> int:
    """Return the umask of the process, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
