"""The choice of one option for each layer, against every choice there is."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hqconv.planning import knapsack
from hqconv.planning.knapsack import Option, Solution, hull_steps, least_cost, solve

Layers = list[list[Option]]
OPTIONS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 50)), min_size=1, max_size=5)
LAYERS = st.lists(OPTIONS, min_size=1, max_size=5).map(
    lambda layers: [[Option(*pair, number) for number, pair in enumerate(layer)] for layer in layers]
)


def all_choices(layers: Layers) -> list[tuple[int, int]]:
    """Cost and loss of every choice."""
    return [(sum(o.cost for o in one), sum(o.loss for o in one)) for one in itertools.product(*layers)]


def sums(layers: Layers, found: Solution) -> tuple[int, int]:
    chosen = [layer[pick] for layer, pick in zip(layers, found.picks, strict=True)]
    return sum(o.cost for o in chosen), sum(o.loss for o in chosen)


@given(LAYERS, st.integers(0, 80))
def test_no_choice_within_the_budget_is_better(layers: Layers, more: int) -> None:
    budget = least_cost(layers) + more
    best = min(loss for cost, loss in all_choices(layers) if cost <= budget)
    found = solve(layers, budget)
    assert found.is_optimal
    assert (found.cost, found.loss) == sums(layers, found)
    assert found.cost <= budget
    assert found.bound <= found.loss == best


@given(LAYERS, st.integers(0, 80))
def test_a_search_that_is_cut_short_is_still_honest(layers: Layers, more: int) -> None:
    budget = least_cost(layers) + more
    best = min(loss for cost, loss in all_choices(layers) if cost <= budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "_MAX_STATES", 1)
        found = solve(layers, budget)
    assert (found.cost, found.loss) == sums(layers, found)
    assert found.cost <= budget
    assert found.bound <= best <= found.loss
    assert found.loss == best or not found.is_optimal


@given(LAYERS)
def test_no_choice_of_the_same_cost_beats_a_point_of_the_curve(layers: Layers) -> None:
    picks, steps = hull_steps(layers)
    choices = all_choices(layers)
    chosen = [layer[pick] for layer, pick in zip(layers, picks, strict=True)]
    for step in [None, *steps]:
        if step is not None:
            chosen[step.layer] = layers[step.layer][step.number]
        cost, loss = sum(o.cost for o in chosen), sum(o.loss for o in chosen)
        assert loss == min(other for spent, other in choices if spent <= cost)
    assert sum(o.loss for o in chosen) == min(loss for _, loss in choices)


def model(num_layers: int, seed: int) -> Layers:
    """Layers of a large model: sizes of its schemas, errors of Gaussian weights that differ from layer to layer."""
    draw = random.Random(seed)
    kinds = ((2.56, 0.37), (3.25, 0.19), (4.125, 0.105), (4.25, 0.117), (4.5, 0.087), (5.125, 0.052), (8.0, 0.008))
    return [
        [
            Option(
                round(1.4e9 * bits) + 64 * number, int(math.ldexp((error * draw.uniform(0.8, 1.2)) ** 2, 64)), number
            )
            for number, (bits, error) in enumerate(kinds)
        ]
        for _ in range(num_layers)
    ]


@pytest.mark.parametrize("bits", [2.6, 3.3, 4.25, 5.0, 7.0])
def test_large_models_are_solved_whole(bits: float) -> None:
    layers = model(94, seed=3)
    found = solve(layers, round(94 * 1.4e9 * bits))
    assert found.is_optimal
    assert found.loss - found.bound < 0.02 * found.loss


def test_milp_finds_nothing_better() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    layers, count = model(40, seed=5), 7
    budget = round(40 * 1.4e9 * 4.25)
    costs = [option.cost / 1e9 for layer in layers for option in layer]
    losses = [math.ldexp(option.loss, -64) for layer in layers for option in layer]
    rows = [[float(i // count == layer) for i in range(len(costs))] for layer in range(len(layers))]
    constraints = [optimize.LinearConstraint(rows, 1, 1), optimize.LinearConstraint([costs], -math.inf, budget / 1e9)]
    whole = optimize.milp(losses, constraints=constraints, integrality=[1] * len(costs), bounds=optimize.Bounds(0, 1))
    assert math.ldexp(solve(layers, budget).loss, -64) <= whole.fun * (1 + 1e-9)
