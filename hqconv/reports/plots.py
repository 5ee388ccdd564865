"""Geometry of the plots: the data from which `templates/plots.html.j2` draws inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hqconv.reports.html import Part, number

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


def bars_plot(title: str, bars: Sequence[tuple[str, int]], remark: str, css: str) -> Part:
    """Plot a bar for each (label, count) as its share of all counts, with three labels and a remark below."""
    total = max(sum(count for _, count in bars), 1)
    marks = ticks(max((count / total for _, count in bars), default=0.0))
    top, width = marks[-1], _WIDTH / max(len(bars), 1)
    heights = [_HEIGHT * count / total / top for _, count in bars]
    return {
        **_frame("bars", title, marks, [f"{100 * mark:.4g}%" for mark in marks]),
        "css": css,
        "bars": [
            {
                "x": f"{width * (index + 0.08):.5g}",
                "y": f"{_HEIGHT - height:.4g}",
                "width": f"{width * 0.84:.5g}",
                "height": f"{height:.4g}",
                "label": label,
                "count": count,
                "share": f"{count / total:.2%}",
            }
            for index, ((label, count), height) in enumerate(zip(bars, heights, strict=True))
        ],
        "ends": [bars[index][0] for index in sorted({0, len(bars) // 2, len(bars) - 1})] if bars else [],
        "remark": remark,
    }


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
