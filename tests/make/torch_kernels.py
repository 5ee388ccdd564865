"""The kernels of `triton_compensation` by torch's operations: their reference, on any device.

Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K, T tiles, U units of decision.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from hqconv.quantization.gptq import inverse_of

from hqconv.humming_ops.runtime import humming
from hqconv.quantization import torch_ops
from hqconv.quantization.group_scales import GroupScales
from hqconv.quantization.quantized import TileFactors
from hqconv.schemas.weight_schema import WeightSchema

LAUNCHING = nullcontext()


def code_values(schema: WeightSchema, device: torch.device) -> None:
    """No table: codes are decoded by Humming's operations."""


def tile_losses(
    stack: torch.Tensor,
    scales: GroupScales,
    words: torch.Tensor | None,
    table: None,
    schema: WeightSchema,
    factors: TileFactors,
) -> torch.Tensor:
    """Loss of each tile of each row, float64 [E, N, T]: of the codes `words`, or of compensated ones."""
    return _in_tiles(stack, scales, words, schema, factors)[0]


def compensated_codes(
    stack: torch.Tensor,
    scales: GroupScales,
    changed: torch.Tensor,
    words: torch.Tensor,
    schema: WeightSchema,
    factors: TileFactors,
) -> torch.Tensor:
    """Int32 [E, N, K]: compensated codes in units that `changed` [E, N, U], of the others those packed in `words`."""
    new = _in_tiles(stack, scales, None, schema, factors)[1]
    num_columns, width = stack.size(2), factors.order.size(1) * (len(factors.order) // changed.size(2))
    mask = changed.repeat_interleave(width, dim=2)[..., :num_columns]
    flat = words.reshape(-1, words.size(-1)).contiguous()
    return torch.where(mask, new, humming().ops.unpack_weight(flat, schema.num_bits).view(stack.shape))


def _in_tiles(
    stack: torch.Tensor, scales: GroupScales, words: torch.Tensor | None, schema: WeightSchema, factors: TileFactors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [E, N, T] and codes [E, N, K]: all rows of a matrix at once, columns one after the other."""
    num_experts, num_rows, num_columns = stack.shape
    num_tiles, width = factors.order.shape
    group_size = num_columns // scales.scale.size(2)
    losses = torch.zeros(num_experts, num_rows, num_tiles, dtype=torch.float64, device=stack.device)
    codes = torch.zeros(stack.shape, dtype=torch.int32, device=stack.device)
    largest = torch.finfo(torch.float32).max
    for e in range(num_experts):
        stored = None
        if words is not None:
            stored = torch_ops.stored_numbers(words[e], schema)
        for t in range(num_tiles):
            correction = losses.new_zeros(num_rows, width)
            for j in range(min(width, num_columns - t * width)):
                k = t * width + int(factors.order[t, j])
                column = _of_column(scales, e, k // group_size, num_rows)
                weight = stack[e, :, k : k + 1].double()
                wanted = weight + correction[:, j : j + 1]
                if stored is None:
                    corrected = wanted.clamp(-largest, largest).float().unsqueeze(-1)
                    numbers, x = torch_ops.nearest_numbers(corrected, column, schema)
                    codes[e, :, k] = torch_ops.codes_of(numbers, x, schema).flatten()
                else:
                    numbers = stored[:, k : k + 1].unsqueeze(-1)
                value = torch_ops.decode(numbers, column)[..., 0].double()
                off = wanted - value
                losses[e, :, t] += ((off * off) * factors.penalty[t, j])[:, 0]
                correction += (weight - value) * factors.feedback[t, j]
    return losses, codes


class _FiniteScales(GroupScales):
    """Scales whose inverse is 0 where it would be infinite."""

    def inverse(self) -> torch.Tensor:
        return inverse_of(GroupScales(self.stored, self.scale, self.zero, self.second))


def _of_column(scales: GroupScales, expert: int, group: int, num_rows: int) -> GroupScales:
    """The scales of one group of each row, [N, 1]."""

    def of(values: torch.Tensor, column: int) -> torch.Tensor:
        one = values[expert, :, column : column + 1]
        return one.repeat_interleave(num_rows // len(one), 0)

    scale, zero, second = of(scales.scale, group), scales.zero, scales.second
    return _FiniteScales(
        scale, scale, None if zero is None else of(zero, group), None if second is None else of(second, 0)
    )
