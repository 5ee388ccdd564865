"""The JSON documents of `--json`: one on stdout, with what every one of them says (docs/ci.md)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hqconv import __version__
from hqconv.cli.text import lead_nowhere
from hqconv.errors import HqconvError

JSON_VERSION = 1  # goes up when a key that docs/ci.md calls stable is taken away or means something else


def print_json(words: Mapping[str, Any]) -> None:
    """One JSON document on stdout; what is no number there is null, since JSON has neither NaN nor infinity.

    Raises OSError where stdout takes it not; nothing is written there any more then.
    """
    try:
        sys.stdout.write(json.dumps(_finite({**_head(), **words}), indent=2, allow_nan=False) + "\n")
        sys.stdout.flush()
    except OSError:
        lead_nowhere()  # half of a document may lie there: no other may follow it
        raise


def print_error(error: HqconvError, exit_code: int) -> None:
    """The document of a command that failed; never fails itself, for its exit code says it, too."""
    parts = {key: getattr(error, key) for key in ("what", "where", "expected", "found", "remedy")}
    with suppress(OSError, ValueError):
        print_json({"kind": "error", "exit_code": exit_code, **parts})


def _head() -> dict[str, Any]:
    """Of every document: its version, and who speaks. An artifact's own versions are those that made it."""
    humming = None
    with suppress(PackageNotFoundError):
        humming = version("humming-kernels")
    tool = {"hqconv_version": __version__, "humming_kernels_version": humming}
    return {"json_version": JSON_VERSION, "tool": tool}


def _finite(words: Any) -> Any:
    if isinstance(words, Mapping):
        return {key: _finite(value) for key, value in words.items()}
    if isinstance(words, list | tuple):
        return [_finite(value) for value in words]
    return None if isinstance(words, float) and not math.isfinite(words) else words
