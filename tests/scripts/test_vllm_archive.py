"""The cutting of fat binaries, which scripts/vllm_archive.py does to vLLM's libraries."""

from __future__ import annotations

import importlib.metadata
import re
import struct
import zipfile
from pathlib import Path

import pytest

from scripts.vllm_archive import (
    GROUP,
    MACHINE_CODE,
    MAGIC,
    PTX,
    Code,
    announce_plugin,
    fat_binaries,
    keep_only,
    unpack,
)

HEAD = 64


def fat_binary(*codes: tuple[int, int, bytes]) -> bytes:
    body = b""
    for kind, sm, code in codes:
        head = struct.pack("<HHIQ", kind, 0x101, HEAD, len(code)).ljust(28, b"\0") + struct.pack(
            "<I", sm
        )
        body += head.ljust(HEAD, b"\0") + code
    return MAGIC + struct.pack("<Q", len(body)) + body


FIRST = ((PTX, 80, b"text-80!"), (MACHINE_CODE, 80, b"code80!!"), (MACHINE_CODE, 90, b"code90!!"))
SECOND = (
    (PTX, 80, b"only-80!"),
    (PTX, 89, b"only-89!"),
    (PTX, 100, b"onlyl100"),
    (MACHINE_CODE, 120, b"code120!"),
)
LIBRARY = (
    b"\x7fELF and other sections"
    + fat_binary(*FIRST)
    + b"between."
    + fat_binary(*SECOND)
    + b"the end"
)


@pytest.mark.parametrize(
    ("sm", "kept"), [(90, {b"code90!!", b"only-89!"}), (80, {b"code80!!", b"only-80!"})]
)
def test_one_architecture_stays(sm: int, kept: set[bytes]) -> None:
    data = bytearray(LIBRARY)
    keep_only(data, sm)
    codes: list[Code] = [one for codes in fat_binaries(data) for one in codes]
    left = {bytes(data[one.begin : one.begin + one.size]) for one in codes} - {bytes(8)}
    assert left == kept
    assert len(data) == len(LIBRARY)
    assert data.startswith(b"\x7fELF and other sections" + MAGIC)
    assert data.endswith(b"the end")


def test_code_with_unused_names_goes() -> None:
    data = bytearray(LIBRARY)
    keep_only(data, 90, without=re.compile(rb"de[9]0"))
    assert b"code90" not in data
    assert b"only-89!" in data


def test_vllm_finds_the_plugin_in_the_archive(tmp_path: Path) -> None:
    announce_plugin(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    (entry,) = found.entry_points.select(group=GROUP)
    assert callable(entry.load())
    assert (entry.name, entry.module) == ("hqconv", "hqconv.serving.vllm.plugin")


def test_programs_can_be_run(tmp_path: Path) -> None:
    """Humming's compiler is a program in its wheel."""
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        for name, mode in (("humming/compile", 0o755), ("humming/__init__.py", 0o644)):
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100000 | mode) << 16
            wheel.writestr(info, "text")
    unpack(tmp_path / "one.whl", tmp_path / "site")
    assert (tmp_path / "site/humming/compile").stat().st_mode & 0o111
    assert not (tmp_path / "site/humming/__init__.py").stat().st_mode & 0o111
