"""A manifest as a server sees it: its facts, small enough to be sent to workers, or a reason why it is none."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hqconv.errors import RequestError, VerificationError
from hqconv.schemas.activation import Activation
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import A16, INPUT_PRESETS
from hqconv.schemas.weight_schema import resolve_schema
from hqconv.serving.artifact_location import ArtifactLocation
from hqconv.serving.artifact_view import ArtifactView, open_artifact_view
from tests.make.conversions import manifest, run, write_manifest
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
GRID = Grid(tp=2, ep=2, placement="round_robin", redundant=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("served")
    source = write_qwen3_moe(work / "original", num_experts=4, hidden_size=128, intermediate_size=256)
    run(source, work / "out", "mxfp4", GRID)
    return work / "out"


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """One whose manifest may be damaged; its tensors are not looked at."""
    (tmp_path / "out").mkdir()
    return Path(shutil.copy(made / "hqconv.json", tmp_path / "out")).parent


def opened(out: Path) -> ArtifactView:
    return open_artifact_view(ArtifactLocation(str(out)))


def test_the_facts_are_the_manifests(made: Path) -> None:
    view, words = opened(made), manifest(made)
    assert view.location == ArtifactLocation(str(made))
    assert (view.source_name, view.kernel_spec.schema, view.grid) == ("original", resolve_schema("mxfp4"), GRID)
    assert (view.dtype, view.sm_version) == ("bfloat16", 90)
    assert view.humming_version == words["humming_kernels_version"]
    assert [(name, block.name, block.index) for name, block in view.layers.items()] == [
        (f"model.layers.{layer}.mlp.experts",) * 2 + (layer,) for layer in (0, 1)
    ]
    block = view.layers[LAYER]
    assert (block.num_experts, block.hidden_size, block.intermediate_size) == (4, 128, 256)
    assert (block.activation, block.gated) == (Activation("silu"), True)
    for gemm in ("w13", "w2"):
        stored = words["blocks"][LAYER][gemm]
        assert block.gemms[gemm].to_dict() == stored


def test_the_files_are_those_of_ranks_alone(made: Path) -> None:
    files = opened(made).files
    assert set(files) == {path.relative_to(made).as_posix() for path in (made / "experts").rglob("*.safetensors")}
    assert len(files) == 2 * GRID.tp * GRID.ep
    assert all((made / name).stat().st_size == size for name, (size, _) in files.items())


def test_it_can_be_sent_and_is_small(made: Path) -> None:
    """A model of 60 layers on 16 ranks has 960 files: some 150 KB, not the manifest with its tensors."""
    view = opened(made)
    sent = pickle.dumps(view)
    assert pickle.loads(sent) == view
    assert len(sent) < 1000 + 600 * len(view.layers) + 200 * len(view.files)
    assert len(sent) < (made / "hqconv.json").stat().st_size / 3


def test_a_link_to_the_folder_is_as_good(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made)
    assert opened(tmp_path / "link").layers == opened(made).layers


def edit(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    words = manifest(out)
    change(words)
    write_manifest(out, words)


def layer(words: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = words["blocks"][LAYER]
    return found


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no key": (lambda m: m.pop("tp"), "tp"),
    "a text for a number": (lambda m: m.update(ep="2"), "ep"),
    "true for a number": (lambda m: m.update(tp=True), "tp"),
    "no ranks": (lambda m: m.update(tp=0), "json: tp\n"),
    "too many ranks": (lambda m: m.update(ep=10**9), "json: ep\n"),
    "another placement": (lambda m: m.update(expert_placement="anywhere"), "expert_placement"),
    "fewer than no copies": (lambda m: m.update(redundant_experts=-1), "redundant_experts"),
    "no GPU": (lambda m: m.update(target="h200"), "h200"),
    "a schema that cannot be": (lambda m: m["weight_schema"].update(b_dtype="float3"), "b_dtype"),
    "an unknown field of a schema": (lambda m: m["weight_schema"].update(more=1), "weight_schema"),
    "no flags": (lambda m: layer(m)["w13"].pop("flags"), "flags"),
    "no flags but a number": (lambda m: layer(m)["w13"].update(flags=3), "w13: flags"),
    "no GEMM": (lambda m: layer(m).pop("w2"), "w2"),
    "a list for a GEMM": (lambda m: layer(m).update(w2=[]), ": w2\n"),
    "no shape": (lambda m: layer(m)["w2"].pop("shape_k"), "shape_k"),
    "words for a shape": (lambda m: layer(m)["w2"].update(shape_k="wide"), "wide"),
    "no activation": (lambda m: layer(m).pop("activation"), "activation"),
    "a layer's name that leads elsewhere": (lambda m: m["blocks"].update({"../x": layer(m)}), "names of modules"),
    "a file without a digest": (lambda m: m["files"]["config.json"].pop("sha256"), "sha256"),
    "a list of files": (lambda m: m.update(files=[]), "files"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_manifest_is_refused(out: Path, what: str) -> None:
    change, message = DAMAGES[what]
    edit(out, change)
    with pytest.raises(VerificationError, match=message) as caught:
        opened(out)
    assert "hqconv.json" in caught.value.where
    assert "again" in caught.value.remedy


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", "[" * 100_000, '{"format_version": true}'])
def test_what_is_no_manifest_at_all_is_refused(out: Path, text: str) -> None:
    (out / "hqconv.json").write_text(text, encoding="latin-1")
    with pytest.raises(VerificationError, match=r"manifest is damaged(.|\n)*hqconv\.json"):
        opened(out)


@pytest.mark.parametrize("name", ["fp8", "fp8-g128", "int8"])
def test_quantized_activations_are_known(out: Path, name: str) -> None:
    assert opened(out).kernel_spec.inputs == A16
    inputs = INPUT_PRESETS[name]
    edit(out, lambda words: words.update(input_schema=name, activation_schema=inputs.humming_fields()))
    assert opened(out).kernel_spec.inputs == inputs


def test_activations_without_their_schema_are_refused(out: Path) -> None:
    """Their layout is another one, and 16-bit activations would be handed to it."""
    edit(out, lambda words: words.update(input_schema="fp8"))
    with pytest.raises(VerificationError, match=r"manifest is damaged(.|\n)*input_schema"):
        opened(out)


def test_the_checkpoint_layout_is_refused(out: Path) -> None:
    edit(out, lambda words: words.update(layout="checkpoint"))
    with pytest.raises(RequestError, match=r"expected: kernel\n  found: checkpoint\n(.|\n)*without this plugin"):
        opened(out)


def test_a_newer_version_is_refused_by_its_number(out: Path) -> None:
    edit(out, lambda words: words.update(format_version=3, hqconv_version="0.9"))
    with pytest.raises(RequestError, match=r"newer hqconv(.|\n)*3 \(hqconv 0\.9\)(.|\n)*Upgrade"):
        opened(out)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"not an hqconv artifact(.|\n)*" + re.escape(str(tmp_path))):
        opened(tmp_path)


def test_an_unfinished_conversion_is_called_that(out: Path) -> None:
    (out / "hqconv.json").rename(out / ".hqconv-progress.jsonl")
    with pytest.raises(VerificationError, match=r"unfinished(.|\n)*--resume"):
        opened(out)


def test_more_keys_do_no_harm(out: Path) -> None:
    before = opened(out)
    edit(out, lambda words: words.update(more={"a": 1}))
    edit(out, lambda words: layer(words).update(more=1))
    assert opened(out) == before
