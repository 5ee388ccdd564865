"""A folder of kernels in a server: used where all agrees and the starter asked for it, and else a reason why not."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.api import warm
from hqconv.serving.warm.kernel_store import MANIFEST, VARIABLE, kernels_folder, use_warm_kernels
from tests.make.kernels import fake_compiler, num_cached, server, use_compiler
from tests.make.qwen import write_qwen3_moe


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("served")
    source = write_qwen3_moe(work / "source", hidden_size=256, intermediate_size=256)
    hqconv.convert(source, work / "out", schema="int4-g128", target="sm90", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        use_compiler(patch, fake_compiler())
        warm(work / "out", gpu="h200")
    return work / "out-kernels"


@pytest.fixture
def folder(warmed: Path, tmp_path: Path) -> Path:
    """One that may be damaged."""
    return Path(shutil.copytree(warmed, tmp_path / "kernels"))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_compiler(monkeypatch, fake_compiler())


def test_a_server_compiles_nothing(
    warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = json.loads((warmed / MANIFEST).read_text())["kernels"]
    with server(monkeypatch, tmp_path / "cache"):
        assert use_warm_kernels(warmed, 90) is None
        assert num_cached(tmp_path / "cache") == len(words)
        for name, entry in words.items():  # as Humming's `KernelRuntime.prepare` asks
            found = compiler.compile(
                (warmed / f"{name}.cu").read_text(),
                sm_version=entry["architecture"],
                kernel_expr=entry["expression"],
                disable_fast_math=entry["without_fast_math"],
                postprocess_cubin=lambda path: None,
            )
            assert Path(found).read_bytes() == (warmed / f"{name}.cubin").read_bytes()
    assert compiler.num_compiled == 0


def test_several_processes_at_once_and_again(
    warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with server(monkeypatch, tmp_path / "cache"), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: use_warm_kernels(warmed, 90), range(8))) == [None] * 8
        before = {path: path.stat().st_ino for path in (tmp_path / "cache").glob("*/kernel.cubin")}
        assert use_warm_kernels(warmed, 90) is None
        assert {path: path.stat().st_ino for path in before} == before


@pytest.mark.parametrize("wanted", ["", "0", "off"])
def test_nothing_is_used_unasked(
    wanted: str, warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with server(monkeypatch, tmp_path / "cache", wanted):
        assert use_warm_kernels(warmed, 90) == "HQCONV_WARM_KERNELS is not set."
    assert num_cached(tmp_path / "cache") == 0


def _edit(folder: Path, **words: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | words))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _name(folder: Path, name: str) -> None:
    kernels = json.loads((folder / MANIFEST).read_text())["kernels"]
    _edit(folder, kernels=kernels | {name: next(iter(kernels.values()))})


def _one(folder: Path, kind: str) -> Path:
    return sorted(folder.glob(f"*.{kind}"))[-1]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "cannot be read"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "cannot be read"),
    "no JSON": (lambda f: (f / MANIFEST).write_text("{"), "damaged"),
    "no object": (lambda f: (f / MANIFEST).write_text("[]"), "format version"),
    "deep": (lambda f: (f / MANIFEST).write_text("[" * 100_000), "damaged"),
    "another version": (lambda f: _edit(f, format_version=2), "format version 2"),
    "no list": (lambda f: _edit(f, kernels=3), "lists no kernels"),
    "no entry": (lambda f: _edit(f, kernels={"0" * 64: None}), "is no kernel"),
    "another Humming": (lambda f: _edit(f, humming_kernels_version="0.2.0"), "another version of humming-kernels"),
    "other headers": (lambda f: _edit(f, headers_sha256="0"), "another digest of Humming's headers"),
    "other flags": (lambda f: _edit(f, flags=[]), "another compiler flags"),
    "another compiler": (lambda f: _edit(f, compiler="FakeCompiler fake+12.9"), r"another CUDA compiler.*12\.9.*13\.0"),
    "another target": (lambda f: _edit(f, target="sm120"), "another target"),
    "a name that leads elsewhere": (lambda f: _name(f, "../../x"), "is no kernel"),
    "a bit of a kernel": (lambda f: _flip(_one(f, "cubin")), "not the file"),
    "a bit of a source": (lambda f: _flip(_one(f, "cu")), "not the source"),
    "a kernel cut off": (lambda f: os.truncate(_one(f, "cubin"), 3), "not the file"),
    "a kernel gone": (lambda f: _one(f, "cubin").unlink(), "cannot be read"),
    "a link": (lambda f: _link(_one(f, "cubin")), "cannot be read"),
    "a pipe": (lambda f: (_one(f, "cu").unlink(), os.mkfifo(_one(f, "cubin").with_suffix(".cu"))), "no file of"),
    "no text": (lambda f: _one(f, "cu").write_bytes(b"\xff"), "damaged"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_or_foreign_folders(
    case: str, folder: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damage, reason = DAMAGES[case]
    damage(folder)
    with server(monkeypatch, tmp_path / "cache"):
        said = use_warm_kernels(folder, 90)
    assert said is not None
    assert re.search(reason, said), said
    assert num_cached(tmp_path / "cache") == 0  # not even the good ones: the folder is not what it was


def test_another_target_than_the_artifacts(
    folder: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with server(monkeypatch, tmp_path / "cache"):
        assert "another target: sm90; here it is sm100" in str(use_warm_kernels(folder, 100))


def test_a_cache_that_cannot_be_written(
    warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with server(monkeypatch, tmp_path / "cache"):
        jit = importlib.import_module("humming.utils.jit")
        monkeypatch.setattr(jit, "get_humming_cache_dir", lambda: str(tmp_path / "file"))
        assert "cannot be used: NotADirectoryError" in str(use_warm_kernels(warmed, 90))


def test_the_folder_is_beside_or_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", "1", "on"):
        monkeypatch.setenv(VARIABLE, value)
        assert kernels_folder(Path("/models/m-mxfp4")) == Path("/models/m-mxfp4-kernels")
    monkeypatch.setenv(VARIABLE, "/fast/kernels")
    assert kernels_folder(Path("/models/m-mxfp4")) == Path("/fast/kernels")
