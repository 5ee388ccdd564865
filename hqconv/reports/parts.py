"""Parts of a document for people: facts, tables, notes, plots and short texts, for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hqconv.artifact.error_summary import rank_of_error
from hqconv.errors import NUM_SHOWN, plural
from hqconv.formats.source_format import PLAIN
from hqconv.schemas.activation import Activation
from hqconv.schemas.artifact_names import PROJECTIONS
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.grid import EVEN

Document = dict[str, Any]  # for JSON
Part = dict[str, Any]  # data of `templates/parts.html.j2` and of the terminal, by `kind`
_WIDTH, _HEIGHT = 1000.0, 100.0  # of a plot


def number(value: Any, digits: int = 4) -> str:
    """Format a number with `digits` significant digits; a dash for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def figure(value: Any) -> str:
    """Format like `number`, with trailing zeros, for columns of figures."""
    is_known = isinstance(value, float) and math.isfinite(value) and value != 0
    return f"{value:#.4g}" if is_known else number(value)


def section(anchor: str, title: str, *parts: Part | None) -> Part | None:
    """Section with a title; None if it has no parts."""
    given = [part for part in parts if part is not None]
    return {"id": anchor, "title": title, "parts": given} if given else None


def heading(text: str) -> Part:
    """Heading below the title of a section."""
    return {"kind": "heading", "text": text}


def note(text: str) -> Part:
    """Remark of hqconv, on one or several lines."""
    return {"kind": "note", "text": text}


def facts(rows: Iterable[tuple[str, Any]]) -> Part:
    """List of labels and values; rows without a value are left out."""
    return {"kind": "facts", "rows": [row for row in rows if row[1] not in (None, "")]}


def table(
    headers: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", *, hidden: str = ""
) -> Part | None:
    """Table with numbers on the right, None without rows. hidden: title of a table that the reader of a page opens."""
    rows = list(rows)
    numeric = [
        any(isinstance(row[index], int | float) for row in rows) for index in range(len(headers))
    ]
    data = {
        "kind": "table",
        "headers": headers,
        "rows": rows,
        "caption": caption,
        "numeric": numeric,
    }
    return (
        ({"kind": "details", "title": hidden, "table": data} if hidden else data) if rows else None
    )


class Series(NamedTuple):
    """Points of a plot with one colour. css: class of its marks. points: x, y and a name; y may be None or NaN."""

    name: str
    css: str
    points: Sequence[tuple[float, float | None, str]]


def plot(title: str, series: Sequence[Series], ends: Sequence[str]) -> Part:
    """Plot of points and lines from 0 up. A missing number leaves a gap. ends: labels below both ends of the x axis."""
    known = [y for one in series for _, y, _ in one.points if y is not None and math.isfinite(y)]
    marks = ticks(max(known, default=0.0))
    places = [x for one in series for x, _, _ in one.points]
    low, span = min(places), max(places) - min(places)

    def position(x: float, y: float) -> str:
        return f"{_WIDTH * ((x - low) / span if span else 0.5):.5g} {_height(y, marks[-1])}"

    lines, dots = [], []
    for name, css, points in series:
        path, is_open = "", False
        for x, y, label in points:
            is_known = y is not None and math.isfinite(y)
            if y is not None and is_known:
                path += f"{'L' if is_open else 'M'}{position(x, y)}"
                dots.append(
                    {
                        "css": css,
                        "at": position(x, y),
                        "label": f"{label}: {name}",
                        "value": float(y),
                    }
                )
            is_open = is_known
        lines.append({"css": css, "path": path})
    return {
        "kind": "plot",
        "title": title,
        "width": f"{_WIDTH:g}",
        "height": f"{_HEIGHT:g}",
        "grid": [_height(mark, marks[-1]) for mark in marks],
        "axis": [(f"bottom:{100 * mark / marks[-1]:.4g}%", number(mark)) for mark in marks],
        "ends": ends,
        "lines": lines[::-1],
        "dots": dots,
        "legend": [{"css": one.css, "series": one.name} for one in series],
    }


def ticks(top: float) -> list[float]:
    """Return 2 to 6 round numbers from 0 up; the last one is at least `top`."""
    if not top > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top))
    step = next(power * part for part in (0.2, 0.5, 1, 2) if power * part * 5 >= top)
    return [index * step for index in range(math.ceil(top / step - 1e-9) + 1)]


def _height(value: float, top: float) -> str:
    return f"{_HEIGHT * (1 - value / top):.4g}"


NUM_ROWS_SHOWN = 10


