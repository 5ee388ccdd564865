"""The schema files and recipes that come with hqconv: `configs/` of the repository, in the wheel beside this file."""

from __future__ import annotations

import os
from pathlib import Path

SCHEMAS = Path(__file__).parent / "configs"
RECIPES = SCHEMAS / "recipes"


def shipped(folder: Path) -> dict[str, str]:
    """File name → what it is for, of the files in `SCHEMAS` or `RECIPES`: their first line, a comment."""
    return {path.name: _first_line(path) for path in sorted(folder.glob("*.toml"))}


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()


def or_shipped(path: Path, folder: Path) -> Path:
    """The file of that name in `folder`, where `path` is a bare name and nothing is there; else `path` as it is.

    The ending `.toml` may be left out. A file of one's own wins, also one that cannot be read.
    """
    name = path.name if path.suffix == ".toml" else f"{path.name}.toml"
    is_bare = os.path.basename(path) == str(path) != ""  # noqa: PTH119 - of `~` and `..`, too
    if is_bare and not os.path.lexists(path) and name in shipped(folder):
        return folder / name
    return path
