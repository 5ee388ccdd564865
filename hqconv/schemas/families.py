"""How model families name their experts: one row per vocabulary of names and config keys, data only.

Sources: transformers' `conversion_mapping.py` (names on disk), the families' `configuration_*.py` and
vLLM's loaders (config keys). A new family is one row here and one parameter in tests/test_families.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

# Where decoder layers live: alone, inside a multimodal wrapper (before and since transformers 5), saved
# without a head, and in multi-token-prediction modules that are not numbered on after the last layer.
LAYER_PREFIXES = (
    "model.layers.{layer}",
    "language_model.model.layers.{layer}",
    "model.language_model.layers.{layer}",
    "layers.{layer}",
    "mtp.layers.{layer}",
    "language_model.mtp.layers.{layer}",
)
BACKBONE_PREFIXES = ("backbone.layers.{layer}", "language_model.backbone.layers.{layer}")

GATE_UP_DOWN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
W1_W3_W2 = {"w1": "w1", "w3": "w3", "w2": "w2"}
UP_DOWN = {"w3": "up_proj", "w2": "down_proj"}

# Multimodal configs keep the language model's values under one of these.
TEXT_CONFIG_KEYS = ("text_config", "language_config", "llm_config")

Config = Mapping[str, object]  # a parsed config.json

# One spelling per number, so that no two names mean the same expert.
_INDEX = r"(?:0|[1-9][0-9]{0,8})"


@dataclass(frozen=True)
class Family:
    """One vocabulary: `<block>.<expert>.<projection><suffix>` is a matrix `[out, in]` of one expert.

    `blocks` are anchored templates of the experts module's path, with `{layer}` for the layer index.
    `projections` maps the role (w1 gate, w3 up, w2 down) to its name. Each `*_keys` lists config keys, the
    first one present wins; a list value holds one number per layer. `activation` is what the family's
    code uses when the config does not say.
    """

    name: str
    model_types: tuple[str, ...]
    blocks: tuple[str, ...] = ()
    projections: Mapping[str, str] = field(default_factory=dict, hash=False)
    suffix: str = ".weight"
    activation: str = "silu"
    num_experts_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",)
    hidden_size_keys: tuple[str, ...] = ("hidden_size",)
    intermediate_size_keys: tuple[str, ...] = ("moe_intermediate_size",)
    activation_keys: tuple[str, ...] = ("hidden_act",)
    num_layers_keys: tuple[str, ...] = ("num_hidden_layers",)
    zero_experts_keys: tuple[str, ...] = ()  # routed to after the real experts, without weights of use
    fused: bool = False  # all experts of a block in one tensor
    transposed: bool = False  # [in, out] instead of [out, in]
    interleaved: bool = False  # gate and up rows alternate

    @property
    def gated(self) -> bool:
        """Whether an expert has a gate next to its up projection."""
        return "w1" in self.projections

    def pattern(self) -> re.Pattern[str]:
        """Matches a whole tensor name; groups: block, expert, projection. Equal rows give the same object."""
        return _name_pattern(self.blocks, tuple(self.projections.values()), self.suffix)

    def example(self) -> str:
        """A tensor name of this family, for messages."""
        block = self.blocks[0].format(layer="N")
        return f"{block}.E.{next(iter(self.projections.values()))}{self.suffix}"


@cache
def _name_pattern(blocks: tuple[str, ...], projections: tuple[str, ...], suffix: str) -> re.Pattern[str]:
    paths = "|".join(re.escape(t).replace(re.escape("{layer}"), _INDEX) for t in blocks)
    names = "|".join(map(re.escape, projections))
    return re.compile(
        rf"(?P<block>{paths})\.(?P<expert>{_INDEX})\.(?P<projection>{names}){re.escape(suffix)}"
    )


def text_config(config: Config) -> Config:
    """The language model's values: a nested text config, where there is one, over the outer config."""
    for key in TEXT_CONFIG_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            return {**config, **nested}
    return config


