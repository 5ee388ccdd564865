"""A plain Mixture-of-Experts block in high precision: the judge of the kernel. Shares no code with conversion.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

Expert = Mapping[str, torch.Tensor]  # w1 (if gated), w3 [I, H], w2 [H, I]; biases b1, b3 [I], b2 [H]

# gpt_oss: https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py (swiglu)
_SWIGLU_LIMIT, _SWIGLU_ALPHA = 7.0, 1.702


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=_SWIGLU_LIMIT), up.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    return gate * torch.sigmoid(_SWIGLU_ALPHA * gate) * (up + 1)


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda gate, up: function(gate) * up


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


_ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu2,
}
ACTIVATIONS = (*_ELEMENTWISE, "swigluoai")
# silu_clamp10: gate and up are cut off at 10 first (DeepSeek-V4); silu_bound7: the activated gate and up at 7
# (Step-3.7). transformers: modeling_deepseek_v4.py, modeling_step3p7.py (_apply_gate).
_LIMITED = re.compile(r"(?P<function>\w+)_(?P<kind>clamp|bound)(?P<limit>\d+(?:\.\d+)?)")


def activate(name: str, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """The experts' activation of w13's output; without a gate it acts on `up` alone. KeyError if unknown.

    A name of `ACTIVATIONS`, or one that acts elementwise with a limit: `<name>_clamp<limit>`, `<name>_bound<limit>`.
    """
    if gate is not None and (limited := _LIMITED.fullmatch(name)):
        return _limited_gate(limited, gate, up)
    if name == "swigluoai":
        assert gate is not None
        return _clamped_swiglu(gate, up)
    function = _ELEMENTWISE[name]
    return function(up) if gate is None else _gated(function)(gate, up)


def _limited_gate(name: re.Match[str], gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    function, limit = _ELEMENTWISE[name["function"]], float(name["limit"])
    is_before = name["kind"] == "clamp"
    activated = function(gate.clamp(max=limit)) if is_before else function(gate).clamp(max=limit)
    return activated * up.clamp(-limit, limit)


def is_known(activation: str, gated: bool = True) -> bool:
    """Whether `activate` computes it."""
    limited = _LIMITED.fullmatch(activation)
    return activation in ACTIVATIONS if limited is None else gated and limited["function"] in _ELEMENTWISE


@dataclass(frozen=True)
class Routing:
    """Chosen experts int64 [T, k] and their weights float32 [T, k]."""

    ids: torch.Tensor
    weights: torch.Tensor


def route(
    logits: torch.Tensor, top_k: int, config: Mapping[str, Any], bias: torch.Tensor | None = None
) -> Routing:
    """Choose experts from router logits float32 [T, E] as the config's model does.

    A correction bias means DeepSeek-V3's rule (sigmoid scores, choice by biased scores within the best groups);
    otherwise softmax, normalised over the chosen ones where `norm_topk_prob` says so (Mixtral: always).
    """
    if bias is None:
        scores = logits.softmax(-1)
        weights, ids = scores.topk(top_k, dim=-1)
        normalise = config.get("norm_topk_prob", config.get("model_type") in ("mixtral", "minimax_m2"))
        return Routing(ids, weights / weights.sum(-1, keepdim=True) if normalise else weights)
    scores = logits.sigmoid()
    choice = scores + bias
    num_groups = int(config.get("n_group") or 1)
    if num_groups > 1:
        grouped = choice.view(choice.size(0), num_groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(int(config["topk_group"]), dim=-1).indices
        keep = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, best, True)
        choice = grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).view_as(choice)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if config.get("norm_topk_prob", True):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids, weights * float(config.get("routed_scaling_factor") or 1.0))


def cover_all_experts(routing: Routing, num_experts: int) -> Routing:
    """Send one more route to each expert that no token chose, as far as there are routes to spare.

    Last choices give way, of experts that have others; weights stay where they are.
    """
    ids = routing.ids.clone()
    counts = torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    missing = [e for e in range(num_experts) if counts[e] == 0]
    flat = ids.view(-1)
    for position in range(flat.numel() - 1, -1, -1):
        if not missing:
            break
        expert = int(flat[position])
        token = position // ids.size(1)
        if counts[expert] > 1 and missing[-1] not in ids[token].tolist():
            counts[expert] -= 1
            flat[position] = missing.pop()
    return Routing(ids, routing.weights)


Step = Callable[[torch.Tensor], torch.Tensor]


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True)
class Roundings:
    """What a kernel rounds between its steps: w13's input [t, H], its output [t, I], w2's input [t, I]."""

    inputs: Step = _as_it_is
    wide: Step = _as_it_is
    hidden: Step = _as_it_is


EXACT = Roundings()


def expert_forward(
    expert: Expert, x: torch.Tensor, activation: str, roundings: Roundings = EXACT
) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert on its tokens [t, H]: the activated intermediate [t, I] and the output [t, H], in x's dtype."""

    def project(name: str, inputs: torch.Tensor) -> torch.Tensor:
        bias = expert.get("b" + name[1:])
        return F.linear(
            inputs, expert[name].to(inputs.dtype), None if bias is None else bias.to(inputs.dtype)
        )

    rounded = roundings.inputs(x)
    gate = roundings.wide(project("w1", rounded)) if "w1" in expert else None
    hidden = roundings.hidden(activate(activation, gate, roundings.wide(project("w3", rounded))))
    return hidden, project("w2", hidden)


def moe_forward(
    x: torch.Tensor, routing: Routing, experts: Callable[[int], Expert], activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole MoE block (without shared experts) on tokens [T, H], in x's dtype.

    `experts(e)` gives one expert's weights; it is called once for each expert that has tokens. Returns the
    block's output [T, H] and every route's activated intermediate [T * k, I].
    """
    return moe_forwards(x, routing, experts, activation, (EXACT,))[0]


def moe_forwards(
    x: torch.Tensor,
    routing: Routing,
    experts: Callable[[int], Expert],
    activation: str,
    roundings: Sequence[Roundings],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`moe_forward` once for each of `roundings`; each expert is asked for once."""
    num_tokens, top_k = routing.ids.shape
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    flat = routing.ids.reshape(-1)
    weights = routing.weights.reshape(-1, 1).to(x.dtype)
    by_expert = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat).tolist()
    for expert, routes in enumerate(torch.split(by_expert, counts)):
        if not counts[expert]:
            continue
        tokens, parts = routes // top_k, experts(expert)
        for index, rounded in enumerate(roundings):
            inner, outer = expert_forward(parts, x[tokens], activation, rounded)
            if index == len(found):
                found.append((torch.zeros_like(x), x.new_zeros(num_tokens * top_k, inner.size(1))))
            out, hidden = found[index]
            hidden[routes] = inner
            out.index_add_(0, tokens, outer * weights[routes])
    return found
