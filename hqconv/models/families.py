"""Rows of the families table: tensor name templates, and config keys of a model's numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from hqconv.schemas.artifact_names import Config

# Paths of decoder layers: alone, inside a multimodal wrapper (before and since transformers 5), saved
# without a head, and in multi-token-prediction modules with their own numbers.
LAYER_PREFIXES = (
    "model.layers.{layer}",
    "language_model.model.layers.{layer}",
    "model.language_model.layers.{layer}",
    "layers.{layer}",
    "mtp.layers.{layer}",
    "language_model.mtp.layers.{layer}",
    "thinker.model.layers.{layer}",
    "llm.model.layers.{layer}",
    "language.model.layers.{layer}",
    "language_model.layers.{layer}",
    "model.language_model.model.layers.{layer}",
    "model.model.layers.{layer}",
    "model.text_model.layers.{layer}",
    "text_model.layers.{layer}",
)

# Where the families keep their experts within a decoder layer.
USUAL_MODULES = tuple(
    f"{name}.experts" for name in ("mlp", "block_sparse_moe", "feed_forward", "ffn", "moe")
)
GATE_UP_DOWN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
W1_W3_W2 = {"w1": "w1", "w3": "w3", "w2": "w2"}
UP_DOWN = {"w3": "up_proj", "w2": "down_proj"}

# One spelling per number, so that no two names mean the same expert.
INDEX = r"(?:0|[1-9][0-9]{0,8})"


@dataclass(frozen=True)
class Stack:
    """Fused tensor with the same projections of all experts of a layer: `<layer>.<name>` and a part's suffix.

    `roles` are the projections it holds along N, in this order, each `[I, H]` (w2: `[H, I]`); `interleaved` means
    that their rows alternate. The shape is `[E, out, in]`, or `[E, in, out]` where `transposed`; None leaves the
    orientation to the shapes of the layer's stacks, which must allow exactly one. `flat` merges the first two
    dimensions. Packed parts (`blocks`, `scales`) and biases are never transposed.
    """

    name: str
    roles: tuple[str, ...]
    transposed: bool | None = False
    interleaved: bool = False
    flat: bool = False


def under_layers(module: str, *more_prefixes: str) -> tuple[str, ...]:
    """Return the templates of a module of every decoder layer, usual prefixes first."""
    return tuple(f"{prefix}.{module}" for prefix in (*LAYER_PREFIXES, *more_prefixes))


def fused_stacks(
    gate_up: str, down: str, transposed: bool | None = False, interleaved: bool = False
) -> tuple[Stack, ...]:
    """Return two stacks: gate and up in one, down in the other."""
    return (Stack(gate_up, ("w1", "w3"), transposed, interleaved), Stack(down, ("w2",), transposed))


# Stacks of most families in transformers 5, in memory and in some saved checkpoints.
FUSED = fused_stacks("gate_up_proj", "down_proj")
FUSED_TRANSPOSED = fused_stacks("gate_up_proj", "down_proj", transposed=True)


@dataclass(frozen=True)
class Family:
    """Tensor names and config keys of a model family; a row says what is not as in most families.

    `<layer>.<expert>.<projection>` is the module of one expert's matrix; its parts follow.

    `modules` are anchored templates of the experts module's path, with `{layer}` for the layer index.
    `projections` maps the role (w1 gate, w3 up, w2 down) to its name; `stacks` are the fused tensors that the
    family has instead, or may have instead; `expert_stacks` are fused tensors of a single expert. Each `*_keys` lists
    config keys, the first one present wins; a list value holds one number per layer. `activation` is the default of the
    family's code for configs without one; `schemas/activation` reads the numbers that a config may have.
    `architectures` are classes that choose the row if model_type does not; `layer_configs_key` is the config key
    of a list with one layer's own values in each element; `other_models` are prefixes of separate models in the same
    checkpoint, whose experts are not described by the config's numbers: they are copied.

    These are the names of the release; `paths` and `spellings` are those that tools write. `more_stacks` are the stacks
    of transformers' own classes where they have other names than the released ones. `config_keys` lead to nested config
    values, one inside the other; `defaults` are numbers of the model's code, each under the last of its keys. With
    `is_unmarked` no name says expert: of the names that match, tensors of three dimensions are the experts.
    """

    name: str
    model_types: tuple[str, ...]
    modules: tuple[str, ...] = under_layers("mlp.experts")
    projections: Mapping[str, str] = field(default_factory=GATE_UP_DOWN.copy, hash=False)
    stacks: tuple[Stack, ...] = FUSED
    expert_stacks: tuple[Stack, ...] = ()
    activation: str = "silu"
    num_experts_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",)
    hidden_size_keys: tuple[str, ...] = ("hidden_size",)
    intermediate_size_keys: tuple[str, ...] = ("moe_intermediate_size",)
    activation_keys: tuple[str, ...] = ("hidden_act",)
    num_layers_keys: tuple[str, ...] = ("num_hidden_layers",)
    # where TP does not divide the experts, servers give the last rank less
    pads_last_rank: bool = False
    # routed to after the real experts, without weights of use
    zero_experts_keys: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    layer_configs_key: str = ""
    other_models: tuple[str, ...] = ()
    more_stacks: tuple[Stack, ...] = ()
    config_keys: tuple[str, ...] = ()
    defaults: Mapping[str, int] = field(default_factory=dict, hash=False)
    is_unmarked: bool = False

    @property
    def spellings(self) -> tuple[Mapping[str, str], ...]:
        """Names of an expert's projections by role, the released ones first."""
        usual = (GATE_UP_DOWN, W1_W3_W2) if self.gated else (UP_DOWN,)
        return (self.projections, *(names for names in usual if names != self.projections))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Templates of every path that the experts module may have, the released ones first.

        transformers 5, and tools that work with its classes, keep experts where another family has them, and wrap or
        unwrap the decoder.
        """
        splits = [template.partition("{layer}.") for template in self.modules]
        prefixes = (*(f"{front}{{layer}}" for front, _, _ in splits), *LAYER_PREFIXES)
        inner = (*(module for _, _, module in splits if module), *USUAL_MODULES)
        return tuple(
            dict.fromkeys(
                (*self.modules, *(f"{prefix}.{module}" for module in inner for prefix in prefixes))
            )
        )

    def spelled(self, projection_names: Mapping[str, str], stacks: Collection[str]) -> Family:
        """Return the row with the names of one layer: of its projections by role, and of its stacks."""
        own = {}
        for role, name in self.projections.items():
            found = projection_names.get(role)
            is_known = any(spelling.get(role) == found for spelling in self.spellings)
            own[role] = found if found and is_known else name
        # Of sets that fit equally well, the released one.
        fitting = max(
            (self.stacks, self.more_stacks),
            key=lambda row_stacks: sum(stack.name in stacks for stack in row_stacks),
        )
        return replace(self, projections=own, stacks=fitting)

    def config_values(self, text: Config) -> Config:
        """Merge the values that this family nests deeper, and its code's defaults, into the text config."""
        nested: object = text
        for key in self.config_keys:
            nested = nested.get(key) if isinstance(nested, Mapping) else None
            text = {**text, **nested} if isinstance(nested, Mapping) else text
        return {**self.defaults, **text}

    @property
    def gated(self) -> bool:
        """True if an expert has a gate next to its up projection."""
        return "w1" in self.projections

    def expert_stack(self, name: str, layer: str) -> Stack | None:
        """Return the single-expert stack that matches a tensor of the layer's expert 0; None without a match."""
        module = name.removeprefix(f"{layer}.0.").partition(".")[0]
        return next((stack for stack in self.expert_stacks if stack.name == module), None)

    def example(self) -> str:
        """Return a tensor name of this family, for messages."""
        layer = self.modules[0].format(layer="N")
        return f"{layer}.E.{next(iter(self.projections.values()))}.weight"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# For families whose hidden_act does not say what their experts do; a key that a config may be given.
