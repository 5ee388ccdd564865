"""A plain Mixture-of-Experts layer in high precision, and the rounding of a kernel's activations: its reference.

Shares no code with conversion, and knows no Humming.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size, K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from hqconv.calibration.activations import Step, activate
from hqconv.schemas.activation import Activation

# w1 (if gated), w3 [I, H], w2 [H, I]; biases b1, b3 [I], b2 [H]
Expert = Mapping[str, torch.Tensor]


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
    otherwise softmax, normalised over the chosen ones with `norm_topk_prob` (Mixtral: always).
    """
    if bias is None:
        scores = logits.softmax(-1)
        weights, ids = scores.topk(top_k, dim=-1)
        normalise = config.get(
            "norm_topk_prob", config.get("model_type") in ("mixtral", "minimax_m2")
        )
        return Routing(ids, weights / weights.sum(-1, keepdim=True) if normalise else weights)
    scores = logits.sigmoid()
    choice = scores + bias
    num_groups = int(config.get("n_group") or 1)
    if num_groups > 1:
        grouped = choice.view(choice.size(0), num_groups, -1)
        best = (
            grouped.topk(2, dim=-1).values.sum(-1).topk(int(config["topk_group"]), dim=-1).indices
        )
        keep = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter(
            1, best, True
        )
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
    expert: Expert, x: torch.Tensor, activation: Activation, roundings: Roundings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one expert on its tokens [t, H]: activated intermediate [t, I] and output [t, H], in x's dtype."""

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
        tokens = routes // top_k
        parts = experts(expert)
        for index, rounded in enumerate(roundings):
            inner, outer = expert_forward(parts, x[tokens], activation, rounded)
            if index == len(found):
                found.append((torch.zeros_like(x), x.new_zeros(num_tokens * top_k, inner.size(1))))
            out, hidden = found[index]
            hidden[routes] = inner
            out.index_add_(0, tokens, outer * weights[routes])
    return found


# --- rounding of activations ---------------------------------------------------------------------------------

# Steps that decide a rounding are float32 operations, each rounded once, as a GPU does them without fast math; a
# number's nearest code is exact.

_TINY = 1e-30  # the least scale before it is rounded
# Floats: bits of the mantissa, the exponent of the smallest normal number, the largest number.
_FLOATS = {"float8e4m3": (3, -6, 448.0), "float8e5m2": (2, -14, 57344.0), "float4e2m1": (1, 0, 6.0)}
_INTEGERS = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0)}
KNOWN = (*_FLOATS, *_INTEGERS)


@dataclass(frozen=True)
class Rounding:
    """One way to quantize activations, with Humming's field names.

    dtype: one of `KNOWN`. mode: static_tensor, dynamic_token, dynamic_group, static_tensor_dynamic_group or
    dynamic_group_token. group_size: columns that share a scale, if there are groups. scale_dtype: of group scales.
    """

    dtype: str
    mode: str
    group_size: int = 0
    scale_dtype: str = "float32"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rounding | None:
        """Read the fields of a LayerConfig; None for 16-bit activations. KeyError if a field is missing."""
        mode = config.get("input_quant_mode") or "none"
        if mode == "none":
            return None
        return cls(
            config["a_dtype"], mode, config.get("input_scale_group_size") or 0, config["as_dtype"]
        )

    @property
    def is_static(self) -> bool:
        """True if the mode needs a static scale, which was measured beforehand."""
        return self.mode in ("static_tensor", "static_tensor_dynamic_group")

    @property
    def largest(self) -> float:
        """Largest absolute value of the codes: a scale maps the largest input to it."""
        return _FLOATS[self.dtype][2] if self.dtype in _FLOATS else _INTEGERS[self.dtype][1]

    def __call__(self, x: torch.Tensor, static: torch.Tensor | None = None) -> torch.Tensor:
        """Round values [T, K] to the kernel's operands, float64 [T, K]. `static`: the static modes' scale, float32.

        KeyError for a dtype that is not known.
        """
        values = x.float()
        if self.mode == "static_tensor":
            assert static is not None
            return nearest(values * (1 / static), self.dtype) * static.double()
        size = self.group_size or values.size(1)
        padding = -values.size(1) % size
        groups = torch.nn.functional.pad(values, (0, padding)).view(len(values), -1, size)
        rounded = self._groups(groups, static).flatten(1)
        return rounded[:, : values.size(1)]

    def _groups(self, groups: torch.Tensor, static: torch.Tensor | None) -> torch.Tensor:
        """Round groups [T, G, size] float32; returns float64."""
        raw = (groups.abs().amax(-1, keepdim=True) / self.largest).clamp_min(_TINY)
        if self.mode == "static_tensor_dynamic_group":
            assert static is not None
            scale = scale_above(raw / static, self.scale_dtype)
            used = scale * static
            return nearest(groups * _inverse(used), self.dtype) * scale.double() * static.double()
        if self.mode == "dynamic_group_token":
            scale = _three_bits_above(raw)
            token = _token_scale(scale.amax(1, keepdim=True))
            stored = scale_above(scale / token, self.scale_dtype)
            return nearest(groups * _inverse(scale), self.dtype) * stored.double() * token.double()
        scale = scale_above(raw, self.scale_dtype)
        return nearest(groups * _inverse(scale), self.dtype) * scale.double()

    def clipped(self, x: torch.Tensor, static: torch.Tensor) -> float:
        """Fraction of values that a static scale of the whole tensor clips; 0.0 for other modes."""
        if self.mode != "static_tensor" or not x.numel():
            return 0.0
        return float((x.float().abs() > static * self.largest).double().mean())


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1 / scale, 0.0)


def nearest(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round to a type's nearest numbers, ties to even codes; float64, clipped to its range. KeyError if unknown."""
    exact = values.double()
    if dtype in _INTEGERS:
        low, high = _INTEGERS[dtype]
        return exact.clamp(low, high).round()
    mantissa, least, largest = _FLOATS[dtype]
    step = _steps(exact, mantissa, least)
    return ((exact / step).round() * step).clamp(-largest, largest)


def _steps(values: torch.Tensor, mantissa: int, least: int) -> torch.Tensor:
    """Distance between neighbours of a float type at the values: a power of two."""
    exponent = torch.frexp(values.abs().clamp(2.0**least, 2.0**120)).exponent - 1
    return _power(exponent - mantissa)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Powers of two with integer exponents from -1022 to 1023, exact, as float64 from bit patterns."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def scale_above(scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round up to a number of a scale's type, as float32; float32 stays, too large values become the largest.

    `scale` is positive. KeyError for another type.
    """
    if dtype == "float32":
        return scale
    exact = scale.double()
    if dtype == "float8e8m0":
        fraction, exponent = torch.frexp(exact)
        exponent = exponent - (fraction == 0.5).int()
        return _power(exponent.clamp(-127, 127)).float()
    mantissa, least, largest = _FLOATS[dtype]
    step = _steps(exact, mantissa, least)
    return ((exact / step).ceil() * step).clamp_max(largest).float()


def _three_bits_above(scale: torch.Tensor) -> torch.Tensor:
    """Round up to a number with three bits of mantissa and float32's exponents."""
    exact = scale.double()
    step = _steps(exact, 3, -126)
    return ((exact / step).ceil() * step).float()


def _token_scale(largest: torch.Tensor) -> torch.Tensor:
    """Least power of two that scales a token's largest group scale to 448 or less."""
    fraction, exponent = torch.frexp(largest.double() / 448)
    exponent = exponent - (fraction == 0.5).int()
    return _power(exponent.clamp(-126, 127)).float()
