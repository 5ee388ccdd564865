"""Files that others write, read without waiting: what is not regular, too large or too deep is refused.

JSON of checkpoints and artifacts, TOML files of users, and the recipes and schema files that come with hqconv.
"""

from __future__ import annotations

import difflib
import errno
import json
import logging
import os
import stat
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError

_LOG = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 64 << 20  # of a config, and of a manifest without the names of its tensors
# of an index or a manifest, with a line for each of some million tensors
MAX_LIST_BYTES = 512 << 20
NOTHING = "no such file"
MAX_DEPTH = 64  # of objects and lists in each other: code that copies or writes them is recursive

_TOO_DEEP = f"it is nested too deeply: more than {MAX_DEPTH} objects or lists in each other"
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def unicode_name(name: str) -> str:
    """Return the name of a file or folder as text that UTF-8 holds: a byte of another encoding becomes `\\xe9`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def what_instead(mode: int) -> str | None:
    """Name the kind of a file that is not regular by its `st_mode`: `a pipe`; None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")


def found_at(path: Path) -> str | None:
    """Describe a path that is no regular file, also a missing one; None for a regular file. Raises OSError."""
    try:
        return what_instead(path.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a circle of links"
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return "a link to nothing" if path.is_symlink() else NOTHING


def open_regular(path: str | Path) -> int:
    """Open a regular file and return its descriptor, for the caller to close. Raises OSError for anything else."""
    _refuse(path, os.stat(path).st_mode)  # noqa: PTH116 - opening a device may do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse(path, os.fstat(descriptor).st_mode)  # it may be another file by now
    except BaseException:
        os.close(descriptor)
        raise
    _LOG.debug("Reading %s.", path)
    return descriptor


def _refuse(path: str | Path, mode: int) -> None:
    found = what_instead(mode)
    if found is not None:
        raise OSError(errno.EINVAL, f"it is {found}, not a regular file", str(path))


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Read all bytes of a regular file. Raises OSError for anything else, and for more than `max_bytes`."""
    with open(open_regular(path), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return data


def parse_json(raw: bytes, hook: Any = None) -> Any:
    """Parse a JSON document; `hook` as `object_pairs_hook`. Raises ValueError for bad UTF-8, bad or deep JSON."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=hook)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    is_deep = isinstance(value, dict | list) and raw.count(b"[") + raw.count(b"{") > MAX_DEPTH
    level = [value] if is_deep else []
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for outer in level:
            inner += outer.values() if isinstance(outer, dict) else outer
        level = [item for item in inner if isinstance(item, dict | list)]
    if level:
        raise ValueError(_TOO_DEEP)
    return value


def read_json(path: str | Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Read the JSON document in a file. Raises OSError as `read_regular`, ValueError as `parse_json`."""
    return parse_json(read_regular(path, max_bytes))


def close_file(path: Path, shipped: Iterable[str] = (), *, is_folder: bool = False) -> str:
    """Return `Did you mean recipes/x.toml?` for a missing TOML file or folder; "" where no name is close.

    shipped: names that the package has. The other names are those beside `path`.
    """
    names = {name.removesuffix(".toml"): name for name in shipped}
    with suppress(OSError, ValueError):
        beside = sorted(path.parent.iterdir() if is_folder else path.parent.glob("*.toml"))
        places = [place for place in beside if place.is_dir() == is_folder]
        names |= {place.name.removesuffix(".toml"): str(place) for place in places}
    close = difflib.get_close_matches(path.name.removesuffix(".toml"), names, 1)
    return f"Did you mean {names[close[0]]}?" if close else ""


_MAX_TOML_BYTES = 1 << 20  # far more than people write


def read_toml(path: Path, called: str, shipped_names: Iterable[str] = ()) -> dict[str, Any]:
    """Read a TOML file. `called`: its kind, as in the middle of a sentence: `recipe`, `schema file`.

    shipped_names: files of the package, one of which may have been meant by a name that does not exist.
    Raises RequestError for a file that is not regular (without waiting for it), cannot be read, is larger than 1 MiB,
    no UTF-8, no TOML, or nested too deeply.
    """
    remedy = ""
    found = _TOO_DEEP
    try:
        return tomllib.loads(read_regular(path, _MAX_TOML_BYTES).decode())
    except FileNotFoundError:
        found = NOTHING
        remedy = f"{close_file(path, shipped_names)} `hqconv schemas --recipes` lists the package's files."
    except OSError as error:
        found = error.strerror or str(error)
    except RecursionError:
        pass
    except ValueError as error:  # no UTF-8, no TOML, a number or a path that Python does not take
        found = str(error)
    raise RequestError(
        f"The {called} cannot be read.", where=path, found=found, remedy=remedy.strip()
    )


SCHEMAS = Path(__file__).parent / "configs"
RECIPES = SCHEMAS / "recipes"


def shipped(folder: Path) -> dict[str, str]:
    """Return file name → purpose, of the files in `SCHEMAS` or `RECIPES`: their first line, a comment."""
    purposes = {}
    for path in sorted(folder.glob("*.toml")):
        first_line = path.read_text(encoding="utf-8").partition("\n")[0]
        purposes[path.name] = first_line.removeprefix("#").strip()
    return purposes


def or_shipped(path: Path, folder: Path) -> Path:
    """Return the file of that name in `folder`, if `path` is a bare name without such a file; else `path`.

    The ending `.toml` may be left out. A file at `path` wins, even if it cannot be read.
    """
    name = path.name if path.suffix == ".toml" else f"{path.name}.toml"
    is_bare = os.path.basename(path) == str(path) != ""  # noqa: PTH119 - of `~` and `..`, too
    if is_bare and not os.path.lexists(path) and name in shipped(folder):
        return folder / name
    return path
