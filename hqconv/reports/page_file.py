"""Where a page goes: never over a file that is not a page of ours, unless that is asked for."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from hqconv.errors import OutputError
from hqconv.reports.page import GENERATOR

_HEAD_BYTES = 512
_MARK = f'<meta name="generator" content="{GENERATOR}">'.encode()


def page_place(root: Path, asked: Path | None, *, overwrite: bool, option: str = "-o") -> Path:
    """The file that a page on the artifact at `root` goes to: as `asked`, or OUT.report.html in the current folder.

    overwrite: replace whatever file lies there. option: which one names the place, for messages.

    Raises OutputError where something else than a page lies there and not `overwrite`, where that is no file or its
    folder cannot be written, and where the current folder is inside the artifact and none was asked for.
    """
    place = Path(f"{root.resolve().name}.report.html") if asked is None else asked
    if asked is None and Path.cwd().is_relative_to(root.resolve()):
        what, remedy = (
            "The page would lie in the artifact, where only its own files belong.",
            "Name a place with -o.",
        )
        raise OutputError(what, where=str(place), remedy=remedy)
    if not os.access(place.parent, os.W_OK | os.X_OK):
        found = "a folder that cannot be written" if place.parent.is_dir() else "no such folder"
        what, remedy = "The page cannot be written here.", f"Name another place with {option}."
        raise OutputError(what, where=str(place.parent), found=found, remedy=remedy)
    if not os.path.lexists(place):
        return place
    if not place.is_file():
        what = "The page cannot be written here: this is no file."
        raise OutputError(
            what, where=str(place), expected="a file, or nothing", remedy=f"Name another place with {option}."
        )
    if not overwrite and not _is_page(place):
        raise OutputError(
            "The file is no page of hqconv's, and stays as it is.",
            where=str(place),
            remedy=f"Name another place with {option}, or move the file away.",
        )
    return place


def _is_page(place: Path) -> bool:
    try:
        with place.open("rb") as file:
            return _MARK in file.read(_HEAD_BYTES)
    except OSError:
        return False


def write_page(place: Path, text: str) -> None:
    """Write a page: the file is whole, or as it was before. Raises OutputError."""
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
        what, remedy = (
            "The page cannot be written.",
            "Free the space or mend the folder, or name another place.",
        )
        raise OutputError(
            what, where=str(place), found=error.strerror or str(error), remedy=remedy
        ) from error


def _umask() -> int:
    """What the process takes off the permissions of its files; there is no way to ask without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
