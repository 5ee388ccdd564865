"""Artifacts on the Hub: inspected, planned from, converted and verified, with what that needs and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.errors import InputError, NetworkError, RequestError
from hqconv.schemas.grid import Grid
from tests.make import conversions
from tests.make.damage import flip
from tests.make.hub_server import COMMIT, LocalHub, cached, serve, use
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

NAME, SCHEMA = "org/name", "int4-g32"

NAMING = ("hqconv.json", "README.md", "SHA256SUMS")  # say which repo or folder the source was


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of 6 MB, for two ranks."""
    folder = tmp_path_factory.mktemp("artifact")
    src = write_qwen3_moe(folder / "src", num_experts=4, hidden_size=1024, intermediate_size=512)
    conversions.run(src, folder / "out", SCHEMA, Grid(tp=2))
    return folder / "out"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def server(
    out: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalHub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: None)
    copy = Path(shutil.copytree(out, tmp_path / "served"))
    (copy / "README.md").write_text("# a card")
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")
    with serve(copy) as one:
        use(monkeypatch, one.url, cache)
        yield one


def without_place(words: dict[str, Any]) -> dict[str, Any]:
    dropped = ("folder", "repo", "commit", "serve_command", "artifact", "checks", "seconds")
    return {key: value for key, value in words.items() if key not in dropped}


def test_inspect_reads_the_manifest_alone(server: LocalHub, out: Path) -> None:
    words = hqconv.inspect(NAME)
    assert without_place(words) == without_place(hqconv.inspect(out))
    assert (words["kind"], words["repo"], words["commit"]) == ("artifact", NAME, COMMIT)
    assert words["serve_command"].split()[2] == NAME
    assert server.num_bytes_of_weights == 0


def test_inspect_sees_what_the_repo_lacks(server: LocalHub) -> None:
    path = "experts/tp1-ep0/model.layers.0.mlp.experts.safetensors"
    (server.folder / path).unlink()
    assert hqconv.inspect(NAME)["missing_or_resized_files"] == [path]


def test_a_plan_reads_headers(server: LocalHub, out: Path) -> None:
    planned = hqconv.plan(NAME, schema="source", target="sm90", tp=4)
    assert [f.path for g in planned.units for f in g.files] == [
        f.path
        for g in hqconv.plan(out, schema="source", target="sm90", tp=4).units
        for f in g.files
    ]
    assert planned.source.repo_id == NAME
    total = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    assert 0 < server.num_bytes_of_weights < total / 20  # 32 KiB of each of five small files
    assert server.whole.count("model.safetensors") == 0


@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
def test_it_is_converted_as_the_folder_is(
    server: LocalHub, tmp_path: Path, cache: Path, layout: str
) -> None:
    grid = Grid(tp=4) if layout == "kernel" else Grid()
    conversions.run(server.folder, tmp_path / "of-folder", "source", grid, layout=layout)
    conversions.run(NAME, tmp_path / "of-hub", "source", grid, layout=layout)  # type: ignore[arg-type]
    of_hub, of_folder = snapshot(tmp_path / "of-hub"), snapshot(tmp_path / "of-folder")
    words = conversions.manifest(tmp_path / "of-hub")
    for name in NAMING:
        assert of_hub.pop(name) != of_folder.pop(name)
    assert (words["source"]["name"], words["source"]["revision"]) == (NAME, COMMIT)
    assert of_hub == of_folder
    assert not {name for name in cached(cache) if name.endswith(".safetensors")}


# --- what is wrong with it ---------------------------------------------------------------------------------


def rank_file(server: LocalHub) -> Path:
    return server.folder / "experts/tp0-ep0/model.layers.1.mlp.experts.safetensors"


def test_another_size_or_digest_is_refused_before_anything_is_fetched(
    server: LocalHub, tmp_path: Path
) -> None:
    flip(rank_file(server))
    with pytest.raises(InputError, match="not what its manifest lists") as caught:
        conversions.run(NAME, tmp_path / "new", "source", Grid(tp=4))  # type: ignore[arg-type]
    assert "tp0-ep0" in caught.value.where
    assert not (tmp_path / "new").exists()
    assert server.num_bytes_of_weights <= 5 * (1 << 15)


def test_a_file_that_the_manifest_does_not_list_is_refused(
    server: LocalHub, tmp_path: Path
) -> None:
    """One that would be copied; others are left out."""
    (server.folder / "notes.txt").write_text("x")
    assert hqconv.plan(NAME, schema="source", target="sm90").other_files == ("tokenizer.json",)
    (server.folder / "vocab.txt").write_text("x")
    with pytest.raises(InputError, match="not what its manifest lists"):
        hqconv.plan(NAME, schema="source", target="sm90")


# --- verify ------------------------------------------------------------------------------------------------


def test_the_check_of_files_downloads_no_weights(server: LocalHub, out: Path, cache: Path) -> None:
    report = hqconv.verify(NAME, checks=["files"])
    (result,) = report.results
    assert report.passed, result.findings
    assert str(report.root) == NAME
    assert any("of 5 files the Hub's own digests" in note for note in result.notes)
    total = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    assert server.num_bytes_of_weights < total / 20
    assert not {name for name in cached(cache) if name.endswith(".safetensors")}


def test_the_check_of_files_sees_damage(server: LocalHub) -> None:
    flip(rank_file(server))
    (server.folder / "experts/tp1-ep0/model.layers.0.mlp.experts.safetensors").unlink()
    (server.folder / "experts/stray.safetensors").write_bytes(b"")
    report = hqconv.verify(NAME, checks=["files"])
    found = {(finding.where, finding.what) for finding in report.results[0].findings}
    assert {
        (
            "experts/tp0-ep0/model.layers.1.mlp.experts.safetensors",
            "A file's bytes are not those the manifest records.",
        ),
        (
            "experts/tp1-ep0/model.layers.0.mlp.experts.safetensors",
            "A file of the manifest is missing.",
        ),
        ("experts/stray.safetensors", "A file is not in the manifest."),
    } <= found


def test_the_check_of_weights_downloads_its_layers(
    server: LocalHub, cache: Path, out: Path
) -> None:
    source = out.parent / "src"
    report = hqconv.verify(NAME, source, checks=["weights"], layers=[1], threads=2, device="cpu")
    assert report.passed, report.results[0].findings
    weights = {name for name in cached(cache) if name.endswith(".safetensors")}
    assert weights == {
        f"experts/tp{rank}-ep0/model.layers.1.mlp.experts.safetensors" for rank in (0, 1)
    }


def test_a_hub_that_fails_is_no_damage(server: LocalHub) -> None:
    server.fail(r"/resolve/.*experts/tp0", 503)
    with pytest.raises(NetworkError, match="out of order"):
        hqconv.verify(NAME, checks=["files"])


def test_a_revision_of_the_artifact(server: LocalHub) -> None:
    assert hqconv.verify(NAME, checks=["files"], revision="v1").passed
    assert server.requests[0].split()[1].startswith("/api/models/org/name/revision/v1")
    server.fail("/revision/v2", 404, X_Error_Code="RevisionNotFound")
    with pytest.raises(RequestError, match="no such revision"):
        hqconv.verify(NAME, checks=["files"], revision="v2")
