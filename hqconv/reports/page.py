"""HTML report about an artifact: sections and plots, rendered by the templates in `templates/`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hqconv.errors import plural
from hqconv.reports.documents import Document as Document
from hqconv.reports.html import Part, details, environment, facts, heading, note, number, plots, section, size, table
from hqconv.reports.page_document import GENERATOR, PROJECTIONS, ROLES
from hqconv.schemas.engine import ENGINE

_NO_CHECKS = (
    "No check was run for this page. `hqconv verify --report` runs all checks, `hqconv report --source` the check of "
    "weights."
)
_NUM_SHOWN = 10


def verdict(verification: Document | None) -> tuple[str, str]:
    """CSS class and text for the outcome of all checks."""
    if verification is None:
        return "none", "none run"
    return ("pass", "passed") if verification["passed"] else ("fail", "failed")


def checks_section(verification: Document | None) -> Part | None:
    """Status, notes, findings and measurements of each check."""
    if verification is None:
        return section("checks", "Checks", note(_NO_CHECKS))
    against = verification.get("source")
    rows = [
        (name, check["status"], check["skipped_because"] or plural(len(check["findings"]), "finding"))
        for name, check in verification["checks"].items()
    ]
    basis = (
        f"Checked against {against}."
        if against
        else "Checked without the source: the artifact was checked against itself."
    )
    parts: list[Part | None] = [note(basis), table(("check", "status", "result"), rows)]
    for name, check in verification["checks"].items():
        if check["notes"] or check["findings"] or check["measured"]:
            parts.append(heading(name))
        parts += [note(text) for text in check["notes"]]
        if check["findings"]:
            keys = ("where", "what", "expected", "found")
            parts.append(table(keys, [[finding[key] for key in keys] for finding in check["findings"]], "Findings"))
        if name in _MEASUREMENTS:
            parts += _MEASUREMENTS[name](check["measured"])
    return section("checks", "Checks", *parts)


def _weights(measured: Mapping[str, Any]) -> list[Part]:
    """Errors of decoded weights against the source, the largest first."""
    rows = [
        (
            layer,
            PROJECTIONS.get(role, role),
            *(_figure(one.get(key)) for key in ("relative_error", "sqnr_db", "cosine")),
            _figure((one.get("worst_group") or {}).get("relative_error")),
        )
        for layer, roles in measured.items()
        for role, one in roles.items()
        if isinstance(one, Mapping) and "relative_error" in one
    ]
    rows.sort(key=lambda row: -row[2] if isinstance(row[2], float) else -math.inf)  # no number: the worst
    headers = ("layer", "projection", "relative error", "SQNR (dB)", "cosine", "worst scale group")
    title = "Decoded weights against the source"
    if len(rows) <= _NUM_SHOWN:
        return [table(headers, rows, title)] if rows else []
    shown = table(headers, rows[:_NUM_SHOWN], f"{title}: the {_NUM_SHOWN} largest errors of {len(rows)}")
    return [shown, details(f"All {len(rows)}", table(headers, rows))]


def _kernel(measured: Mapping[str, Any]) -> list[Part]:
    """Errors of the GPU kernel, by layer."""
    keys = ("kernel", "rounded_kernel", "channel", "batch", "against_source")
    rows = [
        (layer, *(_figure(one.get(key)) for key in keys), one.get("routed_by", "")) for layer, one in measured.items()
    ]
    headers = (
        "layer",
        "kernel against decoded weights",
        "against rounded activations",
        "worst channel",
        "worst batch",
        "output against the source's",
        "tokens routed by",
    )
    return [table(headers, rows, "GPU kernel: relative errors")] if rows else []


def _figure(value: Any) -> Any:
    """Number for a table, or a dash."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else "–"


_MEASUREMENTS = {"weights": _weights, "kernel": _kernel}


_NO_ERROR = "No weight differs from the source: stored values were kept, or the new codes decode to the same values."


