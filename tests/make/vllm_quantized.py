"""Small checkpoints whose linear layers are quantized as publishers do it, attention and shared experts too."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.make import configs, packing
from tests.make.packing import Draw, Encoder, Stored

E8M0 = torch.float8_e8m0fnu
# The one that is left as it is, where a config can say so.
PLAIN = "model.layers.1.self_attn.o_proj"


@dataclass(frozen=True)
class Case:
    """A model and how its layers are stored: by the first pattern that a weight's name matches, else as it is.

    What is stored are other weights than the model's: it is only compared how they are loaded.

    words: config values of the small model.
    """

    model_type: str
    stores: Mapping[str, Encoder]
    config: configs.Json
    words: Mapping[str, Any] = field(default_factory=dict)
    schema: str = "int8"


BLOCKS = packing.fp8("weight_scale_inv", (128, 128))
POWER_BLOCKS = packing.fp8("scale", (128, 128), E8M0)
FP4 = packing.as_dtypes(packing.mxfp4(scale="scale"), weight=torch.int8, scale=E8M0)
CHANNELS = packing.fp8(dtype=torch.bfloat16)
TENSORS = packing.fp8(block=(0, 0), shape=())


def _with(encode: Encoder, *scales: str) -> Encoder:
    """The same, and scales of inputs or of a cache."""

    def encoded(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
        stored = encode(draw, n, k, second)
        stored.parts |= {scale: torch.tensor(0.5) for scale in scales}
        return stored

    return encoded


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
        {_LINEAR: BLOCKS},
        configs.fp8_blocks(modules_to_not_convert=["lm_head", PLAIN]),
        _SIZES | _MLA | {"v_head_dim": 128, "intermediate_size": 256},
    ),
    "deepseek_v4_fp8": Case(
        "deepseek_v4",
        {
            r".*\.experts\.\d+\.w\d\.weight": FP4,
            r".*(attn\.w\w+|experts\.w\d|\.[eh]_proj)\.weight": POWER_BLOCKS,
        },
        configs.fp8_blocks(scale_fmt="ue8m0", modules_to_not_convert=None),
        _SIZES | _V4,
        "source",
    ),
    "qwen3_5_moe_fp8": Case(
        "qwen3_5_moe",
        {
            _QWEN + r"k_proj\.weight": _with(BLOCKS, "output_scale"),
            _QWEN + r"v_proj\.weight": _with(BLOCKS, "output_scale"),
            _QWEN + r"_proj\.weight": BLOCKS,
        },
        configs.fp8_blocks(modules_to_not_convert=_QWEN_PLAIN),
        _SIZES | {"head_dim": 128, "shared_expert_intermediate_size": 256},
    ),
    "compressed-tensors": Case(
        "qwen3_moe", {_LINEAR: CHANNELS}, _compressed(), _SIZES | {"intermediate_size": 256}
    ),
    "modelopt": Case(
        "qwen3_moe",
        {
            r".*\.k_proj\.weight": _with(TENSORS, "input_scale", "k_scale"),
            r".*\.v_proj\.weight": _with(TENSORS, "input_scale", "v_scale"),
            _LINEAR: _with(TENSORS, "input_scale"),
        },
        configs.modelopt("FP8", ignore=["lm_head", "*mlp.gate", PLAIN]),
        _SIZES | {"intermediate_size": 256},
    ),
}


def store(folder: Path, case: Case) -> None:
    """Have the weights of a saved model stored as the case says."""
    path = folder / "model.safetensors"
    draw = Draw(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        ways = [way for pattern, way in case.stores.items() if re.fullmatch(pattern, name)]
        if ways:
            module = name.removesuffix("weight")
            stored = ways[0](draw, *tensor.shape, torch.tensor(1e-3))
            tensors |= {module + part: matrix for part, matrix in stored.parts.items()}
        else:
            tensors[name] = tensor
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | case.config))
