"""Two and three commands at once in one output, each in a mode of its own, and killed at random moments.

At most one of them works, or parts of one count; the others say who does, with exit code 4. Whatever was killed when,
a last command gives the undisturbed bytes.
"""

from __future__ import annotations

import signal
from random import Random

from scripts.torture.commands import Ended, Job
from scripts.torture.place import Place, manners, said
from scripts.torture.tally import Tally

_PARTS = ("1/2", "2/2", "3/3")
_WHOLE = ((), ("--resume",), ("--overwrite",), ("--update",))
_MODES: tuple[tuple[str, ...], ...] = (*_WHOLE, *(("--part", part) for part in _PARTS))


def run(place: Place, count: int, tally: Tally) -> None:
    """`count` places, each with one to three rounds of commands."""
    draw = Random(tally.seed)
    for _ in range(count):
        has_old, size = draw.random() < 0.5, draw.randint(2, 3)
        place.clear(has_old=has_old)
        problem = ""
        for _ in range(draw.randint(1, 3)):
            problem = problem or _round(place, draw, size, has_old, tally)
        tally.case(
            f"{size} processes{', --overwrite' if has_old else ''}",
            problem or place.finish(has_old=has_old),
        )


def _round(place: Place, draw: Random, size: int, has_old: bool, tally: Tally) -> str:
    jobs = []
    for _ in range(size):
        mode = draw.choice(_MODES)
        number = signal.SIGKILL if draw.random() < 0.6 else 0
        jobs.append(Job(place.command(*mode), signal=number, seconds=draw.uniform(0, 0.25)))
    ended = place.zygote.run(*jobs)
    for one in ended:
        tally.note("killed" if one.code == -9 else f"exit {one.code}")
    problems = [manners(one, (0, 4, -9)) or _refusal(one) for one in ended]
    problems.append(place.problem(has_old=has_old))
    words = [" ".join(job.arguments[14:]) for job in jobs]
    return next(
        (f"{problem} [{words}, {[said(one) for one in ended]}]" for problem in problems if problem),
        "",
    )


def _refusal(ended: Ended) -> str:
    """A command that was not killed either works, or says why it does not."""
    texts = (
        "Another process is at work",
        "cannot be used",
        "holds a finished artifact that differs",
    )
    if ended.code != 4 or any(text in ended.stderr for text in texts):
        return ""
    return f"another message: {said(ended)}"
