"""Test effort: `make test` runs a sample of the large grids, `make test-all` (HQCONV_TESTS=all) runs them whole.

HQCONV_TESTS=rest runs the cases that `make test` leaves out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

ALL, REST = (os.environ.get("HQCONV_TESTS") == word for word in ("all", "rest"))
NUM_CASES = 4  # of each function, at most, in `make test`


def num_examples(whole: int) -> int:
    """The number of drawn examples: `whole` in `make test-all`, a fifth of it, but 8 at least, in `make test`."""
    return whole if ALL or REST else max(whole // 5, 8)


def sample(cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """Cases of one function that `make test` runs: evenly spread, one in `sampled`'s number, and NUM_CASES at most.

    Of tests for a GPU, which skip elsewhere, there may be more.
    """
    cases = [case for case in cases if not case.get_closest_marker("full")]
    sampled = cases[0].get_closest_marker("sampled") if cases else None
    every = sampled.args[0] if sampled else 1
    count = -(-len(cases) // every)
    if not any(case.get_closest_marker("cuda") for case in cases):
        count = min(count, NUM_CASES)
    return [cases[number * len(cases) // count] for number in range(count)]
