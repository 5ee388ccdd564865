"""The rules of ARCHITECTURE.md, checked on the syntax trees of hqconv/**/*.py and on what importing loads."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.make.places import REPO

# The rooms and their floors. A room may import from rooms on lower floors and from itself, wherever the import stands.
FLOORS = {
    "version": -1,
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
    "calibration": 7,
    "planning": 8,
    "artifact": 9,
    "sources": 10,
    "gguf": 11,
    "conversion": 11,
    "verification": 12,
    "checkup": 13,
    "evaluation": 13,
    "reports": 13,
    "serving": 14,
    "warm": 15,
    "api": 16,
    "cli": 17,
    "__main__": 18,
}
# Rooms that no other room imports but `api` and `cli`, in functions. A server loads the kernel store by its name, and
# sources are opened by a table.
WINGS = ("checkup", "gguf", "warm")
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
    "hqconv.gguf.reference": (
        "hqconv.gguf.header",
        "hqconv.models.source_protocol",  # the interface alone
        "hqconv.schemas",
    ),
    # Formulas of activations; what is judged, a kernel, has its own.
    "hqconv.verification.reference": (
        "hqconv.schemas.activation",
        "hqconv.calibration.activations",
    ),
}
# Libraries that only some modules may import at all.
ONLY_IN = {
    "humming": ("hqconv.humming_ops", "hqconv.kernel_layout", "hqconv.serving.vllm.tuning"),
    "numba": ("hqconv.jit", "hqconv.cpu_loops.codes"),
    "huggingface_hub": ("hqconv.io.hub",),
    "vllm": (
        "hqconv.serving.vllm.config",
        "hqconv.serving.vllm.moe_method",
        "hqconv.serving.vllm.plugin",
        "hqconv.serving.vllm.tuning",
        "hqconv.warm.no_gpu",
        "hqconv.warm.checkpoint_kernels",
    ),
    "gguf": ("hqconv.gguf.header",),
    "bitsandbytes": ("hqconv.formats.bitsandbytes",),
    "re2": ("hqconv.formats.quant_config",),
    "typer": tuple(f"hqconv.cli.{name}" for name in ("app", "command", "output")),
    "rich": tuple(f"hqconv.cli.{name}" for name in ("render", "progress_bar")),
}
# The two seams: words that name the kernel library's config and the engine, and the modules that may use them in code
# (identifiers and strings; docstrings and comments aside).
SEAMS = {
    "layerconfig": ("hqconv.kernel_layout",),
    "vllm": (
        "hqconv.serving.vllm",
        "hqconv.schemas.engine",  # facts of the engine, as data
        "hqconv.warm",  # what the engine requests of the kernel library
    ),
}
# Public words that contain one of them: keys of JSON documents, and a name in config.json.
PUBLIC_WORDS = {
    *("vllm_obstacles", "stock_vllm", "stock_vllm_obstacle", "stock_vllm_param_dtypes"),
    "serve-with-vllm-and-hqconv.safetensors",
}
# What can be imported without torch, numba, numpy or Humming: everything that only looks at names and headers.
LIGHT = (
    *(
        "hqconv.api",
        "hqconv.cli.app",
        "hqconv.schemas",
        "hqconv.io",
        "hqconv.planning",
        "hqconv.reports",
    ),
    *("hqconv.models", "hqconv.kernel_layout.compatibility"),
    "hqconv.kernel_layout.kernel_sources",
    "hqconv.formats",
    *("hqconv.gguf.header", "hqconv.gguf.source", "hqconv.sources", "hqconv.artifact.reader"),
    *("hqconv.serving.artifact_view", "hqconv.serving.server_compatibility"),
    *("hqconv.artifact.rank_file", "hqconv.serving.vllm.translation"),
    *(
        "hqconv.serving.vllm.plugin",
        "hqconv.serving.vllm.tuning",
        "hqconv.serving.vllm.translation",
    ),
    *("hqconv.warm.gpus", "hqconv.warm.kernel_store"),
    *("hqconv.conversion.option_values", "hqconv.conversion.stages"),
    "hqconv.conversion.resources",
)
HEAVY = ("torch", "numpy", "numba", "humming", "transformers", "huggingface_hub")
# Modules of a server's process, and rooms that stay out of it, also in functions.
SERVER = ("hqconv.serving", "hqconv.warm.kernel_store")
NOT_IN_A_SERVER = (
    *("cpu_loops", "quantization", "formats", "planning", "models", "sources"),
    *("conversion", "verification", "reports", "api", "cli"),
)
Imports = dict[str, set[tuple[str, str]]]  # module → (imported module, when: load, call or types)


# --- what modules import -----------------------------------------------------------------------------------


def is_in(module: str, entry: str) -> bool:
    return module == entry or module.startswith(entry + ".")


def any_in(module: str, entries: Iterable[str]) -> bool:
    return any(is_in(module, entry) for entry in entries)


def sources_of(root: Path) -> dict[str, str]:
    """Texts by module name; a package's ends with a dot here, for relative imports."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        *above, name = path.relative_to(REPO).with_suffix("").parts
        found[".".join([*above, "" if name == "__init__" else name])] = path.read_text(
            encoding="utf-8"
        )
    return found


def imports_of(sources: Mapping[str, str]) -> Imports:
    modules = {name.rstrip(".") for name in sources}
    return {
        name.rstrip("."): set(_walk(ast.parse(text), "load", name, modules))
        for name, text in sources.items()
    }


@functools.cache
def imports_of_package() -> Imports:
    return imports_of(sources_of(REPO / "hqconv"))


