"""Manifest entries summed up over all layers: errors, changes of scales, requantized experts and groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from hqconv.errors import first_few, plural

# Count in the manifest, per projection → name of its sum over layers and projections.
_COUNTS = {
    "num_experts_requantized": "num_matrices",
    "num_groups": "num_groups",
    "num_exact_groups": "num_exact_groups",
}


def summarize_errors(errors: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return projection → min, median and max over layers of the relative error, and the layer with the largest.

    Of a calibration also the median of the outputs' error, which it made small: `median_of_outputs`.
    """
    found: dict[str, dict[str, float]] = {}
    outputs: dict[str, list[float]] = {}
    for layer, projections in errors.items():
        for projection, measured in projections.items():
            value = measured.get("relative_error") if isinstance(measured, dict) else None
            if isinstance(value, int | float):
                found.setdefault(projection, {})[layer] = float(value)
                if "relative_output_error" in measured:
                    outputs.setdefault(projection, []).append(measured["relative_output_error"])
    return {
        projection: {
            "min": min(values.values()),
            "median": median(values.values()),
            "max": max(values.values()),
            "worst_block": max(values, key=values.__getitem__),
            **({"median_of_outputs": median(outputs[projection])} if projection in outputs else {}),
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


FEW_TOKENS = 32  # of a calibration: an expert with fewer is hardly calibrated


def reached_warnings(errors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Warn of experts that no token of a calibration chose, or few did, with their number in each layer.

    errors: layer → projection → the document of its quantization error.
    """
    layers = []
    num_without = 0
    num_few = 0
    for layer, projections in errors.items():
        document = projections.get("w2", {})
        without = document.get("num_experts_without_tokens") or 0
        few = document.get("num_experts_with_few_tokens") or 0
        if without or few:
            layers.append(f"{layer}: {without} and {few}")
            num_without += without
            num_few += few
    if not layers:
        return []
    return [
        f"The text of the calibration did not reach {plural(num_without, 'expert')}, and reached {num_few} with fewer "
        f"than {FEW_TOKENS} tokens; their down projections are rounded nearly as without it ({first_few(layers)}). "
        "Use a text of the model's use, or more --calibrate-tokens."
    ]


def over_limits(
    errors: Mapping[str, Mapping[str, Any]],
    evaluation: Mapping[str, Any] | None,
    max_error: float | None,
    max_kl: float | None,
) -> dict[str, Any]:
    """Return `over_max_error`, the projections above the limit, and `over_max_kl`, whether the mean divergence is.

    None is no limit. What cannot be judged is above every limit: an error or a divergence that is no number, and a
    divergence without an evaluation.
    """
    is_over = False
    if max_kl is not None:
        mean = None if evaluation is None else evaluation["kl"]["mean"]
        is_over = not isinstance(mean, int | float) or not mean <= max_kl
    return {
        "over_max_error": [] if max_error is None else over_limit(errors, max_error),
        "over_max_kl": is_over,
    }


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
