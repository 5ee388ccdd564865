"""Kernel variants that vLLM 0.33 requests from Humming: compute settings and activation sources. Imports no vLLM.

Follows vLLM's `fused_moe/experts/fused_humming_moe.py`.
"""

from __future__ import annotations

import os

from hqconv.errors import RequestError
from hqconv.kernel_layout.kernel_sources import CONTIGUOUS, INDEXED, MASKED, ComputeSettings
from hqconv.schemas.activation import Activation
from hqconv.serving.vllm.activations import serving_activation

# vLLM quantizes such tokens itself, before it sends them to other ranks (`utils/humming/moe.py`).
PREQUANTIZED = ("float8e4m3", "dynamic_group", 128)


def compute_settings(has_ep: bool) -> ComputeSettings:
    """Humming's settings in vLLM with this environment, for an artifact with or without expert parallelism."""
    name = os.environ.get("VLLM_HUMMING_MOE_GEMM_TYPE", "auto").lower()
    gemm_type = {"auto": CONTIGUOUS if has_ep else INDEXED, "grouped": CONTIGUOUS}.get(name, name)
    if gemm_type not in (INDEXED, CONTIGUOUS, MASKED):
        what, known = (
            "Humming has no such GEMM.",
            f"auto, {INDEXED}, grouped, {CONTIGUOUS} or {MASKED}",
        )
        raise RequestError(what, where="VLLM_HUMMING_MOE_GEMM_TYPE", expected=known, found=name)
    use_f16_accum, use_batch_invariant = (
        os.environ.get(variable, "0") not in ("", "0")
        for variable in ("VLLM_HUMMING_USE_F16_ACCUM", "VLLM_BATCH_INVARIANT")
    )
    return ComputeSettings(gemm_type, use_f16_accum, use_batch_invariant, PREQUANTIZED)


# vLLM 0.33, quantization/utils/humming/activation.py, to the letter: a compiled kernel is found by its source text.
_SILU = "a / (1.f + expf(-a))"
_GELU = "0.5f * a * (1.f + erff(a * 0.7071067811865476f))"
_GELU_TANH = """[](float a) {
    const float cubic = 0.044715f * a * a * a;
    const float inner = 0.7978845608028654f * (a + cubic);
    return 0.5f * a * (1.f + tanhf(inner));
}(a)"""
_RELU2 = "fmaxf(a, 0.f) * fmaxf(a, 0.f)"
_CLAMPED_SILU = """[](float a, float b) {{
    const float gate = fminf(a, {limit});
    const float up = fmaxf(fminf(b, {limit}), -{limit});
    const float activated_gate = gate / (1.f + expf(-{alpha} * gate));
    return activated_gate * (up + {beta});
}}(a, b)"""
_SITU = """[](float a, float b) {{
            const float gate = {beta} * tanhf(a / {beta});
            const float activated_gate = gate / (1.f + expf(-a));
            const float up = {up};
            return activated_gate * up;
        }}(a, b)"""
_SWIGLUSTEP = """[](float a, float b) {
            const float activated_gate = a / (1.f + expf(-a));
            const float gate = fminf(activated_gate, 7.f);
            const float up = fmaxf(fminf(b, 7.f), -7.f);
            return gate * up;
        }(a, b)"""
_GATED = {
    **dict.fromkeys(("silu", "swish"), f"({_SILU}) * b"),
    "gelu": f"({_GELU}) * b",
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new"), f"({_GELU_TANH}) * b"),
}
_UNARY = {
    **dict.fromkeys(("silu", "swish"), _SILU),
    "gelu": _GELU,
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new"), _GELU_TANH),
    "relu2": _RELU2,
}


def kernel_activation(activation: Activation, gated: bool) -> dict[str, str] | None:
    """Arguments of an activation as vLLM passes them to Humming's kernels, or None if vLLM has no such activation."""
    text, kind = (
        (_gated_text(activation), "binary_split")
        if gated
        else (_UNARY.get(activation.name), "unary")
    )
    return None if text is None else {"activation_type": kind, "activation_impl": text}


def _gated_text(activation: Activation) -> str | None:
    found = serving_activation(activation, gated=True)
    if found is None:
        return None
    number = {key: f"({value}f)" for key, value in found.numbers.items()}
    if found.name == "situ":
        linear = number.get("linear_beta")
        return _SITU.format(
            beta=number["beta"], up="b" if linear is None else f"{linear} * tanhf(b / {linear})"
        )
    if found.name == "swiglustep":
        return _SWIGLUSTEP
    if found.limit is not None:
        return _CLAMPED_SILU.format_map({"alpha": "(1.0f)", "beta": "(0.0f)", **number})
    return _GATED.get(activation.name)
