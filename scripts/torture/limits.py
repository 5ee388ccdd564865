"""Limits on open files, sizes of files and memory: the command ends with one message, or with the right bytes."""

from __future__ import annotations

from random import Random

from scripts.torture.commands import Job
from scripts.torture.place import Place, mode, said
from scripts.torture.tally import Tally

_CODES = {"files": (0, 3, 4), "file_bytes": (0, 4), "address_bytes": (0, 2), "": (0, 2)}


def run(place: Place, count: int, tally: Tally) -> None:
    """`count` conversions, each under one limit."""
    draw = Random(tally.seed)
    for _ in range(count):
        kind = draw.choice(("open files", "bytes of a file", "address space", "--max-memory"))
        limits: dict[str, int] = {}
        options: tuple[str, ...] = ("--threads", str(draw.randint(1, 8)))
        if kind == "open files":
            limits["files"] = draw.choice((draw.randint(8, 40), 64, 128))
        elif kind == "bytes of a file":
            limits["file_bytes"] = int(10 ** draw.uniform(2, 5.6))
        elif kind == "address space":
            limits["address_bytes"] = int(10 ** draw.uniform(7, 9.3))
        else:
            options += ("--max-memory", str(int(10 ** draw.uniform(3, 8.5))))
        tally.case(kind, _limited(place, limits, options, draw.random() < 0.5, tally))


def _limited(
    place: Place, limits: dict[str, int], options: tuple[str, ...], has_old: bool, tally: Tally
) -> str:
    place.clear(has_old=has_old)
    command = place.command(*options, *mode(has_old))
    (ended,) = place.zygote.run(Job(command, limits=limits))
    tally.note(f"exit {ended.code}")
    problem = place.judged(ended, _CODES[next(iter(limits), "")], has_old=has_old)
    return problem and f"{limits or options}: {problem} [{said(ended)}]"
