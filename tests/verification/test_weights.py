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

import hqconv
from hqconv.artifact.reader import Artifact
from hqconv.errors import RequestError
from hqconv.humming_ops.runtime import humming_schema, resident
from hqconv.kernel_layout import transform
from hqconv.layout_decoder.decode import bits_of, decode_packed, decoded_rows, packed_shapes
from hqconv.schemas.grid import ROUND_ROBIN, Grid
from hqconv.schemas.tensors import code_of_torch
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from hqconv.sources.opening import open_source
from hqconv.verification.result import CheckResult
from hqconv.verification.weights import check_weights
from tests.make import small
from tests.make.conversions import manifest, run, schema_of
from tests.make.damage import GIB, Damaged, check_both_ways, found
from tests.make.matrices import SCHEMAS
from tests.make.quantized import quantize
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("weights") / "src", intermediate_size=256)


def weights_of(
    out: Path, src: Path | None, layers: set[int] | None = None, memory: int = GIB
) -> CheckResult:
    with Artifact(out) as artifact:
        if src is None:
            return check_weights(artifact, None, layers, 2, memory)
        with open_source(src) as source:
            return check_weights(artifact, source, layers, 2, memory)


# --- figures -----------------------------------------------------------------------------------------------


def plain_figures(src: Path, out: Path, schema: WeightSchema, role: str) -> dict[str, Any]:
    """By numpy, all experts at once."""
    tensors = load_file(src / "model.safetensors")
    matrices = [tensors[f"{LAYER}.{expert}.{ROLES[role]}.weight"] for expert in range(4)]
    w = torch.stack(matrices).double().numpy()
    d = hqconv.dequantize(out, layer=LAYER)[role].double().numpy()
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
            plain_figures(src, tmp_path / "out", resolve_schema(name), role),
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


def test_memory_for_one_expert_is_the_least(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "mxfp4")
    with pytest.raises(RequestError, match="does not fit"):
        weights_of(tmp_path / "out", src, memory=1 << 20)
    assert weights_of(tmp_path / "out", src, memory=20 << 20).status == "pass"


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


def test_a_source_of_nothing_but_nan(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "nvfp4")
    shutil.copytree(src, tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    tensors[f"{LAYER}.0.up_proj.weight"][3, 4] = math.nan
    save_file(tensors, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    result = weights_of(tmp_path / "out", tmp_path / "src")
    found(result, f"source: tensor {LAYER}.0.up_proj.weight", "A weight is NaN or infinite")


# --- packed tensors ----------------------------------------------------------------------------------------


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


# --- the padding of an uneven last rank ------------------------------------------------------------------------

TWICE = WeightSchema(
    name="twice",
    b_dtype="float4e2m1",
    bs_dtype="float8e4m3",
    weight_scale_type="group",
    weight_scale_group_size=32,
    weight_scale_2_type="channel",
)


def padding_of(monkeypatch: pytest.MonkeyPatch, tensor: str, axis: int, value: int) -> None:
    """From now on, conversions write another value into one tensor's padding."""
    pad = transform._pad

    def damaged(
        tensors: dict[str, Any], schema: WeightSchema, along: int, size: int, share: int
    ) -> dict[str, Any]:
        padded = pad(tensors, schema, along, size, share)
        one, length = (
            padded[tensor],
            tensors[tensor].size(along) if tensors[tensor].ndim > along else 0,
        )
        if along == axis and one.size(along) > length > 0:
            bits = one.view({1: torch.uint8, 2: torch.int16}[one.element_size()])
            bits.narrow(along, length, one.size(along) - length).fill_(value)
        return padded

    monkeypatch.setattr(transform, "_pad", damaged)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("gemm", "axis"), [("w13", 1), ("w2", 2)])
@pytest.mark.parametrize(
    ("schema", "tensor", "value"),
    [
        ("mxfp4", "weight_scale", 255),
        ("mxfp4", "weight_scale", 118),
        ("mxfp8", "weight_scale", 126),
        ("int4-g32", "weight_scale", 0x7FC0),
        ("nvfp4", "weight_scale", 0x7F),
        ("twice", "weight_scale_2", 0x7FC0),
    ],
)
def test_padding_of_an_uneven_last_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schema: str,
    tensor: str,
    value: int,
    gemm: str,
    axis: int,
    dtype: str,
) -> None:
    if (tensor, gemm) == ("weight_scale_2", "w2") or (value, dtype) == (255, "float16"):
        pytest.skip(
            "second scales have no columns; Humming itself cannot make a NaN of e8m0 one of float16's"
        )
    src = small.save(tmp_path / "src", small.gpt_oss_floats(320))
    made_of = TWICE if schema == "twice" else schema_of(schema)
    for is_damaged in (False, True):
        if is_damaged:
            padding_of(monkeypatch, tensor, axis, value)
        out = tmp_path / f"out-{is_damaged}"
        run(src, out, made_of, Grid(4), dtype=dtype)
        layer = next(iter(manifest(out)["blocks"]))
        for with_source in (True, False):
            with Artifact(out) as artifact, open_source(src) as source:
                weights = check_both_ways(artifact, source if with_source else None)
            assert bool(weights.findings) == is_damaged, weights.findings[:3]
        if is_damaged:
            what = "The padding of a TP rank is not "
            found(
                weights,
                f"experts/tp3-ep0/{layer}.safetensors, tensor {layer}.{gemm}_{tensor}",
                what,
            )
