"""Compiled loops on machines where nothing can be kept."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import event
from numba.core.caching import IndexDataCacheFile

import hqconv
from hqconv import jit, precompile
from hqconv.cpu_loops import encoders
from hqconv.jit import CacheFile
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
    words = ["convert", str(model), "-o", str(tmp_path / "out"), "--schema", "int4", "--target", "sm90", "-q"]
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, *words], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "hqconv.json").is_file()


@pytest.mark.parametrize("kind", [CacheFile, IndexDataCacheFile])
def test_two_processes_that_compile_at_once_never_get_each_others_code(kind: type, tmp_path: Path) -> None:
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


def made(code: tuple[int, int, int, int]) -> Any:
    """Return a loop that calls another, both made anew, as in another process."""
    encoders.encoder.cache_clear()
    return encoders.tile_encoder.__wrapped__(code, encoders.E8M0, False)


E2M1, E4M3, E5M2 = (0, 4, 2, 1), (0, 8, 4, 3), (0, 8, 5, 2)


def test_a_loop_that_closes_over_loops_is_found_again() -> None:
    """numba's own key of such a loop has random numbers: every process compiled it again."""

    def key(code: tuple[int, int, int, int]) -> object:
        return made(code)._cache._index_key((), SimpleNamespace(magic_tuple=tuple))

    assert key(E2M1) == key(E2M1)
    assert len({key(code) for code in (E2M1, E4M3, E5M2)}) == 3


def test_loops_of_one_place_and_other_values_have_other_names() -> None:
    """Symbols of the same name are one to the linker: a loop from one process called that of another's code."""
    inner = {code: encoders.encoder(code, encoders.E8M0).py_func.__qualname__ for code in (E2M1, E4M3, E5M2)}
    assert len(set(inner.values())) == 3
    encoders.encoder.cache_clear()
    assert encoders.encoder(E2M1, encoders.E8M0).py_func.__qualname__ == inner[E2M1]


ONE = """
import sys
import numpy as np
from hqconv.cpu_loops import arithmetic, encoders

def encoded(code):
    source = np.arange(64 * 64, dtype=np.uint32).reshape(64, 64).astype(np.uint16) + np.uint16(0x3C00)
    scales, ones = np.ones((2, 64, 2), np.float32), np.ones(64, np.float32)
    groups = (scales[0], np.zeros((1, 1)), scales[1], np.zeros((1, 1), np.float32), ones)
    num_words = 64 * 64 * code[1] // 64
    words, pieces = np.zeros(num_words, np.uint64), np.array([[0, 1, 0, 4, 0, 0, 16 * code[1]]])
    out = (np.zeros(64, np.int64), np.zeros(64), np.zeros(64), np.zeros(0, np.int64))
    encode = encoders.tile_encoder(code, encoders.E8M0, False)
    columns = np.ones(64 * code[1] // 32, np.int32)
    encode(source, np.float32(0), groups, out, 0, 64, columns, (words, pieces))
    return int(words.sum()), out[1].sum()

print([encoded(eval(code)) for code in sys.argv[1:]])
"""


@pytest.mark.full
def test_loops_that_two_processes_compiled_do_not_call_each_other(tmp_path: Path) -> None:
    """Each process counts its symbols from the start, so that both encoders had the same number."""

    def run(folder: str, *codes: tuple[int, ...]) -> list[object]:
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / folder)}
        words = [sys.executable, "-c", ONE, *map(str, codes)]
        done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, check=True)
        return list(ast.literal_eval(done.stdout.replace("np.float64", "")))

    alone = run("alone", E4M3)
    first = run("shared", E2M1)
    for path in [path for path in (tmp_path / "shared").rglob("*.nb?") if ".locals." not in path.name]:
        path.unlink()  # what both call is compiled again, and takes the same numbers
    assert run("shared", E4M3) == alone
    assert run("shared", E2M1, E4M3) == [*first, *alone]


def triple(numbers: Any) -> None:
    """Source of the loops of the tests below."""
    for i in range(numbers.size):
        numbers[i] = np.uint32(numbers[i] * np.uint32(3))


def num_compiled(*, times: int = 1) -> int:
    """How many functions are compiled where a new process calls a loop."""
    with event.install_recorder("numba:compile") as recorder:
        for _ in range(times):
            numbers = np.arange(1000, dtype=np.uint32)
            jit.compiled(triple)(numbers)
            assert numbers.tolist() == [3 * number for number in range(1000)]
    return len(recorder.buffer)


@pytest.fixture
def without_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of compiled loops, empty, of a machine where no user's cache can be kept."""
    monkeypatch.setattr(jit._LoopImpl, "_locator_classes", (jit._Nowhere,))
    monkeypatch.setattr(jit, "COMPILED", tmp_path)
    monkeypatch.setattr(jit, "_output", [])
    monkeypatch.setattr(jit, "_is_cached", [True])
    return tmp_path


