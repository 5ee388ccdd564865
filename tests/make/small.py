"""Small quantized and fused checkpoints of one MoE layer, for tests that damage them. Sizes: E experts, I, H.

Each writer gives tensors and a config as plain dicts, good as they are; `save` makes a folder of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hqconv.models.families import BY_MODEL_TYPE

E, INNER, HIDDEN = 4, 256, 256
PARENT = "model.layers.0"
LAYER = f"{PARENT}.mlp.experts"
ROLES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "num_experts": E,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}
Tensors = dict[str, torch.Tensor]
Source = tuple[Tensors, dict[str, Any]]


def save(folder: Path, source: Source) -> Path:
    """One file of tensors, with a config and a tokenizer."""
    tensors, config = source
    folder.mkdir(parents=True)
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator())


def _bytes(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_generator(), dtype=torch.uint8)


def dense() -> Tensors:
    """What is copied."""
    return {
        "model.embed_tokens.weight": _noise(64, HIDDEN).bfloat16(),
        f"{PARENT}.mlp.gate.weight": _noise(E, HIDDEN).bfloat16(),
    }


def per_expert(parts: Callable[[int, int, int], Tensors], quantization: Any = None) -> Source:
    """`parts` makes one projection's tensors of [N, K] for a seed; names are qwen3_moe's."""
    tensors = dense()
    for e in range(E):
        for number, (name, (n, k)) in enumerate(ROLES.items()):
            made = parts(n, k, 10 * e + number)
            tensors |= {f"{LAYER}.{e}.{name}.{part}": tensor for part, tensor in made.items()}
    config = dict(QWEN) if quantization is None else {**QWEN, "quantization_config": quantization}
    return tensors, config


def _codes(n: int, k: int, seed: int) -> torch.Tensor:
    """fp8 codes of numbers, no two matrices alike."""
    return (_noise(n, k).roll(seed) * 100).to(torch.float8_e4m3fn)


def plain() -> Source:
    """bf16, not quantized."""
    return per_expert(lambda n, k, seed: {"weight": _noise(n, k).roll(seed).bfloat16()})


def two_layers(source: Source) -> Source:
    """The same tensors in both layers."""
    tensors, config = source
    second = {name.replace("layers.0", "layers.1"): one.clone() for name, one in tensors.items()}
    return second | tensors, {**config, "num_hidden_layers": 2}


def with_activation(words: dict[str, Any]) -> Source:
    """bf16 under the names of `model_type`'s family, with words of a config that say what its experts compute."""
    if words["model_type"] == "gpt_oss":
        tensors, config = gpt_oss_floats()
        return tensors, {**config, **words}
    family, (tensors, config) = BY_MODEL_TYPE[words["model_type"]], plain()
    names = dict(zip(ROLES, (family.projections[role] for role in ("w1", "w3", "w2")), strict=True))
    block = family.modules[0].format(layer=0)
    renamed = {}
    for name, tensor in tensors.items():
        expert, _, word = name.removesuffix(".weight").removeprefix(f"{LAYER}.").partition(".")
        renamed[f"{block}.{expert}.{names[word]}.weight" if name.startswith(LAYER) else name] = (
            tensor
        )
    sizes = (INNER, INNER, E, E, E, 2)
    keys: tuple[str, ...] = (
        "intermediate_size",
        "moe_intermediate_size",
        "num_experts",
        "num_local_experts",
    )
    keys += ("moe_num_experts", "moe_top_k")
    return renamed, {**config, **dict(zip(keys, sizes, strict=True)), **words}


