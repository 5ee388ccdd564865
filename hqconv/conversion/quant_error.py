"""Quantization error of an MoE layer, over all its experts; content sums of a layer or of copied tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hqconv.planning.output_units import MoeLayerPlan, OutputUnit
from hqconv.quantization.quantize import ErrorSums
from hqconv.schemas.sum_factors import COPIED, ContentSums, of_copied

ContentSumsOfBatch = Mapping[tuple[str, str], Sequence[int]]


def projection_errors(error_sums: Sequence[Mapping[str, ErrorSums]], *, is_coded: bool) -> dict[str, Any]:
    """Return the relative Frobenius error of each projection over all experts, and of the worst expert.

    Where the source `is_coded`, also the number of requantized experts, and of their scale groups without any error;
    where scales were rounded, the largest relative change. `math.fsum` is exact: the order of experts does not matter.
    """
    errors: dict[str, Any] = {}
    for role in error_sums[0]:
        of_role = [of_expert[role] for of_expert in error_sums]
        each = [relative_error(sums.error, sums.power) for sums in of_role]
        worst = max(range(len(each)), key=each.__getitem__)
        errors[role] = {
            "relative_error": relative_error(
                math.fsum(sums.error for sums in of_role), math.fsum(sums.power for sums in of_role)
            ),
            "worst_expert": worst,
            "worst_relative_error": each[worst],
        }
        errors[role] |= (requantized_counts(of_role) if is_coded else {}) | scale_changes(of_role)
    return errors


class Measurements:
    """Error sums and content sums of a unit, added batch by batch or piece by piece in any order."""

    def __init__(self) -> None:
        self._error_sums: dict[int, dict[str, ErrorSums]] = {}
        self._sums = ContentSums()
        self._copied = Counter[str]()

    def add(
        self, experts: Sequence[int], error_sums: Mapping[str, Sequence[ErrorSums]], sums: ContentSumsOfBatch
    ) -> None:
        """Add a batch: error sums by role, and content sums by role and tensor, of each expert."""
        for index, expert in enumerate(experts):
            self._error_sums[expert] = {role: of_role[index] for role, of_role in error_sums.items()}
            for (role, name), of_experts in sums.items():
                self._sums.add(role, name, expert, of_experts[index])

    def add_copied(self, sums: Mapping[str, int]) -> None:
        """Add the content sums of parts of copied tensors."""
        self._copied.update(sums)

    def errors(self, unit: OutputUnit) -> dict[str, Any]:
        """Return the quantization error of each projection; {} for copied tensors."""
        if not isinstance(unit, MoeLayerPlan):
            return {}
        each = [self._error_sums[expert] for expert in range(unit.layer.num_experts)]
        return projection_errors(each, is_coded=unit.encoding.is_coded)

    def sums(self, unit: OutputUnit) -> dict[str, dict[str, str]]:
        """Return the content sums (`schemas/sum_factors`): projection → tensor → sum; of a shard under `COPIED`."""
        if isinstance(unit, MoeLayerPlan):
            return self._sums.to_dict()
        return {COPIED: {ref.name: of_copied(self._copied[ref.name], ref.dtype, ref.shape) for ref in unit.refs}}


def requantized_counts(error_sums: Sequence[ErrorSums]) -> dict[str, int]:
    """Count a projection's requantized experts, their scale groups, and the groups without any error."""
    requantized = [sums for sums in error_sums if not sums.is_direct]
    return {
        "num_experts_requantized": len(requantized),
        "num_groups": sum(sums.num_groups for sums in requantized),
        "num_exact_groups": sum(sums.num_exact for sums in requantized),
    }


def scale_changes(error_sums: Sequence[ErrorSums]) -> dict[str, float]:
    """Return the largest relative change of a projection's scales, where scales were rounded."""
    changes = [sums.scale_change for sums in error_sums if sums.scale_change is not None]
    return {"largest_scale_change": max(changes)} if changes else {}


def relative_error(error: float, power: float) -> float:
    """Return the relative error of two sums of squares; 0 for a matrix of zeros."""
    return math.sqrt(error / power) if power else 0.0
