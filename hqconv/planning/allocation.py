"""Allocation of schemas to the GEMMs of MoE layers: candidates, and the choice of the least loss within a budget.

Every GEMM starts with its cheapest option. Steps along the lower convex hulls of the GEMMs' (cost, loss) options
follow, the most gain for its cost first, as far as the budget goes; the rest goes to single changes that fit. No choice
within the budget loses less than this one by the gain of one step or more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from hqconv.errors import RequestError
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import MoeLayerPlan
from hqconv.planning.plan import ConversionPlan, plan_conversion
from hqconv.planning.source_schema import source_param_dtype
from hqconv.planning.spec import ConversionOptions, default_param_dtype
from hqconv.schemas.artifact_names import GEMMS
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.weight_schema import SOURCE, resolve_schema

DEFAULT_CANDIDATES = (
    *(
        "int2-g32-zp",
        "int3-g64",
        "int3-g32-e4m3",
        "int4-g32-e4m3",
        "int4-g16-e4m3",
        "int6-g64",
        "fp8",
    ),
)
_BITS_ROUNDING = 0.005  # second scales are some thousandths of a bit

Gemm = tuple[str, str]  # name of a layer, and w13 or w2


@dataclass(frozen=True)
class Candidates:
    """Schemas that every GEMM may get: name → the plan of a conversion to it, in the order of preference among equals.

    left_out: name → reason, of default ones.
    """

    plans: Mapping[str, ConversionPlan]
    options: ConversionOptions
    left_out: Mapping[str, str]

    @property
    def first(self) -> ConversionPlan:
        """The plan of the first candidate: all have the same layers."""
        return next(iter(self.plans.values()))

    @property
    def num_weights(self) -> int:
        """Number of the experts' weights in the source."""
        layers = [one.layer for one in self.first.layers]
        return sum(
            layer.num_experts * len(layer.roles) * math.prod(layer.shape("w2")) for layer in layers
        )

    def costs(self) -> dict[Gemm, dict[str, int]]:
        """Return the bytes of each GEMM's tensors under each candidate, on all ranks."""
        layers = {name: plan.layers for name, plan in self.plans.items()}
        return {
            (one.name, gemm): {
                name: gemm_bytes(of_name[number], gemm) for name, of_name in layers.items()
            }
            for number, one in enumerate(self.first.layers)
            for gemm in GEMMS
        }


def gemm_bytes(planned: MoeLayerPlan, gemm: str) -> int:
    """Return the bytes of one GEMM's tensors in the files of all ranks."""
    prefix = f"{planned.name}.{gemm}_"
    tensors = (item for file in planned.files for item in file.tensors.items())
    return sum(ref.num_bytes for name, ref in tensors if name.startswith(prefix))


def plan_candidates(
    options: ConversionOptions, names: Sequence[str] | None, source: Source, target: GpuTarget
) -> Candidates:
    """Plan a conversion under every candidate. names: None for the source's own schemas and DEFAULT_CANDIDATES.

    A candidate that the target, the activations or the ranks do not allow is refused if it was named, else left out.
    Raises RequestError then, and where no candidate is left, and InputError for the source.
    """
    experts = source.map_experts()
    if options.dtype is None:
        options = replace(
            options,
            dtype=source_param_dtype(experts) or default_param_dtype(source.config, experts),
        )
    plans: dict[str, ConversionPlan] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(
        names or [*_own_schemas(options, source, target), *DEFAULT_CANDIDATES]
    ):
        try:
            plans[name] = plan_conversion(
                replace(options, schema=resolve_schema(name)), source, target
            )
        except RequestError as error:
            if names is not None:
                where = f"--candidates {name}" + (f": {error.where}" if error.where else "")
                parts = {"expected": error.expected, "found": error.found, "remedy": error.remedy}
                raise RequestError(error.what, where=where, **parts) from error
            left_out[name] = " ".join(
                filter(None, [error.what, f"({error.found})" if error.found else ""])
            )
    if not plans:
        name, reason = next(iter(left_out.items()))
        what, remedy = "No candidate fits this request.", "Name some with --candidates."
        raise RequestError(what, where="--candidates", found=f"{name}: {reason}", remedy=remedy)
    return Candidates(plans, options, left_out)


def _own_schemas(options: ConversionOptions, source: Source, target: GpuTarget) -> list[str]:
    """Return the schemas that keep the codes of a quantized source's layers, those with a name."""
    try:
        plan = plan_conversion(replace(options, schema=None), source, target)
    except RequestError:
        return []
    names = dict.fromkeys(one.name for layer in plan.layers for one in layer.encoding.schema.each)
    return [name for name in names if name != SOURCE]


def limit_bytes(size_bytes: int | None, bits: float | None, num_weights: int) -> int:
    """Return the budget in bytes, of a size or of mean bits for each weight, to two decimals. Raises RequestError."""
    if (size_bytes is None) == (bits is None):
        what, expected = "An allocation needs one budget.", "either --size or --bits"
        raise RequestError(what, where="--size, --bits", expected=expected)
    return size_bytes if bits is None else int((bits + _BITS_ROUNDING) * num_weights / 8)  # type: ignore[return-value]


class Option(NamedTuple):
    """One option of a GEMM: its bytes, its loss, and its candidate."""

    cost: int
    loss: float
    name: str


def choose(
    gemms: Mapping[Gemm, Sequence[Option]], budget: int, num_weights: int
) -> dict[Gemm, Option]:
    """Return one option for each GEMM, of small loss together, within a budget of bytes.

    num_weights: of all GEMMs. Raises RequestError where the cheapest options need more.
    """
    hulls = {gemm: hull_of(options) for gemm, options in gemms.items()}
    chosen = {gemm: hull[0] for gemm, hull in hulls.items()}
    least = sum(option.cost for option in chosen.values())
    if least > budget:
        raise RequestError(
            "The budget is too small for these candidates.",
            where="--size, --bits",
            expected=f"at least {least} bytes of the experts' tensors, or {8 * least / num_weights:.2f} bits a weight",
            found=f"{budget} bytes",
            remedy="Allow more, or add candidates with fewer bits.",
        )
    steps = [(gemm, *pair) for gemm, hull in hulls.items() for pair in pairwise(hull)]
    room = budget - least
    for gemm, before, after in sorted(
        steps, key=lambda step: -_gain(*step[1:])
    ):  # stable along a hull
        if after.cost - before.cost > room:
            break
        room -= after.cost - before.cost
        chosen[gemm] = after
    while changes := [
        (_gain(chosen[gemm], new), gemm, new)
        for gemm, options in gemms.items()
        for new in options
        if new.loss < chosen[gemm].loss and new.cost <= chosen[gemm].cost + room
    ]:
        _, gemm, new = max(changes)
        room -= new.cost - chosen[gemm].cost
        chosen[gemm] = new
    return chosen


def _gain(before: Option, after: Option) -> float:
    """Return the loss that a change takes away for each byte."""
    return (
        (before.loss - after.loss) / (after.cost - before.cost)
        if after.cost > before.cost
        else math.inf
    )


def hull_of(options: Sequence[Option]) -> list[Option]:
    """Return the lower convex hull of options: the gain for each byte falls from step to step."""
    hull: list[Option] = []
    for new in sorted(options):
        if hull and new.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], new):
            hull.pop()
        hull.append(new)
    return hull