OWN_ACTIVATION = ("expert_activation",)
# Config keys of the number of experts and of their size that several families have.
ROUTED_EXPERTS = ("n_routed_experts", "num_local_experts")
LOCAL_EXPERTS = ("num_local_experts", "num_experts")
PLAIN_SIZE = ("intermediate_size",)

# If several rows fit an unknown model_type equally well, the earlier row wins.
FAMILIES = (
    Family(
        # Also released fused, under the same module (Qwen3.5, Zaya). Qwen3-Omni has a thinker, which answers, and a
        # talker, whose experts have other numbers and sizes. xllm's and k2_horizon's attention has experts of values,
        # `self_attn.v_experts.E.weight`, single matrices that are copied (sglang's xllm.py). LLaDA2 and SDAR are
        # diffusion models with the experts of bailing_moe_v2 and qwen3_moe (sglang's llada2.py and sdar_moe.py).
        name="qwen_moe",
        model_types=_names(
            "qwen2_moe qwen3_moe qwen3_moe_text qwen3_next qwen3_5_moe qwen3_5_moe_text "
            "qwen3_omni_moe qwen3_omni_moe_thinker qwen3_omni_moe_text qwen4_exp qwen4_exp_text afmoe "
            "beam exaone_moe flint hy_v3 kolibri1 laguna mellum zaya bailing_moe bailing_moe_linear "
            "bailing_moe_v2 bailing_hybrid bailing_moe_v3 llada2_moe sdar_moe xllm k2_horizon "
            "alice_ai interns1_pro interns1_pro_text lara_mini param2moe sarvam_moe"
        ),
        top_k_keys=("num_experts_per_tok", "num_experts_per_token"),
        intermediate_size_keys=("moe_intermediate_size", "expert_hidden_dim"),
        other_models=("talker.",),
    ),
    Family(
        # mistral4 is released fused; transformers 5 saves kimi_k25's layers as blocks.
        name="deepseek",
        model_types=_names(
            "deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl_v2 deepseek_ocr2 "
            "deepseek_ocr2_text kimi_k2 kimi_k25 kimi_vl axk1 axk2 dots1 dots3_note_text glm4_moe "
            "glm4_moe_lite glm4v_moe glm4v_moe_text glm_moe_dsa inkling_text mimo_v2 mimo_v2_flash "
            "mistral4 pangu_ultra_moe solar_open unlimited_ocr unlimited_ocr_text"
        ),
        modules=under_layers("mlp.experts", "language_model.model.blocks.{layer}"),
        num_experts_keys=ROUTED_EXPERTS,
    ),
    Family(
        # As deepseek; the published config says num_experts, which transformers' class translates.
        name="sarvam_mla",
        model_types=("sarvam_mla",),
        num_experts_keys=("n_routed_experts", "num_experts", "num_local_experts"),
    ),
    Family(
        # As deepseek, but gate and up are clamped before the activation. hy_v4 is released fused. gigachat3_5's
        # attention has a gate_proj of its own (vLLM's gigachat3_5.py; its config class has the limit 10 too).
        name="glm5_next",
        model_types=(
            "glm5_next",
            "glm5_next_text",
            "hy_v4",
            "hy_v4_vl",
            "hy_v4_vl_text",
            "gigachat3_5",
        ),
        num_experts_keys=ROUTED_EXPERTS,
    ),
    Family(
        name="deepseek_v4",
        model_types=("deepseek_v4", "deepseek_v41", "deepseek_v41_text"),
        modules=under_layers("ffn.experts", "mtp.{layer}"),
        projections=W1_W3_W2,
        num_experts_keys=ROUTED_EXPERTS,
    ),
    Family(
        # Mistral's own format: neither mlp nor ffn between the layer and its experts.
        name="mistral_large4",
        model_types=("mistral_large4", "mistral_large4_text"),
        modules=under_layers("experts"),
        projections=W1_W3_W2,
        num_experts_keys=ROUTED_EXPERTS,
    ),
    Family(
        name="ernie4_5_moe",
        model_types=("ernie4_5_moe",),
        num_experts_keys=("moe_num_experts",),
        top_k_keys=("moe_k",),
    ),
    Family(
        # The Hub's Hunyuan-A13B gives lists with one value per layer; transformers writes plain numbers and
        # sizes its experts by intermediate_size, vLLM prefers moe_intermediate_size where there is one.
        name="hunyuan_v1_moe",
        model_types=("hunyuan_v1_moe", "hunyuan"),
        top_k_keys=("moe_topk",),
        intermediate_size_keys=("moe_intermediate_size", "intermediate_size"),
    ),
    Family(
        # Zero-experts take part in routing only; the Hub's checkpoints have no tensors for them, while
        # transformers 5 writes their gate and up (modeling_longcat_flash.py, LongcatFlashExperts). LongCat-Flash-Lite
        # adds embeddings of n-grams (vLLM's longcat_flash_ngram.py).
        name="longcat_flash",
        model_types=("longcat_flash", "longcat_flash_ngram"),
        architectures=("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"),
        num_experts_keys=("n_routed_experts",),
        top_k_keys=("moe_topk",),
        intermediate_size_keys=("expert_ffn_hidden_size",),
        num_layers_keys=("num_layers", "num_hidden_layers"),
        zero_experts_keys=("zero_expert_num",),
    ),
    Family(
        name="olmoe",
        model_types=("olmoe", "flex_olmo", "cohere2_moe"),
        intermediate_size_keys=PLAIN_SIZE,
    ),
    Family(
        name="mixtral",
        model_types=("mixtral", "phimoe", "minimax", "minimax_m2", "arctic"),
        modules=under_layers("block_sparse_moe.experts"),
        projections=W1_W3_W2,
        num_experts_keys=LOCAL_EXPERTS,
        intermediate_size_keys=PLAIN_SIZE,
    ),
    Family(
        # Dense layers have intermediate_size; Grok-2's model_type is another model's.
        name="grok",
        model_types=("grok-1",),
        architectures=("Grok1ForCausalLM", "Grok1ModelForCausalLM"),
        modules=under_layers("block_sparse_moe.experts"),
        projections=W1_W3_W2,
        stacks=(),
        activation="gelu",
        num_experts_keys=LOCAL_EXPERTS,
        intermediate_size_keys=("moe_intermediate_size", "intermediate_size"),
    ),
    Family(
        name="minicpm",
        model_types=("minicpm",),
        projections=W1_W3_W2,
        stacks=(),
        intermediate_size_keys=PLAIN_SIZE,
    ),
    Family(
        # hidden_act says silu, but the experts' activation is fixed in the model's code. The text model is
        # minimax_m3_vl_text in transformers, minimax_m3_text in vLLM.
        name="minimax_m3",
        model_types=("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3_text", "minimax_m3"),
        modules=under_layers("block_sparse_moe.experts"),
        projections=W1_W3_W2,
        activation="swigluoai",
        num_experts_keys=LOCAL_EXPERTS,
        intermediate_size_keys=PLAIN_SIZE,
        activation_keys=OWN_ACTIVATION,
    ),
    Family(
        # Kimi-K3's experts work in a space of their own size.
        name="kimi_linear",
        model_types=("kimi_linear",),
        modules=under_layers("block_sparse_moe.experts"),
        projections=W1_W3_W2,
        hidden_size_keys=("routed_expert_hidden_size", "hidden_size"),
        top_k_keys=("num_experts_per_token", "num_experts_per_tok"),
    ),
    Family(
        # No hidden_act in the config: silu is fixed in the model's code.
        name="lfm2_moe",
        model_types=("lfm2_moe",),
        modules=under_layers("feed_forward.experts"),
        projections=W1_W3_W2,
    ),
    Family(
        name="jamba",
        model_types=("jamba",),
        modules=under_layers("feed_forward.experts"),
        intermediate_size_keys=PLAIN_SIZE,
    ),
    Family(
        # With moe_latent_size the experts work in a latent space: its size is their K and the down projection's N.
        # Puzzle models have experts of other numbers and sizes in each layer.
        name="nemotron_h",
        model_types=("nemotron_h", "nemotron_h_omni", "nemo_speechlm", "nemotron_h_puzzle"),
        architectures=("NemotronHPuzzleForCausalLM",),
        layer_configs_key="block_configs",
        modules=under_layers(
            "mixer.experts", "backbone.layers.{layer}", "language_model.backbone.layers.{layer}"
        ),
        projections=UP_DOWN,
        stacks=(Stack("up_proj", ("w3",)), Stack("down_proj", ("w2",))),
        activation="relu2",
        num_experts_keys=("n_routed_experts",),
        hidden_size_keys=("moe_latent_size", "hidden_size"),
        activation_keys=("mlp_hidden_act",),
    ),
    Family(
        # transformers 4 saved [E, in, out]; version 5 reads both by shape and saves [E, out, in].
        name="qwen3_vl_moe",
        model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
        stacks=fused_stacks("gate_up_proj", "down_proj", transposed=None),
    ),
    Family(
        # Here the router's weights scale the experts' inputs, not their outputs (Llama4TextMoe).
        name="llama4",
        model_types=("llama4", "llama4_text"),
        modules=under_layers("feed_forward.experts"),
        stacks=FUSED_TRANSPOSED,
        num_experts_keys=("num_local_experts",),
        intermediate_size_keys=PLAIN_SIZE,
    ),
    Family(
        # Transposed as floats only: the released blocks and scales are [E, out, …]. hidden_act says silu, the
        # activation is fixed in the model's code. Quark gives each expert its share, turned, with its rows as they
        # were (its replace_gptoss_experts_with_linear; vLLM's _load_weights_quark cuts pairs of rows).
        name="gpt_oss",
        pads_last_rank=True,
        model_types=("gpt_oss",),
        stacks=fused_stacks("gate_up_proj", "down_proj", transposed=True, interleaved=True),
        expert_stacks=(Stack("gate_up_proj", ("w1", "w3"), interleaved=True),),
        activation="swigluoai",
        num_experts_keys=LOCAL_EXPERTS,
        top_k_keys=("num_experts_per_tok", "experts_per_token"),
        intermediate_size_keys=PLAIN_SIZE,
        activation_keys=OWN_ACTIVATION,
    ),
    Family(
        # A gpt_oss whose gate and up are one after the other.
        name="openai_privacy_filter",
        model_types=("openai_privacy_filter",),
        stacks=FUSED_TRANSPOSED,
        activation="swigluoai",
        num_experts_keys=LOCAL_EXPERTS,
        intermediate_size_keys=PLAIN_SIZE,
        activation_keys=OWN_ACTIVATION,
    ),
    Family(
        name="granitemoe",
        model_types=("granitemoe", "granitemoeshared", "granitemoehybrid"),
        modules=under_layers("block_sparse_moe"),
        projections=W1_W3_W2,
        stacks=fused_stacks("input_linear", "output_linear"),
        more_stacks=FUSED,
        num_experts_keys=("num_local_experts",),
        intermediate_size_keys=PLAIN_SIZE,
    ),
    Family(
        name="granitemoe_swa",
        model_types=("granitemoe_swa",),
        modules=under_layers("block_sparse_moe.experts"),
        projections=W1_W3_W2,
        num_experts_keys=("num_local_experts",),
        intermediate_size_keys=PLAIN_SIZE,
    ),
    Family(
        name="gemma4",
        model_types=(
            "gemma4",
            "gemma4_text",
            "gemma4_unified",
            "diffusion_gemma",
            "diffusion_gemma_text",
        ),
        modules=under_layers(
            "experts", "model.decoder.layers.{layer}", "model.encoder.language_model.layers.{layer}"
        ),
        activation="gelu_pytorch_tanh",
        top_k_keys=("top_k_experts",),
        activation_keys=("hidden_activation",),
    ),
    Family(
        # Its sizes lie in ffn_config, the activation too, as {"name": …}.
        name="dbrx",
        model_types=("dbrx",),
        modules=("transformer.blocks.{layer}.ffn.experts.mlp", "blocks.{layer}.ffn.experts.mlp"),
        projections={"w1": "w1", "w3": "v1", "w2": "w2"},
        stacks=(
            Stack("w1", ("w1",), flat=True),
            Stack("v1", ("w3",), flat=True),
            Stack("w2", ("w2",), transposed=True, flat=True),
        ),
        num_experts_keys=("moe_num_experts",),
        top_k_keys=("moe_top_k",),
        hidden_size_keys=("d_model",),
        intermediate_size_keys=("ffn_hidden_size",),
        num_layers_keys=("n_layers",),
    ),
    Family(
        # An embedding model: one flat stack of every projection, no gate, and a bias of the weighted sum.
        name="nomic_bert",
        model_types=("nomic_bert",),
        modules=("encoder.layers.{layer}.mlp.experts.mlp",),
        projections={"w3": "w1", "w2": "w2"},
        stacks=(Stack("w1", ("w3",), flat=True), Stack("w2", ("w2",), transposed=True, flat=True)),
        activation="gelu",
        top_k_keys=("moe_top_k",),
        hidden_size_keys=("n_embd", "hidden_size"),
        intermediate_size_keys=("n_inner", "intermediate_size"),
        activation_keys=("activation_function",),
        num_layers_keys=("n_layer", "num_hidden_layers"),
    ),
    Family(
        # Some layers of Step-3.7 and Step-5 bound silu(gate) and up; a 0 in the list means no bound. vLLM's step5 takes
        # experts apart as well, in a module `experts`.
        name="step3",
        model_types=_names(
            "step3 step3_text step3_vl step3p5 step3p7 step3p7_vl step3p7_text step5 step5_vl"
        ),
        modules=(*under_layers("moe"), *under_layers("moe.experts")),
        stacks=(
            Stack("gate_proj", ("w1",)),
            Stack("up_proj", ("w3",)),
            Stack("down_proj", ("w2",)),
        ),
        more_stacks=FUSED,
        num_experts_keys=("moe_num_experts", "n_routed_experts", "num_local_experts"),
        top_k_keys=("moe_top_k", "num_experts_per_tok"),
    ),
    Family(
        name="aria",
        model_types=("aria", "aria_text"),
        more_stacks=FUSED_TRANSPOSED,
        stacks=fused_stacks("fc1", "fc2", transposed=True),
        num_experts_keys=("moe_num_experts",),
        top_k_keys=("moe_topk",),
        intermediate_size_keys=("moe_intermediate_size", "intermediate_size"),
        activation_keys=OWN_ACTIVATION,
    ),
    Family(
        name="inkling",
        model_types=("inkling_mm_model",),
        modules=("model.llm.layers.{layer}.mlp.experts",),
        projections=W1_W3_W2,
        stacks=fused_stacks("w13", "w2", interleaved=True),
        more_stacks=FUSED,
        num_experts_keys=ROUTED_EXPERTS,
    ),
    Family(
        # Soft caps on gate and up, with numbers from the config: an activation that hqconv does not know. Layers of
        # inkling2_loop run several times; their experts are in the files once.
        name="inkling2",
        model_types=("inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text"),
        modules=("model.llm.layers.{layer}.mlp.experts", "layers.{layer}.mlp.experts"),
        projections=W1_W3_W2,
        stacks=fused_stacks("w13", "w2", interleaved=True),
        more_stacks=FUSED,
        activation="softcapped_swiglu",
        num_experts_keys=ROUTED_EXPERTS,
        activation_keys=OWN_ACTIVATION,
    ),
    Family(
        # Gate first in `fc`; a draft layer lies in `mtp_layers` (vLLM's and sglang's iquest_q1.py). Dense layers have
        # dense_intermediate_size.
        name="iquest_q1",
        model_types=("iquest_q1",),
        modules=under_layers("mlp.experts", "mtp_layers.{layer}.mtp_model_layer"),
        stacks=fused_stacks("fc", "proj"),
        intermediate_size_keys=PLAIN_SIZE,
    ),
    Family(
        # Banks of experts, as many as num_blocks, each for several decoder layers: layer % num_blocks (sglang's
        # interns2_mobius.py). Here a bank is the layer.
        name="interns2_mobius",
        model_types=("interns2_mobius", "interns2_mobius_text"),
        modules=(
            "model.language_model.meta_mlp.{layer}.experts",
            "model.meta_mlp.{layer}.experts",
            "meta_mlp.{layer}.experts",
            "mtp.layers.{layer}.mlp.experts",
        ),
    ),
    Family(
        # gelu(gate) * (up + 1), gate first; layers before moe.start_layer have two-dimensional weights of the same
        # names. config.json nests its numbers as config.text.moe, or has none: then the defaults of the code are meant
        # (vLLM's moondream3.py and its config class, which has other keys than the model's own code).
        name="moondream3",
        model_types=("moondream3", "moondream3_text"),
        modules=("model.text.blocks.{layer}.mlp", "text.blocks.{layer}.mlp", "blocks.{layer}.mlp"),
        stacks=fused_stacks("fc1", "fc2"),
        activation="gelu",
        num_experts_keys=("num_experts", "n_experts"),
        top_k_keys=("experts_per_token", "n_experts_per_tok", "num_experts_per_tok"),
        hidden_size_keys=("dim",),
        intermediate_size_keys=("expert_inner_dim",),
        activation_keys=OWN_ACTIVATION,
        num_layers_keys=("n_layers",),
        config_keys=("config", "text", "moe"),
        defaults={"num_experts_per_tok": 8},
        is_unmarked=True,
    ),
)

