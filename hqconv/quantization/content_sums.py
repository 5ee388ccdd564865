"""Content sums of packed and of copied tensors, with the same result on every device: see `schemas/sum_factors`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hqconv.cpu_loops.bit_fields import sum_rows
from hqconv.cpu_loops.helper_threads import in_parts
from hqconv.schemas.sum_factors import ROW_WORDS, factors, row_factors
from hqconv.schemas.weight_schema import WeightSchema

_WORD_BYTES = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_LEAST_WORDS = 1 << 20  # of one helper thread's part: some 0.1 ms
_COMPILED_ROWS = 16  # 1 MB of a copied tensor: with less, the loop would only be compiled for it
_SMALL_BYTES = 8 << 10  # of a copied tensor that is summed together with others: at most one row
_BATCH_BYTES = 256 << 10  # of such tensors together: a dozen temporary arrays of a few times this size
_LAST_WORD = np.array([-1, 0xFF, 0xFFFF, 0xFFFFFF], np.int32)  # the bits of a tensor's last word, by its bytes modulo 4


def expert_sums(
    projections: Mapping[str, Mapping[str, torch.Tensor]],
    schema: WeightSchema,
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
            sums.append(_stack_sums(_as_matrices(name, projections[role][name], schema)))
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
    values, columns = stack.contiguous().view(-1, num_columns).numpy(), factors("column", num_columns)
    sums = torch.empty(num_experts, num_rows, dtype=torch.int64)
    out = sums.view(-1).numpy()
    least_rows = -(-_LEAST_WORDS // max(1, num_columns))
    in_parts(lambda part: sum_rows(values, columns, part.start, part.stop, out), len(values), least_rows)
    return sums


@functools.cache  # for ever: CUDA graphs hold their addresses
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
    columns = factors("column", ROW_WORDS)
    first_row, first_column = divmod(start // _WORD_BYTES, ROW_WORDS)
    rows = row_factors(first_row + words.size // ROW_WORDS + 2)[first_row:]
    # The rest of a row that is begun, whole rows, and the beginning of a last one.
    head = min(words.size, ROW_WORDS - first_column) if first_column else 0
    num_rows, tail = divmod(words.size - head, ROW_WORDS)
    total = _dot(words[:head], columns[first_column : first_column + head]) * int(rows[0])
    rows = rows[1 if head else 0 :]
    of_rows = _dots(words[head : words.size - tail].reshape(num_rows, ROW_WORDS), columns)
    total += int((of_rows * rows[:num_rows]).sum())  # numpy's integers are modulo 2**64
    return total + _dot(words[words.size - tail :], columns[:tail]) * int(rows[num_rows])


def sums_of_parts(data: NDArray[np.uint8], parts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the content sum of each part of a copied tensor, as `sum_of_bytes`; the parts lie in `data` one by one.

    parts: start in its tensor and number of bytes of each. Small tensors are summed together: numpy's calls would take
    more time than their bytes.
    """
    starts, sizes = np.array(parts, np.int64).reshape(-1, 2).T
    ends = np.cumsum(sizes)
    assert not len(ends) or ends[-1] <= data.size, (ends[-1], data.size)
    is_small = (starts == 0) & (sizes <= _SMALL_BYTES) & (sizes > 0)
    sums = np.zeros(len(sizes), np.int64)
    small = np.flatnonzero(is_small)
    cuts = np.flatnonzero(np.diff((ends - sizes)[small] // _BATCH_BYTES)) + 1
    for chosen in np.split(small, cuts) if len(small) else ():
        sums[chosen] = _sums_of_small(data, (ends - sizes)[chosen], sizes[chosen])
    totals: list[int] = sums.tolist()
    for index in np.flatnonzero(~is_small).tolist():
        end, size = int(ends[index]), int(sizes[index])
        totals[index] = sum_of_bytes(data[end - size : end], int(starts[index]))
    return totals


def _sums_of_small(data: NDArray[np.uint8], begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the content sums of whole tensors of at most one row, near to each other: int64 [T], modulo 2**64.

    begins, sizes: positions in `data`, in order, and numbers of bytes; none is empty.
    """
    first, end = int(begins[0]), int(begins[-1] + sizes[-1])
    near = np.zeros(end - first + _WORD_BYTES, np.uint8)
    near[: end - first] = data[first:end]
    words_at = np.ndarray((end - first,), "<i4", near, strides=(1,))  # the word that begins at each byte
    num_words = -(-sizes // _WORD_BYTES)
    first_words = np.cumsum(num_words) - num_words
    columns = np.arange(num_words.sum()) - np.repeat(first_words, num_words)
    words = words_at[np.repeat(begins - first, num_words) + _WORD_BYTES * columns]
    words[first_words + num_words - 1] &= _LAST_WORD[sizes % _WORD_BYTES]
    products = words * factors("column", ROW_WORDS).astype(np.int64)[columns]
    sums: NDArray[np.int64] = np.add.reduceat(products, first_words) * np.int64(row_factors(1)[0])
    return sums


def _dots(rows: NDArray[np.int32], columns: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the sum of each row's words times their columns' factors, int64 [R]; by a compiled loop for many rows."""
    if len(rows) >= _COMPILED_ROWS:
        found = np.empty(len(rows), np.int64)
        sum_rows(rows, columns, 0, len(rows), found)
        return found
    sums: NDArray[np.int64] = np.einsum("rk,k->r", rows, columns, dtype=np.int64, casting="unsafe")
    return sums


def _dot(words: NDArray[np.int32], factors_: NDArray[np.int32]) -> int:
    return int(_dots(words[None], factors_)[0])
