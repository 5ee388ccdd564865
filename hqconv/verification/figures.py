"""Compiled sums over a decoded matrix and its source.

Shape legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hqconv.conversion.quant_error import relative_error
from hqconv.jit import compiled_sums
from hqconv.layout_decoder.decode import DecodedStack
from hqconv.layout_decoder.numbers import Array
from hqconv.layout_decoder.values import decoded_rows, decoded_weights
from hqconv.quantization.quantize import ErrorSums
from hqconv.schemas.weight_schema import WeightSchema


@compiled_sums
def sum_groups(weights_NK, bits_NK, decoded_NK, num_groups, widened, row):  # type: ignore[no-untyped-def]
    """Float64 sums of (w - d)**2, w**2, w * d, d**2; the largest (w - d)**2 / w**2 of a group, its row and group.

    `weights_NK` is float32. If it has no rows, `bits_NK` are bfloat16 patterns (uint16), of which `widened` uint32
    [K] and `row`, the same memory as float32, hold one row at a time.
    """
    group_size = np.uint64(decoded_NK.shape[1] // num_groups)
    error, power, dot, decoded_power = 0.0, 0.0, 0.0, 0.0
    worst, worst_n, worst_g = 0.0, 0, 0
    for n in range(decoded_NK.shape[0]):
        weights = row
        if len(weights_NK):
            weights = weights_NK[n]
        else:
            for k in range(len(widened)):
                widened[k] = np.uint32(bits_NK[n, k]) << np.uint32(16)
        for g in range(num_groups):
            start = np.uint64(g) * group_size
            group_error, group_power, group_dot, group_decoded = 0.0, 0.0, 0.0, 0.0
            for k in range(group_size):
                weight, decoded = np.float64(weights[start + k]), np.float64(decoded_NK[n, start + k])
                group_error += (weight - decoded) * (weight - decoded)
                group_power += weight * weight
                group_dot += weight * decoded
                group_decoded += decoded * decoded
            error += group_error
            power += group_power
            dot += group_dot
            decoded_power += group_decoded
            if group_power > 0 and group_error / group_power > worst:
                worst, worst_n, worst_g = group_error / group_power, n, g
    return error, power, dot, decoded_power, worst, worst_n, worst_g


@dataclass
class Figures:
    """Float64 sums over one matrix: w the source, d the decoded weights; without a source the first four are 0.

    error (w - d)**2, power w**2, dot w * d, worst (relative error of a group, row, group); decoded_power d**2.
    quantizer: error sums as the conversion measures them. is_folded: exponents were fused into the codes afterwards.
    num_misread: codes that the kernels are known to misread.
    """

    error: float = 0.0
    power: float = 0.0
    dot: float = 0.0
    worst: tuple[float, int, int] = (0.0, 0, 0)
    decoded_power: float = 0.0
    num_zero_scales: int = 0
    num_scales: int = 0
    num_flushed: int = 0
    num_misread: int = 0
    has_source: bool = False
    quantizer: ErrorSums | None = None
    is_folded: bool = False

    def recorded_sums(self) -> tuple[float, float]:
        """Error and power as the manifest records them: before the layout flushes the smallest e8m0 scales."""
        if (self.num_flushed or self.is_folded) and self.quantizer:
            return self.quantizer.error, self.quantizer.power
        return self.error, self.power

    def recorded_error(self) -> float:
        """Relative error as the manifest records it."""
        return relative_error(*self.recorded_sums())


def measure(
    matrix: DecodedStack,
    source: torch.Tensor | None,
    schema: WeightSchema,
    param_dtype: str,
    misread: int | None = None,
) -> Figures:
    """Sum up the error of one expert's matrix (E = 1, on the CPU) against `source` [N, K], some rows at a time.

    misread: code whose occurrences are counted.
    """
    flushed = 0 if matrix.flushed is None else int(matrix.flushed.sum())
    zero_scales = int((matrix.scale_value == 0).sum())
    figures = Figures(num_zero_scales=zero_scales, num_scales=matrix.scale.numel(), num_flushed=flushed)
    figures.num_misread = 0 if misread is None else int(np.count_nonzero(matrix.codes.numpy() == misread))
    num_groups = matrix.codes.size(2) // (schema.weight_scale_group_size or matrix.codes.size(2))
    sums: list[tuple[float, ...]] = []
    for begin, decoded in decoded_rows(matrix, schema, param_dtype):
        if source is None:
            sums.append((0.0, 0.0, 0.0, _sums(None, decoded, num_groups)[3]))
            continue
        *of_rows, ratio, row, group = _sums(source[begin : begin + len(decoded)], decoded, num_groups)
        sums.append(tuple(of_rows))
        if math.sqrt(ratio) > figures.worst[0]:
            figures.worst = math.sqrt(ratio), begin + row, group
    totals = [math.fsum(column) for column in zip(*sums, strict=True)]
    figures.error, figures.power, figures.dot, figures.decoded_power = totals
    figures.has_source = source is not None
    return figures


def _sums(source: torch.Tensor | None, decoded: Array, num_groups: int) -> tuple[Any, ...]:
    """Run `sum_groups` on some rows; without a source on the decoded rows against themselves."""
    none, bits = np.empty((0, 0), np.float32), np.empty((0, 0), np.uint16)
    widened = np.empty(decoded.shape[1], np.uint32)
    if source is not None and source.dtype == torch.bfloat16:
        weights, bits = none, source.contiguous().view(torch.int16).numpy().view(np.uint16)
    else:
        weights = decoded if source is None else source.float().contiguous().numpy()
    sums: tuple[Any, ...] = sum_groups(weights, bits, decoded, num_groups, widened, widened.view(np.float32))
    return sums


def measure_stack(
    stack: DecodedStack, source: torch.Tensor | None, schema: WeightSchema, param_dtype: str, misread: int | None = None
) -> torch.Tensor:
    """Launch `measure` for stacks [E, N, K] on one device without waiting; `figures_of` reads a row of the result.

    Returns float64 [E, 9]: error, power, dot, decoded power, largest ratio of a group's error and power, its index,
    number of scales that are zero, number of flushed ones, number of codes `misread`.
    """
    decoded = decoded_weights(stack, schema, param_dtype).double()
    num_experts, _, num_columns = decoded.shape
    zeros = decoded.new_zeros(num_experts)
    columns = [zeros, zeros, zeros, decoded.square().flatten(1).sum(1), zeros, zeros]
    if source is not None:
        weights = source.double()
        columns[2] = (weights * decoded).flatten(1).sum(1)
        group = schema.weight_scale_group_size or num_columns
        error = (weights - decoded).square().view(num_experts, -1, group).sum(2)
        power = weights.square().view(num_experts, -1, group).sum(2)
        columns[0], columns[1] = error.sum(1), power.sum(1)
        ratio = torch.where(power > 0, error / power, 0.0)
        columns[4], index = ratio.max(1)
        columns[5] = index.double()
    flushed = zeros if stack.flushed is None else stack.flushed.flatten(1).sum(1).double()
    found = zeros if misread is None else (stack.codes == misread).flatten(1).sum(1).double()
    columns += [(stack.scale_value == 0).flatten(1).sum(1).double(), flushed, found]
    return torch.stack(columns, 1)


def figures_of(
    row: Sequence[float], num_scales: int, num_groups: int, *, has_source: bool, quantizer: ErrorSums | None
) -> Figures:
    """Return one expert's figures from its row of `measure_stack`; `num_groups`: groups in a row of the matrix."""
    error, power, dot, decoded_power, ratio, index, *counts = row
    num_zero, num_flushed, num_misread = map(int, counts)
    worst = (math.sqrt(ratio), *divmod(int(index), num_groups)) if ratio > 0 else (0.0, 0, 0)
    figures = Figures(error, power, dot, worst, decoded_power, num_zero, num_scales, num_flushed, num_misread)
    figures.has_source, figures.quantizer = has_source, quantizer
    return figures


