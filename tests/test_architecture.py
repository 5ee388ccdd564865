"""The rules of ARCHITECTURE.md, checked on the syntax trees of hqconv/**/*.py and on what importing loads."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.make.imports import Imports, all_imports, circle, is_in, long_functions
from tests.make.places import REPO

# The rooms and their floors. A room may import from rooms on lower floors and from itself, wherever the import stands.
FLOORS = {
    "errors": 0,
    "compiled": 0,
    "schemas": 1,
    "checkpoint": 2,
    "formats": 2,
    "backends": 2,
    "decode": 3,
    "experts": 3,
    "sources": 4,
    "planning": 4,
    "artifact": 5,
    "pipeline": 6,
    "verification": 7,
    "inspection": 7,
    "serving": 8,
    "api": 9,
    "cli": 10,
    "__main__": 11,
}
# The judges: modules that share nothing with what they judge but these rooms.
INDEPENDENT = {
    "hqconv.artifact.unlayout": ("hqconv.errors", "hqconv.schemas", "hqconv.compiled"),
    "hqconv.artifact.stacked": ("hqconv.errors", "hqconv.schemas", "hqconv.experts", "hqconv.artifact"),
    "hqconv.verification.reference": ("hqconv.schemas.activation",),  # a name and numbers, no formula
    "hqconv.verification.rounding": (),
}
# Libraries that only some modules may import at all.
ONLY_IN = {
    "humming": ("hqconv.backends", "hqconv.artifact.load", "hqconv.serving"),
    "numba": ("hqconv.compiled", "hqconv.backends.loops"),
    "huggingface_hub": (
        "hqconv.checkpoint.hub",
        "hqconv.checkpoint.hub_errors",
        "hqconv.checkpoint.hub_cache",
        "hqconv.checkpoint.upload",
    ),
    "vllm": (
        "hqconv.serving.config",
        "hqconv.serving.dense",
        "hqconv.serving.method",
        "hqconv.serving.plugin",
        "hqconv.serving.tuning",
    ),
    "gguf": ("hqconv.checkpoint.gguf",),
    "bitsandbytes": ("hqconv.decode.bitsandbytes",),
    "typer": ("hqconv.cli.app", "hqconv.cli.grouped", "hqconv.cli.messages", "hqconv.cli.options"),
    "rich": tuple(f"hqconv.cli.{name}" for name in ("tables", "render", "report", "comparison", "progress")),
}
# What can be imported without torch, numba, numpy or Humming: everything that only looks at names and headers.
LIGHT = (
    *(
        "hqconv.api",
        "hqconv.cli.app",
        "hqconv.schemas",
        "hqconv.checkpoint",
        "hqconv.formats",
        "hqconv.experts",
    ),
    *("hqconv.planning", "hqconv.inspection", "hqconv.backends.forms"),
    *("hqconv.sources.headers", "hqconv.sources.source", "hqconv.sources.raw"),
    *("hqconv.artifact.manifest", "hqconv.artifact.opening", "hqconv.artifact.facts"),
    *("hqconv.serving.gpus", "hqconv.serving.kernels", "hqconv.serving.asked", "hqconv.serving.warm"),
    *("hqconv.serving.served", "hqconv.serving.place", "hqconv.serving.refusals", "hqconv.serving.rank_file"),
    *(
        "hqconv.serving.activations",
        "hqconv.serving.names",
        "hqconv.serving.plugin",
        "hqconv.serving.versions",
        "hqconv.serving.tuning",
    ),
    *("hqconv.pipeline.options", "hqconv.pipeline.wanted"),
    *("hqconv.pipeline.progress", "hqconv.pipeline.resources"),
)
HEAVY = ("torch", "numpy", "numba", "humming", "transformers", "huggingface_hub")
# A server serves; what plans, converts, verifies and shows stays out of its processes, also in functions.
# `serving/warm` and what it alone imports are no part of one.
SERVER_WITHOUT_VLLM = (
    *(
        "served",
        "place",
        "refusals",
        "rank_file",
        "filling",
        "loader",
        "activations",
        "names",
        "plugin",
        "tuning",
    ),
    *("versions", "kernels"),
)
SERVER = tuple(f"hqconv.serving.{name}" for name in (*SERVER_WITHOUT_VLLM, "config", "dense", "method"))
NOT_IN_A_SERVER = (
    *("backends", "decode", "pipeline", "planning", "experts", "formats", "sources", "verification"),
    *("inspection", "api", "cli"),
)
MAX_LINES, MAX_FUNCTION_LINES, MAX_ENTRIES = 300, 45, 20
TABLES = ("hqconv.schemas.families",)  # data, not code

# --- The rules: imports by module name in, sentences about what is wrong out.


def room_of(module: str) -> str:
    """`planning` of `hqconv.planning.plan`, "" of the package itself."""
    return [*module.split("."), ""][1]


def wrong_direction(found: Imports) -> list[str]:
    """Imports of a room that is not on a lower floor. The package itself is the ground: everybody stands on it."""
    problems = []
    for name, items in found.items():
        for item in items:
            own, other = room_of(name), room_of(item.target)
            if not is_in(item.target, "hqconv") or other == "" or (own == "" and item.when != "load"):
                continue
            if own != other and FLOORS[other] >= FLOORS.get(own, -1):
                problems.append(f"{name}:{item.line} (floor {FLOORS.get(own, -1)}) imports {item.target}")
    return problems


def without_floor(names: frozenset[str]) -> list[str]:
    """Rooms that the table does not know, and rows for rooms that do not exist."""
    rooms = {room_of(name) for name in names} - {""}
    return sorted(rooms ^ FLOORS.keys())


def forbidden_libraries(found: Imports) -> list[str]:
    """Imports of a library from where it does not belong."""
    return [
        f"{name}:{item.line} imports {item.target}; only {', '.join(ONLY_IN[library])} may"
        for name, items in found.items()
        for item in items
        for library in ONLY_IN
        if is_in(item.target, library) and not any(is_in(name, entry) for entry in ONLY_IN[library])
    ]


def shared_with_the_judged(found: Imports) -> list[str]:
    """Imports of an independent module that lead elsewhere."""
    return [
        f"{name}:{item.line} imports {item.target}"
        for name, items in found.items()
        for judge, allowed in INDEPENDENT.items()
        if is_in(name, judge)
        for item in items
        if is_in(item.target, "hqconv") and not any(is_in(item.target, entry) for entry in (judge, *allowed))
    ]


def circles(found: Imports) -> list[str]:
    """A circle of imports. What the package offers is imported when it is first asked for."""
    return circle({name: items for name, items in found.items() if name != "hqconv"})


def too_much_for_a_server(found: Imports) -> list[str]:
    """The first way from a server's modules to each module of a room that it has no use for."""
    ways = {name: name for name in SERVER if name in found}
    queue = list(ways)
    for name in queue:  # grows on the way
        parts = name.split(".")
        packages = [".".join(parts[:size]) for size in range(1, len(parts))]  # which are loaded before it
        items = [item for item in found[name] if item.when != "types"]
        items += [item for package in packages for item in found.get(package, ()) if item.when == "load"]
        for item in items:
            if item.target in found and item.target not in ways:
                ways[item.target] = f"{ways[name]} -> {item.target}"
                queue.append(item.target)
    return [way for name, way in ways.items() if room_of(name) in NOT_IN_A_SERVER]


