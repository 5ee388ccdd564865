"""Small checkpoints whose linear layers are quantized as publishers do it, attention and shared experts too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.make import configs

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
MAX = 448.0
PLAIN = (
    "model.layers.1.self_attn.o_proj"  # the one that is left as it is, where a config can say so
)
Parts = Iterator[tuple[str, torch.Tensor]]
Store = Callable[[torch.Tensor], Parts]


@dataclass(frozen=True)
class Case:
    """A model and how its layers are stored: by the first pattern that a weight's name matches, else as it is.

    words: config values of the small model.
    """

    model_type: str
    stores: Mapping[str, Store]
    config: configs.Json
    words: Mapping[str, Any] = field(default_factory=dict)
    schema: str = "int8"


def _blocks(weight: torch.Tensor, *caches: str) -> Parts:
    """fp8 codes, and float32 scales [N / 128, K / 128]; and of a cache."""
    n, k = weight.shape
    parts = weight.float().reshape(n // 128, 128, k // 128, 128)
    scale = parts.abs().amax((1, 3)) / MAX
    yield "weight", (parts / scale[:, None, :, None]).reshape(n, k).to(E4M3)
    yield "weight_scale_inv", scale
    yield from ((cache, torch.tensor(0.5)) for cache in caches)


def _power_blocks(weight: torch.Tensor) -> Parts:
    """fp8 codes, and e8m0 scales [N / 128, K / 128], as DeepSeek-V4 has them."""
    n, k = weight.shape
    yield "weight", (weight.float() * 64).to(E4M3)
    yield "scale", torch.full((n // 128, k // 128), 1 / 64).to(E8M0)


def _fp4(weight: torch.Tensor) -> Parts:
    """Two fp4 codes in a byte [N, K / 2], and e8m0 scales [N, K / 32]; any codes."""
    n, k = weight.shape
    yield "weight", torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
    yield "scale", torch.full((n, k // 32), 1 / 64).to(E8M0)


def _channels(weight: torch.Tensor) -> Parts:
    """fp8 codes, and bfloat16 scales [N, 1]."""
    scale = (weight.float().abs().amax(1, keepdim=True) / MAX).bfloat16()
    yield "weight", (weight.float() / scale.float()).clamp(-MAX, MAX).to(E4M3)
    yield "weight_scale", scale


def _tensors(weight: torch.Tensor, *caches: str) -> Parts:
    """fp8 codes, one float32 scale of the weight, one of the input, and of a cache."""
    scale = weight.float().abs().amax() / MAX
    yield "weight", (weight.float() / scale).clamp(-MAX, MAX).to(E4M3)
    yield "weight_scale", scale
    yield "input_scale", torch.tensor(1.0)
    yield from ((cache, torch.tensor(0.5)) for cache in caches)


def _compressed() -> configs.Json:
    words = configs.compressed("float-quantized", 8, "float", "channel", ignore=[PLAIN])
    inputs = {
        "num_bits": 8,
        "type": "float",
        "strategy": "token",
        "symmetric": True,
        "dynamic": True,
    }
    words["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    return words


# Of a model with a vision tower, whose modules vLLM calls otherwise and fuses: what is left plain, one by one.
_VISUAL = [
    f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
]
_QWEN_PLAIN = [
    "lm_head",
    "mtp.fc",
    *(f"model.visual.{name}" for name in (*_VISUAL, "merger.linear_fc1", "merger.linear_fc2")),
    *(f"model.language_model.layers.1.self_attn.{name}_proj" for name in "qkv"),
    *(
        f"model.language_model.layers.{layer}.mlp.{name}"
        for layer in range(2)
        for name in ("gate", "shared_expert_gate")
    ),
]
_QWEN = r"(?!model\.visual|.*layers\.1\.self_attn\.[qkv]_).*"
_SIZES = {"hidden": 256, "inner": 256}
_LINEAR = rf"(?!{re.escape(PLAIN)}|.*\.eh_proj).*_proj(_with_mqa)?\.weight"
_MLA = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 128, "qk_nope_head_dim": 128}
_V4 = {
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "expert_dtype": "fp4",
}
CASES = {
    "fp8": Case(
        "deepseek_v3",
        {_LINEAR: _blocks},
        configs.fp8_blocks(modules_to_not_convert=["lm_head", PLAIN]),
        _SIZES | _MLA | {"v_head_dim": 128, "intermediate_size": 256},
    ),
    "deepseek_v4_fp8": Case(
        "deepseek_v4",
        {
            r".*\.experts\.\d+\.w\d\.weight": _fp4,
            r".*(attn\.w\w+|experts\.w\d|\.[eh]_proj)\.weight": _power_blocks,
        },
        configs.fp8_blocks(scale_fmt="ue8m0", modules_to_not_convert=None),
        _SIZES | _V4,
        "source",
    ),
    "qwen3_5_moe_fp8": Case(
        "qwen3_5_moe",
        {
            _QWEN + r"k_proj\.weight": lambda weight: _blocks(weight, "output_scale"),
            _QWEN + r"v_proj\.weight": lambda weight: _blocks(weight, "output_scale"),
            _QWEN + r"_proj\.weight": _blocks,
        },
        configs.fp8_blocks(modules_to_not_convert=_QWEN_PLAIN),
        _SIZES | {"head_dim": 128, "shared_expert_intermediate_size": 256},
    ),
    "compressed-tensors": Case(
        "qwen3_moe", {_LINEAR: _channels}, _compressed(), _SIZES | {"intermediate_size": 256}
    ),
    "modelopt": Case(
        "qwen3_moe",
        {
            r".*\.k_proj\.weight": lambda weight: _tensors(weight, "k_scale"),
            r".*\.v_proj\.weight": lambda weight: _tensors(weight, "v_scale"),
            _LINEAR: _tensors,
        },
        configs.modelopt("FP8", ignore=["lm_head", "*mlp.gate", PLAIN]),
        _SIZES | {"intermediate_size": 256},
    ),
}


def store(folder: Path, case: Case) -> None:
    """Have the weights of a saved model stored as the case says."""
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        encode = next(
            (way for names, way in case.stores.items() if re.fullmatch(names, name)), None
        )
        module = name.removesuffix("weight")
        parts = (
            {name: tensor}
            if encode is None
            else {module + part: one for part, one in encode(tensor)}
        )
        tensors |= {part: one.contiguous() for part, one in parts.items()}
    save_file(tensors, path, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | case.config))
