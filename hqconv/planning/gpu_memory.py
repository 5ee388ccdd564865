"""GPU memory that the weights of an artifact take on each GPU of a server.

Experts are counted as in the rank files. Of the other tensors, embeddings and the matrices of attention and MLP are cut
for the tensor parallel ranks of attention, as vLLM's parallel layers cut them. Everything else is counted whole: norms,
routers, latent projections of MLA, vision and audio towers, and every name that is not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hqconv.kernel_layout.compatibility import gemm_bytes
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.output_units import gemm_shapes
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import KernelSpec
from hqconv.schemas.model_config import AttentionHeads
from hqconv.schemas.tensors import TensorRef

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
            shapes = gemm_shapes(layer, tp, kernel_spec.schema).values()
            of_expert[key] = sum(gemm_bytes(n, k, kernel_spec, has_bias=layer.has_bias) for n, k in shapes)
        total += of_expert[key] * layer.num_experts
    return total
