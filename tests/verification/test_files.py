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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hqconv.artifact.manifest import read_manifest, sealed
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError
from hqconv.io import file_access
from hqconv.schemas.grid import Grid
from hqconv.sources.opening import open_source
from hqconv.verification import verify
from hqconv.verification.files import check_files
from hqconv.verification.result import MAX_PER_KIND, CheckResult
from tests.make.conversions import check, manifest, run
from tests.make.damage import Damaged, found
from tests.make.effort import num_examples
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("good")
    src = write_qwen3_moe(folder / "src")
    run(src, folder / "kernel", "int4-g64", Grid(2, 2))
    run(src, folder / "checkpoint", "int4-g64", layout="checkpoint")
    return {"src": src, "kernel": folder / "kernel", "checkpoint": folder / "checkpoint"}


def copy_of(good: dict[str, Path], layout: str, folder: Path) -> Damaged:
    shutil.copytree(good[layout], folder / "out")
    return Damaged(folder / "out", good["src"], "int4-g64")


@pytest.fixture
def copy(good: dict[str, Path], tmp_path: Path) -> Damaged:
    return copy_of(good, "kernel", tmp_path)


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


STRAYS = (
    "more/model.safetensors",
    "more/pytorch_model.bin",
    "a.gguf",
    "original/params.json",
    "more/x.index.json",
)


@pytest.mark.parametrize(
    ("layout", "path"),
    [("kernel", "experts/tp0-ep0/x.safetensors"), *(("checkpoint", path) for path in STRAYS)],
)
def test_stray_weights_that_the_manifest_lists(
    good: dict[str, Path], tmp_path: Path, layout: str, path: str
) -> None:
    copy = copy_of(good, layout, tmp_path)
    (copy.root / path).parent.mkdir(parents=True, exist_ok=True)
    save_file({"x": torch.zeros(4)}, copy.root / path, {"format": "pt"})
    copy.edit_manifest(lambda words: words["files"].update({path: {"size_bytes": 0, "sha256": ""}}))
    copy.reseal()
    files, _ = copy.check(with_source=False)
    assert [f.where for f in files.findings] == [path]
    assert "weight" in files.findings[0].what


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


def test_every_problem_is_listed_up_to_a_number(copy: Damaged) -> None:
    for i in range(MAX_PER_KIND + 7):
        (copy.root / f"stray-{i:03}").touch()
    (copy.root / "config.json").unlink()
    result = files_of(copy)
    strays = [f for f in result.findings if f.what == "A file is not in the manifest."]
    assert len(strays) == MAX_PER_KIND + 1
    assert strays[-1].found == "7 more of this kind"
    found(result, "config.json", "missing")


# --- index, config -----------------------------------------------------------------------------------------


def edit_json(copy: Damaged, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    words = json.loads((copy.root / name).read_bytes())
    edit(words)
    (copy.root / name).write_text(json.dumps(words))
    copy.reseal()


INDEX = "model.safetensors.index.json"


def test_a_lost_shard_and_a_lost_index(good: dict[str, Path], tmp_path: Path) -> None:
    sharded = copy_of(good, "checkpoint", tmp_path)
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


# --- the manifest's digest, and what only it tells ---------------------------------------------------------


def is_altered(root: Path) -> bool:
    """Whether a reader of the manifest sees that its bytes are not those of its digest."""
    try:
        return read_manifest(root).alteration is not None
    except HqconvError:  # no manifest any more, which says so
        return True


def test_the_digest_is_the_last_field_of_every_manifest(good: dict[str, Path]) -> None:
    for layout in ("kernel", "checkpoint"):
        data, document = (good[layout] / "hqconv.json").read_bytes(), manifest(good[layout])
        assert list(document)[-1] == "digest"
        before, _, _ = data.rpartition(b',\n  "digest": ')
        assert document["digest"] == hashlib.sha256(before).hexdigest()
        assert sealed(document) == data
        assert not is_altered(good[layout])


def test_any_altered_byte_of_the_manifest_shows(copy: Damaged) -> None:
    path = copy.root / "hqconv.json"
    data = path.read_bytes()
    for position in [*range(0, len(data), 41), *range(len(data) - 90, len(data))]:
        for mask in (0x01, 0x20):
            altered = bytearray(data)
            altered[position] ^= mask
            path.write_bytes(altered)
            assert is_altered(copy.root), bytes(altered[position - 20 : position + 20])


def test_a_manifest_of_another_form(copy: Damaged) -> None:
    document = manifest(copy.root)
    (copy.root / "hqconv.json").write_text(json.dumps(document))
    assert is_altered(copy.root)
    without = {key: value for key, value in document.items() if key != "digest"}
    (copy.root / "hqconv.json").write_text(json.dumps(without, indent=2) + "\n")
    files, _ = copy.check(with_source=False)
    found(
        files,
        "hqconv.json: digest",
        "The manifest's bytes are not those that its digest was made of.",
    )


@pytest.mark.parametrize(("key", "value"), [("name", "org/other"), ("revision", "b" * 40)])
def test_a_repo_and_its_commit(copy: Damaged, key: str, value: str) -> None:
    recorded = {"name": "org/model", "revision": "a" * 40}
    copy.edit_manifest(lambda document: document["source"].update(recorded))
    for opened_as, count in ((recorded, 0), ({**recorded, key: value}, 1)):
        with Artifact(copy.root) as artifact, open_source(copy.source) as source:
            source.repo_id, source.revision = opened_as["name"], opened_as["revision"]
            result = check_files(artifact, source, 2)
        assert len(result.findings) == count, (opened_as, result.findings)
    found(result, f"hqconv.json: source: {key}", recorded[key], value)


# --- layer configs -------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 1 << 40)
    | st.floats(allow_nan=True)
    | st.sampled_from(["float16", "int8", "none", "channel", ""]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def one_copy(good: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return copy_of(good, "kernel", tmp_path_factory.mktemp("one"))


@settings(max_examples=num_examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_words_of_a_layer_config_end_in_findings(
    one_copy: Damaged, data: st.DataObject
) -> None:
    """Every value of any kind: a finding, and never an error of ours."""
    kept = [(path, (one_copy.root / path).read_bytes()) for path in ("hqconv.json", one_copy.path)]
    words = json.loads(one_copy.header(one_copy.path)[0]["__metadata__"]["w2"])
    key, value = data.draw(st.sampled_from(sorted(words))), data.draw(JSON)
    is_changed = json.dumps(words[key]) != json.dumps(value)
    changed = json.dumps({**words, key: value})
    try:
        one_copy.edit_header(
            one_copy.path, lambda entries: entries["__metadata__"].update(w2=changed)
        )
        one_copy.reseal()
        files, _ = one_copy.check(with_source=False)
        assert bool(files.findings) == is_changed
    finally:
        for path, good_bytes in kept:
            (one_copy.root / path).write_bytes(good_bytes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape_k", float("inf")),
        ("pad_shape_n", float("-inf")),
        ("a_dtype", {}),
        ("a_dtype", [1]),
        ("shape_k", 0),
    ],
)
def test_words_of_a_layer_config_that_were_an_internal_error(
    copy: Damaged, key: str, value: Any
) -> None:
    def edit(entries: dict[str, Any]) -> None:
        words = json.loads(entries["__metadata__"]["w13"])
        entries["__metadata__"]["w13"] = json.dumps({**words, key: value})

    copy.edit_header(copy.path, edit)
    copy.reseal()
    files, weights = copy.check()
    found(files, f"{copy.path}, metadata: w13: {key}")
    found(weights, copy.path, "w13")
