"""Shows a verification report: the verdict, what was found, and the worst blocks first; a push; the recipes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from hqconv.cli.progress import human_bytes, human_seconds
from hqconv.cli.tables import PROJECTIONS, print_table

Words = Mapping[str, Any]
Table = tuple[tuple[str, ...], list[tuple[Any, ...]]]
NUM_ROWS_SHOWN, NUM_FINDINGS_SHOWN = 10, 20


def show_recipes(console: Console, words: Words) -> None:
    """The recipes and schema files that come with hqconv, and where they lie."""
    rows = [(one["option"], one["description"]) for key in ("recipes", "schemas") for one in words[key]]
    print_table(console, ("option of convert", "what it is for"), rows)
    console.print(
        f"\nThe files are in {words['folder']}, for copies of your own; a file of that name here wins."
    )


def show_report(console: Console, words: Words) -> None:
    """Checks, findings, figures, and last of all one PASS or FAIL line with the reason."""
    for name, check in words["checks"].items():
        status = check["status"].upper()
        reason = f": {check['skipped_because']}" if check["skipped_because"] else ""
        console.print(f"{name:8} {status} in {human_seconds(check['seconds'])}{reason}")
        for note in check["notes"]:
            console.print(f"         {note}")
        _findings(console, check["findings"])
    for title, (headers, rows) in _tables(words["checks"]):
        console.print(f"\n{title}")
        print_table(console, headers, rows)
    console.print()
    console.print(verdict(words))


def verdict(words: Words) -> str:
    """PASS or FAIL, and why."""
    checks = words["checks"]
    failed = [f"{name}: {_first(check)}" for name, check in checks.items() if check["status"] == "fail"]
    if failed:
        return "FAIL  " + "; ".join(failed)
    ran = [name for name, check in checks.items() if check["status"] == "pass"]
    if not words["passed"]:
        return "FAIL  no check could run"
    against = f" against {words['source']}" if words.get("source") else ", without the source"
    skipped = [name for name, check in checks.items() if check["status"] == "skipped"]
    return f"PASS  {', '.join(ran)}{against}" + (f"; skipped: {', '.join(skipped)}" if skipped else "")


def _first(check: Words) -> str:
    finding, count = check["findings"][0], len(check["findings"])
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{finding['what'].rstrip('.')} ({finding['where']}){more}"


def _findings(console: Console, findings: list[Words]) -> None:
    for finding in findings[:NUM_FINDINGS_SHOWN]:
        console.print(f"  ✗ {finding['where']}: {finding['what']}")
        for label in ("expected", "found"):
            if finding[label]:
                console.print(f"      {label}: {finding[label]}")
    if len(findings) > NUM_FINDINGS_SHOWN:
        console.print(f"  … {len(findings) - NUM_FINDINGS_SHOWN} more; --json lists all")


def show_push(console: Console, words: Words) -> None:
    """What `hqconv push` sent."""
    if not words["num_files"]:
        console.print(f"{words['repo']} has the artifact already, at commit {words['commit']}.")
        return
    sent = f"{words['num_files']} files, {human_bytes(words['num_bytes'])}"
    console.print(f"{words['repo']} has the artifact, at commit {words['commit']}; sent: {sent}.")
    console.print(f"hqconv.json is sha256 {words['manifest_sha256']}")


def _tables(checks: Words) -> Iterable[tuple[str, Table]]:
    weights = checks.get("weights", {}).get("measured", {})
    kernel = checks.get("kernel", {}).get("measured", {})
    if weights:
        yield (
            "weights, decoded from the kernel layout, against the source (worst first)",
            _weight_rows(weights),
        )
    if kernel:
        yield "kernel, relative errors (worst first)", _kernel_rows(kernel)


def _weight_rows(measured: Words) -> Table:
    rows = [
        (block, PROJECTIONS.get(projection, projection), figures)
        for block, projections in measured.items()
        for projection, figures in projections.items()
        if isinstance(figures, Mapping) and "relative_error" in figures
    ]
    rows.sort(key=lambda row: -row[2]["relative_error"])
    headers = ("block", "projection", "relative error", "SQNR (dB)", "cosine", "worst group")
    return headers, [
        (
            block,
            projection,
            *(_number(f.get(key)) for key in ("relative_error", "sqnr_db", "cosine", "worst_group")),
        )
        for block, projection, f in rows[:NUM_ROWS_SHOWN]
    ]


def _kernel_rows(measured: Words) -> Table:
    blocks = sorted(measured, key=lambda block: -measured[block]["kernel"])
    headers = (
        *("block", "kernel vs decoded", "vs rounded activations", "worst channel", "output vs source"),
        "tokens routed by",
    )
    return headers, [
        (
            block,
            _number(measured[block]["kernel"]),
            _number(measured[block].get("rounded_kernel")),
            _number(measured[block]["channel"]),
            _number(measured[block].get("against_source")),
            measured[block]["routed_by"],
        )
        for block in blocks[:NUM_ROWS_SHOWN]
    ]


def _number(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("relative_error")
    return "-" if value is None else f"{value:.4f}"
