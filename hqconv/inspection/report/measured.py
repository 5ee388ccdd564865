"""The sections of a report with plots: errors by block, single experts, and the codes and scales that are used."""

from __future__ import annotations

from typing import Any

from hqconv.inspection.report.html import note, number, section, table
from hqconv.inspection.report.plots import bars_plot, heat_plot, lines_plot
from hqconv.inspection.report.words import PROJECTIONS, ROLES, entropy_bits
from hqconv.inspection.words import Words

_NUM_LISTED = 10
_NOTHING_LOST = "No weight differs from the source's: what is stored there was kept, or came out the same."


def errors_section(words: Words) -> str:
    """Relative errors by block and projection, as the conversion measured them."""
    blocks = [
        block for block in words["blocks"] if any("relative_error" in e for e in block["errors"].values())
    ]
    if not blocks:
        return ""
    names = [_short(block) for block in blocks]
    summary = words["artifact"]["quantization_error"]
    rows = [
        (PROJECTIONS.get(role, role), float(e["min"]), float(e["median"]), float(e["max"]), e["worst_block"])
        for role, e in summary.items()
    ]
    each = _each(blocks)
    title = "Blocks with the largest errors"
    title += f": {_NUM_LISTED} of {len(each)} rows" if len(each) > _NUM_LISTED else ""
    said = (
        "How far the decoded weights are off the source's: the norm of the difference over that of the weights, as the "
        "conversion measured it. Of what was kept as it is the error is 0."
    )
    plot = lines_plot("Relative error by layer", names, _series(blocks), "relative error by layer")
    if not any(row[3] for row in each):
        plot = note(_NOTHING_LOST)
    return section(
        "errors",
        "Errors",
        note(said),
        plot,
        table(("projection", "least", "median", "largest", "worst block"), rows, "Over all blocks"),
        table(
            ("block", "schema", "projection", "relative error", "worst expert", "its error"),
            each[:_NUM_LISTED],
            title,
        ),
    )


def _series(blocks: list[Words]) -> dict[str, tuple[str, list[float | None]]]:
    """Per projection a line of the blocks' errors and one of their worst experts'."""
    series: dict[str, tuple[str, list[float | None]]] = {}
    for role in ROLES:
        for more, key, kind in (
            ("", "relative_error", role),
            (", worst expert", "worst_relative_error", f"{role} worst"),
        ):
            values = [block["errors"].get(role, {}).get(key) for block in blocks]
            if any(value is not None for value in values):
                series[f"{PROJECTIONS[role]}{more}"] = (kind, values)
    return series


def _each(blocks: list[Words]) -> list[tuple[Any, ...]]:
    """A row for each block and projection, the largest errors first."""
    rows = [
        (
            block["name"],
            block["schema"],
            PROJECTIONS.get(role, role),
            float(error["relative_error"]),
            error.get("worst_expert", "–"),
            error.get("worst_relative_error", "–"),
        )
        for block in blocks
        for role, error in block["errors"].items()
        if "relative_error" in error
    ]
    return sorted(rows, key=lambda row: -row[3])


def _short(block: Words) -> str:
    """A block's place in few words."""
    return f"layer {block['layer']}" if block["layer"] >= 0 else str(block["name"])


def experts_section(words: Words) -> str:
    """A row for each block and a cell for each expert, and the experts with the largest errors."""
    found = words["experts"]
    of_block = {block["name"]: block for block in words["blocks"]}
    names = [_short(of_block[name]) if name in of_block else name for name in found["blocks"]]
    is_error = found["measure"] == "relative error"
    if is_error and not any(value for rows in found["values"].values() for row in rows for value in row):
        return section("experts", "Experts", note(_NOTHING_LOST)) if found["values"] else ""
    plots = "".join(
        heat_plot(f"{PROJECTIONS[role]}: {found['measure']}", names, rows)
        for role, rows in found["values"].items()
    )
    said = (
        "Each cell is an expert's relative error against the source, measured on weights that were read back from "
        "the files; the darker (in the dark: the brighter), the larger."
        if is_error
        else "Without the source errors of single experts are not known, but for the worst of each block. Each cell is "
        "the root mean square of an expert's decoded weights; the darker (in the dark: the brighter), the larger."
    )
    rows = [
        (
            one["block"],
            PROJECTIONS.get(one["projection"], one["projection"]),
            one["expert"],
            one["relative_error"],
        )
        for one in found["worst"]
    ]
    title = "Worst experts" if is_error else "Worst experts, of the worst of each block and projection"
    worst = table(("block", "projection", "expert", "relative error"), rows, title) if rows else ""
    return section(
        "experts",
        "Experts",
        note(said) if plots else "",
        f'<div class="plots">{plots}</div>' if plots else "",
        worst,
    )


def codes_section(words: Words) -> str:
    """How often each code, power of two of a scale, and zero point is used, by schema and projection."""
    usage = words["usage"]
    if usage is None:
        return ""
    read, total = usage["experts_read"], usage["experts"]
    said = (
        f"Counted over all {total} experts."
        if read == total
        else (
            f"Counted over a sample: {read} of {total} experts, evenly spread over each block (--sample says how many)."
        )
    )
    parts = [
        f'<div class="plots">{plots}</div>'
        for schema, roles in usage["schemas"].items()
        for kind in (_codes, _powers, _zero_points)
        if (
            plots := "".join(
                kind(f"{schema}, {PROJECTIONS[role]}", role, roles[role]) for role in ROLES if role in roles
            )
        )
    ]
    said += " Shares of all; scales by their power of two."
    if num_fused := sum(block["has_fused_scales"] for block in words["blocks"]):
        said += (
            f" In {num_fused} blocks the scales' exponents are fused into the codes: both are as the kernel sees them, "
            "not the source's."
        )
    return section("codes", "Codes and scales", note(said), *parts)


def _codes(title: str, role: str, used: Words) -> str:
    counts = [count for _, count in used["codes"]]
    num_used = sum(count > 0 for count in counts)
    carried = f"{num_used} of {len(counts)} codes used; they carry {entropy_bits(counts):.2f} bits each"
    return bars_plot(
        f"{title}: codes", [(f"{value:g}", count) for value, count in used["codes"]], carried, role
    )


def _powers(title: str, role: str, used: Words) -> str:
    powers = dict(used["scales"])
    span = range(min(powers), max(powers) + 1) if powers else range(0)
    bars = [(f"2^{power}", powers.get(power, 0)) for power in span]
    return bars_plot(f"{title}: scales", bars, _scales(used), role)


def _zero_points(title: str, role: str, used: Words) -> str:
    zeros = [(str(code), count) for code, count in enumerate(used["zero_points"])]
    return bars_plot(f"{title}: zero points", zeros, "", role) if zeros else ""


def _scales(used: Words) -> str:
    """What a histogram of powers of two cannot show."""
    kinds = {
        "num_zero_scales": "zero",
        "num_negative_scales": "negative",
        "num_odd_scales": "no finite number",
    }
    said = [f"{number(used[key])} {kind}" for key, kind in kinds.items() if used[key]]
    total = sum(count for _, count in used["scales"]) + used["num_zero_scales"] + used["num_odd_scales"]
    return f"{number(total)} scales" + (f", of which {', '.join(said)}" if said else "")
