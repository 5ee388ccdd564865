"""Allocation of schemas to MoE layers: the candidates, the choice of least error within a budget, the curve around it.

Every layer starts with its cheapest option. Steps along the lower convex hulls of the layers' (cost, loss) options
follow, the most gain for its cost first, as far as the budget goes; the rest of the budget goes to single changes that
fit. No choice within the budget beats the linear relaxation, which takes a part of the first step that does not fit:
the choice loses less than the gain of that one step above it. Costs and losses are integers, so that the choice is the
same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from hqconv.errors import RequestError
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import MoeLayerPlan
from hqconv.planning.plan import ConversionPlan, plan_conversion
from hqconv.planning.source_schema import source_param_dtype
from hqconv.planning.spec import ConversionOptions, default_param_dtype
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.options import BANDWIDTH, SIZE, Objective
from hqconv.schemas.weight_schema import SOURCE, LayerSchema, resolve_layer_schema

# From 2.6 to 8 bits per weight. Of presets of one size the more exact ones, and those that any server runs.
DEFAULT_CANDIDATES = (
    *("int2-g32-zp", "int3-g128", "int3-g32-e4m3", "int3-g32", "int4", "int4-g64", "int4-g32-e4m3", "mxfp4"),
    *("int4-g32", "int4-g16-e4m3", "nvfp4", "int5-g128", "int6-g128", "fp6-e2m3", "fp8", "int8"),
)


@dataclass(frozen=True)
class Candidate:
    """A schema for some or all layers. name: as it was given; schema: None for the source's own.

    layers: the plan of each layer that may get the schema.
    """

    name: str
    schema: LayerSchema | None
    plan: ConversionPlan

    @cached_property
    def layers(self) -> dict[str, MoeLayerPlan]:
        return {layer.name: layer for layer in self.plan.layers}


@dataclass(frozen=True)
class Candidates:
    """All candidates, in the order of preference among equals. left_out: name → reason, of default ones."""

    each: tuple[Candidate, ...]
    options: ConversionOptions
    left_out: Mapping[str, str]

    @cached_property
    def layers(self) -> dict[str, dict[str, MoeLayerPlan]]:
        """Layer → name of a candidate → the layer's plan, in the order of the model."""
        found: dict[str, dict[str, MoeLayerPlan]] = {}
        order = {name: number for one in self.each for number, name in enumerate(one.layers)}
        for name in sorted(order, key=lambda name: (self._first(name).layer.index, order[name])):
            found[name] = {one.name: one.layers[name] for one in self.each if name in one.layers}
        return found

    def _first(self, name: str) -> MoeLayerPlan:
        return next(one.layers[name] for one in self.each if name in one.layers)

    def __getitem__(self, name: str) -> Candidate:
        return next(one for one in self.each if one.name == name)


def plan_candidates(
    options: ConversionOptions, names: Sequence[str] | None, source: Source, target: GpuTarget
) -> Candidates:
    """Plan a conversion under every candidate. names: None for the source's own schema and DEFAULT_CANDIDATES.

    A candidate that the target, the activations or the ranks do not allow is refused if it was named, else left out.
    Raises RequestError then, and where no candidate is left, and InputError for the source.
    """
    experts = source.map_experts()
    given = names or [*_own_schemas(options, source, target), *DEFAULT_CANDIDATES]
    if options.dtype is None:
        own = source_param_dtype(experts) if SOURCE in given else None
        options = replace(options, dtype=own or default_param_dtype(source.config, experts))
    found: list[Candidate] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(given):
        try:
            schema = None if name == SOURCE else resolve_layer_schema(name)
            plan = plan_conversion(replace(options, schema=schema), source, target)
        except RequestError as error:
            if names is not None:
                where = f"--candidates {name}" + (f": {error.where}" if error.where else "")
                parts = {"expected": error.expected, "found": error.found, "remedy": error.remedy}
                raise RequestError(error.what, where=where, **parts) from error
            left_out[name] = " ".join(filter(None, [error.what, f"({error.found})" if error.found else ""]))
            continue
        if not any(_is_same(one, plan) for one in found):
            found.append(Candidate(name, schema, plan))
    if not found:
        name, reason = next(iter(left_out.items()))
        raise RequestError(
            "No candidate fits this request.",
            where="--candidates",
            found=f"{name}: {reason}",
            remedy="Name some with --candidates.",
        )
    return Candidates(tuple(found), options, left_out)


