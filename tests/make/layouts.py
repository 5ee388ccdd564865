"""Lays matrices out as checkpoints name them: tensors per expert, or fused stacks. Folder in, what was meant out.

Legend: E experts, N rows, K columns, I intermediate size, H hidden size. Roles: w1 gate, w3 up, w2 down.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.make.configs import Json
from tests.make.packing import Draw, Encoder, Parts, Stored

Block = dict[str, torch.Tensor]  # w1, w3 [E, I, H], w2 [E, H, I], and b1, b3, b2
ROLES = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Sizes:
    """A checkpoint's sizes."""

    hidden: int = 384
    inner: int = 256
    experts: int = 3

    def shape(self, role: str) -> tuple[int, int]:
        """[N, K] of a projection."""
        return (self.hidden, self.inner) if role == "w2" else (self.inner, self.hidden)


def plain(draw: Draw, n: int, k: int, second: torch.Tensor) -> Stored:
    """A bfloat16 matrix, not quantized."""
    weight = (draw.normal(n, k) * 0.03).bfloat16()
    return Stored({"weight": weight}, weight.double(), torch.ones(n, k, dtype=torch.float64))


@dataclass(frozen=True)
class Layout:
    """One family's names. `dense`: square modules [H, H] beside the experts, stored as the experts are.

    pair: the name of an expert's own tensor of gate and up, whose rows alternate, where there is one.
    """

    layer: str
    words: tuple[str, str, str]
    config: Callable[[Sizes], Json]
    router: str
    dense: tuple[str, ...] = ()
    norm: str = "model.layers.{layer}.input_layernorm.weight"
    fused: Fused | None = None
    pair: str = ""


@dataclass(frozen=True)
class Fused:
    """How stacks are made: gate and up in the first, down in the second.

    scales: one per "expert" [E], per "projection" [E, 2], or as the rows of the weight are; of the stacks in
    `turned_scales` transposed. `suffixes`: part → what is appended to the stack's name, "_part" if not listed.
    """

    names: tuple[str, str] = ("gate_up_proj", "down_proj")
    transposed: bool = False
    interleaved: bool = False
    scales: str = "rows"
    suffixes: Json = field(default_factory=lambda: {"weight": ""})
    turned_scales: tuple[str, ...] = ()


def write_checkpoint(
    folder: Path,
    layout: Layout,
    encoders: list[Encoder],
    sizes: Sizes,
    *,
    dense: Encoder | None = None,
    differs: bool = False,
    config: Json,
    seed: int = 0,
) -> dict[str, Block]:
    """Write a checkpoint of one shard, one layer per encoder. Returns what each layer's experts mean, in float32."""
    folder.mkdir(parents=True)
    draw = Draw(seed)
    tensors: Parts = {"model.embed_tokens.weight": draw.normal(64, sizes.hidden).bfloat16()}
    truth = {}
    for layer, encode in enumerate(encoders):
        tensors[layout.norm.format(layer=layer)] = draw.normal(sizes.hidden).bfloat16()
        router = layout.router.format(layer=layer)
        tensors[router] = (draw.normal(sizes.experts, sizes.hidden) * 0.05).bfloat16()
        for module in layout.dense:
            stored = (dense or encode)(draw, sizes.hidden, sizes.hidden, draw.scales(base=2e-4))
            tensors |= {f"{module.format(layer=layer)}.{p}": t for p, t in stored.parts.items()}
        block = layout.layer.format(layer=layer)
        experts = [_expert(draw, encode, sizes, differs) for _ in range(sizes.experts)]
        truth[block] = _meaning(experts)
        named = _single(layout, experts) if layout.fused is None else _stacks(layout.fused, experts)
        tensors |= {f"{block}.{name}": tensor for name, tensor in named.items()}
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    words = {**layout.config(sizes), "num_hidden_layers": len(encoders), **config}
    hf_quant_config = words.pop("hf_quant_config", None)
    if hf_quant_config:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
    if words.pop("quant_model_description", False):
        (folder / "quant_model_description.json").write_text(json.dumps(_description(tensors)))
    (folder / "config.json").write_text(json.dumps(words, indent=1))
    (folder / "tokenizer.json").write_text("{}")
    return truth


