"""The kernel's judge against transformers' own MoE layers, and its routing rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hqconv.schemas.activation import Activation
from hqconv.verification.reference import Routing, cover_all_experts, moe_forward, route

COMMON: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "num_experts_per_tok": 3,
}
DEEPSEEK = {
    **COMMON,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "routed_scaling_factor": 2.5,
}
MODELS = {
    "mixtral": {**COMMON, "intermediate_size": 40, "num_local_experts": 7},
    "qwen3_moe": {
        **COMMON,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "norm_topk_prob": True,
        "head_dim": 24,
    },
    "qwen3_moe-unnormalised": {
        **COMMON,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "head_dim": 24,
    },
    "olmoe": {**COMMON, "intermediate_size": 40, "num_experts": 7},
    "deepseek_v3": DEEPSEEK,
}


def build(name: str) -> tuple[nn.Module, Any]:
    """An MoE layer of a tiny random model, in float32, with a correction bias where the family has one."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    layer = next(m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate"))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    if hasattr(layer.gate, "e_score_correction_bias"):
        layer.gate.e_score_correction_bias.copy_(torch.randn(16) * 0.2)
    return layer, config


def expert_weights(layer: nn.Module, expert: int) -> dict[str, torch.Tensor]:
    gate, up = layer.experts.gate_up_proj[expert].chunk(2)
    return {"w1": gate, "w3": up, "w2": layer.experts.down_proj[expert]}


@pytest.mark.parametrize("name", MODELS)
def test_reference_is_transformers_layer(name: str) -> None:
    layer, config = build(name)
    x = torch.randn(33, config.hidden_size)
    bias = getattr(layer.gate, "e_score_correction_bias", None)
    routing = route(x @ layer.gate.weight.t(), config.num_experts_per_tok, config.to_dict(), bias)
    with torch.no_grad():
        ours, hidden = moe_forward(
            x, routing, lambda e: expert_weights(layer, e), Activation("silu")
        )
        theirs = layer(x.unsqueeze(0))
        theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).squeeze(0)
        if hasattr(layer, "shared_experts"):
            theirs = theirs - layer.shared_experts(x)
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert hidden.shape == (33 * config.num_experts_per_tok, 40)


def test_every_expert_is_hit_when_routes_allow() -> None:
    ids = torch.zeros(10, 2, dtype=torch.long)
    ids[:, 1] = 1
    covered = cover_all_experts(Routing(ids, torch.ones(10, 2)), 8)
    assert set(covered.ids.flatten().tolist()) == set(range(8))
    assert all(len(set(row)) == 2 for row in covered.ids.tolist())
    few = cover_all_experts(Routing(ids[:1], torch.ones(1, 2)), 8)
    assert set(few.ids.flatten().tolist()) == {0, 1}


def test_biases_are_added_once_per_projection() -> None:
    expert = {
        "w1": torch.randn(5, 4),
        "w3": torch.randn(5, 4),
        "w2": torch.randn(4, 5),
        "b1": torch.randn(5),
        "b3": torch.randn(5),
        "b2": torch.randn(4),
    }
    x = torch.randn(1, 4)
    routing = Routing(torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), 0.5))
    out, _ = moe_forward(x, routing, lambda _: expert, Activation("silu"))
    hidden = torch.nn.functional.silu(expert["w1"] @ x[0] + expert["b1"]) * (
        expert["w3"] @ x[0] + expert["b3"]
    )
    assert torch.allclose(out[0], 0.5 * (expert["w2"] @ hidden + expert["b2"]), atol=1e-6)