def errors_section(document: Document) -> Part | None:
    """Relative errors by layer and projection, as the conversion measured them."""
    layers = [layer for layer in document["blocks"] if any("relative_error" in e for e in layer["errors"].values())]
    if not layers:
        return None
    names = [_short(layer) for layer in layers]
    summary = document["artifact"]["quantization_error"]
    rows = [
        (PROJECTIONS.get(role, role), float(e["min"]), float(e["median"]), float(e["max"]), e["worst_block"])
        for role, e in summary.items()
    ]
    each = _each(layers)
    title = "Layers with the largest errors"
    title += f": {_NUM_SHOWN} of {len(each)} rows" if len(each) > _NUM_SHOWN else ""
    legend = (
        "Relative error of the decoded weights: the norm of the difference to the source over the norm of the source's "
        "weights, measured by the conversion. It is 0 for weights that were kept."
    )
    plot = lines_plot("Relative error by layer", names, _series(layers), "relative error by layer")
    if not any(row[3] for row in each):
        plot = note(_NO_ERROR)
    return section(
        "errors",
        "Errors",
        note(legend),
        plot,
        table(("projection", "smallest", "median", "largest", "worst layer"), rows, "Over all layers"),
        table(
            ("layer", "schema", "projection", "relative error", "worst expert", "its error"), each[:_NUM_SHOWN], title
        ),
    )


def evaluation_section(evaluation: Document | None) -> Part | None:
    """Figures of `hqconv evaluate`; None if there was no evaluation."""
    if evaluation is None:
        return None
    kl, sides = evaluation["kl"], [evaluation["source_figures"], evaluation["artifact_figures"]]
    legend = (
        f"{evaluation['num_predictions']} predicted tokens of {evaluation['text']['name']}, in contexts of "
        f"{evaluation['context_length']} tokens, through the source and through the weights of this artifact, in "
        f"transformers {evaluation['transformers_version']} ({evaluation['compute_dtype']}). Activations were not "
        "quantized."
    )
    rows = [
        ("perplexity", *(float(side["perplexity"]) for side in sides)),
        ("negative log-likelihood, nats per token", *(float(side["mean_nll"]) for side in sides)),
    ]
    divergence = [tuple(float(kl[key]) for key in ("mean", "median", "p90", "p99", "max"))]
    return section(
        "evaluation",
        "Predictions",
        note(legend),
        table(("", "source", "artifact"), rows),
        table(
            ("mean", "median", "90 %", "99 %", "largest"), divergence, "KL divergence of next-token distributions, nats"
        ),
        note(f"The most likely token is the same for {100 * evaluation['top1_agreement']:.2f} % of the tokens."),
    )


def _series(layers: list[Document]) -> dict[str, tuple[str, list[float | None]]]:
    """Two lines for each projection: errors of the layers, and errors of their worst experts."""
    series: dict[str, tuple[str, list[float | None]]] = {}
    for role in ROLES:
        for more, key, kind in (
            ("", "relative_error", role),
            (", worst expert", "worst_relative_error", f"{role} worst"),
        ):
            values = [layer["errors"].get(role, {}).get(key) for layer in layers]
            if any(value is not None for value in values):
                series[f"{PROJECTIONS[role]}{more}"] = (kind, values)
    return series


def _each(layers: list[Document]) -> list[tuple[Any, ...]]:
    """Rows for each layer and projection, the largest errors first."""
    rows = [
        (
            layer["name"],
            layer["schema"],
            PROJECTIONS.get(role, role),
            float(error["relative_error"]),
            error.get("worst_expert", "–"),
            error.get("worst_relative_error", "–"),
        )
        for layer in layers
        for role, error in layer["errors"].items()
        if "relative_error" in error
    ]
    return sorted(rows, key=lambda row: -row[3])


def _short(layer: Document) -> str:
    """Short name of a layer: its layer number if known."""
    return f"layer {layer['layer']}" if layer["layer"] >= 0 else str(layer["name"])


