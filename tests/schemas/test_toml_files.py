"""Files that people name: what is none of ours is refused in one message, and nothing is waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hqconv.errors import RequestError
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.recipe import load_recipe
from hqconv.schemas.untrusted_files import read_toml
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.nodes import NODES, in_time

READERS: dict[str, Callable[[Path], object]] = {
    "recipe": load_recipe,
    "schema file": lambda path: resolve_schema(str(path)),
    "input schema's file": lambda path: resolve_inputs(str(path)),
}
CONTENTS: dict[str, tuple[bytes, str]] = {
    "no TOML": (b"b_dtype = ", "at end of document"),
    "no UTF-8": (b'a = "\xff"', "utf-8"),
    "too deep": (b"a = " + b"[" * 20_000, "nested too deeply"),
    "too long a number": (b"a = " + b"9" * 5000, "digits"),
    "too large": (b"#" * (1 << 20) + b"\n", "it is larger"),
}


def refusal(read: Callable[[Path], object], path: Path) -> RequestError:
    with pytest.raises(RequestError) as caught:
        in_time(lambda: read(path))
    return caught.value


@pytest.mark.parametrize("called", READERS)
@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_no_file_of_ours(name: str, called: str, tmp_path: Path) -> None:
    data, needle = CONTENTS[name]
    path = tmp_path / "x.toml"
    path.write_bytes(data)
    error = refusal(READERS[called], path)
    assert (error.what, error.where) == (f"The {called} cannot be read.", str(path))
    assert needle in error.found


@pytest.mark.parametrize("called", READERS)
@pytest.mark.parametrize("kind", [*NODES, "nothing", "a name that is none"])
def test_nothing_is_waited_for(kind: str, called: str, tmp_path: Path) -> None:
    path = tmp_path / ("\0.toml" if kind == "a name that is none" else "x.toml")
    if kind in NODES:
        NODES[kind](path)
    error = refusal(READERS[called], path)
    assert (error.what, error.where) == (f"The {called} cannot be read.", str(path))
    assert error.found


def test_what_is_just_not_too_large_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"a = 1\n" + b"#" * ((1 << 20) - 6))
    assert read_toml(path, "file") == {"a": 1}
