"""Mutants by the thousand, in portions that have seeds of their own, in two processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from random import Random

from scripts.torture.tally import Tally

_NUM_PROCESSES = 2
_MAX_S = 60.0  # of a mutant that hangs; the slowest take some milliseconds


@dataclass
class Findings:
    """What a portion's mutants were, and a sentence for each failure."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def judge(self, mutant: str, content: object, look: Callable[[], str]) -> None:
        """Count what `look` says of a mutant; whatever it raises is a failure, and so is a long time."""
        begun = time.monotonic()
        try:
            kind = look()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            kind = "failed"
            self.problems.append(
                f"{mutant}: {type(error).__name__}: {str(error)[:300]}: {content!r}"
            )
        if time.monotonic() - begun > _MAX_S:
            self.problems.append(f"{mutant} took {time.monotonic() - begun:.1f} s: {content!r}")
        self.counts[kind] += 1


def in_portions(
    portion: Callable[[Random, range], Findings], count: int, size: int, tally: Tally
) -> None:
    """Judge `count` mutants, `size` at a time."""
    numbers = [range(start, min(start + size, count)) for start in range(0, count, size)]
    draws = [Random(f"{tally.seed} {portion_numbers.start}") for portion_numbers in numbers]
    with ProcessPoolExecutor(_NUM_PROCESSES, get_context("spawn")) as pool:
        in_turn = pool.map if len(numbers) > 1 else map
        for findings in in_turn(portion, draws, numbers):
            tally.counts.update(findings.counts)
            tally.cases += findings.counts.total()
            for problem in findings.problems:
                tally.problem(problem)
            tally.seconds = time.monotonic() - tally.started_s
