"""Files that people name: what is none of ours is refused in one message, and nothing is waited for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hqconv.errors import RequestError
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.recipe import load_recipe
from hqconv.schemas.untrusted_files import read_toml
from hqconv.schemas.weight_schema import resolve_schema

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
    """Of a file; the test does not wait for one that nobody writes to."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            read(path)
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert caught, "it waits, or refuses nothing"
    assert isinstance(caught[0], RequestError), caught[0]
    return caught[0]


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
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder", "nothing", "a name that is none"])
def test_nothing_is_waited_for(kind: str, called: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a name that is none":
        path = tmp_path / "\0.toml"
    error = refusal(READERS[called], path)
    assert (error.what, error.where) == (f"The {called} cannot be read.", str(path))
    assert error.found


def test_what_is_just_not_too_large_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"a = 1\n" + b"#" * ((1 << 20) - 6))
    assert read_toml(path, "file") == {"a": 1}
