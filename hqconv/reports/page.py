"""HTML report about an artifact: the sections of its page, rendered by the templates in `templates/`.

Names in checkpoints are hostile text. Every output of a template is made printable (control characters are written
out, long words are shortened), and then escaped.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from hqconv.errors import plural, printable, printable_line
from hqconv.reports.parts import Part, Series, facts, figure, heading, note, number, plot, section, table
from hqconv.reports.texts import (
    NUM_ROWS_SHOWN,
    PROJECTIONS,
    Document,
    allocation_parts,
    artifact_parts,
    evaluation_parts,
    human_bytes,
    measured_parts,
)

if TYPE_CHECKING:
    from jinja2 import Environment

_NO_CHECKS = (
    "No check was run for this page. `hqconv verify --report` runs all checks, `hqconv report --source` the check of "
    "weights."
)
_NO_ERROR = "No weight differs from the source: stored values were kept, or the new codes decode to the same values."


@cache
def _environment() -> Environment:
    """Return the environment of the templates in `hqconv/reports/templates`, with autoescape."""
    import jinja2
    from markupsafe import Markup, escape

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) else printable_line(str(value))

    def lines(message: str) -> Markup:
        """A multi-line message of hqconv."""
        return Markup(escape(printable(message)).replace("\n", Markup("<br>")))

    found = jinja2.Environment(
        loader=jinja2.PackageLoader("hqconv.reports"),
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # An SVG path holds numbers only and may be longer than printable text.
    found.filters |= {"lines": lines, "figure": figure, "path": lambda path: Markup(escape(path))}
    return found


def page(document: Document) -> str:
    """Render a document of `page_document` as one HTML file that loads nothing from elsewhere.

    The same document gives the same page.
    """
    artifact, evaluation = document["artifact"], document["evaluation"]
    sections = (
        None if artifact is None else section("made", "Overview", *artifact_parts(artifact)),
        None if evaluation is None else section("evaluation", "Predictions", *evaluation_parts(evaluation)),
        _errors(document),
        _allocation(document["allocation"]),
        _experts(document["experts"], document["blocks"]),
        _checks(document["verification"]),
        _provenance(artifact, document["provenance"]),
    )
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            name=document["name"],
            lead="" if artifact is None else f"Made from {artifact['source']['name']}: {artifact['schema']['name']}.",
            unreadable=document["unreadable"],
            tiles=[{"value": value, "label": label, "css": css} for value, label, css in _tiles(document)],
            sections=[one for one in sections if one is not None],
        )
    )


def _tiles(document: Document) -> list[tuple[str, str, str]]:
    """Value, label and CSS class of the tiles at the top."""
    artifact, verification = document["artifact"], document["verification"]
    if verification is None:
        tiles = [("none run", "checks", "none")]
    else:
        tiles = [("passed", "checks", "pass") if verification["passed"] else ("failed", "checks", "fail")]
    if artifact is not None:
        errors = [error for _, _, error in _layer_errors(document["blocks"])]
        largest = max((error["relative_error"] for error in errors), default=None)
        tiles += [
            (artifact["schema"]["name"], "weights", ""),
            (number(float(artifact["schema"]["bits_per_weight"])), "bits per weight", ""),
            (human_bytes(artifact["num_bytes"]), "on disk", ""),
            (number(largest, 3), "largest relative error of a layer", ""),
            (artifact["target"], "for the GPU", ""),
        ]
    if document["evaluation"] is not None:
        tiles.append((number(float(document["evaluation"]["kl"]["mean"]), 3), "KL divergence, nats per token", ""))
    return tiles


def _layer_errors(layers: list[Document]) -> list[tuple[Document, str, Document]]:
    """Layer, projection and figures of each error that the conversion measured."""
    return [
        (layer, role, error) for layer in layers for role, error in layer["errors"].items() if "relative_error" in error
    ]


def _errors(document: Document) -> Part | None:
    """Relative errors by layer and projection, as the conversion measured them."""
    errors = _layer_errors(document["blocks"])
    if not errors:
        return None
    rows = [
        (
            *(layer["name"], layer["schema"], PROJECTIONS.get(role, role), float(error["relative_error"])),
            *(error.get(key, "–") for key in ("worst_expert", "worst_relative_error")),
        )
        for layer, role, error in errors
    ]
    rows.sort(key=lambda row: -row[3])
    legend = (
        "Relative error of the decoded weights: the norm of the difference to the source over the norm of the source's "
        "weights, measured by the conversion. It is 0 for weights that were kept."
    )
    headers = ("layer", "schema", "projection", "relative error", "worst expert", "its error")
    title = "Layers with the largest errors"
    title += f": {NUM_ROWS_SHOWN} of {len(rows)} rows" if len(rows) > NUM_ROWS_SHOWN else ""
    return section(
        "errors",
        "Errors",
        note(legend),
        _errors_plot(document["blocks"]) if any(row[3] for row in rows) else note(_NO_ERROR),
        table(headers, rows[:NUM_ROWS_SHOWN], title),
    )


def _errors_plot(layers: list[Document]) -> Part:
    """Two lines for each projection: errors of the layers, and errors of their worst experts."""
    shown = [layer for layer in layers if any("relative_error" in error for error in layer["errors"].values())]
    names = [f"layer {layer['layer']}" if layer["layer"] >= 0 else str(layer["name"]) for layer in shown]
    series = []
    for role, label in PROJECTIONS.items():
        for more, key, css in (
            ("", "relative_error", role),
            (", worst expert", "worst_relative_error", f"{role} worst"),
        ):
            values = [layer["errors"].get(role, {}).get(key) for layer in shown]
            if any(value is not None for value in values):
                points = [(x, y, name) for x, (y, name) in enumerate(zip(values, names, strict=True))]
                series.append(Series(f"{label}{more}", css, points))
    return plot("Relative error by layer", series, list(dict.fromkeys((names[0], names[-1]))))


def _allocation(found: Document | None) -> Part | None:
    """Curve of error against size, with one schema for all layers and the choice of the recipe."""
    if found is None:
        return None
    is_size = found["budget"]["objective"] == "size"
    key = "bits_per_weight" if is_size else "token_bytes"

    def place(point: Document) -> str:
        return f"{point[key]:.4g} bits" if is_size else f"{human_bytes(point[key])} for a token"

    named = {
        "best choice of each size": ("w1", [("curve", point) for point in found["curve"]]),
        "one schema for all layers": ("w3", list(found["uniform"].items())),
        "chosen": ("w2", [("recipe", found["chosen"])]),
    }
    series = [
        Series(
            title,
            css,
            [(float(one[key]), float(one["relative_error"]), f"{name}, {place(one)}") for name, one in points],
            has_line=css == "w1",
        )
        for title, (css, points) in named.items()
    ]
    ends = sorted((one for _, points in named.values() for _, one in points), key=lambda point: float(point[key]))
    title = "Error over bits per weight" if is_size else "Error over bytes of experts that one token reads"
    legend = (
        "Each corner of the line is a choice of schemas for the layers; no choice of its size or less has a smaller "
        "error. The error is the root of the mean squared relative error of all layers, measured before the conversion."
    )
    return section(
        "allocation",
        "Allocation",
        note(legend),
        plot(title, series, [place(ends[0]), place(ends[-1])]),
        *allocation_parts(found),
    )


def _experts(found: Document, layers: list[Document]) -> Part | None:
    """The experts with the largest errors."""
    if not found["worst"]:
        return section("experts", "Experts", note(_NO_ERROR) if layers and found["is_measured"] else None)
    rows = [
        (one["block"], PROJECTIONS.get(one["projection"], one["projection"]), one["expert"], one["relative_error"])
        for one in found["worst"]
    ]
    if found["is_measured"]:
        title = "Worst experts"
        legend = "Relative errors against the source, measured on weights decoded from the files."
    else:
        title = "Worst experts, one of each layer and projection"
        legend = "Errors of single experts are not known without the source, except for the worst expert of each layer."
    headers = ("layer", "projection", "expert", "relative error")
    return section("experts", "Experts", note(legend), table(headers, rows, title))


def _checks(verification: Document | None) -> Part | None:
    """Status, notes, findings and measurements of each check."""
    if verification is None:
        return section("checks", "Checks", note(_NO_CHECKS))
    against = verification.get("source")
    basis = f"Checked against {against}." if against else "Checked without the source: against the artifact itself."
    rows = [
        (name, check["status"], check["skipped_because"] or plural(len(check["findings"]), "finding"))
        for name, check in verification["checks"].items()
    ]
    parts = [note(basis), table(("check", "status", "result"), rows)]
    keys = ("where", "what", "expected", "found")
    for name, check in verification["checks"].items():
        if check["notes"] or check["findings"] or check["measured"]:
            parts.append(heading(name))
        parts += [note(text) for text in check["notes"]]
        parts.append(table(keys, ([one[key] for key in keys] for one in check["findings"]), "Findings"))
        parts += measured_parts(name, check["measured"])
    return section("checks", "Checks", *parts)


def _provenance(artifact: Document | None, found: Document) -> Part | None:
    """Source, versions, digests and files of the artifact."""
    if artifact is None or not found:
        return None
    source = found["source"]
    ancestors = [", ".join(f"{key} {one}" for key, one in entry.items()) for entry in found["derived_from"]]
    rows = (
        ("source", source["name"]),
        ("commit", source["revision"]),
        ("source's index", f"SHA-256 {source['index_sha256']}" if source["index_sha256"] else ""),
        ("family chosen by", found["family_chosen_because"]),
        ("manifest", f"format version {artifact['format_version']}"),
        ("manifest's digest", f"SHA-256 {found['digest']}" if found["digest"] else "none"),
        ("derived from", "; ".join(ancestors)),
        ("left as in it", ", ".join(artifact["left_blocks"])),
    )
    own, of_source = (
        [(one["name"], human_bytes(one["size_bytes"]), one.get(digest, "–")) for one in files if "size_bytes" in one]
        for files, digest in ((found["files"], "sha256"), (found["source_files"], "header_sha256"))
    )
    return section(
        "provenance",
        "Provenance",
        facts(rows),
        table(("file", "size", "SHA-256 of its header"), of_source, hidden=f"Files of the source ({len(of_source)})"),
        table(("file", "size", "SHA-256"), own, hidden=f"Files of the artifact ({len(own)})"),
    )