def allocation_section(document: Document) -> Part | None:
    """Curve of error against size, with one schema for all layers and the choice of the recipe."""
    found = document.get("allocation")
    if found is None:
        return None
    chosen = found["chosen"]
    legend = (
        "Each corner of the line is a choice of schemas for the layers; no choice of its size or less has a smaller "
        "error. The error is the root of the mean squared relative error of all layers, measured before the conversion."
    )
    rows = [
        (name, float(point["bits_per_weight"]), size(point["size_bytes"]), float(point["relative_error"]))
        for name, point in (("chosen", chosen), *found["uniform"].items())
    ]
    of = "all files of experts" if found["budget"]["objective"] == "size" else "the experts that one token reads"
    limit = f"{size(found['budget']['limit_bytes'])} of {of}"
    least = f"{found['least_possible_error']:.4g}"
    return section(
        "allocation",
        "Allocation",
        note(legend),
        curve_plot(found),
        facts((("budget", limit), ("least possible error within it", least))),
        table(("schema of all layers", "bits per weight", "size", "error"), rows, "One schema for all layers"),
    )


def experts_section(document: Document) -> Part | None:
    """Heat maps with a row for each layer and a cell for each expert, and the experts with the largest errors."""
    found = document["experts"]
    of_layer = {layer["name"]: layer for layer in document["blocks"]}
    names = [_short(of_layer[name]) if name in of_layer else name for name in found["blocks"]]
    if found["values"] and not any(value for rows in found["values"].values() for row in rows for value in row):
        return section("experts", "Experts", note(_NO_ERROR))
    maps = plots(
        heat_plot(f"{PROJECTIONS[role]}: relative error", names, rows) for role, rows in found["values"].items()
    )
    legend = (
        "Each cell is the relative error of one expert against the source, measured on weights decoded from the files. "
        "Darker cells (brighter in dark mode) are larger."
        if found["values"]
        else "Errors of single experts are not known without the source, except for the worst expert of each layer."
    )
    rows = [
        (one["block"], PROJECTIONS.get(one["projection"], one["projection"]), one["expert"], one["relative_error"])
        for one in found["worst"]
    ]
    title = "Worst experts" if found["values"] else "Worst experts, one of each layer and projection"
    worst = table(("layer", "projection", "expert", "relative error"), rows, title) if rows else None
    return section("experts", "Experts", note(legend) if rows or maps else None, maps, worst)


_CONVERSION = {
    "quantized": "quantized",
    "direct": "direct: codes and scales kept",
    "direct, scales rounded": "direct, scales rounded: codes kept",
    "requantized": "requantized from exactly decoded float32",
}


def page(document: Document) -> str:
    """Render a document of `page_document` as one HTML file that loads nothing from elsewhere.

    The same document gives the same page.
    """
    sections = (
        _made(document),
        evaluation_section(document["evaluation"]),
        errors_section(document),
        allocation_section(document),
        experts_section(document),
        checks_section(document["verification"]),
        _provenance(document),
    )
    artifact, lead = document["artifact"], ""
    if artifact is not None:
        schema = artifact["schema"]
        lead = f"Made from {artifact['source']['name']}: {schema['name']}, {schema['description']}."
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            generator=GENERATOR,
            name=document["name"],
            lead=lead,
            unreadable=document["unreadable"],
            tiles=[{"value": value, "label": label, "css": css} for value, label, css in _tiles(document)],
            sections=[one for one in sections if one is not None],
        )
    )


