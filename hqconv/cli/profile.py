"""The file of `convert --profile`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hqconv.errors import OutputError, RequestError


def profile_writer(path: Path | None) -> Callable[[dict[str, Any]], None]:
    """What writes the figures to `path` after the work, or nothing for None; refuses now what cannot be written then.

    Raises RequestError where there is no such folder; what it returns raises OutputError where writing fails.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what, expected = "The profile cannot be written there.", "a file in a folder that exists"
        raise RequestError(what, where="--profile", expected=expected, found=str(path))

    def write(words: dict[str, Any]) -> None:
        if path is None:
            return
        try:
            path.write_text(json.dumps(words, indent=2) + "\n")
        except OSError as error:
            what, remedy = (
                "The profile cannot be written.",
                "The artifact is complete; choose another file next time.",
            )
            raise OutputError(
                what, where=str(path), found=error.strerror or str(error), remedy=remedy
            ) from error

    return write
