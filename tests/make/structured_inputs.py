"""Inputs of a layer with structure, as those of real models have: correlated columns, outlier channels."""

from __future__ import annotations

import numpy as np
import torch


def structured_inputs(num_tokens: int, num_columns: int, seed: int, first: int = 0) -> torch.Tensor:
    """Tokens `first`, `first` + 1 … of one distribution, float64 [T, K].

    Most of each column is a mixture of K / 8 hidden causes; sizes of columns are log-normal, every 64th ten times as
    large.
    """
    of_layer, tokens = np.random.default_rng(seed), np.random.default_rng((seed, first))
    mixture = of_layer.standard_normal((num_columns // 8, num_columns)) / np.sqrt(num_columns // 8)
    sizes = np.exp2(0.7 * of_layer.standard_normal(num_columns))
    sizes[::64] *= 10
    causes = tokens.standard_normal((num_tokens, num_columns // 8))
    own = 0.3 * tokens.standard_normal((num_tokens, num_columns))
    return torch.from_numpy((causes @ mixture + own) * sizes)


def as_tiles(products: torch.Tensor) -> torch.Tensor:
    """Diagonal tiles of products [K, K], as an importance file has them: float32 [ceil(K / 128), 128, 128]."""
    size = len(products)
    tiles = torch.zeros(-(-size // 128), 128, 128)
    for number, begin in enumerate(range(0, size, 128)):
        part = products[begin : begin + 128, begin : begin + 128]
        tiles[number, : len(part), : len(part)] = part.float()
    return tiles


def gaussian_rows(num_rows: int, num_columns: int, seed: int) -> torch.Tensor:
    """Gaussian weights, bfloat16 [N, K]; rows of all sizes in an octave."""
    random = np.random.default_rng(seed)
    sizes = 0.02 * np.exp2(random.random((num_rows, 1)))
    return torch.from_numpy(random.standard_normal((num_rows, num_columns)) * sizes).bfloat16()
