"""The import rules of ARCHITECTURE.md, checked on the syntax trees of hqconv/**/*.py.

An import counts wherever it stands: at the top, in a function, or as `importlib.import_module("name")`. Only
one under `if TYPE_CHECKING:` may go to a module of the same layer that is not listed in SAME_LAYER.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400

# --- The tables. A name stands for the module and everything inside it, `name*` for all names that begin so.

LAYERS = {
    "hqconv.errors": 0,
    "hqconv.version": 0,
    "hqconv.schemas": 0,
    "hqconv.safetensors_header": 1,
    "hqconv.hub": 1,
    "hqconv.checkpoint": 1,
    "hqconv.experts": 1,
    "hqconv.expert_*": 1,
    "hqconv.gguf_header": 1,
    "hqconv.sharding": 1,
    "hqconv.decode": 1,
    "hqconv.source_parts*": 1,
    "hqconv.unlayout*": 1,
    "hqconv.reference": 1,
    "hqconv.backends": 1,
    "hqconv.request_checks": 2,
    "hqconv.plan": 2,
    "hqconv.source_reader": 2,
    "hqconv.source_schema": 2,
    "hqconv.encoding": 2,
    "hqconv.gguf_experts": 2,
    "hqconv.writer": 2,
    "hqconv.pipeline": 3,
    "hqconv.convert": 3,
    "hqconv.verif*": 3,
    "hqconv.inspection": 3,
    "hqconv.library": 3,
    "hqconv.artifact_reader": 3,
    "hqconv.artifact_source": 3,
    "hqconv.gguf_source": 3,
    "hqconv.cli": 4,
    "hqconv.job": 4,
    "hqconv.options": 4,
    "hqconv.render*": 4,
    "hqconv.progress": 4,
    "hqconv.__main__": 4,
}
# Who may import whom within one layer. The package `hqconv` itself imports nothing of its own.
SAME_LAYER = {
    "hqconv.schemas": ("hqconv.errors", "hqconv.schemas"),
    "hqconv.checkpoint": ("hqconv.hub", "hqconv.safetensors_header"),
    "hqconv.experts": ("hqconv.expert_*", "hqconv.source_parts"),
    "hqconv.expert_*": ("hqconv.expert_*", "hqconv.source_parts"),
    # Neither judge shares code with what it judges: no hqconv.backends here, and nothing for hqconv.reference.
    "hqconv.unlayout*": ("hqconv.unlayout*",),
    "hqconv.backends": ("hqconv.backends", "hqconv.sharding"),
    "hqconv.decode": ("hqconv.decode", "hqconv.backends"),
    "hqconv.source_parts*": ("hqconv.source_parts*",),
    "hqconv.plan": ("hqconv.request_checks",),
    "hqconv.writer": ("hqconv.plan",),
    "hqconv.source_schema": ("hqconv.plan",),
    "hqconv.convert": ("hqconv.pipeline",),
    "hqconv.verif*": ("hqconv.verif*", "hqconv.artifact_reader", "hqconv.pipeline"),
    "hqconv.inspection": ("hqconv.artifact_reader", "hqconv.gguf_source"),
    "hqconv.library": ("hqconv.verif*",),
    "hqconv.artifact_source": ("hqconv.verif*",),
    "hqconv.cli": ("hqconv.job", "hqconv.options", "hqconv.render*"),
    "hqconv.job": ("hqconv.options", "hqconv.progress"),
    "hqconv.render*": ("hqconv.progress", "hqconv.render*"),
    "hqconv.__main__": ("hqconv.cli",),
}
# What `import hqconv` offers: the version, and the functions for programs, which load on first use.
PACKAGE_IMPORTS = (("hqconv", "hqconv.version"), ("hqconv", "hqconv.library"))
# Libraries that only some modules may import at all.
ONLY_IN = {
    "humming": ("hqconv.backends",),
    "numba": ("hqconv.backends", "hqconv.unlayout*"),
    "gguf": ("hqconv.gguf_source",),
    "typer": ("hqconv.cli",),
    "rich": ("hqconv.progress", "hqconv.render*"),
}
# Modules that must not load torch when they are imported.
WITHOUT_TORCH = (
    "hqconv.errors",
    "hqconv.schemas",
    "hqconv.checkpoint",
    "hqconv.experts",
    "hqconv.expert_*",
    "hqconv.source_parts*",
    "hqconv.source_schema",
    "hqconv.sharding",
    "hqconv.plan",
    "hqconv.cli",
)

# --- The checker: sources by module name in, sentences about what is wrong out.


@dataclass(frozen=True)
class Import:
    """One imported module: where, and whether it happens on loading, in a function, or for types only."""

    target: str
    line: int
    when: str  # load | call | types


def matches(module: str, entry: str) -> bool:
    """Whether a table entry speaks of the module."""
    if entry.endswith("*"):
        return module.startswith(entry[:-1])
    return module == entry or module.startswith(entry + ".")


def lookup(table: Mapping[str, object], module: str) -> str | None:
    """The entry of a table that speaks of the module."""
    return next((entry for entry in table if matches(module, entry)), None)


def listed(module: str, entries: tuple[str, ...]) -> bool:
    return any(matches(module, entry) for entry in entries)


def imports(module: str, is_package: bool, source: str, modules: frozenset[str]) -> list[Import]:
    """Every import of a source; `from package import module` means the module."""
    return list(_walk(ast.parse(source), "load", _Names(module, is_package, modules)))


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


def all_imports(sources: Mapping[str, str], packages: frozenset[str]) -> dict[str, list[Import]]:
    modules = frozenset(sources)
    return {name: imports(name, name in packages, source, modules) for name, source in sources.items()}


def unlisted(names: frozenset[str]) -> list[str]:
    """Modules that the layer table does not know."""
    return [
        f"{name} is in no layer: add it to LAYERS in tests/test_architecture.py"
        for name in sorted(names - {"hqconv"})
        if lookup(LAYERS, name) is None
    ]


def wrong_direction(found: Mapping[str, list[Import]]) -> list[str]:
    """Imports that go upwards, or sideways without being listed."""
    problems = []
    for name, targets in found.items():
        own = lookup(LAYERS, name)
        for item in targets:
            entry = lookup(LAYERS, item.target)
            if entry is None or item.target == name or (name, item.target) in PACKAGE_IMPORTS:
                continue
            # The package's own __init__ runs before everything else, so it is below every layer.
            own_layer, layer = LAYERS[own] if own else -1, LAYERS[entry]
            sideways = layer == own_layer and (
                item.when == "types" or listed(item.target, SAME_LAYER.get(own or "", ()))
            )
            if layer >= own_layer and not sideways:
                problems.append(f"{name}:{item.line} (L{own_layer}) imports {item.target} (L{layer})")
    return problems


def forbidden_libraries(found: Mapping[str, list[Import]]) -> list[str]:
    """Imports of a library from where it does not belong."""
    return [
        f"{name}:{item.line} imports {item.target}; only {', '.join(ONLY_IN[entry])} may"
        for name, targets in found.items()
        for item in targets
        if (entry := lookup(ONLY_IN, item.target)) and not listed(name, ONLY_IN[entry])
    ]


def torch_on_load(found: Mapping[str, list[Import]]) -> list[str]:
    """Modules that import torch at module level and must not."""
    return [
        f"{name}:{item.line} imports {item.target} at module level"
        for name, targets in found.items()
        for item in targets
        if item.when == "load" and matches(item.target, "torch") and listed(name, WITHOUT_TORCH)
    ]


def cycle(found: Mapping[str, list[Import]]) -> list[str]:
    """One cycle among the imports that are not for types only, if there is one."""
    graph = {
        name: {i.target for i in targets if i.when != "types" and i.target in found and i.target != name}
        for name, targets in found.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def too_long(line_counts: Mapping[str, int]) -> list[str]:
    return [
        f"{name} has {n} lines, more than {MAX_LINES}" for name, n in line_counts.items() if n > MAX_LINES
    ]


# --- The real package.


def package_files() -> dict[str, Path]:
    files = {}
    for path in sorted((ROOT / "hqconv").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@pytest.fixture(scope="module")
def package() -> dict[str, list[Import]]:
    files = package_files()
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    packages = frozenset(name for name, path in files.items() if path.name == "__init__.py")
    return all_imports(sources, packages)


def test_every_module_has_a_layer() -> None:
    assert not unlisted(frozenset(package_files()))


@pytest.mark.parametrize("rule", [wrong_direction, forbidden_libraries, torch_on_load, cycle])
def test_imports(rule, package: dict[str, list[Import]]) -> None:  # type: ignore[no-untyped-def]
    assert not rule(package)


def test_no_source_file_is_too_long() -> None:
    paths = [*package_files().values(), *sorted((ROOT / "scripts").glob("*.py"))]
    counts = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths
    }
    assert not too_long(counts)


HEAVY = "heavy = {'torch', 'numba', 'humming', 'transformers'} & set(sys.modules); assert not heavy, heavy"
RUN_HELP = """
import sys
from hqconv.cli import main
sys.argv = ["hqconv", "--help"]
try:
    status = main()
