"""HTML page about an artifact: the terminal's tables, and two plots of errors as SVG.

Names in checkpoints are hostile text: all text is made printable and escaped, and the page loads and runs nothing.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import Manifest, read_manifest
from hqconv.artifact.model_card import read_evaluation
from hqconv.cli.render import as_html
from hqconv.errors import HqconvError, printable_line
from hqconv.io.durable_files import write_whole
from hqconv.reports.documents import describe_artifact
from hqconv.schemas.artifact_names import PROJECTIONS

_NUM_WORST = 12  # experts shown
_WIDTH = 800
_HEIGHT = 240
_BAR_HEIGHT = 18
_COLOURS = {"w1": "#2563eb", "w3": "#d97706", "w2": "#059669"}
_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="generator" content="hqconv report">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body { font: 14px sans-serif; margin: 2em } pre { overflow-x: auto } svg { max-width: 52em }</style>
"""


def write_page(
    root: Path, path: Path, verification: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write the page about the artifact at `root`, and return its document.

    verification: the document of `hqconv.verify`'s report; of an unreadable artifact the page has nothing else.
    Raises OutputError, and without a verification VerificationError or RequestError for an unreadable artifact.
    """
    document: dict[str, Any] = {"kind": "page", "name": root.resolve().name, "page": str(path)}
    document |= {"artifact": None, "evaluation": None, "verification": verification}
    plots = ""
    try:
        manifest = read_manifest(root, is_sealed=verification is None)
        document["artifact"] = describe_artifact(root, manifest=manifest)
        document["evaluation"] = read_evaluation(root, manifest)
        plots = _errors_by_layer(manifest) + _worst_experts(manifest)
    except HqconvError:
        if verification is None:
            raise
    tables = as_html(
        document[key] for key in ("verification", "artifact", "evaluation") if document[key]
    )
    title = _text(document["name"])
    text = (
        f"{_HEAD}<title>{title}: report of hqconv</title></head>\n"
        f"<body><h1>{title}</h1>\n{plots}<pre>{tables}</pre></body></html>\n"
    )
    write_whole(path.parent, path.name, text.encode())
    return document


def _text(value: str) -> str:
    return escape(printable_line(value))


def _svg(title: str, height: int, marks: list[str]) -> str:
    lines = "\n".join(marks)
    return f'<h2>{title}</h2>\n<svg viewBox="0 0 {_WIDTH} {height}" role="img">\n{lines}\n</svg>\n'


def _errors_by_layer(manifest: Manifest) -> str:
    """Return the relative error of each projection over the layers, as lines from 0 to the largest error."""
    errors: dict[str, list[tuple[int, float]]] = {}
    for number, layer in enumerate(manifest.blocks.values()):
        for role, error in layer.quantization_error.items():
            errors.setdefault(role, []).append((number, error.relative_error))
    largest = max((error for points in errors.values() for _, error in points), default=0)
    if not largest:
        return ""
    marks = [f'<text y="12">{largest:.4g}</text>', f'<text y="{_HEIGHT}">0</text>']
    step = _WIDTH / max(len(manifest.blocks) - 1, 1)
    for row, (role, points) in enumerate(errors.items()):
        colour = _COLOURS.get(role, "black")
        path = " ".join(f"{step * x:.4g},{_HEIGHT * (1 - y / largest):.4g}" for x, y in points)
        name = _text(PROJECTIONS.get(role, role))
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        marks.append(f'<text x="{_WIDTH - 90}" y="{16 * row + 12}" fill="{colour}">{name}</text>')
    return _svg("Relative error by layer", _HEIGHT, marks)


def _worst_experts(manifest: Manifest) -> str:
    """Return the largest errors of experts, one of each layer and projection, as bars."""
    experts = [
        (
            error.worst_relative_error,
            f"{layer}, {PROJECTIONS.get(role, role)}, expert {error.worst_expert}",
        )
        for layer, entry in manifest.blocks.items()
        for role, error in entry.quantization_error.items()
        if error.worst_relative_error
    ]
    if not experts:
        return ""
    experts.sort(reverse=True)
    largest, _ = experts[0]
    marks = []
    for row, (error, name) in enumerate(experts[:_NUM_WORST]):
        y = _BAR_HEIGHT * row
        width = f"{_WIDTH * error / largest:.4g}"
        marks.append(f'<rect y="{y}" width="{width}" height="{_BAR_HEIGHT - 2}" fill="#cbd5e1"/>')
        marks.append(f'<text x="4" y="{y + 12}">{error:.4g} {_text(name)}</text>')
    return _svg("Worst experts", _BAR_HEIGHT * _NUM_WORST, marks)
