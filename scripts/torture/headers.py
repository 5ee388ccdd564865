"""Header fuzz: mutants of safetensors files are read as the safetensors library reads them, or refused, quickly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

import safetensors

from hqconv.errors import InputError
from hqconv.io.safetensors_header import LENGTH_BYTES, header_length, parse_header
from scripts.torture.attacks import corpus, mutant
from scripts.torture.portions import Findings, in_portions
from scripts.torture.tally import Tally

_PORTION = 10_000  # mutants of one seed
# What the library reads and we do not: a guess at the meaning would be needed.
_STRICTER = ("twice", "entry is malformed")


def run(work: Path, count: int, tally: Tally) -> None:
    """`count` mutants, in portions that have seeds of their own."""
    del work
    in_portions(_portion, count, _PORTION, tally)


def _portion(draw: Random, numbers: range) -> Findings:
    files, findings = corpus(), Findings()
    for number in numbers:
        raw = mutant(files, draw)
        findings.judge(f"mutant {number}", raw[:300], partial(compare, raw))
    return findings


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
