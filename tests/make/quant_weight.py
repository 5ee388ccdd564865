"""Twin of Humming's CUDA op `quant_weight` for CPU tensors, by numpy: its import lets Humming quantize on the CPU.

Written after quant_weight.cuh alone, so that a comparison with hqconv's own loops says something.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hqconv.humming_ops.runtime import humming
from hqconv.schemas.tensors import CodeKind, CodeType, parse_code_type

# Up to this group size Humming's kernel makes one pass over a float32 group, and nvcc then fuses the product
# `zero * -scale` into the subtraction that follows (seen on an H200 with CUDA 13.0; 16-bit sources never fuse).
FUSED = 128


@np.errstate(all="ignore")
def quant_weight(
    inputs: torch.Tensor,
    source_dtype_str: str,
    target_dtype_str: str,
    group_size: int,
    has_scale: bool,
    use_e8m0_scale: bool,
    has_zero_point: bool,
    is_fp_zero_point: bool,
    allow_negative_scale: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 codes, float32 (or e8m0) scales, zero points, unpacked."""
    size = inputs.size(-1) if group_size <= 0 else group_size
    code, weights = (
        parse_code_type(target_dtype_str, has_zero_point=has_zero_point),
        inputs.float().numpy(),
    )
    groups = weights.reshape(-1, size)
    scale: Any = np.ones((len(groups), 1), np.float32)
    lowest: Any = np.float64(0)
    zero: Any = np.zeros((len(groups), 1), np.float32)
    if has_scale:
        tiny = np.float32(1e-30)
        highest = np.fmax(np.fmax.reduce(groups, 1, keepdims=True), tiny)
        least = np.fmin(np.fmin.reduce(groups, 1, keepdims=True), -tiny)
        scale = (
            _scale(code, highest, np.abs(least), allow_negative_scale)
            if not has_zero_point
            else None
        )
        if has_zero_point:
            scale = ((highest - least) / np.float64(code.largest * 2 + 1)).astype(np.float32)
            zero, lowest = -least / scale, least
            if not is_fp_zero_point:
                zero = np.rint(zero)
                is_fused = source_dtype_str == "float32" and size <= FUSED
                lowest = (
                    zero.astype(np.float64) * -scale.astype(np.float64)
                    if is_fused
                    else zero * -scale
                )
        if use_e8m0_scale:
            scale = ((scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(
                np.float32
            )
    shifted = (groups.astype(np.float64) - lowest).astype(np.float32) if has_zero_point else groups
    codes = torch.from_numpy(_codes(code, shifted * (np.float32(1) / scale)).reshape(inputs.shape))
    if not has_scale:
        return codes, torch.empty(0), torch.empty(0)
    shape = (*inputs.shape[:-1], inputs.size(-1) // size)
    scales, zeros = torch.from_numpy(scale).reshape(shape), torch.empty(0)
    if use_e8m0_scale:
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
    if has_zero_point:
        zeros = torch.from_numpy(zero).reshape(shape)
        zeros = zeros if is_fp_zero_point else zeros.to(torch.int32)
    return codes, scales, zeros


def _scale(code: CodeType, highest: np.ndarray, below: np.ndarray, is_signed: bool) -> np.ndarray:
    widest, narrowest = np.fmax(highest, below), np.fmin(highest, below)
    if code.kind != CodeKind.SYM_INT:
        return np.asarray(widest / np.float32(code.largest))
    up, down = (0.499, 1.499) if code.num_bits == 1 else (code.largest, code.largest + 1)
    wide, narrow = (
        (one.astype(np.float64) / end).astype(np.float32)
        for one, end in ((widest, down), (narrowest, up))
    )
    scale: np.ndarray = np.fmax(wide, narrow)
    return np.where(highest > below, -scale, scale) if is_signed else scale


def _codes(code: CodeType, x: np.ndarray) -> np.ndarray:
    """Codes of scaled weights, int32."""
    half = 1 << (code.num_bits - 1)
    if code.kind == CodeKind.FLOAT:
        return _float_codes(code, x)
    number = np.clip(
        np.nan_to_num(np.rint(x), nan=0.0).astype(np.float64), -(2.0**31), 2.0**31 - 1
    ).astype(np.int32)
    if code.kind == CodeKind.SYM_INT:  # whose sum overflows, as in the kernel
        return np.asarray(np.clip(number + np.int32(half), 0, 2 * half - 1))
    least, most = code.bounds
    integers = np.clip(number, int(least), int(most))
    if code.kind != CodeKind.ASYM_INT:
        integers = np.where(integers < 0, half | -integers, integers)
    return np.asarray(integers)


def _float_codes(code: CodeType, x: np.ndarray) -> np.ndarray:
    """The nearer of the truncated number and the one above, in float32's own bits at the target's exponents."""
    drop = 23 - code.mantissa_bits
    value = x / np.float32(math.ldexp(1.0, 128 - (1 << (code.exponent_bits - 1))))
    bits, mask = value.view(np.uint32), np.uint32(((1 << (code.num_bits - 1)) - 1) << drop)
    both = mask | np.uint32(0x80000000)
    down, up = bits & both, (bits + np.uint32(1 << (drop - 1))) & both
    is_up = np.abs(value - down.view(np.float32)) > np.abs(up.view(np.float32) - value)
    nearest = np.where(is_up, up, down)
    sign = (nearest & np.uint32(0x80000000)) >> np.uint32(32 - code.num_bits)
    codes: np.ndarray = (sign | ((nearest & mask) >> np.uint32(drop))).astype(np.int32)
    return codes


def _by_device(on_cuda: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(on_cuda)
    def op(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (on_cuda if inputs.is_cuda else quant_weight)(inputs, *args, **kwargs)

    return op


humming().ops.quant_weight = _by_device(humming().ops.quant_weight)
