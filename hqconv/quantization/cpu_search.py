"""The search for the least squared error on the CPU: candidates measured by compiled loops.

Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hqconv.cpu_loops import arithmetic
from hqconv.cpu_loops.helper_threads import in_parts
from hqconv.cpu_loops.scale_search import scorer
from hqconv.quantization.cpu_groups import LEAST_ROWS, Groups, Ranges, code_of
from hqconv.quantization.scale_candidates import CandidateScales, scales_of, tensors_of
from hqconv.quantization.scale_search import SearchResult, SearchStart, search
from hqconv.schemas.weight_schema import WeightSchema


def improved(
    ranges: Sequence[Ranges],
    groups: Sequence[Groups],
    schema: WeightSchema,
    param_dtype: str,
    importance: torch.Tensor | None,
) -> list[Groups]:
    """`groups`, round-to-nearest's of the stacks of one expert each, with the scales that lose least."""
    starts = [_start(r, g, schema, importance) for r, g in zip(ranges, groups, strict=True)]
    found = search(starts, schema, param_dtype)
    return [_replaced(g, f, schema, param_dtype) for g, f in zip(groups, found, strict=True)]


def _start(
    ranges: Ranges, groups: Groups, schema: WeightSchema, importance: torch.Tensor | None
) -> SearchStart:
    code, (num_experts, num_rows, num_columns) = code_of(schema), ranges.shape
    score, total = scorer(code), num_experts * num_rows
    weights = np.ones(num_columns) if importance is None else importance.double().numpy()
    num_groups = num_columns // (schema.weight_scale_group_size or num_columns)
    groups = replace(groups, limit=arithmetic.largest_value(*code) if code[0] == arithmetic.FLOAT else 0.0)

    def errors(one: Groups) -> torch.Tensor:
        out, values = np.empty((total, num_groups)), one.per_row(total)

        def run(rows: slice) -> None:
            of_rows = tuple(value[rows] if len(value) == total else value for value in values)
            score(ranges.source[rows], np.float32(one.limit), of_rows, weights, out[rows])

        in_parts(run, total, LEAST_ROWS)
        return torch.from_numpy(out).view(num_experts, num_rows, num_groups)

    scales = scales_of(groups.tensors, schema)
    return SearchStart(scales, errors(groups), lambda tried: errors(_with_scales(groups, tried)))


def _rows(values: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = values.reshape(-1, values.size(-1)).numpy()
    return flat


def _with_scales(groups: Groups, scales: CandidateScales, changed: torch.Tensor | None = None) -> Groups:
    """Groups encoded with these scales; where they are not `changed` (None: all are), as they were."""
    inverse, lowest, zero = scales.inverse(), scales.lowest(), scales.zero
    mask = None if changed is None else _rows(changed)

    def chosen(new: torch.Tensor, old: np.ndarray) -> np.ndarray:
        return _rows(new) if mask is None else np.where(mask, _rows(new), old)

    return replace(
        groups,
        inverse=chosen(inverse, groups.inverse),
        scale=_rows(scales.scale),
        lowest=groups.lowest if lowest is None else chosen(lowest.double(), groups.lowest),
        zero=groups.zero if zero is None else _rows(zero),
    )


def _replaced(groups: Groups, found: SearchResult, schema: WeightSchema, param_dtype: str) -> Groups:
    """The groups with what was found, saturating: a smaller scale leaves large weights beyond the largest code."""
    kind = code_of(schema)
    limit = arithmetic.largest_value(*kind) if kind[0] == arithmetic.FLOAT else 0.0
    tensors = {**groups.tensors, **tensors_of(found.scales, schema, param_dtype)}
    return replace(_with_scales(groups, found.scales, found.changed), tensors=tensors, limit=limit)