def _own_schemas(options: ConversionOptions, source: Source, target: GpuTarget) -> list[str]:
    """Return the candidates that keep a quantized source's codes: `source`, or presets that keep most of them.

    Where gate and up may have different tensor-level scales, `source` would refuse an expert only when it is read.
    """
    try:
        plan = plan_conversion(replace(options, schema=None), source, target)
    except RequestError:
        return []
    schemas = [layer.encoding.schema for layer in plan.layers]
    if not any(one.is_coupled for schema in schemas for one in schema.each):
        return [SOURCE]
    return [name for name in dict.fromkeys(schema.name for schema in schemas) if name != SOURCE]


def _is_same(known: Candidate, plan: ConversionPlan) -> bool:
    """Return whether an earlier candidate gives every layer the same schema: `source` and its own preset."""
    fields = [{layer.name: layer.encoding.schema.to_dict() for layer in one.layers} for one in (known.plan, plan)]
    return fields[0] == fields[1]


_LOSS_BITS = 64  # of the fraction of a squared relative error: 2^-64 is far below its rounding


@dataclass(frozen=True)
class Budget:
    """The limit of an allocation, as bytes or as mean bits per weight: of all files, or of one token's experts."""

    size_bytes: int | None
    bits: float | None
    objective: Objective = SIZE
    max_layer_error: float | None = None

    def __post_init__(self) -> None:
        if (self.size_bytes is None) == (self.bits is None):
            raise RequestError(
                "An allocation needs one budget.", where="--size, --bits", expected="either --size or --bits"
            )
        for option, value in (("--bits", self.bits), ("--max-layer-error", self.max_layer_error)):
            if value is not None and not 0 < value < math.inf:
                raise RequestError("The option needs a number above 0.", where=option, found=str(value))

    @property
    def option(self) -> str:
        """The option of the command line that gives the limit."""
        return "--size" if self.bits is None else "--bits"

    def to_dict(self) -> dict[str, Any]:
        """Return the budget as a JSON document."""
        return {
            "size_bytes": self.size_bytes,
            "bits": self.bits,
            "objective": self.objective,
            "max_layer_error": self.max_layer_error,
        }


@dataclass(frozen=True)
class LayerOption:
    """One candidate of one layer: its bytes in the files of all ranks, its bytes read for one token, and its loss.

    loss: the squared relative error of all projections together.
    """

    candidate: str
    size_bytes: int
    token_bytes: int
    loss: float

    @property
    def relative_error(self) -> float:
        """Root of the loss."""
        return math.sqrt(self.loss)


@dataclass(frozen=True)
class LayerOptions:
    """The options of one layer. num_weights, token_weights: of all experts in the source, of one token's experts."""

    name: str
    num_weights: int
    token_weights: Fraction
    options: tuple[LayerOption, ...]

    @classmethod
    def of(cls, plans: Mapping[str, MoeLayerPlan], measured: Mapping[str, Mapping[str, Any]] | None) -> LayerOptions:
        """Return the options of one layer from the plan and the measurement of each candidate.

        measured: candidate → projection → figures of `CandidateMeasurements.errors`; None for sizes alone.
        """
        layer = next(iter(plans.values())).layer
        losses = dict.fromkeys(plans, 0.0) if measured is None else _losses(plans, measured)
        count = layer.num_experts * len(layer.roles) * layer.hidden_size * layer.intermediate_size
        options = (LayerOption(name, _size_bytes(one), _token_bytes(one), losses[name]) for name, one in plans.items())
        share = Fraction(min(layer.top_k, layer.num_experts), layer.num_experts)
        return cls(layer.name, count, count * share, tuple(options))


def _size_bytes(plan: MoeLayerPlan) -> int:
    return sum(file.size_bytes for file in plan.files)


