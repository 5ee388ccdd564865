"""The kill storm: SIGKILL before, within and after every call that changes the disk, and again while it is resumed."""

from __future__ import annotations

from random import Random

from scripts.torture.commands import KILL_AFTER, KILL_BEFORE, KILL_WITHIN, Job, Watch
from scripts.torture.place import Place, manners, mode, shuffled
from scripts.torture.tally import Tally

_HOWS = (KILL_BEFORE, KILL_WITHIN)  # within a write half of its bytes; after any other call
_KINDS = {
    (False, False): "new",
    (True, False): "--overwrite",
    (True, True): "--overwrite by renames",
}


def run(place: Place, count: int, tally: Tally) -> None:
    """`count` kills: at every call first, as far as they go, then at random ones, up to four in one conversion."""
    draw = Random(tally.seed)
    every: list[tuple[int, ...]] = []
    lengths = {}
    for kind in _KINDS:
        lengths[kind] = _once(place, kind, Watch(place.root, no_exchange=kind[1]))
        every += [(*kind, number, how) for number in range(1, lengths[kind] + 1) for how in _HOWS]
    for has_old, renames, number, how in shuffled(every, draw, count * 3 // 4):
        kind = (bool(has_old), bool(renames))
        tally.case(f"{_KINDS[kind]}, at every call", _killed(place, kind, [(number, how)])[0])
    while tally.cases < count:
        kind = draw.choice([*_KINDS])
        times = [
            (
                draw.randint(1, max(1, int(lengths[kind] * draw.uniform(0.05, 1)))),
                draw.choice((*_HOWS, KILL_AFTER)),
            )
            for _ in range(draw.randint(2, 4))
        ]
        problem, num_kills = _killed(place, kind, times)
        for number in range(max(1, num_kills)):
            tally.case(f"{_KINDS[kind]}, one after the other", problem if number == 0 else "")


def _once(place: Place, kind: tuple[bool, bool], watch: Watch) -> int:
    """How many calls an undisturbed conversion has."""
    has_old, _ = kind
    place.clear(has_old=has_old)
    (ended,) = place.zygote.run(Job(place.command(*mode(has_old)), watch))
    problem = manners(ended, (0,)) or place.is_final(has_old=has_old)
    if problem:
        raise RuntimeError(problem)
    return ended.num_calls


def _killed(place: Place, kind: tuple[bool, bool], times: list[tuple[int, int]]) -> tuple[str, int]:
    """One conversion, killed so many times; what was wrong, and how many kills there were."""
    has_old, renames = kind
    place.clear(has_old=has_old)
    options = mode(has_old)
    for attempt, (number, how) in enumerate(times):
        watch = Watch(place.root, number, how, no_exchange=renames)
        (ended,) = place.zygote.run(Job(place.command(*options), watch))
        where = f"kill {number} ({ended.call}): "
        problem = manners(ended, (0, -9)) or place.problem(has_old=has_old, old_may_rest=renames)
        if problem:
            return where + problem, attempt + 1
        if ended.code == 0:  # it had fewer calls left
            return place.is_final(has_old=has_old), attempt
        options = place.again(has_old=has_old)
    problem = place.finish(has_old=has_old)
    return problem and where + problem, len(times)
