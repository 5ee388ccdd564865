"""The judge of scripts/check_eplb.py."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.check_eplb import judge

ANSWERS = [[[5, -0.5], [7, -0.25]], [[1, -1.0], [2, -2.0]]]
NEAR = [[[5, -0.5], [7, -0.26]], [[1, -1.0], [2, -2.0]]]
OTHER = [[[5, -0.5], [8, -0.26]], [[1, -1.0], [2, -2.0]]]
FIRST, MOVED = [[0, 1, 2, 0], [0, 1, 2, 0]], [[2, 1, 0, 0], [0, 1, 2, 0]]
PLAIN: dict[str, Any] = {"answers": ANSWERS, "again": ANSWERS}


def found(*rounds: Any, maps: Any) -> dict[str, Any]:
    return {**PLAIN, "rounds": list(rounds), "maps": maps}


@pytest.mark.parametrize(
    ("words", "exact", "several"),
    [
        (found(ANSWERS, maps=[[FIRST, FIRST], [MOVED, MOVED]]), True, True),
        (found(NEAR, maps=[[FIRST, FIRST], [MOVED, MOVED]]), False, True),
        (found(OTHER, maps=[[FIRST, FIRST], [MOVED, MOVED]]), False, False),
        (found(ANSWERS, maps=[[MOVED, MOVED], [MOVED, MOVED]]), True, True),  # moved before the first round
        (found(ANSWERS, maps=[[FIRST, FIRST], [FIRST, FIRST]]), False, False),  # nothing was moved
        (found(ANSWERS, maps=[[FIRST, FIRST], [MOVED, FIRST]]), False, False),
        (PLAIN, True, True),
    ],
)
def test_the_verdict(words: dict[str, Any], exact: bool, several: bool) -> None:
    assert [judge(PLAIN, words, is_exact=flag)["good"] for flag in (True, False)] == [exact, several]


def test_the_report_tells_how_many_places_changed() -> None:
    case = judge(PLAIN, found(NEAR, maps=[[FIRST, FIRST], [MOVED, MOVED]]), is_exact=False)
    assert (case["moved_before"], case["moved"]) == (0, [2])
    assert case["log_p"] == pytest.approx(0.01)
