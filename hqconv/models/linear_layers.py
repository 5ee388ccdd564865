"""Linear layers beside the experts: the matrices that a server runs as linear layers, and those that it fuses.

`FUSED` and `ALONE` have the names of vLLM 0.33, `READ_IN` the files of its model classes that were read for them.
Everything else stays as it is: routers, norms, embeddings, convolutions, `kv_b_proj` (which vLLM decodes at the start),
indexers, and the towers of other modalities.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hqconv.formats.source_format import PLAIN
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer, PerExpertIndex, TensorSlice
from hqconv.models.tensor_names import decoder_stack
from hqconv.schemas.activation import Activation
from hqconv.schemas.tensors import FLOATS, TensorRef

# vLLM's linear layer → the matrices of a checkpoint that it holds, from the first row on.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
}
# Columns of these are dealt to tensor parallel ranks; every rank has these whole; of all others rows are dealt.
BY_COLUMNS = ("o_proj", "down_proj", "out_proj")
WHOLE = ("fused_qkv_a_proj", "kv_a_proj_with_mqa")
ALONE = (*BY_COLUMNS, "q_proj", "q_b_proj", "kv_a_proj_with_mqa", "up_proj", "in_proj_qkvz")
# Model types, and the file of vllm/model_executor/models that decides.
READ_IN = {
    "qwen2_moe": "qwen2_moe.py",
    "qwen3_moe": "qwen3_moe.py",
    "qwen3_next": "qwen3_next.py",
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "qwen3_5.py"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), "qwen3_vl_moe.py"),
    "glm4_moe": "glm4_moe.py",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), "deepseek_v2.py"),
    "ernie4_5_moe": "ernie45_moe.py",
    "gpt_oss": "gpt_oss.py",
    "minimax_m2": "minimax_m2.py",
    "mixtral": "mixtral.py",
    "olmoe": "olmoe.py",
}
_LINEAR = {*FUSED, *ALONE, *(name for names in FUSED.values() for name in names)}
_OTHER_LINEAR = re.compile(r"(?:^|_)(?:proj|linear|dense)(?:_|$)|^w[qkvo]$")


@dataclass(frozen=True)
class LinearGroup(MoeLayer):
    """Matrices that one linear layer of a server holds, as the projections of a single expert.

    The name is that of the server's layer in the source's module, roles are the names of the source's modules in it.
    """

    is_linear = True
    knows_activation = True  # there is none
    has_bias = False  # biases are copied

    @property
    def roles(self) -> tuple[str, ...]:
        """The modules' names, from the first row on."""
        return tuple(self.slices)

    @property
    def coupled_roles(self) -> tuple[tuple[str, ...], ...]:
        """All roles: they share their tensor-level scale."""
        return (self.roles,)

    def shape(self, role: str) -> tuple[int, int]:
        """Return [out, in] of a module's weight."""
        rows, columns = self.slices[role]["weight"].shape
        return rows, columns

    def rank_shape(self, tp: int, num_kv_heads: int | None) -> tuple[int, int]:
        """Return [out, in] of the server's layer on a tensor parallel rank, whose keys and values are whole heads."""
        rows = self.intermediate_size
        columns = self.hidden_size
        name = self.name.rpartition(".")[2]
        if name in BY_COLUMNS:
            return rows, columns // tp
        if name in WHOLE:
            return rows, columns
        if name == "qkv_proj":
            num_query_rows = self.shape("q_proj")[0]
            num_parts = min(tp, num_kv_heads or tp)
            return num_query_rows // tp + (rows - num_query_rows) // num_parts, columns
        return rows // tp, columns

    def module(self, expert: int, role: str) -> str:
        """Return the path of a module in the source."""
        return self.slices[role]["weight"].template.removesuffix(".weight")

    def tensor_names(self) -> list[str]:
        """List the source tensors of the group."""
        return [parts["weight"].template for parts in self.slices.values()]


def is_linear_group(name: str) -> bool:
    """Return whether a layer's name is a linear group's."""
    return name.rpartition(".")[2] in _LINEAR


def linear_groups(
    experts: ExpertMap, tensors: Mapping[str, TensorRef]
) -> tuple[list[LinearGroup], list[str]]:
    """Return the linear groups of the decoder and its drafts, and the weights that stay although they may be linear.

    These have unknown names, or the source's config counts them among its quantized ones. Weights that the source has
    quantized are in neither list, nor is a matrix alone whose server's layer has quantized ones.
    """
    stacks = {decoder_stack(layer.name) for layer in experts.layers}
    stacks |= {decoder_stack(name) for name in experts.left}
    modules: dict[str, dict[str, TensorRef]] = {}  # parent → name → weight
    coded: dict[str, set[str]] = {}  # parent → names of quantized modules
    unknown = []
    scaled = {name.rpartition(".")[0] for name in experts.copied if ".weight_scale" in name}
    for name in experts.copied:
        ref = tensors[name]
        module, _, part = name.rpartition(".")
        parent, _, own_name = module.rpartition(".")
        is_matrix = "weight" in part and len(ref.shape) == 2
        is_plain = part == "weight" and ref.dtype in FLOATS and module not in scaled
        if not is_matrix or decoder_stack(name) not in stacks:
            continue
        if not is_plain:
            coded.setdefault(parent, set()).add(own_name)
        elif own_name in _LINEAR and "indexer" not in parent:
            if experts.declared.of(module, is_stored_plain=True).is_float:
                modules.setdefault(parent, {})[own_name] = ref
            else:
                unknown.append(name)
        elif own_name != "kv_b_proj" and _OTHER_LINEAR.search(own_name):
            unknown.append(name)
    groups = []
    for parent, weights in modules.items():
        for group_name, names in _grouped(weights, coded.get(parent, set())):
            refs = [weights[name] for name in names]
            if group_name and len({(ref.dtype, ref.shape[1]) for ref in refs}) == 1:
                groups.append(linear_group(f"{parent}.{group_name}", experts.family, refs))
            else:
                unknown += [ref.name for ref in refs]
    return groups, unknown


def _grouped(names: Iterable[str], coded: set[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the server's layer of the modules under one parent, and its modules; "" for those that fit none.

    coded: the quantized modules under the same parent.
    """
    left = dict.fromkeys(names)
    for fused, members in FUSED.items():
        present = tuple(name for name in members if name in left)
        if present == members:
            yield fused, members
        elif len(present) == 1 and present[0] in ALONE and coded.isdisjoint(members):
            yield present[0], present
        elif present:
            yield "", present
        for name in present:
            del left[name]
    for name in left:
        yield name if name in ALONE else "", (name,)


def linear_group(name: str, family: str, refs: list[TensorRef]) -> LinearGroup:
    """Return the group of a server's layer. refs: the weights of its modules, from the first row on."""
    by_role = {ref.name.split(".")[-2]: ref for ref in refs}
    number = re.search(r"\.(\d+)\.", f".{name}")
    return LinearGroup(
        name=name,
        family=family,
        index=int(number[1]) if number else 0,
        num_experts=1,
        hidden_size=refs[0].shape[1],
        intermediate_size=sum(ref.shape[0] for ref in refs),
        gated=False,
        activation=Activation("none"),
        top_k=1,
        dtype=refs[0].dtype,
        pads_last_rank=False,
        format=PLAIN,
        projection_names={role: role for role in by_role},
        slices={
            role: {"weight": TensorSlice(ref.name, ref.dtype, ref.shape)}
            for role, ref in by_role.items()
        },
        sources=PerExpertIndex({role: {"weight": (ref,)} for role, ref in by_role.items()}),
    )
