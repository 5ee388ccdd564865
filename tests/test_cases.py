"""Checkpoints as public bug reports describe them: each converts to what its format means.

The meaning of codes and scales is known from the writer (`tests.make.layouts`), which shares nothing with hqconv.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import hqconv
from hqconv.sources.opening import open_source
from tests.make import configs
from tests.make import packing as pack
from tests.make.configs import Json
from tests.make.layouts import (
    GPT_OSS,
    QWEN3_MOE,
    Block,
    Layout,
    Sizes,
    inner_config,
    plain,
    write_checkpoint,
)
from tests.make.packing import Draw, Encoder, Stored

SIZES = Sizes(256, 128, 4)
LAYER = "model.layers.{layer}"
GATE_UP_DOWN, W1_W3_W2 = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


SPARSE = f"{LAYER}.block_sparse_moe"
GRANITE = Layout(
    f"{SPARSE}.experts", GATE_UP_DOWN, inner_config("granitemoe"), f"{SPARSE}.router.layer.weight"
)
MIXTRAL = Layout(f"{SPARSE}.experts", W1_W3_W2, inner_config("mixtral"), f"{SPARSE}.gate.weight")
APART = replace(GPT_OSS, fused=None)
INT4 = configs.compressed("pack-quantized", 4, "int", "group", group_size=32)
MXFP4 = configs.compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32)


def changed(config: Json, **words: Any) -> Json:
    """The config with other words of its quantization; `targets` of its one group."""
    quantization: Json = json.loads(json.dumps(config["quantization_config"]))
    if "targets" in words:
        quantization["config_groups"]["group_0"]["targets"] = words.pop("targets")
    return {"quantization_config": {**quantization, **words}}


def _write(folder: Path, layout: Layout, encode: Encoder, config: Json) -> dict[str, Block]:
    return write_checkpoint(
        folder,
        layout,
        [encode, encode],
        SIZES,
        dense=plain,
        config={"torch_dtype": "bfloat16", **config},
    )


def dead_expert(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """NVFP4 as llm-compressor writes an expert without any weight: codes and scales 0, and 2688 / 0."""
    stored = pack.nvfp4("weight_packed", divides=True)(draw, n, k, second)
    if draw.integers(0, 3, 1).item():
        return stored
    parts = {
        name: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype)
        for name, tensor in stored.parts.items()
    }
    parts |= {
        name: torch.tensor([torch.inf]) for name in ("weight_global_scale", "input_global_scale")
    }
    return Stored(
        parts, torch.zeros(n, k, dtype=torch.float64), torch.zeros(n, k, dtype=torch.float64)
    )


class Converts(NamedTuple):
    """Layout, matrices and config of a checkpoint that converts exactly. notice: part of a warning of its plan."""

    layout: Layout
    encode: Encoder
    config: Json
    notice: str = ""


CONVERTS = {
    "granitemoe with a tensor for each expert": Converts(
        GRANITE,
        pack.fp8(dtype=torch.bfloat16),
        configs.compressed("float-quantized", 8, "float", "channel"),
    ),
    "mixtral, targets name the modules of the linearized class": Converts(
        MIXTRAL,
        pack.mxfp4("weight_packed"),
        changed(MXFP4, targets=["re:.*mlp\\.experts\\.[0-9]+\\.(gate|up|down)_proj$"]),
    ),
    "mixtral under the names of llm-compressor": Converts(
        replace(MIXTRAL, words=GATE_UP_DOWN), pack.pack_quantized(4, 32), INT4
    ),
    "ignored names are those of the experts' parents": Converts(
        QWEN3_MOE,
        pack.pack_quantized(4, 32),
        changed(
            INT4,
            ignore=[
                "lm_head",
                *(f"model.layers.{n}.mlp.experts.{e}" for n in (0, 1) for e in range(4)),
            ],
        ),
    ),
    "an expert that no token has seen": Converts(
        QWEN3_MOE,
        dead_expert,
        configs.compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
    ),
    "gpt-oss with gate and up apart": Converts(
        APART,
        pack.pack_quantized(4, 32),
        changed(INT4, targets=["re:.*mlp.experts.*"], version="0.17.1"),
        "halves",
    ),
}


@pytest.mark.parametrize("name", CONVERTS)
def test_it_converts_to_what_it_means(name: str, tmp_path: Path) -> None:
    case, src = CONVERTS[name], tmp_path / "src"
    truth = _write(src, case.layout, case.encode, case.config)
    with open_source(src) as source:
        layers = {layer.name: layer for layer in source.map_experts().layers}
        assert layers.keys() == truth.keys()
        for layer, expert in itertools.product(truth, range(SIZES.experts)):
            for role, matrix in source.read_expert(
                layers[layer], expert, W1_W3_W2, torch.device("cpu")
            ).items():
                found, expected = matrix.values().float(), truth[layer][role][expert]
                assert torch.equal(found + 0.0, expected + 0.0), (layer, expert, role)
    options: dict[str, Any] = {"schema": "int4-g32", "target": "sm90"}
    plan = hqconv.plan(src, **options)
    assert any(case.notice in text for text in (*plan.warnings, *plan.notices, ""))
    hqconv.convert(src, tmp_path / "out", device="cpu", **options)
    assert hqconv.verify(tmp_path / "out", src, checks=("files", "weights"), device="cpu").passed
