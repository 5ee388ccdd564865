"""Results of quantization: packed tensors and their error sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hqconv.schemas.weight_schema import WeightSchema


@dataclass(frozen=True, eq=False)
class CodeSink:
    """Memory in the form that a kernel layout gives a stack's codes, to be filled while they are in the CPU's cache.

    panel_rows: rows of one matrix that are stored at once; they divide its rows. store: compiled function
    store(panel, expert, row, arrays) that puts the packed codes of rows `row` to `row` + panel_rows of an expert,
    uint8 [panel_rows, K * bits / 8], where they belong. arrays: what `store` writes to, and reads.
    """

    panel_rows: int
    store: Callable[..., None]
    arrays: tuple[np.ndarray[Any, Any], ...]


@dataclass(frozen=True)
class ErrorSums:
    """Error of an encoded matrix.

    error, power: float64 sums of (w - decoded)**2 and of w**2, in one folding order on every device.
    num_exact: scale groups without any error, of `num_groups` (per row), if they were counted. is_direct: the
    source's codes were kept without a measurement. scale_change: for kept codes with rounded scales (and a measured
    error), the largest relative change of a scale.
    """

    error: float = 0.0
    power: float = 0.0
    num_exact: int = 0
    num_groups: int = 0
    is_direct: bool = False
    scale_change: float | None = None

    @property
    def is_exact(self) -> bool:
        """True if the matrix has the codes and scales of the source."""
        return self.is_direct and self.scale_change is None

    @property
    def is_finite(self) -> bool:
        """True if the source's weights are finite."""
        return math.isfinite(self.power)


@dataclass(frozen=True)
class QuantizedStack:
    """E matrices of one projection in Humming's packed form, and their errors, on one device.

    `tensors`: `weight` int32 [E, N, K * bits / 32], `weight_scale`, `zero_point`, `weight_scale_2` as
    `HummingWeightSchema.get_tensors_attrs` describes them; tensor-level scales are [E], all others [E, …].
    `error`, `power`: float64 [E]; `num_exact`: int64 [E]; `scale_change`: float64 [E]; as in `ErrorSums`, and so is
    `is_direct`. Where codes went into a `CodeSink`, `weight` is a `meta` tensor.
    """

    tensors: dict[str, torch.Tensor]
    error: torch.Tensor
    power: torch.Tensor
    num_exact: torch.Tensor
    num_groups: int = 0
    is_direct: bool = False
    scale_change: torch.Tensor | None = None

    def sums(self) -> torch.Tensor:
        """Return the input of `error_sums`: float64 [3, E] on the device."""
        last = self.num_exact.double() if self.scale_change is None else self.scale_change
        return torch.stack([self.error, self.power, last])

    def error_sums(self, sums: torch.Tensor | None = None) -> list[ErrorSums]:
        """Return each matrix's error sums, from `sums` if they are on the host; else wait for the device."""
        if self.is_direct and self.scale_change is None:
            return [ErrorSums(is_direct=True)] * len(self.error)
        each = (self.sums() if sums is None else sums).tolist()
        if self.is_direct:
            return [
                ErrorSums(error, power, is_direct=True, scale_change=change)
                for error, power, change in zip(*each, strict=True)
            ]
        return [
            ErrorSums(error, power, int(exact), self.num_groups)
            for error, power, exact in zip(*each, strict=True)
        ]


def stack_direct(
    matrices: Sequence[Mapping[str, torch.Tensor]], rounding: torch.Tensor | None = None
) -> QuantizedStack:
    """Stack the packed tensors of one projection of E experts whose codes were kept.

    rounding: where scales were rounded, float64 [3, E]: error, power and scale change of each.
    """
    tensors = stack_tensors(matrices)
    if rounding is not None:
        error, power, change = rounding
        exact = torch.zeros_like(error, dtype=torch.int64)
        return QuantizedStack(tensors, error, power, exact, is_direct=True, scale_change=change)
    nothing = torch.zeros(len(matrices), dtype=torch.float64, device=tensors["weight"].device)
    return QuantizedStack(tensors, nothing, nothing, nothing.long(), is_direct=True)


def stack_tensors(matrices: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack the packed tensors of one projection of E experts, as in `QuantizedStack`; of one expert as views."""

    def in_front(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_tensor_level = name.startswith("weight_scale") and tensor.shape == (1,)
        return tensor if is_tensor_level else tensor.unsqueeze(0)

    return join_stacks(
        [{name: in_front(name, tensor) for name, tensor in one.items()} for one in matrices]
    )


def join_stacks(stacks: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the tensors of several `QuantizedStack`s of one projection."""
    if len(stacks) == 1:
        return stacks[0]
    joined = {}
    for name, tensor in stacks[0].items():
        each = [one[name] for one in stacks]
        if tensor.dtype.itemsize == 1:  # torch joins not all 8-bit floats on the CPU
            joined[name] = torch.cat([one.view(torch.uint8) for one in each]).view(tensor.dtype)
        else:
            joined[name] = torch.cat(each)
    return joined


def num_groups(shape: tuple[int, int], schema: WeightSchema) -> int:
    """Return the number of scale groups of a matrix [N, K], counted per row."""
    return shape[0] * (shape[1] // (schema.weight_scale_group_size or shape[1]))


def fold_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension in the order of `arithmetic.fold_sum`; overwrites `terms`."""
    length = terms.size(-1)
    while length > 1:
        half = (length + 1) // 2
        terms[..., : length - half] += terms[..., half:length]
        length = half
    return terms[..., 0]
