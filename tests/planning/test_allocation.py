"""Budgets of an allocation: which choice they give, and what is said where none fits."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hqconv.errors import RequestError
from hqconv.planning.allocation import Budget, LayerOption, LayerOptions, Option, allocate, choose, hull_steps
from hqconv.schemas.options import Objective


def layer(name: str, weights: int, share: Fraction, options: list[tuple[int, float]]) -> LayerOptions:
    each = (LayerOption(f"s{number}", size, -int(-size * share), loss) for number, (size, loss) in enumerate(options))
    return LayerOptions(name, weights, weights * share, tuple(each))


TWO = (
    layer("a", 1000, Fraction(1, 4), [(500, 0.09), (1000, 0.01), (2000, 0.0001)]),
    layer("b", 1000, Fraction(1, 2), [(500, 0.36), (1000, 0.04), (2000, 0.0004)]),
)
SIZES = st.lists(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=4), min_size=1, max_size=4
)


OPTIONS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 50)), min_size=1, max_size=5)
LAYERS = st.lists(OPTIONS, min_size=1, max_size=5).map(
    lambda layers: [[Option(*pair, number) for number, pair in enumerate(layer)] for layer in layers]
)


def all_choices(layers: list[list[Option]]) -> list[tuple[int, int]]:
    """Cost and loss of every choice."""
    return [(sum(o.cost for o in one), sum(o.loss for o in one)) for one in itertools.product(*layers)]


@given(LAYERS, st.integers(0, 80))
def test_a_choice_loses_less_than_one_step_above_the_best(layers: list[list[Option]], more: int) -> None:
    choices, (cheapest, steps) = all_choices(layers), hull_steps(layers)
    budget = sum(option.cost for option in cheapest) + more
    best = min(loss for cost, loss in choices if cost <= budget)
    chosen, bound = choose(layers, budget)
    loss = sum(option.loss for option in chosen)
    assert all(option in layer for option, layer in zip(chosen, layers, strict=True))
    assert sum(option.cost for option in chosen) <= budget
    assert bound <= best <= loss
    assert loss == bound or loss - bound < max(step.gain for step in steps)


@given(LAYERS)
def test_no_choice_of_the_same_cost_beats_a_point_of_the_curve(layers: list[list[Option]]) -> None:
    chosen, steps = hull_steps(layers)
    choices = all_choices(layers)
    for step in [None, *steps]:
        if step is not None:
            chosen[step.layer] = layers[step.layer][step.number]
        cost, loss = sum(o.cost for o in chosen), sum(o.loss for o in chosen)
        assert loss == min(other for spent, other in choices if spent <= cost)
    assert sum(o.loss for o in chosen) == min(loss for _, loss in choices)


def test_the_rest_of_a_budget_is_used() -> None:
    """The second step does not fit; a cheaper option off the hull, and a step of another layer, do."""
    layers = [
        [Option(0, 100, 0), Option(10, 40, 1), Option(25, 35, 2), Option(30, 0, 3)],
        [Option(0, 10, 0), Option(5, 9, 1)],
    ]
    assert [option.number for option in choose(layers, 29)[0]] == [2, 0]
    assert [option.number for option in choose(layers, 24)[0]] == [1, 1]
    chosen, bound = choose([layers[0]], 29)
    assert ([option.number for option in chosen], bound) == ([2], 2)
    assert [option.number for option in choose(layers, 35)[0]] == [3, 1]


def names(layers: tuple[LayerOptions, ...], **budget: float) -> list[str]:
    found = allocate(layers, Budget(budget.get("size"), budget.get("bits")))  # type: ignore[arg-type]
    return [option.candidate for option in found.chosen]


def test_the_layer_that_gains_more_gets_more_bytes() -> None:
    assert names(TWO, size=1500) == ["s0", "s1"]
    assert names(TWO, size=1999) == ["s0", "s1"]
    assert names(TWO, size=2000) == ["s1", "s1"]
    assert names(TWO, size=10**9) == ["s2", "s2"]


def test_bits_are_bytes_over_weights() -> None:
    assert names(TWO, bits=8.0) == names(TWO, size=2000)
    assert names(TWO, bits=7.99) == names(TWO, size=1999)
    assert names(TWO, bits=7.995) == names(TWO, size=2000)  # to two decimals


def test_a_point_has_the_sums_of_its_layers() -> None:
    found = allocate(TWO, Budget(1500, None))
    assert found.point.size_bytes == 1500
    assert found.point.bits == 6.0
    assert found.point.token_bytes == 125 + 500
    assert found.point.relative_error == math.sqrt((0.09 + 0.04) / 2)
    assert found.uniform["s1"].size_bytes == 2000
    assert [point.size_bytes for point in found.curve] == [1000, 1500, 2000, 3000, 4000]


def test_bandwidth_counts_what_a_token_reads() -> None:
    """The layer with fewer experts for a token is cheaper to make exact."""
    found = allocate(TWO, Budget(750, None, "bandwidth"))
    assert [option.candidate for option in found.chosen] == ["s1", "s1"]
    assert found.point.token_bytes == 750
    assert found.limit_bytes == 750
    found = allocate(TWO, Budget(None, 8.0, "bandwidth"))
    assert found.limit_bytes == 750  # 8 bits for 250 + 500 weights


@pytest.mark.parametrize("objective", ["size", "bandwidth"])
@given(sizes=SIZES, more=st.integers(0, 60))
def test_the_choice_keeps_the_budget_and_the_bound(
    objective: Objective, sizes: list[list[tuple[int, float]]], more: int
) -> None:
    layers = [layer(f"l{i}", 64, Fraction(1, i + 1), options) for i, options in enumerate(sizes)]
    cost = (lambda o: o.size_bytes) if objective == "size" else (lambda o: o.token_bytes)
    limit = sum(min(map(cost, one.options)) for one in layers) + more
    found = allocate(layers, Budget(limit, None, objective))
    choices = itertools.product(*(one.options for one in layers))
    best = min(math.fsum(o.loss for o in one) for one in choices if sum(map(cost, one)) <= limit)
    assert sum(map(cost, found.chosen)) <= limit
    least = math.sqrt(best / len(layers))
    assert found.bound <= least + 1e-9
    assert found.point.relative_error >= least - 1e-9
    assert not found.is_optimal or found.point.relative_error == pytest.approx(least, abs=1e-9)


@pytest.mark.parametrize("objective", ["size", "bandwidth"])
def test_a_budget_that_is_too_small_names_the_least_that_works(objective: Objective) -> None:
    with pytest.raises(RequestError) as error:
        allocate(TWO, Budget(10, None, objective))
    match = re.search(r"at least (\d+) bytes of .*, or ([\d.]+) bits", error.value.expected)
    assert match is not None
    least, bits = int(match[1]), float(match[2])
    assert [option.candidate for option in allocate(TWO, Budget(least, None, objective)).chosen] == ["s0", "s0"]
    assert [option.candidate for option in allocate(TWO, Budget(None, bits, objective)).chosen] == ["s0", "s0"]
    for budget in (Budget(least - 1, None, objective), Budget(None, bits - 0.001, objective)):
        with pytest.raises(RequestError, match="too small"):
            allocate(TWO, budget)


def test_a_limit_of_the_error_leaves_candidates_out() -> None:
    found = allocate(TWO, Budget(10**6, None, max_layer_error=0.25))
    assert [option.candidate for option in found.chosen] == ["s2", "s2"]
    found = allocate(TWO, Budget(1500, None, max_layer_error=0.4))
    assert [option.candidate for option in found.chosen] == ["s0", "s1"]
    with pytest.raises(RequestError, match="too small") as error:
        allocate(TWO, Budget(1400, None, max_layer_error=0.4))
    assert "1500 bytes" in error.value.expected
    with pytest.raises(RequestError, match="No candidate keeps the limit") as error:
        allocate(TWO, Budget(10**6, None, max_layer_error=0.015))
    assert "b" in error.value.where
    assert "0.02 with s2" in error.value.found


@pytest.mark.parametrize(
    "given", [(None, None), (5, 4.0), (None, 0.0), (None, -1.0), (None, math.inf), (None, math.nan)]
)
def test_impossible_budgets_are_refused(given: tuple[int | None, float | None]) -> None:
    with pytest.raises(RequestError):
        Budget(*given)
    with pytest.raises(RequestError):
        Budget(5, None, max_layer_error=0)