except SystemExit as stop:
    status = stop.code
assert not status, status
"""


@pytest.mark.parametrize("code", ["import sys, hqconv.cli\n", RUN_HELP], ids=["import", "help"])
def test_cli_loads_nothing_heavy(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code + HEAVY], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_help_is_quick() -> None:
    """The goal is 0.3 s; a second, best of three, still tells a heavy import from a busy machine."""
    command = [str(Path(sys.executable).with_name("hqconv")), "--help"]
    times_s = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times_s.append(time.perf_counter() - start)
        if times_s[-1] < 1:
            break
    assert min(times_s) < 1, times_s


# --- Each check can fail.


def check(rule, sources: Mapping[str, str], packages: tuple[str, ...] = ()) -> list[str]:  # type: ignore[no-untyped-def]
    return rule(all_imports(sources, frozenset(packages)))


IN_FUNCTION = "def f():\n    {}\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"
OTHER_BRANCH = "import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    {}\n"
UPWARDS = "from hqconv.plan import x"
SIDEWAYS = "import hqconv.experts"


@pytest.mark.parametrize("frame", ["{}", IN_FUNCTION, FOR_TYPES, OTHER_BRANCH, "class A:\n    {}\n"])
@pytest.mark.parametrize(
    "statement",
    [
        UPWARDS,
        "import hqconv.plan as p",
        "from hqconv import plan",
        "from . import plan",
        "from .plan import x",
        "importlib.import_module('hqconv.plan')",
        "__import__('hqconv.plan')",
    ],
)
def test_upward_imports_are_found_everywhere(frame: str, statement: str) -> None:
    sources = {"hqconv": "", "hqconv.plan": "", "hqconv.decode": frame.format(statement)}
    (problem,) = check(wrong_direction, sources, ("hqconv",))
    assert problem.startswith("hqconv.decode:")
    assert problem.endswith("(L1) imports hqconv.plan (L2)")


@pytest.mark.parametrize(
    ("frame", "num_problems"), [("{}", 1), (IN_FUNCTION, 1), (OTHER_BRANCH, 1), (FOR_TYPES, 0)]
)
def test_sideways_imports_are_for_types_only(frame: str, num_problems: int) -> None:
    sources = {"hqconv.experts": "", "hqconv.decode": frame.format(SIDEWAYS)}
    assert len(check(wrong_direction, sources)) == num_problems


def test_listed_sideways_imports_go_one_way() -> None:
    sources = {"hqconv.checkpoint": "from hqconv import hub", "hqconv.hub": "", "hqconv": ""}
    assert not check(wrong_direction, sources)
    sources = {"hqconv.checkpoint": "", "hqconv.hub": "from hqconv import checkpoint", "hqconv": ""}
    assert check(wrong_direction, sources) == ["hqconv.hub:1 (L1) imports hqconv.checkpoint (L1)"]


def test_relative_imports_in_packages_are_resolved() -> None:
    sources = {
        "hqconv.plan": "",
        "hqconv.backends": "from .loops import x\nfrom ..plan import y",
        "hqconv.backends.loops": "from ..plan import z\nfrom . import twins",
        "hqconv.backends.twins": "",
    }
    problems = check(wrong_direction, sources, ("hqconv.backends",))
    assert problems == [
        "hqconv.backends:2 (L1) imports hqconv.plan (L2)",
        "hqconv.backends.loops:1 (L1) imports hqconv.plan (L2)",
    ]


def test_the_package_itself_is_at_the_bottom() -> None:
    sources = {"hqconv": "from hqconv.errors import x", "hqconv.errors": ""}
    assert check(wrong_direction, sources, ("hqconv",)) == ["hqconv:1 (L-1) imports hqconv.errors (L0)"]


def test_downward_imports_are_fine() -> None:
    sources = {
        "hqconv.cli": "from hqconv import convert",
        "hqconv.convert": "import hqconv.plan, hqconv.errors",
        "hqconv.plan": "from hqconv.schemas.target import T",
        "hqconv.schemas.target": "from hqconv.errors import E",
        "hqconv.errors": "import json",
    }
    for rule in (wrong_direction, forbidden_libraries, torch_on_load, cycle):
        assert not check(rule, sources)


def test_unlisted_modules_are_found() -> None:
    names = frozenset({"hqconv", "hqconv.planner", "hqconv.verify_kernel", "hqconv.backends.new"})
    assert [problem.split()[0] for problem in unlisted(names)] == ["hqconv.planner"]


@pytest.mark.parametrize("frame", ["{}", IN_FUNCTION, FOR_TYPES])
@pytest.mark.parametrize(
    ("module", "statement", "is_wrong"),
    [
        ("hqconv.verify", "import humming.ops", True),
        ("hqconv.unlayout_loops", "from humming import schema", True),
        ("hqconv.plan", "importlib.import_module('humming.schema')", True),
        ("hqconv.backends.layout", "import humming.ops", False),
        ("hqconv.decode", "from numba import njit", True),
        ("hqconv.unlayout_loops", "from numba import njit", False),
        ("hqconv.convert", "import rich.progress", True),
        ("hqconv.plan", "import typer", True),
        ("hqconv.render", "from rich.table import Table", False),
        ("hqconv.plan", "import richer", False),
    ],
)
def test_libraries_stay_in_their_rooms(frame: str, module: str, statement: str, is_wrong: bool) -> None:
    assert bool(check(forbidden_libraries, {module: frame.format(statement)})) == is_wrong


@pytest.mark.parametrize(
    ("module", "frame", "is_wrong"),
    [
        ("hqconv.plan", "{}", True),
        ("hqconv.schemas.target", "try:\n    {}\nexcept ImportError:\n    pass", True),
        ("hqconv.cli", "class A:\n    {}", True),
        ("hqconv.plan", IN_FUNCTION, False),
        ("hqconv.plan", FOR_TYPES, False),
        ("hqconv.decode", "{}", False),
    ],
)
@pytest.mark.parametrize("statement", ["import torch", "from torch.nn import Module"])
def test_torch_at_module_level_is_found(module: str, frame: str, is_wrong: bool, statement: str) -> None:
    assert bool(check(torch_on_load, {module: frame.format(statement)})) == is_wrong


def test_cycles_are_found() -> None:
    sources = {
        "hqconv.backends.a": "from hqconv.backends.b import x",
        "hqconv.backends.b": IN_FUNCTION.format("from hqconv.backends.a import y"),
    }
    assert len(check(cycle, sources)) == 1
    sources["hqconv.backends.b"] = FOR_TYPES.format("from hqconv.backends.a import y")
    assert not check(cycle, sources)


def test_long_files_are_found() -> None:
    assert too_long({"a.py": MAX_LINES, "b.py": MAX_LINES + 1}) == ["b.py has 401 lines, more than 400"]