def _tiles(document: Document) -> list[tuple[str, str, str]]:
    """Value, label and CSS class of the tiles at the top."""
    artifact = document["artifact"]
    css, outcome = verdict(document["verification"])
    tiles = [(outcome, "checks", css)]
    if artifact is not None:
        errors = [
            error["relative_error"]
            for layer in document["blocks"]
            for error in layer["errors"].values()
            if "relative_error" in error
        ]
        tiles += [
            (artifact["schema"]["name"], "weights", ""),
            (number(float(artifact["schema"]["bits_per_weight"])), "bits per weight", ""),
            (size(artifact["num_bytes"]), "on disk", ""),
            (number(max(errors), 3) if errors else "–", "largest relative error of a layer", ""),
            (artifact["target"], "for the GPU", ""),
        ]
    if document["evaluation"] is not None:
        tiles.append((number(float(document["evaluation"]["kl"]["mean"]), 3), "KL divergence, nats per token", ""))
    return tiles


def _made(document: Document) -> Part | None:
    """Section with schema, layout and layers of the artifact."""
    artifact = document["artifact"]
    if artifact is None:
        return None
    revision = artifact["source"]["revision"]
    conversion = "; ".join(
        f"{_CONVERSION.get(kind, kind)} ({count} layer{'s' * (count != 1)})"
        for kind, count in artifact["conversion"].items()
    )
    rows = (
        ("source", f"{artifact['source']['name']}{f' at {revision}' if revision else ''}"),
        ("family", artifact["family"]),
        ("weights", f"{artifact['schema']['name']}: {artifact['schema']['description']}"),
        ("some layers", "; ".join(f"{len(names)} are {what}" for what, names in artifact["otherwise"].items())),
        ("left as they were", ", ".join(artifact["left_blocks"])),
        ("conversion", conversion),
        ("scales chosen by", _quantizer(artifact)),
        ("parameters", f"{artifact['dtype']}, {artifact['input_schema']} activations"),
        ("layout", _layout(artifact)),
        ("experts", _ranks(artifact["rank_bytes"])),
        ("serve with", artifact["serve_command"] or f"no {ENGINE.name} command serves these ranks"),
    )
    headers = ("layers", "count", "experts", "hidden", "intermediate", "top-k", "activation", "stored as")
    keys = ("hidden_size", "intermediate_size", "top_k", "activation")
    runs = [
        (
            *(run["name"], run["num_blocks"], run["num_experts"]),
            *(run[key] for key in keys),
            f"{run['source_format']}, {run['source_dtype']}",
        )
        for run in artifact["blocks"]
    ]
    return section("made", "Overview", facts(rows), table(headers, runs, "MoE layers"))


def _quantizer(artifact: Document) -> str:
    if not {"quantized", "requantized"} & artifact["conversion"].keys():
        return ""
    if artifact["quantizer"] == "gptq":
        return "least error of the products with inputs, compensated in other columns (gptq)"
    if artifact["quantizer"] != "mse":
        return "round to nearest"
    return "least squared error" + (", weighted by importance" if artifact["importance"] else "")


def _layout(artifact: Document) -> str:
    if artifact["layout"] != "kernel":
        return "checkpoint: not split into ranks, for every GPU"
    copies = artifact["redundant_experts"]
    more = f", {copies} redundant experts" if copies else ""
    placement = f", experts placed {artifact['expert_placement']}" if artifact["ep"] > 1 else ""
    return f"kernel, for {artifact['target']}: tp {artifact['tp']}, ep {artifact['ep']}{placement}{more}"


def _ranks(rank_bytes: Mapping[str, int]) -> str:
    if not rank_bytes:
        return ""
    least, most = min(rank_bytes.values()), max(rank_bytes.values())
    each = f"{size(least)} each" if least == most else f"{size(least)} to {size(most)}"
    return f"{len(rank_bytes)} rank{'s' * (len(rank_bytes) != 1)}, {each}"


