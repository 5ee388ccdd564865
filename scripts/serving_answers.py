"""How far the answers of two engines agree: for check_serving.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONTROLS = ("mxfp4", "int4")  # also compared with their decoded weights
DECODED = " decoded weights"
GOOD = "all good"
NOISE = 2.0  # what only we serve may be this many times as far from decoded weights as the controls


def all_near(report: dict[str, Any]) -> bool:
    """Whether what only we serve is as near to its decoded weights as the controls are to theirs, `NOISE` times.

    Where no control was served, nothing is found wrong, and the report says why nothing was judged (`not_judged`).
    """
    found = report["near"]
    if any("why" in words for words in found.values()):
        return False
    controls = [words["first_log_p"] for name, words in found.items() if name.split()[0] in CONTROLS]
    if found and not controls:
        names, served = " or ".join(CONTROLS), ", ".join(found)
        report["not_judged"] = f"{served}: how near is near only a control tells; serve {names} in the same run"
        return True
    limit = report["limit"] = NOISE * max(controls, default=0.0)
    return all(words["first_log_p"] <= limit for words in found.values())


def verdict(report: dict[str, Any]) -> str:
    """One line on a finished report: `all good` where all was judged and nothing is wrong."""
    if report["failed"]:
        return "FAILED"
    return f"not judged: {report['not_judged']}" if "not_judged" in report else GOOD


def write(path: Path, report: dict[str, Any]) -> None:
    """What is known so far."""
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def compare(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How far two engines' answers agree.

    first_log_p: the largest difference of the first tokens' log-probabilities, over those that both name among the
    likeliest twenty; log_p: of the answers' own tokens, up to the first that differs.
    """
    if "failed" in mine or "failed" in other:
        return {"identical": False, "why": "an engine did not start"}
    num_tokens = equal = 0
    first, later = 0.0, 0.0
    for left, right in zip(mine["first"], other["first"], strict=True):
        first = max(first, *(abs(left[token] - right[token]) for token in left.keys() & right.keys()))
    for left, right in zip(mine["answers"], other["answers"], strict=True):
        num_tokens += len(left)
        for (token, log_p), (other_token, other_p) in zip(left, right, strict=True):
            if token != other_token:
                break
            equal += 1
            later = max(later, abs(log_p - other_p))
    return {
        "identical": mine["answers"] == other["answers"] and mine["first"] == other["first"],
        "tokens": f"{equal}/{num_tokens}",
        "first_log_p": first,
        "log_p": later,
        "repeats": mine["answers"] == mine["again"] and other["answers"] == other["again"],
    }
