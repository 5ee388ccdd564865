"""The checkpoint layout through a stock vLLM: its own classes load it, rank by rank.

Every cell (schema × dtype × ranks) must be what `ENGINE.checkpoint_layout_obstacle` says: the bytes and LayerConfigs of
the kernel layout of the same conversion, or not served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("vllm", reason="needs vLLM's Python files: see docs/serving.md")

from tests.make.vllm_cpu import build_layer, config, parallel  # isort: skip  # before any other part of vLLM
from vllm.model_executor.layers.quantization.humming import HummingConfig, HummingMoEMethod

from hqconv.artifact.load import load_layer
from hqconv.errors import RequestError
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.grid import Grid
from hqconv.schemas.options import load_recipe
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS, LayerSchema, WeightSchema
from tests.make.conversions import run, schema_of
from tests.make.qwen import write_qwen3_moe

pytestmark = pytest.mark.vllm
LAYER = "model.layers.0.mlp.experts"
EXPERTS = 4
SIZES, ODD_SIZES = (
    (256, 256),
    (320, 192),
)  # H and I; the latter are padded, to 256 rows and 128 columns
GRIDS = {"tp1": Grid(), "tp2": Grid(tp=2), "ep2": Grid(ep=2)}
ENDINGS = ("-g128", "-g32", "-c", "-zp", "-fpzp", "-c-zp", "-c-fpzp")
INTEGERS = [f"int{bits}{ending}" for bits in range(1, 9) for ending in ENDINGS]
SCALED = (
    *(
        "int4-g32-e4m3",
        "int4-g32-e4m3-row",
        "int8-g32-e4m3-row",
        "int4-g32-e5m2-row",
        "int4-g32-e8m0-row",
    ),
    *(
        "fp4-g32-e4m3-row",
        "fp4-g32-e8m0-row",
        "fp8-g32-e4m3-row",
        "fp8-g32-e8m0-row",
        "fp6-e3m2-g32-e4m3-row",
    ),
)
# What a .toml file can say beyond the presets: scale dtypes, group sizes, block shapes and second scales.
WORDS: dict[str, dict[str, Any]] = {
    "float4-own-scale": {"b_dtype": "float4e2m1", "weight_scale_group_size": 32},
    "float4-e4m3-alone": {
        "b_dtype": "float4e2m1",
        "bs_dtype": "float8e4m3",
        "weight_scale_group_size": 16,
    },
    "float4e0m3": {"b_dtype": "float4e0m3", "weight_scale_group_size": 32},
    "float8-g128": {"b_dtype": "float8e4m3", "weight_scale_group_size": 128},
    "float8-e8m0-channel": {
        "b_dtype": "float8e4m3",
        "bs_dtype": "float8e8m0",
        "weight_scale_type": "channel",
    },
    "float8-block-64": {
        "b_dtype": "float8e4m3",
        "weight_scale_type": "block",
        "weight_scale_group_size": 64,
        "weight_scale_group_size_n": 64,
    },
    "nvfp4-channel": {
        "b_dtype": "float4e2m1",
        "bs_dtype": "float8e4m3",
        "weight_scale_group_size": 16,
        "weight_scale_2_type": "channel",
    },
    "int4-e4m3": {"b_dtype": "uint4", "bs_dtype": "float8e4m3", "weight_scale_group_size": 32},
    "int4-rotated": {"b_dtype": "uint4", "weight_scale_group_size": 64, "hadamard_block_size": 64},
}


def _own(name: str) -> WeightSchema:
    return WeightSchema(name=name, **{"weight_scale_type": "group", **WORDS[name]})


SCHEMAS = {name: schema_of(name) for name in (*PRESETS, *INTEGERS, *SCALED)} | {
    name: _own(name) for name in WORDS
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """A model of one layer for each pair of sizes."""
    folder = tmp_path_factory.mktemp("sources")
    words = {"num_layers": 1, "num_experts": EXPERTS}
    return {
        (hidden, inner): write_qwen3_moe(
            folder / f"{hidden}-{inner}", hidden_size=hidden, intermediate_size=inner, **words
        )
        for hidden, inner in (SIZES, ODD_SIZES)
    }


def experts_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts' tensors as `AutoWeightsLoader` hands them to the layer: by their names below the layer's."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(f"{LAYER}."):
                    yield name.removeprefix(f"{LAYER}."), file.get_tensor(name)


def quantization_of(folder: Path) -> HummingConfig:
    return HummingConfig.from_config(
        json.loads((folder / "config.json").read_text())["quantization_config"]
    )


def stock_layer(folder: Path, sizes: tuple[int, int], dtype: str, ranks: Any) -> Any:
    """A rank's experts as stock vLLM has them before the first request."""
    hidden, inner = sizes
    words = {"num_experts": EXPERTS, "hidden": hidden, "inter": inner, "grid": ranks}
    layer = build_layer(quantization_of(folder), LAYER, dtype=getattr(torch, dtype), **words)
    for parameter in layer.parameters():  # nothing is right because memory happened to be zero
        parameter.data.view(torch.uint8).fill_(0x77)
    assert list(layer.load_weights(experts_of(folder)))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def is_equal(layer: Any, expected: Any) -> bool:
    """Names, shapes, dtypes and bytes of all parameters, and both LayerConfigs."""
    tensors = {
        f"{gemm}_{name}": tensor
        for gemm, of in expected.items()
        for name, tensor in of.tensors.items()
    }
    found = {name: parameter.data for name, parameter in layer.named_parameters()}
    if found.keys() != tensors.keys():
        return False
    configs = all(layer.humming_configs[gemm] == of.layer_config() for gemm, of in expected.items())
    return configs and all(_same_bytes(found[name], tensor) for name, tensor in tensors.items())


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))