def test_loops_that_were_compiled_before_are_found_where_nothing_can_be_kept(
    without_a_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_compiled() > 0
    assert num_compiled() > 0
    assert list(without_a_cache.iterdir()) == []
    jit.compile_into(without_a_cache, jit.HOST)
    assert num_compiled() > 0
    monkeypatch.setattr(jit, "_output", [])
    assert num_compiled(times=2) == 0
    for path in without_a_cache.iterdir():
        path.unlink()
    assert num_compiled() > 0


@pytest.mark.parametrize("what", ["numba", "llvmlite", "python", "source", "other loops", "types", "processor", "name"])
def test_a_compiled_loop_is_never_one_of_something_else(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codegen, signature = SimpleNamespace(magic_tuple=lambda: ("triple", "znver4", "+avx")), (numba.uint32[:],)

    def name(level: str) -> str:
        return jit.compiled(triple)._cache._compiled_name(signature, codegen, level)  # type: ignore[attr-defined]

    levels = (jit.HOST, *jit.LEVELS)
    before = [name(level) for level in levels]
    assert len({*before}) == 3
    assert [name(level) for level in levels] == before
    is_of_host = what == "processor"
    if what in ("numba", "llvmlite"):
        monkeypatch.setattr(getattr(jit, what), "__version__", "0.1")
    elif what == "python":
        monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    elif what == "source":
        monkeypatch.setattr(jit, "_digest_of_file", lambda path: "another")
    elif what == "other loops":
        monkeypatch.setattr(jit, "_digest_of_loops", lambda: "another")
    elif what == "types":
        signature = (numba.uint64[:],)
    elif what == "processor":
        codegen.magic_tuple = lambda: ("triple", "znver4", "+avx,+avx2")
    else:
        monkeypatch.setattr(triple, "__qualname__", "another")
    assert [old == new for old, new in zip(before, map(name, levels), strict=True)] == [False, is_of_host, is_of_host]


def test_levels_are_used_by_processors_that_have_all_their_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(has: frozenset[str], **settings: str) -> tuple[str, ...]:
        monkeypatch.setattr(jit.binding, "get_host_cpu_features", lambda: dict.fromkeys(has, True) | {"sse4a": False})
        for name in ("CPU_NAME", "CPU_FEATURES"):
            monkeypatch.setattr(jit.config, name, settings.get(name))
        jit._levels.cache_clear()
        return jit._levels()

    v4, v3 = jit.LEVELS.values()
    assert found(v4 | {"vaes"}) == ("x86-64-v4", "x86-64-v3")
    assert found(v4 - {"avx512vl"}) == found(v3) == ("x86-64-v3",)
    assert found(v3 - {"bmi2"}) == found(frozenset()) == ()
    assert found(v4, CPU_NAME="znver5") == found(v4, CPU_FEATURES="+avx") == ()
    jit._levels.cache_clear()


def test_a_level_turns_every_other_instruction_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor that a level is tuned for has more of them."""
    has = dict.fromkeys(("avx2", "sse4a", "avx512vbmi"), True)
    monkeypatch.setattr(jit.binding, "get_host_cpu_features", lambda: has)
    features = {level: {*jit.settings_of(level)["NUMBA_CPU_FEATURES"].split(",")} for level in jit.LEVELS}
    for level, instructions in jit.LEVELS.items():
        assert {name[1:] for name in features[level] if name[0] == "+"} == instructions | {"64bit"}
        assert {name for name in features[level] if name[0] == "-"} == {"-sse4a", "-avx512vbmi"}
    assert jit.settings_of(jit.HOST) == {}


ASSEMBLY = """
import numpy as np
from hqconv.cpu_loops.arithmetic import group_ranges
group_ranges(np.ones((2, 256), np.uint16), 128, np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
print(*group_ranges.inspect_asm().values())
"""


@pytest.mark.skipif(not jit._levels(), reason="not an x86-64-v3")
@pytest.mark.parametrize("level", jit.LEVELS)
def test_a_level_has_no_instructions_of_a_higher_one(level: str, tmp_path: Path) -> None:
    """512-bit registers, and 256-bit vectors at all: LLVM's own settings on this machine do not matter."""
    env = {**os.environ, **jit.settings_of(level), "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", ASSEMBLY]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=True)
    assert ("%zmm" in done.stdout) == (level == "x86-64-v4")
    assert "%ymm" in done.stdout


PRECOMPILED = """
import sys
from pathlib import Path
from numba.core import caching, event
caching.CacheImpl._locator_classes = []
from hqconv import jit
jit.COMPILED = Path(sys.argv[1])
if sys.argv[2] == "compile":
    from hqconv.precompile import CASES, compile_cases
    jit.compile_into(jit.COMPILED, jit.HOST)
    compile_cases([0, CASES.index(("bfloat16", {"schema": "mxfp4", "tp": 4}))])
with event.install_recorder("numba:compile") as recorder:
    from hqconv import api
    jit._output.clear()
    done = api.convert(sys.argv[3], sys.argv[4], schema="mxfp4", target="sm90", tp=2, device="cpu")
print(len(recorder.buffer), done.manifest_sha256)
"""


@pytest.mark.full
def test_a_first_conversion_compiles_nothing_after_precompile(tmp_path: Path) -> None:
    """Of another model, and of other sizes: ranks with less than a tile of columns."""
    assert precompile.CASES[0] == ("bfloat16", {"schema": "mxfp4"})
    model = write_qwen3_moe(tmp_path / "model", num_layers=1, num_experts=3)
    (tmp_path / "loops").mkdir()

    def run(step: str) -> list[str]:
        words = [sys.executable, "-c", PRECOMPILED, tmp_path / "loops", step, model, tmp_path / f"out-{step}"]
        return subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=True).stdout.split()

    run("compile")
    assert run("convert") == [
        "0",
        hqconv.convert(model, tmp_path / "out", schema="mxfp4", target="sm90", tp=2).manifest_sha256,
    ]