# Every spelling of the number of experts per token, each read where a row's own is missing: none has another meaning.
TOP_K_KEYS = tuple(dict.fromkeys(key for family in FAMILIES for key in family.top_k_keys))
BY_ARCHITECTURE = {a: family for family in FAMILIES for a in family.architectures}
BY_NAME = {family.name: family for family in FAMILIES}
BY_MODEL_TYPE = {t: family for family in FAMILIES for t in family.model_types}

# Models with experts that no row can describe, and why: a fused Mixture-of-Experts kernel could not serve them.
UNSUPPORTED = {
    "doge": "its experts are rows of embeddings, not matrices",
    "dots3_note": "its vision tower has experts of its own",
    "ernie4_5_moe_vl": "text and vision tokens have experts of their own, of different sizes, in one module",
    "ernie4_5_vl_moe": "text and vision tokens have experts of their own, of different sizes, in one module",
    "ernie4_5_vl_moe_text": "text and vision tokens have experts of their own, of different sizes, in one module",
    "hunyuan_image_3_moe": "gate and up of an expert are one tensor, in an order that only its own code says",
    "jetmoe": "its attention is a mixture of experts too, in modules of the same names",
    "muse_spark": "a norm lies between an expert's down projection and the weighted sum",
    "muse_spark_text": "a norm lies between an expert's down projection and the weighted sum",
    "nllb-moe": "it is an encoder and a decoder, whose experts have biases and an activation without a gate",
    "switch_transformers": "it is an encoder and a decoder, which route each token to one expert of limited capacity",
    "vitpose_backbone": "an expert is a single matrix",
}
