"""Where a server finds an artifact's files: in a folder, or on the Hub, of which it takes what it needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hqconv.errors import HqconvError, NetworkError, RequestError, VerificationError
from hqconv.schemas.grid import Grid
from hqconv.serving.artifact_location import ArtifactLocation
from hqconv.serving.artifact_view import open_artifact_view
from hqconv.serving.parameter_loader import ParameterLoader
from tests.make.conversions import run
from tests.make.hub_server import COMMIT, LocalHub, cached, serve, use
from tests.make.qwen import write_qwen3_moe

BLOCKS = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(2))
FOLDER = "experts/tp1-ep0"
NAME = f"{FOLDER}/{BLOCKS[0]}.safetensors"
OURS = {f"{FOLDER}/{layer}.safetensors" for layer in BLOCKS}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("place")
    run(write_qwen3_moe(work / "original", intermediate_size=256), work / "out", "mxfp4", Grid(tp=2, ep=2))
    return work / "out"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """The artifact as org/name, and an empty cache."""
    with serve(out) as server:
        use(monkeypatch, server.url, cache)
        yield server


def test_a_folders_files_are_where_they_lie(out: Path) -> None:
    location = ArtifactLocation(str(out))
    assert location.is_folder
    assert location.fetch("hqconv.json") == out / "hqconv.json"
    assert location.fetch_all([NAME, "config.json"]) == {NAME: out / NAME, "config.json": out / "config.json"}


def test_a_folder_that_lacks_a_file_names_it(out: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / NAME).unlink()
    with pytest.raises(VerificationError, match="folder lacks a file") as caught:
        ArtifactLocation(str(copy)).fetch_all(["config.json", NAME])
    assert (caught.value.where, caught.value.expected) == (str(copy), NAME)


def test_of_a_repo_the_manifest_comes_alone(out: Path, hub: LocalHub, cache: Path) -> None:
    view = open_artifact_view(ArtifactLocation("org/name"))
    assert view.layers == open_artifact_view(ArtifactLocation(str(out))).layers
    assert hub.fetched == cached(cache) == {"hqconv.json"}


def test_then_the_files_of_this_rank_and_no_others(out: Path, hub: LocalHub, cache: Path) -> None:
    """At once, when the first of them is wanted; then nothing more is asked."""
    view, loader = open_artifact_view(ArtifactLocation("org/name")), ParameterLoader()
    path = loader.path(view, NAME, alone=False, cache_dir=None)
    assert path.read_bytes() == (out / NAME).read_bytes()
    assert hub.fetched == cached(cache) == {"hqconv.json", *OURS}
    before = len(hub.requests)
    for name in OURS:
        assert loader.path(view, name, alone=False, cache_dir=None).read_bytes() == (out / name).read_bytes()
    assert len(hub.requests) == before


def test_alone_a_file_comes_by_itself(hub: LocalHub, cache: Path) -> None:
    """Of a process that has only some of the layers."""
    view = open_artifact_view(ArtifactLocation("org/name"))
    ParameterLoader().path(view, NAME, alone=True, cache_dir=None)
    assert hub.fetched == cached(cache) == {"hqconv.json", NAME}


def test_rank_1_is_not_rank_10(hub: LocalHub) -> None:
    """A rank's folder is a whole name, not the beginning of one."""
    view = open_artifact_view(ArtifactLocation("org/name"))
    files = dict(view.files) | {name.replace("tp1-ep0", "tp1-ep01"): (1, "") for name in OURS}
    object.__setattr__(view, "files", files)
    ParameterLoader().path(view, NAME, alone=False, cache_dir=None)
    assert hub.fetched == {"hqconv.json", *OURS}


def test_a_folder_of_vllms_for_downloads_is_used(hub: LocalHub, cache: Path, tmp_path: Path) -> None:
    view = open_artifact_view(ArtifactLocation("org/name"))
    path = ParameterLoader().path(view, NAME, alone=False, cache_dir=str(tmp_path / "own"))
    assert path.is_relative_to(tmp_path / "own")
    assert cached(tmp_path / "own") == OURS
    assert cached(cache) == {"hqconv.json"}


