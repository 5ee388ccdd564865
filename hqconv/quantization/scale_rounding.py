"""Scales rounded to the parameter dtype, as a server does at load, and the error of the rounding.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from hqconv.cpu_loops import decoding
from hqconv.cpu_loops.arithmetic import fold_rows
from hqconv.cpu_loops.helper_threads import in_parts
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, code_table, dequantize, refuse, scale_values
from hqconv.quantization.deferred_checks import is_any
from hqconv.quantization.quantized import fold_sum
from hqconv.schemas.dtypes import torch_dtype_of

_ROWS = 64  # of a part, at least


@dataclass(frozen=True, eq=False)
class Rounded:
    """One matrix with rounded scales, and the error of the rounding, on its device; does not synchronize.

    sums: float64 [3]: the sums of (w - rounded)**2 and of w**2, both in the folding order of `fold_sum`, and the
    largest relative change of a scale.
    """

    coded: CodedMatrix
    sums: torch.Tensor


def round_to_param_dtype(coded: CodedMatrix, param_dtype: str, names: Mapping[str, str]) -> Rounded:
    """Return the same codes with scales in `param_dtype`, to the nearest, ties to even. `names`: part → tensor name.

    A scale changes by half a unit in the last place at most. Raises InputError naming the tensor for a scale that would
    be infinite, or changed and below the smallest normal number. Zero stays zero.
    """
    assert coded.scale_2 is None, "scales under a second scale have 8 bits: they are not rounded"
    assert coded.column_groups is None, "columns grouped by an index have no direct form"
    target = torch_dtype_of(param_dtype)
    exact = scale_values(coded.scale)
    kept = exact.to(target)
    limits = torch.finfo(target)
    change = (kept.double() - exact.double()).abs()
    is_lost = (change > 0) & ((exact.abs() < limits.tiny) | kept.isinf())
    if is_any(is_lost):
        first = tuple(int(i) for i in is_lost.nonzero()[0])
        other = "or " if param_dtype == "bfloat16" else "Use --dtype bfloat16, whose range is float32's, or "
        remedy = f"{other}name another schema: the weights are then quantized anew."
        refuse(
            "A scale is out of range: it cannot be rounded to the parameter dtype.",
            names.get("scale") or names.get("weight", ""),
            f"scales from {limits.tiny:.4g} to {limits.max:.4g}, or which {param_dtype} holds exactly",
            f"{exact[first].item():.4g} at {list(first)}",
            remedy[0].upper() + remedy[1:],
        )
    relative = torch.where(exact != 0, change / exact.double().abs(), 0.0).max()
    rounded = replace(coded, scale=kept)
    sums = _sums_of_tensors(coded, rounded) if coded.packed.is_cuda else _sums_of_rows(coded, rounded)
    return Rounded(rounded, torch.stack([*sums, relative]))


def _sums_of_tensors(coded: CodedMatrix, rounded: CodedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute error and power by torch: the same bits as `_sums_of_rows`."""
    values = dequantize(coded).double()
    difference = values - dequantize(rounded).double()
    return fold_sum(fold_sum(difference.square_())), fold_sum(fold_sum(values.square_()))


def _sums_of_rows(coded: CodedMatrix, rounded: CodedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute error and power on the CPU, a row at a time, without a whole decoded matrix."""
    num_rows, num_columns = coded.shape
    zero = torch.zeros(1, 1) if coded.zero_point is None else coded.zero_point.float()
    arrays = [
        _per_row(one, coded.group_n, num_rows) for one in (zero, scale_values(coded.scale), scale_values(rounded.scale))
    ]
    packed, table = (bit_codec.as_bytes(coded.packed).numpy(), code_table(coded.b_dtype, coded.zero_point is None))
    error_power = np.empty((2, num_rows))

    def of(rows: slice) -> None:
        of_rows = [one[rows] if len(one) == num_rows else one for one in arrays]
        size = coded.group_k or num_columns
        decoding.rounding_sums(packed[rows], coded.num_bits, table, *of_rows, size, error_power[:, rows])

    in_parts(of, num_rows, _ROWS)
    error, power = torch.from_numpy(fold_rows(error_power))
    return error, power


def _per_row(values: torch.Tensor, group_n: int, num_rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Repeat values [source rows, G] to a row for each row of the matrix, or one for all."""
    if values.size(0) not in (1, num_rows):
        values = values.repeat_interleave(group_n, 0)[:num_rows]
    rows: np.ndarray[tuple[int, int], np.dtype[np.float32]] = values.contiguous().numpy()
    return rows