def _walk(node: ast.AST, when: str, name: str, modules: set[str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, when) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = name.split(".")[: -node.level] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        yield from (
            (one if (one := f"{base}.{alias.name}") in modules else base, when)
            for alias in node.names
        )
    elif isinstance(node, ast.Call) and re.search(
        r"\b(import_module|__import__)$", ast.unparse(node.func)
    ):
        yield ast.unparse(node.args[0]).strip("'"), when
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in ast.iter_child_nodes(node):
        yield from _walk(
            child, "types" if is_for_types else "call" if is_function else when, name, modules
        )


# --- the rules: imports in, sentences about what is wrong out ------------------------------------------------


def room_of(module: str) -> str:
    """`planning` of `hqconv.planning.plan`, "" of `hqconv`."""
    return module.split(".")[1] if "." in module else ""


def wrong_direction(found: Imports) -> list[str]:
    """Imports of a room that is not on a lower floor, or of the package itself, which may load its version alone."""
    return [
        f"{name} imports {target}"
        for name, items in found.items()
        for target, when in items
        if is_in(target, "hqconv")
        if room_of(name) != room_of(target) and (room_of(name) or when == "load")
        if not room_of(target) or FLOORS[room_of(target)] >= FLOORS.get(room_of(name), 0)
    ]


def imports_of_wings(found: Imports) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, items in found.items()
        for target, when in items
        if is_in(target, "hqconv") and room_of(target) in WINGS
        if room_of(name) != room_of(target)
        if room_of(name) not in ("api", "cli") or when == "load"
    ]


def forbidden_libraries(found: Imports) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, items in found.items()
        for target, _ in items
        for library, allowed in ONLY_IN.items()
        if is_in(target, library) and not any_in(name, allowed)
    ]


def shared_with_the_judged(found: Imports) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, items in found.items()
        for judge, allowed in INDEPENDENT.items()
        for target, _ in items
        if is_in(name, judge) and is_in(target, "hqconv") and not any_in(target, (judge, *allowed))
    ]


def circles(found: Imports) -> list[str]:
    """A circle of imports, types aside. What the package offers is imported when it is first asked for."""
    graph = {
        name: {
            target
            for target, when in items
            if when != "types" and target in found and target != name
        }
        for name, items in found.items()
        if name != "hqconv"
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def too_much_for_a_server(found: Imports) -> list[str]:
    """Ways from the plugin's modules to rooms that a server has no use for, also in functions."""
    ways = {name: name for name in found if any_in(name, SERVER)}
    queue = list(ways)
    for name in queue:  # grows on the way
        for target, when in found[name]:
            if when != "types" and target in found and target not in ways:
                ways[target] = f"{ways[name]} -> {target}"
                queue.append(target)
    return [way for name, way in ways.items() if room_of(name) in NOT_IN_A_SERVER]


def beyond_the_seams(sources: Mapping[str, str]) -> list[str]:
    """Identifiers and texts, docstrings aside, that name the engine or the kernel library's config elsewhere."""
    wrong = []
    for name, text in sources.items():
        tree = ast.parse(text)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) in docstrings:
                continue
            words = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
            wrong += [
                f"{name} names {word!r}"
                for word in words
                for seam, allowed in SEAMS.items()
                if seam in word.lower()
                and word not in PUBLIC_WORDS
                and not any_in(name.rstrip("."), allowed)
            ]
    return wrong


RULES = (
    wrong_direction,
    imports_of_wings,
    forbidden_libraries,
    shared_with_the_judged,
    circles,
    too_much_for_a_server,
)


@pytest.mark.parametrize("rule", RULES)
def test_imports(rule: Callable[[Imports], list[str]]) -> None:
    assert rule(imports_of_package()) == []


def test_the_seams_hold() -> None:
    assert beyond_the_seams(sources_of(REPO / "hqconv")) == []


def test_every_room_has_a_floor_and_tests() -> None:
    rooms = {room_of(name) for name in imports_of_package()} - {""}
    assert rooms == FLOORS.keys()
    folders = {
        path.name
        for path in (REPO / "tests").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert folders == {room for room in rooms if (REPO / "hqconv" / room).is_dir()} | {
        "make",
        "golden",
        "scripts",
        "data",
    }


def test_tests_share_what_is_in_make() -> None:
    found = imports_of(sources_of(REPO / "tests"))
    shared = [
        (n, t) for n, items in found.items() for t, _ in items if is_in(t, "tests") and t != "tests"
    ]
    assert [(name, target) for name, target in shared if not is_in(target, "tests.make")] == []


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n")[-2].split())


def test_a_program_runs_when_its_module_is_whole() -> None:
    """`if __name__ == "__main__"` is a module's last statement: functions behind it would not be there yet."""
    early = [
        str(path)
        for folder in ("hqconv", "scripts")
        for path in (REPO / folder).rglob("*.py")
        for statement in ast.parse(path.read_text()).body[:-1]
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
    ]
    assert early == []


def test_what_looks_at_headers_loads_nothing_heavy() -> None:
    modules = [name.rstrip(".") for name in sources_of(REPO / "hqconv")]
    assert all(any(is_in(name, entry) for name in modules) for entry in LIGHT)
    light = [f"import {name}" for name in modules if any_in(name, LIGHT)]
    asked = "import hqconv\nhqconv.convert, hqconv.load\nsys.argv = ['hqconv', 'convert', '--help']"
    shown = "from hqconv.cli.app import main\ntry:\n    main()\nexcept SystemExit:\n    pass"
    assert loaded_by("\n".join(["import sys", *light, asked, shown])) == set()