def test_what_is_cached_is_not_sent_again(out: Path, hub: LocalHub) -> None:
    for _ in range(2):
        ParameterLoader().path(open_artifact_view(ArtifactLocation("org/name")), NAME, alone=False, cache_dir=None)
    assert {name: hub.sent[name] for name in hub.fetched} == {
        name: (out / name).stat().st_size for name in ("hqconv.json", *OURS)
    }


def test_the_revision_is_asked_for(hub: LocalHub) -> None:
    view = open_artifact_view(ArtifactLocation("org/name", "a-tag"))
    ParameterLoader().path(view, NAME, alone=False, cache_dir=None)
    asked = [line for line in hub.requests if "/revision/" in line]
    assert asked
    assert all("/revision/a-tag" in line for line in asked)
    files = [line for line in hub.requests if "/resolve/" in line]
    assert all(f"/resolve/{COMMIT}/" in line for line in files)


def test_offline_the_cache_is_enough(hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = ArtifactLocation("org/name")
    ParameterLoader().path(open_artifact_view(location), NAME, alone=False, cache_dir=None)
    before = len(hub.requests)
    use(monkeypatch, hub.url, cache, offline=True)
    assert ParameterLoader().path(open_artifact_view(location), NAME, alone=False, cache_dir=None).is_file()
    assert len(hub.requests) == before


@pytest.mark.parametrize("offline", [True, False])
def test_a_cache_that_lacks_files_is_called_that(
    hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    """Offline, and where the Hub does not answer. Some versions of its library raise, some give what they have."""
    view = open_artifact_view(ArtifactLocation("org/name", "main"))
    use(monkeypatch, "http://127.0.0.1:9", cache, offline=offline)  # the discard port: nobody listens
    with pytest.raises((RequestError, NetworkError), match=r"lacks (a file|\(part of\) the repo)") as caught:
        ParameterLoader().path(view, NAME, alone=True, cache_dir=None)
    assert caught.value.where == "org/name, revision main"
    assert ("HF_HUB_OFFLINE" if offline else "connection") in caught.value.message()


def test_an_incomplete_copy_of_a_repo_is_no_incomplete_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hqconv.serving.artifact_location.fetch", lambda *_, **__: tmp_path)
    with pytest.raises(RequestError, match=r"copy of the Hub repo(.|\n)*HF_HUB_OFFLINE") as caught:
        ArtifactLocation("org/name", "main").fetch(NAME)
    assert (caught.value.where, caught.value.expected) == ("org/name, revision main", NAME)


@pytest.mark.parametrize(
    ("offline", "kind", "text"),
    [(True, RequestError, "HF_HUB_OFFLINE is set"), (False, NetworkError, "cannot be reached")],
)
def test_an_empty_cache_and_no_hub(
    cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool, kind: type[HqconvError], text: str
) -> None:
    use(monkeypatch, "http://127.0.0.1:9", cache, offline=offline)
    with pytest.raises(kind, match=text):
        open_artifact_view(ArtifactLocation("org/name"))


def test_a_repo_without_the_file_is_refused(
    out: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / NAME).unlink()
    with serve(copy) as hub:
        use(monkeypatch, hub.url, cache)
        view = open_artifact_view(ArtifactLocation("org/name"))
        with pytest.raises(RequestError, match=r"lacks a file(.|\n)*upload the artifact again") as caught:
            ParameterLoader().path(view, NAME, alone=False, cache_dir=None)
        assert caught.value.expected == NAME


def test_a_repo_that_is_no_artifact_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(write_qwen3_moe(tmp_path / "model")) as hub:
        use(monkeypatch, hub.url, cache)
        with pytest.raises(RequestError, match=r"hqconv\.json"):
            open_artifact_view(ArtifactLocation("org/name"))
        with pytest.raises(RequestError, match="no such repo on the Hub"):
            open_artifact_view(ArtifactLocation("org/other"))
        assert hub.fetched == set()
