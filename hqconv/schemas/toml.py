"""TOML files that people write: schemas, input schemas and recipes."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError

_MAX_BYTES = 1 << 20  # far more than anybody writes


def read_toml(path: Path, called: str) -> dict[str, Any]:
    """The words of a file. `called`: what it is, in the middle of a sentence: `recipe`, `schema file`.

    Raises RequestError for what is no regular file (which is not waited for), cannot be read, is larger than 1 MiB,
    no UTF-8, no TOML, or nested too deeply.
    """
    try:
        return tomllib.loads(_read(path, called).decode())
    except RecursionError as error:
        raise _unreadable(path, called, "it is nested too deeply") from error
    except OSError as error:
        raise _unreadable(path, called, error.strerror or error) from error
    except ValueError as error:  # no UTF-8, no TOML, a number or a path that Python does not take
        raise _unreadable(path, called, error) from error


def _read(path: Path, called: str) -> bytes:
    if path.exists() and not path.is_file():  # opening a device may do something
        raise _unreadable(path, called, "a folder" if path.is_dir() else "no regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _unreadable(path, called, "no regular file")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _unreadable(path, called, "it is larger", expected=f"at most {_MAX_BYTES} bytes")
    return data


def _unreadable(path: Path, called: str, found: object, expected: str = "") -> RequestError:
    return RequestError(f"The {called} cannot be read.", where=str(path), expected=expected, found=found)