RULES = (wrong_direction, forbidden_libraries, shared_with_the_judged, circles, too_much_for_a_server)

# --- The real package.


def package_files() -> dict[str, Path]:
    files = {}
    for path in sorted((REPO / "hqconv").rglob("*.py")):
        parts = path.relative_to(REPO).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {name: path.read_text(encoding="utf-8") for name, path in package_files().items()}


@pytest.fixture(scope="module")
def package(sources: dict[str, str]) -> Imports:
    return all_imports(sources, frozenset(n for n, p in package_files().items() if p.name == "__init__.py"))


@pytest.mark.parametrize("rule", RULES)
def test_imports(rule: Callable[[Imports], list[str]], package: Imports) -> None:
    assert not rule(package)


def test_every_room_has_a_floor() -> None:
    assert not without_floor(frozenset(package_files()))
    assert len(FLOORS) <= 20


def test_files_and_functions_are_short(sources: dict[str, str]) -> None:
    code = {name: source for name, source in sources.items() if name not in TABLES}
    counts = {name: len(source.splitlines()) for name, source in code.items()}
    assert {name: count for name, count in counts.items() if count > MAX_LINES} == {}
    assert long_functions(code, MAX_FUNCTION_LINES) == []


def test_the_floor_of_the_house_is_not_crowded() -> None:
    entries = [path.name for path in (REPO / "hqconv").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_tests_mirror_the_rooms_and_share_nothing_private() -> None:
    rooms = {
        path.name for path in (REPO / "hqconv").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    folders = {
        path.name for path in (REPO / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert folders == rooms | {"make", "golden", "scripts", "data"}
    files = {
        ".".join(path.relative_to(REPO).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted((REPO / "tests").rglob("*.py"))
    }
    found = all_imports(files)
    wrong = [
        f"{name}:{item.line} imports {item.target}"
        for name, items in found.items()
        for item in items
        if is_in(item.target, "tests") and not is_in(item.target, "tests.make")
    ]
    assert not wrong
    assert not [
        name for name in files if is_in(name, "tests.make") and name.split(".")[-1].startswith("test_")
    ]


def test_every_module_of_serving_is_of_a_server_or_of_warm() -> None:
    """Else the rule on servers would not see a new one."""
    warm = {f"hqconv.serving.{name}" for name in ("warm", "asked", "compiler", "gpus")}
    serving = {name for name in package_files() if is_in(name, "hqconv.serving")} - {"hqconv.serving"}
    assert serving == {*SERVER, *warm}


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n")[-2].split())


@pytest.mark.parametrize("entry", LIGHT)
def test_what_looks_at_headers_loads_nothing_heavy(entry: str) -> None:
    names = [name for name in package_files() if is_in(name, entry)]
    assert names
    assert loaded_by("\n".join(f"import {name}" for name in names)) == set()


def test_a_server_compiles_no_loops_and_loads_no_humming_of_its_own() -> None:
    """torch is vLLM's, and numpy is torch's."""
    code = "\n".join(f"import hqconv.serving.{name}" for name in SERVER_WITHOUT_VLLM)
    assert loaded_by(code) <= {"torch", "numpy"}


def test_help_loads_nothing_heavy() -> None:
    code = "import sys\nsys.argv = ['hqconv', 'convert', '--help']\nfrom hqconv.cli.app import main\n"
    assert loaded_by(f"{code}try:\n    main()\nexcept SystemExit:\n    pass") == set()


def test_the_package_offers_its_functions_lazily() -> None:
    assert loaded_by("import hqconv; hqconv.convert; hqconv.load") == set()


def test_help_is_quick() -> None:
    """The goal is 0.3 s; a second, best of three, still tells a heavy import from a busy machine."""
    command = [sys.executable, "-m", "hqconv", "--help"]
    times_s = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, cwd=REPO)
        times_s.append(time.perf_counter() - start)
        if times_s[-1] < 1:
            break
    assert min(times_s) < 1, times_s


# --- Each rule can fail.


def check(rule: Callable[[Imports], list[str]], files: Mapping[str, str], *packages: str) -> list[str]:
    return rule(all_imports(files, frozenset(packages)))


IN_FUNCTION = "def f():\n    {}\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"
OTHER_BRANCH = "import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    {}\n"
FRAMES = ("{}", IN_FUNCTION, FOR_TYPES, OTHER_BRANCH, "class A:\n    {}\n")
PLAN = "hqconv.planning.plan"


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize(
    "statement",
    [
        f"from {PLAN} import x",
        f"import {PLAN} as p",
        "from hqconv.planning import plan",
        "from ..planning import plan",
        "from ..planning.plan import x",
        f"importlib.import_module('{PLAN}')",
        f"__import__('{PLAN}')",
    ],
)
def test_upward_imports_are_found_everywhere(frame: str, statement: str) -> None:
    files = {"hqconv": "", PLAN: "", "hqconv.decode.coded": frame.format(statement)}
    (problem,) = check(wrong_direction, files, "hqconv")
    assert problem.startswith("hqconv.decode.coded:")
    assert problem.endswith(f"(floor 3) imports {PLAN}")


def test_rooms_of_one_floor_do_not_import_each_other() -> None:
    files = {"hqconv.sources.gguf": f"from {PLAN} import Plan", PLAN: ""}
    assert check(wrong_direction, files) == [f"hqconv.sources.gguf:1 (floor 4) imports {PLAN}"]


def test_imports_in_a_room_and_downwards_are_free() -> None:
    files = {
        "hqconv": "def __getattr__(name):\n    from hqconv import api",
        "hqconv.api": "",
        "hqconv.cli.app": "from hqconv import api",
        "hqconv.pipeline.run": f"import {PLAN}, hqconv.errors\nfrom hqconv import __version__",
        PLAN: "from hqconv.planning.groups import Group\nfrom hqconv.schemas.target import T",
        "hqconv.planning.groups": "from . import files",
        "hqconv.planning.files": "import json",
    }
    for rule in RULES:
        assert not check(rule, files, "hqconv")


def test_the_package_itself_loads_none_of_its_rooms() -> None:
    files = {"hqconv": "from hqconv.errors import x", "hqconv.errors": ""}
    assert check(wrong_direction, files, "hqconv") == ["hqconv:1 (floor -1) imports hqconv.errors"]


def test_a_new_room_needs_a_row() -> None:
    names = frozenset(
        {"hqconv", "hqconv.attic.box", *(f"hqconv.{room}" for room in FLOORS if room != "decode")}
    )
    assert without_floor(names) == ["attic", "decode"]


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize(
    ("module", "statement", "is_wrong"),
    [
        ("hqconv.verification.run", "import humming.ops", True),
        ("hqconv.artifact.unlayout.loops", "from humming import schema", True),
        (PLAN, "importlib.import_module('humming.schema')", True),
        ("hqconv.backends.layout", "import humming.ops", False),
        ("hqconv.decode.coded", "from numba import njit", True),
        ("hqconv.compiled", "from numba import njit", False),
        ("hqconv.pipeline.run", "import rich.progress", True),
        (PLAN, "import typer", True),
        ("hqconv.cli.render", "from rich.table import Table", False),
        (PLAN, "import richer", False),
    ],
)
def test_libraries_stay_in_their_rooms(frame: str, module: str, statement: str, is_wrong: bool) -> None:
    assert bool(check(forbidden_libraries, {module: frame.format(statement)})) == is_wrong


@pytest.mark.parametrize(
    ("module", "statement", "is_wrong"),
    [
        ("hqconv.artifact.unlayout.read", "from hqconv.backends.layout import x", True),
        ("hqconv.artifact.unlayout.read", "from hqconv.artifact.matrix import x", True),
        ("hqconv.artifact.unlayout.read", "from hqconv.artifact.unlayout.form import x", False),
        ("hqconv.artifact.unlayout.stacks", "from hqconv.backends.repack import x", True),
        ("hqconv.artifact.stacked", "from hqconv.backends.codec import x", True),
        ("hqconv.artifact.stacked", "from hqconv.artifact.matrix import x", False),
        ("hqconv.verification.reference", "from hqconv.schemas.target import x", True),
        ("hqconv.artifact.ranks", "from hqconv.backends.layout import x", False),
    ],
)
def test_judges_share_nothing(module: str, statement: str, is_wrong: bool) -> None:
    assert bool(check(shared_with_the_judged, {module: statement})) == is_wrong


@pytest.mark.parametrize("frame", FRAMES)
def test_what_a_server_reaches_is_found_along_the_way(frame: str) -> None:
    files = {
        "hqconv.serving.served": frame.format("from hqconv.artifact.manifest import x"),
        "hqconv.artifact": "",
        "hqconv.artifact.manifest": "from hqconv.checkpoint import folder",
        "hqconv.checkpoint.folder": "",
        "hqconv.serving.warm": "import hqconv.pipeline.durable",
        "hqconv.pipeline.durable": "",
    }
    assert not check(too_much_for_a_server, files, "hqconv.artifact")
    files["hqconv.artifact.manifest"] = frame.format("import hqconv.formats.words")
    files["hqconv.formats.words"] = ""
    way = "hqconv.serving.served -> hqconv.artifact.manifest -> hqconv.formats.words"
    assert check(too_much_for_a_server, files) == ([] if frame == FOR_TYPES else [way])
    files |= {"hqconv.artifact.manifest": "", "hqconv.artifact": "import hqconv.formats.words"}
    assert check(too_much_for_a_server, files, "hqconv.artifact") == ([] if frame == FOR_TYPES else [way])


def test_circles_are_found() -> None:
    files = {
        "hqconv.backends.a": "from hqconv.backends.b import x",
        "hqconv.backends.b": IN_FUNCTION.format("from hqconv.backends.a import y"),
    }
    assert len(check(circles, files)) == 1
    files["hqconv.backends.b"] = FOR_TYPES.format("from hqconv.backends.a import y")
    assert not check(circles, files)


def test_long_functions_are_found() -> None:
    body = "    pass\n" * 44
    assert not long_functions({"a": f"def f():\n{body}"}, 45)
    assert not long_functions({"a": f"@x\ndef f(\n    a,\n    b,\n):\n{body}"}, 45)
    assert long_functions({"a": f"def f():\n    y\n{body}"}, 45) == ["a:1 f has 46 lines, more than 45"]
