"""Plant faults in the product, one at a time, and count the ones that `make test` and `make test-all` find.

    python scripts/plant_faults.py [--num 48] [--seed 1] [--rooms planning,formats] [--jobs 2] [--quick] [--log FILE]
                                   [--checkout FOLDER]

A fault is a small change of one expression: a comparison or a boolean turned round, a sum made a difference, a constant
one larger. Expressions are drawn over all product modules that tests reach without a GPU and without vLLM. For each
fault the tests that import its module run first, then the others of its room, then tests of whole conversions, in the
sample that `make test` runs. Then every fault that the sample missed meets the cases of the same files that `make test`
leaves out, unless `--quick` is given. The script changes copies of the repository, or of another `--checkout`; `--jobs`
of them at a time.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

REPO = Path(__file__).resolve().parents[1]
LEFT_OUT = (
    "verification/kernel",
    "triton",
    "cuda",
    "serving/vllm",
    "fused_moe",
    "__main__",
    "warm/compile_kernels",
    "warm/checkpoint_kernels",
    "warm/no_gpu",
)
ROOM_TESTS = {
    "api.py": ["tests/test_api.py", "tests/cli/test_app.py"],
    "cli": ["tests/cli", "tests/reports"],
    "cpu_loops": [
        "tests/cpu_loops",
        "tests/quantization",
        "tests/kernel_layout",
        "tests/humming_ops",
        "tests/formats",
    ],
    "errors.py": ["tests/test_errors.py", "tests/cli"],
    "jit.py": ["tests/test_jit.py"],
}
CONVERSIONS = [
    "tests/conversion/test_convert.py",
    "tests/conversion/test_golden_artifacts.py",
    "tests/sources/test_formats.py",
    "tests/verification/test_weights.py",
    "tests/verification/test_files.py",
]
LIMIT_S = 240  # of one test; a fault that makes it hang is found

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True)
class Fault:
    """A changed expression: the product file, its line and first byte there, the text before and after."""

    path: str
    line: int
    column: int
    before: str
    after: str


def changed(node: ast.AST) -> ast.expr | None:
    """The expression with the fault in it; None for a node that has none."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in COMPARISONS:
            return ast.Compare(left, [COMPARISONS[type(op)]()], right)
        case ast.BinOp(left=first, op=operator, right=second) if type(operator) in OPERATORS:
            return ast.BinOp(first, OPERATORS[type(operator)](), second)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(test, orelse, body)
    return None


def faults_in(path: Path, root: Path) -> Iterator[Fault]:
    """Every fault that can be planted in the functions of a file, their signatures and f-strings aside."""
    source = path.read_text(encoding="utf-8")
    functions = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef)]
    for function in functions:
        for statement in function.body:
            texts = {
                id(x)
                for text in ast.walk(statement)
                if isinstance(text, ast.JoinedStr)
                for x in ast.walk(text)
            }
            for node in ast.walk(statement):
                if (
                    id(node) in texts
                    or not isinstance(node, ast.expr)
                    or (new := changed(node)) is None
                ):
                    continue
                before = ast.get_source_segment(source, node)
                if before and "\n" not in before:
                    after = f"({ast.unparse(new)})"
                    yield Fault(
                        path.relative_to(root).as_posix(),
                        node.lineno,
                        node.col_offset,
                        before,
                        after,
                    )


