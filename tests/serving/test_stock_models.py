"""The checkpoint layout of tiny models through a stock vLLM's own model classes: which families they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")

from tests.make.vllm_loading import stand_ins, stock_model  # isort: skip  - before vLLM
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.humming import HummingMoEMethod

from hqconv.artifact.load import load_layer
from hqconv.models.families import BY_MODEL_TYPE
from hqconv.schemas.engine import ENGINE
from tests.make.conversions import manifest, run, schema_of
from tests.make.families import save_family

pytestmark = pytest.mark.vllm
# Beside the experts, vLLM puts the router's bias among a layer's parameters.
ROUTING = ("e_score_correction_bias", "hash_indices_table")
# Those that vLLM builds of transformers' own configs, without the packages of its vision models.
FAMILIES = (
    *(
        "mixtral",
        "minimax_m2",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "olmoe",
        "jamba",
        "nemotron_h",
    ),
    *(
        "lfm2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
        "laguna",
    ),
    *(
        "gpt_oss",
        "granitemoe",
        "granitemoeshared",
        "granitemoehybrid",
        "granitemoe_swa",
        "dbrx",
        "deepseek_v4",
    ),
)
SIZES: dict[str, Any] = {"hidden": 256, "inner": 128, "head_dim": 64}


@pytest.fixture(scope="module", autouse=True)
def _stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with stand_ins(tmp_path_factory.mktemp("group")):
        yield


def experts_of(folder: Path, layers: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if any(name.startswith(f"{layer}.") and "shared" not in name for layer in layers):
                    yield name, file.get_tensor(name)


def is_equal(layer: Any, kernel: Path, block: str) -> bool:
    """Whether a loaded layer's experts, processed, are those of the kernel layout."""
    if not isinstance(layer.quant_method, HummingMoEMethod):
        return False
    layer.quant_method.process_weights_after_loading(layer)
    found = {
        name: parameter.data for name, parameter in layer.named_parameters() if name not in ROUTING
    }
    gemms = load_layer(kernel, block)
    wanted = {
        f"{gemm}_{name}": tensor
        for gemm, of in gemms.items()
        for name, tensor in of.tensors.items()
    }
    return found.keys() == wanted.keys() and all(
        torch.equal(
            found[name].contiguous().view(torch.uint8), wanted[name].contiguous().view(torch.uint8)
        )
        for name in wanted
    )


def is_read(packed: Path, kernel: Path) -> bool:
    """Whether vLLM's class of this model ends with the kernel layout's bytes, and quantizes nothing else."""
    blocks = list(manifest(packed)["blocks"])
    with stock_model(packed) as model:
        layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        others = [module for module in model.modules() if not isinstance(module, RoutedExperts)]
        methods = {type(getattr(module, "quant_method", None)).__name__ for module in others}
        assert not any("Humming" in name for name in methods)
        for parameter in (parameter for layer in layers for parameter in layer.parameters()):
            parameter.data.view(torch.uint8).fill_(
                0x77
            )  # nothing is right because memory happened to be zero
        try:
            model.load_weights(experts_of(packed, blocks))
        except (AttributeError, KeyError, ValueError):
            return False
        return all(
            is_equal(layer, kernel, block) for layer, block in zip(layers, blocks, strict=True)
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_said_of_a_family_is_what_happens(name: str, tmp_path: Path) -> None:
    sizes = SIZES | ({"head_dim": 512} if name == "deepseek_v4" else {})
    save_family(tmp_path / "m", name, **sizes)
    packed, kernel = tmp_path / "checkpoint", tmp_path / "kernel"
    run(tmp_path / "m", packed, "mxfp4", layout="checkpoint")
    run(tmp_path / "m", kernel, "mxfp4")
    family = BY_MODEL_TYPE[json.loads((packed / "config.json").read_text())["model_type"]].name
    layers = manifest(packed)["blocks"]
    said = [
        ENGINE.checkpoint_family_obstacle(family, layer, schema_of("mxfp4")) for layer in layers
    ]
    assert is_read(packed, kernel) == (not any(said))


def test_router_weights_on_the_inputs_are_not_passed_on() -> None:
    """Llama 4's answers: the experts are read rightly, and are then not asked for what the model needs."""
    passed: dict[str, Any] = {}
    method = object.__new__(HummingMoEMethod)
    method.moe_kernel = SimpleNamespace(apply=lambda **words: passed.update(words))
    names = ("w13_weight", "w2_weight", "activation", "global_num_experts", "expert_map")
    layer = SimpleNamespace(**dict.fromkeys(names), apply_router_weight_on_input=True)
    HummingMoEMethod.apply(method, layer, *[None] * 5)  # type: ignore[arg-type]
    assert passed["apply_router_weight_on_input"] is False
