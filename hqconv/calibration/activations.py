"""Activations between an expert's GEMMs in plain torch, from the formulas of `schemas/activation`.

The reference of `verify` and the products of a calibration use them; a kernel has its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from hqconv.schemas.activation import Activation

Step = Callable[[torch.Tensor], torch.Tensor]


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
ACTIVATIONS = (*_ELEMENTWISE, "swigluoai", "situ")


def activate(activation: Activation, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """Apply the experts' activation to w13's output; without a gate it acts on `up` alone.

    One of `ACTIVATIONS`, or one that acts elementwise with a number: `<name>_clamp`, `<name>_bound`, `<name>_shift`.
    KeyError if it is not known, or lacks a number.
    """
    name, limit, alpha, beta = activation.name, activation.limit, activation.alpha, activation.beta
    if gate is None:
        return _ELEMENTWISE[name](up)
    function, _, kind = name.rpartition("_")
    if name == "swigluoai":  # https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py
        gate, up = gate.clamp(max=_given(limit)), up.clamp(-_given(limit), limit)
        return gate * torch.sigmoid(_given(alpha) * gate) * (up + _given(beta))
    if name == "situ":  # vLLM 0.33: layers/activation.py (SituAndMul.forward_native)
        linear = activation.linear_beta
        wide = up if linear is None else linear * torch.tanh(up / linear)
        return _given(beta) * torch.tanh(gate / _given(beta)) * torch.sigmoid(gate) * wide
    if kind in ("clamp", "bound"):
        up = up.clamp(-_given(limit), limit)
        if kind == "clamp":  # transformers: modeling_deepseek_v4.py (_apply_gate)
            return _ELEMENTWISE[function](gate.clamp(max=limit)) * up
        return _ELEMENTWISE[function](gate).clamp(max=limit) * up  # modeling_step3p7.py
    if kind == "shift":  # vLLM: moondream3.py (Moondream3TextMoE.forward)
        return _ELEMENTWISE[function](gate) * (up + _given(beta))
    return _ELEMENTWISE[name](gate) * up


def _given(number: float | None) -> float:
    if number is None:
        raise KeyError("a number of the activation")
    return number
