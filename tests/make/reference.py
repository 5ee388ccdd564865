"""docs/artifact.md as a rule: which keys a manifest has, and of which types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|[^|]*\|$", re.MULTILINE)
_PLAIN: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "any": (object,),
}


@dataclass(frozen=True)
class Row:
    """A key's row: its type in words, and whether it must be there."""

    kind: str
    is_needed: bool


@dataclass
class Reference:
    """The tables of a page by their titles, and which rows a document has been held to."""

    tables: dict[str, dict[str, Row]]
    seen: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def read(cls, page: Path) -> Reference:
        """A key that stands twice in a table, and a type that is none, is refused."""
        tables: dict[str, dict[str, Row]] = {}
        for section in re.split(r"^### ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            rows = _ROW.findall(section)
            table = {key: Row(kind, there.startswith("always")) for key, kind, there in rows}
            title = section.partition("\n")[0]
            num_lines = len(re.findall(r"^\|", section, re.MULTILINE)) - 2
            assert len(table) == len(rows) == num_lines > 0, (
                f"{title}: a row cannot be read, or is there twice"
            )
            assert title not in tables, title
            tables[title] = table
        found = cls(tables)
        unknown = [
            kind
            for table in tables.values()
            for row in table.values()
            for kind in found._unknown(row.kind)
        ]
        assert not unknown, unknown
        return found

    def _unknown(self, kind: str) -> list[str]:
        names = re.sub(r"\b(list|map) of\b|\bor\b", " ", kind).split()
        return [name for name in names if name not in _PLAIN and name not in self.tables]

    def problems(self, value: Any, kind: str, where: str = "") -> Iterator[str]:
        """What of a value is not as a type in words, or a table, has it."""
        choices = kind.split(" or ")
        if len(choices) > 1:
            each = [list(self.problems(value, choice, where)) for choice in choices]
            yield from [] if [] in each else min(each, key=len)
        elif kind.startswith(("list of ", "map of ")):
            yield from self._of_many(value, kind, where)
        elif kind in _PLAIN:
            is_right = isinstance(value, _PLAIN[kind]) and (
                kind in ("boolean", "any") or not isinstance(value, bool)
            )
            if not is_right:
                yield f"{where} is no {kind}: {value!r:.60}"
        else:
            yield from self._of_table(value, kind, where)

    def _of_many(self, value: Any, kind: str, where: str) -> Iterator[str]:
        outer, _, inner = kind.partition(" of ")
        if not isinstance(value, list | tuple if outer == "list" else dict):
            yield f"{where} is no {outer}: {value!r:.60}"
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from self.problems(item, inner, f"{where}[{key}]")

    def _of_table(self, value: Any, title: str, where: str) -> Iterator[str]:
        table = self.tables[title]
        if not isinstance(value, dict):
            yield f"{where} is no {title}: {value!r:.60}"
            return
        for key in sorted(value.keys() - table.keys()):
            yield f"{where}: the table {title} has no row for `{key}`"
        for key, row in table.items():
            if key in value:
                self.seen.add((title, key))
                yield from self.problems(value[key], row.kind, f"{where}.{key}")
            elif row.is_needed:
                yield f"{where}: `{key}` of {title} is missing"

    def unseen(self) -> set[str]:
        """Rows that no document had."""
        rows = {(title, key) for title, table in self.tables.items() for key in table}
        return {f"{title}.{key}" for title, key in rows - self.seen}
