"""What quantizing gives: packed tensors, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from hqconv.schemas.weight_schema import WeightSchema


@dataclass(frozen=True)
class ErrorSums:
    """What a matrix lost by its encoding.

    `error`, `power`: float64 sums of (w - decoded)**2 and of w**2, in one folding order on every device.
    `num_exact`: of `num_groups` scale groups (per row), those without any error, where they were counted. `is_direct`:
    the source's codes and scales were kept, and nothing was measured. `scale_change`: where codes were kept and scales
    rounded, and so measured, the largest relative change of a scale.
    """

    error: float = 0.0
    power: float = 0.0
    num_exact: int = 0
    num_groups: int = 0
    is_direct: bool = False
    scale_change: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the matrix is the source's, codes and scales."""
        return self.is_direct and self.scale_change is None

    @property
    def is_finite(self) -> bool:
        """Whether the source's weights are numbers."""
        return math.isfinite(self.power)


@dataclass(frozen=True)
class Quantized:
    """One matrix in Humming's packed form, and what that cost.

    `tensors`: `weight` int32 [N, K * bits / 32], `weight_scale`, `zero_point`, `weight_scale_2` as
    `HummingWeightSchema.get_tensors_attrs` describes them without an expert dimension.
    """

    tensors: dict[str, torch.Tensor]
    cost: ErrorSums


@dataclass(frozen=True)
class QuantizedStack:
    """E matrices of one projection in Humming's packed form, and what each cost, on one device.

    `tensors` as in `Quantized`, with the experts in front: tensor-level scales are [E], all others [E, …].
    `error`, `power`: float64 [E]; `num_exact`: int64 [E]; `scale_change`: float64 [E]; as in `ErrorSums`, and so is
    `is_direct`.
    """

    tensors: dict[str, torch.Tensor]
    error: torch.Tensor
    power: torch.Tensor
    num_exact: torch.Tensor
    num_groups: int = 0
    is_direct: bool = False
    scale_change: torch.Tensor | None = None

    def sums(self) -> torch.Tensor:
        """What `costs` is told from: float64 [3, E] on the device."""
        last = self.num_exact.double() if self.scale_change is None else self.scale_change
        return torch.stack([self.error, self.power, last])

    def costs(self, sums: torch.Tensor | None = None) -> list[ErrorSums]:
        """What each matrix lost, from `sums` where they are on the host already; else waits for the device."""
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

    def cut(self, count: int) -> list[QuantizedStack]:
        """So many equal runs of the matrices, views of them."""
        size = len(self.error) // count
        runs = [slice(number * size, (number + 1) * size) for number in range(count)]
        return [
            replace(
                self,
                tensors={name: tensor[run] for name, tensor in self.tensors.items()},
                error=self.error[run],
                power=self.power[run],
                num_exact=self.num_exact[run],
            )
            for run in runs
        ]

    def split(self) -> list[Quantized]:
        """Each matrix alone."""
        return [
            Quantized(
                {
                    name: tensor[e] if tensor.ndim > 1 else tensor[e : e + 1]
                    for name, tensor in self.tensors.items()
                },
                cost,
            )
            for e, cost in enumerate(self.costs())
        ]


def stack_direct(
    matrices: Sequence[Mapping[str, torch.Tensor]], rounding: torch.Tensor | None = None
) -> QuantizedStack:
    """Packed tensors of one projection of E experts whose codes were kept, and scales.

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
    """Packed tensors of one projection of E experts, joined as in `QuantizedStack`."""
    joined = {}
    for name, tensor in matrices[0].items():
        each = [one[name] for one in matrices]
        is_tensor_level = name.startswith("weight_scale") and tensor.shape == (1,)
        join = torch.cat if is_tensor_level else torch.stack
        if tensor.dtype.itemsize == 1:  # neither takes all 8-bit floats on the CPU
            joined[name] = join([one.view(torch.uint8) for one in each]).view(tensor.dtype)
        else:
            joined[name] = join(each)
    return joined


def num_groups(shape: tuple[int, int], schema: WeightSchema) -> int:
    """Scale groups of a matrix [N, K], counted per row."""
    return shape[0] * (shape[1] // (schema.weight_scale_group_size or shape[1]))


def fold_sum(terms: torch.Tensor) -> torch.Tensor:
    """`loops.fold_sum` over the last dimension; overwrites `terms`."""
    length = terms.size(-1)
    while length > 1:
        half = (length + 1) // 2
        terms[..., : length - half] += terms[..., half:length]
        length = half
    return terms[..., 0]


@dataclass(frozen=True)
class Quantizer:
    """`name` is rtn or mse; `importance`, of mse only: what each column's squared error counts, float32 [K] >= 0."""

    name: str = "rtn"
    importance: torch.Tensor | None = field(default=None, compare=False)


RTN, MSE = Quantizer(), Quantizer("mse")
