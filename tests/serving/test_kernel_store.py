"""A folder of kernels in a server: used where all agrees and somebody vouches for it, and else a reason why not."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub._local_folder import get_local_download_paths

import hqconv
from hqconv.api import warm
from hqconv.serving.warm import kernel_store
from hqconv.serving.warm.kernel_store import MANIFEST, VARIABLE, WarmKernels, folder_beside, use_warm_kernels
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
    """One that may be damaged, beside the artifact `tmp_path / "out"`."""
    return Path(shutil.copytree(warmed, tmp_path / "out-kernels"))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_compiler(monkeypatch, fake_compiler())


def test_a_server_compiles_nothing(
    warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = json.loads((warmed / MANIFEST).read_text())["kernels"]
    with server(monkeypatch, tmp_path / "cache"):
        found = use_warm_kernels(warmed.with_name("out"), 90)
        assert found.reason is None
        assert found.tuning == json.loads((warmed / MANIFEST).read_text())["tuning"] != {}
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
    humming_compiler = importlib.import_module("humming.jit.compiler").Compiler
    look = vars(humming_compiler)["cuh_last_update_time"]
    with server(monkeypatch, tmp_path / "cache", str(warmed)), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: use_warm_kernels(None, 90).reason, range(8))) == [None] * 8
        assert vars(humming_compiler)["cuh_last_update_time"] is look
        before = {path: path.stat().st_ino for path in (tmp_path / "cache").glob("*/kernel.cubin")}
        assert use_warm_kernels(None, 90).reason is None
        assert {path: path.stat().st_ino for path in before} == before


@pytest.mark.parametrize("wanted", ["0", "off"])
def test_nothing_is_used_where_it_is_forbidden(
    wanted: str, warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with server(monkeypatch, tmp_path / "cache", wanted):
        found = use_warm_kernels(warmed.with_name("out"), 90)
    assert found == WarmKernels(f"HQCONV_WARM_KERNELS is {wanted}.", logging.DEBUG)
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
        said = use_warm_kernels(tmp_path / "out", 90).reason
    assert said is not None
    assert re.search(reason, said), said
    assert num_cached(tmp_path / "cache") == 0  # not even the good ones: the folder is not what it was


def test_another_target_than_the_artifacts(
    folder: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with server(monkeypatch, tmp_path / "cache"):
        assert "another target: sm90; here it is sm100" in str(use_warm_kernels(tmp_path / "out", 100).reason)


def test_a_cache_that_cannot_be_written(
    warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with server(monkeypatch, tmp_path / "cache"):
        jit = importlib.import_module("humming.utils.jit")
        monkeypatch.setattr(jit, "get_humming_cache_dir", lambda: str(tmp_path / "file"))
        assert "cannot be used: NotADirectoryError" in str(use_warm_kernels(warmed.with_name("out"), 90).reason)


def test_the_folder_is_beside_or_where_the_environment_says(
    folder: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert folder_beside(Path("/models/m-mxfp4")) == Path("/models/m-mxfp4-kernels")
    folder.rename(tmp_path / "fast")
    (tmp_path / "link").symlink_to("fast")
    for wanted, artifact in (("1", "out"), ("on", "out"), (str(folder), None)):
        with server(monkeypatch, tmp_path / "cache", wanted):
            found = use_warm_kernels(None if artifact is None else tmp_path / artifact, 90)
        assert found == WarmKernels(f"{folder} cannot be read: there is no such folder.", logging.WARNING)
    for name in ("fast", "link"):  # a link, too: the starter says so
        with server(monkeypatch, tmp_path / f"cache-{name}", str(tmp_path / name)):
            assert use_warm_kernels(tmp_path / "out", 90).reason is None


# --- unasked ------------------------------------------------------------------------------------------------


@pytest.fixture
def unasked(compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], WarmKernels]]:
    """Start of a server of `tmp_path / "out"` whose starter said nothing."""
    with server(monkeypatch, tmp_path / "cache", ""):
        yield lambda: use_warm_kernels(tmp_path / "out", 90)


def is_refused(found: WarmKernels, text: str, cache: Path) -> None:
    assert re.search(text, str(found.reason)), found.reason
    assert "HQCONV_WARM_KERNELS=1" in str(found.reason)
    assert (found.level, found.tuning, num_cached(cache)) == (logging.WARNING, {}, 0)


@pytest.mark.parametrize("is_set", [True, False])
def test_ones_own_folder_is_used_unasked(
    folder: Path, unasked: Any, monkeypatch: pytest.MonkeyPatch, is_set: bool, tmp_path: Path
) -> None:
    if not is_set:
        monkeypatch.delenv(VARIABLE)
    assert unasked().reason is None
    assert num_cached(tmp_path / "cache") == len(json.loads((folder / MANIFEST).read_text())["kernels"])


def test_a_read_only_folder_is_as_good(folder: Path, unasked: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    for path in before:
        path.chmod(0o400)
    folder.chmod(0o500)
    try:
        assert unasked().reason is None
        assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    finally:
        folder.chmod(0o700)


def test_no_folder_is_no_reason_for_a_warning(unasked: Any, tmp_path: Path) -> None:
    assert unasked() == WarmKernels(f"{tmp_path}/out-kernels cannot be read: there is no such folder.", logging.INFO)
    found = use_warm_kernels(None, 90)
    assert (found.level, "on the Hub" in str(found.reason)) == (logging.INFO, True)


PARTS: dict[str, Callable[[Path], Path]] = {
    "the folder": lambda folder: folder,
    "the manifest": lambda folder: folder / MANIFEST,
    "a kernel": lambda folder: _one(folder, "cubin"),
    "a source": lambda folder: _one(folder, "cu"),
}


@pytest.mark.parametrize("bits", [0o020, 0o002])
@pytest.mark.parametrize("part", PARTS)
def test_what_others_can_write_is_not_used_unasked(
    folder: Path, unasked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, bits: int
) -> None:
    path = PARTS[part](folder)
    path.chmod(path.stat().st_mode | bits)
    who = "others" if bits == 0o002 else "its group"
    is_refused(unasked(), f"{re.escape(str(path))} can be written by {who}", tmp_path / "cache")
    monkeypatch.setenv(VARIABLE, "1")
    assert unasked().reason is None


@pytest.mark.parametrize("part", PARTS)
def test_what_belongs_to_another_user_is_not_used_unasked(
    folder: Path, unasked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Also by root, whom every file obeys."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    path = PARTS[part](folder)
    os.chown(path, 12345, -1)
    is_refused(unasked(), f"{re.escape(str(path))} belongs to user 12345", tmp_path / "cache")
    monkeypatch.setenv(VARIABLE, "1")
    assert unasked().reason is None


def test_a_server_of_another_user_does_not_use_them(
    folder: Path, unasked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    is_refused(unasked(), f"belongs to user {user}, and this process to user {user + 1}", tmp_path / "cache")


def test_files_of_unknown_users_are_nobodys(
    folder: Path, unasked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container Linux shows files of all users that have no number there as one user's."""
    (tmp_path / "overflowuid").write_text(f"{os.geteuid()}\n")
    monkeypatch.setattr(kernel_store, "_OVERFLOW_USER", tmp_path / "overflowuid")
    is_refused(unasked(), "as files of unknown users do", tmp_path / "cache")


