"""docs/troubleshooting.md: each message that it quotes is in the code, and ends with the exit code that it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

import hqconv.errors
from hqconv.errors import HqconvError
from tests.make.places import REPO

PAGE = REPO / "docs" / "troubleshooting.md"
ROWS = re.findall(r"^\| `([^`|]+)` \| (\d+) \| (\S.*) \|$", PAGE.read_text(), re.MULTILINE)
CODES = {
    name: kind.exit_code
    for name, kind in vars(hqconv.errors).items()
    if isinstance(kind, type) and issubclass(kind, HqconvError) and kind is not HqconvError
}


def text_of(node: ast.AST) -> str:
    """A literal's text, with `…` for what is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def literals(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield text_of(node)


def exit_codes() -> dict[str, set[int]]:
    """Every literal of the package → the exit codes of the errors that are named in the same function or beside it."""
    found: dict[str, set[int]] = {}
    for path in sorted((REPO / "hqconv").rglob("*.py")):
        tree = ast.parse(path.read_text())
        helpers = _helpers(tree)
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            codes = {CODES[name] for name in names & CODES.keys()}
            codes |= {code for name in names & helpers.keys() for code in helpers[name]}
            for text in literals(function):
                found.setdefault(text, set()).update(codes)
    return found


def _helpers(tree: ast.AST) -> dict[str, set[int]]:
    """Functions of a module that make errors → their codes."""
    return {
        node.name: {
            CODES[n.id] for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in CODES
        }
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


KNOWN = exit_codes()


def codes_of(message: str) -> set[int]:
    """The exit codes of the literals that a quoted message is one of; all, of one that is raised elsewhere."""
    message = message.removesuffix(".") if message.endswith("….") else message
    quoted = re.compile(".+".join(map(re.escape, message.split("…"))) + r"\.?", re.DOTALL)
    found = [codes for text, codes in KNOWN.items() if quoted.fullmatch(text)]
    return {code for codes in found for code in codes or CODES.values()}


@pytest.mark.parametrize(("message", "code"), [(message, int(code)) for message, code, _ in ROWS])
def test_a_quoted_message_is_one_of_ours(message: str, code: int) -> None:
    assert code in codes_of(message)


def test_every_row_is_looked_at_and_no_message_stands_twice() -> None:
    messages = [message for message, *_ in ROWS]
    assert len(set(messages)) == len(messages) > 60
    tables = re.findall(
        r"^\| message \|.*\n\| --- .*\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE
    )
    assert sum(table.count("\n") for table in tables) == len(messages)
