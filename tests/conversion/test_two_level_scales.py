"""Static activation scales above dynamic ones of groups: nvfp4 of ModelOpt and compressed-tensors, for sm100 and later.

No GPU has run these kernels: what Humming's schemas and configs say of them is the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hqconv.errors import InputError, RequestError
from hqconv.humming_ops.runtime import humming
from hqconv.schemas.grid import Grid
from tests.make.conversions import assert_verified, manifest, run
from tests.make.input_scales import (
    compressed_nvfp4,
    expected,
    fp8,
    modelopt_nvfp4,
    scale_names,
    scales_in,
)
from tests.make.small import LAYER, E, Source, Tensors, save

SOURCES: dict[str, Callable[[], Source]] = {
    "modelopt": modelopt_nvfp4,
    "compressed": compressed_nvfp4,
}
STORED = {"modelopt": "input_scale", "compressed": "input_global_scale"}
STATIC = {"input_schema": "nvfp4-static", "target": "sm100"}


def stored_scales(tensors: Tensors, kind: str, roles: tuple[str, ...]) -> torch.Tensor:
    """[E, roles]: as the checkpoint has them."""
    names = [[f"{LAYER}.{e}.{role}.{STORED[kind]}" for role in roles] for e in range(E)]
    return torch.stack(
        [torch.stack([tensors[name].view(()) for name in of_expert]) for of_expert in names]
    )


def hummings(kind: str, gemm: str) -> dict[str, torch.Tensor]:
    """Humming's own conversion of a GEMM's stored scales."""
    tensors, config = SOURCES[kind]()
    words = dict(config["quantization_config"])
    words |= words.get("config_groups", {}).get("group_0", {}).get("input_activations", {})
    schema = humming().schema.BaseInputSchema.from_config(words)
    roles = ("gate_proj", "up_proj") if gemm == "w13" else ("down_proj",)
    stored = {STORED[kind]: stored_scales(tensors, kind, roles)}
    found, made = schema._convert_humming(stored, [], [], torch.bfloat16, E)
    assert found.input_quant_mode == "static_tensor_dynamic_group"
    assert (str(found.a_dtype), found.input_scale_group_size) == ("float4e2m1", 16)
    return dict(made)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("target", "grid"), [("sm100", Grid(2, 2)), ("sm120", Grid())])
def test_every_rank_has_hummings_scale(kind: str, target: str, grid: Grid, tmp_path: Path) -> None:
    source = save(tmp_path / "src", SOURCES[kind]())
    run(source, tmp_path / "out", "source", grid, input_schema="nvfp4-static", target=target)
    made = {gemm: hummings(kind, gemm) for gemm in ("w13", "w2")}
    assert all(list(one) == ["input_scale_2"] for one in made.values())
    wanted = {gemm: one["input_scale_2"].item() for gemm, one in made.items()}
    assert scales_in(tmp_path / "out", "input_scale_2") == {
        f"tp{t}-ep{e}": wanted for t, e in grid.ranks
    }
    for gemm, scale in expected().items():
        assert wanted[gemm] == pytest.approx(scale, rel=1e-6)  # inverses are rounded twice
    document = manifest(tmp_path / "out")
    assert document["activation_schema"]["input_quant_mode"] == "static_tensor_dynamic_group"
    assert {gemm: document["blocks"][LAYER][gemm]["input_scale"] for gemm in wanted} == wanted
    names = {name.replace("input_scale", STORED[kind]) for name, _, _ in scale_names()}
    assert names <= document["tensors"]["converted"].keys()
    assert_verified(tmp_path / "out", source)


def test_hummings_layer_config_reads_the_scale_of_a_tensor(tmp_path: Path) -> None:
    run(save(tmp_path / "src", modelopt_nvfp4()), tmp_path / "out", "source", **STATIC)
    run(tmp_path / "src", tmp_path / "dynamic", "source", input_schema="nvfp4", target="sm100")
    path = f"experts/tp0-ep0/{LAYER}.safetensors"
    with safe_open(tmp_path / "out" / path, "pt") as file:
        documents = {gemm: json.loads(file.metadata()[gemm]) for gemm in ("w13", "w2")}
    for document in documents.values():
        config = humming().config.LayerConfig(**document)
        assert config.has_input_scale_2
        assert config.is_tensor_input_scale_2
        assert config.is_group_input_scale
        assert str(config.as_dtype) == "float8e4m3"
    static, dynamic = (load_file(tmp_path / name / path) for name in ("out", "dynamic"))
    assert static.keys() - dynamic.keys() == {
        f"{LAYER}.{gemm}_input_scale_2" for gemm in ("w13", "w2")
    }
    assert all(
        torch.equal(static[name].view(torch.uint8), one.view(torch.uint8))
        for name, one in dynamic.items()
    )


def weights_only() -> Source:
    tensors, config = modelopt_nvfp4()
    config["quantization_config"]["quant_algo"] = "W4A16_NVFP4"
    return tensors, config


def without(source: Source) -> Source:
    tensors, config = source
    return {name: tensor for name, tensor in tensors.items() if "input_" not in name}, config


REFUSED: dict[str, tuple[Callable[[], Source], dict[str, Any], str]] = {
    "another GPU": (modelopt_nvfp4, {"target": "sm90"}, "no kernel"),
    "no scales": (lambda: without(modelopt_nvfp4()), {}, "no static activation scales"),
    "weights only": (weights_only, {}, "not measured for these"),
    "fp8": (fp8, {"schema": "nvfp4"}, "not measured for these activations"),
    "of fp4 for fp8": (
        modelopt_nvfp4,
        {"input_schema": "fp8-static", "schema": "fp8-tensor"},
        "not measured for these",
    ),
    "checkpoint": (
        modelopt_nvfp4,
        {"layout": "checkpoint"},
        "cannot load static activation scales",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_before_any_work(case: str, tmp_path: Path) -> None:
    make, words, what = REFUSED[case]
    with pytest.raises(RequestError, match=what):
        run(
            save(tmp_path / "src", make()),
            tmp_path / "out",
            **{"schema": "source", **STATIC, **words},
        )


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), 1e-42])
def test_numbers_without_an_inverse_are_refused(number: float, tmp_path: Path) -> None:
    tensors, config = compressed_nvfp4()
    name = f"{LAYER}.2.up_proj.input_global_scale"
    tensors[name] = torch.full((1,), number)
    with pytest.raises(InputError) as error:
        run(save(tmp_path / "src", (tensors, config)), tmp_path / "out", "source", **STATIC)
    assert name in error.value.where
