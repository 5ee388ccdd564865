"""Files of others: what is no regular file, too large or too deep is refused, and never waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hqconv.errors import RequestError
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.options import load_recipe
from hqconv.schemas.untrusted_files import (
    MAX_DEPTH,
    open_regular,
    parse_json,
    read_json,
    read_regular,
    read_toml,
)
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.nodes import NODES, in_time


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("read", [open_regular, lambda path: read_regular(path, 10), read_json])
def test_what_is_no_file(read: Callable[[Path], object], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    NODES[kind](path)
    with pytest.raises(OSError, match="it is a") as caught:
        in_time(lambda: read(path))
    assert caught.value.filename == str(path)
    assert kind.split()[-1] in str(caught.value.strerror)


def test_a_file_that_becomes_a_pipe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "x", os.open
    path.write_text("x")

    def opened(path: Path, flags: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", opened)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="it is a pipe"):
        in_time(lambda: open_regular(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 100)
    assert read_regular(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="larger than 99 bytes"):
        read_regular(path, 99)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[1,{"a":', "}]")])
def test_depths(opening: str, closing: str) -> None:
    each = len(opening.replace('"a":', "").replace("1,", ""))
    deep = MAX_DEPTH // each

    def nested(count: int) -> bytes:
        return (opening * count + "1" + closing * count).encode()

    assert parse_json(nested(deep))
    for count in (deep + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(nested(count))


def test_wide_is_not_deep() -> None:
    assert len(parse_json(b"[" + b"[]," * 1000 + b"[]]")) == 1001


# --- TOML files that people name ---------------------------------------------------------------------------

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
