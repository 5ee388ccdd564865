"""What check_serving.py makes of the answers that it compares."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.serving_answers import DECODED, all_near, verdict


def report_of(**near: float | None) -> dict[str, Any]:
    """Of the first tokens' distances by schema; None where an engine did not start."""
    found = {
        f"{name} against{DECODED}": {"why": "an engine did not start"} if far is None else {"first_log_p": far}
        for name, far in near.items()
    }
    report: dict[str, Any] = {"near": found, "failed": False}
    report["failed"] = not all_near(report)
    return report


@pytest.mark.parametrize(
    ("near", "said"),
    [
        ({}, "all good"),
        ({"mxfp4": 0.1, "nvfp4": 0.19}, "all good"),
        ({"mxfp4": 0.02, "int4": 0.1, "nvfp4": 0.19}, "all good"),
        ({"mxfp4": 0.1, "nvfp4": 0.21}, "FAILED"),
        ({"int4": 0.1, "nvfp4": float("nan")}, "FAILED"),
        ({"nvfp4": None}, "FAILED"),
        ({"mxfp4": None, "nvfp4": 0.1}, "FAILED"),
    ],
)
def test_what_only_we_serve_is_held_to_the_controls(near: dict[str, float | None], said: str) -> None:
    assert verdict(report_of(**near)) == said


def test_without_a_control_nothing_is_judged_and_that_is_said() -> None:
    report = report_of(nvfp4=0.1, **{"fp8-e5m2": 0.2})
    assert not report["failed"]
    assert "limit" not in report
    said = verdict(report)
    for word in ("not judged", "nvfp4 against", "fp8-e5m2 against", "mxfp4 or int4"):
        assert word in said
