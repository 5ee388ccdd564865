"""What experts do between their GEMMs, as the manifest names it and as vLLM does. No torch, no vLLM."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hqconv.errors import RequestError

_PLAIN = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}  # with a gate; without one `_no_mul` follows
_CLAMPED = re.compile(r"silu_clamp(\d+(?:\.\d+)?)")
_STEP = "silu_bound7"  # vLLM's has this bound and no other


@dataclass(frozen=True)
class Activation:
    """vLLM's name of an activation and its parameters, None where it has none of that kind."""

    name: str
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None


# gate and up one after the other, as the kernel layout has them; vLLM's `swigluoai` means alternating rows.
GPT_OSS = Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)


def serving_activation(name: str, gated: bool) -> Activation | None:
    """vLLM's activation for one of the manifest's, or None where it has none."""
    if name == "swigluoai" and gated:
        return GPT_OSS
    if name == _STEP and gated:
        return Activation("swiglustep")
    if clamped := _CLAMPED.fullmatch(name):
        return Activation("silu", float(clamped[1])) if gated else None
    if name == "relu2" and not gated:  # with a gate vLLM has a name for it, but no layer that does it
        return Activation("relu2_no_mul")
    if name not in _PLAIN:
        return None
    return Activation(_PLAIN[name] + ("" if gated else "_no_mul"))


def agreed(where: str, converted: str, gated: bool, asked: Activation) -> Activation:
    """What a layer shall do: the manifest's activation, if the server's model means the same by `asked`.

    `asked` has the parameters that the model class gives. Raises RequestError where they differ, or where vLLM has no
    such activation for Humming.
    """
    expected = serving_activation(converted, gated)
    if expected is None:
        raise RequestError(
            "Humming layers in vLLM have no such activation.",
            where=where,
            found=converted,
            remedy="Serve the original checkpoint with another MoE backend.",
        )
    if expected == GPT_OSS and asked.name in ("swigluoai", GPT_OSS.name):
        given = Activation(
            GPT_OSS.name, *(_or(a, b) for a, b in zip(_words(asked), _words(GPT_OSS), strict=True))
        )
    else:
        given = Activation(asked.name, asked.limit)
    if given != expected:
        raise RequestError(
            "The server's model means another activation than the one that was converted and verified.",
            where=where,
            expected=f"{converted}: {expected}",
            found=asked,
            remedy="Update hqconv and convert again; if that is the same, please report the model.",
        )
    return expected


def _words(activation: Activation) -> tuple[float | None, ...]:
    return activation.limit, activation.alpha, activation.beta


def _or(value: float | None, default: float | None) -> float | None:
    return default if value is None else value
