"""Shows two artifacts side by side, and where a page was written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from hqconv.cli.progress import human_bytes
from hqconv.cli.tables import PROJECTIONS, print_table

Words = Mapping[str, Any]
_NUM_ROWS_SHOWN, _NUM_WORST_SHOWN = 8, 3


def show_comparison(console: Console, words: Words) -> None:
    """The two artifacts, their errors by projection, and the blocks where they differ most."""
    left, right = words["artifacts"]
    rows: list[tuple[str, ...]] = [(label, of(left), of(right)) for label, of in _ROWS]
    if words["measured_against_source"]:
        rows += [(label, *(_least(one, key) for one in words["figures"])) for label, key in _FIGURES]
    rows = [row for row in rows if row[1] or row[2]]
    print_table(console, ("", left["name"], right["name"]), rows)
    by = (
        "measured against the source"
        if words["measured_against_source"]
        else "as the conversions recorded them"
    )
    console.print(f"\nrelative errors, {by}")
    errors = [("all", *(_number(one["relative_error"]) for one in words["artifacts"]), "")]
    errors += [
        (PROJECTIONS.get(role, role), *(_number(value) for value in pair), _ratio(*pair))
        for role, pair in words["projections"].items()
    ]
    errors[0] = (*errors[0][:3], _ratio(*(one["relative_error"] for one in words["artifacts"])))
    print_table(console, ("projection", "first", "second", "second / first"), errors)
    if words["blocks"]:
        console.print("\nwhere they differ most")
        print_table(console, ("block", "projection", "first", "second"), [_row(one) for one in _top(words)])
    for one in words["notes"]:
        console.print(f"\nnote: {one}")


def _top(words: Words) -> list[Words]:
    return list(words["blocks"][:_NUM_ROWS_SHOWN])


def _row(one: Words) -> tuple[str, ...]:
    projection = PROJECTIONS.get(one["projection"], one["projection"])
    return (one["block"], projection, *(_number(value) for value in one["relative_errors"]))


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.5f}"


def _ratio(first: float | None, second: float | None) -> str:
    return f"{second / first:.3f}" if first and second is not None and math.isfinite(second / first) else "-"


def _least(figures: Words, key: str) -> str:
    values = [one[key] for one in figures.values() if one[key] is not None]
    return f"{min(values):.5g}" if values else "-"


def _otherwise(one: Words) -> str:
    return "; ".join(f"{len(names)} blocks {what}" for what, names in one["otherwise"].items())


def _ranks(one: Words) -> str:
    sizes = one["rank_bytes"].values()
    if not sizes:
        return ""
    copies = f", {one['redundant_experts']} copies" if one["redundant_experts"] else ""
    return f"tp {one['tp']}, ep {one['ep']}{copies}; at most {human_bytes(max(sizes))} each"


def _worst(one: Words) -> str:
    """The blocks and projections that lost most."""
    listed = one["worst"][:_NUM_WORST_SHOWN]
    return "; ".join(f"{w['block']} {w['projection']} {_number(w['relative_error'])}" for w in listed)


def _served(one: Words) -> str:
    if one["vllm_obstacles"]:
        return f"no: {'; '.join(one['vllm_obstacles'])}"
    return "yes"


_ROWS: tuple[tuple[str, Any], ...] = (
    ("schema", lambda one: one["schema"]),
    ("what it is", lambda one: one["description"]),
    ("but", _otherwise),
    ("left blocks", lambda one: str(len(one["left_blocks"]) or "")),
    ("bits per weight", lambda one: f"{one['bits_per_weight']:g}"),
    ("quantizer", lambda one: one["quantizer"]),
    ("conversion", lambda one: ", ".join(one["conversion"])),
    ("experts", lambda one: human_bytes(one["expert_bytes"])),
    ("all files", lambda one: human_bytes(one["num_bytes"])),
    ("parameters", lambda one: f"{one['dtype']}, {one['input_schema']} activations"),
    ("layout", lambda one: one["layout"]),
    ("target", lambda one: one["target"] if one["layout"] == "kernel" else "every GPU"),
    ("ranks", _ranks),
    ("vLLM serves it", _served),
    ("worst blocks", _worst),
)
_FIGURES = (("least SQNR (dB)", "least_sqnr_db"), ("least cosine", "least_cosine"))


def show_page(console: Console, words: Words) -> None:
    """Where the page is."""
    verification = words["verification"]
    if verification is not None:
        console.print("PASS" if verification["passed"] else "FAIL  the page says what was found")
    usage = words["usage"]
    if usage is not None and usage["experts_read"] < usage["experts"]:
        console.print(f"codes were counted over {usage['experts_read']} of {usage['experts']} experts")
    console.print(f"The page is in {words['page']}.")
