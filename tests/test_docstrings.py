"""First lines of docstrings say with nouns or an imperative what a module, class or function is or does."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.make.places import REPO

PACKAGE = REPO / "hqconv"
FORBIDDEN = frozenset(("What", "Whether", "Where", "How", "Which", "Those", "Who", "It", "Such"))
# Rooms (or modules beside them) that still have docstrings to reword. Remove a row when its room is done.
UNFINISHED = frozenset(())


def public_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first docstring line of a module, its classes, and its public functions and methods."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_private = isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef
        ) and node.name.startswith("_")
        text = ast.get_docstring(node)
        if text and not is_private:
            yield getattr(node, "lineno", 1), text.splitlines()[0]


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        for line, first in public_docstrings(path):
            if first.split()[0].rstrip(",:;") in FORBIDDEN:
                found[inside.parts[0]].append(f"hqconv/{inside}:{line}: {first}")
    assert [text for room, texts in found.items() if room not in UNFINISHED for text in texts] == []
    assert found.keys() >= UNFINISHED, "a room is done: remove its row"