def _under(module: str, *more_prefixes: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{module}" for prefix in (*more_prefixes, *LAYER_PREFIXES))


# Where several rows fit an unknown model_type equally well, the earlier row is taken.
FAMILIES: tuple[Family, ...] = (
    Family(
        name="qwen_moe",
        model_types=(
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_moe_text",
            "qwen3_next",
            "afmoe",
            "exaone_moe",
            "bailing_moe",
            "bailing_moe_linear",
            "bailing_moe_v2",
            "bailing_hybrid",
        ),
        blocks=_under("mlp.experts"),
        projections=GATE_UP_DOWN,
        top_k_keys=("num_experts_per_tok", "num_experts_per_token"),
    ),
    Family(
        name="deepseek",
        model_types=(
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "kimi_k2",
            "kimi_k25",
            "kimi_vl",
            "dots1",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "glm4v_moe_text",
            "glm_moe_dsa",
            "mimo_v2",
            "mimo_v2_flash",
            "solar_open",
        ),
        blocks=_under("mlp.experts"),
        projections=GATE_UP_DOWN,
        num_experts_keys=("n_routed_experts", "num_local_experts"),
    ),
    Family(
        name="ernie4_5_moe",
        model_types=("ernie4_5_moe",),
        blocks=_under("mlp.experts"),
        projections=GATE_UP_DOWN,
        num_experts_keys=("moe_num_experts",),
        top_k_keys=("moe_k",),
    ),
    Family(
        # The Hub's Hunyuan-A13B gives lists with one value per layer; transformers writes plain numbers and
        # sizes its experts by intermediate_size, vLLM prefers moe_intermediate_size where there is one.
        name="hunyuan_v1_moe",
        model_types=("hunyuan_v1_moe", "hunyuan"),
        blocks=_under("mlp.experts"),
        projections=GATE_UP_DOWN,
        top_k_keys=("moe_topk",),
        intermediate_size_keys=("moe_intermediate_size", "intermediate_size"),
    ),
    Family(
        # Zero-experts take part in routing only; the Hub's checkpoints have no tensors for them, while
        # transformers 5 writes their gate and up (modeling_longcat_flash.py, LongcatFlashExperts).
        name="longcat_flash",
        model_types=("longcat_flash",),
        blocks=_under("mlp.experts"),
        projections=GATE_UP_DOWN,
        num_experts_keys=("n_routed_experts",),
        top_k_keys=("moe_topk",),
        intermediate_size_keys=("expert_ffn_hidden_size",),
        num_layers_keys=("num_layers", "num_hidden_layers"),
        zero_experts_keys=("zero_expert_num",),
    ),
    Family(
        name="olmoe",
        model_types=("olmoe", "flex_olmo"),
        blocks=_under("mlp.experts"),
        projections=GATE_UP_DOWN,
        intermediate_size_keys=("intermediate_size",),
    ),
    Family(
        name="mixtral",
        model_types=("mixtral", "phimoe", "minimax", "minimax_m2"),
        blocks=_under("block_sparse_moe.experts"),
        projections=W1_W3_W2,
        num_experts_keys=("num_local_experts", "num_experts"),
        intermediate_size_keys=("intermediate_size",),
    ),
    Family(
        name="kimi_linear",
        model_types=("kimi_linear",),
        blocks=_under("block_sparse_moe.experts"),
        projections=W1_W3_W2,
        top_k_keys=("num_experts_per_token", "num_experts_per_tok"),
    ),
    Family(
        # No hidden_act in the config: silu is fixed in the model's code.
        name="lfm2_moe",
        model_types=("lfm2_moe",),
        blocks=_under("feed_forward.experts"),
        projections=W1_W3_W2,
    ),
    Family(
        name="jamba",
        model_types=("jamba",),
        blocks=_under("feed_forward.experts"),
        projections=GATE_UP_DOWN,
        intermediate_size_keys=("intermediate_size",),
    ),
    Family(
        # With moe_latent_size the experts work in that space: it is their K and the down projection's N.
        name="nemotron_h",
        model_types=("nemotron_h",),
        blocks=_under("mixer.experts", *BACKBONE_PREFIXES),
        projections=UP_DOWN,
        activation="relu2",
        num_experts_keys=("n_routed_experts",),
        hidden_size_keys=("moe_latent_size", "hidden_size"),
        activation_keys=("mlp_hidden_act",),
    ),
    # Known, but their experts cannot be mapped yet: no templates, only what they are. (deepseek_v4 stores
    # its experts one by one, as fp4 or fp8 with `.scale` partners.)
    Family("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), fused=True),
    Family("qwen3_vl_moe", ("qwen3_vl_moe", "qwen3_vl_moe_text"), fused=True, transposed=True),
    Family("llama4", ("llama4", "llama4_text"), fused=True, transposed=True),
    Family("gpt_oss", ("gpt_oss",), fused=True, transposed=True, interleaved=True),
    Family("granitemoe", ("granitemoe", "granitemoeshared", "granitemoehybrid"), fused=True),
    Family("gemma4", ("gemma4", "gemma4_text", "gemma4_unified"), fused=True),
    Family("dbrx", ("dbrx",), fused=True),
    Family("step3", ("step3", "step3_text", "step3_vl", "step3p5", "step3p7"), fused=True),
    Family("aria", ("aria", "aria_text"), fused=True, transposed=True),
    Family("deepseek_v4", ("deepseek_v4",)),
)

BY_MODEL_TYPE: Mapping[str, Family] = {t: family for family in FAMILIES for t in family.model_types}
