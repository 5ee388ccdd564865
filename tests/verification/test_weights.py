"""The `weights` check: its figures against plain arithmetic, and what it takes for granted."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv.artifact.expert_reader import join
from hqconv.artifact.reader import Artifact
from hqconv.errors import RequestError
from hqconv.humming_ops.runtime import humming_schema, resident
from hqconv.layout_decoder.codes import unpack_fields
from hqconv.layout_decoder.decode import (
    DecodedStack,
    bits_of,
    decode_packed,
    decoded_rows,
    packed_shapes,
)
from hqconv.schemas.grid import ROUND_ROBIN, Grid
from hqconv.schemas.tensors import code_of_torch
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from hqconv.sources.opening import open_source
from hqconv.verification.result import CheckResult
from hqconv.verification.weights import check_weights
from tests.make.conversions import run
from tests.make.damage import GIB, Damaged, found
from tests.make.kernel_tensors import problems
from tests.make.matrices import SCHEMAS
from tests.make.quantized import quantize
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("weights") / "src", intermediate_size=256)


def weights_of(
    out: Path, src: Path | None, layers: set[int] | None = None, memory: int = GIB, threads: int = 2
) -> CheckResult:
    with Artifact(out) as artifact:
        if src is None:
            return check_weights(artifact, None, layers, threads, memory)
        with open_source(src) as source:
            return check_weights(artifact, source, layers, threads, memory)


# --- figures -----------------------------------------------------------------------------------------------


def plain_figures(src: Path, schema: WeightSchema, role: str) -> dict[str, Any]:
    """By Humming's own dequantization and numpy, all experts at once."""
    tensors = load_file(src / "model.safetensors")
    sources, decoded = [], []
    for expert in range(4):
        matrices = [tensors[f"{LAYER}.{expert}.{ROLES[r]}.weight"] for r in ROLES]
        packed = [
            *quantize(matrices[:2], schema, "bfloat16"),
            *quantize(matrices[2:], schema, "bfloat16"),
        ]
        index = list(ROLES).index(role)
        with resident(torch.device("cpu")):
            values = humming_schema(schema).dequant_tensors(dict(packed[index].tensors))
        decoded.append(values.double().numpy())
        sources.append(matrices[index].double().numpy())
    w, d = np.stack(sources), np.stack(decoded)
    grouped = [
        x.reshape(*x.shape[:2], -1, schema.weight_scale_group_size or x.shape[2])
        for x in (w, w - d)
    ]
    power, error = ((x * x).sum(-1) for x in grouped)
    worst = np.unravel_index((error / power).argmax(), power.shape)
    each = np.sqrt(((w - d) ** 2).sum((1, 2)) / (w * w).sum((1, 2)))
    return {
        "relative_error": np.linalg.norm(w - d) / np.linalg.norm(w),
        "sqnr_db": 20 * math.log10(np.linalg.norm(w) / np.linalg.norm(w - d)),
        "cosine": (w * d).sum() / (np.linalg.norm(w) * np.linalg.norm(d)),
        "worst_expert": int(each.argmax()),
        "worst_relative_error": each.max(),
        "worst_group": {
            **dict(zip(("expert", "row", "group"), map(int, worst), strict=True)),
            "relative_error": math.sqrt((error / power)[worst]),
        },
        "zero_scale_share": 0.0,
    }


