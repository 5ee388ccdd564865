"""An artifact as a source: what was converted once is cut or requantized again without the original model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv import dequantize
from hqconv.errors import InputError
from hqconv.schemas.grid import Grid
from tests.make import conversions, models
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import assert_same, load_all

LAYER = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    return models.save_model(
        folder / "src", "deepseek_v3", moe_intermediate_size=256, hidden_size=128
    )


def again(
    src: Path, out: Path, schema: str, grid: Grid, layout: str = "kernel", **words: str
) -> Path:
    """Convert an artifact, and verify the new one against it and alone."""
    conversions.run(src, out, schema, grid, layout=layout, **words)
    conversions.assert_verified(out, src)
    return out


@pytest.mark.parametrize("schema", ["mxfp4", "int4-g32-zp", "fp8-block"])
def test_the_kernel_layout_becomes_a_checkpoint(source: Path, tmp_path: Path, schema: str) -> None:
    conversions.run(source, tmp_path / "first", schema, Grid(tp=2, ep=2))
    conversions.run(source, tmp_path / "expected", schema, layout="checkpoint")
    found = again(tmp_path / "first", tmp_path / "found", "source", Grid(), "checkpoint")
    expected = load_all(tmp_path / "expected")
    assert load_all(found).keys() == expected.keys()
    for name, tensor in load_all(found).items():
        assert_same(tensor, expected[name], name)


def test_another_schema_is_quantized_from_the_decoded_weights(source: Path, tmp_path: Path) -> None:
    conversions.run(source, tmp_path / "first", "mxfp4", Grid(tp=2))
    found = again(tmp_path / "first", tmp_path / "found", "mxfp8", Grid())
    words = conversions.manifest(found)
    assert {layer["conversion"] for layer in words["blocks"].values()} == {"requantized"}
    # Each e2m1 value times a power of two is an e4m3 value times a power of two.
    before, after = dequantize(tmp_path / "first", layer=LAYER), dequantize(found, layer=LAYER)
    assert all(torch.equal(before[name], after[name]) for name in before)
    errors = words["blocks"][LAYER]["quantization_error"]["w1"]
    assert errors["num_exact_groups"] == errors["num_groups"] > 0
    assert errors["relative_error"] == 0


def test_scales_that_float16_flushed_cannot_be_told(tmp_path: Path) -> None:
    src = models.save_model(tmp_path / "src", "mixtral")
    path = next(
        p
        for p in sorted(src.glob("model-*.safetensors"))
        if any("experts.0.w1" in n for n in load_file(p))
    )
    tensors = load_file(path)
    name = next(name for name in tensors if "experts.0.w1" in name)
    tensors[name][0, :32] = 2.0**-60
    save_file(tensors, path, {"format": "pt"})
    conversions.run(src, tmp_path / "first", "mxfp4", dtype="float16")
    with pytest.raises(InputError, match="lost scales"):
        again(tmp_path / "first", tmp_path / "out", "source", Grid())


def test_a_scale_that_float16_underflowed_is_a_zero_for_everyone(tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "src", num_layers=1, num_experts=2)
    tensors = load_file(src / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.gate_proj.weight"][0, :32] = 1e-9
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    for layout in ("kernel", "checkpoint"):
        conversions.run(src, tmp_path / layout, "int4-g32", layout=layout, dtype="float16")
        found = again(
            tmp_path / layout, tmp_path / f"{layout}-2", "source", Grid(2), dtype="float16"
        )
        gate = dequantize(found, layer="model.layers.0.mlp.experts")["w1"][0, 0]
        assert not gate[:32].any()
        assert gate[32:].any()
