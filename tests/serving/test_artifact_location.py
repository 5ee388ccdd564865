"""Where a server finds an artifact's files: in a folder, or on the Hub, of which it takes what it needs."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from hqconv.errors import RequestError, VerificationError
from hqconv.schemas.grid import Grid
from hqconv.serving.artifact_view import (
    ArtifactLocation,
    ArtifactView,
    open_artifact_view,
    open_rank_file,
)
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
    run(
        write_qwen3_moe(work / "original", intermediate_size=256),
        work / "out",
        "mxfp4",
        Grid(tp=2, ep=2),
    )
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


def test_a_folder_that_lacks_a_file_names_it(out: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / NAME).unlink()
    with pytest.raises(VerificationError, match="lacks a file") as caught:
        ArtifactLocation(str(copy)).fetch_all(["config.json", NAME])
    assert (caught.value.where, caught.value.expected) == (str(copy), NAME)


def test_then_the_files_of_this_rank_and_no_others(out: Path, hub: LocalHub, cache: Path) -> None:
    """At once, when the first of them is wanted; then nothing more is asked."""
    view, loader = open_artifact_view(ArtifactLocation("org/name")), ParameterLoader()
    path = loader.path(view, NAME, alone=False, cache_dir=None)
    assert path.read_bytes() == (out / NAME).read_bytes()
    assert hub.fetched == cached(cache) == {"hqconv.json", *OURS}
    before = len(hub.requests)
    for name in OURS:
        path = loader.path(view, name, alone=False, cache_dir=None)
        assert path.read_bytes() == (out / name).read_bytes()
    assert len(hub.requests) == before
    # of a process that has only some of the layers
    other = NAME.replace("tp1", "tp0")
    loader.path(view, other, alone=True, cache_dir=None)
    assert hub.fetched == {"hqconv.json", *OURS, other}


@pytest.mark.parametrize("revision", [None, "refs/pr/1", COMMIT])
def test_offline_vllms_folder_for_downloads_is_enough(
    out: Path,
    hub: LocalHub,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    revision: str | None,
) -> None:
    own, location = tmp_path / "own", ArtifactLocation("org/name", revision)
    ParameterLoader().path(open_artifact_view(location), NAME, alone=False, cache_dir=str(own))
    shutil.rmtree(cache)
    before = len(hub.requests)
    use(monkeypatch, hub.url, own, offline=True)
    view = open_artifact_view(location)
    assert (
        ParameterLoader().path(view, NAME, alone=False, cache_dir=None).read_bytes()
        == (out / NAME).read_bytes()
    )
    assert ParameterLoader().path(view, NAME, alone=False, cache_dir=str(own)).is_relative_to(own)
    assert view.location.fetch("config.json").read_bytes() == (out / "config.json").read_bytes()
    assert len(hub.requests) == before


def test_a_repo_without_the_file_is_refused(
    out: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / NAME).unlink()
    with serve(copy) as hub:
        use(monkeypatch, hub.url, cache)
        view = open_artifact_view(ArtifactLocation("org/name"))
        with pytest.raises(
            VerificationError, match=r"lacks a file(.|\n)*upload it again"
        ) as caught:
            ParameterLoader().path(view, NAME, alone=False, cache_dir=None)
        assert caught.value.expected == NAME


def test_a_repo_that_is_no_artifact_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(write_qwen3_moe(tmp_path / "model")) as hub:
        use(monkeypatch, hub.url, cache)
        with pytest.raises(VerificationError, match=r"hqconv\.json"):
            open_artifact_view(ArtifactLocation("org/name"))
        with pytest.raises(RequestError, match="no such repo on the Hub"):
            open_artifact_view(ArtifactLocation("org/other"))
        assert hub.fetched == set()


# --- one commit, and digests that nobody reads a file for -----------------------------------------------------

LATER = "f" * 40


@pytest.fixture
def pushed(out: Path, tmp_path: Path) -> Path:
    """The next night's artifact: as many bytes, but others."""
    copy = shutil.copytree(out, tmp_path / "pushed")
    for name in OURS:
        data = bytearray((copy / name).read_bytes())
        data[-1] ^= 1
        (copy / name).write_bytes(data)
    (copy / "config.json").write_text("{}")
    return copy


def path_of(view: ArtifactView, name: str = NAME, **options: Any) -> Path:
    return ParameterLoader().path(view, name, **{"alone": False, "cache_dir": None, **options})


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_push_after_the_manifest_changes_nothing(
    out: Path, pushed: Path, hub: LocalHub, tmp_path: Path, revision: str | None
) -> None:
    """As between the start of the engine and that of its workers, which get the view."""
    view = pickle.loads(pickle.dumps(open_artifact_view(ArtifactLocation("org/name", revision))))
    hub.push(pushed, LATER)
    own = tmp_path / "own"
    for options in ({}, {"cache_dir": str(own)}):
        path = path_of(view, **options)
        assert path.read_bytes() == (out / NAME).read_bytes() != (pushed / NAME).read_bytes()
        assert open_rank_file(view, BLOCKS[0], 1, 0, path).sha256 == view.files[NAME][1]
    assert view.location.fetch("config.json").read_bytes() == (out / "config.json").read_bytes()
    assert (
        next(own.glob("*/snapshots/*/config.json")).read_bytes()
        == (out / "config.json").read_bytes()
    )