def _description(tensors: Parts) -> Json:
    """msmodelslim's: every tensor and its scheme."""
    modules = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_offset")}
    schemes = {
        name: "W8A8_DYNAMIC" if name.rpartition(".")[0] in modules else "FLOAT"
        for name in sorted(tensors)
    }
    return {
        "model_quant_type": "W8A8_DYNAMIC",
        "version": "1.0.0",
        **schemes,
        "group_size": 0,
        "metadata": {},
    }


def _expert(draw: Draw, encode: Encoder, sizes: Sizes, differs: bool) -> dict[str, Stored]:
    """One expert; gate and up share their tensor-level scale unless it `differs`."""
    gate_up, down = draw.scales(base=2e-4), draw.scales(base=2e-4)
    seconds = {"w1": gate_up, "w3": gate_up * 1.5 if differs else gate_up, "w2": down}
    return {role: encode(draw, *sizes.shape(role), seconds[role]) for role in ROLES}


def _meaning(experts: list[dict[str, Stored]]) -> Block:
    layer = {role: torch.stack([expert[role].values() for expert in experts]) for role in ROLES}
    for role in ROLES:
        biases = [expert[role].bias for expert in experts]
        if biases[0] is not None:
            layer["b" + role[1]] = torch.stack(
                [bias.float() for bias in biases if bias is not None]
            )
    return layer


def _single(layout: Layout, experts: list[dict[str, Stored]]) -> Parts:
    named = {
        f"{e}.{word}.{part}": tensor
        for e, expert in enumerate(experts)
        for role, word in zip(ROLES, layout.words, strict=True)
        for part, tensor in expert[role].parts.items()
        if role == "w2" or not layout.pair
    }
    for e, expert in enumerate(experts if layout.pair else []):
        for part, gate in expert["w1"].parts.items():
            rows = [gate, expert["w3"].parts[part]]
            named[f"{e}.{layout.pair}.{part}"] = _join(Fused(interleaved=True), "", part, rows)
    return named


