"""What experts can do between their GEMMs: every formula, value by value, and C expressions run as numpy does them."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from hqconv.schemas.activation import ELEMENTWISE, SWIGLUOAI, Activation

# Each formula, some with several numbers: with a gate, and without one.
UNGATED = tuple(map(Activation, ELEMENTWISE))
GATED = (
    *UNGATED,
    *(
        Activation(f"silu_{kind}", limit)
        for kind in ("clamp", "bound")
        for limit in (1.5, 7.0, 16.0)
    ),
    Activation("gelu_tanh_clamp", 2.0),
    Activation("relu2_bound", 3.0),
    Activation("gelu_shift", beta=1.0),
    Activation("silu_shift", beta=-0.5),
    SWIGLUOAI,
    Activation("swigluoai", 20.0, 1.0, 0.0),
    Activation("swigluoai", 2.5, 1.702, 1.0),
    Activation("swigluoai", 7.0, 1.702, -0.5),
    Activation("situ", beta=4.0),
    Activation("situ", beta=4.0, linear_beta=25.0),
    Activation("situ", beta=1.5, linear_beta=2.0),
)
# Names, and formulas that lack a number or the gate.
UNKNOWN = (
    *(
        Activation(name)
        for name in ("", "mish", "SILU", " silu", "softcapped_swiglu", "situ", "swigluoai")
    ),
    *(
        Activation(name)
        for name in ("silu_clamp", "silu_bound", "clamp", "_clamp", "silu+swiglu_limit")
    ),
    *(
        Activation(name, 7.0)
        for name in ("sin_clamp", "swigluoai_clamp", "swigluoai", "silu_clamp_")
    ),
    Activation("swigluoai", 7.0, 1.702),
    Activation("swigluoai", alpha=1.702, beta=1.0),
    Activation("situ", linear_beta=25.0),
    Activation("gelu_shift", 7.0),
    Activation("mish_shift", beta=1.0),
)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _tanh_gelu(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_PLAIN = {
    **dict.fromkeys(("silu", "swish"), lambda x: x * _sigmoid(x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new"), _tanh_gelu),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def by_definition(activation: Activation, gate: float, up: float) -> float:
    """One value of the formulas in `schemas/activation`."""
    name, numbers = activation.name, dict(activation.numbers)
    if name in _PLAIN:
        return _PLAIN[name](gate) * up
    if name == "situ":
        beta, linear = numbers["beta"], numbers.get("linear_beta")
        wide = up if linear is None else linear * math.tanh(up / linear)
        return beta * math.tanh(gate / beta) * _sigmoid(gate) * wide
    if name.endswith("_shift"):
        return _PLAIN[name.removesuffix("_shift")](gate) * (up + numbers["beta"])
    limit = numbers["limit"]
    up = min(max(up, -limit), limit)
    if name == "swigluoai":
        gate = min(gate, limit)
        return gate * _sigmoid(numbers["alpha"] * gate) * (up + numbers["beta"])
    function = _PLAIN[name.rpartition("_")[0]]
    return (
        function(min(gate, limit)) * up
        if name.endswith("clamp")
        else min(function(gate), limit) * up
    )


_LAMBDA = re.compile(r"\[\]\(float a(?:, float b)?\) \{(.*?)\}\(a(?:, b)?\)", re.DOTALL)
_NUMBER = re.compile(r"\b(\d+(?:\.\d*)?(?:e[+-]?\d+)?)f\b")
_FUNCTIONS = {
    "fminf": np.minimum,
    "fmaxf": np.maximum,
    "expf": np.exp,
    "tanhf": np.tanh,
    "erff": np.vectorize(math.erf, otypes=[np.float64]),
}


def run_c(expression: str, gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """What an activation's C expression of a and b is in float64; without a gate, a is what is up."""
    names: dict[str, Any] = {**_FUNCTIONS, "a": up if gate is None else gate, "b": up}
    found = _LAMBDA.search(expression)
    if found is not None:
        *lines, last = [line.strip() for line in found[1].split(";") if line.strip()]
        inside = dict(names)
        for line in lines:
            name, _, value = line.removeprefix("const float ").partition(" = ")
            inside[name] = _value(value, inside)
        names["inner"] = _value(last.removeprefix("return "), inside)
        expression = expression.replace(found[0], "inner")
    return np.asarray(_value(expression, names), np.float64)


def _value(text: str, names: dict[str, Any]) -> Any:
    with np.errstate(over="ignore"):
        return eval(_NUMBER.sub(r"\1", text), {"__builtins__": {}}, names)
