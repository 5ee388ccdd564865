"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

PROJECTIONS = {"w1": "gate (w1)", "w3": "up (w3)", "w2": "down (w2)"}


def print_facts(console: Console, rows: Iterable[tuple[str, Any]]) -> None:
    """Two columns: a label, and what there is to say; rows without a value are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        if value not in (None, ""):
            table.add_row(label, str(value))
    console.print(table)


def print_table(console: Console, headers: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A table whose first column is left-aligned and nothing is cut; numbers go to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    body = [[str(cell) for cell in row] for row in rows]
    for index, header in enumerate(headers):
        numeric = all(row[index][:1].isdigit() for row in body)
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    console.print(table)
