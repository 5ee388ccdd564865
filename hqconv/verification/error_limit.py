"""Holds an artifact to a largest error that the caller names: what it records, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping

from hqconv.artifact.error_limit import over_limit
from hqconv.artifact.facts import Facts
from hqconv.verification.result import CheckResult

NAME = "max_error"


def check_error(artifact: Facts, weights: CheckResult | None, limit: float) -> CheckResult:
    """One finding for each projection whose relative error is larger than `limit`.

    weights: the result of the weights check, if it ran: what it measured against the source counts as well, for an
    artifact's kernels may lose more than its manifest records.
    """
    result = CheckResult(NAME)
    recorded = {name: words["quantization_error"] for name, words in artifact.blocks.items()}
    measured = {} if weights is None else weights.measured
    result.notes.append(f"the manifest's errors of {len(recorded)} blocks")
    figures = [words for block in measured.values() for words in block.values() if isinstance(words, Mapping)]
    if any("relative_error" in words for words in figures):
        result.notes.append(f"and those measured against the source, of {len(measured)} blocks")
    for errors, kind in ((recorded, "recorded"), (measured, "measured")):
        for one in over_limit(errors, limit):
            where = f"{one['block']}, {one['projection']}"
            what = f"The {kind} relative error is larger than --max-error."
            result.add(where, what, f"at most {limit:g}", one["relative_error"])
    return result
