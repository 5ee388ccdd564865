"""Fingerprint of a kernel layout: the digest of the kernel tensors that the installed Humming makes of a small matrix.

Two versions of Humming with the same fingerprint lay weights out alike, so that an artifact of one runs with the other.
The matrix is the same for every caller, and no two of its words, scales or zero points within a repetition are equal.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch

from hqconv.humming_ops.runtime import has_twins
from hqconv.kernel_layout.transform import PAD_K, PAD_N, kernel_form, packed_attributes, to_kernel
from hqconv.schemas.input_schema import KernelSpec

_SHAPE = (PAD_N, 4 * PAD_K)  # of the matrix: whole tiles of every kernel and groups of every schema
_ODD = 0x9E3779B1  # multiples of an odd number visit every word of 32 bits
_WORD = 1 << 32
# Number of a value's first pattern, and of its distinct patterns, by the type of a scale: all finite and positive.
_PATTERNS = {
    torch.float8_e8m0fnu: (120, 14),  # 2^-7 to 2^6: Humming's fused exponents keep a range of 16
    torch.float8_e4m3fn: (8, 112),
    torch.float8_e5m2: (8, 112),
    torch.float16: (0x3000, 0x1800),
    torch.bfloat16: (0x3E00, 0x0300),
    torch.float32: (0x3F000000, 0x01000000),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@functools.cache
def layout_fingerprint(spec: KernelSpec, device: str | None = None) -> str:
    """Return 64 hexadecimal digits: the SHA-256 of the kernel tensors of the small matrix, with their names and shapes.

    device: None is the CPU, or the GPU where the CPU cannot stand in for this Humming's kernels. Takes milliseconds on
    a CPU. Raises RequestError where neither can lay out.
    """
    device = device or ("cpu" if has_twins() or not torch.cuda.is_available() else "cuda")
    attributes = packed_attributes(
        *_SHAPE, spec.schema, spec.param_dtype, has_bias=False, num_experts=1
    )
    packed = {
        name: values(attribute["shape"], attribute["dtype"]).to(device)
        for name, attribute in attributes.items()
    }
    return digest(to_kernel(kernel_form(*_SHAPE, spec), packed))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of tensors with their names, dtypes and shapes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the matrix: words that differ, or the patterns of a float's type in turn."""
    numbers = torch.arange(math.prod(shape), dtype=torch.int64)
    if dtype == torch.int32:
        bits: Any = (numbers * _ODD) % _WORD
        return torch.where(bits >= _WORD // 2, bits - _WORD, bits).to(torch.int32).reshape(shape)
    first, count = _PATTERNS[dtype]
    return (first + numbers % count).to(_INTEGERS[dtype.itemsize]).view(dtype).reshape(shape)
