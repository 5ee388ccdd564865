"""Manifest entries summed up over all layers: errors, changes of scales, requantized experts and groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from hqconv.errors import RequestError

# Count in the manifest, per projection → name of its sum over layers and projections.
_COUNTS = {
    "num_experts_requantized": "num_matrices",
    "num_groups": "num_groups",
    "num_exact_groups": "num_exact_groups",
}


def summarize_errors(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return projection → min, median and max over layers of the relative error, and the layer with the largest."""
    found: dict[str, dict[str, float]] = {}
    for layer, projections in errors.items():
        for projection, measured in projections.items():
            value = measured.get("relative_error") if isinstance(measured, dict) else None
            if isinstance(value, int | float):
                found.setdefault(projection, {})[layer] = float(value)
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
    """Return projection → the largest relative change of a scale over all layers, where scales were rounded.

    `errors`: layer → projection → the document of its quantization error.
    """
    found: dict[str, float] = {}
    for projections in errors.values():
        for projection, document in projections.items():
            if "largest_scale_change" in document:
                found[projection] = max(
                    found.get(projection, 0.0), document["largest_scale_change"]
                )
    return found


def requantized(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Sum up, over all layers and projections of a quantized source, the requantized parts and the exact ones of them.

    `errors`: layer → projection → the document of its quantization error.
    """
    totals: Counter[str] = Counter()
    for projections in errors.values():
        for document in projections.values():
            totals.update({name: document[key] for key, name in _COUNTS.items() if key in document})
    return dict(totals)


def check_max_error(limit: float | None) -> None:
    """Raise RequestError for a limit that is no error: negative, infinite or no number."""
    if limit is not None and not (math.isfinite(limit) and limit >= 0):
        raise RequestError(
            "The largest error is no number of that kind.",
            where="--max-error",
            expected="0 or more, such as 0.15",
            found=str(limit),
        )


def over_limit(errors: Mapping[str, Mapping[str, Any]], limit: float) -> list[dict[str, Any]]:
    """List projections whose relative error is larger than the limit, or no number; the worst first.

    errors: layer → projection → the document of its error; projections without `relative_error` are passed over.
    """
    found = [
        {"block": layer, "projection": projection, "relative_error": document["relative_error"]}
        for layer, projections in errors.items()
        for projection, document in projections.items()
        if isinstance(document, Mapping) and "relative_error" in document
    ]

    def rank(one: Mapping[str, Any]) -> float:
        return rank_of_error(one["relative_error"])

    return sorted((one for one in found if not rank(one) <= limit), key=rank, reverse=True)


def rank_of_error(error: object) -> float:
    """Return the sort key of an error: one that is no number, as of weights that are NaN, is the worst."""
    return float(error) if isinstance(error, int | float) and not math.isnan(error) else math.inf
