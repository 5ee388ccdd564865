"""A plot of scripts/bench.py's figures, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _BAR, _GAP, _TOP = 720, 16, 6, 40
_LABEL, _SCALE = 230, 400
_COLOURS = {"hqconv": "#2a6f97", "hqconv, whole process": "#61a5c2"}
_OTHER, _LIMIT = "#adb5bd", "#d62828"


def plot(results: Sequence[Mapping[str, Any]]) -> str:
    """Bars in GB/s of the source for each schema and size: hqconv, its peers, and a line at the nearest limit."""
    rows: list[tuple[str, str, float, float]] = []
    for result in results:
        sink = "" if result["sink"] == "files" else ", null sink"
        title = f"{result['schema']}, {result['source_gb']:.0f} GB, {result['device']}{sink}"
        share = result["share_of_limits_together"]
        limit = result["steady_gb_per_s"] / share if share else 0.0
        rows.append((title, "hqconv", result["steady_gb_per_s"], limit))
        for who, speed in result["whole_gb_per_s"].items():
            rows.append(("", "hqconv, whole process" if who == "hqconv" else who, speed, limit))
    highest = max((max(speed, limit) for *_, speed, limit in rows), default=1.0)
    first = results[0] if results else {}
    head = f"{first.get('threads')} threads, {first.get('cache')} cache"
    height = _TOP + len(rows) * (_BAR + _GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="14">GB/s of the source: {head}</text>',
    ]
    for number, (title, who, speed, limit) in enumerate(rows):
        top = _TOP + number * (_BAR + _GAP)
        middle = top + _BAR - 4
        parts.append(f'<text x="10" y="{middle}">{title}</text>')
        parts.append(f'<text x="{_LABEL - 6}" y="{middle}" text-anchor="end">{who if not title else ""}</text>')
        width = _SCALE * speed / highest
        colour = _COLOURS.get(who, _OTHER)
        parts.append(f'<rect x="{_LABEL}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{_LABEL + width + 5:.1f}" y="{middle}">{speed:.2f}</text>')
        if limit:
            x = _LABEL + _SCALE * limit / highest
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{top + _BAR + 3}" stroke="{_LIMIT}"'
                ' stroke-width="2"/>'
            )
    parts.append(f'<text x="10" y="{height - 8}" fill="{_LIMIT}">red: the nearest limit of the machine</text></svg>')
    return "\n".join(parts) + "\n"
