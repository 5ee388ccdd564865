"""The `files` check on artifacts that are whole but for one thing, with and without their source."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv.artifact.manifest import sealed
from hqconv.artifact.reader import Artifact
from hqconv.io import file_access
from hqconv.schemas.grid import Grid
from hqconv.sources.opening import open_source
from hqconv.verification import verify
from hqconv.verification.files import check_files
from hqconv.verification.result import MAX_PER_KIND, CheckResult
from tests.make.conversions import check, run
from tests.make.damage import Damaged, found
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("good")
    src = write_qwen3_moe(folder / "src")
    run(src, folder / "kernel", "int4-g64", Grid(2, 2))
    run(src, folder / "checkpoint", "int4-g64", layout="checkpoint")
    return {"src": src, "kernel": folder / "kernel", "checkpoint": folder / "checkpoint"}


@pytest.fixture
def copy(good: dict[str, Path], tmp_path: Path) -> Damaged:
    shutil.copytree(good["kernel"], tmp_path / "out")
    return Damaged(tmp_path / "out", good["src"], "int4-g64")


@pytest.fixture
def sharded(good: dict[str, Path], tmp_path: Path) -> Damaged:
    """The checkpoint layout: three shards and an index."""
    shutil.copytree(good["checkpoint"], tmp_path / "out")
    return Damaged(tmp_path / "out", good["src"], "int4-g64")


def files_of(copy: Damaged, with_source: bool = False) -> CheckResult:
    with Artifact(copy.root) as artifact, open_source(copy.source) as source:
        return check_files(artifact, source if with_source else None, 2)


# --- stray and missing files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "notes.txt",
        ".hidden",
        "config.json.partial",
        "experts/tp0-ep0/x.safetensors.partial",
        "experts/tp2-ep0/model.layers.0.mlp.experts.safetensors",
        "sub/folder/file",
    ],
)
def test_a_stray_file(copy: Damaged, path: str) -> None:
    (copy.root / path).parent.mkdir(parents=True, exist_ok=True)
    (copy.root / path).write_bytes(b"x")
    findings = files_of(copy).findings
    assert [(f.where, f.what) for f in findings] == [(path, "A file is not in the manifest.")]


@pytest.mark.parametrize("name", [".gitattributes", ".cache/x/y", ".git/HEAD"])
def test_what_publishing_brings_along_is_no_fault(copy: Damaged, name: str) -> None:
    (copy.root / name).parent.mkdir(parents=True, exist_ok=True)
    (copy.root / name).write_bytes(b"x")
    assert files_of(copy).findings == []


@pytest.mark.parametrize("with_source", [False, True])
def test_a_model_card_may_be_edited(copy: Damaged, with_source: bool) -> None:
    assert not [
        note for note in files_of(copy, with_source).notes if "README" in note or "SUMS" in note
    ]
    card = copy.root / "README.md"
    card.write_bytes(card.read_bytes().replace(b"Humming", b"humming", 1))  # of the same size
    assert "README.md was edited since the conversion" in files_of(copy, with_source).notes
    card.write_text("A card of our own.")
    result = files_of(copy, with_source)
    assert result.findings == []
    assert "README.md was edited since the conversion" in result.notes
    card.unlink()
    found(files_of(copy, with_source), "README.md", "missing")


def test_sums_of_something_else_are_noted(copy: Damaged) -> None:
    (copy.root / "SHA256SUMS").write_bytes(b"x")
    result = files_of(copy)
    assert result.findings == []
    assert "SHA256SUMS does not say what the manifest does" in result.notes
    (copy.root / "SHA256SUMS").unlink()
    assert not [note for note in files_of(copy).notes if "SUMS" in note]


def test_the_journal_of_a_run_killed_at_its_very_end_is_noted(copy: Damaged) -> None:
    (copy.root / ".hqconv-progress.jsonl").write_bytes(b"{}\n")
    result = files_of(copy)
    assert result.findings == []
    assert any("--resume" in note for note in result.notes)


def test_links_are_followed_to_files_and_not_to_folders(copy: Damaged, tmp_path: Path) -> None:
    for folder in ("blobs", "snapshots"):  # as in the Hub's cache
        (tmp_path / folder).mkdir()
    (copy.root / "config.json").rename(tmp_path / "blobs/1234")
    (copy.root / "config.json").symlink_to(tmp_path / "blobs/1234")
    assert files_of(copy).findings == []
    (copy.root / "more").symlink_to(tmp_path)
    assert [f.where for f in files_of(copy).findings] == ["more"]


@pytest.mark.parametrize("path", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file(copy: Damaged, path: str) -> None:
    (copy.root / path).unlink()
    found(files_of(copy), path, "missing")


@pytest.mark.parametrize(
    "path", ["config.json", "tokenizer.json", f"experts/tp1-ep0/{LAYER}.safetensors"]
)
def test_a_file_that_the_manifest_forgets(copy: Damaged, path: str) -> None:
    copy.edit_manifest(lambda words: words["files"].pop(path))
    found(files_of(copy), path, "not in the manifest")
    (copy.root / path).unlink()
    result = files_of(copy, with_source=True)
    assert any(path in f.where for f in result.findings), result.findings


def test_every_problem_is_listed_up_to_a_number(copy: Damaged) -> None:
    for i in range(MAX_PER_KIND + 7):
        (copy.root / f"stray-{i:03}").touch()
    (copy.root / "config.json").unlink()
    result = files_of(copy)
    strays = [f for f in result.findings if f.what == "A file is not in the manifest."]
    assert len(strays) == MAX_PER_KIND + 1
    assert strays[-1].found == "7 more of this kind"
    found(result, "config.json", "missing")


# --- headers -----------------------------------------------------------------------------------------------


def test_a_tensor_with_another_name(copy: Damaged) -> None:
    name = f"{LAYER}.w2_weight_scale"
    copy.edit_header(copy.path, lambda entries: entries.update({f"{name}_": entries.pop(name)}))
    copy.reseal()
    result = files_of(copy)
    found(result, f"{copy.path}, tensor: {name} ", "absent")
    found(result, f"{copy.path}, tensor: {name}_ ", "absent")


def test_another_version_of_humming_is_noted(copy: Damaged) -> None:
    copy.edit_manifest(lambda words: words.update(humming_kernels_version="0.0.1"))
    result = files_of(copy)
    assert result.findings == []
    assert "0.0.1" in " ".join(result.notes)


# --- index, config -----------------------------------------------------------------------------------------


def edit_json(copy: Damaged, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    words = json.loads((copy.root / name).read_bytes())
    edit(words)
    (copy.root / name).write_text(json.dumps(words))
    copy.reseal()


INDEX = "model.safetensors.index.json"


def test_a_lost_shard_and_a_lost_index(sharded: Damaged) -> None:
    for lost in (INDEX, "model-00001-of-00003.safetensors"):
        sharded.edit_manifest(lambda document, lost=lost: document["files"].pop(lost))
        (sharded.root / lost).unlink()
        found(files_of(sharded), lost)


def test_the_config_is_the_sources(copy: Damaged) -> None:
    edit_json(copy, "config.json", lambda words: words.update(rope_theta=5))
    assert files_of(copy).findings == []
    found(files_of(copy, with_source=True), "config.json: rope_theta", "absent", "5")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN'])
def test_a_config_that_is_no_json(copy: Damaged, text: str) -> None:
    (copy.root / "config.json").write_text(text)
    copy.reseal()
    found(files_of(copy, with_source=True), "config.json", "cannot be read as JSON")


# --- the source --------------------------------------------------------------------------------------------


def other_source(
    copy: Damaged, tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]
) -> CheckResult:
    """The check against a source whose tensors were edited."""
    shutil.copytree(copy.source, tmp_path / "src")
    tensors = load_file(copy.source / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    copy.source = tmp_path / "src"
    return files_of(copy, with_source=True)


def test_another_source(copy: Damaged, tmp_path: Path) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    result = other_source(copy, tmp_path, lambda t: t.update({norm: t[norm][:64].clone()}))
    found(result, "source: files: model.safetensors: header_sha256", "another header")
    found(result, norm, "another dtype or shape", "[64]", "[128]")


def test_a_source_with_one_other_number(copy: Damaged, tmp_path: Path) -> None:
    """Same sizes and header: only the bytes tell."""
    norm = "model.layers.1.input_layernorm.weight"
    result = other_source(copy, tmp_path, lambda t: t[norm][5].add_(1))
    assert len(result.findings) == 1
    found(result, f"model.safetensors, tensor {norm}", "not the source's", "the first at byte 1")


def test_a_source_with_more_tensors(copy: Damaged, tmp_path: Path) -> None:
    result = other_source(copy, tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(4)}))
    found(result, "tensors: copied: model.norm.weight", "absent")


def test_the_tokenizer_is_the_sources(copy: Damaged) -> None:
    (copy.root / "tokenizer.json").write_text('{"a": 1}')
    copy.reseal()
    assert files_of(copy).findings == []
    found(files_of(copy, with_source=True), "tokenizer.json", "A file is not the source's")


def test_a_source_that_cannot_be_mapped(copy: Damaged, tmp_path: Path) -> None:
    name = f"{LAYER}.3.up_proj.weight"
    result = other_source(copy, tmp_path, lambda t: t.pop(name))
    found(result, "source: ", name)


def test_names_under_another_folder_are_the_same_source(copy: Damaged, tmp_path: Path) -> None:
    shutil.copytree(copy.source, tmp_path / "renamed")
    copy.source = tmp_path / "renamed"
    assert files_of(copy, with_source=True).findings == []


# --- digests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 1000, 1001, 4321])
def test_a_digest_is_of_all_chunks(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_access, "_CHUNK_BYTES", 1000)
    data = bytes(n * n % 251 for n in range(num_bytes))
    (tmp_path / "file").write_bytes(data)
    assert file_access.sha256_of(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_an_artifact_that_is_replaced_meanwhile(
    copy: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one that is as good: the report has the digest of the first."""
    data = (copy.root / "hqconv.json").read_bytes()
    other = sealed({**json.loads(data), "hqconv_version": "9.9"})
    own = verify.check_files

    def replaced(*words: Any) -> CheckResult:
        result = own(*words)
        (copy.root / "hqconv.json").write_bytes(other)
        return result

    monkeypatch.setattr(verify, "check_files", replaced)
    report = check(copy.root, None, "files")
    assert [f.what for f in report.results[0].findings] == [
        "The artifact was replaced while it was checked."
    ]
    assert report.manifest_sha256 == hashlib.sha256(data).hexdigest()


def test_hashing_ends_with_an_interrupt(copy: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads do not hash the rest of their files."""
    latest = time.monotonic() + 60
    with Artifact(copy.root) as artifact:
        files = artifact.manifest.files
    largest = max(files, key=lambda path: files[path].size_bytes)  # which is waited for first

    def endless(_: Artifact, path: str, keep_on: Callable[[], object]) -> str:
        if path == largest:
            raise KeyboardInterrupt
        while time.monotonic() < latest:
            keep_on()
        return path

    monkeypatch.setattr(Artifact, "digest_of", endless)
    with Artifact(copy.root) as artifact, pytest.raises(KeyboardInterrupt):
        check_files(artifact, None, len(files))
    assert not [one for one in threading.enumerate() if one.name.startswith("hqconv-digests")]
    assert time.monotonic() < latest