def draw(root: Path, num: int, seed: int, rooms: list[str]) -> list[Fault]:
    """`num` faults, a quarter of them in constants, drawn over all files that tests on a CPU can reach."""
    files = [
        x
        for x in sorted((root / "hqconv").rglob("*.py"))
        if not any(y in x.as_posix() for y in LEFT_OUT)
    ]
    files = [x for x in files if not rooms or x.relative_to(root / "hqconv").parts[0] in rooms]
    found = sorted({fault for path in files for fault in faults_in(path, root)}, key=repr)
    constants = [fault for fault in found if fault.before.isdigit()]
    others = [fault for fault in found if not fault.before.isdigit()]
    generator = random.Random(seed)
    return generator.sample(others, min(num - num // 4, len(others))) + generator.sample(
        constants, num // 4
    )


def tests_of(fault: Fault, root: Path) -> list[list[str]]:
    """Test files that run for a fault: those that import its module, the others of its room, those of conversions."""
    room = fault.path.split("/")[1]
    module = fault.path.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in sorted((root / "tests").rglob("test_*.py"))
    }
    near = [x.relative_to(root).as_posix() for x, text in texts.items() if imports.search(text)]
    folders = [x for x in ROOM_TESTS.get(room, [f"tests/{room}"]) if (root / x).exists()]
    own = [
        x.relative_to(root).as_posix()
        for x in texts
        if any(x.is_relative_to(root / y) for y in folders)
    ]
    own = [x for x in own if x not in near]
    return [near, own, [x for x in CONVERSIONS if x not in near and x not in own]]


def is_found(root: Path, tests: list[str], *, is_rest: bool) -> bool:
    """Whether a test of some files fails on the changed copy."""
    environment = {**os.environ, "PYTHONPATH": str(root), "HQCONV_TESTS": "rest" if is_rest else ""}
    limits = ["-o", f"faulthandler_timeout={LIMIT_S}", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *limits, *tests]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, check=False
    ).returncode not in (0, 5)


def is_caught(fault: Fault, root: Path, *, is_rest: bool) -> bool:
    """Whether the tests of `make test`, or with `is_rest` the cases that it leaves out, fail with a fault."""
    path = root / fault.path
    original = path.read_text(encoding="utf-8")
    lines = original.encode().splitlines(keepends=True)
    line, end = lines[fault.line - 1], fault.column + len(fault.before.encode())
    lines[fault.line - 1] = line[: fault.column] + fault.after.encode() + line[end:]
    path.write_bytes(b"".join(lines))
    try:
        return any(
            tests and is_found(root, tests, is_rest=is_rest) for tests in tests_of(fault, root)
        )
    finally:
        path.write_text(original, encoding="utf-8")
        if (
            "numba" in original or "hqconv.jit" in original
        ):  # its callers' cached loops hold the fault
            for cached in [*root.rglob("*.nbi"), *root.rglob("*.nbc")]:
                cached.unlink()


def copy_of(checkout: Path, folder: Path) -> Path:
    """A copy of all files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (checkout / name).is_symlink() or (checkout / name).is_file():
            shutil.copy2(checkout / name, folder / name, follow_symlinks=False)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--checkout", type=Path, default=REPO)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            free.put(copy_of(options.checkout, Path(folder, str(number), "repo")))
        root = Path(folder, "0", "repo")
        drawn = draw(root, options.num, options.seed, [x for x in options.rooms.split(",") if x])
        found_by: dict[Fault, str] = dict.fromkeys(drawn, "none")

        def look(fault: Fault, suite: str) -> None:
            begun, copy = time.monotonic(), free.get()
            try:
                if is_caught(fault, copy, is_rest=suite == "all"):
                    found_by[fault] = suite
            finally:
                free.put(copy)
            where = f"{fault.path}:{fault.line}  {fault.before} -> {fault.after}"
            print(
                f"{suite:5} {found_by[fault]:5} {time.monotonic() - begun:5.0f} s  {where}",
                flush=True,
            )

        for suite in ("quick",) if options.quick else ("quick", "all"):
            list(
                pool.map(
                    partial(look, suite=suite), [x for x, by in found_by.items() if by == "none"]
                )
            )
            if options.log:
                results = [{**asdict(x), "found_by": by} for x, by in found_by.items()]
                options.log.write_text(json.dumps(results, indent=1), encoding="utf-8")
    num_quick, num_all = (list(found_by.values()).count(suite) for suite in ("quick", "all"))
    print(
        f"{len(found_by)} faults: {num_quick + num_all} found by make test-all, {num_quick} of them by make test"
    )


if __name__ == "__main__":
    main()
