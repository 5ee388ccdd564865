"""Activation between the experts' GEMMs: translation between manifest and vLLM. No torch, no vLLM.

Both are an `Activation`: the manifest's by hqconv's names, vLLM's by those of its `MoEActivation`. vLLM's `silu` has a
limit where it is `silu_clamp` here; `swiglustep` has the bound 7 and says no number.
"""

from __future__ import annotations

from dataclasses import replace

from hqconv.errors import RequestError
from hqconv.schemas.activation import Activation

_PLAIN = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}  # with a gate; without one `_no_mul` follows
_STEP_LIMIT = 7.0  # of vLLM's swiglustep, which has no other
# gate and up one after the other, as the kernel layout has them; vLLM's `swigluoai` means alternating rows.
_OAI = "swigluoai_uninterleave"


def serving_activation(converted: Activation, gated: bool) -> Activation | None:
    """Return vLLM's activation for one of the manifest's, or None if it has none or the manifest has a name only."""
    name = converted.name
    if not converted.is_known(gated):
        return None
    if (
        name == "relu2" and not gated
    ):  # with a gate vLLM has a name for it, but no layer that computes it
        return Activation("relu2_no_mul")
    if name in _PLAIN:
        return Activation(_PLAIN[name] + ("" if gated else "_no_mul"))
    if name == "silu_bound":
        return Activation("swiglustep") if converted.limit == _STEP_LIMIT else None
    of_vllm = {"swigluoai": _OAI, "silu_clamp": "silu", "situ": "situ"}.get(name)
    return None if of_vllm is None else replace(converted, name=of_vllm)


def agreed(where: str, converted: Activation, gated: bool, asked: Activation) -> Activation:
    """Return the manifest's activation for a layer, if the server's model requests the same by `asked`.

    `asked` has the numbers that the model class gives. Raises RequestError if they differ, or if vLLM has no such
    activation for Humming.
    """
    expected = serving_activation(converted, gated)
    if expected is None:
        raise _refused(where, converted, gated)
    if _as_given(asked, expected) != expected:
        raise RequestError(
            "The server's model means another activation than the one that was converted and verified.",
            where=where,
            expected=f"{converted.describe()}: {expected}",
            found=asked,
            remedy="Update hqconv and convert again; if that is the same, please report the model.",
        )
    return expected


def _refused(where: str, converted: Activation, gated: bool) -> RequestError:
    remedy = "Serve the original checkpoint with another MoE backend."
    if not converted.is_known(gated):
        what, expected = (
            "The experts' activation is known by name only.",
            "one whose formula hqconv knows",
        )
    else:
        what, expected = "Humming layers in vLLM have no such activation.", "one that vLLM has"
        if converted.name == "silu_bound":
            expected = f"its swiglustep, whose bound is {_STEP_LIMIT:g}"
    return RequestError(
        what, where=where, expected=expected, found=converted.describe(), remedy=remedy
    )


def _as_given(asked: Activation, expected: Activation) -> Activation:
    """Activation that the model class requests, with its implied numbers added and meaningless ones removed.

    vLLM's class for GPT-OSS says `swigluoai` and no number, whatever its config has: the artifact has them. A
    linear_beta of 0 or less is none (vLLM's `situ_and_mul`).
    """
    if expected.name == _OAI and asked.name in ("swigluoai", _OAI):
        return Activation(_OAI, **{**expected.numbers, **asked.numbers})
    if expected.name == asked.name == "situ":
        has_linear = asked.linear_beta is not None and asked.linear_beta > 0
        given = Activation(
            "situ", beta=asked.beta, linear_beta=asked.linear_beta if has_linear else None
        )
        return given if given.numbers else expected
    return Activation(asked.name, asked.limit)