def fp8_blocks() -> Source:
    """DeepSeek's fp8: a float32 scale per 128 x 128."""

    def parts(n: int, k: int, seed: int) -> Tensors:
        scale = _noise(n // 128, k // 128).abs().add(0.1).mul(1 + seed / 100)
        return {"weight": _codes(n, k, seed), "weight_scale_inv": scale}

    words = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return per_expert(parts, words | {"activation_scheme": "dynamic"})


def fp8_tensors() -> Source:
    """fp8 with one scale for a matrix, and activation scales; gate and up share theirs."""

    def parts(n: int, k: int, seed: int) -> Tensors:
        scale = torch.tensor(0.5 + (seed // 10) / 8 + (seed % 10 == 2))
        return {
            "weight": _codes(n, k, seed),
            "weight_scale": scale,
            "input_scale": torch.tensor(1.0),
        }

    return per_expert(parts, {"quant_method": "fp8", "activation_scheme": "static"})


def packed_int4() -> Source:
    """compressed-tensors' int4 in groups of 128."""

    def parts(n: int, k: int, seed: int) -> Tensors:
        scale = _noise(n, k // 128).abs().add(0.1).bfloat16()
        words = _bytes(n, k // 2).roll(seed).view(torch.int32)
        return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([n, k])}

    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
    }
    group = {"targets": ["Linear"], "weights": weights}
    words = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
    }
    return per_expert(parts, words | {"config_groups": {"group_0": group}})


def gptq(desc_act: bool = True) -> Source:
    """GPTQ's int4 in groups of 64 whose columns are in an order of their own."""

    def parts(n: int, k: int, seed: int) -> Tensors:
        order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
        return {
            "qweight": _bytes(k // 2, n).roll(seed).view(-1).view(torch.int32).view(k // 8, n),
            "qzeros": torch.full((k // 64, n // 8), 0x77777777, dtype=torch.int32),
            "scales": _noise(k // 64, n).abs().add(0.1).half(),
            "g_idx": (order if desc_act else torch.arange(k)).div(64, rounding_mode="floor").int(),
        }

    words = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": desc_act}
    return per_expert(parts, words)


def nvfp4() -> Source:
    """ModelOpt's nvfp4; gate and up of an expert share their second scale."""

    def parts(n: int, k: int, seed: int) -> Tensors:
        return {
            "weight": _bytes(n, k // 2).roll(seed),
            "weight_scale": _noise(n, k // 16).abs().add(0.1).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(0.25 + (seed // 10) / 64),
            "input_scale": torch.tensor(1.0),
        }

    return per_expert(
        parts, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    )


def _gpt_oss_biases(inner: int) -> Tensors:
    return {
        f"{LAYER}.gate_up_proj_bias": _noise(E, 2 * inner).bfloat16(),
        f"{LAYER}.down_proj_bias": _noise(E, HIDDEN).roll(3).bfloat16(),
    }


def gpt_oss_floats(inner: int = INNER) -> Source:
    """gpt_oss as transformers holds it: [E, in, out], gate and up in turns, biases."""
    tensors = dense() | _gpt_oss_biases(inner)
    tensors[f"{LAYER}.gate_up_proj"] = _noise(E, HIDDEN, 2 * inner).bfloat16()
    tensors[f"{LAYER}.down_proj"] = _noise(E, inner, HIDDEN).roll(5).bfloat16()
    return tensors, {**GPT_OSS, "intermediate_size": inner}


def gpt_oss_mxfp4(inner: int = INNER) -> Source:
    """gpt_oss as it was released: blocks of 32 codes and their scales, [E, out, …]."""
    tensors = dense() | _gpt_oss_biases(inner)
    for name, n, k in (("gate_up_proj", 2 * inner, HIDDEN), ("down_proj", HIDDEN, inner)):
        tensors[f"{LAYER}.{name}_blocks"] = _bytes(E, n, k // 32, 16)
        tensors[f"{LAYER}.{name}_scales"] = _bytes(E, n, k // 32, high=8) + 120
    words = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return tensors, {**GPT_OSS, "intermediate_size": inner, "quantization_config": words}


def qwen3_vl(inner: int = 128, hidden: int = HIDDEN) -> Source:
    """Stacks whose orientation only their shapes tell: [E, 2I, H] and [E, H, I]."""
    tensors = {
        "model.language_model.embed_tokens.weight": _noise(64, hidden).bfloat16(),
        f"{LAYER}.gate_up_proj": _noise(E, 2 * inner, hidden).bfloat16(),
        f"{LAYER}.down_proj": _noise(E, hidden, inner).bfloat16(),
    }
    config = {**QWEN, "hidden_size": hidden, "moe_intermediate_size": inner}
    return tensors, {**config, "model_type": "qwen3_vl_moe_text"}


GOOD: dict[str, tuple[Callable[[], Source], str]] = {
    "plain": (plain, "int4"),
    "fp8_blocks": (fp8_blocks, "source"),
    "fp8_tensors": (fp8_tensors, "source"),
    "packed_int4": (packed_int4, "source"),
    "gptq": (gptq, "int8"),
    "nvfp4": (nvfp4, "source"),
    "gpt_oss_floats": (gpt_oss_floats, "mxfp4"),
    "gpt_oss_mxfp4": (gpt_oss_mxfp4, "source"),
    "qwen3_vl": (qwen3_vl, "mxfp4"),
}  # and a schema to convert to: the source's own where there is one
