"""Hadamard rotation of a matrix's columns, bit-equal to Humming's `process_input` for a GEMM's inputs.

Every run of b columns is multiplied by the Hadamard matrix in Sylvester's order over sqrt(b): symmetric, and its own
inverse. Rotated weights times rotated inputs equal the product without rotation.

Legend: N output rows, K input columns.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_CPU_NUMBERS = 1 << 18  # rotated at once, to stay in the cache
_CUDA_NUMBERS = 1 << 26


def rotate(matrices: torch.Tensor, block: int) -> torch.Tensor:
    """Rotate [..., K] in blocks of `block` columns, a power of two that divides K; the dtype and device stay.

    Sums and differences in float32, of columns 1, 2, 4 … apart, then one product, rounded once more to the dtype where
    that is narrower: Humming's order (process_input/hadamard.cuh), so that bits depend on nothing else. float64 is
    rotated in float64.
    """
    assert block > 1
    assert block & (block - 1) == 0
    assert matrices.size(-1) % block == 0, (matrices.shape, block)
    runs = matrices.reshape(-1, block)
    out = torch.empty(runs.shape, dtype=runs.dtype, device=runs.device)
    at_once = max(1, (_CUDA_NUMBERS if runs.is_cuda else _CPU_NUMBERS) // block)
    for begin in range(0, len(runs), at_once):
        part = slice(begin, begin + at_once)
        out[part] = _rotated(
            runs[part]
            .t()
            .to(torch.promote_types(runs.dtype, torch.float32), copy=True)
            .contiguous()
        ).t()
    return out.view(matrices.shape)


def _rotated(runs: torch.Tensor) -> torch.Tensor:
    """Rotate float [block, runs] along its first dimension, in place; runs side by side make long loops."""
    block, apart = len(runs), 1
    while apart < block:
        pairs = runs.view(block // (2 * apart), 2, apart, -1)
        low, high = pairs[:, 0], pairs[:, 1]
        total = low + high
        torch.sub(low, high, out=high)
        low.copy_(total)
        apart *= 2
    root = 1 / math.sqrt(block)
    return runs.mul_(root if runs.dtype == torch.float64 else float(np.float32(root)))
