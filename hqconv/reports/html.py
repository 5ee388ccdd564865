"""HTML rendering with jinja2: the template environment, its filters, and the parts of a section.

Names in checkpoints are hostile text. Every output of a template is made printable (control characters are written
out, long words are shortened), and then escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from hqconv.errors import printable, printable_line

if TYPE_CHECKING:
    from jinja2 import Environment

Part = dict[str, Any]  # data of `templates/parts.html.j2`, by `kind`


@cache
def environment() -> Environment:
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
    found.filters |= {"lines": lines, "number": number, "figure": figure, "path": lambda path: Markup(escape(path))}
    return found


def number(value: Any, digits: int = 4) -> str:
    """Format a number with `digits` significant digits; a dash for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def figure(value: Any) -> str:
    """Format like `number`, with trailing zeros, for columns of figures."""
    is_known = isinstance(value, float) and math.isfinite(value) and value != 0
    return f"{value:#.4g}" if is_known else number(value)


def size(num_bytes: float) -> str:
    """Format a size in decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def heading(text: str) -> Part:
    """Heading below the title of a section."""
    return {"kind": "heading", "text": text}


def note(text: str) -> Part:
    """Remark of hqconv, on one or several lines."""
    return {"kind": "note", "text": text}


def facts(rows: Iterable[tuple[str, Any]]) -> Part:
    """List of labels and values; rows without a value are left out."""
    return {"kind": "facts", "rows": [row for row in rows if row[1] not in (None, "")]}


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> Part:
    """Table with numbers on the right. It scrolls if it is wider than the page."""
    rows = list(rows)
    numeric = [any(isinstance(row[index], int | float) for row in rows) for index in range(len(headers))]
    return {"kind": "table", "headers": headers, "rows": rows, "caption": caption, "numeric": numeric}


def details(title: str, hidden: Part) -> Part:
    """Table that is hidden until the reader opens it."""
    return {"kind": "details", "title": title, "table": hidden}


def plots(found: Iterable[Part]) -> Part | None:
    """Plots in a row; None without any."""
    listed = list(found)
    return {"kind": "plots", "plots": listed} if listed else None


def section(anchor: str, title: str, *parts: Part | None) -> Part | None:
    """Section with a title; None if it has no parts."""
    given = [part for part in parts if part is not None]
    return {"id": anchor, "title": title, "parts": given} if given else None


def render_plot(plot: Part) -> str:
    """Render one plot as HTML."""
    return str(environment().get_template("plots.html.j2").module.plot(plot))  # type: ignore[attr-defined]
