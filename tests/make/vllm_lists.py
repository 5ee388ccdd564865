"""What vLLM 0.33 does with the families: which cannot be built on a machine without a GPU, which have drafts."""

from __future__ import annotations

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
DRAFTED = {
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v3",
}
DRAFTED |= {"bailing_hybrid", "nemotron_h", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"}
# What the plugin refuses, and in which words.
REFUSED = dict.fromkeys(("llama4", "llama4_text"), "cannot weigh the experts' inputs")
# Whose checkpoint layout is given to a stock vLLM.
STOCK = (
    *(
        "mixtral",
        "minimax_m2",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "olmoe",
        "jamba",
        "lfm2_moe",
    ),
    *("nemotron_h", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"),
    *("laguna", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa"),
    *("dbrx", "deepseek_v4"),
)
