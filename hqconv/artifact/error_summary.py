"""What a manifest says of its blocks, summed up over all: errors, changes of scales, what was quantized anew."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from hqconv.errors import RequestError

# What the manifest counts per projection, and what the sum over blocks and projections is called.
_COUNTS = {
    "num_experts_requantized": "num_matrices",
    "num_groups": "num_groups",
    "num_exact_groups": "num_exact_groups",
}


def summarize_errors(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """projection → min, median and max over blocks of the relative error, and the block with the largest."""
    found: dict[str, dict[str, float]] = {}
    for block, projections in errors.items():
        for projection, measured in projections.items():
            value = measured.get("relative_error") if isinstance(measured, dict) else None
            if isinstance(value, int | float):
                found.setdefault(projection, {})[block] = float(value)
    return {
        projection: {
            "min": min(values.values()),
            "median": median(values.values()),
            "max": max(values.values()),
            "worst_block": max(values, key=values.__getitem__),
        }
        for projection, values in found.items()
    }


def scale_changes(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Projection → the largest relative change of a scale over all blocks, where scales were rounded.

    `errors`: block → projection → the words on its quantization error.
    """
    found: dict[str, float] = {}
    for projections in errors.values():
        for projection, words in projections.items():
            if "largest_scale_change" in words:
                found[projection] = max(found.get(projection, 0.0), words["largest_scale_change"])
    return found


def requantized(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Over all blocks and projections of a quantized source: what was quantized anew, and what of it is exact.

    `errors`: block → projection → the words on its quantization error.
    """
    totals: Counter[str] = Counter()
    for projections in errors.values():
        for words in projections.values():
            totals.update({name: words[key] for key, name in _COUNTS.items() if key in words})
    return dict(totals)


def check_max_error(limit: float | None) -> None:
    """Raises RequestError for a limit that is no error: negative, infinite or no number."""
    if limit is not None and not (math.isfinite(limit) and limit >= 0):
        what, expected = "The largest error is no number of that kind.", "0 or more, such as 0.15"
        raise RequestError(what, where="--max-error", expected=expected, found=str(limit))


def over_limit(errors: Mapping[str, Mapping[str, Any]], limit: float) -> list[dict[str, Any]]:
    """Every block's projection whose relative error is larger than the limit, or no number; the worst first.

    errors: block → projection → the words on its error; such as have no `relative_error` are passed over.
    """
    found = [
        {"block": block, "projection": projection, "relative_error": words["relative_error"]}
        for block, projections in errors.items()
        for projection, words in projections.items()
        if isinstance(words, Mapping) and "relative_error" in words
    ]
    return sorted((one for one in found if not _rank(one) <= limit), key=_rank, reverse=True)


def _rank(one: Mapping[str, Any]) -> float:
    """The error, infinite where it is no number."""
    value = one["relative_error"]
    return float(value) if isinstance(value, int | float) and not math.isnan(value) else math.inf
