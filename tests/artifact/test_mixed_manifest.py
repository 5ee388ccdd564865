"""Manifests of artifacts whose layers differ, changed by somebody: what cannot be is said to every reader."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.errors import InputError, VerificationError
from hqconv.schemas.recipe import load_recipe
from hqconv.serving.artifact_view import ArtifactLocation, open_artifact_view
from tests.make.conversions import manifest, run, write_manifest
from tests.make.qwen import write_qwen3_moe

BLOCKS = [f"model.layers.{layer}.mlp.experts" for layer in range(3)]
OWN, LEFT, PLAIN = BLOCKS
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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("mixed")
    (work / "recipe.toml").write_text(RECIPE)
    source = write_qwen3_moe(work / "model", num_layers=3)
    run(source, work / "out", "mxfp4", overrides=load_recipe(work / "recipe.toml").overrides)
    return work / "out"


def readers(out: Path) -> dict[str, Callable[[], object]]:
    return {
        "inspect": lambda: hqconv.inspect(out),
        "dequantize": lambda: hqconv.dequantize(out, layer=PLAIN),
        "load": lambda: hqconv.load(out, layer=PLAIN),
        "the plugin": lambda: open_artifact_view(ArtifactLocation(str(out))),
        "as a source": lambda: hqconv.plan(out, schema="int4", target="sm90"),
    }


def edited(made: Path, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the artifact with another manifest; its files are hard links."""
    words = manifest(made)
    edit(words)
    shutil.copytree(made, folder, copy_function=lambda source, copy: Path(copy).hardlink_to(source))
    (folder / "hqconv.json").unlink()
    write_manifest(folder, words)
    return folder


def own(words: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = words["blocks"][OWN]
    return found


def with_left(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda words: words.update(left_blocks=value)


def with_own(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda words: own(words).update(fields)


def nothing_own(words: dict[str, Any]) -> None:
    """No layer differs, and none is left: of the first version, whatever it says."""
    for key in ("schema_name", "weight_schema", "input_schema", "activation_schema", "target"):
        del own(words)[key]
    del words["left_blocks"]


# What is changed, and what the message names.
EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "left: a number": (with_left(3), "left_blocks"),
    "left: a text": (with_left(LEFT), "left_blocks"),
    "left: null": (with_left(None), "left_blocks"),
    "left: lists": (with_left([[LEFT]]), "left_blocks"),
    "left: an object": (with_left({LEFT: 1}), "left_blocks"),
    "left: a name that leads elsewhere": (with_left(["../x"]), "left_blocks"),
    "left: twice": (with_left([LEFT, LEFT]), "left_blocks"),
    "left: a layer that is there": (with_left([LEFT, PLAIN]), "left_blocks"),
    "own: no name of a schema": (lambda w: own(w).pop("schema_name"), f"{OWN}: schema_name"),
    "own: a number for a name": (with_own(schema_name=8), f"{OWN}: schema_name"),
    "own: no input schema": (lambda w: own(w).pop("input_schema"), f"{OWN}: input_schema"),
    "own: a list of input schemas": (with_own(input_schema=["fp8"]), f"{OWN}: input_schema"),
    "own: no weights": (lambda w: own(w).pop("weight_schema"), f"{OWN}: weight_schema"),
    "own: weights in words": (with_own(weight_schema="fp8"), f"{OWN}: weight_schema"),
    "own: unknown weights": (with_own(weight_schema={"b_dtype": "float3"}), f"{OWN}: weight_schema: b_dtype"),
    "own: no activations": (lambda w: own(w).pop("activation_schema"), f"{OWN}: input_schema"),
    "own: activations in words": (with_own(activation_schema="float8e4m3"), f"{OWN}: activation_schema"),
    "own: pairs that are none": (with_own(activation_schema=["abc"]), f"{OWN}: activation_schema"),
    "own: unknown activations": (with_own(activation_schema={"a_dtype": 8}), f"{OWN}: a_dtype"),
    "own: no target": (lambda w: own(w).pop("target"), f"{OWN}: target"),
    "own: another target": (with_own(target="sm80"), f"{OWN}: target"),
    "own: a compiler": (with_own(cuda="13.0"), f"{OWN}: cuda"),
    "activations in words": (lambda w: w.update(activation_schema="abc"), "activation_schema"),
    "activations that are pairs": (lambda w: w.update(activation_schema=["abc"]), "activation_schema"),
    "compiler: a number": (lambda w: w.update(cuda=13.0), "cuda"),
    "version: the first": (lambda w: w.update(format_version=1), "format_version"),
    "version: the second for nothing": (nothing_own, "format_version"),
    "the checkpoint layout": (lambda w: w.update(layout="checkpoint"), "layout"),
}


def test_as_it_was_made_it_is_good(made: Path) -> None:
    for read in readers(made).values():
        read()
    assert hqconv.verify(made, checks=["files", "weights"]).passed


@pytest.mark.parametrize("name", EDITS)
def test_what_cannot_be_is_one_sentence_for_every_reader(name: str, made: Path, tmp_path: Path) -> None:
    edit, where = EDITS[name]
    out = edited(made, tmp_path / "out", edit)
    for reader, read in readers(out).items():
        with pytest.raises(InputError if reader == "as a source" else VerificationError) as caught:
            read()
        shown = f"{caught.value.where}, {caught.value.found}"
        assert where.split(": ")[-1] in shown, (reader, shown)
        if reader == "inspect":
            assert caught.value.where.endswith(where), caught.value.where
            assert caught.value.found
    for checks in (["files"], ["weights"]):
        assert not hqconv.verify(out, checks=checks).passed


def test_a_size_that_is_no_number_is_refused_by_the_plugin(made: Path, tmp_path: Path) -> None:
    """Python's JSON has infinity."""
    out = edited(made, tmp_path / "out", lambda w: own(w)["w13"].update(shape_n=float("inf")))
    with pytest.raises(VerificationError, match="manifest is damaged"):
        open_artifact_view(ArtifactLocation(str(out)))
