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
from hqconv.errors import HqconvError, InputError, RequestError, VerificationError
from hqconv.schemas.artifact_names import is_layer_name
from hqconv.schemas.options import load_recipe
from hqconv.serving.artifact_view import ArtifactLocation, open_artifact_view
from tests.make.conversions import run, write_manifest
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

OWN, LEFT, PLAIN = (f"model.layers.{layer}.mlp.experts" for layer in range(3))
RECIPE = """
[[override]]
layers = "0"
schema = "fp8"
input_schema = "fp8"

[[override]]
layers = "1"
schema = "none"
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers that differ: one with a schema of its own, one left, one plain."""
    work = tmp_path_factory.mktemp("manifest")
    (work / "recipe.toml").write_text(RECIPE)
    source = write_qwen3_moe(work / "model", num_layers=3)
    run(source, work / "out", "mxfp4", overrides=load_recipe(work / "recipe.toml").overrides)
    return work / "out"


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none()
DOCUMENTS = st.recursive(
    NUMBERS | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
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
    OWN: True,
    "language_model.model.layers.0.mlp-moe.experts": True,
}


@pytest.mark.parametrize(
    ("name", "is_good"), NAMES.items(), ids=[repr(name)[:20] for name in NAMES]
)
def test_layer_names_cannot_lead_elsewhere(
    name: str, is_good: bool, good: Path, tmp_path: Path
) -> None:
    """They become names of files: of rank files when an artifact is a source, or is read."""
    assert is_layer_name(name) == is_good
    if is_good:
        return
    out = edited(
        good,
        tmp_path / "in",
        lambda words: words["blocks"].update({name: words["blocks"].pop(OWN)}),
    )
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


