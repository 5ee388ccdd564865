"""Humming's packed tensors read backwards: their shapes, worked out from the schema alone, and their codes."""

from __future__ import annotations

import numpy as np

from hqconv.layout_decoder import loops
from hqconv.layout_decoder.numbers import Array
from hqconv.schemas.dtypes import code_of
from hqconv.schemas.weight_schema import WeightSchema


def packed_shapes(
    shape: tuple[int, int], schema: WeightSchema, param_dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of one matrix's packed tensors, worked out from the schema alone."""
    (n, k), param = shape, code_of(param_dtype)
    group = schema.weight_scale_group_size or k
    rows = n // (schema.weight_scale_group_size_n or 1)
    dtype = code_of(schema.scale_dtype(param_dtype))
    scale: tuple[int, ...] = (1,) if schema.weight_scale_type == "tensor" else (rows, k // group)
    shapes = {"weight": ("I32", (n, k * schema.num_bits // 32)), "weight_scale": (dtype, scale)}
    if schema.has_zero_point:
        is_float = schema.is_fp_zero_point
        packed_rows = n if is_float else n * schema.num_bits // 32
        shapes["zero_point"] = (param if is_float else "I32", (packed_rows, k // group))
    if schema.weight_scale_2_type == "tensor":
        shapes["weight_scale_2"] = ("F32", (1,))
    elif schema.weight_scale_2_type == "channel":
        shapes["weight_scale_2"] = (param, (n,))
    return shapes


def unpack_codes(words: Array, num_bits: int) -> Array:
    """Little-endian bit fields of each row of uint32 words [N, W] as uint8 [N, 32 W / num_bits]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    num_rows = data.shape[0]
    if num_bits in (1, 2, 4, 8):
        codes = np.empty((num_rows, data.shape[1] * 8 // num_bits), np.uint8)
        loops.split_bytes(data, num_bits, codes)
        return codes
    # Eight codes fill num_bits whole bytes.
    runs = data.reshape(num_rows, -1, num_bits)
    codes = np.empty((num_rows, runs.shape[1], 8), np.uint8)
    for row in range(num_rows):  # by rows: the 64-bit words stay in the cache
        word = np.zeros(runs.shape[1], np.uint64)
        for i in range(num_bits):
            word |= runs[row, :, i].astype(np.uint64) << np.uint64(8 * i)
        for i in range(8):
            codes[row, :, i] = (word >> np.uint64(i * num_bits)) & np.uint64((1 << num_bits) - 1)
    return codes.reshape(num_rows, -1)
