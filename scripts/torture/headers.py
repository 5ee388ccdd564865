"""Header fuzz: mutants of safetensors files are read as the safetensors library reads them, or refused, quickly."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import safetensors

from hqconv.errors import InputError
from hqconv.io.safetensors_header import LENGTH_BYTES, header_length, parse_header
from scripts.torture.attacks import corpus, mutant
from scripts.torture.tally import Tally

_PORTION = 10_000  # mutants of one seed
_NUM_PROCESSES = 2
_MAX_S = 60.0  # a header that hangs; the slowest of the corpus takes some milliseconds
# What the library reads and we do not: a guess at the meaning would be needed.
_STRICTER = ("twice", "entry is malformed")


def run(work: Path, count: int, tally: Tally) -> None:
    """`count` mutants, in portions that have seeds of their own."""
    del work
    portions = [
        (tally.seed, number, min(_PORTION, count - number)) for number in range(0, count, _PORTION)
    ]
    if len(portions) == 1:
        _add(_portion(portions[0]), tally)
        return
    with ProcessPoolExecutor(_NUM_PROCESSES, get_context("spawn")) as pool:
        for found in pool.map(_portion, portions):
            _add(found, tally)


def _add(found: dict[str, Any], tally: Tally) -> None:
    for kind, number in found["counts"].items():
        tally.counts[kind] += number
        tally.cases += number
    for problem in found["problems"]:
        tally.problem(problem)
    tally.seconds = time.monotonic() - tally.started_s


def _portion(words: tuple[int, int, int]) -> dict[str, Any]:
    seed, start, size = words
    draw, files = Random(f"{seed} {start}"), corpus()
    counts = dict.fromkeys(("read as the library does", "refused by both", "refused here only"), 0)
    problems = []
    for number in range(start, start + size):
        raw = mutant(files, draw)
        begun = time.monotonic()
        try:
            kind = compare(raw)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            kind = "failed"
            problems.append(
                f"mutant {number}: {type(error).__name__}: {str(error)[:200]}: {raw[:300]!r}"
            )
        if time.monotonic() - begun > _MAX_S:
            problems.append(f"mutant {number} took {time.monotonic() - begun:.1f} s: {raw[:300]!r}")
        counts[kind] = counts.get(kind, 0) + 1
    return {"counts": counts, "problems": problems}


def compare(raw: bytes) -> str:
    """What became of a file. Raises where we read it otherwise than the library, or refuse it without reason."""
    try:
        mine = _ours(raw)
    except InputError as error:
        try:
            theirs = _theirs(raw)
        except (safetensors.SafetensorError, ValueError):
            return "refused by both"
        if any(word in str(error) for word in _STRICTER):
            return "refused here only"
        raise AssertionError(
            f"refused, and the library reads {list(theirs)[:3]}: {error}"
        ) from error
    if mine != _theirs(raw):
        raise AssertionError(f"read as {mine}, the library has {_theirs(raw)}")
    return "read as the library does"


def _ours(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    length = header_length("f", raw[:LENGTH_BYTES], len(raw))
    refs, _, _ = parse_header("f", raw[:length], len(raw))
    return {
        name: (ref.dtype, ref.shape, raw[ref.offset_bytes :][: ref.num_bytes])
        for name, ref in refs.items()
    }


def _theirs(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
        for name, t in safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
    }
