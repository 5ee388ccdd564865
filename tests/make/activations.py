"""Activations rounded the slow way: by searching among all numbers of a type. Shares nothing with hqconv's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tests.make.packing import small_float


def _floats(exponent_bits: int, mantissa_bits: int, num_without: int) -> np.ndarray:
    """All numbers of a float type in ascending order, from its codes; the last `num_without` codes are none."""
    codes = torch.arange(2 ** (exponent_bits + mantissa_bits) - num_without)
    positive = small_float(codes, exponent_bits, mantissa_bits).numpy()
    return np.concatenate([-positive[:0:-1], positive])


NUMBERS = {
    "float8e4m3": _floats(4, 3, 1),
    "float8e5m2": _floats(5, 2, 4),
    "float4e2m1": _floats(2, 1, 0),
    "float8e8m0": 2.0 ** np.arange(-127, 128, dtype=np.float64),
    "int8": np.arange(-128.0, 128.0),
    "int4": np.arange(-8.0, 8.0),
}
LARGEST = {
    "float8e4m3": 448.0,
    "float8e5m2": 57344.0,
    "float4e2m1": 6.0,
    "int8": 127.0,
    "int4": 7.0,
}


def nearest_by_search(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest number of a type for each value; between two of equal distance, that with the even code."""
    numbers = NUMBERS[dtype]
    flat, found = values.astype(np.float64).ravel(), []
    zero = int(np.flatnonzero(numbers == 0)[0])
    for value in flat:
        distances = np.abs(numbers - value)
        best = np.flatnonzero(distances == distances.min())
        found.append(numbers[min(best, key=lambda i: abs(int(i) - zero) % 2)])
    return np.array(found).reshape(values.shape)


def _above(value: np.float32, dtype: str) -> np.float32:
    if dtype == "float32":
        return value
    numbers = NUMBERS[dtype]
    return np.float32(min((n for n in numbers if n >= value), default=numbers[-1]))


def quantize_by_search(
    row: np.ndarray, scheme: Any, static: float | None
) -> tuple[np.ndarray, np.ndarray | None, np.float32 | None]:
    """One token [K] float32: the numbers that its codes are [K], group scales [G] or None, its own scale or None.

    As Humming's `quant_group` does it, value by value. `scheme` has dtype, mode, group_size and scale_dtype.
    """
    one, tiny, largest = np.float32(1), np.float32(1e-30), np.float32(LARGEST[scheme.dtype])
    fixed = None if static is None else np.float32(static)
    if scheme.mode == "static_tensor":
        return nearest_by_search(row * (one / fixed), scheme.dtype), None, fixed
    size = scheme.group_size or len(row)
    codes, scales = [], []
    for begin in range(0, len(row), size):
        group = row[begin : begin + size]
        raw = max(np.abs(group).max() / largest, tiny)
        if scheme.mode == "static_tensor_dynamic_group":
            scale = _above(raw / fixed, scheme.scale_dtype)
            used = scale * fixed
        elif scheme.mode == "dynamic_group_token":
            fraction, exponent = math.frexp(raw)
            scale = used = np.float32(math.ldexp(math.ceil(fraction * 16) / 16, exponent))
        else:
            scale = used = _above(raw, scheme.scale_dtype)
        multiplier = one / used if used > 0 else np.float32(0)
        codes.append(nearest_by_search(group * multiplier, scheme.dtype))
        scales.append(scale)
    whole = np.concatenate(codes)
    if scheme.mode == "dynamic_group_token":
        token = np.float32(2.0 ** next(e for e in range(-126, 128) if max(scales) <= 448 * 2.0**e))
        return whole, np.array([_above(s / token, scheme.scale_dtype) for s in scales]), token
    if scheme.mode == "dynamic_token":
        return whole, None, scales[0]
    return whole, np.array(scales), fixed


def round_by_search(x: np.ndarray, scheme: Any, static: float | None = None) -> np.ndarray:
    """Tokens [T, K] float32 → what a kernel multiplies with, float64 [T, K]."""
    rows = []
    for row in x:
        codes, groups, token = quantize_by_search(row, scheme, static)
        factor = 1.0 if token is None else float(token)
        if groups is not None:
            codes = codes * np.repeat(groups.astype(np.float64), scheme.group_size)[: len(row)]
        rows.append(codes * factor)
    return np.array(rows)