@pytest.mark.parametrize(
    "name", ["mxfp4", "nvfp4", "int4-g64-zp", "int3-g64", "fp8", "int4-g128-fpzp"]
)
def test_figures_are_plain_arithmetic(name: str, src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", name, Grid(2, 2))
    result = weights_of(tmp_path / "out", src)
    assert result.findings == []
    assert set(result.measured) == {LAYER, "model.layers.1.mlp.experts"}
    for role in ROLES:
        figures, expected = (
            result.measured[LAYER][role],
            plain_figures(src, resolve_schema(name), role),
        )
        group, plain_group = figures.pop("worst_group"), expected.pop("worst_group")
        assert figures == pytest.approx(expected, rel=1e-9)
        assert group == pytest.approx(plain_group, rel=1e-9)
    json.dumps(result.measured, allow_nan=False)


def test_without_a_source_only_what_can_be_said(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "mxfp4", Grid(2, 1))
    result = weights_of(tmp_path / "out", None)
    assert (result.status, result.findings) == ("pass", [])
    assert result.measured[LAYER]["w2"] == {"is_finite": True, "zero_scale_share": 0.0}
    assert result.notes[0] == "2 of 2 layers decoded, not compared with the source"


def test_an_exact_conversion_has_no_noise(src: Path, tmp_path: Path) -> None:
    """Weights that the schema holds exactly: no error, so no ratio of decibels; all-zero experts too."""
    shutil.copytree(src, tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = torch.zeros_like(tensor) if ".experts.1." in name else tensor.sign()
    save_file(tensors, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "src", tmp_path / "out", "mxfp4")
    result = weights_of(tmp_path / "out", tmp_path / "src")
    assert result.findings == []
    figures = result.measured[LAYER]["w1"]
    assert (figures["relative_error"], figures["sqnr_db"], figures["cosine"]) == (0.0, None, 1.0)


# --- choices -----------------------------------------------------------------------------------------------


def test_only_the_layers_asked_for(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "mxfp4")
    result = weights_of(tmp_path / "out", src, layers={1})
    assert list(result.measured) == ["model.layers.1.mlp.experts"]
    assert result.notes == ["1 of 2 layers compared with the source", "on the CPU"]


def test_memory_for_one_expert_is_the_least(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "mxfp4")
    with pytest.raises(RequestError, match="does not fit"):
        weights_of(tmp_path / "out", src, memory=1 << 20)
    assert weights_of(tmp_path / "out", src, memory=20 << 20).status == "pass"


def test_threads_change_nothing(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "nvfp4", Grid(2, 2))
    assert (
        len({json.dumps(weights_of(tmp_path / "out", src, threads=n).measured) for n in (1, 3)})
        == 1
    )


# --- particular layouts ------------------------------------------------------------------------------------


def test_float16_scales_below_its_range(src: Path, tmp_path: Path) -> None:
    """Gate and up share a second scale; a gate 2^-40 as large is zero for the kernels, and is not an error."""
    shutil.copytree(src, tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    tensors[f"{LAYER}.2.gate_proj.weight"].mul_(2.0**-40)
    save_file(tensors, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "src", tmp_path / "out", "mxfp4", Grid(2, 2), dtype="float16")
    result = weights_of(tmp_path / "out", tmp_path / "src")
    assert result.findings == []
    figures = result.measured[LAYER]["w1"]
    assert figures["num_flushed_scales"] == 256 * 128 // 32
    assert (figures["worst_expert"], figures["worst_relative_error"]) == (2, 1.0)
    assert "num_flushed_scales" not in result.measured[LAYER]["w2"]


def test_redundant_copies_are_identical(src: Path, tmp_path: Path) -> None:
    grid = Grid(2, 3, ROUND_ROBIN, 3)
    run(src, tmp_path / "out", "int4-g64-zp", grid)
    copy = Damaged(tmp_path / "out", src, "int4-g64-zp")
    assert copy.check()[1].findings == []
    ep_rank, local = grid.homes(4)[1][1]
    path = copy.rank_file(LAYER, 1, ep_rank)
    copy.flip(path, f"{LAYER}.w2_zero_point", local)
    for with_source in (True, False):
        _, result = copy.check(with_source)
        assert len(result.findings) == 1
        found(
            result,
            path,
            f"w2_zero_point, expert 1 (local {local})",
            "A redundant copy of an expert differs",
        )


def piece(bias: torch.Tensor) -> DecodedStack:
    codes, scale = torch.zeros(1, 2, 4, dtype=torch.uint8), torch.zeros(1, 2, 1, dtype=torch.int16)
    return DecodedStack(codes, scale, "BF16", torch.ones(1, 2, 1), bias=bias)


def test_the_w2_bias_is_on_the_first_rank_only() -> None:
    schema = resolve_schema("fp8")
    bias, zero = (torch.tensor([values], dtype=torch.int16) for values in ([1, 2], [0, 0]))
    whole = join([piece(bias), piece(zero)], 2, schema)
    assert whole.bias is not None
    assert (whole.bias.tolist(), problems(whole)) == ([[1, 2]], [])
    [fault] = [one for one in join([piece(bias), piece(bias)], 2, schema).faults if one.wrong.any()]
    assert (fault.tensor, fault.tp_rank, fault.what) == (
        "bias",
        1,
        "The w2 bias is on more than TP rank 0.",
    )
    assert fault.describe(0) == ("zero, since ranks are summed", "2 values")
    rows = join([piece(bias), piece(bias)], 1, schema)
    assert rows.bias is not None
    assert (rows.bias.tolist(), rows.codes.shape) == ([[1, 2, 1, 2]], (1, 4, 4))


def test_a_source_of_nothing_but_nan(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "nvfp4")
    shutil.copytree(src, tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    tensors[f"{LAYER}.0.up_proj.weight"][3, 4] = math.nan
    save_file(tensors, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    result = weights_of(tmp_path / "out", tmp_path / "src")
    found(result, f"source: tensor {LAYER}.0.up_proj.weight", "A weight is NaN or infinite")


def test_a_layer_of_other_sizes(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "mxfp4")
    copy = Damaged(tmp_path / "out", src, "mxfp4")
    copy.edit_manifest(lambda document: document["blocks"][LAYER].update(num_experts=3))
    found(weights_of(copy.root, src), LAYER)


# --- packed tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bits", range(1, 9))
def test_codes_are_little_endian_bit_fields(num_bits: int) -> None:
    words = np.random.default_rng(num_bits).integers(0, 1 << 32, (5, 2 * num_bits), np.uint32)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(5, -1, num_bits)
    found = unpack_fields(torch.from_numpy(words.view(np.int32)), num_bits)
    assert np.array_equal(found, (bits << np.arange(num_bits)).sum(-1))


@pytest.mark.parametrize("name", SCHEMAS)
def test_packed_shapes_are_the_quantizers(name: str) -> None:
    schema = resolve_schema(name)
    packed = quantize([torch.randn(128, 256)], schema, "bfloat16")[0]
    shapes = {key: tuple(tensor.shape) for key, tensor in packed.tensors.items()}
    expected = packed_shapes((128, 256), schema, "bfloat16")
    assert {key: shape for key, (_, shape) in expected.items()} == shapes
    bits = {key: bits_of(tensor).unsqueeze(0) for key, tensor in packed.tensors.items()}
    matrix = decode_packed(bits, schema, code_of_torch(packed.tensors["weight_scale"].dtype))
    assert matrix.codes.shape == (1, 128, 256)
    assert matrix.scale_dtype == expected["weight_scale"][0]
    with resident(torch.device("cpu")):
        decoded = humming_schema(schema).dequant_tensors(dict(packed.tensors)).numpy()
    ours = np.concatenate([rows.copy() for _, rows in decoded_rows(matrix, schema, "bfloat16")])
    assert np.array_equal(ours, decoded)


def test_packed_tensors_of_another_shape(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "mxfp4", layout="checkpoint")
    copy = Damaged(tmp_path / "out", src, "mxfp4")
    copy.edit_manifest(lambda words: words["weight_schema"].update(weight_scale_group_size=64))
    found(weights_of(copy.root, None), f"{LAYER}.0.gate_proj.", "Packed tensors are not those")


def test_scales_of_a_tensor_have_three_dimensions() -> None:
    bits = {
        "weight": torch.zeros(2, 4, 8, dtype=torch.int32),
        "weight_scale": torch.ones(2, dtype=torch.int32),
    }
    assert decode_packed(bits, resolve_schema("fp8-tensor"), "F32").scale.shape == (2, 1, 1)
