"""What the quantization of a block cost, over all its experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hqconv.planning.output_units import MoeLayerPlan, OutputUnit
from hqconv.quantization.quantize import ErrorSums
from hqconv.schemas.content_sums import ContentSums

Sums = Mapping[tuple[str, str], Sequence[int]]


def projection_errors(costs: Sequence[Mapping[str, ErrorSums]], *, is_coded: bool) -> dict[str, Any]:
    """Relative Frobenius error of each projection over all experts that are not the source's, and of the worst expert.

    Where the source `is_coded`, also how many experts were quantized anew, and how many of their scale groups came
    out without any error; where scales were rounded, how far one moved at most. `math.fsum` is exact, so the order of
    the experts does not matter.
    """
    errors: dict[str, Any] = {}
    for role in costs[0]:
        of_role = [cost[role] for cost in costs]
        each = [relative_error(cost.error, cost.power) for cost in of_role]
        worst = max(range(len(each)), key=each.__getitem__)
        errors[role] = {
            "relative_error": relative_error(
                math.fsum(cost.error for cost in of_role), math.fsum(cost.power for cost in of_role)
            ),
            "worst_expert": worst,
            "worst_relative_error": each[worst],
        }
        errors[role] |= (requantized_counts(of_role) if is_coded else {}) | scale_changes(of_role)
    return errors


class Measurements:
    """What is measured of a block while its batches are done, in any order."""

    def __init__(self) -> None:
        self._costs: dict[int, dict[str, ErrorSums]] = {}
        self._sums = ContentSums()

    def add(self, experts: Sequence[int], costs: Mapping[str, Sequence[ErrorSums]], sums: Sums) -> None:
        """Add a batch: by role what each matrix lost, and by role and tensor what each expert's comes to."""
        for index, expert in enumerate(experts):
            self._costs[expert] = {role: of_role[index] for role, of_role in costs.items()}
            for (role, name), of_experts in sums.items():
                self._sums.add(role, name, expert, of_experts[index])

    def errors(self, unit: OutputUnit) -> dict[str, Any]:
        """The quantization error per projection, by every expert's costs; of copied tensors nothing."""
        if not isinstance(unit, MoeLayerPlan):
            return {}
        each = [self._costs[expert] for expert in range(unit.block.num_experts)]
        return projection_errors(each, is_coded=unit.encoding.is_coded)

    def sums(self) -> dict[str, dict[str, str]]:
        """The content sums (`schemas/content`)."""
        return self._sums.to_dict()


def requantized_counts(costs: Sequence[ErrorSums]) -> dict[str, int]:
    """Of one projection: the experts that were quantized anew, their scale groups, and those without any error."""
    anew = [cost for cost in costs if not cost.is_direct]
    return {
        "num_experts_requantized": len(anew),
        "num_groups": sum(cost.num_groups for cost in anew),
        "num_exact_groups": sum(cost.num_exact for cost in anew),
    }


def scale_changes(costs: Sequence[ErrorSums]) -> dict[str, float]:
    """Of one projection: the largest relative change of a scale, where scales were rounded."""
    changes = [cost.scale_change for cost in costs if cost.scale_change is not None]
    return {"largest_scale_change": max(changes)} if changes else {}


def relative_error(error: float, power: float) -> float:
    """The relative error of sums of squares."""
    return math.sqrt(error / power) if power else 0.0
