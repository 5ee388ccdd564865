"""Suggestions for unknown names of schemas, GPUs, recipes and files: the known name that was most likely meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hqconv.errors import RequestError

# Names in other projects. Bits of weights and activations, as in vLLM's and llm-compressor's names.
_ALSO = {
    "w4a16": "int4",
    "w8a16": "int8",
    "w2a16": "int2",
    "w3a16": "int3",
    "awq": "int4-zp",
    "gptq": "int4",
    "fp4": "mxfp4",
    "fp8-e4m3": "fp8",
    "e4m3": "fp8",
    "e5m2": "fp8-e5m2",
    "q4": "int4",
    "q8": "int8",
    "nvfp4a16": "nvfp4",
    "mxfp4a16": "mxfp4",
    "mxfp4-row": "fp4-g32-e8m0-row",
    "mxfp8-row": "fp8-g32-e8m0-row",
    "nvfp4-row": "fp4-g16-e4m3-row",
}
_WITH_ACTIVATIONS = {
    "w4a8": "int4 with --input-schema int8 or fp8",
    "w4afp8": "int4 with --input-schema fp8",
    "w8a8": "int8 with --input-schema int8, or fp8 with --input-schema fp8",
    "w4a4": "mxfp4 with --input-schema mxfp4, or nvfp4 with --input-schema nvfp4",
    "fp8-dynamic": "fp8 with --input-schema fp8",
}
_CLOSE = 0.6  # difflib's ratio


def meant(text: str, known: Iterable[str], find: Callable[[str], object]) -> str:
    """Return `Did you mean mxfp4?` and the like for an unknown name; "" where no name is close.

    find: returns None, or raises RequestError, for an unknown name.
    """
    plain = re.sub(r"[_\s]+", "-", text.strip().lower())
    name = _WITH_ACTIVATIONS.get(plain) or _ALSO.get(plain)
    if name is None:
        guesses = (plain, plain.replace("int-", "int"))
        name = next((guess for guess in guesses if guess != text and _is_name(guess, find)), None)
    return close_to(plain, known) if name is None else f"Did you mean {name}?"


def close_to(text: str, known: Iterable[str]) -> str:
    """Return `Did you mean mxfp4?` for the known name most like `text`; "" where none is close."""
    close = difflib.get_close_matches(text, [*known], 1, _CLOSE)
    return f"Did you mean {close[0]}?" if close else ""


def close_file(path: Path, shipped: Iterable[str] = (), *, is_folder: bool = False) -> str:
    """Return `Did you mean recipes/x.toml?` for a missing TOML file or folder; "" where no name is close.

    shipped: names that the package has. The other names are those beside `path`.
    """
    names = {name.removesuffix(".toml"): name for name in shipped}
    with suppress(OSError, ValueError):
        beside = sorted(path.parent.iterdir() if is_folder else path.parent.glob("*.toml"))
        names |= {
            one.name.removesuffix(".toml"): str(one) for one in beside if one.is_dir() == is_folder
        }
    close = difflib.get_close_matches(path.name.removesuffix(".toml"), names, 1, _CLOSE)
    return f"Did you mean {names[close[0]]}?" if close else ""


def _is_name(text: str, find: Callable[[str], object]) -> bool:
    try:
        return find(text) is not None
    except RequestError:
        return False
