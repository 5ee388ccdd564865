"""A look at a repo on the Hub: range requests for headers, one commit from the first request on, every failure told."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, get_session, save_torch_state_dict, snapshot_download
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.errors import HqconvError, InputError, NetworkError, RequestError
from hqconv.io import hub
from hqconv.sources.opening import open_source
from tests.make import hub_server
from tests.make.formats import write
from tests.make.hub_server import COMMIT, LocalHub, cached, serve, use
from tests.make.qwen import write_qwen3_moe

NAME = "org/name"
PLAN: dict[str, Any] = {"schema": "mxfp4", "target": "sm90", "tp": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 MB in four shards."""
    folder = write_qwen3_moe(
        tmp_path_factory.mktemp("hub") / "model",
        num_experts=4,
        hidden_size=1024,
        intermediate_size=512,
    )
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(tensors, folder, max_shard_size="8MB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody sleeps; how long somebody would have."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


@pytest.fixture
def server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.chdir(tmp_path)
    with serve(model) as one:
        use(monkeypatch, one.url, tmp_path / "cache")
        yield one


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_a_look_reads_less_than_a_hundredth(server: LocalHub, model: Path, tmp_path: Path) -> None:
    for look in (lambda: hqconv.inspect(NAME), lambda: hqconv.plan(NAME, **PLAN)):
        server.sent.clear()
        server.requests.clear()
        look()
        assert 0 < server.num_bytes_of_weights < total_bytes(model) / 100
        assert sum(server.sent.values()) < total_bytes(model) / 100
        assert "tokenizer.json" not in server.fetched
    assert not {name for name in cached(tmp_path / "cache") if name.endswith(".safetensors")}


def test_headers_larger_than_the_first_request(server: LocalHub, tmp_path: Path) -> None:
    many = write_qwen3_moe(
        tmp_path / "many", num_layers=8, num_experts=64, hidden_size=32, intermediate_size=32
    )
    num_bytes = 8 + int.from_bytes((many / "model.safetensors").read_bytes()[:8], "little")
    assert num_bytes > 1 << 16
    server.folder = many
    assert hqconv.inspect(NAME)["convertible"]
    assert server.num_bytes_of_weights == num_bytes


def test_a_server_that_ignores_ranges_is_left_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_qwen3_moe(tmp_path / "model", num_layers=1)
    tensors = load_file(folder / "model.safetensors")
    # Larger by far than what sockets buffer on the way.
    save_file(
        tensors | {"lm_head.weight": torch.zeros(50 << 20, 2).byte()}, folder / "model.safetensors"
    )
    with serve(folder, honours_ranges=False) as one:
        use(monkeypatch, one.url, tmp_path / "cache")
        assert hqconv.inspect(NAME)["convertible"]
        assert one.num_bytes_of_weights < total_bytes(folder) / 4


def test_the_config_that_ascend_writes_beside_a_model(server: LocalHub, tmp_path: Path) -> None:
    server.folder = write(tmp_path / "model", "ascend-w8a8-file", hidden=128, inner=128).folder
    assert hqconv.inspect(NAME)["quant_method"] == "ascend"


def test_all_requests_are_of_the_commit_that_came_first(server: LocalHub) -> None:
    hqconv.plan(NAME, **PLAN, revision="main")
    paths = [line.split()[1] for line in server.requests]
    assert paths[0].startswith("/api/models/org/name/revision/main")
    assert len(paths) > 5
    for path in paths[1:]:
        assert COMMIT in path, path


def test_a_range_that_breaks_off_is_asked_for_again(server: LocalHub, model: Path) -> None:
    name = sorted(path.name for path in model.glob("*.safetensors"))[0]
    listing = hub.Listing.of(NAME, None)
    assert listing.commit == COMMIT
    assert listing.sizes[name] == (model / name).stat().st_size
    assert listing.read(name, 5, 5) == b""
    whole = (model / name).read_bytes()
    assert listing.read(name, 100, 5000) == whole[100:5000]
    server.fail(rf"/resolve/.*{name}", 503, times=2)
    assert listing.read(name, 100, 5000) == whole[100:5000]


def test_what_comes_too_short_is_an_error_in_the_end(
    server: LocalHub, model: Path, monkeypatch: pytest.MonkeyPatch, quick: list[float]
) -> None:
    listing = hub.Listing.of(NAME, None)
    name = next(name for name in listing.sizes if name.endswith(".safetensors"))
    size = listing.sizes[name]
    with pytest.raises(NetworkError, match="fewer bytes"):
        listing.read(name, size - 10, size + 10)
    assert len(quick) == 3


# --- failures ----------------------------------------------------------------------------------------------

API, SHARD = "/api/models", r"/resolve/.*\.safetensors$"
GATED = {"X_Error_Code": "GatedRepo"}


@pytest.mark.parametrize(
    ("path", "status", "headers", "kind", "what", "remedy"),
    [
        (API, 401, {}, RequestError, "does not accept the token", "hf auth login"),
        (
            API,
            401,
            {"X_Error_Code": "RepoNotFound"},
            RequestError,
            "or the repo is private",
            "hf auth login",
        ),
        (
            API,
            404,
            {"X_Error_Code": "RepoNotFound"},
            RequestError,
            "no such repo on the Hub",
            "spelling",
        ),
        (
            API,
            404,
            {"X_Error_Code": "RevisionNotFound"},
            RequestError,
            "no such revision",
            "/tree/main",
        ),
        (API, 403, GATED, RequestError, "gated", "Accept its terms at http"),
        (SHARD, 403, GATED, RequestError, "gated", "Accept its terms at http"),
        (API, 403, {}, RequestError, "denies access", "the right to the repo"),
        (
            *(API, 403, {"X_Error_Message": "Access to this resource is disabled."}),
            *(RequestError, "denies access", "the right to the repo"),
        ),
        (API, 429, {}, NetworkError, "asked too often", "Wait a few minutes"),
        (API, 404, {}, RequestError, "does not answer as the Hub does", "HF_ENDPOINT"),
        (SHARD, 502, {}, NetworkError, "out of order", "Try again later"),
        (
            SHARD,
            404,
            {"X_Error_Code": "EntryNotFound"},
            InputError,
            "lacks a file",
            "See its files",
        ),
    ],
)
def test_every_failure_has_its_message(
    server: LocalHub,
    path: str,
    status: int,
    headers: dict[str, str],
    kind: type[HqconvError],
    what: str,
    remedy: str,
) -> None:
    server.fail(path, status, **headers)
    with pytest.raises(HqconvError) as caught:
        hqconv.plan(NAME, **PLAN)
    error = caught.value
    assert type(error) is kind, error
    assert what in error.what
    assert remedy in error.remedy
    assert NAME in error.where
    assert str(status) in error.found


@pytest.mark.parametrize(
    "name", ["ConnectError", "ConnectTimeout", "ProxyError", "UnsupportedProtocol", "ReadTimeout"]
)
def test_a_hub_that_cannot_be_reached(
    server: LocalHub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    library = importlib.import_module(
        type(get_session()).__module__.partition(".")[0]
    )  # httpx or httpx2

    def fail(*_: object, **__: object) -> None:
        raise getattr(library, name)("no route")

    monkeypatch.setattr(type(get_session()), "send", fail)
    with pytest.raises(NetworkError, match=r"cannot be reached|does not answer") as caught:
        hqconv.inspect(NAME)
    assert constants.ENDPOINT in caught.value.what


def test_a_repo_without_a_model(server: LocalHub, model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data.csv").write_text("1")
    server.folder = tmp_path / "other"
    with pytest.raises(InputError, match=r"has no config.json") as caught:
        hqconv.plan(NAME, **PLAN)
    assert caught.value.found == "data.csv"


def test_a_file_that_the_index_names_and_the_repo_lacks(
    server: LocalHub, model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).symlink_to(path)
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.unlink()
    server.folder = copy
    with pytest.raises(InputError, match=rf"are missing \(1 of \d+\): {shard.name}"):
        hqconv.plan(NAME, **PLAN)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a//b", "a\\b"])
def test_a_name_that_leads_elsewhere(
    server: LocalHub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(InputError, match="lead elsewhere"):
        hub._check_name(NAME, name)
    seen: list[str] = []
    monkeypatch.setattr(hub, "_check_name", lambda _, name: seen.append(name))
    hub.Listing.of(NAME, None)
    assert "config.json" in seen


@pytest.mark.parametrize(
    "commit", ["../../x", "/tmp/x", "main", COMMIT.upper(), COMMIT + "\n", "", None]
)
def test_a_commit_that_leads_elsewhere(server: LocalHub, tmp_path: Path, commit: Any) -> None:
    """The library would write a file and a folder of this name outside of its cache."""
    server.commit = commit
    for call in (
        hqconv.inspect,
        open_source,
        lambda name: hqconv.plan(name, **PLAN),
        hqconv.verify,
    ):
        with pytest.raises(InputError, match="a commit or a digest that is none") as caught:
            call(NAME)
        assert (caught.value.where, caught.value.found) == (NAME, repr(commit))
    assert not list(tmp_path.rglob("*"))


def test_a_digest_that_leads_elsewhere(server: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    lfs = {"sha256": "../../x", "size": 1, "pointerSize": 1}
    monkeypatch.setattr(hub_server, "_sibling", lambda file: file.get("lfs") and lfs)
    with pytest.raises(InputError, match="a commit or a digest that is none"):
        hqconv.inspect(NAME)


# --- without the Hub ---------------------------------------------------------------------------------------


def fill(server: LocalHub) -> None:
    snapshot_download(NAME)
    server.sent.clear()


def test_offline_a_cache_with_words_alone_does_not(
    server: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hqconv.inspect(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RequestError, match="HF_HUB_OFFLINE is set") as caught:
        hqconv.inspect(NAME)
    assert "hf download" in caught.value.remedy


@pytest.mark.parametrize("status", [0, 429, 503])
def test_where_the_hub_fails_a_complete_cache_does(
    server: LocalHub, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    def cut() -> None:
        if status:
            server.fail("", status)
        else:
            use(
                monkeypatch, "http://127.0.0.1:9", Path(constants.HF_HUB_CACHE)
            )  # where nobody listens

    hqconv.inspect(NAME)
    cut()
    with pytest.raises(NetworkError) as caught:
        hqconv.inspect(NAME)
    assert caught.value.exit_code == 5
    assert ("cannot be reached" in caught.value.what) == (status == 0)
    server.mend()
    use(monkeypatch, server.url, Path(constants.HF_HUB_CACHE))
    fill(server)
    cut()
    assert json.dumps(hqconv.inspect(NAME)).count(COMMIT) > 0
    assert server.num_bytes_of_weights == 0


def test_a_cache_is_complete_with_all_weights(server: LocalHub, model: Path) -> None:
    fill(server)
    root = hub.cached_snapshot(NAME, None) or Path()
    assert hub.is_complete(root)
    next(root.glob("*.safetensors")).unlink()
    assert not hub.is_complete(root)


def test_a_transfer_that_dies_is_the_networks(
    server: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an InputError: the file is good."""
    library = importlib.import_module(
        type(get_session()).__module__.partition(".")[0]
    )  # httpx or httpx2

    def die(*_: object, **__: object) -> Iterator[bytes]:
        raise library.ReadError("reset by peer")
        yield b""

    listing = hub.Listing.of(NAME, None)
    monkeypatch.setattr(library.Response, "iter_bytes", die)
    with pytest.raises(NetworkError, match="transfer from or to the Hub failed") as caught:
        listing.read("config.json", 0, 4)
    assert "reset by peer" in caught.value.found
