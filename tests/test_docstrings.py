"""First lines of docstrings say with nouns or an imperative what a module, class or function is or does."""

from __future__ import annotations

import ast

from tests.make.places import REPO

FORBIDDEN = {"What", "Whether", "Where", "How", "Which", "Those", "Who", "It", "Such"}


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = []
    for path in (REPO / "hqconv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            is_private = isinstance(node, ast.FunctionDef) and node.name.startswith("_")
            text = ast.get_docstring(node)
            if text and not is_private and text.split()[0].rstrip(",:;") in FORBIDDEN:
                found.append(f"{path}: {text.splitlines()[0]}")
    assert found == []
