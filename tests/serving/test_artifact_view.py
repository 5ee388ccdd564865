"""A manifest as a server sees it: its facts, small enough to be sent to workers, or a reason why it is none."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from hqconv.errors import RequestError
from hqconv.schemas.activation import Activation
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import A16, INPUT_PRESETS
from hqconv.schemas.weight_schema import resolve_schema
from hqconv.serving.artifact_view import ArtifactLocation, ArtifactView, open_artifact_view
from tests.make.conversions import manifest, run, write_manifest
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
GRID = Grid(tp=2, ep=2, placement="round_robin", redundant=2)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("served")
    source = write_qwen3_moe(
        work / "original", num_experts=4, hidden_size=128, intermediate_size=256
    )
    run(source, work / "out", "mxfp4", GRID)
    return work / "out"


@pytest.fixture
def out(artifact: Path, tmp_path: Path) -> Path:
    """One whose manifest may be damaged; its tensors are not looked at."""
    (tmp_path / "out").mkdir()
    return Path(shutil.copy(artifact / "hqconv.json", tmp_path / "out")).parent


def opened(out: Path) -> ArtifactView:
    return open_artifact_view(ArtifactLocation(str(out)))


def test_the_facts_are_the_manifests(artifact: Path) -> None:
    view, document = opened(artifact), manifest(artifact)
    assert view.source_name == "original"
    assert (view.layer_spec.schema, view.grid) == (resolve_schema("mxfp4"), GRID)
    assert (view.dtype, view.sm_version) == ("bfloat16", 90)
    assert view.humming_version == document["humming_kernels_version"]
    assert list(view.layers) == [LAYER, LAYER.replace("0", "1")]
    layer = view.layers[LAYER]
    assert (layer.name, layer.index) == (LAYER, 0)
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (4, 128, 256)
    assert (layer.activation, layer.gated) == (Activation("silu"), True)
    for gemm in ("w13", "w2"):
        assert layer.gemms[gemm].to_dict() == document["blocks"][LAYER][gemm]
    assert len(view.files) == 2 * GRID.tp * GRID.ep
    assert all((artifact / name).stat().st_size == size for name, (size, _) in view.files.items())
    # it is sent to workers: a model of 60 layers on 16 ranks has 960 files
    assert len(pickle.dumps(view)) < (artifact / "hqconv.json").stat().st_size / 3


def edit(out: Path, **entries: Any) -> None:
    write_manifest(out, {**manifest(out), **entries})


@pytest.mark.parametrize("name", ["fp8", "fp8-g128", "int8"])
def test_quantized_activations_are_known(out: Path, name: str) -> None:
    assert opened(out).layer_spec.inputs == A16
    inputs = INPUT_PRESETS[name]
    edit(out, input_schema=name, activation_schema=inputs.humming_fields())
    assert opened(out).layer_spec.inputs == inputs


def test_the_checkpoint_layout_is_refused(out: Path) -> None:
    edit(out, layout="checkpoint")
    with pytest.raises(
        RequestError, match=r"expected: kernel\n  found: checkpoint\n(.|\n)*without this plugin"
    ):
        opened(out)
