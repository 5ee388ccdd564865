"""A folder of kernels in a server: used where all agrees and somebody vouches for it, and else a reason why not."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hqconv
from hqconv.warm import kernel_store
from hqconv.warm.compile_kernels import warm
from hqconv.warm.kernel_store import MANIFEST, VARIABLE, folder_beside
from tests.make.damage import flip
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


class Start(NamedTuple):
    """A server's start. reason: why no kernels are used, by its log."""

    reason: str | None
    level: int
    tuning: Mapping[str, Any]


def start(artifact: Path | None) -> Start:
    log, lines = logging.Logger("server"), list[logging.LogRecord]()
    log.addHandler(handler := logging.Handler())
    handler.emit = lines.append  # type: ignore[assignment, method-assign]
    tuning = kernel_store.install(artifact, 90, log)
    (line,) = lines
    reason = line.getMessage().partition("Kernels are compiled as they are needed: ")[2]
    return Start(reason or None, line.levelno, tuning)


def listed(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_text())["kernels"])


def test_a_server_compiles_nothing(
    warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernels = listed(warmed)
    with server(monkeypatch, tmp_path / "cache"):
        found = start(warmed.with_name("out"))
        assert found.reason is None
        assert found.tuning == json.loads((warmed / MANIFEST).read_text())["tuning"] != {}
        assert num_cached(tmp_path / "cache") == len(kernels)
        for name, entry in kernels.items():  # as Humming's `KernelRuntime.prepare` asks
            path = compiler.compile(
                (warmed / f"{name}.cu").read_text(),
                sm_version=entry["architecture"],
                kernel_expr=entry["expression"],
                disable_fast_math=entry["without_fast_math"],
                postprocess_cubin=lambda path: None,
            )
            assert Path(path).read_bytes() == (warmed / f"{name}.cubin").read_bytes()
    assert compiler.num_compiled == 0


def test_several_processes_at_once_and_again(
    warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    humming_compiler = importlib.import_module("humming.jit.compiler").Compiler
    look = vars(humming_compiler)["cuh_last_update_time"]
    with server(monkeypatch, tmp_path / "cache", str(warmed)), ThreadPoolExecutor(4) as pool:
        assert [found.reason for found in pool.map(start, [None] * 8)] == [None] * 8
        assert vars(humming_compiler)["cuh_last_update_time"] is look
        before = {path: path.stat().st_ino for path in (tmp_path / "cache").glob("*/kernel.cubin")}
        assert start(None).reason is None
        assert {path: path.stat().st_ino for path in before} == before


@pytest.mark.parametrize("value", ["0", "off"])
def test_nothing_is_used_where_it_is_forbidden(
    value: str, warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with server(monkeypatch, tmp_path / "cache", value):
        found = start(warmed.with_name("out"))
    assert found == (f"HQCONV_WARM_KERNELS is {value}.", logging.INFO, {})
    assert num_cached(tmp_path / "cache") == 0


def _edit(folder: Path, **entries: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def _name(folder: Path, name: str) -> None:
    kernels = listed(folder)
    _edit(folder, kernels=kernels | {name: next(iter(kernels.values()))})


def _last(folder: Path, kind: str) -> Path:
    return sorted(folder.glob(f"*.{kind}"))[-1]


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "cannot be read"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "cannot be read"),
    "deep": (lambda f: (f / MANIFEST).write_text("[" * 100_000), "damaged"),
    "no list": (lambda f: _edit(f, kernels=3), "lists no kernels"),
    "no entry": (lambda f: _edit(f, kernels={"0" * 64: None}), "is no kernel"),
    "another Humming": (
        lambda f: _edit(f, humming_kernels_version="0.2.0"),
        "another version of humming-kernels",
    ),
    "other headers": (
        lambda f: _edit(f, headers_sha256="0"),
        "another digest of Humming's headers",
    ),
    "another compiler": (
        lambda f: _edit(f, compiler="FakeCompiler fake+12.9"),
        r"another CUDA compiler.*12\.9.*13\.0",
    ),
    "another target": (lambda f: _edit(f, target="sm120"), "another target"),
    "a name that leads elsewhere": (lambda f: _name(f, "../../x"), "is no kernel"),
    "a bit of a kernel": (lambda f: flip(_last(f, "cubin")), "not the file"),
    "a bit of a source": (lambda f: flip(_last(f, "cu")), "not the source"),
    "a kernel cut off": (lambda f: os.truncate(_last(f, "cubin"), 3), "not the file"),
    "a pipe": (
        lambda f: (_last(f, "cu").unlink(), os.mkfifo(_last(f, "cubin").with_suffix(".cu"))),
        "not a regular file",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_or_foreign_folders(
    case: str, folder: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damage, reason = DAMAGES[case]
    damage(folder)
    with server(monkeypatch, tmp_path / "cache"):
        found = start(tmp_path / "out").reason
    assert found is not None
    assert re.search(reason, found), found
    # not even the good ones: the folder is not what it was
    assert num_cached(tmp_path / "cache") == 0


def test_a_cache_that_cannot_be_written(
    warmed: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with server(monkeypatch, tmp_path / "cache"):
        jit = importlib.import_module("humming.utils.jit")
        monkeypatch.setattr(jit, "get_humming_cache_dir", lambda: str(tmp_path / "file"))
        found = start(warmed.with_name("out")).reason
        assert "cannot be used: NotADirectoryError" in str(found)


def test_the_folder_is_beside_or_where_the_environment_says(
    folder: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert folder_beside(Path("/models/m-mxfp4")) == Path("/models/m-mxfp4-kernels")
    folder.rename(tmp_path / "fast")
    (tmp_path / "link").symlink_to("fast")
    for value, artifact in (("1", "out"), ("on", "out"), (str(folder), None)):
        with server(monkeypatch, tmp_path / "cache", value):
            found = start(None if artifact is None else tmp_path / artifact)
        assert found == (f"{folder} cannot be read: there is no such folder.", logging.WARNING, {})
    for name in ("fast", "link"):  # a link, too: the starter says so
        with server(monkeypatch, tmp_path / f"cache-{name}", str(tmp_path / name)):
            assert start(tmp_path / "out").reason is None


# --- unasked ------------------------------------------------------------------------------------------------


@pytest.fixture
def unasked(
    compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[], Start]]:
    """Start of a server of `tmp_path / "out"` whose starter said nothing."""
    with server(monkeypatch, tmp_path / "cache", ""):
        yield lambda: start(tmp_path / "out")


def is_refused(found: Start, text: str, cache: Path) -> None:
    assert re.search(text, str(found.reason)), found.reason
    assert "HQCONV_WARM_KERNELS=1" in str(found.reason)
    assert (found.level, found.tuning, num_cached(cache)) == (logging.WARNING, {}, 0)


def test_no_folder_is_no_reason_for_a_warning(unasked: Any, tmp_path: Path) -> None:
    reason = f"{tmp_path}/out-kernels cannot be read: there is no such folder."
    assert unasked() == (reason, logging.INFO, {})
    found = start(None)
    assert (found.level, "on the Hub" in str(found.reason)) == (logging.INFO, True)


def key() -> Path:
    return Path(os.environ["XDG_CONFIG_HOME"]) / "hqconv/warm.key"


@pytest.fixture
def other_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The config folder of somebody without a key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def _resign(folder: Path) -> None:
    """Somebody else's `hqconv warm` made the folder."""
    here = key()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder.parent / "strangers"))
        kernel_store.make_key()
        assert key().read_bytes() != here.read_bytes()
        document = kernel_store.signed(json.loads((folder / MANIFEST).read_text()))
    (folder / MANIFEST).write_text(json.dumps(document))


def _sum_anew(folder: Path) -> None:
    """A kernel is exchanged, and its digest in the manifest is the new one's."""
    path, kernels = _last(folder, "cubin"), listed(folder)
    path.write_bytes(b"\x7fELF of somebody else")
    kernels[path.stem]["cubin_sha256"] = sha256(path.read_bytes()).hexdigest()
    _edit(folder, kernels=kernels)


STRANGE: dict[str, Callable[[Path], object]] = {
    "somebody else's": _resign,
    "a signature of another kind": lambda f: _edit(f, hmac_sha256=["é"]),
    "a signature that is no ASCII": lambda f: _edit(f, hmac_sha256="é" * 64),
    "another kernel": _sum_anew,
    "one key more": lambda f: _edit(f, more=1),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_this_user_did_not_make_is_not_used_unasked(
    case: str, folder: Path, unasked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns the files: `git clone`, `tar x` and `cp -r` give them to this user."""
    STRANGE[case](folder)
    is_refused(
        unasked(),
        f"`hqconv warm` of this user did not make {re.escape(str(folder))}",
        tmp_path / "cache",
    )
    monkeypatch.setenv(VARIABLE, "1")
    assert unasked().reason is None


@pytest.mark.parametrize("mode", [0o444, 0o666])
def test_ones_own_folder_is_used_wherever_it_lies(
    mode: int, folder: Path, unasked: Any, tmp_path: Path
) -> None:
    """Through a link, read-only, on a network disk that shows others' owners and modes, copied, or unpacked."""
    for path in folder.iterdir():
        path.chmod(mode)
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to("elsewhere")
    assert unasked().reason is None
    assert num_cached(tmp_path / "cache") == len(listed(folder))


def _linked(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


KEYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (Path.unlink, "cannot be read: No such file"),
    "a link": (_linked, "cannot be read"),
    "a pipe": (_pipe, "is not used: expected 32 bytes"),
    "a folder": (_folder, "cannot be read: Is a directory"),
    "the group reads it": (lambda p: p.chmod(0o640), "with mode 640"),
    "short": (lambda p: os.truncate(p, 31), "found 31 of user"),
    "another user's": (lambda p: os.chown(p, 12345, -1), "of user 12345"),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_others_know_or_made(
    case: str, folder: Path, unasked: Any, tmp_path: Path
) -> None:
    if case == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    spoil, reason = KEYS[case]
    saved = key().read_bytes()
    try:
        spoil(key())
        is_refused(unasked(), reason, tmp_path / "cache")
        if case != "none":
            with pytest.raises(kernel_store.UnusableError, match=reason):
                kernel_store.signed({})
    finally:
        shutil.rmtree(key().parent)
        key().parent.mkdir()
        key().touch(0o600)
        key().write_bytes(saved)


def test_a_user_without_home(
    unasked: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError

    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # which the standard says to ignore
    monkeypatch.setattr(Path, "home", nowhere)
    is_refused(unasked(), "has no home folder", tmp_path / "cache")


def test_processes_make_one_key(other_home: Path) -> None:
    mask = os.umask(0o077)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: kernel_store.make_key(), range(32)))
    finally:
        os.umask(mask)
    assert [path.name for path in (other_home / "hqconv").iterdir()] == ["warm.key"]
    status = key().stat()
    assert (status.st_mode & 0o7777, status.st_size, status.st_nlink) == (0o600, 32, 1)
    before = key().read_bytes()
    kernel_store.make_key()
    assert key().read_bytes() == before


def test_no_key_in_the_home_of_others(other_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo` may keep HOME."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(kernel_store.UnusableError, match="belongs to another user"):
        kernel_store.make_key()
    assert not other_home.exists()


def test_warm_keeps_no_kernels_of_strangers(
    folder: Path, compiler: Any, warmed: Path, tmp_path: Path
) -> None:
    """It would sign them."""
    num = len(listed(folder))
    assert warm(warmed.with_name("out"), gpu="h200", kernels=folder)["num_compiled"] == 0
    (folder / f"{'0' * 64}.cubin").touch()
    _sum_anew(folder)
    assert warm(warmed.with_name("out"), gpu="h200", kernels=folder)["num_compiled"] == num
    assert not [
        path for path in folder.iterdir() if path.read_bytes() == b"\x7fELF of somebody else"
    ]
    assert len(list(folder.iterdir())) == 2 * num + 1
    kernel_store.check_signature(folder, json.loads((folder / MANIFEST).read_text()))


def test_warm_without_a_key_says_so(
    folder: Path,
    compiler: Any,
    warmed: Path,
    other_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A home that cannot be written: here it is a file."""
    other_home.write_text("")
    done = warm(warmed.with_name("out"), gpu="h200", kernels=folder)
    assert "cannot be made: Not a directory" in done["not_signed_because"]
    assert "hmac_sha256" not in json.loads((folder / MANIFEST).read_text())
    with server(monkeypatch, tmp_path / "cache", "1"):
        assert start(tmp_path / "out").reason is None


def test_a_file_in_its_place_after_the_check_is_not_used(
    folder: Path, unasked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes in use are those that were compared."""
    good = {path.read_bytes() for path in folder.glob("*.cubin")}
    install = kernel_store._install

    def exchanged(*arguments: Any) -> None:
        for path in folder.glob("*.cubin"):
            path.write_bytes(b"\x7fELF of somebody else")
        install(*arguments)

    monkeypatch.setattr(kernel_store, "_install", exchanged)
    assert unasked().reason is None
    assert {path.read_bytes() for path in (tmp_path / "cache").glob("*/kernel.cubin")} == good
