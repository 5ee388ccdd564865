"""Number formats as the kernels read them: codes, scales and parameters as float32.

Part of `hqconv.layout_decoder.decode`, and like it independent of Humming and of the conversion.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hqconv.schemas.dtypes import code_of

Array = NDArray[Any]

PADDED_E5M0 = "E5M0"  # five exponent bits over three zero bits: what e8m0 scales become for float16
FUSED_FP8 = "FUSED_FP8"  # e8m0 scales as exponents that are added to fp8's: 2 ** byte, 1 to 12
FUSED_INT8 = "FUSED_INT8"  # e8m0 scales as left shifts of int8 values twice the codes': 2 ** (byte + 1), 0 to 3


def parse_weight_dtype(text: str) -> tuple[int, int | None]:
    """Bits of a code and, of a float, of its exponent. ValueError for no weight type of Humming's."""
    match = re.fullmatch(r"u?int([1-8])|float([2-8])e([0-5])m([1-7])", text)
    if match is None or (match[2] and int(match[2]) != 1 + int(match[3]) + int(match[4])):
        raise ValueError(f"b_dtype {text}")
    return (int(match[1]), None) if match[1] else (int(match[2]), int(match[3]))


def stored_scale_dtype(config: Any) -> str:
    """The dtype of a LayerConfig's stored scales: a safetensors dtype, or one of the three above."""
    if config["weight_scale_type"] in ("tensor", "block"):
        return "F32"
    dtype = code_of(config["bs_dtype"] or config["c_dtype"])
    if config["use_fused_e8m0_scale"]:
        return {"float8e4m3": FUSED_FP8, "int8": FUSED_INT8}[config["a_dtype"]]
    # A block-scaled tensor core takes e8m0 scales as they are.
    is_widened = dtype == "F8_E8M0" and not config["use_block_scaled_mma"]
    return PADDED_E5M0 if is_widened and config["c_dtype"] == "float16" else dtype


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
