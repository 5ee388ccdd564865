"""Failing system calls: the n-th call on a file of the source or the output fails, or falls short.

Every call of a conversion in turn, then at random ones of conversions that replace an artifact or are resumed. The
command must end with the code and the one message of the side that failed, or with the right artifact.
"""

from __future__ import annotations

import errno
from random import Random

from scripts.torture.commands import FAIL, FAIL_ON, KILL_BEFORE, SHORT, Ended, Job, Watch
from scripts.torture.place import Place, manners, said, shuffled
from scripts.torture.tally import Tally

_KINDS = {FAIL: "fails once", FAIL_ON: "fails from there on", SHORT: "half of the bytes"}
# What any call may fail with; and where that is not all, by the call's name.
_ERRORS = (
    errno.EIO,
    errno.EACCES,
    errno.ENOSPC,
    errno.EMFILE,
    errno.ESTALE,
    errno.EDQUOT,
    errno.EROFS,
    errno.ENOMEM,
)
_LEFT = "warning: The old artifact could not be removed"
_MODES = {"new": (), "--overwrite": ("--overwrite",), "--resume": ("--resume",)}


def run(place: Place, count: int, tally: Tally) -> None:
    """`count` faults."""
    draw = Random(tally.seed)
    place.clear(has_old=False)
    (ended,) = place.zygote.run(Job(place.command(), _watch(place)))
    every: list[tuple[int, ...]] = [
        (number, how) for number in range(1, ended.num_calls + 1) for how in _KINDS
    ]
    for number, how in shuffled(every, draw, count * 3 // 4):
        tally.case(
            f"new, {_KINDS[how]}", _failed(place, "new", number, how, draw.choice(_ERRORS), tally)
        )
    while tally.cases < count:
        mode, how = draw.choice([*_MODES]), draw.choice([*_KINDS])
        number = draw.randint(1, int(ended.num_calls * 1.3))
        tally.case(
            f"{mode}, {_KINDS[how]}", _failed(place, mode, number, how, draw.choice(_ERRORS), tally)
        )


def _watch(place: Place, number: int = 0, how: int = 0, error: int = 0) -> Watch:
    return Watch(place.root, number, how, error, looks=True, source=place.src)


def _failed(place: Place, mode: str, number: int, how: int, error: int, tally: Tally) -> str:
    has_old = mode == "--overwrite"
    place.clear(has_old=has_old)
    if mode == "--resume":
        (begun,) = place.zygote.run(Job(place.command(), Watch(place.root, 60, KILL_BEFORE)))
        if begun.code != -9:
            return f"it could not be begun: {said(begun)}"
    watch = _watch(place, number, how, error)
    (ended,) = place.zygote.run(Job(place.command(*_MODES[mode]), watch))
    tally.note(f"exit {ended.code}")
    place_of_call = f"call {number}, {errno.errorcode[error]}: "
    problem = _judged(place, ended, how, has_old) or place.problem(has_old=has_old)
    if not problem and ended.code:
        problem = place.finish(has_old=has_old)
    return problem and f"{place_of_call}{problem} [{said(ended)}]"


def _judged(place: Place, ended: Ended, how: int, has_old: bool) -> str:
    """The code and the message, by which call failed."""
    call, _, path = ended.call.partition(" ")
    is_short = how == SHORT or not call
    problem = manners(
        ended, (0,) if is_short else (0, 3) if path.startswith(str(place.src)) else (0, 4)
    )
    if problem or ended.code:
        return problem
    if call in ("fsync", "fdatasync") and not is_short:
        return "what could not be flushed was taken for written"
    if _LEFT in ended.stderr:  # said, and no failure: the new artifact is in its place
        return place.finish(has_old=has_old)
    return place.is_final(has_old=has_old)