def _provenance(document: Document) -> Part | None:
    """Section with source, versions, digests and files of the artifact."""
    artifact, found = document["artifact"], document["provenance"]
    if artifact is None or not found:
        return None
    source = found["source"]
    rows = (
        ("source", source["name"]),
        ("commit", source["revision"]),
        ("source's index", f"SHA-256 {source['index_sha256']}" if source["index_sha256"] else ""),
        ("family chosen by", found["family_chosen_because"]),
        ("made by", f"hqconv {artifact['hqconv_version']}, humming-kernels {artifact['humming_kernels_version']}"),
        ("manifest", f"format version {artifact['format_version']}"),
        (
            "manifest's digest",
            f"SHA-256 {found['digest']}" if found["digest"] else "none: written by an hqconv without manifest digests",
        ),
        ("derived from", _derived(found["derived_from"])),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in artifact["tensors"].items())),
        ("damaged", ", ".join(artifact["missing_or_resized_files"])),
    )
    warnings = [note(f"Warning of the conversion: {warning}") for warning in found["warnings"]]
    source_files = [
        (str(f.get("name")), _bytes(f.get("size_bytes")), str(f.get("header_sha256"))) for f in found["source_files"]
    ]
    own = [(f["name"], _bytes(f["size_bytes"]), f["sha256"]) for f in found["files"]]
    tables = [
        details(f"{title} ({len(rows)})", table(("file", "size", digest), rows))
        for title, digest, rows in (
            ("Files of the source", "SHA-256 of its header", source_files),
            ("Files of the artifact", "SHA-256", own),
        )
        if rows
    ]
    return section("provenance", "Provenance", facts(rows), *warnings, *tables)


def _bytes(value: Any) -> str:
    return size(value) if isinstance(value, int) else "–"


def _derived(value: Any) -> str:
    """Artifacts from which this artifact was made, with all keys of the manifest's entries."""
    entries = value if isinstance(value, list) else [value] if value else []
    return "; ".join(
        ", ".join(f"{key} {one}" for key, one in entry.items()) if isinstance(entry, dict) else str(entry)
        for entry in entries
    )


NUM_LEVELS = 16  # colours of a heat map: .h0 to .h15 of report.css
_WIDTH, _HEIGHT = 1000.0, 100.0
Values = Sequence[float | None]


def ticks(top: float) -> list[float]:
    """Return 2 to 6 round numbers from 0 up; the last one is at least `top`."""
    if not top > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top))
    step = next(power * part for part in (0.2, 0.5, 1, 2) if power * part * 5 >= top)
    return [index * step for index in range(math.ceil(top / step - 1e-9) + 1)]


def lines_plot(title: str, names: Sequence[str], series: Mapping[str, tuple[str, Values]], label: str) -> Part:
    """Plot one line for each series over `names`, from 0 up.

    series: name → CSS class and a value for each of `names`; None and NaN leave a gap. label: text for screen readers.
    """
    known = [v for _, values in series.values() for v in values if v is not None and math.isfinite(v)]
    marks = ticks(max(known, default=0.0))
    top = marks[-1]
    lines: list[dict[str, str]] = []
    dots: list[dict[str, object]] = []
    for series_name, (css, values) in series.items():
        path, is_open = "", False
        for index, value in enumerate(values):
            if value is None or not math.isfinite(value):
                is_open = False
                continue
            at = f"{_WIDTH * (index + 0.5) / len(names):.4g} {_y(value, top)}"
            path += f"{'L' if is_open else 'M'}{at}"
            is_open = True
            dots.append({"css": css, "at": at, "name": names[index], "series": series_name, "value": value})
        lines.insert(0, {"css": css, "path": path})
    return {
        **_frame("lines", title, marks, [number(mark) for mark in marks]),
        "label": label,
        "ends": [names[0], names[-1]] if len(names) > 1 else [names[0]],
        "lines": lines,
        "dots": dots,
        "legend": [{"css": css, "series": name} for name, (css, _) in series.items()],
    }


