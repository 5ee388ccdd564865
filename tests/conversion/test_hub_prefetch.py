"""A conversion from the Hub takes the model shard by shard: never more of the cache than it may, nothing twice."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file

import hqconv
from hqconv.conversion import hub_prefetch
from hqconv.conversion.hub_prefetch import CachePolicy
from hqconv.errors import HqconvError, InputError, NetworkError, OutputError, RequestError
from hqconv.schemas.grid import Grid
from hqconv.sources import safetensors
from hqconv.sources.opening import open_source
from tests.make import conversions, input_scales, small
from tests.make.hub_server import COMMIT, LocalHub, cached, digest_of, serve, use
from tests.make.qwen import write_qwen3_moe
from tests.make.shards import split_by_layer
from tests.make.tensors import snapshot

NAME, SCHEMA, NUM_LAYERS = "org/name", "int4-g32", 6
GONE = {"X_Error_Code": "EntryNotFound"}


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
    with serve(Path(shutil.copytree(model, tmp_path / "served"))) as hub:
        use(monkeypatch, hub.url, cache)
        yield hub


def run(out: Path, **options: Any) -> Any:
    return conversions.run(NAME, out, SCHEMA, Grid(tp=2), **options)  # type: ignore[arg-type]


def shard(layer: int) -> str:
    return f"layer-{layer}.safetensors"


def shards(cache: Path) -> set[str]:
    return {name for name in cached(cache) if name.endswith(".safetensors")}


def temporary(cache: Path) -> set[str]:
    """Shards in the temporary folders of hqconv."""
    return {path.name for path in cache.glob("hqconv-shards-*/*.safetensors")}


def weight_bytes(cache: Path) -> int:
    """Size of all weights, also of running downloads; a file may be removed meanwhile."""
    total = 0
    for path in [*cache.glob("models--*/blobs/*"), *cache.glob("hqconv-shards-*/**/*")]:
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            total += size if size > 100_000 else 0
    return total


def size_of(server: LocalHub, layer: int) -> int:
    return (server.folder / shard(layer)).stat().st_size


def assert_removed(cache: Path) -> None:
    """No shard is left: neither in the cache nor in a folder of hqconv."""
    assert not shards(cache)
    assert weight_bytes(cache) == 0
    assert not list(cache.glob("hqconv-*"))


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
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """What the Hub says of its large files is in it either way; what is kept is all, and used again."""
    run(tmp_path / "out")
    run(tmp_path / "kept", keep_source=True)
    assert shards(cache) == {path.name for path in server.folder.glob("*.safetensors")}
    server.sent.clear()
    run(tmp_path / "there")
    assert server.num_bytes_of_weights == 0
    assert len(shards(cache)) == NUM_LAYERS + 1  # what was there before stays
    files = conversions.manifest(tmp_path / "out")["source"]["files"]
    assert all(file["hub_sha256"] == digest_of(server.folder / file["name"]) for file in files)
    assert without_manifest(tmp_path / "out") == expected
    for name in ("kept", "there"):
        assert snapshot(tmp_path / name) == snapshot(tmp_path / "out")
    with pytest.raises(RequestError, match="exclude each other"):
        run(tmp_path / "out", cache_limit=1 << 30, keep_source=True)


# --- how much is there at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "most"), [(0.001, 1), (2, 2), (None, 4)])  # in shards
def test_the_cache_never_holds_more_than_it_may(
    server: LocalHub,
    cache: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    given: float | None,
    most: int,
) -> None:
    """A limit below what a layer needs gives one layer at a time."""
    watch = Watch(server, cache)
    shard_bytes = size_of(server, 0)
    run(tmp_path / "out", cache_limit=given and int(given * shard_bytes))
    assert without_manifest(tmp_path / "out") == expected
    assert 0 < watch.most <= most * shard_bytes
    whole = [name for name in server.whole if name.endswith(".safetensors")]
    # Not the one without experts.
    assert sorted(whole) == [shard(layer) for layer in range(NUM_LAYERS)]
    assert_removed(cache)
    assert "tokenizer.json" in cached(cache)


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


@pytest.mark.parametrize("where", ["cache", "artifact"])
def test_damaged_bytes_in_the_cache_are_found(server: LocalHub, tmp_path: Path, where: str) -> None:
    """A killed process, another user of the cache, a power cut: by `--source-digests`, and by `verify`."""
    path = Path(hf_hub_download(NAME, shard(2)))
    data = path.read_bytes()
    if where == "artifact":
        run(tmp_path / "out")
    path.resolve().write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if where == "artifact":
        report = hqconv.verify(tmp_path / "out", NAME, checks=["files"], threads=2)
        assert any(shard(2) in finding.where for finding in report.results[0].findings)
        return
    with pytest.raises(InputError, match="not what its manifest or the Hub lists") as caught:
        run(tmp_path / "out", source_digests=True)
    assert shard(2) in caught.value.where
    assert not (tmp_path / "out" / "hqconv.json").exists()
    path.resolve().write_bytes(data)
    run(tmp_path / "out", resume=True)


# --- failures on the way -----------------------------------------------------------------------------------


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
    code = GONE if status == 404 else {}
    server.before = lambda name: (
        server.fail(f"/resolve/.*{shard(4)}$", status, **code) if name == shard(3) else None
    )
    with pytest.raises(HqconvError) as caught:
        run(tmp_path / "out", cache_limit=size_of(server, 0))
    assert type(caught.value) is kind
    assert not temporary(cache)
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
    server.before = lambda name: (
        server.fail(f"/{shard(2)}$", 404, **GONE) if name == shard(1) else None
    )
    with pytest.raises(InputError):
        run(tmp_path / "out", cache_limit=size_of(server, 0))
    server.before = None
    server.mend()
    server.commit = "f" * 40
    with pytest.raises(OutputError, match="differs from this one in: source: revision"):
        run(tmp_path / "out", resume=True)


def test_another_file_than_the_headers_were_of(server: LocalHub, tmp_path: Path) -> None:
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


def test_folders_that_killed_processes_left_are_removed(
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Those in use stay."""
    folders = [cache / f"hqconv-shards-{name}" for name in ("left", "used")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "x").write_text("x")
    (folders[0] / "lock").touch()
    with (folders[1] / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(tmp_path / "out")
    assert without_manifest(tmp_path / "out") == expected
    assert list(cache.glob("hqconv-*")) == [folders[1]]


# --- other ways to convert ---------------------------------------------------------------------------------


def test_static_scales_are_read_when_their_files_are_there(
    server: LocalHub, cache: Path, tmp_path: Path
) -> None:
    src = small.save(tmp_path / "calibrated", input_scales.fp8())
    options = {"input_schema": "fp8-static", "tp": 1}
    conversions.run(src, tmp_path / "of-folder", "source", **options)
    server.folder = src
    conversions.run(NAME, tmp_path / "of-hub", "source", **options)  # type: ignore[arg-type]
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
        layer = source.map_experts().layers[0]
        prefetch, is_here, fill = (
            hub_prefetch.HubPrefetch(source, [layer], CachePolicy()),
            source.is_here,
            safetensors.fill,
        )
        others: list[int] = []

        def gone_then(name: str) -> bool:
            was_here = is_here(name)
            if was_here:
                prefetch.release(layer.name)
            return was_here

        def read(*arguments: Any) -> int:
            prefetch.release(layer.name)
            # Take the numbers that are free.
            others.extend(os.open(model / shard(1), os.O_RDONLY) for _ in range(4))
            return fill(*arguments)

        prefetch.start()
        prefetch.wait_for(layer.name)
        assert temporary(cache) == {shard(0)}
        if moment == "before it is opened":
            monkeypatch.setattr(source, "is_here", gone_then)
        else:
            monkeypatch.setattr(safetensors, "fill", read)
        found = bytearray(ref.num_bytes)
        source.read_into(ref, found)
        assert temporary(cache) == set()
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
