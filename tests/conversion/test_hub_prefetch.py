"""A conversion from the Hub takes the model shard by shard: never more of the cache than it may, nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download, snapshot_download

import hqconv
from hqconv.conversion.journal import Journal
from hqconv.errors import HqconvError, InputError, NetworkError, OutputError, RequestError
from hqconv.io import hub
from hqconv.schemas.artifact_names import JOURNAL
from hqconv.schemas.grid import Grid
from tests.make import conversions, input_scales, small
from tests.make.hub_server import COMMIT, LocalHub, cached, digest_of, serve, use
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.shards import split_by_layer
from tests.make.tensors import snapshot

NAME, SCHEMA, NUM_LAYERS = "org/name", "int4-g32", 6
SNAPSHOT = f"models--org--name/snapshots/{COMMIT}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of 1.6 MB for each of six layers, and one without experts."""
    folder = tmp_path_factory.mktemp("streamed") / "model"
    write_qwen3_moe(folder, num_layers=NUM_LAYERS, num_experts=4, hidden_size=256, intermediate_size=256)
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
def server(model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
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


def blob_bytes(cache: Path) -> int:
    """Of all weights in the cache, those on their way too; a file may go while it is looked at."""
    total = 0
    for path in cache.glob("models--*/blobs/*"):
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            total += size if size > 100_000 else 0
    return total


def size_of(server: LocalHub, *layers: int) -> int:
    return sum((server.folder / shard(layer)).stat().st_size for layer in layers)


class Watch:
    """Looks at the cache whenever the server is about to send a shard: what is there, with that one."""

    def __init__(self, server: LocalHub, cache: Path) -> None:
        self.server, self.cache, self.most, self._lock = server, cache, 0, threading.Lock()
        server.before = self.look

    def look(self, name: str) -> None:
        if name.endswith(".safetensors"):
            with self._lock:
                there = blob_bytes(self.cache)
                self.most = max(self.most, there + (self.server.folder / name).stat().st_size)


def test_the_manifest_does_not_tell_what_stays_in_the_cache(server: LocalHub, tmp_path: Path) -> None:
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
    assert sorted(whole) == [shard(layer) for layer in range(NUM_LAYERS)]  # not the one without experts
    assert not shards(cache)
    assert blob_bytes(cache) == 0
    assert "tokenizer.json" in cached(cache)


def test_copied_tensors_cost_little_more_than_their_bytes(server: LocalHub, tmp_path: Path) -> None:
    run(tmp_path / "out")
    total = sum(path.stat().st_size for path in server.folder.glob("*.safetensors"))
    headers = (NUM_LAYERS + 1) * (1 << 15)
    assert server.num_bytes_of_weights < total + headers + total / 10


def test_a_limit_below_one_group_is_refused(server: LocalHub, tmp_path: Path) -> None:
    size = size_of(server, 0)
    with pytest.raises(RequestError, match="cache limit is too small") as caught:
        run(tmp_path / "out", cache_limit=size - 1)
    assert str(size) in caught.value.expected
    assert server.whole.count(shard(0)) == 0
    assert not (tmp_path / "out").exists()
    with pytest.raises(RequestError, match="exclude each other"):
        run(tmp_path / "out", cache_limit=size, keep_source=True)


def test_what_is_kept_is_all(server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    run(tmp_path / "out", keep_source=True)
    assert without_manifest(tmp_path / "out") == expected
    assert shards(cache) == {path.name for path in server.folder.glob("*.safetensors")}
    server.sent.clear()
    run(tmp_path / "again")
    assert server.num_bytes_of_weights == 0
    assert len(shards(cache)) == NUM_LAYERS + 1  # what was there before stays


def test_what_was_in_the_cache_stays(server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
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


# --- before it begins --------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_seen_before_the_start(
    server: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = hqconv.plan(NAME, schema=SCHEMA, target="sm90", tp=2)
    of_out, of_shard = planned.num_bytes_out + planned.num_bytes_beside, size_of(server, 0)
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
    return sum('"group"' in line for line in lines)


@pytest.mark.parametrize(("status", "kind"), [(503, NetworkError), (403, RequestError), (404, InputError)])
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
    server.before = lambda name: server.fail(f"/resolve/.*{shard(4)}$", status, **code) if name == shard(3) else None
    with pytest.raises(HqconvError) as caught:
        run(tmp_path / "out", cache_limit=size_of(server, 0))
    assert type(caught.value) is kind
    assert shards(cache) <= {shard(3)}
    assert not (tmp_path / "out" / "hqconv.json").exists()
    server.mend()
    server.before = None
    server.whole.clear()
    report = run(tmp_path / "out", cache_limit=size_of(server, 0), resume=True)
    assert report.num_groups_resumed >= 3
    assert not {shard(0), shard(1), shard(2)} & set(server.whole)
    assert without_manifest(tmp_path / "out") == expected
    assert not shards(cache)


def test_another_commit_is_not_resumed(server: LocalHub, tmp_path: Path) -> None:
    """Its headers are the same, its weights need not be."""
    gone = {"X_Error_Code": "EntryNotFound"}
    server.before = lambda name: server.fail(f"/{shard(2)}$", 404, **gone) if name == shard(1) else None
    with pytest.raises(InputError):
        run(tmp_path / "out", cache_limit=size_of(server, 0))
    server.before = None
    server.mend()
    server.commit = "f" * 40
    with pytest.raises(OutputError, match="differs from this one in: commit of the source"):
        run(tmp_path / "out", resume=True)


def test_another_file_than_the_headers_were_of(server: LocalHub, tmp_path: Path, cache: Path) -> None:
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
        options = ["--schema", SCHEMA, "--target", "sm90", "--tp", "2", "--device", "cpu", "--threads", "2"]
        command = [sys.executable, "-m", "hqconv", "convert", NAME, "-o", str(out), *options, *more]
        self.process = subprocess.Popen(
            command,
            env={**kept, **own, "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_kill_loses_nothing(
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes], number: signal.Signals
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
    assert report.num_groups_resumed == done
    assert without_manifest(tmp_path / "out") == expected
    again = [name for name in server.whole if name.endswith(".safetensors") and first[name]]
    assert set(again) <= {shard(3), shard(4)}, "what came whole the first time is not fetched again"
    assert not shards(cache)
    leftovers = [p for p in (cache / "models--org--name/blobs").iterdir() if "incomplete" in p.name]
    assert not leftovers


def test_a_resumed_run_drops_what_an_earlier_one_fetched(
    server: LocalHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a shard whose groups were all done when the kill came between the journal and the cache."""
    with monkeypatch.context() as patch:
        patch.setattr(hub, "remove_cached_file", lambda *_: None)
        gone = {"X_Error_Code": "EntryNotFound"}
        server.before = lambda name: server.fail(f"/{shard(5)}$", 404, **gone) if name == shard(4) else None
        with pytest.raises(InputError):
            run(tmp_path / "out", cache_limit=size_of(server, 0))
    left = shards(cache)
    assert {shard(0), shard(1)} <= left
    server.mend()
    server.before = None
    server.whole.clear()
    run(tmp_path / "out", cache_limit=size_of(server, 0), resume=True)
    assert not shards(cache)
    assert not left & set(server.whole)


def test_less_room_than_an_earlier_run_took(
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """What is needed first is not there, and what is there fills the cache: it must come all the same."""
    go_on = threading.Event()
    server.before = lambda name: go_on.wait(60) and None if name == shard(2) else None
    one = Process(server, cache, tmp_path / "out", "--cache-limit", str(4 * size_of(server, 0)))
    started = time.monotonic()
    while not shards(cache) >= {shard(3), shard(4)} and time.monotonic() - started < 60:
        time.sleep(0.05)
    one.process.kill()
    one.process.communicate(timeout=60)
    go_on.set()
    server.before = None
    assert shard(2) not in shards(cache)
    assert shards(cache) >= {shard(3), shard(4)}
    run(tmp_path / "out", cache_limit=size_of(server, 0), resume=True)
    assert without_manifest(tmp_path / "out") == expected
    assert not shards(cache)


def test_the_journal_knows_what_was_fetched(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin({"a": 1})
    for name in ("org/name@c/x", "org/name@c/x", "org/name@c/y"):
        journal.record_fetch(name)
    journal.close()
    assert (tmp_path / JOURNAL).read_text().count("@c/x") == 1
    again = Journal(tmp_path)
    assert again.fetched == {"org/name@c/x", "org/name@c/y"}
    again.restart()
    again.begin({"b": 2})
    again.close()
    last = Journal(tmp_path)
    assert (last.identity, last.fetched) == ({"b": 2}, {"org/name@c/x", "org/name@c/y"})
    last.close()


# --- other ways to convert ---------------------------------------------------------------------------------


def test_static_scales_are_read_when_their_files_are_there(server: LocalHub, cache: Path, tmp_path: Path) -> None:
    src = small.save(tmp_path / "calibrated", input_scales.fp8())
    words = {"input_schema": "fp8-static", "tp": 1}
    conversions.run(src, tmp_path / "of-folder", "source", **words)
    server.folder = src
    conversions.run(NAME, tmp_path / "of-hub", "source", **words)  # type: ignore[arg-type]
    assert without_manifest(tmp_path / "of-hub") == without_manifest(tmp_path / "of-folder")
    layers = [conversions.manifest(tmp_path / name)["blocks"] for name in ("of-hub", "of-folder")]
    assert layers[0] == layers[1]
    assert not shards(cache)


def test_a_team_shares_what_is_fetched(
    server: LocalHub, cache: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Each process what its groups need; nobody drops what another may still read."""
    options = ["--schema", SCHEMA, "--target", "sm90", "--tp", "2", "--device", "cpu", "--threads", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "hqconv", "convert", NAME, "-o", str(tmp_path / "out"), *options]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    own = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        command, env={**kept, **own, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert without_manifest(tmp_path / "out") == expected
    assert shards(cache) == {shard(layer) for layer in range(NUM_LAYERS)}
    whole = Counter(name for name in server.whole if name.startswith("layer-"))
    assert set(whole.values()) == {1}


# --- the cache ---------------------------------------------------------------------------------------------


def test_bytes_that_another_commit_has_too_stay(server: LocalHub, cache: Path) -> None:
    root = Path(snapshot_download(NAME))
    other = root.with_name("f" * 40)
    other.mkdir()
    (other / "same.safetensors").symlink_to((root / shard(0)).readlink())
    blob = (root / shard(0)).resolve()
    hub.remove_cached_file(root, shard(0))
    assert not (root / shard(0)).exists()
    assert blob.exists()
    hub.remove_cached_file(other, "same.safetensors")
    assert not blob.exists()
    assert (root / shard(1)).exists()


def test_a_cache_without_links(tmp_path: Path) -> None:
    root = tmp_path / "models--org--name" / "snapshots" / COMMIT
    root.mkdir(parents=True)
    (root / "a").write_text("x")
    assert hub.has_cached_bytes(root, "a", None)
    hub.remove_cached_file(root, "a")
    assert not hub.has_cached_bytes(root, "a", None)


def test_a_link_to_elsewhere_loses_the_link_alone(tmp_path: Path) -> None:
    root = tmp_path / "models--org--name" / "snapshots" / COMMIT
    root.mkdir(parents=True)
    (tmp_path / "mine").write_text("x")
    (root / "a").symlink_to(tmp_path / "mine")
    hub.remove_cached_file(root, "a")
    assert (tmp_path / "mine").exists()


def test_manifests_name_the_commit_and_verify(server: LocalHub, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    run(out)
    words = json.loads((out / "hqconv.json").read_bytes())["source"]
    assert (words["name"], words["revision"]) == (NAME, COMMIT)
    conversions.assert_verified(out, model)