def is_served(
    source: Path, folder: Path, sizes: tuple[int, int], schema: LayerSchema, dtype: str, grid: Grid
) -> bool:
    """Whether every rank of a stock vLLM ends with what the kernel layout of the same conversion holds."""
    packed, kernel = folder / "checkpoint", folder / "kernel"
    run(source, packed, schema, layout="checkpoint", dtype=dtype)
    run(source, kernel, schema, grid, dtype=dtype)
    for tp_rank, ep_rank in grid.ranks:
        ranks = parallel(grid.tp, tp_rank, grid.ep, ep_rank)
        try:
            layer = stock_layer(packed, sizes, dtype, ranks)
        except (AssertionError, IndexError, KeyError, ValueError):
            return False
        if not is_equal(layer, load_layer(kernel, LAYER, tp_rank, ep_rank)):
            return False
        asked = layer.quant_method.moe_quant_config
        if (asked.w1_hadamard_block_size, asked.w2_hadamard_block_size) != tuple(
            schema.of(gemm).hadamard_block_size for gemm in ("w13", "w2")
        ):
            return False
    return True


@pytest.mark.parametrize("dtype", PARAM_DTYPES)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_said_of_a_schema_is_what_happens(
    name: str, grid: str, dtype: str, sources: dict[tuple[int, int], Path], tmp_path: Path
) -> None:
    schema = SCHEMAS[name]
    with config():
        try:
            served = is_served(sources[SIZES], tmp_path, SIZES, schema, dtype, GRIDS[grid])
        except RequestError as error:  # a 16-bit scale dtype that is not the parameters'
            assert "16-bit scale dtype" in str(error)  # noqa: PT017
            return
    assert served == (ENGINE.checkpoint_layout_obstacle(schema, dtype) is None)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "fp8", "int8", "int4-g32", "int3-g32"])
def test_sizes_that_are_padded(
    name: str, grid: str, sources: dict[tuple[int, int], Path], tmp_path: Path
) -> None:
    with config():
        assert is_served(
            sources[ODD_SIZES], tmp_path, ODD_SIZES, schema_of(name), "bfloat16", GRIDS[grid]
        )


def test_layers_that_are_left_as_they_are_are_plain_ones(
    sources: dict[tuple[int, int], Path], tmp_path: Path
) -> None:
    """By their numbers alone, whatever prefix vLLM's model class puts before them."""
    source = write_qwen3_moe(
        tmp_path / "src", num_layers=12, hidden_size=128, intermediate_size=128
    )
    (tmp_path / "r.toml").write_text('[[override]]\nlayers = "1"\nschema = "none"\n')
    overrides = load_recipe(tmp_path / "r.toml").overrides
    run(source, tmp_path / "out", "mxfp4", layout="checkpoint", overrides=overrides)
    quantization = quantization_of(tmp_path / "out")
    with config():
        for name, is_packed in (
            ("model.layers.0.mlp", True),
            ("model.layers.1.mlp", False),
            ("language_model.model.layers.1.mlp", False),
            ("model.layers.1.mtp_block.mlp", False),
            ("model.layers.10.mlp", True),
            ("model.layers.11.mlp", True),
        ):
            found = quantization.get_quant_config_for_layer(f"{name}.experts", "moe")
            assert (found is not None) == is_packed, name
        for name in ("mlp.gate", "mlp.shared_expert.gate_up_proj", "self_attn.qkv_proj"):
            found = quantization.get_quant_config_for_layer(f"model.layers.0.{name}", "linear")
            assert found is None, name


def test_router_weights_on_the_inputs_are_not_passed_on() -> None:
    """Llama 4's answers: the experts are read rightly, and are then not asked for what the model needs."""
    passed: dict[str, Any] = {}
    method = object.__new__(HummingMoEMethod)
    method.moe_kernel = SimpleNamespace(apply=lambda **kwargs: passed.update(kwargs))
    names = ("w13_weight", "w2_weight", "activation", "global_num_experts", "expert_map")
    layer = SimpleNamespace(**dict.fromkeys(names), apply_router_weight_on_input=True)
    HummingMoEMethod.apply(method, layer, *[None] * 5)  # type: ignore[arg-type]
    assert passed["apply_router_weight_on_input"] is False
