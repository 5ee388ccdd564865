"""Manifests that somebody else wrote: what they say is checked before anything relies on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hqconv
from hqconv.artifact.manifest import json_bytes, read_manifest
from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.schemas.artifact_names import is_layer_name
from tests.make.conversions import run, write_manifest
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest")
    run(write_qwen3_moe(folder / "src", num_layers=1), folder / "out", "int4-g32")
    return folder / "out"


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none()
DOCUMENTS = st.recursive(
    NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(st.dictionaries(st.text(max_size=5), DOCUMENTS, max_size=5))
def test_documents_have_the_bytes_of_the_json_library(document: dict[str, Any]) -> None:
    try:
        expected = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        with pytest.raises(UnicodeEncodeError):
            json_bytes(document)
    else:
        assert json_bytes(document) == expected


def edited(good: Path, folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the artifact whose manifest was edited; its files are hard links."""
    for path in good.rglob("*"):
        if path.is_file() and path.name != "hqconv.json":
            (folder / path.relative_to(good)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(good)).hardlink_to(path)
    words = json.loads((good / "hqconv.json").read_bytes())
    edit(words)
    write_manifest(folder, words)
    return folder


NAMES = {
    "../../../etc/x": False,
    "/etc/x": False,
    "a/b": False,
    "a..b": False,
    ".a": False,
    "a.": False,
    "": False,
    "a b": False,
    "a\x1b[2J": False,
    "a\n": False,
    "é": False,
    "x" * 201: False,
    LAYER: True,
    "language_model.model.layers.0.mlp-moe.experts": True,
}


@pytest.mark.parametrize(("name", "is_good"), NAMES.items(), ids=[repr(name)[:20] for name in NAMES])
def test_layer_names_cannot_lead_elsewhere(name: str, is_good: bool, good: Path, tmp_path: Path) -> None:
    """They become names of files: of rank files when an artifact is a source, or is read."""
    assert is_layer_name(name) == is_good
    if is_good:
        return
    out = edited(good, tmp_path / "in", lambda words: words["blocks"].update({name: words["blocks"].pop(LAYER)}))
    with pytest.raises(VerificationError, match="manifest is damaged"):
        read_manifest(out)
    before = snapshot(tmp_path)
    for call in (
        lambda: run(out, tmp_path / "again", "source"),
        lambda: hqconv.load(out, layer=name),
        lambda: hqconv.inspect(out),
        lambda: hqconv.dequantize(out, layer=name),
    ):
        with pytest.raises(HqconvError):
            call()
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "again" / "hqconv.json").exists()


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no key": (lambda w: w.pop("blocks"), "blocks"),
    "another type": (lambda w: w.update(tp="2"), "tp"),
    "truth for a number": (lambda w: w.update(tp=True), "tp"),
    "no version": (lambda w: w.pop("format_version"), "format_version"),
    "version of truth": (lambda w: w.update(format_version=True), "format_version"),
    "old version": (lambda w: w.update(format_version=0), "format_version"),
    "layer without sizes": (lambda w: w["blocks"][LAYER].pop("hidden_size"), "hidden_size"),
    "layer that is none": (lambda w: w["blocks"].update({LAYER: 3}), LAYER),
    "file without digest": (lambda w: w["files"]["config.json"].pop("sha256"), "config.json"),
    "layer without a format": (lambda w: w["blocks"][LAYER].update(source_format=None), "source_format"),
    "parts that are a list": (lambda w: w["blocks"][LAYER].update(source_parts=[]), "source_parts"),
    "size in words": (lambda w: w["files"]["config.json"].update(size_bytes="many"), "size_bytes"),
    "tensors that are none": (lambda w: w["tensors"].update(converted=None), "converted"),
    "errors that are none": (lambda w: w["blocks"][LAYER]["quantization_error"].update(w1=None), "w1"),
    "format without a name": (lambda w: w["blocks"][LAYER]["source_format"].update(name=[]), "name"),
    "source's config": (lambda w: w["source"].update(quantization_config=[1]), "quantization_config"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_is_not_as_it_must_be_is_named(name: str, good: Path, tmp_path: Path) -> None:
    edit, where = EDITS[name]
    out = edited(good, tmp_path / "out", edit)
    with pytest.raises(VerificationError, match="damaged") as caught:
        read_manifest(out)
    assert where in caught.value.where
    assert caught.value.expected
    assert caught.value.remedy


def test_a_source_whose_manifest_lists_no_files(good: Path, tmp_path: Path) -> None:
    out = edited(good, tmp_path / "in", lambda words: words.update(files={}))
    with pytest.raises(HqconvError, match=r"does not list a file(.|\n)*config\.json"):
        run(out, tmp_path / "out", "source")


def test_a_source_whose_manifest_lists_no_rank_files(good: Path, tmp_path: Path) -> None:
    def forget(words: dict[str, Any]) -> None:
        words["files"] = {name: one for name, one in words["files"].items() if not name.startswith("experts/")}

    with pytest.raises(HqconvError, match="no file for a rank"):
        run(edited(good, tmp_path / "in", forget), tmp_path / "out", "source")


@pytest.mark.parametrize("fields", [{"b_dtype": "uint77"}, {}])
def test_a_schema_that_is_none(fields: dict[str, Any], good: Path, tmp_path: Path) -> None:
    out = edited(good, tmp_path / "out", lambda words: words.update(weight_schema=fields))
    for call in (hqconv.inspect, lambda out: hqconv.dequantize(out, layer=LAYER)):
        with pytest.raises(VerificationError, match="manifest is damaged") as caught:
            call(out)
        assert "weight_schema" in caught.value.where
    assert not hqconv.verify(out, checks=["files"]).passed


def test_a_newer_version_asks_for_a_newer_hqconv(good: Path, tmp_path: Path) -> None:
    out = edited(good, tmp_path / "out", lambda words: words.update(format_version=99))
    with pytest.raises(RequestError, match="made by a newer hqconv") as caught:
        read_manifest(out)
    assert caught.value.remedy == "Upgrade hqconv."


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b"\0", b"\xff", b"[" * 100_000])
def test_garbage_is_no_manifest(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "hqconv.json").write_bytes(data)
    with pytest.raises(VerificationError, match=r"hqconv\.json"):
        read_manifest(tmp_path)