def _token_bytes(plan: MoeLayerPlan) -> int:
    """Return the bytes of the experts that one token takes, on all tensor-parallel ranks; redundant copies rest."""
    layer, tensors = plan.layer, sum(ref.num_bytes for file in plan.files for ref in file.tensors.values())
    num_stored = layer.num_experts + plan.grid.redundant
    return -(-tensors * min(layer.top_k, layer.num_experts) // num_stored)


def _losses(plans: Mapping[str, MoeLayerPlan], measured: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the loss of each candidate: the error of all projections over their power.

    Kept codes have no measured power, so the power is that of the candidate with the most.
    """
    terms = {name: [(one["error"], one["power"]) for one in measured[name].values()] for name in plans}
    power = max(math.fsum(of_role for _, of_role in one) for one in terms.values())
    return {name: math.fsum(error for error, _ in one) / power if power else 0.0 for name, one in terms.items()}


@dataclass(frozen=True)
class Point:
    """Totals of one choice. relative_error: root of the mean squared relative error of the layers."""

    size_bytes: int
    token_bytes: int
    bits: float
    relative_error: float

    def to_dict(self) -> dict[str, Any]:
        """Return the point as a JSON document. bits_per_weight: of the files, padding and scales included."""
        return {
            "size_bytes": self.size_bytes,
            "token_bytes": self.token_bytes,
            "bits_per_weight": self.bits,
            "relative_error": self.relative_error,
        }


@dataclass(frozen=True)
class Allocation:
    """One option for each layer, within the budget.

    limit_bytes: the budget in bytes. bound: no choice within the budget has a smaller relative error. is_optimal: True
    if the choice has this error. uniform: one candidate for all layers, by name. curve: choices that none of the same
    size beats, from the smallest on.
    """

    layers: tuple[LayerOptions, ...]
    chosen: tuple[LayerOption, ...]
    limit_bytes: int
    bound: float
    is_optimal: bool
    uniform: Mapping[str, Point] = field(repr=False)
    curve: tuple[Point, ...] = field(repr=False)

    @property
    def point(self) -> Point:
        """The totals of the choice."""
        return _point(self.layers, self.chosen)

    @property
    def of_layer(self) -> dict[str, LayerOption]:
        """The choice by layer."""
        return {layer.name: option for layer, option in zip(self.layers, self.chosen, strict=True)}


def _point(layers: Sequence[LayerOptions], chosen: Sequence[LayerOption]) -> Point:
    size, count = sum(one.size_bytes for one in chosen), sum(layer.num_weights for layer in layers)
    mean = math.fsum(one.loss for one in chosen) / len(layers)
    return Point(size, sum(one.token_bytes for one in chosen), float(Fraction(8 * size, count)), math.sqrt(mean))


class Option(NamedTuple):
    """One option of a layer as integers: its cost, its loss, and its number among the layer's options."""

    cost: int
    loss: int
    number: int


class Step(NamedTuple):
    """A step along the hull of one layer, to its option with this number: more cost, less loss."""

    layer: int
    number: int
    cost: int
    gain: int


def hull_steps(layers: Sequence[Sequence[Option]]) -> tuple[list[Option], list[Step]]:
    """Return the cheapest option of each layer, and all steps along the hulls, the most gain for its cost first.

    Every prefix of the steps is a choice that no choice of the same cost or less beats.
    """
    hulls = [_hull(options) for options in layers]
    steps = [
        Step(layer, after.number, after.cost - before.cost, before.loss - after.loss)
        for layer, hull in enumerate(hulls)
        for before, after in pairwise(hull)
    ]
    steps.sort(key=lambda step: (-Fraction(step.gain, step.cost), step.layer))  # stable along a hull
    return [hull[0] for hull in hulls], steps


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the lower convex hull of a layer's options: the gain for each unit of cost falls from step to step."""
    hull: list[Option] = []
    for new in sorted(options):
        if hull and new.loss >= hull[-1].loss:
            continue
        while len(hull) > 1:
            a, b = hull[-2:]
            if (a.loss - b.loss) * (new.cost - b.cost) > (b.loss - new.loss) * (b.cost - a.cost):
                break
            hull.pop()
        hull.append(new)
    return hull


def choose(layers: Sequence[Sequence[Option]], budget: int) -> tuple[list[Option], int]:
    """Return one option for each layer within the budget, and the loss below which no choice can be.

    The loss is less than the gain of one step above that bound. budget: at least the cost of the cheapest choice.
    """
    chosen, steps = hull_steps(layers)
    by_number = [{option.number: option for option in options} for options in layers]
    room, bound = budget - sum(option.cost for option in chosen), None
    for step in steps:
        if step.cost > room:
            bound = sum(option.loss for option in chosen) - step.gain * room // step.cost
            break
        chosen[step.layer] = by_number[step.layer][step.number]
        room -= step.cost
    while changes := [
        (Fraction(now.loss - new.loss, new.cost - now.cost), -layer, new)
        for layer, (now, options) in enumerate(zip(chosen, layers, strict=True))
        for new in options
        if new.loss < now.loss and new.cost <= now.cost + room
    ]:
        _, minus_layer, new = max(changes)
        room -= new.cost - chosen[-minus_layer].cost
        chosen[-minus_layer] = new
    return chosen, sum(option.loss for option in chosen) if bound is None else bound


def allocate(layers: Sequence[LayerOptions], budget: Budget) -> Allocation:
    """Choose an option for each layer: a small sum of squared relative errors, every layer alike, within the budget.

    Raises RequestError for a layer without an option below `max_layer_error`, and for a budget that no choice keeps.
    """
    is_size = budget.objective == SIZE
    allowed = [_allowed(layer, budget.max_layer_error) for layer in layers]
    options = [
        [Option(one.size_bytes if is_size else one.token_bytes, _whole(one.loss), index) for index, one in of_layer]
        for of_layer in allowed
    ]
    counts = [Fraction(layer.num_weights) if is_size else layer.token_weights for layer in layers]
    limit, least = _limit(budget, counts), sum(min(of_layer).cost for of_layer in options)
    if limit < least:
        raise _too_small(budget, limit, least, sum(counts, Fraction(0)))
    chosen, bound = choose(options, limit)
    return Allocation(
        tuple(layers),
        tuple(layer.options[option.number] for layer, option in zip(layers, chosen, strict=True)),
        limit,
        math.sqrt(math.ldexp(bound, -_LOSS_BITS) / len(layers)),
        sum(option.loss for option in chosen) == bound,
        _uniform(layers),
        tuple(_curve(layers, options)),
    )


def _allowed(layer: LayerOptions, max_error: float | None) -> list[tuple[int, LayerOption]]:
    """Return the options of a layer that keep the bound on its error, with their numbers."""
    kept = [(i, one) for i, one in enumerate(layer.options) if max_error is None or one.relative_error <= max_error]
    if not kept:
        best = min(layer.options, key=lambda one: one.loss)
        raise RequestError(
            "No candidate keeps the limit of the error in a layer.",
            where=f"--max-layer-error, {layer.name}",
            expected=f"a relative error of {max_error:g} at most",
            found=f"{best.relative_error:.4g} with {best.candidate}, the most exact one",
            remedy="Allow more, or add candidates with more bits.",
        )
    return kept


def _whole(loss: float) -> int:
    return int(math.ldexp(loss, _LOSS_BITS))


_BITS_ROUNDING = Fraction(1, 200)  # second scales and headers are some thousandths of a bit


def _limit(budget: Budget, counts: Iterable[Fraction]) -> int:
    if budget.size_bytes is not None:
        return budget.size_bytes
    assert budget.bits is not None
    return int((Fraction(budget.bits) + _BITS_ROUNDING) * sum(counts, Fraction(0)) / 8)


def _too_small(budget: Budget, limit: int, least: int, count: Fraction) -> RequestError:
    bits = math.ceil((Fraction(8 * least) / count - _BITS_ROUNDING) * 10**6) / 10**6  # rounded up, so that it works
    of = "of the experts of one token" if budget.objective == BANDWIDTH else "of all files of experts"
    return RequestError(
        "The budget is too small for these candidates.",
        where=budget.option,
        expected=f"at least {least} bytes {of}, or {bits} bits per weight",
        found=f"{limit} bytes" if budget.bits is None else f"{budget.bits:g} bits, {limit} bytes",
        remedy="Allow more, add candidates with fewer bits"
        + (", or leave --max-layer-error out." if budget.max_layer_error is not None else "."),
    )


def _uniform(layers: Sequence[LayerOptions]) -> dict[str, Point]:
    """Return the totals of each candidate that all layers may get."""
    tables = [{one.candidate: one for one in layer.options} for layer in layers]
    names = [name for name in tables[0] if all(name in table for table in tables)]
    return {name: _point(layers, [table[name] for table in tables]) for name in names}


def _curve(layers: Sequence[LayerOptions], options: Sequence[Sequence[Option]]) -> Iterable[Point]:
    """Yield the totals after each step along the hull."""
    cheapest, steps = hull_steps(options)
    chosen = [layer.options[option.number] for layer, option in zip(layers, cheapest, strict=True)]
    yield _point(layers, chosen)
    for step in steps:
        chosen[step.layer] = layers[step.layer].options[step.number]
        yield _point(layers, chosen)