def own(words: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = words["blocks"][OWN]
    return found


def with_left(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda words: words.update(left_blocks=value)


def with_own(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda words: own(words).update(fields)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no key": (lambda w: w.pop("blocks"), "blocks"),
    "another type": (lambda w: w.update(tp="2"), "tp"),
    "truth for a number": (lambda w: w.update(tp=True), "tp"),
    "no version": (lambda w: w.pop("format_version"), "format_version"),
    "version of truth": (lambda w: w.update(format_version=True), "format_version"),
    "old version": (lambda w: w.update(format_version=0), "format_version"),
    "layer without sizes": (lambda w: w["blocks"][OWN].pop("hidden_size"), "hidden_size"),
    "layer that is none": (lambda w: w["blocks"].update({OWN: 3}), OWN),
    "file without digest": (lambda w: w["files"]["config.json"].pop("sha256"), "config.json"),
    "layer without a format": (
        lambda w: w["blocks"][OWN].update(source_format=None),
        "source_format",
    ),
    "parts that are a list": (lambda w: w["blocks"][OWN].update(source_parts=[]), "source_parts"),
    "size in words": (lambda w: w["files"]["config.json"].update(size_bytes="many"), "size_bytes"),
    "tensors that are none": (lambda w: w["tensors"].update(converted=None), "converted"),
    "errors that are none": (
        lambda w: w["blocks"][OWN]["quantization_error"].update(w1=None),
        "w1",
    ),
    "format without a name": (lambda w: w["blocks"][OWN]["source_format"].update(name=[]), "name"),
    "source's config": (
        lambda w: w["source"].update(quantization_config=[1]),
        "quantization_config",
    ),
    "left: a number": (with_left(3), "left_blocks"),
    "left: lists": (with_left([[LEFT]]), "left_blocks"),
    "left: an object": (with_left({LEFT: 1}), "left_blocks"),
    "left: a name that leads elsewhere": (with_left(["../x"]), "left_blocks"),
    "own: a number for a name": (with_own(schema_name=8), f"{OWN}: schema_name"),
    "own: a list of input schemas": (with_own(input_schema=["fp8"]), f"{OWN}: input_schema"),
    "own: weights in words": (with_own(weight_schema="fp8"), f"{OWN}: weight_schema"),
    "own: unknown weights": (
        with_own(weight_schema={"b_dtype": "float3"}),
        f"{OWN}: weight_schema: b_dtype",
    ),
    "own: no activations": (lambda w: own(w).pop("activation_schema"), f"{OWN}: input_schema"),
    "own: activations in words": (
        with_own(activation_schema="float8e4m3"),
        f"{OWN}: activation_schema",
    ),
    "own: pairs that are none": (with_own(activation_schema=["abc"]), f"{OWN}: activation_schema"),
    "own: unknown activations": (with_own(activation_schema={"a_dtype": 8}), f"{OWN}: a_dtype"),
    "own: no target": (lambda w: own(w).pop("target"), f"{OWN}: target"),
    "activations in words": (lambda w: w.update(activation_schema="abc"), "activation_schema"),
    "activations that are pairs": (
        lambda w: w.update(activation_schema=["abc"]),
        "activation_schema",
    ),
    "own: an activation's numbers in words": (
        with_own(activation_parameters={"limit": "2"}),
        "model.layers.0.mlp.experts",
    ),
    "weights of none": (lambda w: w.update(weight_schema={}), "weight_schema"),
    "weights of another type": (
        lambda w: w.update(weight_schema={"b_dtype": "uint77"}),
        "weight_schema",
    ),
    "compiler: a number": (lambda w: w.update(cuda=13.0), "cuda"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_is_not_as_it_must_be_is_named(name: str, good: Path, tmp_path: Path) -> None:
    edit, where = EDITS[name]
    out = edited(good, tmp_path / "out", edit)
    with pytest.raises(VerificationError, match="damaged") as caught:
        hqconv.inspect(out)
    assert where in caught.value.where
    assert caught.value.expected or caught.value.found
    assert caught.value.remedy


# Every reader reads what is meant; only the comparer sees that no conversion writes it.
COMPARED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a left layer that is there": with_left([LEFT, PLAIN]),
    "no name of a schema": lambda w: own(w).pop("schema_name"),
    "no input schema": lambda w: own(w).pop("input_schema"),
}


@pytest.mark.parametrize("name", COMPARED)
def test_what_no_conversion_writes_fails_verification(
    name: str, good: Path, tmp_path: Path
) -> None:
    out = edited(good, tmp_path / "out", COMPARED[name])
    assert not hqconv.verify(out, checks=["files"]).passed


def test_a_source_whose_manifest_lists_no_files(good: Path, tmp_path: Path) -> None:
    out = edited(good, tmp_path / "in", lambda words: words.update(files={}))
    with pytest.raises(HqconvError, match="not what its manifest lists"):
        run(out, tmp_path / "out", "source")


def test_a_source_whose_manifest_lists_no_rank_files(good: Path, tmp_path: Path) -> None:
    def forget(words: dict[str, Any]) -> None:
        words["files"] = {
            name: one for name, one in words["files"].items() if not name.startswith("experts/")
        }

    with pytest.raises(HqconvError, match="no file for a rank"):
        run(edited(good, tmp_path / "in", forget), tmp_path / "out", "source")


def test_a_newer_version_asks_for_a_newer_hqconv(good: Path, tmp_path: Path) -> None:
    out = edited(good, tmp_path / "out", lambda words: words.update(format_version=99))
    with pytest.raises(RequestError, match="made by a newer hqconv") as caught:
        read_manifest(out)
    assert caught.value.remedy == "Upgrade hqconv."


# --- every reader -------------------------------------------------------------------------------------------


def readers(out: Path) -> dict[str, Callable[[], object]]:
    return {
        "inspect": lambda: hqconv.inspect(out),
        "dequantize": lambda: hqconv.dequantize(out, layer=PLAIN),
        "load": lambda: hqconv.load(out, layer=PLAIN),
        "the plugin": lambda: open_artifact_view(ArtifactLocation(str(out))),
        "as a source": lambda: hqconv.plan(out, schema="int4", target="sm90"),
    }


def test_as_it_was_made_it_is_good(good: Path) -> None:
    for read in readers(good).values():
        read()
    assert hqconv.verify(good, checks=["files", "weights"]).passed


@pytest.mark.parametrize("name", ["left: a number", "own: weights in words"])
def test_what_cannot_be_is_one_sentence_for_every_reader(
    name: str, good: Path, tmp_path: Path
) -> None:
    edit, where = EDITS[name]
    out = edited(good, tmp_path / "out", edit)
    for reader, read in readers(out).items():
        with pytest.raises(InputError if reader == "as a source" else VerificationError) as caught:
            read()
        assert caught.value.where.endswith(where), reader
        assert caught.value.found
    for checks in (["files"], ["weights"]):
        assert not hqconv.verify(out, checks=checks).passed


def test_a_size_that_is_no_number_is_refused_by_the_plugin(good: Path, tmp_path: Path) -> None:
    """Python's JSON has infinity."""
    out = edited(good, tmp_path / "out", lambda w: own(w)["w13"].update(shape_n=float("inf")))
    with pytest.raises(VerificationError, match="manifest is damaged"):
        open_artifact_view(ArtifactLocation(str(out)))