def test_a_link_is_not_followed_unasked(folder: Path, unasked: Any, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to("elsewhere")
    is_refused(unasked(), "is a link", tmp_path / "cache")


@pytest.mark.parametrize("depth", range(2))
def test_a_download_is_not_used_unasked(folder: Path, unasked: Any, tmp_path: Path, depth: int) -> None:
    """`hf download` of somebody's repo with an artifact and kernels in it; the metadata are its library's."""
    root = tmp_path if depth else folder
    metadata = get_local_download_paths(root, (folder / MANIFEST).relative_to(root).as_posix()).metadata_path
    metadata.write_text("")
    is_refused(unasked(), "was downloaded from the Hub", tmp_path / "cache")


def test_a_folder_in_its_place_after_the_check_is_not_read(
    folder: Path, unasked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who can write in the folder above exchanges ours for theirs just after we opened it."""
    theirs, check = tmp_path / "theirs", kernel_store._check_own
    shutil.copytree(folder, theirs)
    for path in theirs.glob("*.cubin"):
        path.write_bytes(b"\x7fELF of somebody else")

    def exchanged(*arguments: Any) -> None:
        check(*arguments)
        if theirs.exists():
            folder.rename(tmp_path / "ours")
            theirs.rename(folder)

    monkeypatch.setattr(kernel_store, "_check_own", exchanged)
    assert unasked().reason is None
    assert not theirs.exists()
    found = {path.read_bytes() for path in (tmp_path / "cache").glob("*/kernel.cubin")}
    assert found == {path.read_bytes() for path in (tmp_path / "ours").glob("*.cubin")}


def test_a_file_in_its_place_after_the_check_is_not_used(
    folder: Path, unasked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes in use are those that were read through the checked descriptor."""
    good = {path.read_bytes() for path in folder.glob("*.cubin")}
    install = kernel_store._install

    def exchanged(*arguments: Any) -> None:
        for path in folder.glob("*.cubin"):
            path.write_bytes(b"\x7fELF of somebody else")
        install(*arguments)

    monkeypatch.setattr(kernel_store, "_install", exchanged)
    assert unasked().reason is None
    assert {path.read_bytes() for path in (tmp_path / "cache").glob("*/kernel.cubin")} == good