def summarize(of_role: Sequence[Figures], *, as_recorded: bool = False) -> dict[str, Any]:
    """JSON document of one projection's figures over all experts; None for values that are not finite.

    relative_error: Frobenius norm of w - d over that of w; sqnr_db: 10 log10 of power over error; cosine between
    w and d; the worst expert, and the worst scale group (or row) of all.
    """
    document: dict[str, Any] = {
        "zero_scale_share": sum(f.num_zero_scales for f in of_role) / sum(f.num_scales for f in of_role)
    }
    if num_flushed := sum(f.num_flushed for f in of_role):
        document["num_flushed_scales"] = num_flushed
    if num_misread := sum(f.num_misread for f in of_role):
        document["num_misread_codes"] = num_misread
    decoded = math.fsum(f.decoded_power for f in of_role)
    if not all(f.has_source for f in of_role):
        return {"is_finite": math.isfinite(decoded), **document}
    sums = [f.recorded_sums() if as_recorded else (f.error, f.power) for f in of_role]
    error, power = (math.fsum(s[i] for s in sums) for i in (0, 1))
    each = [relative_error(*s) for s in sums]
    worst_expert = max(range(len(each)), key=each.__getitem__)
    group_expert = max(range(len(each)), key=lambda e: of_role[e].worst[0])
    relative, row, group = of_role[group_expert].worst
    norm = math.sqrt(power * decoded) if decoded >= 0 else math.nan
    return {
        "relative_error": _number(relative_error(error, power)),
        "sqnr_db": _number(10 * math.log10(power / error)) if error > 0 < power / error else None,
        "cosine": _number(math.fsum(f.dot for f in of_role) / norm) if norm > 0 else None,
        "worst_expert": worst_expert,
        "worst_relative_error": _number(each[worst_expert]),
        "worst_group": {"expert": group_expert, "row": row, "group": group, "relative_error": relative},
        **document,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
