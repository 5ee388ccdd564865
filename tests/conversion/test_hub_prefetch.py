"""A conversion from the Hub takes the model shard by shard: never more of the cache than it may, nothing twice."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, hf_hub_download, snapshot_download
from safetensors.torch import load_file

import hqconv
from hqconv.conversion import hub_prefetch
from hqconv.conversion.hub_prefetch import CachePolicy
from hqconv.errors import HqconvError, InputError, NetworkError, OutputError, RequestError
from hqconv.schemas.artifact_names import JOURNAL
from hqconv.schemas.grid import Grid
from hqconv.sources import safetensors
from hqconv.sources.opening import open_source
from tests.make import conversions, hub_server, input_scales, processes, small
from tests.make.hub_server import COMMIT, LocalHub, cached, digest_of, serve, use
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.shards import split_by_layer
from tests.make.tensors import snapshot

NAME, SCHEMA, NUM_LAYERS = "org/name", "int4-g32", 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of 1.6 MB for each of six layers, and one without experts."""
    folder = tmp_path_factory.mktemp("streamed") / "model"
    write_qwen3_moe(
        folder, num_layers=NUM_LAYERS, num_experts=4, hidden_size=256, intermediate_size=256
    )
    split_by_layer(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a conversion of the folder gives."""
    out = tmp_path_factory.mktemp("expected") / "out"
    conversions.run(model, out, SCHEMA, Grid(tp=2))
    return without_manifest(out)


def without_manifest(out: Path) -> dict[str, bytes]:
    naming = ("hqconv.json", "README.md", "SHA256SUMS")  # say which repo or folder the source was
    return {path: data for path, data in snapshot(out).items() if path not in naming}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def server(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalHub]:
    monkeypatch.chdir(tmp_path)
    with serve(Path(shutil.copytree(model, tmp_path / "served"))) as one:
        use(monkeypatch, one.url, cache)
        yield one


def run(out: Path, **options: Any) -> Any:
    return conversions.run(NAME, out, SCHEMA, Grid(tp=2), **options)  # type: ignore[arg-type]


def shard(layer: int) -> str:
    return f"layer-{layer}.safetensors"


def shards(cache: Path) -> set[str]:
    return {name for name in cached(cache) if name.endswith(".safetensors")}


def own(cache: Path) -> set[str]:
    """Shards in the folders of processes of hqconv."""
    return {path.name for path in cache.glob(".hqconv/*/*.safetensors")}


def weight_bytes(cache: Path) -> int:
    """Size of all weights, also of running downloads; a file may be removed meanwhile."""
    total = 0
    for path in [*cache.glob("models--*/blobs/*"), *cache.glob(".hqconv/**/*")]:
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            total += size if size > 100_000 else 0
    return total


def size_of(server: LocalHub, *layers: int) -> int:
    return sum((server.folder / shard(layer)).stat().st_size for layer in layers)


def assert_removed(cache: Path) -> None:
    """No shard is left: neither in the cache nor in a folder of hqconv."""
    assert not shards(cache)
    assert weight_bytes(cache) == 0
    assert not (cache / ".hqconv").exists()


class Watch:
    """Looks at the cache whenever the server is about to send a shard: what is there, with that one."""

    def __init__(self, server: LocalHub, cache: Path) -> None:
        self.server, self.cache, self.most, self._lock = server, cache, 0, threading.Lock()
        server.before = self.look

    def look(self, name: str) -> None:
        if name.endswith(".safetensors"):
            with self._lock:
                there = weight_bytes(self.cache)
                self.most = max(self.most, there + (self.server.folder / name).stat().st_size)


def test_the_manifest_does_not_tell_what_stays_in_the_cache(
    server: LocalHub, tmp_path: Path
) -> None:
    """What the Hub says of its large files is in it either way."""
    run(tmp_path / "out")
    run(tmp_path / "kept", keep_source=True)
    run(tmp_path / "there")
    assert shards(tmp_path / "cache")
    files = conversions.manifest(tmp_path / "out")["source"]["files"]
    assert all(file["hub_sha256"] == digest_of(server.folder / file["name"]) for file in files)
    for name in ("kept", "there"):
        assert snapshot(tmp_path / name) == snapshot(tmp_path / "out")


# --- how much is there at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_the_cache_never_holds_more_than_it_may(
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes], num_shards: int
) -> None:
    watch = Watch(server, cache)
    limit = num_shards * size_of(server, 0)
    run(tmp_path / "out", cache_limit=None if num_shards == 4 else limit)
    assert without_manifest(tmp_path / "out") == expected
    assert 0 < watch.most <= limit
    whole = [name for name in server.whole if name.endswith(".safetensors")]
    assert sorted(whole) == [
        shard(layer) for layer in range(NUM_LAYERS)
    ]  # not the one without experts
    assert_removed(cache)
    assert "tokenizer.json" in cached(cache)


def test_a_limit_below_one_group_is_refused(server: LocalHub, tmp_path: Path) -> None:
    size = size_of(server, 0)
    with pytest.raises(RequestError, match="cache limit is too small") as caught:
        run(tmp_path / "out", cache_limit=size - 1)
    assert str(size) in caught.value.expected
    assert server.whole.count(shard(0)) == 0
    assert not (tmp_path / "out").exists()
    with pytest.raises(RequestError, match="exclude each other"):
        run(tmp_path / "out", cache_limit=size, keep_source=True)


def test_what_is_kept_is_all(
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    run(tmp_path / "out", keep_source=True)
    assert without_manifest(tmp_path / "out") == expected
    assert shards(cache) == {path.name for path in server.folder.glob("*.safetensors")}
    server.sent.clear()
    run(tmp_path / "again")
    assert server.num_bytes_of_weights == 0
    assert len(shards(cache)) == NUM_LAYERS + 1  # what was there before stays


def test_what_was_in_the_cache_stays(
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    hf_hub_download(NAME, shard(2), revision=COMMIT)
    link = Path(hf_hub_download(NAME, shard(3), revision=COMMIT))
    link.unlink()  # its bytes are there, under no name
    blobs = {path.name for path in (cache / "models--org--name/blobs").iterdir()}
    server.whole.clear()
    run(tmp_path / "out")
    assert without_manifest(tmp_path / "out") == expected
    assert {shard(2), shard(3)} == shards(cache)
    assert blobs <= {path.name for path in (cache / "models--org--name/blobs").iterdir()}
    assert not {shard(2), shard(3)} & set(server.whole)


def spoil(path: Path) -> None:
    """Zeros from the middle on, as after a power cut; the header and the size stay."""
    data = path.read_bytes()
    path.resolve().write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))


@pytest.mark.parametrize(
    "how", ["in the snapshot", "under another name", "offline", "of copied tensors"]
)
def test_bytes_that_others_left_in_the_cache_are_hashed(
    server: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A killed process, another user of the cache, a power cut."""
    name = "rest.safetensors" if how == "of copied tensors" else shard(2)
    assert (server.folder / name).exists(), list(server.folder.iterdir())
    if how == "offline":
        snapshot_download(NAME)
    path = Path(hf_hub_download(NAME, name))
    good = path.read_bytes()
    spoil(path)
    if how == "under another name":
        path.unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "offline")
    with pytest.raises(InputError, match="other bytes than the Hub lists") as caught:
        run(tmp_path / "out")
    assert name in caught.value.where
    assert not (tmp_path / "out" / "hqconv.json").exists()
    blob = tmp_path / "cache/models--org--name/blobs" / digest_of(server.folder / name)
    blob.write_bytes(good)
    run(tmp_path / "out", resume=True)


