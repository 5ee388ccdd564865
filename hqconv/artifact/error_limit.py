"""Which projections lost more than somebody allows: the relative errors of a conversion or a verification."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hqconv.errors import RequestError


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
