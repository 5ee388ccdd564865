"""How codes are chosen: round-to-nearest, or scales searched for the least squared error."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Quantizer:
    """`name` is rtn or mse; `importance`, of mse only: what each column's squared error counts, float32 [K] >= 0."""

    name: str = "rtn"
    importance: torch.Tensor | None = field(default=None, compare=False)


RTN, MSE = Quantizer(), Quantizer("mse")
