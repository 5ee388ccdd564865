"""TOML files that people write: schemas, input schemas and recipes."""

from __future__ import annotations

import errno
import tomllib
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError
from hqconv.schemas.regular import read_regular

_MAX_BYTES = 1 << 20  # far more than anybody writes


def read_toml(path: Path, called: str) -> dict[str, Any]:
    """The words of a file. `called`: what it is, in the middle of a sentence: `recipe`, `schema file`.

    Raises RequestError for what is no regular file (which is not waited for), cannot be read, is larger than 1 MiB,
    no UTF-8, no TOML, or nested too deeply.
    """
    try:
        return tomllib.loads(read_regular(path, _MAX_BYTES).decode())
    except RecursionError as error:
        raise _unreadable(path, called, "it is nested too deeply") from error
    except OSError as error:
        expected = f"at most {_MAX_BYTES} bytes" if error.errno == errno.EFBIG else ""
        raise _unreadable(path, called, error.strerror or error, expected) from error
    except ValueError as error:  # no UTF-8, no TOML, a number or a path that Python does not take
        raise _unreadable(path, called, error) from error


def _unreadable(path: Path, called: str, found: object, expected: str = "") -> RequestError:
    return RequestError(f"The {called} cannot be read.", where=str(path), expected=expected, found=found)
