"""GPU memory that the weights of an artifact take on each GPU of a server, and what they leave for the KV cache.

Experts are counted as in the rank files. Of the other tensors, embeddings and the matrices of attention and MLP are cut
for the tensor parallel ranks of attention, as vLLM's parallel layers cut them. Everything else is counted whole: norms,
routers, latent projections of MLA, vision and audio towers, and every name that is not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hqconv.kernel_layout.gemm_forms import planned_kernel_form
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.output_units import gemm_shapes
from hqconv.schemas.gpu_target import GPUS
from hqconv.schemas.grid import Grid
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.model_config import AttentionHeads, Config, attention_heads, text_config
from hqconv.schemas.tensors import TensorRef
from hqconv.serving.chosen_engine import ENGINE

# Modules that vLLM builds as column, row or vocabulary parallel layers: the last part of a module's name.
_KV = ("k_proj", "v_proj")
_CUT = (
    *("q_proj", *_KV, "qkv_proj", "query_key_value", "o_proj", "q_b_proj", "kv_b_proj", "wq_b", "wo_b"),
    *("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "out_proj"),
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"),
    *("embed_tokens", "embed", "wte", "word_embeddings", "lm_head", "head"),
)
_TOWERS = ("vision", "visual", "audio")


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of weights on the GPU of the largest rank: its experts, and its part of the other tensors."""

    experts: int
    other_tensors: int

    @property
    def total(self) -> int:
        """Bytes of all weights of the rank."""
        return self.experts + self.other_tensors

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by name, with the total."""
        return {"experts": self.experts, "other_tensors": self.other_tensors, "total": self.total}

    def too_small(self, sm_version: int) -> list[str]:
        """Return the GPUs of an architecture whose whole memory is less than the weights, the smallest first."""
        models = sorted((gpu.memory_gb, name) for name, gpu in GPUS.items() if gpu.sm_version == sm_version)
        return [name for memory_gb, name in models if memory_gb * 10**9 < self.total]


@dataclass(frozen=True)
class Fit:
    """Weights that fit on `num_gpus` GPUs of one model. cache: bytes that each has left for the KV cache, at most.

    cache_tokens: tokens that fit in there; None where the size of a token is not known.
    """

    schema: str
    gpu: str
    num_gpus: int
    weights: int
    cache: int
    cache_tokens: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


_LEAST_CACHE = 0.05  # of a GPU's memory: with less, activations leave no room for a server to start


def fit(schema: str, gpu: str, num_gpus: int, weights: int, token_bytes: int | None) -> Fit | None:
    """Return how weights fit on a GPU of `GPUS`, of which the engine takes its usual share; None if they do not.

    weights, token_bytes: of the largest rank.
    """
    memory = GPUS[gpu].memory_gb * 10**9
    cache = int(memory * ENGINE.memory_share) - weights
    if cache < memory * _LEAST_CACHE:
        return None
    return Fit(schema, gpu, num_gpus, weights, cache, None if token_bytes is None else cache // max(token_bytes, 1))


_CACHE_BYTES = 2  # of a number: the cache has 16 bits by default
_INDEX_GROUP, _INDEX_SCALE_BYTES = 128, 4  # of the fp8 keys of sparse attention's indexer
# Layers whose caches differ in ways that are not known here.
_UNKNOWN_CACHES = (
    *("compress_ratios", "hybrid_override_pattern", "hybrid_layer_pattern", "layers_block_type", "block_configs"),
    *("attn_layer_period", "linear_attn_config", "swa_head_dim", "attn_type_list", "attention_types"),
)
_WITH_CACHE = ("full_attention", "sliding_attention", "attention", "chunked_attention", "deepseek_sparse_attention")
_STATE_ONLY = ("linear_attention", "mamba", "conv", "moe", "mlp")


def token_bytes(config: Config, tp: int) -> int | None:
    """Return the KV cache's bytes of a token on each of `tp` tensor parallel ranks, in 16 bits; None if not known.

    Layers with a window are counted whole, so that long texts take less; states of fixed size and layers for
    multi-token prediction are not counted. vLLM's `AttentionSpec`, `MLAAttentionSpec` and `DeepseekV32IndexerCache`.
    """
    text = text_config(config)
    num_layers = _num_cached_layers(text)
    if num_layers is None or any(text.get(key) is not None for key in _UNKNOWN_CACHES):
        return None
    latent, rope = _whole(text, "kv_lora_rank"), _whole(text, "qk_rope_head_dim")
    if latent is not None:  # every rank has it whole
        if rope is None:
            return None
        index = _whole(text, "index_head_dim") or 0
        of_index = index + index // _INDEX_GROUP * _INDEX_SCALE_BYTES
        return num_layers * ((latent + rope) * _CACHE_BYTES + of_index)
    heads = attention_heads(config)
    num_kv_heads = heads.num_kv_heads or heads.num_heads
    hidden = next(filter(None, (_whole(text, key) for key in ("hidden_size", "d_model"))), None)
    size = _whole(text, "head_dim") or (hidden // heads.num_heads if hidden and heads.num_heads else None)
    if num_kv_heads is None or size is None or text.get("index_head_dim") is not None:
        return None
    widest = max(size, _whole(text, "v_head_dim") or 0)
    return num_layers * 2 * widest * -(-num_kv_heads // tp) * _CACHE_BYTES


def _num_cached_layers(text: Config) -> int | None:
    """Return the number of layers with a KV cache."""
    count = next(filter(None, (_whole(text, key) for key in ("num_hidden_layers", "n_layers", "n_layer"))), None)
    types, interval = text.get("layer_types"), _whole(text, "full_attention_interval")
    if isinstance(types, list) and types:
        is_known = len(types) == count and all(one in (*_WITH_CACHE, *_STATE_ONLY) for one in types)
        return sum(one in _WITH_CACHE for one in types) if is_known else None
    return count if count is None or interval is None else count // interval


def _whole(text: Config, key: str) -> int | None:
    value = text.get(key)
    return value if type(value) is int and value > 0 else None


def other_bytes(
    tensors: Mapping[str, TensorRef], copied: Iterable[str], left: Collection[str], grid: Grid, heads: AttentionHeads
) -> int | None:
    """Return the bytes of the copied tensors on each GPU; None for a grid that the engine cannot start.

    left: MoE layers whose experts are copied; they are dealt to all ranks.
    """
    tp = ENGINE.attention_tp(grid)
    if tp is None:
        return None
    if tp == 1:
        return sum(tensors[name].num_bytes for name in copied)
    prefixes = tuple(f"{layer}." for layer in left)
    total = 0
    for name in copied:
        ref = tensors[name]
        total += -(-ref.num_bytes // (tp if name.startswith(prefixes) else _parts(ref, tp, heads)))
    return total


def _parts(ref: TensorRef, tp: int, heads: AttentionHeads) -> int:
    """Return the number of parts into which `tp` ranks cut a tensor; 1 for a tensor that every rank has whole."""
    if len(ref.shape) < 2:
        return 1
    path = ref.name.split(".")
    if any(tower in part for part in path for tower in _TOWERS):
        return 1
    module = next((part for part in reversed(path[-3:]) if part in _CUT), None)
    if module is None:
        return 1
    is_replicated = module in _KV and heads.num_kv_heads is not None
    return min(tp, heads.num_kv_heads or tp) if is_replicated else tp


def expert_bytes(layers: Iterable[MoeLayer], kernel_spec: KernelSpec, tp: int) -> int:
    """Return the bytes of all experts on each of `tp` tensor parallel ranks, all layers with one kernel spec."""
    of_expert: dict[tuple[int, int, bool, bool], int] = {}
    total = 0
    for layer in layers:
        key = (layer.hidden_size, layer.intermediate_size, layer.gated, layer.has_bias)
        if key not in of_expert:
            forms = (
                planned_kernel_form(n, k, kernel_spec, layer.has_bias)
                for n, k in gemm_shapes(layer, tp, kernel_spec.schema).values()
            )
            of_expert[key] = sum(spec.num_bytes for form in forms for spec in form.tensors.values())
        total += of_expert[key] * layer.num_experts
    return total
