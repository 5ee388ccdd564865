"""Budgets of an allocation: which choice they give, and what is said where none fits."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hqconv.errors import RequestError
from hqconv.planning.allocation import Gemm, Option, choose, hull_of, limit_bytes

Gemms = dict[Gemm, list[Option]]
OPTIONS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 50)), min_size=1, max_size=5)
GEMMS = st.lists(OPTIONS, min_size=1, max_size=5).map(lambda gemms: named(*gemms))


def named(*gemms: list[tuple[int, int]]) -> Gemms:
    return {
        (str(number), "w13"): [Option(*pair, str(index)) for index, pair in enumerate(options)]
        for number, options in enumerate(gemms)
    }


def all_choices(gemms: Gemms) -> list[tuple[int, float]]:
    """Cost and loss of every choice."""
    return [
        (sum(o.cost for o in one), sum(o.loss for o in one))
        for one in itertools.product(*gemms.values())
    ]


@given(GEMMS, st.integers(0, 80))
def test_a_choice_loses_less_than_one_step_above_the_best(gemms: Gemms, more: int) -> None:
    choices = all_choices(gemms)
    budget = min(cost for cost, _ in choices) + more
    best = min(loss for cost, loss in choices if cost <= budget)
    chosen = choose(gemms, budget, 1)
    loss = sum(option.loss for option in chosen.values())
    assert all(option in gemms[gemm] for gemm, option in chosen.items())
    assert sum(option.cost for option in chosen.values()) <= budget
    steps = [
        a.loss - b.loss
        for options in gemms.values()
        for a, b in itertools.pairwise(hull_of(options))
    ]
    assert loss == best or loss - best < max(steps)


@given(GEMMS)
def test_no_choice_of_the_same_cost_beats_whole_steps(gemms: Gemms) -> None:
    """Where the budget is that of some steps along the hulls, nothing is left over, and the choice is the best."""
    choices, hulls = all_choices(gemms), {gemm: hull_of(options) for gemm, options in gemms.items()}
    steps = [
        ((b.loss - a.loss) / (b.cost - a.cost), gemm, b.cost - a.cost)
        for gemm, hull in hulls.items()
        for a, b in itertools.pairwise(hull)
    ]
    budget = sum(hull[0].cost for hull in hulls.values())
    for slope, _, cost in [(None, None, 0), *sorted(steps)]:
        budget += cost
        if slope is not None and sum(one == slope for one, *_ in steps) > 1:
            continue  # equal steps may come in another order
        loss = sum(option.loss for option in choose(gemms, budget, 1).values())
        assert loss == min(other for spent, other in choices if spent <= budget)


def test_the_rest_of_a_budget_is_used() -> None:
    """The second step does not fit; a cheaper option off the hull, and a step of another GEMM, do."""
    gemms = named([(1, 100), (11, 40), (26, 35), (31, 0)], [(1, 10), (6, 9)])

    def chosen(budget: int) -> list[str]:
        return [option.name for option in choose(gemms, budget, 1).values()]

    assert (chosen(31), chosen(26), chosen(37)) == (["2", "0"], ["1", "1"], ["3", "1"])


def test_the_gemm_that_gains_more_gets_more_bytes() -> None:
    gemms = named([(500, 9), (1000, 1), (2000, 0)], [(500, 36), (1000, 4), (2000, 0)])
    for budget, expected in ((1500, "01"), (1999, "01"), (2000, "11"), (10**9, "22")):
        assert "".join(option.name for option in choose(gemms, budget, 1).values()) == expected


def test_bits_are_bytes_over_weights() -> None:
    """To two decimals: second scales are some thousandths of a bit."""
    assert limit_bytes(None, 4.25, 8000) == 4255
    assert limit_bytes(77, None, 8000) == 77


@pytest.mark.parametrize("budget", [(None, None), (5, 4.0)])
def test_one_budget_is_needed(budget: Any) -> None:
    with pytest.raises(RequestError, match="needs one budget"):
        limit_bytes(*budget, 8000)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_budget_that_is_too_small_names_the_least_that_works(cost: int, count: int) -> None:
    gemms = named([(cost, 1)], [(cost, 1)])
    with pytest.raises(RequestError, match="too small") as error:
        choose(gemms, 2 * cost - 1, count)
    match = re.search(r"at least (\d+) bytes of .*, or ([\d.]+) bits", error.value.expected)
    assert match is not None
    for limit in (
        int(match[1]),
        limit_bytes(None, float(match[2]), count) + 1,
    ):  # + 1: a bit in the last decimal
        assert len(choose(gemms, limit, count)) == 2
