"""Conversions whose weights are rotated: what they say, their bytes, the proof, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hqconv
from hqconv.artifact.reader import Artifact
from hqconv.errors import RequestError
from hqconv.kernel_layout import fused_moe
from hqconv.layout_decoder.decode import unrotated
from hqconv.quantization.quantized import rotate
from hqconv.schemas.activation import Activation
from hqconv.schemas.grid import Grid
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.sources.opening import open_source
from hqconv.verification import kernel
from hqconv.verification.reference import Routing, moe_forward
from tests.make.conversions import assert_verified, manifest, run
from tests.make.damage import LAYER, both_ways
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import load_all

ROTATED = {
    "int4": {"b_dtype": "uint4", "weight_scale_group_size": 64, "hadamard_block_size": 128},
    "nvfp4": {
        "b_dtype": "float4e2m1",
        "bs_dtype": "float8e4m3",
        "weight_scale_group_size": 16,
        "weight_scale_2_type": "tensor",
        "hadamard_block_size": 32,
    },
    "int8": {"b_dtype": "uint8", "weight_scale_type": "channel", "hadamard_block_size": 128},
    "fp8-block": {
        "b_dtype": "float8e4m3",
        "weight_scale_type": "block",
        "weight_scale_group_size": 128,
        "weight_scale_group_size_n": 128,
        "hadamard_block_size": 256,
    },
}
GRIDS = {"int4": Grid(2, 2), "nvfp4": Grid(4), "int8": Grid(2), "fp8-block": Grid()}


def schema_of(name: str, **words: Any) -> WeightSchema:
    return WeightSchema(f"{name}-rotated", **{**ROTATED[name], **words})


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rotation") / "src"
    return write_qwen3_moe(folder, num_layers=1, hidden_size=256, intermediate_size=256)


def weights_of(src: Path, expert: int) -> dict[str, torch.Tensor]:
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    tensors = load_all(src)
    return {role: tensors[f"{LAYER}.{expert}.{name}.weight"] for role, name in names.items()}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", ROTATED)
def test_the_artifact_is_proven_and_gives_the_source_back(
    name: str, src: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(src, out, schema_of(name), GRIDS[name])
    assert_verified(out, src)
    result = both_ways(out, src)
    assert not result.findings
    document = manifest(out)
    assert document["weight_schema"]["hadamard_block_size"] == ROTATED[name]["hadamard_block_size"]
    assert document["blocks"][LAYER]["conversion"] == "quantized"
    back = hqconv.dequantize(out, layer=LAYER)
    for expert in range(4):
        for role, weight in weights_of(src, expert).items():
            error = document["blocks"][LAYER]["quantization_error"][role]["relative_error"]
            found = relative(back[role][expert], weight)
            assert (
                0.8 * error < found < 1.25 * error + 0.002
            )  # and the rotated weights' own rounding
            assert (
                relative(rotate(back[role][expert], 32), weight) > 0.9
            )  # what is not turned back is nothing alike


def test_a_rotated_artifact_is_a_source_of_what_it_means(src: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run(src, first, schema_of("int8"), Grid(2))
    for name, schema in (("same", schema_of("int8")), ("other", "int4-g64")):
        run(first, tmp_path / name, schema)
        assert manifest(tmp_path / name)["blocks"][LAYER]["conversion"] == "requantized"
        assert_verified(tmp_path / name, first)
    before = hqconv.dequantize(first, layer=LAYER)
    assert relative(hqconv.dequantize(tmp_path / "same", layer=LAYER)["w3"], before["w3"]) < 0.01
    assert (
        0.08
        < relative(hqconv.dequantize(tmp_path / "other", layer=LAYER)["w3"], before["w3"])
        < 0.15
    )
    with pytest.raises(RequestError, match="No schema of Humming keeps"):
        run(first, tmp_path / "kept", "source")


def test_blocks_are_not_cut(src: Path, tmp_path: Path) -> None:
    wide = schema_of("int8", hadamard_block_size=256)
    with pytest.raises(RequestError, match="rotated block") as refused:
        run(src, tmp_path / "out", wide, Grid(2))
    assert refused.value.remedy == "TP sizes that work: 1."
    with pytest.raises(RequestError, match="does not fit the hidden size"):
        run(src, tmp_path / "out", schema_of("int8", hadamard_block_size=512))


@pytest.mark.parametrize("size", [128, 64, 0])
def test_the_kernel_check_wants_rotated_intermediates(
    size: int, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain block stands in for the kernel, with w2's inputs rotated in blocks of `block`: 128 is the schema's."""
    run(src, tmp_path / "out", schema_of("int8"), Grid())
    back = hqconv.dequantize(tmp_path / "out", layer=LAYER)

    def stand_in(
        gemms: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *_: Any
    ) -> Any:
        assert {gemm.rotation for gemm in gemms.values()} == {128}
        experts = [{role: values[e].double() for role, values in back.items()} for e in range(4)]
        out, hidden = moe_forward(
            x.double(), Routing(ids, weights), experts.__getitem__, Activation("silu")
        )
        return out.float(), unrotated(hidden, size)

    monkeypatch.setattr(kernel, "fused_moe", stand_in)
    monkeypatch.setattr(kernel, "compile_kernels", lambda *_: None)
    monkeypatch.setattr(fused_moe, "layer_config", lambda words: words)
    monkeypatch.setattr(kernel, "layer_config", lambda words: words)
    with Artifact(tmp_path / "out") as artifact, open_source(src) as source:
        result = kernel.check_kernel(artifact, source, [LAYER], [32], torch.device("cpu"))
    assert bool(result.findings) == (size != 128), result.findings
    assert result.measured[LAYER]["weights_against_source"]["w2"] < 0.02