@pytest.mark.parametrize("is_offline", [False, True])
def test_verify_blames_the_cache_and_not_the_artifact(
    server: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    run(tmp_path / "out")
    if is_offline:
        snapshot_download(NAME)
    spoil(Path(hf_hub_download(NAME, shard(2))))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    (result,) = hqconv.verify(tmp_path / "out", NAME, checks=["weights"], threads=2).results
    (finding,) = result.findings
    assert "other bytes than the Hub lists" in finding.what
    assert shard(2) in finding.where


def test_a_tokenizer_that_others_left_in_the_cache_is_hashed(
    server: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a large file, of which the Hub lists the digest."""
    monkeypatch.setattr(
        hub_server,
        "_is_large",
        lambda path: path.suffix == ".safetensors" or "tokenizer" in path.name,
    )
    path = Path(hf_hub_download(NAME, "tokenizer.json"))
    path.resolve().write_text("[]")
    with pytest.raises(InputError, match="other bytes than the Hub lists") as caught:
        run(tmp_path / "out")
    assert "tokenizer.json" in caught.value.where
    assert not (tmp_path / "out" / "hqconv.json").exists()


# --- before it begins --------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_seen_before_the_start(
    server: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = hqconv.plan(NAME, schema=SCHEMA, target="sm90", tp=2)
    of_out, of_shard = planned.num_bytes_out + planned.other_bytes, size_of(server, 0)
    needed = of_out + 2 * of_shard + 2  # with the tokenizer
    free = needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free, 0, free))
    with pytest.raises(OutputError, match="cannot hold what is fetched") as caught:
        run(tmp_path / "out", cache_limit=2 * of_shard)
    assert f"{needed / 1e6:.1f} MB free" in caught.value.expected
    assert not (tmp_path / "out").exists()
    assert not server.whole or shard(0) not in server.whole
    free = needed
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free, 0, free))
    run(tmp_path / "out", cache_limit=2 * of_shard)


# --- failures on the way -----------------------------------------------------------------------------------


def groups_done(out: Path) -> int:
    lines = (out / JOURNAL).read_text().splitlines() if (out / JOURNAL).exists() else []
    return sum('"unit"' in line for line in lines)


@pytest.mark.parametrize(
    ("status", "kind"), [(503, NetworkError), (403, RequestError), (404, InputError)]
)
def test_what_fails_on_the_way_can_be_resumed(
    server: LocalHub,
    cache: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    kind: type[HqconvError],
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    code = {"X_Error_Code": "EntryNotFound"} if status == 404 else {}
    server.before = lambda name: (
        server.fail(f"/resolve/.*{shard(4)}$", status, **code) if name == shard(3) else None
    )
    with pytest.raises(HqconvError) as caught:
        run(tmp_path / "out", cache_limit=size_of(server, 0))
    assert type(caught.value) is kind
    assert own(cache) <= {shard(3)}
    assert not (tmp_path / "out" / "hqconv.json").exists()
    server.mend()
    server.before = None
    server.whole.clear()
    report = run(tmp_path / "out", cache_limit=size_of(server, 0), resume=True)
    assert report.num_units_resumed >= 3
    assert not {shard(0), shard(1), shard(2)} & set(server.whole)
    assert without_manifest(tmp_path / "out") == expected
    assert_removed(cache)


def test_another_commit_is_not_resumed(server: LocalHub, tmp_path: Path) -> None:
    """Its headers are the same, its weights need not be."""
    gone = {"X_Error_Code": "EntryNotFound"}
    server.before = lambda name: (
        server.fail(f"/{shard(2)}$", 404, **gone) if name == shard(1) else None
    )
    with pytest.raises(InputError):
        run(tmp_path / "out", cache_limit=size_of(server, 0))
    server.before = None
    server.mend()
    server.commit = "f" * 40
    with pytest.raises(OutputError, match="differs from this one in: commit of the source"):
        run(tmp_path / "out", resume=True)


def test_another_file_than_the_headers_were_of(
    server: LocalHub, tmp_path: Path, cache: Path
) -> None:
    """A server that lies: the commit's files never change."""

    def swap(name: str) -> None:
        if name != shard(0):
            return
        path = server.folder / shard(5)
        data = bytearray(path.read_bytes())
        at = data.index(b"input_layernorm")
        data[at : at + 5] = b"other"
        path.write_bytes(data)

    server.before = swap
    with pytest.raises(InputError, match="another header"):
        run(tmp_path / "out", cache_limit=size_of(server, 0))


# --- kills -------------------------------------------------------------------------------------------------


class Process:
    """The command in a process of its own."""

    def __init__(self, server: LocalHub, home: Path, out: Path, *more: str) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        own = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(home), "HF_HUB_DISABLE_XET": "1"}
        options = [
            "--schema",
            SCHEMA,
            "--target",
            "sm90",
            "--tp",
            "2",
            "--device",
            "cpu",
            "--threads",
            "2",
        ]
        command = [sys.executable, "-m", "hqconv", "convert", NAME, "-o", str(out), *options, *more]
        self.process = processes.Process(
            command,
            env={**kept, **own, "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_kill_loses_nothing(
    server: LocalHub,
    cache: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    number: signal.Signals,
) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if shard(3) <= name <= shard(9):  # and what comes after it, as soon as there is room
            held.set()
            go_on.wait(60)

    server.before = hold
    limit = str(2 * size_of(server, 0))
    one = Process(server, cache, tmp_path / "out", "--cache-limit", limit)
    assert held.wait(120), one.process.stderr and one.process.stderr.read()
    started = time.monotonic()
    while groups_done(tmp_path / "out") < 3 and time.monotonic() - started < 60:
        time.sleep(0.05)
    one.process.send_signal(number)
    _, told = one.process.communicate(timeout=60)
    go_on.set()
    assert one.process.returncode in (-number, 128 + number), told
    if number == signal.SIGINT:
        assert "Interrupted." in told
    done = groups_done(tmp_path / "out")
    assert done >= 3
    server.before, first = None, Counter(server.whole)
    server.whole.clear()
    report = run(tmp_path / "out", cache_limit=limit, resume=True)
    assert report.num_units_resumed == done
    assert without_manifest(tmp_path / "out") == expected
    again = [name for name in server.whole if name.endswith(".safetensors") and first[name]]
    assert set(again) <= {shard(3), shard(4)}, "shards of finished units are not fetched again"
    assert_removed(cache)


def test_folders_that_killed_processes_left_are_removed(
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Those in use stay."""
    kept = []
    for name, is_used in (("run-0", False), ("run-1", True), ("new", False)):
        folder = cache / ".hqconv" / name
        folder.mkdir(parents=True)
        (folder / "x").write_text("x")
        descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        if is_used:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        kept.append((folder, descriptor))
    run(tmp_path / "out")
    assert without_manifest(tmp_path / "out") == expected
    assert [(folder / "x").exists() for folder, _ in kept] == [False, True, True]
    assert {path.name for path in (cache / ".hqconv").iterdir()} == {"run-1", "new"}
    for _, descriptor in kept:
        os.close(descriptor)


def test_a_start_while_other_processes_end(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They remove the folder above when it is empty; the start goes on, and leaves no open file."""
    monkeypatch.setattr("hqconv.io.hub.cache_folder", lambda: cache)
    real, left = tempfile.mkdtemp, [3]

    def make(**kwargs: Any) -> str:
        if left[0]:
            left[0] -= 1
            (cache / ".hqconv").rmdir()
        return real(**kwargs)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    before = len(list(Path("/proc/self/fd").iterdir()))
    folder = hub_prefetch._OwnFolder()
    assert left == [0]
    folder.close()
    assert not (cache / ".hqconv").exists()
    left[0] = 1000
    with pytest.raises(FileNotFoundError):
        hub_prefetch._OwnFolder()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_cache_in_which_no_folder_can_be_made(
    server: LocalHub, cache: Path, tmp_path: Path
) -> None:
    cache.mkdir()
    (cache / ".hqconv").write_text("a file")
    with pytest.raises(OutputError, match="Writing the output failed") as caught:
        run(tmp_path / "out")
    assert (caught.value.where, caught.value.found) == (str(cache), "File exists")
    assert "HF_HOME" in caught.value.remedy


@pytest.mark.parametrize("is_resumed", [False, True])
def test_digests_of_shards_that_are_removed(
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes], is_resumed: bool
) -> None:
    """`--source-digests`: of every shard that was read, also of one that has no experts and is read by ranges."""
    options: dict[str, Any] = {"cache_limit": size_of(server, 0), "source_digests": True}
    if is_resumed:
        gone = {"X_Error_Code": "EntryNotFound"}
        server.before = lambda name: (
            server.fail(f"/{shard(4)}$", 404, **gone) if name == shard(3) else None
        )
        with pytest.raises(InputError):
            run(tmp_path / "out", **options)
        server.mend()
        server.before = None
        server.whole.clear()
    run(tmp_path / "out", **options, resume=is_resumed)
    assert without_manifest(tmp_path / "out") == expected
    files = conversions.manifest(tmp_path / "out")["source"]["files"]
    assert len(files) == NUM_LAYERS + 1
    assert all(file["sha256"] == digest_of(server.folder / file["name"]) for file in files)
    assert not is_resumed or shard(0) not in server.whole
    assert_removed(cache)


# --- other ways to convert ---------------------------------------------------------------------------------


def test_static_scales_are_read_when_their_files_are_there(
    server: LocalHub, cache: Path, tmp_path: Path
) -> None:
    src = small.save(tmp_path / "calibrated", input_scales.fp8())
    words = {"input_schema": "fp8-static", "tp": 1}
    conversions.run(src, tmp_path / "of-folder", "source", **words)
    server.folder = src
    conversions.run(NAME, tmp_path / "of-hub", "source", **words)  # type: ignore[arg-type]
    assert without_manifest(tmp_path / "of-hub") == without_manifest(tmp_path / "of-folder")
    layers = [conversions.manifest(tmp_path / name)["blocks"] for name in ("of-hub", "of-folder")]
    assert layers[0] == layers[1]
    assert not shards(cache)


@pytest.mark.parametrize("moment", ["before it is opened", "while it is read"])
def test_a_shard_goes_while_other_tensors_are_read_from_it(
    server: LocalHub, cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It was there for its experts. The rest comes from the Hub, or from the open file, and never from another one."""
    with open_source(NAME, is_lazy=True) as source:
        ref = source.tensors["model.layers.0.input_layernorm.weight"]
        assert source.files[ref.file].name == shard(0)
        use = hub_prefetch.ShardUse({"a": (shard(0),)}, {shard(0): size_of(server, 0)})
        prefetch, is_here, fill = (
            hub_prefetch.HubPrefetch(source, use, CachePolicy()),
            source.is_here,
            safetensors.fill,
        )
        others: list[int] = []

        def gone_then(name: str) -> bool:
            was_here = is_here(name)
            if was_here:
                prefetch.release("a")
            return was_here

        def read(*arguments: Any) -> int:
            prefetch.release("a")
            others.extend(
                os.open(model / shard(1), os.O_RDONLY) for _ in range(4)
            )  # take numbers that are free
            return fill(*arguments)

        prefetch.start()
        prefetch.wait_for("a")
        assert own(cache) == {shard(0)}
        if moment == "before it is opened":
            monkeypatch.setattr(source, "is_here", gone_then)
        else:
            monkeypatch.setattr(safetensors, "fill", read)
        found = bytearray(ref.num_bytes)
        source.read_into(ref, found)
        assert own(cache) == set()
        assert found == load_file(model / shard(0))[ref.name].view(torch.uint8).numpy().tobytes()
        prefetch.stop()
    for descriptor in others:
        os.close(descriptor)


# --- verify ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 3])
def test_verify_streams_its_source(
    server: LocalHub, cache: Path, tmp_path: Path, model: Path, num_shards: int
) -> None:
    """Each shard is fetched once, within the limit, and removed; the report is that of a local source."""
    run(tmp_path / "out")
    server.whole.clear()
    watch, limit = Watch(server, cache), num_shards * size_of(server, 0)
    report = hqconv.verify(tmp_path / "out", NAME, cache_limit=limit, threads=2)
    assert report.passed
    assert 0 < watch.most <= limit
    assert sorted(name for name in server.whole if name.startswith("layer-")) == [
        shard(n) for n in range(NUM_LAYERS)
    ]
    assert_removed(cache)
    local = hqconv.verify(tmp_path / "out", model, threads=2)
    assert [result.measured for result in report.results] == [
        result.measured for result in local.results
    ]
    server.whole.clear()
    hqconv.verify(tmp_path / "out", NAME, layers=[2], checks=["weights"])
    assert [name for name in server.whole if name.startswith("layer-")] == [shard(2)]


def test_verify_finds_another_source(server: LocalHub, cache: Path, tmp_path: Path) -> None:
    """A weight that the commit has, and the artifact was not made of."""
    run(tmp_path / "out")
    path = server.folder / shard(3)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)
    report = hqconv.verify(tmp_path / "out", NAME, cache_limit=size_of(server, 0), threads=2)
    weights = next(result for result in report.results if result.name == "weights")
    assert not report.passed
    assert all("layers.3." in finding.where for finding in weights.findings)
    assert weights.findings
    assert_removed(cache)


def test_a_verification_that_fails_on_the_way(
    server: LocalHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error, not a finding."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    run(tmp_path / "out")
    server.fail(f"/resolve/.*{shard(4)}$", 503)
    with pytest.raises(NetworkError):
        hqconv.verify(tmp_path / "out", NAME, checks=["weights"], threads=2)
    server.mend()
    assert hqconv.verify(tmp_path / "out", NAME, checks=["weights"], threads=2).passed
    assert_removed(cache)
    with pytest.raises(RequestError, match="cache limit is too small"):
        hqconv.verify(tmp_path / "out", NAME, checks=["weights"], cache_limit=1000)
