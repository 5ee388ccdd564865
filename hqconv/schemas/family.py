"""What a row of the families table is, how its templates are made, and where a config keeps a model's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Where decoder layers live: alone, inside a multimodal wrapper (before and since transformers 5), saved
# without a head, and in multi-token-prediction modules that are not numbered on after the last layer.
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
)


# One spelling per number, so that no two names mean the same expert.
INDEX = r"(?:0|[1-9][0-9]{0,8})"


@dataclass(frozen=True)
class Stack:
    """One tensor with the same projections of all experts of a block: `<block>.<name>` and a part's suffix.

    `roles` are the projections it holds along N, in this order, each `[I, H]` (w2: `[H, I]`); `interleaved` means
    that their rows alternate. The shape is `[E, out, in]`, or `[E, in, out]` where `transposed`; None leaves the
    orientation to the shapes of the block's stacks, which must allow exactly one. `flat` merges the first two
    dimensions. Packed parts (`blocks`, `scales`) and biases are never transposed.
    """

    name: str
    roles: tuple[str, ...]
    transposed: bool | None = False
    interleaved: bool = False
    flat: bool = False


@dataclass(frozen=True)
class Family:
    """One vocabulary: `<block>.<expert>.<projection>` is the module of one expert's matrix, its parts follow.

    `blocks` are anchored templates of the experts module's path, with `{layer}` for the layer index.
    `projections` maps the role (w1 gate, w3 up, w2 down) to its name; `stacks` are the fused tensors that the
    family has instead, or may have instead; `expert_stacks` are those of a single expert. Each `*_keys` lists config
    keys, the first one present wins; a list value holds one number per layer. `activation` is what the family's
    code uses when the config does not say; where the config has its numbers, `schemas/activation` says.
    `architectures` are classes that choose the row where model_type does not; `layer_configs_key` is the config key
    of a list that has one layer's own values in each element; `other_models` are prefixes of models of their own in
    the same checkpoint, with experts of which the config's numbers do not speak: they are copied.
    """

    name: str
    model_types: tuple[str, ...]
    blocks: tuple[str, ...] = ()
    projections: Mapping[str, str] = field(default_factory=dict, hash=False)
    stacks: tuple[Stack, ...] = ()
    expert_stacks: tuple[Stack, ...] = ()
    activation: str = "silu"
    num_experts_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",)
    hidden_size_keys: tuple[str, ...] = ("hidden_size",)
    intermediate_size_keys: tuple[str, ...] = ("moe_intermediate_size",)
    activation_keys: tuple[str, ...] = ("hidden_act",)
    num_layers_keys: tuple[str, ...] = ("num_hidden_layers",)
    pads_last_rank: bool = False  # where TP does not divide the experts, servers give the last rank less
    zero_experts_keys: tuple[str, ...] = ()  # routed to after the real experts, without weights of use
    architectures: tuple[str, ...] = ()
    layer_configs_key: str = ""
    other_models: tuple[str, ...] = ()

    @property
    def gated(self) -> bool:
        """Whether an expert has a gate next to its up projection."""
        return "w1" in self.projections

    def expert_stack(self, name: str, block: str) -> Stack | None:
        """The stack of an expert's own that a tensor of expert 0 of the block is, if it is one."""
        word = name.removeprefix(f"{block}.0.").partition(".")[0]
        return next((stack for stack in self.expert_stacks if stack.name == word), None)

    def example(self) -> str:
        """A tensor name of this family, for messages."""
        block = self.blocks[0].format(layer="N")
        return f"{block}.E.{next(iter(self.projections.values()))}.weight"


def under_layers(module: str, *more_prefixes: str) -> tuple[str, ...]:
    """The templates of a module of every decoder layer, usual places first."""
    return tuple(f"{prefix}.{module}" for prefix in (*LAYER_PREFIXES, *more_prefixes))


def fused_stacks(
    gate_up: str, down: str, transposed: bool | None = False, interleaved: bool = False
) -> tuple[Stack, ...]:
    """Gate and up in one stack, down in another."""
    return (
        Stack(gate_up, ("w1", "w3"), transposed, interleaved),
        Stack(down, ("w2",), transposed),
    )
