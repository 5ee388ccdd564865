"""Hostile manifests: `hqconv.json` with bytes or values changed, with its digest or a new one that belongs to it.

Whatever it says, `inspect`, `verify`, `load` and a conversion from it end with one message and a documented code, in
bounded time, and write nothing but their output. A manifest whose bytes changed under its digest is never verified.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from typer.testing import CliRunner

import hqconv
from hqconv.artifact.manifest import sealed
from hqconv.cli.app import app
from hqconv.errors import HqconvError
from scripts.torture.tally import Tally
from tests.make.conversions import run as convert
from tests.make.qwen import read_tree, write_qwen3_moe

_MAX_S = 60.0  # of an input that hangs
_CODES = range(5)
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        7,
        2**31,
        2**63,
        10**30,
        0.5,
        1e308,
        "",
        "a",
        "../../x",
        "/etc/passwd",
        "\x1b[31m",
    ),
    *(
        "\ud800",
        "x" * 5000,
        [],
        {},
        [[]],
        {"a": 1},
        [None],
        "model.layers.0.mlp.experts",
        "mxfp4",
        "sm90",
        "fp8",
    ),
)


def changed(words: Any, draw: Random) -> Any:
    """A copy with one value, at any depth, removed, renamed, doubled or another."""
    words = copy.deepcopy(words)
    inner, key = words, None
    while isinstance(inner, dict | list) and inner:
        outer, key = (
            inner,
            draw.choice([*inner]) if isinstance(inner, dict) else draw.randrange(len(inner)),
        )
        inner = outer[key]
        if draw.random() < 0.25:
            break
    if key is None:
        return words
    kind = draw.random()
    if kind < 0.15:
        del outer[key]
    elif kind < 0.3 and isinstance(outer, dict):
        outer[str(draw.choice(ODD))] = outer.pop(key)
    elif kind < 0.4 and isinstance(inner, int) and not isinstance(inner, bool):
        outer[key] = inner + draw.choice((-1, 1, inner, 2**32))
    elif kind < 0.5 and isinstance(outer, list):
        outer.append(inner)
    elif kind < 0.6 and isinstance(inner, str):
        outer[key] = inner[: draw.randrange(len(inner) + 1)] + draw.choice(
            ("", "0", "/", "\x00", "é")
        )
    else:
        outer[key] = draw.choice(ODD)
    return words


def _bytes_changed(raw: bytes, draw: Random) -> bytes:
    data, place = bytearray(raw), draw.randrange(len(raw))
    kind = draw.random()
    if kind < 0.6:
        data[place] ^= 1 << draw.randrange(8)
    elif kind < 0.8:
        del data[place : place + draw.randint(1, 40)]
    else:
        data[place:place] = draw.choice(
            (b"[" * 100, b'"a":1,', b"\xff", b"\0", b" ", raw[place : place + 30])
        )
    return bytes(data)


def run(work: Path, count: int, tally: Tally) -> None:
    """`count` manifests, each given to one command."""
    src = write_qwen3_moe(work / "model", num_layers=2, with_attention=True)
    made = work / "made"
    convert(src, made, "int4-g32", tp=2, dense="int8")
    raw = (made / "hqconv.json").read_bytes()
    words, draw = json.loads(raw), Random(tally.seed)
    for _ in range(count):
        is_sealed = draw.random() < 0.7
        text = _sealed(words, draw) if is_sealed else _bytes_changed(raw, draw)
        (made / "hqconv.json").write_bytes(text)
        look = draw.choice([*LOOKS])
        before, begun = _state(work), time.monotonic()
        try:
            code, problem = LOOKS[look](made, work / "out")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            code, problem = 1, f"{type(error).__name__} came out: {error}"
        if look == "verify" and code == 0 and not is_sealed and text != raw:
            problem = "it was verified"
        shutil.rmtree(work / "out", ignore_errors=True)
        if time.monotonic() - begun > _MAX_S:
            problem = problem or f"it took {time.monotonic() - begun:.1f} s"
        if _state(work) != before:
            problem = problem or "files beside the output changed"
        kind = "values, digest made anew" if is_sealed else "bytes"
        tally.case(f"{look}: {kind}", problem and f"{problem}: {_difference(raw, text)}")


def _sealed(words: Any, draw: Random) -> bytes:
    for _ in range(draw.randint(1, 3)):
        words = changed(words, draw)
    try:
        return sealed(words)
    except UnicodeEncodeError:
        return json.dumps(words).encode()


def _difference(raw: bytes, text: bytes) -> str:
    place = next(
        (n for n, (a, b) in enumerate(zip(raw, text, strict=False)) if a != b),
        min(len(raw), len(text)),
    )
    return f"byte {place}: {raw[max(0, place - 60) : place + 40]!r} became {text[max(0, place - 60) : place + 40]!r}"


def _state(work: Path) -> dict[str, int]:
    return {path.as_posix(): path.stat().st_mtime_ns for path in work.rglob("*") if path.is_file()}


def call(*arguments: object) -> tuple[int, str]:
    """Exit code of a command in this process, and what is wrong with its manners."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    text = result.stderr[-600:]
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return result.exit_code, f"{type(result.exception).__name__} came out: {result.exception}"
    if result.exit_code not in _CODES or "Traceback" in result.output:
        return result.exit_code, f"exit {result.exit_code}: {text}"
    return result.exit_code, ""


def _inspect(made: Path, _: Path) -> tuple[int, str]:
    return call("inspect", made)


def _verify(made: Path, _: Path) -> tuple[int, str]:
    return call("verify", made, *["--checks", "files,weights", "--device", "cpu", "--threads", "2"])


def _convert(made: Path, out: Path) -> tuple[int, str]:
    words = "--schema source --target sm90 --device cpu --threads 2 --max-memory 256MiB"
    code, problem = call("convert", made, "-o", out, *words.split())
    if not problem and (code == 0) != (out / "hqconv.json").exists():
        problem = f"exit {code}, and {sorted(read_tree(out))[:5] if out.exists() else 'no files'}"
    return code, problem


def _load(made: Path, _: Path) -> tuple[int, str]:
    with suppress(HqconvError):
        hqconv.load(made, layer="model.layers.0.mlp.experts")
        hqconv.dequantize(made, layer="model.layers.0.self_attn.q_proj")
    return 0, ""


LOOKS = {"inspect": _inspect, "verify": _verify, "convert": _convert, "load": _load}
