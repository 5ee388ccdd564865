"""HTML report about an artifact: the sections of its page, rendered by the templates in `templates/`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hqconv.errors import plural
from hqconv.reports.html import Part, Series, environment, facts, heading, note, number, plot, section, table
from hqconv.reports.page_document import GENERATOR
from hqconv.reports.texts import (
    PROJECTIONS,
    Document,
    activation_text,
    conversion_text,
    human_bytes,
    name_text,
    otherwise_text,
    quantizer_text,
    ranks_text,
    schema_text,
    target_text,
)
from hqconv.schemas.engine import ENGINE

_NUM_SHOWN = 10
_NO_CHECKS = (
    "No check was run for this page. `hqconv verify --report` runs all checks, `hqconv report --source` the check of "
    "weights."
)
_NO_ERROR = "No weight differs from the source: stored values were kept, or the new codes decode to the same values."


def page(document: Document) -> str:
    """Render a document of `page_document` as one HTML file that loads nothing from elsewhere.

    The same document gives the same page.
    """
    artifact = document["artifact"]
    sections = (
        _overview(artifact),
        _evaluation(document["evaluation"]),
        _errors(document),
        _allocation(document["allocation"]),
        _experts(document["experts"], document["blocks"]),
        _checks(document["verification"]),
        _provenance(artifact, document["provenance"]),
    )
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            generator=GENERATOR,
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


def _overview(artifact: Document | None) -> Part | None:
    """Schema, layout and layers of the artifact."""
    if artifact is None:
        return None
    rows = (
        ("source", name_text(artifact["source"])),
        ("family", artifact["family"]),
        ("schema", schema_text(artifact["schema"])),
        ("but", otherwise_text(artifact)),
        ("left as in the source", ", ".join(artifact["left_blocks"])),
        ("conversion", conversion_text(artifact)),
        ("quantizer", quantizer_text(artifact)),
        ("for", target_text(artifact)),
        ("experts", ranks_text(artifact["rank_bytes"])),
        ("serve with", artifact["serve_command"] or f"no {ENGINE.name} command serves these ranks"),
    )
    headers = ("layers", "count", "experts", "hidden", "intermediate", "top-k", "activation", "stored as")
    keys = ("name", "num_blocks", "num_experts", "hidden_size", "intermediate_size", "top_k")
    runs = [
        (*(run[key] for key in keys), activation_text(run), f"{run['source_format']}, {run['source_dtype']}")
        for run in artifact["blocks"]
    ]
    return section("made", "Overview", facts(rows), table(headers, runs, "MoE layers"))


def _evaluation(evaluation: Document | None) -> Part | None:
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
    figures = {"perplexity": "perplexity", "mean_nll": "negative log-likelihood, nats per token"}
    rows = [(label, *(float(side[key]) for side in sides)) for key, label in figures.items()]
    divergence = [tuple(float(kl[key]) for key in ("mean", "median", "p90", "p99", "max"))]
    title = "KL divergence of next-token distributions, nats"
    return section(
        "evaluation",
        "Predictions",
        note(legend),
        table(("", "source", "artifact"), rows),
        table(("mean", "median", "90 %", "99 %", "largest"), divergence, title),
        note(f"The most likely token is the same for {100 * evaluation['top1_agreement']:.2f} % of the tokens."),
    )


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
    summary = [
        (PROJECTIONS.get(role, role), *(float(one[key]) for key in ("min", "median", "max")), one["worst_block"])
        for role, one in document["artifact"]["quantization_error"].items()
    ]
    legend = (
        "Relative error of the decoded weights: the norm of the difference to the source over the norm of the source's "
        "weights, measured by the conversion. It is 0 for weights that were kept."
    )
    headers = ("layer", "schema", "projection", "relative error", "worst expert", "its error")
    title = "Layers with the largest errors"
    title += f": {_NUM_SHOWN} of {len(rows)} rows" if len(rows) > _NUM_SHOWN else ""
    return section(
        "errors",
        "Errors",
        note(legend),
        _errors_plot(document["blocks"]) if any(row[3] for row in rows) else note(_NO_ERROR),
        table(("projection", "smallest", "median", "largest", "worst layer"), summary, "Over all layers"),
        table(headers, rows[:_NUM_SHOWN], title),
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
    rows = [
        (name, float(one["bits_per_weight"]), human_bytes(one["size_bytes"]), float(one["relative_error"]))
        for name, one in (("chosen", found["chosen"]), *found["uniform"].items())
    ]
    of = "all files of experts" if is_size else "the experts that one token reads"
    budget = (
        ("budget", f"{human_bytes(found['budget']['limit_bytes'])} of {of}"),
        ("least possible error within it", f"{found['least_possible_error']:.4g}"),
    )
    legend = (
        "Each corner of the line is a choice of schemas for the layers; no choice of its size or less has a smaller "
        "error. The error is the root of the mean squared relative error of all layers, measured before the conversion."
    )
    return section(
        "allocation",
        "Allocation",
        note(legend),
        plot(title, series, [place(ends[0]), place(ends[-1])]),
        facts(budget),
        table(("schema of all layers", "bits per weight", "size", "error"), rows, "One schema for all layers"),
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
        if name in _MEASUREMENTS:
            parts += _MEASUREMENTS[name](check["measured"])
    return section("checks", "Checks", *parts)


def _weights(measured: Mapping[str, Any]) -> list[Part | None]:
    """Errors of decoded weights against the source, the largest first."""
    rows = [
        (
            *(layer, PROJECTIONS.get(role, role)),
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
        return [table(headers, rows, title)]
    shown = table(headers, rows[:_NUM_SHOWN], f"{title}: the {_NUM_SHOWN} largest errors of {len(rows)}")
    return [shown, table(headers, rows, hidden=f"All {len(rows)}")]


def _kernel(measured: Mapping[str, Any]) -> list[Part | None]:
    """Errors of the GPU kernel, by layer."""
    headers = {
        "kernel": "kernel against decoded weights",
        "rounded_kernel": "against rounded activations",
        "channel": "worst channel",
        "batch": "worst batch",
        "against_source": "output against the source's",
    }
    rows = [
        (layer, *(_figure(one.get(key)) for key in headers), one.get("routed_by", ""))
        for layer, one in measured.items()
    ]
    return [table(("layer", *headers.values(), "tokens routed by"), rows, "GPU kernel: relative errors")]


_MEASUREMENTS = {"weights": _weights, "kernel": _kernel}


def _figure(value: Any) -> Any:
    """Number for a table, or a dash."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else "–"


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
        ("made by", f"hqconv {artifact['hqconv_version']}, humming-kernels {artifact['humming_kernels_version']}"),
        ("manifest", f"format version {artifact['format_version']}"),
        ("manifest's digest", f"SHA-256 {found['digest']}" if found["digest"] else "none"),
        ("derived from", "; ".join(ancestors)),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in artifact["tensors"].items())),
        ("damaged", ", ".join(artifact["missing_or_resized_files"])),
    )
    own, of_source = (
        [(one["name"], human_bytes(one["size_bytes"]), one.get(digest, "–")) for one in files if "size_bytes" in one]
        for files, digest in ((found["files"], "sha256"), (found["source_files"], "header_sha256"))
    )
    return section(
        "provenance",
        "Provenance",
        facts(rows),
        *(note(f"Warning of the conversion: {warning}") for warning in found["warnings"]),
        table(("file", "size", "SHA-256 of its header"), of_source, hidden=f"Files of the source ({len(of_source)})"),
        table(("file", "size", "SHA-256"), own, hidden=f"Files of the artifact ({len(own)})"),
    )
