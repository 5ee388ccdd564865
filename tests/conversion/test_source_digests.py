"""The digests of the source's files in the manifest: of all that was read, however it went, and what the Hub says."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import hqconv
from hqconv.errors import InputError
from tests.make.conversions import check, manifest, run, run_until, write_manifest
from tests.make.hub_server import use
from tests.make.models import save_model
from tests.make.tensors import snapshot

HUB: dict[str, str] = {"schema": "mxfp4", "target": "sm90", "device": "cpu"}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("digests") / "src", "qwen3_moe", num_experts=3)


def digests(out: Path) -> dict[str, str]:
    files = manifest(out)["source"]["files"]
    return {file["name"]: file["sha256"] for file in files if "sha256" in file}


def expected(src: Path) -> dict[str, str]:
    paths = sorted(src.glob("*.safetensors"))
    assert len(paths) > 1
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_digests_on_request(src: Path, tmp_path: Path) -> None:
    """Nothing else differs, and a finished artifact is that of the same request."""
    run(src, tmp_path / "with", "mxfp4", source_digests=True)
    run(src, tmp_path / "without", "mxfp4")
    assert digests(tmp_path / "with") == expected(src)
    assert digests(tmp_path / "without") == {}
    both = [snapshot(tmp_path / name) for name in ("with", "without")]
    assert {path for path in both[0] if both[0][path] != both[1][path]} == {
        "hqconv.json",
        "SHA256SUMS",
    }
    for name, wanted in (("with", False), ("without", True)):
        assert run(src, tmp_path / name, "mxfp4", source_digests=wanted, resume=True).was_finished


@pytest.mark.parametrize("first", [True, False])
def test_resumed(src: Path, tmp_path: Path, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that only the first run read have digests, too."""
    monkeypatch.setattr("hqconv.planning.output_units.MAX_SHARD_BYTES", 70_000)
    out = tmp_path / "out"
    run_until(src, out, 2, "mxfp4", source_digests=first)
    run(src, out, "mxfp4", resume=True, source_digests=True)
    run(src, tmp_path / "whole", "mxfp4", source_digests=True)
    assert snapshot(out) == snapshot(tmp_path / "whole")


def test_verify_holds_the_source_to_them(src: Path, tmp_path: Path) -> None:
    """Also in bytes that nothing is made of."""
    run(src, tmp_path / "out", "mxfp4", source_digests=True)
    assert check(tmp_path / "out", src, "files").passed
    document = manifest(tmp_path / "out")
    document["source"]["files"][0]["sha256"] = "0" * 64
    (tmp_path / "out/hqconv.json").write_text(json.dumps(document))
    name = document["source"]["files"][0]["name"]
    findings = check(tmp_path / "out", src, "files").results[0].findings
    assert any(finding.where == f"hqconv.json: source, file {name}" for finding in findings)


def in_cache(src: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a repo with the files of a folder, as `org/name` is found offline."""
    repo = cache / "models--org--name"
    snapshot_of = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    snapshot_of.mkdir(parents=True)
    for path in sorted(path for path in src.iterdir() if path.is_file()):
        other_name = hashlib.sha1(path.read_bytes()).hexdigest()
        blob = repo / "blobs" / expected(src).get(path.name, other_name)
        shutil.copy(path, blob)
        (snapshot_of / path.name).symlink_to(blob)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(snapshot_of.name)
    use(monkeypatch, "http://127.0.0.1:9", cache, offline=True)
    return snapshot_of


def test_what_the_hub_says(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of blobs in its cache: of LFS their SHA-256, of other files a digest of git."""
    snapshot_of = in_cache(src, tmp_path / "cache", monkeypatch)
    hqconv.convert("org/name", tmp_path / "out", **HUB)
    files = manifest(tmp_path / "out")["source"]["files"]
    assert {file["name"]: file["hub_sha256"] for file in files} == expected(src)
    assert digests(tmp_path / "out") == {}
    assert check(tmp_path / "out", snapshot_of, "files").passed
    document = manifest(tmp_path / "out")
    document["source"]["files"][1]["hub_sha256"] = "0" * 64
    write_manifest(tmp_path / "out", document)
    finding, *_ = check(tmp_path / "out", snapshot_of, "files").results[0].findings
    assert finding.where == f"hqconv.json: source, file {files[1]['name']}"
    run(snapshot_of, tmp_path / "folder", "mxfp4")  # a folder of nobody knows which repo
    assert not any(
        "hub_sha256" in file for file in manifest(tmp_path / "folder")["source"]["files"]
    )


@pytest.mark.parametrize(("byte", "is_hashed"), [(b"\1", True), (b"\xff", False)])
def test_bytes_that_the_hub_does_not_list(
    src: Path, tmp_path: Path, byte: bytes, is_hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process left in the cache: refused where it is hashed, or where its numbers are none (0xff)."""
    snapshot_of = in_cache(src, tmp_path / "cache", monkeypatch)
    for path in snapshot_of.glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        path.resolve().write_bytes(data[:begin] + byte * (len(data) - begin))
    with pytest.raises(InputError, match="not what its manifest or the Hub lists") as caught:
        hqconv.convert("org/name", tmp_path / "out", **HUB, source_digests=is_hashed)
    assert str(caught.value.expected).removeprefix("sha256 ") in expected(src).values()
    assert not (tmp_path / "out/hqconv.json").exists()
