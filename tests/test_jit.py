"""Compiled loops on machines where nothing can be kept."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile

from hqconv.cpu_loops import encoders
from hqconv.jit import CacheFile
from hqconv.schemas.tensors import CodeType, parse_code_type
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

# What numba finds where neither the installation nor a home can be written.
READ_ONLY = """
import sys
from numba.core import caching
caching.CacheImpl._locator_classes = []
sys.argv = ["hqconv", *sys.argv[1:]]
from hqconv.cli.app import main
main()
"""


@pytest.mark.full
def test_a_read_only_home_and_installation(tmp_path: Path) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=1, num_experts=2)
    words = [
        "convert",
        str(model),
        "-o",
        str(tmp_path / "out"),
        "--schema=int4",
        "--target=sm90",
        "-q",
    ]
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "hqconv.json").is_file()


@pytest.mark.parametrize("kind", [CacheFile, IndexDataCacheFile])
def test_two_processes_that_compile_at_once_never_get_each_others_code(
    kind: type, tmp_path: Path
) -> None:
    """The second begins when the first has written its index, and ends before the first writes its data."""
    first, second = (kind(str(tmp_path), "loop", "stamp") for _ in range(2))
    second._load_index = dict  # it had looked before the first wrote
    write = first._save_data

    def late(name: str, data: str) -> None:
        second.save("float32", "code for float32")
        write(name, data)

    first._save_data = late
    first.save("uint16", "code for uint16")
    found = {key: kind(str(tmp_path), "loop", "stamp").load(key) for key in ("uint16", "float32")}
    is_right = all(code in (None, f"code for {key}") for key, code in found.items())
    assert is_right == (kind is CacheFile)  # numba's own mixes them up
    assert kind(str(tmp_path), "loop", "another stamp").load("float32") is None


def test_every_loop_has_such_a_cache() -> None:
    loops = [value for value in vars(encoders).values() if hasattr(value, "py_func")]
    assert len(loops) > 3
    assert all(isinstance(loop._cache._cache_file, CacheFile) for loop in loops)


def made(code: CodeType) -> Any:
    """Return a loop that calls another, both made anew, as in another process."""
    return encoders.searcher.__wrapped__(code).score


E2M1, E4M3, E5M2 = (parse_code_type(name) for name in ("float4e2m1", "float8e4m3", "float8e5m2"))


def test_a_loop_that_closes_over_loops_is_found_again() -> None:
    """numba's own key of such a loop has random numbers: every process compiled it again."""

    def key(code: CodeType) -> object:
        return made(code)._cache._index_key((), SimpleNamespace(magic_tuple=tuple))

    assert key(E2M1) == key(E2M1)
    assert len({key(code) for code in (E2M1, E4M3, E5M2)}) == 3


def test_loops_of_one_place_and_other_values_have_other_names() -> None:
    """Symbols of the same name are one to the linker: a loop from one process called that of another's code."""
    inner = {code: encoders.encoder(code).py_func.__qualname__ for code in (E2M1, E4M3, E5M2)}
    assert len(set(inner.values())) == 3
    encoders.encoder.cache_clear()
    assert encoders.encoder(E2M1).py_func.__qualname__ == inner[E2M1]


ONE = """
import sys
import numpy as np
from hqconv.cpu_loops import encoders
from hqconv.schemas.tensors import parse_code_type

def errors(name):
    code = parse_code_type(name)
    source = np.arange(64 * 64, dtype=np.uint32).reshape(64, 64).astype(np.uint16) + np.uint16(0x3C00)
    scales = np.ones((64, 2), np.float32)
    groups = encoders.GroupArrays(scales, np.zeros((64, 2)), scales, scales * 0, np.ones(64, np.float32))
    found = np.empty((64, 2))
    encoders.searcher(code).score(source, np.float32(0), groups, found)
    return found.sum()

print([errors(name) for name in sys.argv[1:]])
"""


@pytest.mark.full
def test_loops_that_two_processes_compiled_do_not_call_each_other(tmp_path: Path) -> None:
    """Each process counts its symbols from the start, so that both encoders had the same number."""

    def run(folder: str, *names: str) -> list[object]:
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / folder)}
        words = [sys.executable, "-c", ONE, *names]
        done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, check=True)
        return list(ast.literal_eval(done.stdout.replace("np.float64", "")))

    alone = run("alone", "float8e4m3")
    first = run("shared", "float4e2m1")
    for path in [
        path for path in (tmp_path / "shared").rglob("*.nb?") if ".locals." not in path.name
    ]:
        path.unlink()  # what both call is compiled again, and takes the same numbers
    assert run("shared", "float8e4m3") == alone
    assert run("shared", "float4e2m1", "float8e4m3") == [*first, *alone]
