"""HTML report about an artifact: its JSON document, from the manifest and the result of `verify`, and its page.

Names in checkpoints are hostile text. Every output of a template is made printable (control characters are written
out, long words are shortened), and then escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv.artifact.error_summary import rank_of_error
from hqconv.artifact.manifest import Manifest, ManifestLayer, read_manifest
from hqconv.artifact.model_card import evaluation_in_card
from hqconv.errors import HqconvError, VerificationError, plural, printable, printable_line
from hqconv.reports.documents import config_of, describe_artifact
from hqconv.reports.parts import (
    NUM_ROWS_SHOWN,
    Document,
    Part,
    Series,
    artifact_parts,
    evaluation_parts,
    facts,
    figure,
    heading,
    human_bytes,
    measured_parts,
    note,
    number,
    plot,
    section,
    table,
)
from hqconv.schemas.artifact_names import PROJECTIONS
from hqconv.schemas.engine import ENGINE, attention_heads

if TYPE_CHECKING:
    from jinja2 import Environment


NUM_WORST = 12  # experts listed
OfExperts = Mapping[str, Mapping[str, list[float]]]


def page_document(
    root: Path,
    verification: Document | None = None,
    of_experts: OfExperts | None = None,
    *,
    evaluation: Document | None = None,
    manifest: Manifest | None = None,
) -> Document:
    """Document of a report on the artifact at `root`, for `page` and programs; deterministic for the same input.

    verification: the document of `hqconv.verify`'s report; None: no check was run. of_experts: layer → projection →
    each expert's relative error against the source, as the check of weights measures it. evaluation: the document of
    `hqconv.evaluate`; None for the one in the model card, if there is one. manifest: of the artifact, if it was read
    before; it was sealed.

    If `verification` failed, unreadable parts are left out, with the reason under `unreadable`. Otherwise raises
    RequestError if `root` is no artifact, VerificationError if it is damaged.
    """
    places = _places(root, verification)
    document: Document = {
        "kind": "page",
        "name": root.resolve().name,
        "verification": _renamed(verification, places),
    }
    document |= {"artifact": None, "blocks": [], "provenance": {}, "unreadable": []}
    document["evaluation"] = None
    may_fail = verification is not None and not verification["passed"]
    try:
        manifest = manifest or read_manifest(root, is_sealed=not may_fail)
        document["artifact"] = describe_artifact(root, manifest=manifest) | _at_home(root, manifest)
        document["blocks"] = [
            _layer(name, layer, manifest) for name, layer in manifest.blocks.items()
        ]
        document["provenance"] = _provenance(manifest)
        found = evaluation_in_card(root, manifest) if evaluation is None else evaluation
        document["evaluation"] = _renamed(found, places)
    except (VerificationError, OSError) as error:
        if not may_fail:
            raise
        said = error.message() if isinstance(error, HqconvError) else str(error)
        document["unreadable"].append(_renamed(said, places))
    of_experts = {name: roles for name, roles in (of_experts or {}).items() if roles}
    document["experts"] = {"is_measured": bool(of_experts), "worst": _worst(document, of_experts)}
    return document


def _renamed(document: Any, places: Mapping[str, str]) -> Any:
    """Replace folders of this machine by names in a document, since a page is read elsewhere. `places`: path → name."""
    if isinstance(document, str):
        for path, name in places.items():
            document = document.replace(path, name)
        return document
    if isinstance(document, Mapping):
        return {_renamed(key, places): _renamed(value, places) for key, value in document.items()}
    return [_renamed(one, places) for one in document] if isinstance(document, list) else document


def _places(root: Path, verification: Document | None) -> dict[str, str]:
    """Folders of the artifact and of the source that appear as absolute paths, with their names."""
    source = (verification or {}).get("source")
    paths = [root.resolve(), root, *([Path(source).resolve(), Path(source)] if source else [])]
    return {
        str(path): path.name for path in paths if path.is_absolute() and path.name and path.is_dir()
    }


def _at_home(root: Path, manifest: Manifest) -> Document:
    """Entries with the folder's name only: the folder, and the command that serves it."""
    name, heads = root.resolve().name, attention_heads(config_of(root))
    return {
        "folder": name,
        "serve_command": ENGINE.serve_command(name, manifest.layout, manifest.grid, heads),
    }


def _layer(name: str, layer: ManifestLayer, manifest: Manifest) -> Document:
    """Document of one layer: its number, its schema, and the errors that the conversion measured."""
    return {
        "name": name,
        "layer": layer.layer,
        "num_experts": layer.num_experts,
        "schema": layer.schema_name or manifest.schema_name,
        "conversion": layer.conversion,
        "errors": layer.errors(),
    }


def _provenance(manifest: Manifest) -> Document:
    """Document of the source and its files, ancestor artifacts, and the versions that wrote the artifact."""
    source = manifest.source
    return {
        "source": {
            "name": source.name,
            "revision": source.revision,
            "index_sha256": source.index_sha256,
        },
        "source_files": [one.to_dict() for one in source.files],
        "digest": manifest.digest,
        "derived_from": [one.to_dict() for one in manifest.ancestors],
        "family_chosen_because": manifest.family_chosen_because,
        "files": [{"name": name, **entry.to_dict()} for name, entry in manifest.files.items()],
    }