def _stacks(fused: Fused, experts: list[dict[str, Stored]]) -> Parts:
    named: Parts = {}
    for name, roles in zip(fused.names, (("w1", "w3"), ("w2",)), strict=True):
        parts = [[expert[role].parts for role in roles] for expert in experts]
        for part in parts[0][0]:
            joined = [_join(fused, name, part, [one[part] for one in expert]) for expert in parts]
            suffix = fused.suffixes.get(part, f"_{part}")
            named[name + suffix] = torch.stack([words_of(one) for one in joined]).view(
                joined[0].dtype
            )
    return named


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes, which torch can join; the rest as it is."""
    return tensor.contiguous().view(torch.uint8) if tensor.itemsize == 1 else tensor


def _join(fused: Fused, name: str, part: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """One expert's share of a stack's part."""
    if not tensors[0].ndim:  # one number for the module, such as its activations' scale
        return tensors[0]
    dtype, is_scale = tensors[0].dtype, "scale" in part and "scales" not in part
    if is_scale and fused.scales == "expert":
        return tensors[0].reshape(())
    if is_scale and fused.scales == "projection":
        return torch.cat([one.reshape(1) for one in tensors])
    rows = [words_of(one) for one in tensors]
    joined = (
        torch.stack(rows, 1).flatten(0, 1)
        if fused.interleaved and len(rows) > 1
        else torch.cat(rows)
    )
    is_turned = name in fused.turned_scales if is_scale else fused.transposed and part == "weight"
    return (joined.t() if is_turned else joined).contiguous().view(dtype)


# --- families ----------------------------------------------------------------------------------------------


def _qwen_config(model_type: str, architecture: str) -> Callable[[Sizes], Json]:
    return lambda sizes: {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "moe_intermediate_size": sizes.inner,
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }


def _deepseek_config(model_type: str, **more: Any) -> Callable[[Sizes], Json]:
    return lambda sizes: {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "moe_intermediate_size": sizes.inner,
        "n_routed_experts": sizes.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        **more,
    }


def inner_config(model_type: str) -> Callable[[Sizes], Json]:
    return lambda sizes: {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": 2,
    }


def _nested(config: Callable[[Sizes], Json], model_type: str) -> Callable[[Sizes], Json]:
    return lambda sizes: {"model_type": model_type, "text_config": config(sizes)}


_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_LAYER = "model.layers.{layer}"
QWEN3_MOE = Layout(
    f"{_LAYER}.mlp.experts",
    _GATE_UP_DOWN,
    _qwen_config("qwen3_moe", "Qwen3MoeForCausalLM"),
    f"{_LAYER}.mlp.gate.weight",
    (f"{_LAYER}.self_attn.o_proj",),
)
DEEPSEEK_V3 = Layout(
    f"{_LAYER}.mlp.experts",
    _GATE_UP_DOWN,
    _deepseek_config("deepseek_v3"),
    f"{_LAYER}.mlp.gate.weight",
    (f"{_LAYER}.mlp.shared_experts.down_proj", f"{_LAYER}.self_attn.o_proj"),
)
DEEPSEEK_V4 = Layout(
    "layers.{layer}.ffn.experts",
    ("w1", "w3", "w2"),
    _deepseek_config("deepseek_v4", expert_dtype="fp4", scoring_func="sqrtsoftplus"),
    "layers.{layer}.ffn.gate.weight",
    ("layers.{layer}.ffn.shared_experts.w2", "layers.{layer}.attn.wo_b"),
    norm="layers.{layer}.ffn_norm.weight",
)
GPT_OSS = Layout(
    f"{_LAYER}.mlp.experts",
    _GATE_UP_DOWN,
    inner_config("gpt_oss"),
    f"{_LAYER}.mlp.router.weight",
    fused=Fused(interleaved=True),
)

# Quark's: experts have tensors of their own, gate and up together.
GPT_OSS_QUARK = replace(GPT_OSS, fused=None, pair="gate_up_proj")
MIMO_V2 = replace(
    DEEPSEEK_V3, config=_deepseek_config("mimo_v2"), dense=(f"{_LAYER}.self_attn.qkv_proj",)
)
MINIMAX_M3 = Layout(
    "language_model.model.layers.{layer}.block_sparse_moe.experts",
    ("w1", "w3", "w2"),
    _nested(inner_config("minimax_m3_vl_text"), "minimax_m3_vl"),
    "language_model.model.layers.{layer}.block_sparse_moe.gate.weight",
    ("language_model.model.layers.{layer}.self_attn.o_proj",),
    norm="language_model.model.layers.{layer}.input_layernorm.weight",
)


def _qwen_stacks(name: str, architecture: str, **fused: Any) -> Layout:
    layer = "model.language_model.layers.{layer}"
    return Layout(
        f"{layer}.mlp.experts",
        _GATE_UP_DOWN,
        _nested(_qwen_config(f"{name}_text", architecture), name),
        f"{layer}.mlp.gate.weight",
        norm=f"{layer}.input_layernorm.weight",
        fused=Fused(**fused),
    )


def qwen3_5_moe(**fused: Any) -> Layout:
    """Fused stacks [E, 2I, H] and [E, H, I], as transformers 5 saves them."""
    return _qwen_stacks("qwen3_5_moe", "Qwen3_5MoeForCausalLM", **fused)


def qwen3_vl_moe(**fused: Any) -> Layout:
    """Fused stacks [E, H, 2I] and [E, I, H]."""
    return _qwen_stacks("qwen3_vl_moe", "Qwen3VLMoeForCausalLM", transposed=True, **fused)


def llama4(**fused: Any) -> Layout:
    """Fused stacks [E, H, 2I] and [E, I, H] of a multimodal model."""
    layer = "language_model.model.layers.{layer}"
    return Layout(
        f"{layer}.feed_forward.experts",
        _GATE_UP_DOWN,
        _nested(inner_config("llama4_text"), "llama4"),
        f"{layer}.feed_forward.router.weight",
        norm=f"{layer}.input_layernorm.weight",
        fused=Fused(transposed=True, **fused),
    )