def human_bytes(num_bytes: float) -> str:
    """Format a size in decimal units, e.g. `4.20 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def name_text(document: Document) -> str:
    """`org/name at 12ab…`: a source with its commit."""
    return (
        f"{document['name']} at {document['revision']}"
        if document["revision"]
        else f"{document['name']}"
    )


def schema_text(document: Document) -> str:
    """`mxfp4: float4e2m1, float8e8m0 scale per group 32; 4.25 bits per weight`."""
    return f"{document['name']}: {document['description']}; {document['bits_per_weight']:g} bits per weight"


def target_text(document: Document) -> str:
    """Layout, dtypes, GPU and ranks of the artifact."""
    parts = [
        f"{document['layout']} layout",
        f"{document['dtype']} parameters, {document['input_schema']} activations",
    ]
    if document["layout"] == "kernel":
        parts += [
            document["target"],
            f"tp {document['tp']}, ep {document['ep']} ({document['expert_placement']})",
        ]
        if document["tp_split"] != EVEN:
            parts.append(f"TP split {document['tp_split']}")
        if document["redundant_experts"]:
            parts.append(plural(document["redundant_experts"], "redundant expert"))
    return ", ".join(parts)


def ranks_text(rank_bytes: Mapping[str, int]) -> str:
    """`8 ranks, 69.21 GB each`, or the smallest and the largest size."""
    if not rank_bytes:
        return ""
    least, most = human_bytes(min(rank_bytes.values())), human_bytes(max(rank_bytes.values()))
    return f"{plural(len(rank_bytes), 'rank')}, {f'{least} each' if least == most else f'{least} to {most}'}"


# --- rows and parts ------------------------------------------------------------------------------------------


def conversion_rows(document: Document) -> list[tuple[str, str]]:
    """Rows that a plan, a summary and an artifact share: exceptions, encoding, and what requantizing did."""
    exceptions = [
        f"{what} in {plural(len(names), 'layer')}" for what, names in document["otherwise"].items()
    ]
    if document["left_blocks"]:
        exceptions.append(f"{plural(len(document['left_blocks']), 'layer')} left as in the source")
    meaning = {
        "direct": "direct: codes and scales kept",
        "direct, scales rounded": "direct, scales rounded: codes kept, scales in the parameter dtype",
        "requantized": "requantized from exactly decoded float32",
    }
    kinds = (
        f"{meaning.get(kind, kind)} ({plural(n, 'layer')})"
        for kind, n in document["conversion"].items()
    )
    quantizers = {"mse": "mse: scales of the least squared error"}
    if (text := document["calibration"]) is not None:
        said = f"{text['num_tokens']} tokens of {text['name']} (sha256 {text['sha256'][:12]}…)"
        quantizers["gptq"] = f"gptq: calibrated with {said} on {text['device']}"
    changes = ", ".join(
        f"{value:.3%} ({name})" for name, value in document.get("largest_scale_change", {}).items()
    )
    rows = [
        ("but", "; ".join(exceptions)),
        ("conversion", "; ".join(kinds)),
        ("quantizer", quantizers.get(document["quantizer"], "")),
        ("scales", f"rounded, changed by at most {changes}" if changes else ""),
    ]
    if (counts := document.get("requantized", {})).get("num_groups"):
        exact = f"{counts['num_exact_groups']} of {counts['num_groups']} requantized scale groups are without any error"
        rows.append(
            (
                "requantized",
                f"{plural(counts['num_matrices'], 'matrix', 'matrices')} requantized; {exact}",
            )
        )
    return rows


def layers_table(runs: Iterable[Mapping[str, Any]]) -> Part | None:
    """Table of the MoE layers, one row for neighbours of the same shape (`documents.layer_runs`)."""
    headers = (
        "layers",
        "count",
        "experts",
        "hidden",
        "intermediate",
        "top-k",
        "activation",
        "stored as",
    )
    keys = ("name", "num_blocks", "num_experts", "hidden_size", "intermediate_size", "top_k")
    rows = []
    for run in runs:
        activation, gated = Activation.from_dict(run), bool(run["gated"])
        known = activation.is_known(gated)
        shown = activation.describe(*("gated",) * gated, *("known by name only",) * (not known))
        stored = run["source_dtype"] if run["source_format"] == PLAIN.name else run["source_format"]
        rows.append((*(str(run[key]) for key in keys), shown, stored))
    return table(headers, rows)


def errors_table(summary: Mapping[str, Mapping[str, Any]]) -> Part | None:
    """Table of `summarize_errors`: relative errors over all layers."""
    headers = ("relative error", "smallest", "median", "largest", "worst layer")
    rows = [
        (
            PROJECTIONS.get(role, role),
            *(float(one[key]) for key in ("min", "median", "max")),
            one["worst_block"],
        )
        for role, one in summary.items()
    ]
    return table(headers, rows)


def artifact_parts(document: Document) -> list[Part | None]:
    """Parts about a finished artifact, from `documents.describe_artifact`."""
    missing = document["missing_or_resized_files"]
    damage = f"{plural(len(missing), 'file')} missing or resized: {', '.join(missing[:NUM_SHOWN])}"
    size = f"{plural(document['num_files'], 'file')}, {human_bytes(document['num_bytes'])}"
    static = [
        f"{gemm} {' to '.join(dict.fromkeys(f'{one[end]:.3g}' for end in ('min', 'max')))}"
        for gemm, one in document["input_scales"].items()
    ]
    rows = (
        ("artifact", f"{document['folder']}: {size}"),
        ("source", name_text(document["source"])),
        *(
            (
                "",
                f"made from {one['schema_name']} of {name_text(one['source'])} (hqconv.json {digest[:12]}…)",
            )
            for one in document["derived_from"]
            if (digest := one["manifest_sha256"])
        ),
        ("family", document["family"]),
        ("schema", schema_text(document["schema"])),
        *conversion_rows(document),
        ("for", target_text(document)),
        ("activations", f"static scales: {', '.join(static)}" if static else ""),
        ("experts", ranks_text(document["rank_bytes"])),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in document["tensors"].items())),
        ("serve", document["serve_command"] or f"no {ENGINE.name} command serves these ranks"),
        (
            "made by",
            f"hqconv {document['hqconv_version']}, humming-kernels {document['humming_kernels_version']}",
        ),
        ("manifest", f"sha256 {document['manifest_sha256']}"),
        ("damaged", damage if missing else ""),
        ("altered", document["altered_manifest"]),
    )
    warnings = (note(f"warning: {text}") for text in (*document["warnings"], *document["notices"]))
    return [
        facts(rows),
        layers_table(document["blocks"]),
        errors_table(document["quantization_error"]),
        *warnings,
    ]


def evaluation_parts(document: Document) -> list[Part | None]:
    """Parts about the figures of `hqconv evaluate`."""
    kl = document["kl"]
    perplexity, nll = (
        [document[key][side] for side in ("source", "artifact")]
        for key in ("perplexity", "mean_nll")
    )
    error = "" if kl["standard_error"] is None else f" ± {kl['standard_error']:.2g}"
    rows = (
        ("artifact", f"{document['artifact']}, {document['schema']}"),
        ("source", document["source"]["name"]),
        (
            "text",
            f"{document['text']['name']}: {plural(document['num_predictions'], 'predicted token')}",
        ),
        (
            "context",
            f"{document['context_length']} tokens, in transformers {document['transformers_version']}",
        ),
        ("dtype", f"{document['compute_dtype']}; activations were not quantized"),
        ("perplexity", " → ".join(f"{value:.4f}" for value in perplexity)),
        ("log-likelihood", " → ".join(f"{-value:.5f}" for value in nll) + " nats per token"),
        ("KL divergence", f"{kl['mean']:.3g}{error} nats per token"),
        (
            "",
            f"median {kl['median']:.3g}, 90 % {kl['p90']:.3g}, 99 % {kl['p99']:.3g}, largest {kl['max']:.3g}",
        ),
        ("same top token", f"{100 * document['top1_agreement']:.2f} %"),
    )
    return [facts(rows)]


_MEASURED = {  # check → title of its measurements, and headers of what it measures
    "weights": (
        "Decoded weights against the source",
        {
            "relative_error": "relative error",
            "sqnr_db": "SQNR (dB)",
            "cosine": "cosine",
            "worst_group": "worst scale group",
        },
    ),
    "kernel": (
        "GPU kernel: relative errors",
        {
            "kernel": "kernel against decoded weights",
            "rounded_kernel": "against rounded activations",
            "channel": "worst channel",
            "batch": "worst batch",
            "against_source": "output against the source's",
            "routed_by": "tokens routed by",
        },
    ),
}


def measured_parts(check: str, measured: Mapping[str, Any]) -> list[Part | None]:
    """Parts about the measurements of a check of `hqconv verify`, the largest errors first."""
    if check not in _MEASURED:
        return []
    title, columns = _MEASURED[check]
    headers = ["layer", *["projection"] * (check == "weights"), *columns.values()]
    found = [([layer], one) for layer, one in measured.items()]
    if check == "weights":
        found = [
            ([*layer, PROJECTIONS.get(role, role)], one)
            for layer, of in found
            for role, one in of.items()
        ]
    found = [
        (names, one)
        for names, one in found
        if isinstance(one, Mapping) and next(iter(columns)) in one
    ]
    found.sort(key=lambda row: -rank_of_error(row[1][next(iter(columns))]))
    rows = [[*names, *(_measured(one.get(key)) for key in columns)] for names, one in found]
    if len(rows) <= NUM_ROWS_SHOWN:
        return [table(headers, rows, title)]
    shown = table(
        headers,
        rows[:NUM_ROWS_SHOWN],
        f"{title}: the {NUM_ROWS_SHOWN} largest errors of {len(rows)}",
    )
    return [shown, table(headers, rows, hidden=f"All {len(rows)}")]


def _measured(value: Any) -> Any:
    """Cell of a table: a number or a text, a group's relative error, or a dash."""
    value = value.get("relative_error") if isinstance(value, Mapping) else value
    return "–" if value is None or value != value else value
