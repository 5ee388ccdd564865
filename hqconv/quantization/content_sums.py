"""Content sums of packed and of copied tensors, with the same result on every device: see `schemas/sum_factors`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hqconv.cpu_loops.codes import sum_rows, sum_words
from hqconv.cpu_loops.helper_threads import in_parts
from hqconv.schemas.sum_factors import ROW_WORDS, factors, row_factors
from hqconv.schemas.weight_schema import LayerSchema, WeightSchema

_WORD_BYTES = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_LEAST_WORDS = 1 << 20  # of one helper thread's part: some 0.1 ms


def expert_sums(
    projections: Mapping[str, Mapping[str, torch.Tensor]],
    schema: LayerSchema,
    row_sums: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the content sums of each expert's tensors, int64 [T, E] on their device, in the order of `sum_names`.

    projections: role → packed tensors [E, …] as `QuantizedStack.tensors`; row_sums: role → `QuantizedStack.row_sums`,
    of the weights that are not there. Does not synchronize with CUDA.
    """
    sums = []
    for role, name in sum_names(projections):
        if name == "weight" and row_sums and role in row_sums:
            sums.append(_sum_of_rows(row_sums[role]))
        else:
            sums.append(_stack_sums(_as_matrices(name, projections[role][name], schema.of(role))))
    return torch.stack(sums)


def sum_names(projections: Mapping[str, Mapping[str, torch.Tensor]]) -> list[tuple[str, str]]:
    """Return the role and name of each tensor."""
    return [(role, name) for role, tensors in projections.items() for name in tensors]


def _as_matrices(name: str, tensor: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """View a tensor as matrices of integers [E, R, W]; packed zero points with the direction of their words as W."""
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    if name == "zero_point" and not schema.is_fp_zero_point:
        bits = bits.transpose(1, 2)
    return bits.reshape(*bits.shape, *(1,) * (3 - bits.ndim))


def _stack_sums(stack: torch.Tensor) -> torch.Tensor:
    of_rows = compiled_row_sums(stack) if stack.device.type == "cpu" else row_sums(stack)
    return _sum_of_rows(of_rows)


def _sum_of_rows(of_rows: torch.Tensor) -> torch.Tensor:
    return (of_rows * _on_device("row", of_rows.size(1), of_rows.device)).sum(1)


def row_sums(stack: torch.Tensor) -> torch.Tensor:
    """Return the sum of values times factors of each row of [E, R, W], int64 [E, R], by torch's operations."""
    return (stack * _on_device("column", stack.size(2), stack.device)).sum(2)


def compiled_row_sums(stack: torch.Tensor) -> torch.Tensor:
    """Return `row_sums` on the CPU, by a compiled loop in the thread's helper threads."""
    num_experts, num_rows, num_columns = stack.shape
    values, columns = (
        stack.contiguous().view(-1, num_columns).numpy(),
        factors("column", num_columns),
    )
    sums = torch.empty(num_experts, num_rows, dtype=torch.int64)
    out = sums.view(-1).numpy()
    least_rows = -(-_LEAST_WORDS // max(1, num_columns))
    in_parts(
        lambda part: sum_rows(values, columns, part.start, part.stop, out), len(values), least_rows
    )
    return sums


@functools.cache
def _on_device(axis: str, count: int, device: torch.device) -> torch.Tensor:
    """Return the factors as int64 [count] on a device."""
    return torch.from_numpy(factors(axis, count).astype("int64")).to(device)


def sum_of_bytes(data: NDArray[np.uint8], start: int) -> int:
    """Return the content sum of the bytes of a copied tensor from byte `start` on; sums of its parts are added."""
    before = start % _WORD_BYTES
    if before or data.size % _WORD_BYTES or data.ctypes.data % _WORD_BYTES:
        words = np.zeros(-(-(before + data.size) // _WORD_BYTES), np.int32)
        words.view(np.uint8)[before : before + data.size] = data
    else:
        words = data.view(np.int32)
    first_word = start // _WORD_BYTES
    rows = row_factors((first_word + words.size) // ROW_WORDS + 1)
    return int(sum_words(words, first_word, factors("column", ROW_WORDS), rows))


def sums_of_parts(data: NDArray[np.uint8], parts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the content sum of each part of a copied tensor, as `sum_of_bytes`; the parts lie in `data` one by one.

    parts: start in its tensor and number of bytes of each.
    """
    sums, begin = [], 0
    for start, size in parts:
        sums.append(sum_of_bytes(data[begin : begin + size], start))
        begin += size
    return sums
