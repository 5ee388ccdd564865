"""Tiny models of every Mixture-of-Experts family transformers knows, as it saves them, and their experts as oracle.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

LAYERS = 2
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
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
INDEXED = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
DENSE_FIRST = {"first_k_dense_replace": 1}
DENSE_THEN_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
FULL = {"layer_types": ["full_attention"] * LAYERS}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
LINEAR_KEYS = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR = LINEAR_KEYS | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
TINY_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
CAUSAL, VISUAL = "AutoModelForCausalLM", "AutoModelForImageTextToText"


class Keys(NamedTuple):
    """The config's words for E, k and I."""

    experts: str
    top_k: str
    inner: str


PLAIN = Keys("num_experts", "num_experts_per_tok", "moe_intermediate_size")
ROUTED = Keys("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
LOCAL = Keys("num_local_experts", "num_experts_per_tok", "intermediate_size")
OF_ALL = Keys("num_experts", "num_experts_per_tok", "intermediate_size")
GEMMA = Keys("num_experts", "top_k_experts", "moe_intermediate_size")
ARIA = Keys("moe_num_experts", "moe_topk", "intermediate_size")


@dataclass(frozen=True)
class Spec:
    """How to make a tiny model and what must be found in it.

    `words` are config values beyond the sizes; where there is `nested`, that is the key of the language model's
    config, and `outer` are the values around it. `hidden` are the keys that hold H.
    """

    keys: Keys
    words: Mapping[str, Any] = field(default_factory=dict)
    num_blocks: int = LAYERS
    activation: str = "silu"
    auto_class: str = CAUSAL
    nested: str = ""
    outer: Mapping[str, Any] = field(default_factory=dict)
    hidden: tuple[str, ...] = ("hidden_size",)

    def config(self, sizes: Mapping[str, int], words: Mapping[str, Any]) -> dict[str, Any]:
        """The words of a config with these sizes."""
        inner = COMMON | dict.fromkeys(self.hidden, sizes["hidden"])
        inner |= dict(
            zip(self.keys, (sizes["experts"], sizes["top_k"], sizes["inner"]), strict=True)
        )
        inner |= {**self.words, **words}
        if not self.nested:
            return inner
        around = {
            key: inner[key] for key in self.outer if key in inner
        }  # what the outer config repeats
        return {**self.outer, **around, self.nested: inner}


def visual(
    keys: Keys,
    words: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **more: Any,
) -> Spec:
    """A language model under `text_config`, beside a vision tower."""
    outer = {"vision_config": TINY_VISION | dict(vision or {}), **more.pop("outer", {})}
    return Spec(keys, words or {}, nested="text_config", outer=outer, auto_class=VISUAL, **more)


DENSE = {"intermediate_size": 56}
SHARED = {"shared_expert_intermediate_size": 40}
QWEN_VISION = {"out_hidden_size": 64, "num_position_embeddings": 16}

INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
INKLING |= {"unpadded_vocab_size": 64, "rel_extent": 16}
GLM5_LINEAR = {"linear_head_dim": 8, "linear_num_heads": 2, "index_topk": 16, "qk_rope_head_dim": 0}

FAMILIES: dict[str, Spec] = {
    "mixtral": Spec(LOCAL),
    "phimoe": Spec(LOCAL),
    "minimax": Spec(LOCAL, FULL),
    "minimax_m2": Spec(LOCAL, {"rotary_dim": 8}),
    "minimax_m3_vl": visual(
        LOCAL,
        {
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 40,
            "rotary_dim": 8,
            "index_head_dim": 16,
        },
        activation="swigluoai",
        outer={"projector_hidden_size": 32},
    ),
    "qwen2_moe": Spec(PLAIN, DENSE | SHARED),
    "qwen3_moe": Spec(PLAIN, DENSE | {"mlp_only_layers": [1]}, 1),
    "qwen3_next": Spec(PLAIN, LINEAR | FULL | SHARED),
    "qwen3_5_moe_text": Spec(PLAIN, LINEAR | FULL | SHARED),
    "qwen3_5_moe": visual(PLAIN, LINEAR | FULL | SHARED, QWEN_VISION),
    "qwen3_vl_moe": visual(PLAIN, DENSE, QWEN_VISION | {"deepstack_visual_indexes": [0]}),
    "afmoe": Spec(PLAIN, FULL | DENSE | {"num_dense_layers": 1}, 1),
    "exaone_moe": Spec(PLAIN, FULL | DENSE | DENSE_THEN_SPARSE, 1),
    "beam": Spec(PLAIN, DENSE | DENSE_THEN_SPARSE | NO_GROUPS, 1),
    "flint": Spec(PLAIN, DENSE | SHARED | {"mlp_only_layers": [0]}, 1),
    "hy_v3": Spec(PLAIN, DENSE | DENSE_FIRST, 1),
    "kolibri1": Spec(PLAIN, DENSE),
    "laguna": Spec(PLAIN, FULL | DENSE | SHARED, 1),
    "mellum": Spec(PLAIN, DENSE),
    "zaya": Spec(PLAIN, {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    "bailing_hybrid": Spec(PLAIN, MLA | DENSE | DENSE_FIRST | NO_GROUPS, 1),
    "olmoe": Spec(OF_ALL),
    "flex_olmo": Spec(OF_ALL),
    "cohere2_moe": Spec(OF_ALL),
    "glm4_moe": Spec(ROUTED, DENSE | DENSE_FIRST | NO_GROUPS, 1),
    "glm4_moe_lite": Spec(ROUTED, MLA | DENSE | NO_GROUPS | DENSE_THEN_SPARSE, 1),
    "glm4v_moe": visual(
        ROUTED, DENSE | DENSE_FIRST | NO_GROUPS, {"out_hidden_size": 64}, num_blocks=1
    ),
    "glm_moe_dsa": Spec(ROUTED, MLA | INDEXED | DENSE | NO_GROUPS | DENSE_THEN_SPARSE, 1),
    "dots3_note_text": Spec(ROUTED, MLA | INDEXED | DENSE | NO_GROUPS, 1),
    "dots1": Spec(ROUTED, DENSE | DENSE_FIRST | NO_GROUPS | {"n_shared_experts": 1}, 1),
    "solar_open": Spec(ROUTED, NO_GROUPS),
    "axk1": Spec(ROUTED, MLA | DENSE | NO_GROUPS, 1),
    "axk2": Spec(ROUTED, MLA | INDEXED | DENSE, 1),
    "mistral4": Spec(ROUTED, MLA | DENSE | NO_GROUPS, auto_class=VISUAL),
    "mistral_large4": visual(
        ROUTED,
        MLA | INDEXED | DENSE,
        {"patch_size": 14, "image_size": 28, "head_dim": 16},
        num_blocks=1,
    ),
    "deepseek_v2": Spec(ROUTED, MLA | DENSE | DENSE_FIRST | {"topk_method": "greedy"}, 1),
    "deepseek_v3": Spec(ROUTED, MLA | DENSE | DENSE_FIRST | NO_GROUPS | {"n_shared_experts": 1}, 1),
    "deepseek_v32": Spec(ROUTED, MLA | INDEXED | DENSE | NO_GROUPS | DENSE_THEN_SPARSE, 1),
    "deepseek_v4": Spec(
        ROUTED,
        INDEXED | {"num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2},
        activation="silu_clamp10",
    ),
    "kimi_k25": visual(
        ROUTED, MLA | DENSE | DENSE_FIRST | NO_GROUPS | {"model_type": "deepseek_v3"}, num_blocks=1
    ),
    "mimo_v2_flash": Spec(ROUTED, FULL | DENSE | NO_GROUPS | DENSE_THEN_SPARSE, 1),
    "hy_v4": Spec(ROUTED, MLA | INDEXED | DENSE, 1, "silu_clamp10"),
    "glm5_next": visual(
        ROUTED,
        MLA | INDEXED | DENSE | DENSE_THEN_SPARSE | GLM5_LINEAR,
        {"out_hidden_size": 64},
        num_blocks=1,
        activation="silu_clamp10",
    ),
    "ernie4_5_moe": Spec(
        Keys("moe_num_experts", "moe_k", "moe_intermediate_size"),
        DENSE | {"moe_layer_start_index": 1},
        1,
    ),
    "hunyuan_v1_moe": Spec(Keys("num_experts", "moe_topk", "intermediate_size")),
    "longcat_flash": Spec(
        Keys("n_routed_experts", "moe_topk", "expert_ffn_hidden_size"),
        MLA
        | {"num_hidden_layers": 4, "num_layers": 2, "zero_expert_num": 2, "ffn_hidden_size": 48},
    ),
    "kimi_linear": Spec(PLAIN, MLA | DENSE | DENSE_THEN_SPARSE, 1),
    "lfm2_moe": Spec(PLAIN, DENSE | FULL | {"num_dense_layers": 1}, 1),
    "jamba": Spec(
        OF_ALL,
        {
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        }
        | {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4},
        1,
    ),
    "nemotron_h": Spec(
        ROUTED,
        {"layers_block_type": ["attention", "moe"], "moe_shared_expert_intermediate_size": 40}
        | {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 8, "n_groups": 2},
        1,
        "relu2",
    ),
    "llama4_text": Spec(LOCAL, {"intermediate_size_mlp": 48}),
    "llama4": visual(
        LOCAL,
        {"intermediate_size_mlp": 48},
        {
            "vision_output_dim": 32,
            "image_size": 28,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    ),
    "gpt_oss": Spec(LOCAL, FULL, activation="swigluoai"),
    "openai_privacy_filter": Spec(
        LOCAL, activation="swigluoai", auto_class="AutoModelForTokenClassification"
    ),
    "granitemoe": Spec(LOCAL),
    "granitemoeshared": Spec(LOCAL, {"shared_intermediate_size": 40}),
    "granitemoehybrid": Spec(
        LOCAL, {"layer_types": ["attention"] * LAYERS, "shared_intermediate_size": 40}
    ),
    "granitemoe_swa": Spec(LOCAL),
    "gemma4": visual(
        Keys("num_experts", "top_k_experts", "moe_intermediate_size"),
        DENSE
        | {
            "enable_moe_block": True,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
        },
        {"head_dim": 16, "position_embedding_size": 16},
        activation="gelu_pytorch_tanh",
    ),
    "diffusion_gemma": visual(
        GEMMA,
        DENSE,
        {"model_type": "gemma4_vision", "head_dim": 16, "position_embedding_size": 16},
        activation="gelu_pytorch_tanh",
    ),
    "dbrx": Spec(
        Keys("moe_num_experts", "moe_top_k", "ffn_hidden_size"),
        nested="ffn_config",
        # transformers 5.23 asks attn_config for a rope_theta that it does not have.
        outer={
            "n_layers": LAYERS,
            "n_heads": 4,
            "vocab_size": 64,
            "d_model": 64,
            "attn_config": {"rope_theta": 1e4},
        },
        hidden=("hidden_size", "d_model"),
    ),
    "step3p7": visual(
        ROUTED,
        DENSE | FULL | DENSE_THEN_SPARSE | {"share_expert_dim": 40},
        {"image_size": 28, "max_position_embeddings": 4},
        num_blocks=1,
    ),
    "aria_text": Spec(ARIA),
    "aria": visual(
        ARIA, vision={"model_type": "idefics3_vision", "image_size": 28, "patch_size": 14}
    ),
    "inkling_mm_model": visual(
        ROUTED,
        DENSE | DENSE_THEN_SPARSE | INKLING,
        {"text_hidden_size": 64, "num_hidden_layers": 8, "patch_size": 2},
        num_blocks=1,
        outer={"audio_config": {"text_hidden_size": 64, "n_mel_bins": 4, "mel_vocab_size": 8}},
    ),
    "inkling2_text": Spec(
        ROUTED,
        {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "unpadded_vocab_size": 64,
        },
        activation="softcapped_swiglu",
    ),
}
# Of transformers 5.24.
_MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}
NEWER = {
    "lara_mini": Spec(PLAIN, LINEAR | FULL | SHARED),
    "sarvam_mla": Spec(ROUTED, MLA | DENSE | DENSE_FIRST | NO_GROUPS | {"n_shared_experts": 1}, 1),
    "hy_v4_vl_text": Spec(
        ROUTED, MLA | INDEXED | DENSE | _MROPE, 1, "silu_clamp10", auto_class="AutoModel"
    ),
    "hy_v4_vl": visual(
        ROUTED,
        MLA | INDEXED | DENSE | _MROPE,
        {"out_hidden_size": 64},
        num_blocks=1,
        activation="silu_clamp10",
    ),
    "inkling2_loop_text": replace(
        FAMILIES["inkling2_text"],
        words={
            **FAMILIES["inkling2_text"].words,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
        },
    ),
}
FAMILIES |= {name: spec for name, spec in NEWER.items() if name in transformers.CONFIG_MAPPING}

# --- models and files --------------------------------------------------------------------------------------

SIZES = {"hidden": 64, "inner": 48, "experts": 4, "top_k": 2}


def make_family(
    model_type: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **overrides: Any
) -> nn.Module:
    """A tiny model with random weights. `overrides`: hidden, inner, experts, top_k, or config values."""
    sizes = {key: overrides.pop(key, size) for key, size in SIZES.items()}
    spec = FAMILIES[model_type]
    config = transformers.AutoConfig.for_model(model_type, **spec.config(sizes, overrides))
    torch.manual_seed(seed)
    return as_filled(getattr(transformers, spec.auto_class).from_config(config), dtype)


def as_filled(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model with random weights of a dtype."""
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.config.dtype = dtype
    return model


def save_family(
    folder: Path, model_type: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> nn.Module:
    """Let transformers save a tiny model under its on-disk names, in several shards; returns the model."""
    model = make_family(model_type, dtype, **overrides)
    model.save_pretrained(folder, max_shard_size="200KB")
    return model


# --- experts as oracle -------------------------------------------------------------------------------------


def moe_layers(model: nn.Module) -> list[tuple[int, str, nn.Module]]:
    """Layer, path and module of each block of routed experts, in layer order; blocks of tied weights once."""
    found: dict[int, tuple[int, str, nn.Module]] = {}
    for path, module in model.named_modules():
        if type(module).__name__.endswith("Experts") and not path.endswith("shared_experts"):
            layer = re.search(r"\.(\d+)\.", f".{path}.")
            assert layer is not None, path
            found.setdefault(id(next(module.parameters())), (int(layer[1]), path, module))
    return sorted(found.values(), key=lambda block: block[0])


def experts_forward(
    module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """transformers' own experts on tokens [T, H] with chosen experts and weights [T, k], in the tokens' dtype."""
    module = module.to(hidden.dtype)
    with torch.no_grad():
        if (
            type(module).__name__ == "Llama4TextExperts"
        ):  # every expert sees every token, unweighted
            each = module(hidden.repeat(module.num_experts, 1)).view(-1, *hidden.shape)
            return (each[ids, torch.arange(len(hidden))[:, None]] * weights[..., None]).sum(1)
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
        return module(hidden, ids, weights).view_as(hidden)
