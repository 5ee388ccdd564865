"""What quantizing one matrix gives: packed tensors, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hqconv.schemas.target import TargetSchema


@dataclass(frozen=True)
class Cost:
    """What a matrix lost by its encoding.

    `error`, `power`: float64 sums of (w - decoded)**2 and of w**2, in one folding order on every device.
    `num_exact`: of `num_groups` scale groups (per row), those without any error, where they were counted. `is_direct`:
    the source's codes and scales were kept, and nothing was measured.
    """

    error: float = 0.0
    power: float = 0.0
    num_exact: int = 0
    num_groups: int = 0
    is_direct: bool = False


@dataclass(frozen=True)
class Quantized:
    """One matrix in Humming's packed form, and what that cost.

    `tensors`: `weight` int32 [N, K * bits / 32], `weight_scale`, `zero_point`, `weight_scale_2` as
    `HummingWeightSchema.get_tensors_attrs` describes them without an expert dimension.
    """

    tensors: dict[str, torch.Tensor]
    cost: Cost
    is_finite: bool = True


def num_groups(shape: tuple[int, int], schema: TargetSchema) -> int:
    """Scale groups of a matrix [N, K], counted per row."""
    return shape[0] * (shape[1] // (schema.weight_scale_group_size or shape[1]))
