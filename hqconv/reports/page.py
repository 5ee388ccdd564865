"""The section of a report on what `verify` found, with the kernel's results where it ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hqconv.reports.documents import Words
from hqconv.reports.html import facts, folded, lines, note, number, section, size, table, text
from hqconv.reports.page_document import PROJECTIONS, ROLES, entropy_bits
from hqconv.reports.plots import bars_plot, heat_plot, lines_plot
from hqconv.reports.style import STYLE
from hqconv.serving.engine import ENGINE

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


GENERATOR = "hqconv report"  # by which a page of ours is told from other files
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_SECTIONS = {
    "made": "What it is",
    "errors": "Errors",
    "experts": "Experts",
    "codes": "Codes and scales",
    "checks": "Checks",
    "provenance": "Provenance",
}
_CONVERSION = {
    "quantized": "quantized",
    "direct": "direct: codes and scales kept",
    "direct, scales rounded": "direct, scales rounded: codes kept",
    "requantized": "requantized from exactly decoded float32",
}


def page(words: Words) -> str:
    """The page for the words of `page_document`: a whole HTML document, which loads nothing from anywhere.

    Every text of the words is escaped. The same words give the same page.
    """
    name = text(words["name"])
    parts = {
        "made": _made(words),
        "errors": errors_section(words),
        "experts": experts_section(words),
        "codes": codes_section(words),
        "checks": checks_section(words["verification"]),
        "provenance": _provenance(words),
    }
    links = "".join(f'<a href="#{key}">{text(_SECTIONS[key])}</a>' for key, part in parts.items() if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="generator" content="{GENERATOR}">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{name}: report of hqconv</title><style>{STYLE}</style></head>"
        f'<body><header class="top"><h1>{name}</h1>{_lead(words)}{_tiles(words)}<nav>{links}</nav></header>'
        f"<main>{''.join(parts.values())}</main></body></html>\n"
    )


def _lead(words: Words) -> str:
    unreadable = "".join(f'<p class="fail">{lines(one)}</p>' for one in words["unreadable"])
    artifact = words["artifact"]
    if artifact is None:
        return unreadable
    source, schema = artifact["source"]["name"], artifact["schema"]
    sentence = f"Made from {source}: {schema['name']}, {schema['description']}."
    return f'<p class="lead">{text(sentence)}</p>{unreadable}'


def _tiles(words: Words) -> str:
    artifact = words["artifact"]
    kind, said = verdict(words["verification"])
    tiles = [(f'<b class="{kind}">{text(said)}</b>', "checks")]
    if artifact is not None:
        errors = [
            e["relative_error"]
            for b in words["blocks"]
            for e in b["errors"].values()
            if "relative_error" in e
        ]
        span = number(max(errors), 3) if errors else "–"
        tiles += [
            (f"<b>{text(artifact['schema']['name'])}</b>", "weights"),
            (f"<b>{number(float(artifact['schema']['bits_per_weight']))}</b>", "bits per weight"),
            (f"<b>{text(size(artifact['num_bytes']))}</b>", "on disk"),
            (f"<b>{span}</b>", "largest relative error of a block"),
            (f"<b>{text(artifact['target'])}</b>", "for the GPU"),
        ]
    inside = "".join(f'<div class="tile">{said}<span>{text(label)}</span></div>' for said, label in tiles)
    return f'<div class="tiles">{inside}</div>'


def _made(words: Words) -> str:
    artifact = words["artifact"]
    if artifact is None:
        return ""
    revision = artifact["source"]["revision"]
    conversion = "; ".join(
        f"{_CONVERSION.get(kind, kind)} ({count} block{'s' * (count != 1)})"
        for kind, count in artifact["conversion"].items()
    )
    rows = (
        ("source", f"{artifact['source']['name']}{f' at {revision}' if revision else ''}"),
        ("family", artifact["family"]),
        ("weights", f"{artifact['schema']['name']}: {artifact['schema']['description']}"),
        (
            "some blocks",
            "; ".join(f"{len(names)} are {what}" for what, names in artifact["otherwise"].items()),
        ),
        ("left as they were", ", ".join(artifact["left_blocks"])),
        ("conversion", conversion),
        ("scales chosen by", _quantizer(artifact)),
        ("parameters", f"{artifact['dtype']}, {artifact['input_schema']} activations"),
        ("layout", _layout(artifact)),
        ("experts", _ranks(artifact["rank_bytes"])),
        ("serve with", artifact["serve_command"] or f"{ENGINE.name} has no start for these ranks"),
    )
    headers = ("blocks", "count", "experts", "hidden", "intermediate", "top-k", "activation", "stored as")
    keys = ("name", "num_blocks", "num_experts", "hidden_size", "intermediate_size", "top_k", "activation")
    runs = [
        (*(run[key] for key in keys), f"{run['source_format']}, {run['source_dtype']}")
        for run in artifact["blocks"]
    ]
    return section("made", _SECTIONS["made"], facts(rows), table(headers, runs, "MoE blocks"))


def _quantizer(artifact: Words) -> str:
    if not {"quantized", "requantized"} & artifact["conversion"].keys():
        return ""
    if artifact["quantizer"] != "mse":
        return "round to nearest"
    return "least squared error" + (", weighted by importance" if artifact["importance"] else "")


def _layout(artifact: Words) -> str:
    if artifact["layout"] != "kernel":
        return "checkpoint: not cut for ranks, for every GPU"
    copies = artifact["redundant_experts"]
    more = f", {copies} redundant experts" if copies else ""
    placement = f", experts dealt {artifact['expert_placement']}" if artifact["ep"] > 1 else ""
    return f"kernel, for {artifact['target']}: tp {artifact['tp']}, ep {artifact['ep']}{placement}{more}"


def _ranks(rank_bytes: Mapping[str, int]) -> str:
    if not rank_bytes:
        return ""
    least, most = min(rank_bytes.values()), max(rank_bytes.values())
    each = f"{size(least)} each" if least == most else f"{size(least)} to {size(most)}"
    return f"{len(rank_bytes)} rank{'s' * (len(rank_bytes) != 1)}, {each}"


def _provenance(words: Words) -> str:
    artifact, found = words["artifact"], words["provenance"]
    if artifact is None or not found:
        return ""
    source = found["source"]
    rows = (
        ("source", source["name"]),
        ("commit", source["revision"]),
        ("source's index", f"SHA-256 {source['index_sha256']}" if source["index_sha256"] else ""),
        ("family chosen by", found["family_chosen_because"]),
        (
            "made by",
            f"hqconv {artifact['hqconv_version']}, humming-kernels {artifact['humming_kernels_version']}",
        ),
        ("manifest", f"format version {artifact['format_version']}"),
        (
            "manifest's digest",
            f"SHA-256 {found['digest']}" if found["digest"] else "none: of before manifests had one",
        ),
        ("derived from", _derived(found["derived_from"])),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in artifact["tensors"].items())),
        ("damaged", ", ".join(artifact["missing_or_resized_files"])),
    )
    warnings = "".join(note(f"Warning of the conversion: {one}") for one in found["warnings"])
    of_source = [
        (str(f.get("name")), _bytes(f.get("size_bytes")), str(f.get("header_sha256")))
        for f in found["source_files"]
    ]
    own = [(f["name"], _bytes(f["size_bytes"]), f["sha256"]) for f in found["files"]]
    tables = "".join(
        folded(f"{title} ({len(rows)})", table(("file", "size", digest), rows))
        for title, digest, rows in (
            ("Files of the source", "SHA-256 of its header", of_source),
            ("Files of the artifact", "SHA-256", own),
        )
        if rows
    )
    return section("provenance", _SECTIONS["provenance"], facts(rows), warnings, tables)


def _bytes(value: Any) -> str:
    return size(value) if isinstance(value, int) else "–"


def _derived(value: Any) -> str:
    """The artifacts that it was cut from, in whatever words the manifest has."""
    entries = value if isinstance(value, list) else [value] if value else []
    return "; ".join(
        ", ".join(f"{key} {one}" for key, one in entry.items()) if isinstance(entry, dict) else str(entry)
        for entry in entries
    )
