"""Parts of a document for people: facts, tables, notes and plots, as data for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", *, hidden: str = "") -> Part | None:
    """Table with numbers on the right, None without rows. hidden: title of a table that the reader of a page opens."""
    rows = list(rows)
    numeric = [any(isinstance(row[index], int | float) for row in rows) for index in range(len(headers))]
    data = {"kind": "table", "headers": headers, "rows": rows, "caption": caption, "numeric": numeric}
    return ({"kind": "details", "title": hidden, "table": data} if hidden else data) if rows else None


class Series(NamedTuple):
    """Points of a plot with one colour. css: class of its marks. points: x, y and a name; y may be None or NaN."""

    name: str
    css: str
    points: Sequence[tuple[float, float | None, str]]
    has_line: bool = True


def plot(title: str, series: Sequence[Series], ends: Sequence[str]) -> Part:
    """Plot of points and lines from 0 up. A missing number leaves a gap. ends: labels below both ends of the x axis."""
    known = [y for one in series for _, y, _ in one.points if y is not None and math.isfinite(y)]
    marks = ticks(max(known, default=0.0))
    places = [x for one in series for x, _, _ in one.points]
    low, span = min(places), max(places) - min(places)

    def position(x: float, y: float) -> str:
        return f"{_WIDTH * ((x - low) / span if span else 0.5):.5g} {_height(y, marks[-1])}"

    lines, dots = [], []
    for name, css, points, has_line in series:
        path, is_open = "", False
        for x, y, label in points:
            is_known = y is not None and math.isfinite(y)
            if y is not None and is_known:
                path += f"{'L' if is_open else 'M'}{position(x, y)}"
                dots.append({"css": css, "at": position(x, y), "label": f"{label}: {name}", "value": float(y)})
            is_open = is_known
        lines += [{"css": css, "path": path}] * has_line
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
