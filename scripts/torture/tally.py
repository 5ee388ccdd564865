"""What a suite did, and what went wrong in it."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

_SHOWN = 20  # problems in the words; all are counted, and printed as they come


@dataclass
class Tally:
    """Cases of one suite; problems: a sentence for each failure. counts: what the cases were, for people."""

    suite: str
    seed: int
    cases: int = 0
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    started_s: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def case(self, kind: str, problem: str = "") -> None:
        """Count a case; "" for one that went well."""
        self.cases += 1
        self.counts[kind] += 1
        self.seconds = time.monotonic() - self.started_s
        if problem:
            self.problem(f"{kind}: {problem}")

    def problem(self, problem: str) -> None:
        """Note a failure of a case that is counted already."""
        self.problems.append(problem)
        print(f"{self.suite}: case {self.cases}: {problem}", file=sys.stderr, flush=True)

    def note(self, what: str) -> None:
        """Count something else that happened."""
        self.counts[what] += 1

    def __str__(self) -> str:
        facts = {
            "suite": self.suite,
            "seed": self.seed,
            "cases": self.cases,
            "failures": len(self.problems),
            "counts": dict(sorted(self.counts.items())),
            "seconds": round(self.seconds, 1),
            "problems": self.problems[:_SHOWN],
        }
        return json.dumps(facts, indent=2)
