"""The published tensors and config of a model in GGUF files, worked out from its metadata and stored bytes.

An independent reference: it shares nothing with `sources`, which gives an artifact the same tensors. Names are those of
gguf's own map; what llama.cpp's converter changes is known from its conversion/*.py (`permute`, `modify_tensors`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hqconv.io.gguf_header import StoredModel, library
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_CHUNK_NUMBERS = 1 << 22  # decoded at a time
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_HALVES = {  # module that llama.cpp splits → modules of a layer
    "self_attn.kv_b_proj": ("attn_k_b", "attn_v_b"),  # [heads, rank, size] and [heads, size, rank]
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
}
_PERMUTED = ("llama", "granitemoe")  # architectures whose rows of q and k llama.cpp puts into pairs
_FLOAT32 = {"minimax-m2": "block_sparse_moe.gate.weight", "ernie4_5-moe": "mlp.gate.weight"}
_LEFT_OUT = re.compile(
    r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight|blk\.\d+\.attn_[kv]_b\.weight"
)
_ONE_ROW = (
    "mlp.shared_expert_gate.weight",
    "mlp.moe_statics.e_score_correction_bias",
)  # some files have vectors
# Key of a config → key of the metadata, without the architecture.
_CONFIG = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), "expert_count"
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), "expert_used_count"),
    "moe_intermediate_size": "expert_feed_forward_length",
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), "expert_shared_count"),
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "rotary_dim": "rope.dimension_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "norm_topk_prob": "expert_weights_norm",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_FIXED: dict[
    str, dict[str, Any]
] = {  # what llama.cpp computes for an architecture, whatever the metadata (src/models)
    "qwen2moe": {"model_type": "qwen2_moe", "norm_topk_prob": False},
    "qwen3moe": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "llama": {"model_type": "mixtral"},
    "gpt-oss": {"model_type": "gpt_oss", "swiglu_limit": 7.0, "attention_bias": True},
    "glm4moe": {"model_type": "glm4_moe"},
    "dots1": {"model_type": "dots1"},
    "olmoe": {"model_type": "olmoe", "norm_topk_prob": False},
    "minimax-m2": {"model_type": "minimax_m2", "scoring_func": "sigmoid", "use_qk_norm": True},
    "ernie4_5-moe": {"model_type": "ernie4_5_moe", "use_bias": False},
}
_NOT_OF_MLA = {"num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}
_INNER_OF_EXPERTS = (
    "gpt-oss",
    "minimax-m2",
)  # whose config calls the experts' size intermediate_size
_EXPERTS = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}


class PublishedModel:
    """The tensors beside the experts, by their published names."""

    def __init__(self, stored: StoredModel, config: Mapping[str, Any]) -> None:
        """config: config.json, for the parameters' dtype."""
        self.stored, self.architecture = stored, str(stored.metadata["general.architecture"])
        gguf = library()
        number = next(
            key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture
        )
        self._names = gguf.get_tensor_name_map(number, self._number("block_count"))
        self._param = (
            "F16" if "float16" in (config.get("torch_dtype"), config.get("dtype")) else "BF16"
        )

    def _number(self, key: str) -> Any:
        return self.stored.metadata[f"{self.architecture}.{key}"]

    def parts(self, name: str) -> tuple[TensorRef, ...]:
        """Return the stored tensors that hold a published tensor's values; () for none."""
        tensors, match = self.stored.tensors, _LAYER.fullmatch(name)
        key = re.sub(r"\.e_score_correction_bias$", ".e_score_correction.bias", name)
        key = f"{key}.weight" if key.endswith(".sinks") else key
        found = self._names.get_name(key, try_suffixes=(".weight", ".bias"))
        halves = (
            []
            if match is None
            else [f"blk.{match[1]}.{half}.weight" for half in _HALVES.get(match[2], ())]
        )
        if found in tensors:
            return (tensors[found],)
        return (
            tuple(tensors[half] for half in halves)
            if halves and tensors.keys() >= set(halves)
            else ()
        )

    def form(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return a published tensor's dtype and shape."""
        parts = self.parts(name)
        kinds, shape = {part.dtype for part in parts}, parts[0].shape
        if len(parts) == 2:
            rows = sum(math.prod(part.shape) for part in parts) // self._row(parts)
            shape = (rows, self._row(parts))
        elif name.endswith(_ONE_ROW):
            shape = (1, shape[-1])
        if name.endswith(("e_score_correction_bias", _FLOAT32.get(self.architecture, "\0"))):
            return "F32", shape
        return (kinds.pop() if kinds in ({"F16"}, {"BF16"}) else self._param), shape

    def _row(self, parts: tuple[TensorRef, ...]) -> int:
        return parts[1].shape[-1]

    def values(self, name: str) -> Iterator[Array]:
        """Yield a published tensor's values, float32, a few rows at a time. Raises the errors of reading."""
        parts, module = self.parts(name), name.rpartition(".")[0].rpartition(".")[2]
        if len(parts) == 2 and len(parts[0].shape) == 3:
            (heads, rank, size), (_, more, _) = (part.shape for part in parts)
            for head in range(heads):
                keys = self._decoded(parts[0], head * rank, (head + 1) * rank)
                yield np.stack([keys[:, row] for row in range(size)])
                yield self._decoded(parts[1], head * more, (head + 1) * more)
        elif self.architecture in _PERMUTED and module in ("q_proj", "k_proj"):
            heads = self._number(
                "attention.head_count" if module == "q_proj" else "attention.head_count_kv"
            )
            width = math.prod(parts[0].shape[1:])
            stored = self._decoded(parts[0], 0, self._num_rows(parts[0])).reshape(heads, -1, width)
            half = stored.shape[1] // 2
            for one in stored:  # row i of a half is the first of a pair, or the second
                yield one[[2 * (row % half) + row // half for row in range(2 * half)]]
        else:
            for part in parts:
                rows, step = self._num_rows(part), max(1, _CHUNK_NUMBERS // part.shape[-1])
                for begin in range(0, rows, step):
                    yield self._decoded(part, begin, min(begin + step, rows))

    def _num_rows(self, part: TensorRef) -> int:
        return math.prod(part.shape[:-1])

    def _decoded(self, part: TensorRef, begin: int, end: int) -> Array:
        """Decode rows of a stored tensor to float32 [rows, columns]."""
        gguf, row_bytes = library(), part.num_bytes // self._num_rows(part)
        raw = np.empty((end - begin, row_bytes), np.uint8)
        self.stored.read(part, raw.data, begin * row_bytes)
        floats: Array = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[part.dtype])
        return floats

    def may_be_left_out(self, name: str) -> bool:
        """Return whether no published tensor has the values of a stored one, or another stored one has them, too."""
        layer = name.rpartition(".attn_")[0]
        is_twice = layer == "" or f"{layer}.attn_kv_b.weight" in self.stored.tensors
        return _LEFT_OUT.fullmatch(name) is not None and is_twice

    def config(self) -> dict[str, Any]:
        """Return entries that a config.json made from the metadata has, where its family has these keys at all."""
        metadata, own = (
            self.stored.metadata,
            {**_CONFIG, **({} if self.architecture == "deepseek2" else _NOT_OF_MLA)},
        )
        own["intermediate_size"] = (
            f"{'expert_' * (self.architecture in _INNER_OF_EXPERTS)}feed_forward_length"
        )
        entries = {key: metadata.get(f"{self.architecture}.{name}") for key, name in own.items()}
        entries |= {
            f"{word}_token_id": metadata.get(f"tokenizer.ggml.{word}_token_id")
            for word in ("bos", "eos")
        }
        drafts = metadata.get(f"{self.architecture}.nextn_predict_layers", 0)
        entries["num_hidden_layers"] = self._number("block_count") - drafts
        entries["vocab_size"] = self.stored.tensors["token_embd.weight"].shape[0]
        entries["tie_word_embeddings"] = "output.weight" not in self.stored.tensors
        if metadata.get(f"{self.architecture}.rope.scaling.type", "none") != "none":
            entries["rope_scaling.factor"] = self._number("rope.scaling.factor")
        entries |= {"hidden_act": "silu", **_FIXED.get(self.architecture, {})}
        return {
            key: value
            for key, value in entries.items()
            if value is not None and not isinstance(value, list)
        }


def is_role(role: str, tensor: str, index: int) -> bool:
    """Return whether a role's matrices are a GGUF tensor's: entry `index` of gate and up, in one tensor."""
    stem = tensor.rpartition(":")[2].split(".")[2]
    return stem == f"{_EXPERTS[role]}_exps" or (
        stem == "ffn_gate_up_exps" and role == ("w1", "w3")[index]
    )


class StoredTokenizer:
    """The tokenizer in a GGUF file: its words by id, merges and chat template."""

    def __init__(self, path: Path) -> None:
        fields = library().GGUFReader(path).fields
        self.words, self.merges, self.template = (
            fields[f"tokenizer.{key}"].contents() if f"tokenizer.{key}" in fields else None
            for key in ("ggml.tokens", "ggml.merges", "chat_template")
        )
