"""Number formats as the kernels read them: codes, scales and parameters as float32.

Part of `hqconv.layout_decoder.decode`, and like it independent of Humming and of the conversion.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hqconv.layout_decoder.layout_form import FUSED_FP8, FUSED_INT8, PADDED_E5M0, parse_weight_dtype

Array = NDArray[Any]


def code_values(b_dtype: str, *, has_zero_point: bool) -> NDArray[np.float32]:
    """The float32 value of each of 256 codes; bits above the code's width are ignored.

    Integers without a zero point stand for their distance from the middle.
    """
    num_bits, exponent_bits = parse_weight_dtype(b_dtype)
    codes = np.arange(256) & ((1 << num_bits) - 1)
    half = 1 << (num_bits - 1)
    if exponent_bits is None:
        return (codes - (0 if has_zero_point else half)).astype(np.float32)
    magnitude = _small_floats(codes % half, exponent_bits, num_bits - 1 - exponent_bits)
    return np.where(codes >= half, -magnitude, magnitude)


def _small_floats(codes: Array, exponent_bits: int, mantissa_bits: int) -> NDArray[np.float32]:
    """Unsigned small floats, every code finite; without exponent bits the magnitude itself."""
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    if exponent_bits == 0:
        return codes.astype(np.float32)
    bias = (1 << (exponent_bits - 1)) - 1
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    values: NDArray[np.float32] = np.ldexp(
        significand.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits
    )
    return values


def float_values(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    """The float32 values of raw patterns of a safetensors dtype; `U8` is e5m3, "codes" are plain integers."""
    if dtype == "codes":
        return bits.float()
    if wide := {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(dtype):
        return bits.view(wide).float()
    return look_up(_scale_values(dtype, bits.device), bits)


def look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The table's entry of each code, in the shape of `codes`."""
    return table.index_select(0, codes.int().flatten()).view(codes.shape)


@functools.lru_cache(maxsize=64)
def _scale_values(dtype: str, device: torch.device) -> torch.Tensor:
    """The float32 value of each of 256 8-bit scales."""
    codes = np.arange(256)
    if dtype == "U8":
        table = _small_floats(codes, 5, 3)
    elif dtype == "F8_E8M0":
        table = np.ldexp(np.float32(1), np.minimum(codes, 254) - 127)
        table[255] = np.nan
    elif dtype in (FUSED_FP8, FUSED_INT8):
        table = np.ldexp(np.float32(1), np.minimum(codes, 12) + (dtype == FUSED_INT8))
    elif dtype == PADDED_E5M0:  # exponent 0 is zero for the kernels: there is no mantissa to be subnormal
        table = np.where(codes >> 3 == 0, np.float32(0), np.ldexp(np.float32(1), (codes >> 3) - 15))
        table[codes >> 3 == 31] = np.inf
    else:
        exponent_bits = {"F8_E4M3": 4, "F8_E5M2": 5}[dtype]
        table = _small_floats(codes % 128, exponent_bits, 7 - exponent_bits)
        table[codes % 128 == 127] = np.nan
        if exponent_bits == 5:
            table[124:128] = table[252:] = [np.inf, np.nan, np.nan, np.nan]
        table[128:] *= -1
    return torch.from_numpy(table.astype(np.float32)).to(device)
