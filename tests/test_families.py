"""The rows against transformers itself: tiny models of each family, saved with its own on-disk names."""

from __future__ import annotations

import json
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from hqconv.experts import map_experts
from hqconv.schemas.families import BY_MODEL_TYPE, FAMILIES, Family

Ref = namedtuple("Ref", "name dtype shape file offset_bytes num_bytes")

H, E, TOP_K, LAYERS, EXPERT_I = 32, 4, 2, 3, 24
COMMON = {
    "vocab_size": 64,
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
PLAIN = {"num_experts": E, "num_experts_per_tok": TOP_K, "moe_intermediate_size": EXPERT_I}
ROUTED = {"n_routed_experts": E, "num_experts_per_tok": TOP_K, "moe_intermediate_size": EXPERT_I}
ROUTED |= {"intermediate_size": 48, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LOCAL = {"num_local_experts": E, "num_experts_per_tok": TOP_K, "intermediate_size": EXPERT_I}
DENSE_FIRST = {"first_k_dense_replace": 1}

# model_type: (config beyond COMMON, number of MoE layers)
TINY: dict[str, tuple[dict[str, Any], int]] = {
    "mixtral": (LOCAL, 3),
    "phimoe": (LOCAL, 3),
    "minimax": (LOCAL | {"layer_types": ["full_attention"] * LAYERS}, 3),
    "minimax_m2": (LOCAL | {"rotary_dim": 8}, 3),
    "qwen2_moe": (PLAIN | {"intermediate_size": 48, "shared_expert_intermediate_size": 40}, 3),
    "qwen3_moe": (PLAIN | {"mlp_only_layers": [1]}, 2),
    "qwen3_next": (
        PLAIN
        | {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "shared_expert_intermediate_size": 40}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        3,
    ),
    "exaone_moe": (
        PLAIN
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": ["full_attention"] * LAYERS},
        2,
    ),
    "afmoe": (PLAIN | {"num_dense_layers": 1, "layer_types": ["full_attention"] * LAYERS}, 2),
    "bailing_hybrid": (
        PLAIN | MLA | DENSE_FIRST | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
        2,
    ),
    "olmoe": ({"num_experts": E, "num_experts_per_tok": TOP_K, "intermediate_size": EXPERT_I}, 3),
    "flex_olmo": ({"num_experts": E, "num_experts_per_tok": TOP_K, "intermediate_size": EXPERT_I}, 3),
    "glm4_moe": (ROUTED | DENSE_FIRST, 2),
    "glm4_moe_lite": (ROUTED | MLA | {"mlp_layer_types": ["dense", "sparse", "sparse"]}, 2),
    "glm_moe_dsa": (ROUTED | MLA | {"mlp_layer_types": ["dense", "sparse", "sparse"]}, 2),
    "dots1": (ROUTED | DENSE_FIRST, 2),
    "solar_open": (ROUTED, 3),
    "deepseek_v2": (ROUTED | MLA | DENSE_FIRST | {"topk_method": "greedy"}, 2),
    "deepseek_v3": (ROUTED | MLA | DENSE_FIRST, 2),
    "deepseek_v32": (ROUTED | MLA | {"mlp_layer_types": ["dense", "sparse", "sparse"]}, 2),
    "mimo_v2_flash": (
        ROUTED
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": ["full_attention"] * LAYERS},
        2,
    ),
    "ernie4_5_moe": (
        {"moe_num_experts": E, "moe_k": TOP_K, "moe_intermediate_size": EXPERT_I, "intermediate_size": 48}
        | {"moe_layer_start_index": 1},
        2,
    ),
    "hunyuan_v1_moe": ({"num_experts": E, "moe_topk": TOP_K, "intermediate_size": EXPERT_I}, 3),
    "longcat_flash": (
        MLA
        | {
            "num_hidden_layers": 4,
            "num_layers": 2,
            "n_routed_experts": E,
            "zero_expert_num": 2,
            "moe_topk": TOP_K,
        }
        | {"expert_ffn_hidden_size": EXPERT_I, "ffn_hidden_size": 48},
        2,
    ),
    "kimi_linear": (PLAIN | MLA | {"mlp_layer_types": ["dense", "sparse", "sparse"]}, 2),
    "lfm2_moe": (
        PLAIN | {"intermediate_size": 48, "num_dense_layers": 1, "layer_types": ["full_attention"] * LAYERS},
        2,
    ),
    "jamba": (
        {"num_experts": E, "num_experts_per_tok": TOP_K, "intermediate_size": EXPERT_I}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4},
        1,
    ),
    "nemotron_h": (
        ROUTED
        | {"layers_block_type": ["attention", "moe", "moe"], "moe_shared_expert_intermediate_size": 40}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
        2,
    ),
}
LATENT = TINY["nemotron_h"][0] | {"moe_latent_size": 16}
CASES = [(name, config, blocks) for name, (config, blocks) in TINY.items()] + [("nemotron_h", LATENT, 2)]


def save_tiny(model_type: str, config: dict[str, Any], folder: Path) -> tuple[dict[str, Ref], dict[str, Any]]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {model_type}")
    made = transformers.AutoConfig.for_model(model_type, **(COMMON | config))
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    refs = {}
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                refs[name] = Ref(name, part.get_dtype(), tuple(part.get_shape()), number, 0, 0)
    return refs, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("model_type", "config", "num_blocks"), CASES, ids=[c[0] for c in CASES])
def test_row_fits_what_transformers_writes(
    model_type: str, config: dict[str, Any], num_blocks: int, tmp_path: Path
) -> None:
    refs, written = save_tiny(model_type, config, tmp_path)
    found = map_experts(refs, written)
    assert found.chosen_because.startswith(f"model_type {model_type};")
    assert len(found.blocks) == num_blocks
    assert {ref.file for ref in refs.values()} != {0}
    for block in found.blocks:
        assert (block.num_experts, block.top_k, block.dtype) == (E, TOP_K, "BF16")
        assert (block.hidden_size, block.intermediate_size) == (config.get("moe_latent_size", H), EXPERT_I)
        assert (block.activation, block.gated) == (
            ("relu2", False) if model_type == "nemotron_h" else ("silu", True)
        )
    left = [name for name in found.copied if re.search(r"(^|\.)experts\.", name)]
    assert left == []
    parts = [*found.converted, *found.copied, *found.dropped]
    assert sorted(parts) == sorted(refs)
    # longcat_flash: two zero-experts in two layers, each written with a gate and an up
    assert len(found.dropped) == (8 if model_type == "longcat_flash" else 0)


def test_every_model_type_has_one_row() -> None:
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types)) == len(BY_MODEL_TYPE)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_row_is_well_formed(family: Family) -> None:
    assert family.blocks
    assert len(set(family.blocks)) == len(family.blocks)
    for template in family.blocks:
        assert template.count("{layer}") == 1
        path = template.format(layer=3)
        assert (
            len(re.findall(r"(?:^|\.)(?:layers|blocks|mtp)\.3\.", path)) == 1
        )  # where the layer is read from
        # what experts.py takes for an expert tensor must cover the row's own names
        assert re.search(r"(^|\.)experts(\.|$)", path) or (family.stacks and "moe" in path)
    assert set(family.projections) in ({"w1", "w3", "w2"}, {"w3", "w2"})
    assert len(set(family.projections.values())) == len(family.projections)
    # one pattern tells a stack from an expert's projection: an expert's name begins with a number
    assert all(
        name.isidentifier() for name in (*family.projections.values(), *(s.name for s in family.stacks))
    )