def test_a_commit_that_is_gone_is_served_from_the_cache_or_refused(
    out: Path, pushed: Path, hub: LocalHub, tmp_path: Path
) -> None:
    view = open_artifact_view(ArtifactLocation("org/name", "main"))
    path_of(view)
    hub.push(pushed, LATER, rewrite=True)
    assert path_of(view).read_bytes() == (out / NAME).read_bytes()
    before = hub.num_bytes_of_weights
    with pytest.raises(RequestError, match="no such revision") as caught:
        path_of(view, cache_dir=str(tmp_path / "own"))
    assert caught.value.where == f"org/name, revision {COMMIT}"
    assert hub.num_bytes_of_weights == before


def test_a_revision_that_the_server_resolved_is_kept(
    out: Path, pushed: Path, hub: LocalHub
) -> None:
    """vLLM resolves the branch before it reads config.json: the manifest is that commit's, not a later one's."""
    revision = HfApi(endpoint=hub.url).resolve_revision("org/name", revision="main")
    (pushed / "hqconv.json").write_text("later")
    hub.push(pushed, LATER)
    view = open_artifact_view(ArtifactLocation("org/name", revision))
    assert view.location.commit == COMMIT
    assert path_of(view).read_bytes() == (out / NAME).read_bytes()


def shard(out: Path) -> str:
    return next(path.name for path in out.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["a rank file", "a rank file of another rank", "a shard"])
def test_a_listing_with_another_digest_is_refused_before_any_weights(
    out: Path, hub: LocalHub, kind: str
) -> None:
    name = {"a rank file": NAME, "a shard": shard(out)}.get(kind, NAME.replace("tp1", "tp0"))
    hub.digests[name] = "0" * 64
    with pytest.raises(
        VerificationError, match="not the one that the artifact's manifest lists"
    ) as caught:
        open_artifact_view(ArtifactLocation("org/name"))
    assert caught.value.where == f"org/name, revision {COMMIT}: {name}"
    assert caught.value.found == f"{'0' * 64} on the Hub"
    assert hub.fetched == {"hqconv.json"}


def test_files_that_people_may_edit_are_not_compared(
    out: Path, hub: LocalHub, tmp_path: Path
) -> None:
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / "config.json").write_text("{}")
    hub.push(copy, LATER)
    assert open_artifact_view(ArtifactLocation("org/name")).location.commit == LATER


def test_a_hub_without_a_listing_is_done_without(hub: LocalHub) -> None:
    """A mirror, or one that is asked too often: nothing waits, and the cache's names are still compared."""
    view = open_artifact_view(ArtifactLocation("org/name"))
    hub.digests[NAME] = "0" * 64
    hub.fail(rf"/api/models/org/name/revision/{COMMIT}", 429)
    assert open_artifact_view(ArtifactLocation("org/name")) == view


def rename_bytes(path: Path) -> str:
    """Have a cached file's bytes under another digest, as a Hub with other bytes leaves them."""
    other = path.readlink().with_name("1" * 64)
    (path.parent / other).write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(other)
    return other.name


@pytest.mark.parametrize("name", ["a rank file", "a shard"])
def test_offline_the_caches_names_are_compared(
    out: Path, hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """vLLM turns the repo's name to the cache's folder then; nothing is read for it."""
    file = NAME if name == "a rank file" else shard(out)
    path = open_artifact_view(ArtifactLocation("org/name")).location.fetch(file)
    use(monkeypatch, hub.url, cache, offline=True)
    folder = path.parents[file.count("/")]
    for location in ("org/name", str(folder)):
        assert open_artifact_view(ArtifactLocation(location))
    digest = rename_bytes(path)
    for location in ("org/name", str(folder)):
        with pytest.raises(
            VerificationError, match="not the one that the artifact's manifest lists"
        ) as caught:
            open_artifact_view(ArtifactLocation(location))
        assert caught.value.found == f"{digest} in the Hub's cache"


def test_a_fetched_files_name_in_the_cache_is_compared(hub: LocalHub) -> None:
    view = open_artifact_view(ArtifactLocation("org/name"))
    digest = rename_bytes(path_of(view))
    with pytest.raises(VerificationError, match=digest):
        open_rank_file(view, BLOCKS[0], 1, 0, path_of(view))
