"""Small checkpoints whose linear layers are quantized as publishers do it, attention and shared experts too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.make import configs
from tests.make.families import save_family

E4M3 = torch.float8_e4m3fn
MAX = 448.0
_LINEAR = re.compile(r".*_proj(_with_mqa)?\.weight")
PLAIN = "model.layers.1.self_attn.o_proj"  # the one that is left as it is


@dataclass(frozen=True)
class Case:
    """A model and how its layers are stored. words: config values of the tiny model."""

    model_type: str
    store: Callable[[torch.Tensor], Iterator[tuple[str, torch.Tensor]]]
    config: configs.Json
    words: dict[str, Any] = field(default_factory=dict)


def _blocks(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """fp8 codes, and float32 scales [N / 128, K / 128]."""
    n, k = weight.shape
    parts = weight.float().reshape(n // 128, 128, k // 128, 128)
    scale = parts.abs().amax((1, 3)) / MAX
    yield "weight", (parts / scale[:, None, :, None]).reshape(n, k).to(E4M3)
    yield "weight_scale_inv", scale


def _channels(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """fp8 codes, and bfloat16 scales [N, 1]."""
    scale = (weight.float().abs().amax(1, keepdim=True) / MAX).bfloat16()
    yield "weight", (weight.float() / scale.float()).clamp(-MAX, MAX).to(E4M3)
    yield "weight_scale", scale


def _tensors(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """fp8 codes, one float32 scale of the weight, one of the input."""
    scale = weight.float().abs().amax() / MAX
    yield "weight", (weight.float() / scale).clamp(-MAX, MAX).to(E4M3)
    yield "weight_scale", scale
    yield "input_scale", torch.tensor(1.0)


def _compressed() -> configs.Json:
    words = configs.compressed("float-quantized", 8, "float", "channel", ignore=[PLAIN])
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    words["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    return words


_MLA = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 128, "qk_nope_head_dim": 128}
_MLA |= {"v_head_dim": 128, "intermediate_size": 256, "topk_method": "noaux_tc"}
CASES = {
    "fp8": Case("deepseek_v3", _blocks, configs.fp8_blocks(modules_to_not_convert=["lm_head", PLAIN]), _MLA),
    "compressed-tensors": Case("qwen3_moe", _channels, _compressed(), {"intermediate_size": 256}),
    "modelopt": Case(
        "qwen3_moe",
        _tensors,
        configs.modelopt("FP8", ignore=["lm_head", "*mlp.gate", PLAIN]),
        {"intermediate_size": 256},
    ),
}


def save(folder: Path, case: Case) -> None:
    """Let transformers save a tiny model, and store every linear layer but `PLAIN` and the router as the case says."""
    save_family(folder, case.model_type, hidden=256, inner=256, **case.words)
    files = sorted(folder.glob("*.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in ((n, t) for file in files for n, t in load_file(file).items()):
        if _LINEAR.fullmatch(name) and not name.startswith(PLAIN):
            module = name.removesuffix("weight")
            tensors |= {f"{module}{part}": one.contiguous() for part, one in case.store(tensor)}
        else:
            tensors[name] = tensor
    for path in (*files, folder / "model.safetensors.index.json"):
        path.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | case.words | case.config))
