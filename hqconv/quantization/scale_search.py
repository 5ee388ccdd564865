"""The least squared error: of each scale's candidates the one that loses least, and never more than round-to-nearest.

The same choice on every device: errors are float64 sums in the folding order of `fold_sum`, candidates come in one
order, and one must be better than round-to-nearest by a margin, so that no other order of summing makes it worse.
Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hqconv.quantization.quantized import fold_sum
from hqconv.quantization.scale_candidates import CandidateScales, candidates, least_byte
from hqconv.schemas.weight_schema import WeightSchema

_MARGIN = 1 - 2.0**-20

RowErrors = Callable[
    [CandidateScales], torch.Tensor
]  # float64 [E, N, G]: each row's of each group, folded over its columns


@dataclass(frozen=True, eq=False)
class SearchStart:
    """A stack as round-to-nearest has it: its scales, its errors float64 [E, N, G], and how others are tried on it."""

    scales: CandidateScales
    error: torch.Tensor
    score: RowErrors


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The scales that were chosen, and where they are others than round-to-nearest's: bool [E, R, G]."""

    scales: CandidateScales
    changed: torch.Tensor


def search(starts: Sequence[SearchStart], schema: WeightSchema, param_dtype: str) -> list[SearchResult]:
    """Choose the scales of stacks whose matrices are one expert's; those that share a scale choose together."""
    floor = least_byte([one.scales.stored for one in starts], param_dtype)
    if schema.weight_scale_type != "tensor":
        return [_choose([one], schema, param_dtype, floor) for one in starts]
    return [_choose(starts, schema, param_dtype, floor)] * len(starts)


def _choose(
    starts: Sequence[SearchStart], schema: WeightSchema, param_dtype: str, floor: torch.Tensor | None
) -> SearchResult:
    best = start = starts[0].scales
    least = _scope_errors([one.error for one in starts], schema) * _MARGIN
    changed = torch.zeros_like(least, dtype=torch.bool)
    for scales, valid in candidates(start, schema, param_dtype, floor):
        error = _scope_errors([one.score(scales) for one in starts], schema)
        wins = valid & (error < least)
        best, least = scales.where(wins, best), torch.where(wins, error, least)
        changed |= wins
    return SearchResult(best, changed)


def _scope_errors(rows: Sequence[torch.Tensor], schema: WeightSchema) -> torch.Tensor:
    """Of each scale, the errors [E, R, G] of all that it serves: folded over rows, then matrix by matrix."""
    total = _folded_rows(rows[0], schema)
    for one in rows[1:]:
        total = total + _folded_rows(one, schema)
    return total


def _folded_rows(errors: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    num_experts, num_rows, num_groups = errors.shape
    if schema.weight_scale_type not in ("block", "tensor"):
        return errors
    block_rows = schema.weight_scale_group_size_n if schema.weight_scale_type == "block" else num_rows
    blocks = errors.view(num_experts, num_rows // block_rows, block_rows, num_groups)
    return fold_sum(blocks.transpose(-1, -2).contiguous())
