"""Inverse rotation of weights and activations, by the definition: shares no code with the forward rotation."""

from __future__ import annotations

import functools
import math

import torch


def unrotated(values: torch.Tensor, block: int) -> torch.Tensor:
    """Columns [..., K] turned back in blocks of `block`, computed in float64, in the dtype of `values`; 0: as they are.

    The matrix is its own inverse, so this turns forth as well.
    """
    if not block:
        return values
    out = values.double().view(-1, block) @ _matrix(block, values.device)
    return out.view(values.shape).to(values.dtype)


@functools.lru_cache(maxsize=16)
def _matrix(block: int, device: torch.device) -> torch.Tensor:
    """Sylvester's Hadamard matrix over sqrt(block): negative where row and column share an odd number of bits."""
    signs = [[1 - 2 * ((row & column).bit_count() % 2) for column in range(block)] for row in range(block)]
    return torch.tensor(signs, dtype=torch.float64, device=device) / math.sqrt(block)
