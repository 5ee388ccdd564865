"""The section of a report on what `verify` found, with the kernel's results where it ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hqconv.inspection.report.html import folded, lines, note, section, table, text
from hqconv.inspection.report.words import PROJECTIONS
from hqconv.inspection.words import Words

_ALONE = "No check was run for this page: `hqconv verify --report` runs them, `hqconv report --source` that of weights."
_NUM_SHOWN = 10


def verdict(verification: Words | None) -> tuple[str, str]:
    """A CSS class and a word: what all checks together came to."""
    if verification is None:
        return "none", "none run"
    return ("pass", "passed") if verification["passed"] else ("fail", "failed")


def checks_section(verification: Words | None) -> str:
    """Each check's status, notes, findings and figures."""
    if verification is None:
        return section("checks", "Checks", note(_ALONE))
    against = verification.get("source")
    rows = [
        (name, check["status"], check["skipped_because"] or f"{len(check['findings'])} findings")
        for name, check in verification["checks"].items()
    ]
    said = (
        f"Held against {against}." if against else "Without the source: the artifact was held against itself."
    )
    parts = [note(said), table(("check", "status", "what was found"), rows)]
    for name, check in verification["checks"].items():
        parts += [
            f"<h3>{text(name)}</h3>" if check["notes"] or check["findings"] or check["measured"] else ""
        ]
        parts += [f'<p class="note">{lines(one)}</p>' for one in check["notes"]]
        parts.append(_findings(check["findings"]))
        parts.append(_FIGURES[name](check["measured"]) if name in _FIGURES else "")
    return section("checks", "Checks", *parts)


def _findings(findings: list[Words]) -> str:
    rows = [(one["where"], one["what"], one["expected"], one["found"]) for one in findings]
    return table(("where", "what", "expected", "found"), rows, "Findings") if rows else ""


def _weights(measured: Mapping[str, Any]) -> str:
    """The figures of the check of weights against the source."""
    rows = [
        (
            block,
            PROJECTIONS.get(role, role),
            *(_figure(one.get(key)) for key in ("relative_error", "sqnr_db", "cosine")),
            _figure((one.get("worst_group") or {}).get("relative_error")),
        )
        for block, roles in measured.items()
        for role, one in roles.items()
        if isinstance(one, Mapping) and "relative_error" in one
    ]
    rows.sort(key=lambda row: -row[2] if isinstance(row[2], float) else 0.0)
    headers = ("block", "projection", "relative error", "SQNR (dB)", "cosine", "worst scale group")
    title = "Decoded weights against the source"
    if len(rows) <= _NUM_SHOWN:
        return table(headers, rows, title) if rows else ""
    shown = table(headers, rows[:_NUM_SHOWN], f"{title}: the {_NUM_SHOWN} largest errors of {len(rows)}")
    return shown + folded(f"All {len(rows)}", table(headers, rows))


def _kernel(measured: Mapping[str, Any]) -> str:
    """The figures of the production kernel."""
    keys = ("kernel", "rounded_kernel", "channel", "batch", "against_source")
    rows = [
        (block, *(_figure(one.get(key)) for key in keys), one.get("routed_by", ""))
        for block, one in measured.items()
    ]
    headers = (
        "block",
        "kernel against decoded weights",
        "against rounded activations",
        "worst channel",
        "worst batch",
        "output against the source's",
        "tokens routed by",
    )
    return table(headers, rows, "The production kernel: relative errors") if rows else ""


def _figure(value: Any) -> Any:
    """A number for a table; a dash for none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else "–"


_FIGURES = {"weights": _weights, "kernel": _kernel}
