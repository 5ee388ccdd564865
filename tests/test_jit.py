"""Compiled loops on machines where nothing can be kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from numba.core.caching import IndexDataCacheFile

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


def test_a_loop_that_closes_over_loops_is_found_again() -> None:
    """numba's own key of such a loop has random numbers: every process compiled it again."""

    def key(code: tuple[int, int, int, int]) -> object:
        encoders.encoder.cache_clear()
        made = encoders.tile_encoder.__wrapped__(code, encoders.E8M0, False)  # anew, as in another process
        return made._cache._index_key((), SimpleNamespace(magic_tuple=tuple))

    e2m1, e4m3, e5m2 = (0, 4, 2, 1), (0, 8, 4, 3), (0, 8, 5, 2)
    assert key(e2m1) == key(e2m1)
    assert len({key(code) for code in (e2m1, e4m3, e5m2)}) == 3
