"""HTML from words: whatever a checkpoint's names hold, they come out as text."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from hqconv.errors import printable, printable_line


def text(value: Any) -> str:
    """Any value as text of a page: control characters are written out, long words shortened, markup escaped."""
    return html.escape(printable_line(str(value)))


def lines(value: str) -> str:
    """A message of ours, on as many lines as it has."""
    return html.escape(printable(value)).replace("\n", "<br>")


def number(value: Any, digits: int = 4) -> str:
    """A figure with so many digits that count; a dash for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def figure(value: Any) -> str:
    """`number`, with all its digits also where the last are zeros: for columns of figures."""
    is_known = isinstance(value, float) and math.isfinite(value) and value != 0
    return f"{value:#.4g}" if is_known else number(value)


def size(num_bytes: float) -> str:
    """Bytes in decimal units."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= one:
            return f"{num_bytes / one:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def facts(rows: Iterable[tuple[str, Any]]) -> str:
    """A list of labels with what there is to say; rows without a value are left out."""
    items = (
        f"<div><dt>{text(label)}</dt><dd>{text(value)}</dd></div>"
        for label, value in rows
        if value not in (None, "")
    )
    return f'<dl class="facts">{"".join(items)}</dl>'


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A table that scrolls inside itself where it is wider than the page; numbers go to the right."""
    body, rows = [], list(rows)
    for row in rows:
        cells = "".join(
            f'<td class="number">{figure(cell)}</td>'
            if isinstance(cell, int | float)
            else f"<td>{text(cell)}</td>"
            for cell in row
        )
        body.append(f"<tr>{cells}</tr>")
    numeric = [any(isinstance(row[index], int | float) for row in rows) for index in range(len(headers))]
    kinds = [' class="number"' if is_number else "" for is_number in numeric]
    head = "".join(
        f'<th scope="col"{k}>{text(header)}</th>' for k, header in zip(kinds, headers, strict=True)
    )
    label = text(caption or headers[0])
    title = f'<p class="caption">{text(caption)}</p>' if caption else ""
    return (
        f'{title}<div class="wide" role="region" tabindex="0" aria-label="{label}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def section(anchor: str, title: str, *parts: str) -> str:
    """A section with a heading; nothing where all its parts are empty."""
    inside = "".join(part for part in parts if part)
    return f'<section id="{anchor}"><h2>{text(title)}</h2>{inside}</section>' if inside else ""


def note(sentence: str) -> str:
    """A remark, in our own words."""
    return f'<p class="note">{lines(sentence)}</p>'


def folded(title: str, inside: str) -> str:
    """What is shown when it is asked for."""
    return f"<details><summary>{text(title)}</summary>{inside}</details>"
