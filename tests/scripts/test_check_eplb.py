"""The judge of scripts/check_eplb.py."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.check_eplb import furthest, judge

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
    control = {"same_tokens": [True, True], "log_p": 1.0}
    assert [judge(PLAIN, words, is_exact=flag, control=control)["good"] for flag in (True, False)] == [exact, several]


@pytest.mark.parametrize(
    ("control", "good"),
    [
        ({"same_tokens": [True, False], "log_p": 0.01}, True),
        ({"same_tokens": [True, True], "log_p": 0.01}, False),  # only ours has other tokens
        ({"same_tokens": [True, False], "log_p": 0.001}, False),  # ours is further away
        (None, True),  # this is the control
    ],
)
def test_other_tokens_are_good_where_the_control_has_some_too(control: dict[str, Any] | None, good: bool) -> None:
    answers = [[[5, -0.51], [8, -0.26]], [[1, -1.0], [2, -2.0]]]
    words = found(answers, maps=[[FIRST, FIRST], [MOVED, MOVED]])
    assert judge(PLAIN, words, is_exact=False, control=control)["good"] is good


def test_the_report_tells_how_many_places_changed() -> None:
    case = judge(PLAIN, found(NEAR, maps=[[FIRST, FIRST], [MOVED, MOVED]]), is_exact=False)
    assert (case["moved_before"], case["moved"]) == (0, [2])
    assert case["log_p"] == pytest.approx(0.01)


def test_the_control_is_the_worst_of_its_engines() -> None:
    cases = [
        {"log_p": 0.0, "same_tokens": [True, True]},
        {"log_p": 0.3, "same_tokens": [True, True]},
        {"log_p": 0.1, "same_tokens": [True, False]},
        {"good": False, "why": ["no GPU"]},
    ]
    assert furthest(cases) == {"log_p": 0.3, "same_tokens": [True, True, False]}
