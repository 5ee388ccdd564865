"""What vLLM 0.33 does with the families: which cannot be built on a machine without a GPU, which have drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

# What cannot be built here, and why.
LEFT_OUT = {
    "diffusion_gemma": "needs vLLM's second model runner, which needs Triton",
    "dots3_note_text": "transformers has it later than vLLM 0.33's environment",
    "flint": "needs FlashInfer's attention",
    "hy_v4_vl": "neither vLLM nor its transformers has it",
    "hy_v4_vl_text": "neither vLLM nor its transformers has it",
    "inkling2_loop_text": "neither vLLM nor its transformers has it",
    "inkling2_text": "neither vLLM nor its transformers has it",
    "kimi_k25": "transformers saves names that vLLM has not, the Hub's are in test_names",
    "lara_mini": "neither vLLM nor its transformers has it",
    "mistral_large4": "neither vLLM nor its transformers has it",
    "step3p7": "vLLM takes a vision config that transformers does not write",
}
NEXT = {"num_nextn_predict_layers": 1}
_LAST = {"model.layers.1.": "model.layers.2."}
_MTP = {"model.layers.1.": "mtp.layers.0."}
_JOINED = ("mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")


class Draft(NamedTuple):
    """A draft of the same folder, which transformers does not save.

    layer: the name of its experts. words: config values. moved: a layer's names as they begin, and the draft's.
    modules: what else it has.
    """

    layer: str
    words: dict[str, Any]
    moved: dict[str, str]
    modules: tuple[str, ...]


_DEEPSEEK = Draft(
    "model.layers.2.mlp.experts",
    NEXT,
    _LAST,
    ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head"),
)
_HUNYUAN = _DEEPSEEK._replace(modules=("eh_proj", "enorm", "hnorm", "final_layernorm"))
_QWEN = Draft("mtp.layers.0.mlp.experts", NEXT, _MTP, _JOINED)
DRAFTS = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "hy_v3": _HUNYUAN,
    "bailing_hybrid": _HUNYUAN,
    "qwen3_next": _QWEN,
    "qwen3_5_moe_text": _QWEN._replace(words={"mtp_num_hidden_layers": 1}),
    "qwen3_5_moe": _QWEN._replace(
        words={"text_config": {"mtp_num_hidden_layers": 1}},
        moved={"model.language_model.layers.1.": "mtp.layers.0."},
    ),
    "deepseek_v4": Draft(
        "mtp.0.ffn.experts",
        NEXT,
        {"layers.1.": "mtp.0.", "hc_head_": "mtp.0.hc_head_"},
        ("e_proj", "h_proj", "enorm", "hnorm", "norm"),
    ),
    "nemotron_h": Draft(
        "mtp.layers.1.mixer.experts",
        NEXT | {"mtp_layers_block_type": ["attention", "moe"]},
        {"backbone.layers.0.": "mtp.layers.0.", "backbone.layers.1.": "mtp.layers.1."},
        ("eh_proj", "enorm", "hnorm"),
    ),
}
# What the plugin refuses, and in which words.
REFUSED = dict.fromkeys(("llama4", "llama4_text"), "cannot weigh the experts' inputs")
# Whose checkpoint layout is given to a stock vLLM.
STOCK = (
    "mixtral",
    "minimax_m2",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "olmoe",
    "jamba",
    "lfm2_moe",
    "nemotron_h",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "laguna",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "granitemoe_swa",
    "dbrx",
    "deepseek_v4",
)
