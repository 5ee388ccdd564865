"""Multiple-choice knapsack: one option for each layer, of least total loss within a budget. Whole numbers only.

Costs and losses are integers, so that sums are exact and the choice is the same on every machine. The bound is that of
the linear relaxation, whose optimum lies on the convex hulls of the layers' options. A search over (cost, loss) states
closes the gap: a state is dropped where another one is no dearer and no worse, or where the bound of what is left shows
that it cannot lead to a better choice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

_MAX_STATES = 4096  # kept after each layer; more than a search over 100 layers has needed


class Option(NamedTuple):
    """One option of a layer: its cost, its loss, and its number among the layer's options."""

    cost: int
    loss: int
    number: int


class Step(NamedTuple):
    """A step along the hull of one layer, to the option `number`: more cost, less loss."""

    layer: int
    number: int
    cost: int
    gain: int


@dataclass(frozen=True)
class Solution:
    """A choice within the budget. picks: number of each layer's option.

    bound: no choice within the budget loses less. is_optimal: True if the search proved that no choice is better.
    """

    picks: tuple[int, ...]
    cost: int
    loss: int
    bound: int
    is_optimal: bool


def least_cost(layers: Sequence[Sequence[Option]]) -> int:
    """Return the cost of the cheapest choice."""
    return sum(min(options).cost for options in layers)


def hull_steps(layers: Sequence[Sequence[Option]]) -> tuple[list[int], list[Step]]:
    """Return the cheapest option of each layer, and all steps along the hulls, the most gain for its cost first.

    Every prefix of the steps is a choice that no choice of the same cost or less beats.
    """
    hulls = [_hull(_pareto(options)) for options in layers]
    steps = [
        Step(number, after.number, after.cost - before.cost, before.loss - after.loss)
        for number, hull in enumerate(hulls)
        for before, after in pairwise(hull)
    ]
    steps.sort(key=lambda step: (-Fraction(step.gain, step.cost), step.layer))  # stable along a hull
    return [hull[0].number for hull in hulls], steps


def _pareto(options: Sequence[Option]) -> list[Option]:
    """Return the options that no other one beats, from the cheapest to the dearest; of equals the first."""
    kept: list[Option] = []
    for option in sorted(options):
        if not kept or option.loss < kept[-1].loss:
            kept.append(option)
    return kept


def _hull(pareto: Sequence[Option]) -> list[Option]:
    """Return the lower convex hull of Pareto options: the gain for each unit of cost falls from step to step."""
    hull: list[Option] = []
    for new in pareto:
        while len(hull) > 1:
            (a, b), c = hull[-2:], new
            if (a.loss - b.loss) * (c.cost - b.cost) > (b.loss - c.loss) * (b.cost - a.cost):
                break
            hull.pop()
        hull.append(new)
    return hull


@dataclass(frozen=True)
class _Rest:
    """The linear relaxation of the layers from one on: costs and losses after each step along their hulls."""

    steps: list[Step]
    costs: list[int] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, first: int, cheapest: Sequence[Option], steps: Sequence[Step]) -> _Rest:
        """Return the relaxation of the layers `first` and later."""
        rest = cls([step for step in steps if step.layer >= first])
        cost, loss = (sum(option[part] for option in cheapest[first:]) for part in (0, 1))
        rest.costs.append(cost)
        rest.losses.append(loss)
        for step in rest.steps:
            cost, loss = cost + step.cost, loss - step.gain
            rest.costs.append(cost)
            rest.losses.append(loss)
        return rest

    def within(self, room: int) -> tuple[int, int, int]:
        """Return (whole steps that fit, loss after them, bound of the loss) for a cost of at most `room`."""
        count = bisect_right(self.costs, room) - 1
        loss = self.losses[count]
        if count == len(self.steps):
            return count, loss, loss
        step = self.steps[count]
        return count, loss, loss - step.gain * (room - self.costs[count]) // step.cost


class _State(NamedTuple):
    cost: int
    loss: int
    parent: int  # number of the state before this layer
    pick: int


class _Search:
    """States after each layer, and the best choice that was found: a state, and whole steps for the layers after it."""

    def __init__(self, layers: Sequence[Sequence[Option]], budget: int) -> None:
        self.budget = budget
        self.options = [_pareto(options) for options in layers]
        first, steps = hull_steps(layers)
        cheapest = [options[0] for options in self.options]
        assert first == [option.number for option in cheapest]
        self.cheapest = first
        self.rests = [_Rest.of(number, cheapest, steps) for number in range(len(layers) + 1)]
        self.trail: list[list[_State]] = [[_State(0, 0, -1, -1)]]
        count, self.best_loss, self.bound = self.rests[0].within(budget)
        self.best = (0, 0, count)  # layers that are done, number of the state, steps of the rest
        self.is_whole = True

    def run(self) -> None:
        for number in range(len(self.options)):
            kept = _undominated(self._next_states(number))
            if len(kept) > _MAX_STATES:
                self.is_whole = False
                rest = self.rests[number + 1]
                kept.sort(key=lambda s: (s.loss + rest.within(self.budget - s.cost)[2], s))
                kept = sorted(kept[:_MAX_STATES])
            self.trail.append(kept)
            self._look_for_better(number + 1)

    def _next_states(self, number: int) -> Iterator[_State]:
        """Yield the states after a layer that may lead to a choice better than the best one."""
        rest, budget = self.rests[number + 1], self.budget
        for parent, state in enumerate(self.trail[-1]):
            for option in self.options[number]:
                cost, loss = state.cost + option.cost, state.loss + option.loss
                if cost + rest.costs[0] > budget:
                    break  # the options after it are dearer
                if loss + rest.within(budget - cost)[2] < self.best_loss:
                    yield _State(cost, loss, parent, option.number)

    def _look_for_better(self, done: int) -> None:
        rest = self.rests[done]
        for number, state in enumerate(self.trail[done]):
            count, loss, _ = rest.within(self.budget - state.cost)
            if state.loss + loss < self.best_loss:
                self.best_loss, self.best = state.loss + loss, (done, number, count)

    def picks(self) -> list[int]:
        done, number, count = self.best
        picks = list(self.cheapest)
        for step in self.rests[done].steps[:count]:
            picks[step.layer] = step.number
        for layer in range(done, 0, -1):
            state = self.trail[layer][number]
            picks[layer - 1], number = state.pick, state.parent
        return picks


def _undominated(states: Iterator[_State]) -> list[_State]:
    """Return the states that no other one beats, from the cheapest to the dearest."""
    kept: list[_State] = []
    for state in sorted(states):
        if not kept or state.loss < kept[-1].loss:
            kept.append(state)
    return kept


def solve(layers: Sequence[Sequence[Option]], budget: int) -> Solution:
    """Choose one option for each layer, so that costs sum to at most `budget` and losses to as little as possible.

    Every layer has an option, and `budget` is at least `least_cost`. Options of one layer have different numbers.
    """
    assert least_cost(layers) <= budget
    search = _Search(layers, budget)
    search.run()
    picks = search.picks()
    of_index = [{option.number: option for option in options} for options in layers]
    chosen = [options[pick] for options, pick in zip(of_index, picks, strict=True)]
    cost, loss = (sum(map(itemgetter(part), chosen)) for part in (0, 1))
    assert cost <= budget
    assert loss == search.best_loss
    return Solution(tuple(picks), cost, loss, search.bound, search.is_whole)