def _worst(document: Document, of_experts: OfExperts) -> list[Document]:
    """Experts with the largest errors; without the source the worst one of each layer and projection."""
    found: list[Document] = [
        {"block": name, "projection": role, "expert": expert, "relative_error": value}
        for name, roles in of_experts.items()
        for role, errors in roles.items()
        for expert, value in enumerate(errors)
    ] or [
        {
            "block": layer["name"],
            "projection": role,
            "expert": error["worst_expert"],
            "relative_error": error["worst_relative_error"],
        }
        for layer in document["blocks"]
        for role, error in layer["errors"].items()
        if "worst_expert" in error and "worst_relative_error" in error
    ]
    found = [one for one in found if one["relative_error"] != 0]
    found.sort(key=lambda one: -rank_of_error(one["relative_error"]))
    return found[:NUM_WORST]


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
        None
        if evaluation is None
        else section("evaluation", "Predictions", *evaluation_parts(evaluation)),
        _errors(document),
        _experts(document["experts"], document["blocks"]),
        _checks(document["verification"]),
        _provenance_section(artifact, document["provenance"]),
    )
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            name=document["name"],
            lead=""
            if artifact is None
            else f"Made from {artifact['source']['name']}: {artifact['schema']['name']}.",
            unreadable=document["unreadable"],
            tiles=[
                {"value": value, "label": label, "css": css}
                for value, label, css in _tiles(document)
            ],
            sections=[one for one in sections if one is not None],
        )
    )


def _tiles(document: Document) -> list[tuple[str, str, str]]:
    """Value, label and CSS class of the tiles at the top."""
    artifact, verification = document["artifact"], document["verification"]
    if verification is None:
        tiles = [("none run", "checks", "none")]
    else:
        tiles = [
            ("passed", "checks", "pass") if verification["passed"] else ("failed", "checks", "fail")
        ]
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
        tiles.append(
            (
                number(float(document["evaluation"]["kl"]["mean"]), 3),
                "KL divergence, nats per token",
                "",
            )
        )
    return tiles


def _layer_errors(layers: list[Document]) -> list[tuple[Document, str, Document]]:
    """Layer, projection and figures of each error that the conversion measured."""
    return [
        (layer, role, error)
        for layer in layers
        for role, error in layer["errors"].items()
        if "relative_error" in error
    ]


def _errors(document: Document) -> Part | None:
    """Relative errors by layer and projection, as the conversion measured them."""
    errors = _layer_errors(document["blocks"])
    if not errors:
        return None
    rows = [
        (
            *(
                layer["name"],
                layer["schema"],
                PROJECTIONS.get(role, role),
                float(error["relative_error"]),
            ),
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
    shown = [
        layer
        for layer in layers
        if any("relative_error" in error for error in layer["errors"].values())
    ]
    names = [
        f"layer {layer['layer']}" if layer["layer"] >= 0 else str(layer["name"]) for layer in shown
    ]
    series = []
    for role, label in PROJECTIONS.items():
        for more, key, css in (
            ("", "relative_error", role),
            (", worst expert", "worst_relative_error", f"{role} worst"),
        ):
            values = [layer["errors"].get(role, {}).get(key) for layer in shown]
            if any(value is not None for value in values):
                points = [
                    (x, y, name) for x, (y, name) in enumerate(zip(values, names, strict=True))
                ]
                series.append(Series(f"{label}{more}", css, points))
    return plot("Relative error by layer", series, list(dict.fromkeys((names[0], names[-1]))))


def _experts(found: Document, layers: list[Document]) -> Part | None:
    """The experts with the largest errors."""
    if not found["worst"]:
        return section(
            "experts", "Experts", note(_NO_ERROR) if layers and found["is_measured"] else None
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
    basis = (
        f"Checked against {against}."
        if against
        else "Checked without the source: against the artifact itself."
    )
    rows = [
        (
            name,
            check["status"],
            check["skipped_because"] or plural(len(check["findings"]), "finding"),
        )
        for name, check in verification["checks"].items()
    ]
    parts = [note(basis), table(("check", "status", "result"), rows)]
    keys = ("where", "what", "expected", "found")
    for name, check in verification["checks"].items():
        if check["notes"] or check["findings"] or check["measured"]:
            parts.append(heading(name))
        parts += [note(text) for text in check["notes"]]
        parts.append(
            table(keys, ([one[key] for key in keys] for one in check["findings"]), "Findings")
        )
        parts += measured_parts(name, check["measured"])
    return section("checks", "Checks", *parts)


def _provenance_section(artifact: Document | None, found: Document) -> Part | None:
    """Source, versions, digests and files of the artifact."""
    if artifact is None or not found:
        return None
    source = found["source"]
    ancestors = [
        ", ".join(f"{key} {one}" for key, one in entry.items()) for entry in found["derived_from"]
    ]
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
        [
            (one["name"], human_bytes(one["size_bytes"]), one.get(digest, "–"))
            for one in files
            if "size_bytes" in one
        ]
        for files, digest in ((found["files"], "sha256"), (found["source_files"], "header_sha256"))
    )
    return section(
        "provenance",
        "Provenance",
        facts(rows),
        table(
            ("file", "size", "SHA-256 of its header"),
            of_source,
            hidden=f"Files of the source ({len(of_source)})",
        ),
        table(("file", "size", "SHA-256"), own, hidden=f"Files of the artifact ({len(own)})"),
    )
