"""TOML files that people write: schemas, input schemas and recipes."""

from __future__ import annotations

import errno
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError
from hqconv.schemas.suggestions import close_file
from hqconv.schemas.untrusted_files import read_regular

_MAX_BYTES = 1 << 20  # far more than people write


def read_toml(path: Path, called: str, shipped_names: Iterable[str] = ()) -> dict[str, Any]:
    """Read a TOML file. `called`: its kind, as in the middle of a sentence: `recipe`, `schema file`.

    shipped_names: files of the package, one of which may have been meant by a name that does not exist.
    Raises RequestError for a file that is not regular (without waiting for it), cannot be read, is larger than 1 MiB,
    no UTF-8, no TOML, or nested too deeply.
    """
    try:
        return tomllib.loads(read_regular(path, _MAX_BYTES).decode())
    except RecursionError as error:
        raise _unreadable(path, called, "it is nested too deeply") from error
    except FileNotFoundError as error:
        remedy = close_file(path, shipped_names)
        if called == "recipe":
            remedy = f"{remedy} `hqconv schemas --recipes` lists the recipes of the package.".strip()
        raise _unreadable(path, called, error.strerror or error, remedy=remedy) from error
    except OSError as error:
        expected = f"at most {_MAX_BYTES} bytes" if error.errno == errno.EFBIG else ""
        raise _unreadable(path, called, error.strerror or error, expected) from error
    except ValueError as error:  # no UTF-8, no TOML, a number or a path that Python does not take
        raise _unreadable(path, called, error) from error


def _unreadable(path: Path, called: str, found: object, expected: str = "", remedy: str = "") -> RequestError:
    return RequestError(f"The {called} cannot be read.", where=str(path), expected=expected, found=found, remedy=remedy)


SCHEMAS = Path(__file__).parent / "configs"
RECIPES = SCHEMAS / "recipes"


def shipped(folder: Path) -> dict[str, str]:
    """Return file name → purpose, of the files in `SCHEMAS` or `RECIPES`: their first line, a comment."""
    return {path.name: _first_line(path) for path in sorted(folder.glob("*.toml"))}


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()


def or_shipped(path: Path, folder: Path) -> Path:
    """Return the file of that name in `folder`, if `path` is a bare name without such a file; else `path`.

    The ending `.toml` may be left out. A file at `path` wins, even if it cannot be read.
    """
    name = path.name if path.suffix == ".toml" else f"{path.name}.toml"
    is_bare = os.path.basename(path) == str(path) != ""  # noqa: PTH119 - of `~` and `..`, too
    if is_bare and not os.path.lexists(path) and name in shipped(folder):
        return folder / name
    return path
