"""The rules of ARCHITECTURE.md, checked on the syntax trees of hqconv/**/*.py and on what importing loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.make.imports import Imports, all_imports, circle, is_in
from tests.make.places import REPO

# The rooms and their floors. A room may import from rooms on lower floors and from itself, wherever the import stands.
# The longest prefix of a module's name counts.
FLOORS = {
    "errors": 0,
    "jit": 0,
    "schemas": 1,
    "io": 3,
    "cpu_loops": 2,
    "layout_decoder": 2,
    "humming_ops": 3,
    "quantization": 4,
    "kernel_layout": 5,
    "formats": 5,
    "models": 6,
    "planning": 8,
    "artifact": 9,
    "sources": 10,
    "conversion": 11,
    "verification": 12,
    "evaluation": 13,
    "reports": 13,
    "serving": 14,
    "api": 15,
    "cli": 16,
    "__main__": 17,
}
# Independent references: modules that share nothing with the code they check but these rooms.
INDEPENDENT = {
    "hqconv.layout_decoder": ("hqconv.errors", "hqconv.schemas", "hqconv.jit"),
    "hqconv.artifact.expert_reader": (
        "hqconv.errors",
        "hqconv.schemas",
        "hqconv.models",
        "hqconv.artifact",
        "hqconv.layout_decoder",
        "hqconv.io",
    ),
    "hqconv.verification.reference": ("hqconv.schemas.activation",),  # a name and numbers, no formula
}
# Libraries that only some modules may import at all.
ONLY_IN = {
    "humming": ("hqconv.humming_ops", "hqconv.kernel_layout", "hqconv.serving.vllm.tuning"),
    "numba": ("hqconv.jit", "hqconv.cpu_loops.arithmetic"),
    "huggingface_hub": ("hqconv.io.hub", "hqconv.io.hub_upload"),
    "vllm": (
        "hqconv.serving.vllm.config",
        "hqconv.serving.vllm.moe_method",
        "hqconv.serving.vllm.other_layers",
        "hqconv.serving.vllm.plugin",
        "hqconv.serving.vllm.tuning",
    ),
    "jinja2": ("hqconv.reports.html",),
    "gguf": ("hqconv.io.gguf_header",),
    "bitsandbytes": ("hqconv.formats.bitsandbytes",),
    "typer": tuple(f"hqconv.cli.{name}" for name in ("app", "convert_commands", "output", "options")),
    "rich": tuple(f"hqconv.cli.{name}" for name in ("render", "progress_bar")),
}
# The two seams: words that name the kernel library's config and the engine, and the modules that may use them in code
# (identifiers and strings; docstrings and comments aside).
SEAMS = {
    "layerconfig": ("hqconv.kernel_layout",),
    "vllm": (
        "hqconv.serving.vllm",
        "hqconv.schemas.engine",  # facts of the engine, as data
        "hqconv.serving.warm.compile_kernels",  # imports what the engine requests of the kernel library
    ),
}
# Public words that contain one of them: keys of JSON documents, and a name in config.json.
PUBLIC_WORDS = {
    *("vllm_obstacles", "stock_vllm", "stock_vllm_obstacle", "stock_vllm_param_dtypes"),
    *("stock_vllm_serves_checkpoint_layout", "serve-with-vllm-and-hqconv.safetensors"),
}
# What can be imported without torch, numba, numpy or Humming: everything that only looks at names and headers.
LIGHT = (
    *("hqconv.api", "hqconv.cli.app", "hqconv.schemas", "hqconv.io", "hqconv.planning", "hqconv.reports"),
    *("hqconv.models", "hqconv.kernel_layout.compatibility"),
    *("hqconv.kernel_layout.kernel_sources", "hqconv.serving.vllm.kernel_requests"),
    "hqconv.formats",
    *("hqconv.sources", "hqconv.artifact.reader"),
    *("hqconv.serving.artifact_view", "hqconv.serving.artifact_location", "hqconv.serving.server_compatibility"),
    *("hqconv.artifact.rank_file", "hqconv.serving.vllm.activations", "hqconv.serving.vllm.layer_names"),
    *("hqconv.serving.vllm.plugin", "hqconv.serving.vllm.tuning", "hqconv.serving.vllm.refusals"),
    *(f"hqconv.serving.warm.{name}" for name in ("gpus", "kernel_store", "compile_kernels")),
    *("hqconv.conversion.option_values", "hqconv.conversion.progress"),
    "hqconv.conversion.resources",
)
HEAVY = ("torch", "numpy", "numba", "humming", "transformers", "huggingface_hub")
# A server serves: planning, conversion, verification and reports stay out of its processes, also in functions.
# `serving/warm` is no part of a server, its store of compiled kernels aside.
SERVER_WITHOUT_VLLM = (
    *("artifact_view", "artifact_location", "server_compatibility", "parameter_loader"),
    *("vllm.activations", "vllm.layer_names", "vllm.refusals", "vllm.plugin", "vllm.tuning", "warm.kernel_store"),
)
WITH_VLLM = ("vllm.config", "vllm.moe_method", "vllm.other_layers")
SERVER = tuple(f"hqconv.serving.{name}" for name in (*SERVER_WITHOUT_VLLM, *WITH_VLLM))
NOT_IN_A_SERVER = (
    *("cpu_loops", "quantization", "formats", "planning", "models", "sources"),
    *("conversion", "verification", "reports", "api", "cli"),
)
MAX_ENTRIES = 24

# --- The rules: imports by module name in, sentences about what is wrong out.


def room_of(module: str) -> str:
    """The longest row of FLOORS that a module lies in: `planning` of `hqconv.planning.plan`, "" of `hqconv`."""
    inside = module.split(".")[1:]
    prefixes = (".".join(inside[:size]) for size in range(len(inside), 0, -1))
    return next((prefix for prefix in prefixes if prefix in FLOORS), inside[0] if inside else "")


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


def code_words(text: str) -> Iterator[tuple[int, str]]:
    """(line, word) of every identifier, imported name and string literal of a module, docstrings aside."""
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0] if node.body else None, ast.Expr)
    }
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.ImportFrom: "module"}
    fields |= dict.fromkeys((ast.FunctionDef, ast.ClassDef, ast.alias), "name") | {ast.Constant: "value"}
    for node in ast.walk(tree):
        word = getattr(node, fields.get(type(node), ""), None)
        if isinstance(word, str) and id(node) not in docstrings:
            yield getattr(node, "lineno", 0), word


def beyond_the_seams(sources: Mapping[str, str]) -> list[str]:
    """Code outside of the allowed modules that names the engine or the kernel library's config."""
    return [
        f"{name}:{line} names {word!r}; only {', '.join(allowed)} may"
        for name, text in sources.items()
        for seam, allowed in SEAMS.items()
        if not any(is_in(name, entry) for entry in allowed)
        for line, word in code_words(text)
        if seam in word.lower() and word not in PUBLIC_WORDS
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


def test_the_seams_hold(sources: dict[str, str]) -> None:
    assert not beyond_the_seams(sources)


def test_every_room_has_a_floor() -> None:
    assert not without_floor(frozenset(package_files()))


def test_the_floor_of_the_house_is_not_crowded() -> None:
    entries = [path.name for path in (REPO / "hqconv").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_tests_mirror_the_rooms_and_share_nothing_private() -> None:
    rooms = {path.name for path in (REPO / "hqconv").iterdir() if path.is_dir() and path.name != "__pycache__"}
    folders = {path.name for path in (REPO / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
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
    assert not [name for name in files if is_in(name, "tests.make") and name.split(".")[-1].startswith("test_")]


def test_every_module_of_serving_is_of_a_server_or_of_warm() -> None:
    """Else the rule on servers would not see a new one."""
    warm = {f"hqconv.serving.{name}" for name in ("warm.compile_kernels", "warm.gpus", "vllm.kernel_requests")}
    packages = {"hqconv.serving", "hqconv.serving.vllm", "hqconv.serving.warm"}
    serving = {name for name in package_files() if is_in(name, "hqconv.serving")} - packages
    assert serving == {*SERVER, *warm}


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, check=False)
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
    files = {"hqconv": "", PLAN: "", "hqconv.quantization.coded_matrix": frame.format(statement)}
    (problem,) = check(wrong_direction, files, "hqconv")
    assert problem.startswith("hqconv.quantization.coded_matrix:")
    assert problem.endswith(f"(floor 4) imports {PLAN}")


def test_rooms_of_one_floor_do_not_import_each_other() -> None:
    files = {"hqconv.io.hub": "from hqconv.kernel_layout.transform import x", "hqconv.kernel_layout.transform": ""}
    assert check(wrong_direction, files) == ["hqconv.io.hub:1 (floor 3) imports hqconv.kernel_layout.transform"]


def test_imports_in_a_room_and_downwards_are_free() -> None:
    files = {
        "hqconv": "def __getattr__(name):\n    from hqconv import api",
        "hqconv.api": "",
        "hqconv.cli.app": "from hqconv import api",
        "hqconv.conversion.convert": f"import {PLAN}, hqconv.errors\nfrom hqconv import __version__",
        PLAN: "from hqconv.planning.output_units import OutputUnit\nfrom hqconv.schemas.weight_schema import T",
        "hqconv.planning.output_units": "from . import encoding",
        "hqconv.planning.layer_encoding": "import json",
    }
    for rule in RULES:
        assert not check(rule, files, "hqconv")


def test_the_package_itself_loads_none_of_its_rooms() -> None:
    files = {"hqconv": "from hqconv.errors import x", "hqconv.errors": ""}
    assert check(wrong_direction, files, "hqconv") == ["hqconv:1 (floor -1) imports hqconv.errors"]


def test_a_new_room_needs_a_row() -> None:
    names = frozenset({"hqconv", "hqconv.attic.box", *(f"hqconv.{room}" for room in FLOORS if room != "formats")})
    assert without_floor(names) == ["attic", "formats"]


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize(
    ("module", "statement", "is_wrong"),
    [
        ("hqconv.verification.verify", "import humming.ops", True),
        ("hqconv.layout_decoder.loops", "from humming import schema", True),
        (PLAN, "importlib.import_module('humming.schema')", True),
        ("hqconv.kernel_layout.transform", "import humming.ops", False),
        ("hqconv.quantization.coded_matrix", "from numba import njit", True),
        ("hqconv.jit", "from numba import njit", False),
        ("hqconv.conversion.convert", "import rich.progress", True),
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
        ("hqconv.layout_decoder.decode", "from hqconv.kernel_layout.transform import x", True),
        ("hqconv.layout_decoder.decode", "from hqconv.artifact.expert_reader import x", True),
        ("hqconv.layout_decoder.decode", "from hqconv.layout_decoder.layout_form import x", False),
        ("hqconv.layout_decoder.scales", "from hqconv.cpu_loops.repack import x", True),
        ("hqconv.artifact.expert_reader", "from hqconv.quantization.bit_codec import x", True),
        ("hqconv.artifact.expert_reader", "from hqconv.artifact.rank_file import x", False),
        ("hqconv.verification.reference", "from hqconv.schemas.weight_schema import x", True),
        ("hqconv.artifact.rank_file", "from hqconv.kernel_layout.transform import x", False),
    ],
)
def test_judges_share_nothing(module: str, statement: str, is_wrong: bool) -> None:
    assert bool(check(shared_with_the_judged, {module: statement})) == is_wrong


@pytest.mark.parametrize("frame", FRAMES)
def test_what_a_server_reaches_is_found_along_the_way(frame: str) -> None:
    files = {
        "hqconv.serving.artifact_view": frame.format("from hqconv.artifact.manifest import x"),
        "hqconv.artifact": "",
        "hqconv.artifact.manifest": "from hqconv.io import checkpoint_files",
        "hqconv.io.checkpoint_files": "",
        "hqconv.serving.warm.compile_kernels": "import hqconv.io.durable_files",
        "hqconv.io.durable_files": "",
    }
    assert not check(too_much_for_a_server, files, "hqconv.artifact")
    files["hqconv.artifact.manifest"] = frame.format("import hqconv.formats.config_reader")
    files["hqconv.formats.config_reader"] = ""
    way = "hqconv.serving.artifact_view -> hqconv.artifact.manifest -> hqconv.formats.config_reader"
    assert check(too_much_for_a_server, files) == ([] if frame == FOR_TYPES else [way])
    files |= {"hqconv.artifact.manifest": "", "hqconv.artifact": "import hqconv.formats.config_reader"}
    assert check(too_much_for_a_server, files, "hqconv.artifact") == ([] if frame == FOR_TYPES else [way])


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ('"""As vLLM does."""\nx = 1  # vLLM', False),
        ('def f():\n    """Like LayerConfig."""', False),
        ("from hqconv.serving.vllm.refusals import x", True),
        ("import humming.config\nx = humming.config.LayerConfig", True),
        ("def f(a):\n    return f'{a} in vLLM'", True),
        ("def serves_vllm(): ...", True),
        ('x = {"stock_vllm_obstacle": 1}', False),
    ],
)
def test_names_beyond_the_seams_are_found(text: str, is_wrong: bool) -> None:
    assert bool(beyond_the_seams({PLAN: text})) == is_wrong
    assert not beyond_the_seams({"hqconv.serving.vllm.refusals": text.replace("LayerConfig", "X")})


LOOKUP = re.compile(
    r"""manifests?(\[\d\])?(\.\w+)*(\[["']|\.get\(["'])"""  # manifest["key"], manifest.source.get("key")
    r"""|read_manifest\([^()]*\)(\[|\.get\()"""
    r"""|\.(blocks|layers)\[[^][]*\](\[|\.get\()"""
)


def test_manifests_are_typed_outside_their_room() -> None:
    """Keys of hqconv.json are attributes of `artifact.manifest`; nothing else looks into the document."""
    wrong = [
        f"{path.relative_to(REPO)}:{number}: {line.strip()}"
        for path in sorted((REPO / "hqconv").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if LOOKUP.search(line) and path != REPO / "hqconv/artifact/manifest.py"
    ]
    assert wrong == []
    for line in ('artifact.manifest["files"]', 'manifest.get("warnings")', 'artifact.layers[name]["top_k"]'):
        assert LOOKUP.search(line)


def test_circles_are_found() -> None:
    files = {
        "hqconv.backends.a": "from hqconv.backends.b import x",
        "hqconv.backends.b": IN_FUNCTION.format("from hqconv.backends.a import y"),
    }
    assert len(check(circles, files)) == 1
    files["hqconv.backends.b"] = FOR_TYPES.format("from hqconv.backends.a import y")
    assert not check(circles, files)
