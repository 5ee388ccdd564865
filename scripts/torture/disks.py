"""Small disks: file systems (tmpfs) of too few bytes, and such that another's file fills while the command writes.

A conversion that does not fit must say so, with exit code 4; on a larger disk the same command must go on to the right
bytes. The mounts are in a namespace of their own (`unshare -rm`), so that no privileges are needed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from random import Random

from scripts.torture.commands import Ended, Job
from scripts.torture.place import Place, Tree, manners, mode, said
from scripts.torture.tally import Tally

_BALLAST = "ballast"
_AMPLE = 64 << 20


def run(place: Place, count: int, tally: Tally) -> None:
    """`count` conversions, every other one on a disk that fills while they write."""
    draw = Random(tally.seed)
    num_bytes = {
        has_old: _size(place.new) + (_size(place.old) if has_old else 0)
        for has_old in (False, True)
    }
    for number in range(count):
        has_old = draw.random() < 0.5
        if number % 2:
            size = int(num_bytes[has_old] * draw.uniform(0.3, 1.4))
            tally.case(
                "too small",
                _too_small(place, has_old, max(size, _size(place.old) * 3 // 2 * has_old), tally),
            )
        else:
            tally.case("fills up", _fills_up(place, has_old, draw.uniform(0, 0.2), tally))


def _problem(place: Place, ended: Ended, has_old: bool) -> str:
    problem = manners(ended, (0, 4))
    if ended.code == 4 and "disk" not in ended.stderr:
        problem = problem or f"another message: {said(ended)}"
    return problem or place.problem(has_old=has_old)


def _size(tree: Tree) -> int:
    return sum(map(len, tree.values()))


def _too_small(place: Place, has_old: bool, size: int, tally: Tally) -> str:
    place.zygote.mount(place.at.parent, size)
    place.clear(has_old=has_old)
    (ended,) = place.zygote.run(Job(place.command(*mode(has_old))))
    tally.note(f"exit {ended.code}")
    problem = _problem(place, ended, has_old)
    if not problem and ended.code == 0:
        problem = place.is_final(has_old=has_old)
    elif not problem:
        (again,) = place.zygote.run(Job(place.command(*place.again(has_old=has_old))))
        problem = manners(again, (4,)) or place.problem(has_old=has_old)
    return problem and f"{size} bytes: {problem}"


def _fills_up(place: Place, has_old: bool, seconds: float, tally: Tally) -> str:
    place.zygote.mount(place.at.parent, _AMPLE)
    place.clear(has_old=has_old)
    place.zygote.begin(Job(place.command(*mode(has_old))))
    time.sleep(seconds)
    with suppress(OSError), (place.root / _BALLAST).open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    (ended,) = place.zygote.end()
    tally.note(f"exit {ended.code}")
    problem = _problem(place, ended, has_old)
    (place.root / _BALLAST).unlink()
    if not problem:
        problem = place.finish(has_old=has_old) if ended.code else place.is_final(has_old=has_old)
    return problem and f"after {seconds:.3f} s: {problem}"
