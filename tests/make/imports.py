"""Who imports whom: read from syntax trees, wherever an import stands."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Import:
    """One imported module: where, and whether it happens on loading, in a function, or for types only."""

    target: str
    line: int
    when: str  # load | call | types


Imports = dict[str, list[Import]]


def all_imports(sources: Mapping[str, str], packages: frozenset[str] = frozenset()) -> Imports:
    """Every import of every module; `from package import module` means the module."""
    modules = frozenset(sources)
    return {
        name: list(_walk(ast.parse(source), "load", _Names(name, name in packages, modules)))
        for name, source in sources.items()
    }


@dataclass(frozen=True)
class _Names:
    module: str
    is_package: bool
    modules: frozenset[str]

    def of(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = self._base(node)
            inner = (f"{base}.{alias.name}" for alias in node.names)
            return [name if name in self.modules else base for name in inner]
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                return [node.args[0].value]
        return []

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *filter(None, [node.module])])


def _walk(node: ast.AST, when: str, names: _Names) -> Iterator[Import]:
    for target in dict.fromkeys(names.of(node)):
        yield Import(target, getattr(node, "lineno", 0), when)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and when == "load":
        when = "call"
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for child in node.body:
            yield from _walk(child, "types", names)
        for child in node.orelse:
            yield from _walk(child, when, names)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, when, names)


def _is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "attr", getattr(test, "id", "")) == "TYPE_CHECKING"


def is_in(module: str, entry: str) -> bool:
    """Whether a module is the entry or lies in it."""
    return module == entry or module.startswith(entry + ".")


def circle(found: Imports) -> list[str]:
    """One circle among the imports that are not for types only, if there is one."""
    graph = {
        name: {i.target for i in targets if i.when != "types" and i.target in found and i.target != name}
        for name, targets in found.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []
