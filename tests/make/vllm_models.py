"""vLLM's whole model classes with tiny configs, on a machine without a GPU.

Much of vLLM asks for compiled extensions and for GPU libraries as soon as it is imported, and what stands in for them
is nothing for a process that tests anything else: `vllm_serving` is a program.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import torch

from tests.make.families import LAYERS
from tests.make.vllm_lists import DRAFTS

# Words that vLLM's classes ask of a config and transformers' tiny models do not have.
WORDS: dict[str, dict[str, Any]] = {
    "afmoe": {
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "route_scale": 1.0,
    },
    "bailing_hybrid": {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "use_bias": False,
        "use_qkv_bias": False,
    },
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "deepseek_v32": {"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    "deepseek_v4": {"head_dim": 512, "qk_rope_head_dim": 64, "compress_ratios": [0] * (LAYERS + 1)},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm4v_moe": {"text_config": {"use_qk_norm": True}},
    "glm5_next": {
        "text_config": {
            "mhc": {"n": 2, "rate": 2},
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "first_k_dense_replace": 1,
            "mla_use_nope": True,
        }
    },
    "glm_moe_dsa": {"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    "hy_v3": {
        "expert_hidden_dim": 48,
        "route_norm": True,
        "moe_router_use_sigmoid": True,
        "router_scaling_factor": 1.0,
        "qk_norm": True,
    },
    "inkling_mm_model": {
        "text_config": {
            "dense_mlp_idx": 1,
            "local_layer_ids": [0, 1],
            "shared_expert_sink": True,
            **dict.fromkeys(
                ("use_embed_norm", "use_sconv", "use_gate_bias", "use_global_scale"), True
            ),
        }
    },
    "kimi_linear": {
        "mla_use_nope": True,
        "qk_rope_head_dim": 0,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 0],
        "moe_layer_freq": [0, 1],
        "layernorm_epsilon": 1e-5,
        "scoring_func": "sigmoid",
    },
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    "minimax_m3_vl": {
        "text_config": {
            "hidden_act": "swigluoai",
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "swiglu_beta": 1.0,
            "moe_layer_freq": [1, 1],
        },
        "vision_config": {"img_token_compression_config": {"spatial_merge_size": 2}},
    },
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
}
# --- what stands in ----------------------------------------------------------------------------------------

from hqconv.warm.no_gpu import pretend  # noqa: E402

pretend()

from tests.make.vllm_cpu import Pretended  # noqa: E402, F401  # isort: skip  - before vLLM

from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402


def _merged(config: dict[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        key: config[key] | word for key, word in words.items() if isinstance(config.get(key), dict)
    }
    return {**config, **words, **nested}


def reword(folder: Path, model_type: str, **more: Any) -> str:
    """Write into a tiny model's config what vLLM asks for, its draft, and more; returns the draft's layer, or ""."""
    path = folder / "config.json"
    draft = DRAFTS.get(model_type)
    config = _merged(json.loads(path.read_text()), WORDS.get(model_type, {}))
    config = _merged(config, draft.words if draft else {})
    path.write_text(json.dumps(_merged(config, more)))
    return draft.layer if draft else ""


def configure(folder: Path, is_drafted: bool) -> tuple[VllmConfig, ModelConfig | None]:
    """A server's config for a folder, and the model config of its draft."""
    words: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
    }
    model_config = ModelConfig(model=str(folder), tokenizer=str(folder), max_model_len=64, **words)
    vllm = VllmConfig(model_config=model_config)
    if not is_drafted:
        return vllm, None
    ranks = {"target_model_config": model_config, "target_parallel_config": vllm.parallel_config}
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=1, **ranks)
    return VllmConfig(
        model_config=model_config, speculative_config=speculative
    ), speculative.draft_model_config


def answer(out: Path, ask_one: Callable[[Path, str], dict[str, Any]], names: Sequence[str]) -> None:
    """Ask about each name in a folder of its own, as the only rank, and write the answers, or the error."""
    torch.set_num_threads(1)
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{scratch}/store", 0, backend="gloo")
            initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device("cpu"))
        for name in names:
            try:
                with set_current_vllm_config(
                    VllmConfig()
                ):  # what is imported on the way asks for one
                    answers[name] = ask_one(Path(scratch) / name, name)
            except Exception as error:  # noqa: BLE001 - the test's to judge
                answers[name] = {"error": f"{type(error).__name__}: {error}"}
    out.write_text(json.dumps(answers))
