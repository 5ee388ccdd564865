"""A plain Mixture-of-Experts layer in high precision: reference for the kernel. Shares no code with conversion.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from hqconv.schemas.activation import Activation

Step = Callable[[torch.Tensor], torch.Tensor]
Expert = Mapping[str, torch.Tensor]  # w1 (if gated), w3 [I, H], w2 [H, I]; biases b1, b3 [I], b2 [H]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


_ELEMENTWISE: dict[str, Step] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu2,
}
_Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ACTIVATIONS = (*_ELEMENTWISE, "swigluoai", "situ")


def activate(activation: Activation, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """Apply the experts' activation to w13's output; without a gate it acts on `up` alone. KeyError if unknown.

    One of `ACTIVATIONS`, or one that acts elementwise with a number: `<name>_clamp`, `<name>_bound`, `<name>_shift`.
    """
    if gate is not None:
        return _gated(activation)(gate, up)
    return _ELEMENTWISE[activation.name](up)


def _gated(activation: Activation) -> _Gate:
    """Function of gate and up for a gated activation. KeyError if it is not known, or lacks a number."""
    name, limit = activation.name, activation.limit
    function, _, kind = name.rpartition("_")
    alpha, beta = activation.alpha, activation.beta
    if name == "swigluoai" and limit is not None and alpha is not None and beta is not None:
        return partial(_swigluoai, limit, alpha, beta)
    if name == "situ" and beta is not None:
        return partial(_situ, beta, activation.linear_beta)
    if kind == "clamp" and limit is not None:
        return partial(_clamped, _ELEMENTWISE[function], limit)
    if kind == "bound" and limit is not None:
        return partial(_bound, _ELEMENTWISE[function], limit)
    if kind == "shift" and beta is not None:
        return partial(_shifted, _ELEMENTWISE[function], beta)
    return partial(_product, _ELEMENTWISE[name])


def _product(function: Step, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return function(gate) * up


def _clamped(function: Step, limit: float, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gated activation with a clamp, as in transformers: modeling_deepseek_v4.py (_apply_gate)."""
    return function(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _bound(function: Step, limit: float, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gated activation with a bound, as in transformers: modeling_step3p7.py (_apply_gate)."""
    return function(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _shifted(function: Step, beta: float, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gated activation with a number added to up, as in vLLM: moondream3.py (Moondream3TextMoE.forward)."""
    return function(gate) * (up + beta)


def _swigluoai(limit: float, alpha: float, beta: float, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU of https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py, its constants as parameters."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _situ(beta: float, linear_beta: float | None, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiTU and multiply, as in vLLM 0.33: layers/activation.py (SituAndMul.forward_native)."""
    wide = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * wide


def is_known(activation: Activation, gated: bool = True) -> bool:
    """Return whether `activate` computes the activation."""
    try:
        return bool(_gated(activation) if gated else _ELEMENTWISE[activation.name])
    except KeyError:
        return False


@dataclass(frozen=True)
class Routing:
    """Chosen experts int64 [T, k] and their weights float32 [T, k]."""

    ids: torch.Tensor
    weights: torch.Tensor


def route(logits: torch.Tensor, top_k: int, config: Mapping[str, Any], bias: torch.Tensor | None = None) -> Routing:
    """Choose experts from router logits float32 [T, E] as the config's model does.

    A correction bias means DeepSeek-V3's rule (sigmoid scores, choice by biased scores within the best groups);
    otherwise softmax, normalised over the chosen ones with `norm_topk_prob` (Mixtral: always).
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

    Replaced are last choices, of experts that have other routes; weights stay at their positions.
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


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True)
class Roundings:
    """Roundings of a kernel between its steps: w13's input [t, H], its output [t, I], w2's input [t, I]."""

    inputs: Step = _as_it_is
    wide: Step = _as_it_is
    hidden: Step = _as_it_is


EXACT = Roundings()


def expert_forward(
    expert: Expert, x: torch.Tensor, activation: Activation, roundings: Roundings = EXACT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one expert on its tokens [t, H]: activated intermediate [t, I] and output [t, H], in x's dtype."""

    def project(name: str, inputs: torch.Tensor) -> torch.Tensor:
        bias = expert.get("b" + name[1:])
        return F.linear(inputs, expert[name].to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))

    rounded = roundings.inputs(x)
    gate = roundings.wide(project("w1", rounded)) if "w1" in expert else None
    hidden = roundings.hidden(activate(activation, gate, roundings.wide(project("w3", rounded))))
    return hidden, project("w2", hidden)


def moe_forward(
    x: torch.Tensor, routing: Routing, experts: Callable[[int], Expert], activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a whole MoE layer (without shared experts) on tokens [T, H], in x's dtype.

    `experts(e)` returns one expert's weights; it is called once for each expert that has tokens. Returns the
    layer's output [T, H] and every route's activated intermediate [T * k, I].
    """
    return moe_forwards(x, routing, experts, activation, (EXACT,))[0]


def moe_forwards(
    x: torch.Tensor,
    routing: Routing,
    experts: Callable[[int], Expert],
    activation: Activation,
    roundings: Sequence[Roundings],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run `moe_forward` for each of `roundings`; each expert is read once."""
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
