"""The inverse of the kernel layout: codes, scales and zero points back from a rank file's tensors.

Independent of the forward path on purpose: this follows how Humming's GEMM kernels *read* the tensors
(`include/humming/memory/s2r_loader`, `datatype/dequant*.cuh`, `mma/wgmma.cuh`), shares no code with
`hqconv.backends`, and needs neither Humming nor torch. So `verify` can trust it, on any machine.

What a weight is to the kernels: (value of its code - zero point) * value of its scale * second scale, by `to_float32`
of `scale_dtype`. That holds where exponents are fused into the codes as well, with the codes and scales as stored.

Shape legend: E experts, N rows, K columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hqconv.errors import VerificationError
from hqconv.layout_decoder.fragments import read_codes
from hqconv.layout_decoder.layout_form import read_config
from hqconv.layout_decoder.numbers import FUSED_FP8, FUSED_INT8, PADDED_E5M0, Array, to_float32
from hqconv.layout_decoder.scales import check_padding, read_scale, read_zero_point, unpermute_channels
from hqconv.layout_decoder.tensors import checked_bits


@dataclass(frozen=True, eq=False)
class DecodedStack:
    """A stack of experts of one GEMM in logical order, padding removed; floats as unsigned bit patterns.

    codes: uint8 [E, N, K], Humming's codes (integers offset binary); a view where K or N was padded.
    weight_scale: [E, N, G] (group), [E, N, 1] (channel), [E, N/bn, K/bk] (block) or [E] (tensor).
    zero_point: uint8 codes or 16-bit float patterns, [E, N, G], G = 1 for channel scales.
    weight_scale_2: float32 patterns [E], or 16-bit ones [E, N]. bias: 16-bit patterns [E, N].
    scale_dtype: safetensors dtype of `weight_scale` (`U8` is e5m3), or what e8m0 scales became: `PADDED_E5M0`,
    `FUSED_FP8` or `FUSED_INT8`, see `e8m0_exponents`.
    param_dtype: safetensors dtype of the 16-bit patterns. problems: one line per tensor and expert.
    """

    codes: Array
    weight_scale: Array
    zero_point: Array | None
    weight_scale_2: Array | None
    bias: Array | None
    scale_dtype: str
    param_dtype: str
    problems: tuple[str, ...]


def unlayout(
    config: Mapping[str, Any], tensors: Mapping[str, Array], flags: Mapping[str, Any] | None = None
) -> DecodedStack:
    """Read kernel tensors [E, …] as the GEMM kernels do and return what they mean.

    `config`: Humming's LayerConfig as JSON words; its `num_experts` is not looked at, so that any slice of a
    rank's experts may be passed. `tensors`: `weight`, `weight_scale`, … as raw bits, unsigned integers as wide as the
    dtype. `flags`: the manifest's layout flags.

    Raises RequestError for layouts it does not know (integer group scales), and VerificationError where config,
    flags and tensors contradict each other. Values that padding or unused bits should not have are listed in
    `problems`.
    """
    form = read_config(config, flags or {})
    bits = checked_bits(form, tensors)
    problems: list[str] = []
    zero, zero_padded = read_zero_point(form, bits.get("zero_point"), problems)
    codes = read_codes(form, bits["weight"], zero_padded)
    check_padding("weight", codes, form.shape, 0, problems)
    rows = form.shape[0]
    channels = {}
    for name in ("bias", "weight_scale_2"):
        if name in bits and bits[name].ndim == 2:
            channels[name] = unpermute_channels(bits[name])
            check_padding(name, channels[name][:, :, None], (rows, 1), 0, problems)
            channels[name] = channels[name][:, :rows]
    second = channels.get("weight_scale_2", bits.get("weight_scale_2"))
    return DecodedStack(
        codes=codes[:, :rows, : form.shape[1]],
        weight_scale=read_scale(form, bits["weight_scale"], second, problems),
        zero_point=zero,
        weight_scale_2=second,
        bias=channels.get("bias"),
        scale_dtype=form.scale_dtype,
        param_dtype=form.param_dtype,
        problems=tuple(problems),
    )


# --- e8m0 scales that became something else ------------------------------------------------------------------

ADAPTED = (PADDED_E5M0, FUSED_FP8, FUSED_INT8)


def second_scale(unpacked: DecodedStack) -> NDArray[np.float32] | None:
    """The second scale's values, float32 [E, 1, 1] or [E, N, 1]."""
    if unpacked.weight_scale_2 is None:
        return None
    of_rows = unpacked.weight_scale_2.ndim == 2
    values = to_float32(unpacked.weight_scale_2, unpacked.param_dtype if of_rows else "F32")
    return values.reshape(len(values), -1, 1)


def e8m0_exponents(unpacked: DecodedStack) -> tuple[Array, NDArray[np.bool_]]:
    """The e8m0 bytes [E, N, G] that scales of `ADAPTED` dtypes stand for, and where they cannot be known.

    For float16, the forward path subtracts log2(weight_scale_2) from an expert's exponents and rebiases them; those
    that fall below 2^-14 are flushed. Where the mask is set, the original byte was at most the one returned, and the
    kernels take the scale for zero. Largest exponents are never lost.
    Fused exponents are what the codes were shifted for; a row whose second scale is below float16 is flushed.
    Raises VerificationError where a second scale is not a power of two.
    """
    scale, second = unpacked.weight_scale, second_scale(unpacked)
    power: Array = np.zeros((1, 1, 1), np.int64)
    is_lost: Array = np.zeros((1, 1, 1), np.bool_)
    if second is not None:
        fraction, power = np.frexp(second)
        if unpacked.scale_dtype == FUSED_INT8 and unpacked.param_dtype == "F16":
            is_lost = second == 0
        power = np.where(is_lost, _BELOW_FLOAT16, power.astype(np.int64) - 1)
        is_wrong = (fraction != 0.5) & ~is_lost
        if is_wrong.any():
            raise VerificationError(
                "An e8m0 scale's second scale is not a power of two.",
                where=f"weight_scale_2, expert {np.flatnonzero(is_wrong.any(axis=(1, 2)))[0]}",
            )
    if unpacked.scale_dtype == PADDED_E5M0:
        exponent, is_lost = (scale >> 3).astype(np.int64) - 15, scale >> 3 == 0
    else:
        exponent = scale.astype(np.int64) + (unpacked.scale_dtype == FUSED_INT8)
        is_lost = np.broadcast_to(is_lost, scale.shape)
    return np.clip(exponent + 127 + power, 0, 255).astype(np.uint8), is_lost


_BELOW_FLOAT16 = -25  # half of the least float16, and what is smaller: rounded to 0