def curve_plot(found: Document) -> Part:
    """Plot errors over bits per weight: a line for the curve, dots for one schema for all layers and for the choice."""
    series = (
        ("best choice of each size", "w1", [("curve", point) for point in found["curve"]]),
        ("one schema for all layers", "w3", list(found["uniform"].items())),
        ("chosen", "w2", [("recipe", found["chosen"])]),
    )
    is_size = found["budget"]["objective"] == "size"
    key = "bits_per_weight" if is_size else "token_bytes"
    places = [float(point[key]) for _, _, points in series for _, point in points]
    low, high = min(places), max(places)
    marks = ticks(max(float(point["relative_error"]) for _, _, points in series for _, point in points))

    def at(point: Document) -> str:
        x = (float(point[key]) - low) / (high - low) if high > low else 0.5
        return f"{_WIDTH * x:.5g} {_y(float(point['relative_error']), marks[-1])}"

    def shown(place: float) -> str:
        return f"{place:.4g} bits" if is_size else f"{size(place)} for a token"

    dots = [
        {"css": css, "at": at(point), "name": f"{name}, {shown(float(point[key]))}", "series": "error"}
        | {"value": float(point["relative_error"])}
        for _, css, points in series
        for name, point in points
    ]
    title = "Error over bits per weight" if is_size else "Error over bytes of experts that one token reads"
    return {
        **_frame("lines", title, marks, [number(mark) for mark in marks]),
        "label": title,
        "ends": [shown(low), shown(high)],
        "lines": [{"css": "w1", "path": "M" + "L".join(at(point) for point in found["curve"])}],
        "dots": [dot for dot in dots if dot["css"] != "w1"],
        "legend": [{"css": css, "series": name} for name, css, _ in series],
    }


def _frame(kind: str, title: str, marks: Sequence[float], labels: Sequence[str]) -> Part:
    """Title, size, axis and grid of a plot with the ticks `marks`."""
    top = marks[-1]
    return {
        "kind": "plot",
        "type": kind,
        "title": title,
        "label": "",
        "width": f"{_WIDTH:g}",
        "height": f"{_HEIGHT:g}",
        "grid": [_y(mark, top) for mark in marks],
        "axis": [(f"bottom:{100 * mark / top:.4g}%", text) for mark, text in zip(marks, labels, strict=True)],
    }


def _y(value: float, top: float) -> str:
    return f"{_HEIGHT * (1 - value / top):.4g}"


def heat_plot(title: str, names: Sequence[str], rows: Sequence[Values]) -> Part:
    """Plot a row of cells for each name; darker cells are larger, cells without a number are left out."""
    known = [v for row in rows for v in row if v is not None and math.isfinite(v)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    cells: dict[int, str] = {}
    for y, row in enumerate(rows):
        levels = [_level(value, low, high) for value in row]
        x = 0
        while x < len(levels):
            end = x + 1
            while end < len(levels) and levels[end] == levels[x]:
                end += 1
            cells[levels[x]] = cells.get(levels[x], "") + f"M{x} {y}h{end - x}v1h{x - end}z"
            x = end
    num_columns = max((len(row) for row in rows), default=1)
    return {
        "kind": "plot",
        "type": "heat",
        "title": title,
        "label": "",
        "height_px": min(max(12 * len(rows), 60), 480),
        "num_columns": num_columns,
        "num_rows": len(rows),
        "cells": [(level, path) for level, path in sorted(cells.items()) if level >= 0],
        "has_gaps": -1 in cells,
        "num_levels": NUM_LEVELS,
        "low": low,
        "high": high,
        "axis": [("top:0", names[0]), *([("bottom:0", names[-1])] if len(names) > 1 else [])],
        "ends": ["expert 0", f"expert {num_columns - 1}"],
    }


def _level(value: float | None, low: float, high: float) -> int:
    """Colour of a value: 0 to NUM_LEVELS - 1, -1 for None, the last one for NaN."""
    if value is None:
        return -1
    if not math.isfinite(value):
        return NUM_LEVELS - 1
    return min(int((value - low) / (high - low) * NUM_LEVELS), NUM_LEVELS - 1) if high > low else 0
