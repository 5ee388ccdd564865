"""Error figures of decoded matrices against their source, and the comparison with those that the manifest records.

Legend: E experts, N rows, K columns, G groups along K.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hqconv.artifact.manifest import ProjectionError
from hqconv.artifact.reader import Artifact
from hqconv.conversion.encode_batch import projection_errors, relative_error
from hqconv.jit import compiled_sums
from hqconv.layout_decoder.codes import Array, has_loops
from hqconv.layout_decoder.decode import DecodedStack, decoded_rows, decoded_weights
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.layer_encoding import quantizer_version
from hqconv.quantization.quantize import ErrorSums
from hqconv.schemas.artifact_names import MANIFEST
from hqconv.schemas.options import MSE
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.verification.result import CheckResult, compare_dicts
from hqconv.version import __version__

_RELATIVE_TOLERANCE = 1e-9  # of error figures: sums of the same float64 terms in another order
_NOT_MEASURED = "The recorded error is not the measured one."


@compiled_sums
def sum_groups(weights_NK, bits_NK, decoded_NK, num_groups, widened, row):  # type: ignore[no-untyped-def]
    """Float64 sums of (w - d)**2, w**2, w * d, d**2; the largest (w - d)**2 / w**2 of a group, its row and group.

    `weights_NK` is float32. If it has no rows, `bits_NK` are bfloat16 patterns (uint16), of which `widened` uint32
    [K] and `row`, the same memory as float32, hold one row at a time.
    """
    group_size = np.uint64(decoded_NK.shape[1] // num_groups)
    error = 0.0
    power = 0.0
    dot = 0.0
    decoded_power = 0.0
    worst = 0.0
    worst_n = 0
    worst_g = 0
    for n in range(decoded_NK.shape[0]):
        weights = row
        if len(weights_NK):
            weights = weights_NK[n]
        else:
            for k in range(len(widened)):
                widened[k] = np.uint32(bits_NK[n, k]) << np.uint32(16)
        for g in range(num_groups):
            start = np.uint64(g) * group_size
            group_error = 0.0
            group_power = 0.0
            group_dot = 0.0
            group_decoded = 0.0
            for k in range(group_size):
                weight = np.float64(weights[start + k])
                decoded = np.float64(decoded_NK[n, start + k])
                group_error += (weight - decoded) * (weight - decoded)
                group_power += weight * weight
                group_dot += weight * decoded
                group_decoded += decoded * decoded
            error += group_error
            power += group_power
            dot += group_dot
            decoded_power += group_decoded
            if group_power > 0 and group_error / group_power > worst:
                worst = group_error / group_power
                worst_n = n
                worst_g = g
    return error, power, dot, decoded_power, worst, worst_n, worst_g


@dataclass
class Figures:
    """Float64 sums over one matrix: w the source, d the decoded weights; without a source the first four are 0.

    error (w - d)**2, power w**2, dot w * d, worst (relative error of a group, row, group); decoded_power d**2.
    quantizer: error sums as the conversion measures them. is_folded: exponents were fused into the codes afterwards.
    num_misread: codes that the kernels are known to misread.
    """

    error: float
    power: float
    dot: float
    worst: tuple[float, int, int]
    decoded_power: float
    num_zero_scales: int
    num_scales: int
    num_flushed: int
    num_misread: int
    has_source: bool
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


NUM_FIGURES = 9  # of a row of `measure`

# Bounds of calibrated matrices. Measured: docs/quality.md.
_FURTHER = 5.0  # a matrix's tangent, of that of round-to-nearest
_QUARTILE = 2.5  # the lower quartile of its columns' tangents, of those of round-to-nearest
_ROW = (16.0, 4.0)  # a row's tangent: of its matrix's, at most
_RUN = (4.0, 4.0)  # the same of a run of columns
_RUN_COLUMNS = 32
_LEAST_TANGENT = 0.004  # that counts as one of round-to-nearest, whose error may be zero
_CHANCE = 4.0  # standard deviations of a cosine
_GAIN = (6.0, 0.002, 0.64)  # logarithm of the gain: of the squared tangent, beside it, at most
_NEARER = 1.1  # to scales of other rows or groups, by squares
_SHIFTS = ((1, 0), (-1, 0), (1, 1), (-1, 1))  # of scales by rows or groups: number, axis
_SKETCH = (8, 256)  # rows and columns that tell one expert's matrix from another's


def measure(
    stack: DecodedStack,
    source: torch.Tensor | None,
    schema: WeightSchema,
    param_dtype: str,
    misread: int | None = None,
) -> torch.Tensor:
    """Sum up the errors of matrices against `source` [E, N, K]; on a GPU without waiting.

    Returns float64 [E, NUM_FIGURES]: error, power, dot, decoded power, largest ratio of a group's error and power, its
    index, number of scales that are zero, number of flushed ones, number of codes `misread`.
    """
    num_experts, _, num_columns = stack.codes.shape
    num_groups = num_columns // (schema.weight_scale_group_size or num_columns)
    if has_loops(stack.codes.device):
        rows = [
            _sums_of_expert(stack, source, schema, param_dtype, num_groups, e)
            for e in range(num_experts)
        ]
        sums = torch.tensor(rows, dtype=torch.float64)
    else:
        sums = _sums_of_stack(stack, source, schema, param_dtype, num_groups)
    zeros = sums.new_zeros(num_experts)
    flushed = zeros if stack.flushed is None else stack.flushed.flatten(1).sum(1).double()
    found = zeros if misread is None else (stack.codes == misread).flatten(1).sum(1).double()
    counts = torch.stack([(stack.scale_value == 0).flatten(1).sum(1).double(), flushed, found], 1)
    return torch.cat([sums, counts], 1)


def _sums_of_expert(
    stack: DecodedStack,
    source: torch.Tensor | None,
    schema: WeightSchema,
    param_dtype: str,
    num_groups: int,
    expert: int,
) -> list[float]:
    """The first six figures of one expert on the CPU, by compiled loops, some rows at a time."""
    sums: list[Sequence[float]] = []
    worst = 0.0
    index = 0
    for begin, decoded in decoded_rows(stack, schema, param_dtype, expert):
        if source is None:
            sums.append((0.0, 0.0, 0.0, _sums(None, decoded, num_groups)[3]))
            continue
        *of_rows, ratio, row, group = _sums(
            source[expert, begin : begin + len(decoded)], decoded, num_groups
        )
        sums.append(of_rows)
        if ratio > worst:
            worst = ratio
            index = (begin + row) * num_groups + group
    return [*(math.fsum(column) for column in zip(*sums, strict=True)), worst, index]


def _sums(source: torch.Tensor | None, decoded: Array, num_groups: int) -> tuple[Any, ...]:
    """Run `sum_groups` on some rows; without a source on the decoded rows against themselves."""
    none = np.empty((0, 0), np.float32)
    bits = np.empty((0, 0), np.uint16)
    widened = np.empty(decoded.shape[1], np.uint32)
    if source is not None and source.dtype == torch.bfloat16:
        weights = none
        bits = source.contiguous().view(torch.int16).numpy().view(np.uint16)
    else:
        weights = decoded if source is None else source.float().contiguous().numpy()
    sums: tuple[Any, ...] = sum_groups(
        weights, bits, decoded, num_groups, widened, widened.view(np.float32)
    )
    return sums


def _sums_of_stack(
    stack: DecodedStack,
    source: torch.Tensor | None,
    schema: WeightSchema,
    param_dtype: str,
    num_groups: int,
) -> torch.Tensor:
    """The first six figures of all experts, float64 [E, 6], by torch."""
    decoded = decoded_weights(stack, schema, param_dtype).double()
    num_experts = len(decoded)
    zeros = decoded.new_zeros(num_experts)
    columns = [zeros, zeros, zeros, decoded.square().flatten(1).sum(1), zeros, zeros]
    if source is not None:
        weights = source.double()
        columns[2] = (weights * decoded).flatten(1).sum(1)
        size = decoded.size(2) // num_groups
        error = (weights - decoded).square().view(num_experts, -1, size).sum(2)
        power = weights.square().view(num_experts, -1, size).sum(2)
        columns[0] = error.sum(1)
        columns[1] = power.sum(1)
        columns[4], index = torch.where(power > 0, error / power, 0.0).max(1)
        columns[5] = index.double()
    return torch.stack(columns, 1)


@dataclass(frozen=True, eq=False)
class LineSums:
    """Sums of w**2, d**2 and w * d over each row and each column, float64 [..., N, 3] and [..., K, 3]."""

    rows: Array
    columns: Array


def line_sums(weights: torch.Tensor, decoded: torch.Tensor) -> LineSums:
    """Sum up products of matrices [..., N, K]."""
    w = weights.double()
    d = decoded.double()
    products = [w.square(), d.square(), w * d]
    rows, columns = (torch.stack([p.sum(axis) for p in products], -1) for axis in (-1, -2))
    return LineSums(rows.cpu().numpy(), columns.cpu().numpy())


def sums_and_sketch(
    stack: DecodedStack, source: torch.Tensor, schema: WeightSchema, param_dtype: str
) -> tuple[list[LineSums], torch.Tensor]:
    """Sums of each expert's lines, and some of its decoded weights, the sketch, [E, n]."""
    num_experts, num_rows, _ = stack.codes.shape
    if not has_loops(stack.codes.device):
        decoded = decoded_weights(stack, schema, param_dtype)
        sums = line_sums(source, decoded)
        return [*map(LineSums, sums.rows, sums.columns)], sketch(decoded)
    each = []
    sketches = []
    chosen = _sketched_rows(num_rows)
    for expert in range(num_experts):
        parts = []
        rows = []
        for begin, values in decoded_rows(stack, schema, param_dtype, expert):
            decoded = torch.from_numpy(values)
            parts.append(line_sums(source[expert, begin : begin + len(values)], decoded))
            rows += [
                decoded[row - begin, : _SKETCH[1]].clone()
                for row in chosen
                if 0 <= row - begin < len(values)
            ]
        columns = np.sum([part.columns for part in parts], 0)
        each.append(LineSums(np.concatenate([part.rows for part in parts]), columns))
        sketches.append(torch.cat(rows))
    return each, torch.stack(sketches)


def _sketched_rows(num_rows: int) -> list[int]:
    return sorted({int(row) for row in np.linspace(0, num_rows - 1, _SKETCH[0])})


def sketch(weights: torch.Tensor) -> torch.Tensor:
    """Return some weights of each matrix [E, N, K], float32 [E, n]."""
    return weights[:, _sketched_rows(weights.size(1)), : _SKETCH[1]].float().flatten(1)


def tangents(sums: Array) -> Array:
    """Tangent of the angle between w and d, of sums [..., 3] of w**2, d**2, w * d; 0 if both are zero."""
    power, decoded, dot = np.moveaxis(sums, -1, 0)
    with np.errstate(all="ignore"):
        found = np.sqrt(np.maximum(power * decoded - dot**2, 0)) / dot
    return np.where((power == 0) & (decoded == 0), 0.0, np.where(dot > 0, found, np.inf))


def strays(found: LineSums, rounded: LineSums) -> Iterator[tuple[str, str, str]]:
    """Yield what, expected, found where a calibrated matrix is not the source's, as far as a calibration may go.

    rounded: of round-to-nearest. Angles do not tell a scale: the gain does.
    """
    totals = found.rows.sum(0)
    of_rounding = rounded.rows.sum(0)
    tangent = float(tangents(totals))
    nearest = max(float(tangents(of_rounding)), _LEAST_TANGENT)
    cosine = 1 / math.hypot(1, tangent)
    least = 1 / math.hypot(1, _FURTHER * nearest)
    num_rows = len(found.rows)
    num_columns = len(found.columns)
    # How far a sound cosine may be smaller by chance, times the root of its count of numbers.
    chance = _CHANCE * (1 - cosine**2)
    what = "The calibrated weights are not the source's."
    if cosine < least - chance / math.sqrt(num_rows * num_columns):
        yield what, f"cosine >= {least:.4f}", f"{cosine:.4f}"
        return
    # A calibration leaves large errors to columns with small inputs; a fault is in all of them.
    ratios = tangents(found.columns) / np.maximum(tangents(rounded.columns), _LEAST_TANGENT)
    quartile = float(np.quantile(ratios, 0.25))
    if quartile > _QUARTILE:
        texts = f"errors up to {_QUARTILE:g} times round-to-nearest's", f"{quartile:.2f} times"
        yield what, f"{texts[0]} in a quarter of the columns", texts[1]
        return
    if totals[2] > 0 < of_rounding[2]:
        gain = totals[2] / of_rounding[2]
        limit = min(_GAIN[0] * tangent**2 + _GAIN[1], _GAIN[2])
        if abs(math.log(gain)) > limit:
            texts = (
                f"within a factor of {math.exp(limit):.4f}",
                f"{gain:.4f} times round-to-nearest's",
            )
            yield "The calibrated weights are larger or smaller than the source's.", *texts
    begins = range(0, num_columns, _RUN_COLUMNS)
    runs = [np.add.reduceat(sums.columns, begins) for sums in (found, rounded)]
    for name, (lines, of_rounded), (factor, most), num_values in (
        ("row", (found.rows, rounded.rows), _ROW, num_columns),
        (f"run of {_RUN_COLUMNS} columns", runs, _RUN, num_rows * _RUN_COLUMNS),
    ):
        own = tangents(lines)
        limits = np.maximum(max(tangent, nearest), tangents(of_rounded))
        limits = np.minimum(factor * limits, np.maximum(most, limits))
        least_cosines = 1 / np.hypot(1, limits) - chance / math.sqrt(num_values)
        far = 1 / np.hypot(1, own) < least_cosines
        if far.any():
            first = int(far.argmax())
            yield (
                f"{name.split()[0].capitalize()}s of the calibrated weights are not the source's.",
                f"cosine >= {least_cosines[first]:.4f}",
                f"{1 / math.hypot(1, own[first]):.4f} in {name} {first}; {int(far.sum())} of {len(far)}",
            )


def strays_of_scales(found: torch.Tensor, rounded: torch.Tensor) -> Iterator[tuple[str, str, str]]:
    """Yield what, expected, found where scales [N, G] are nearer to those of the next or last row or group.

    rounded: of round-to-nearest. Compared by the mean square of their logarithms' differences.
    """
    if min(found.shape) < 2 or not bool((found * rounded).all()):
        return
    ours, theirs = (scale.double().abs().log2() for scale in (found, rounded))
    ours = ours - (ours - theirs).mean()
    own = float((ours - theirs).square().mean())
    shifted = [float((ours - theirs.roll(*shift)).square().mean()) for shift in _SHIFTS]
    least = min(shifted)
    if own > (_NEARER + _CHANCE / math.sqrt(found.numel())) * least:
        number, axis = _SHIFTS[shifted.index(least)]
        line = ("row", "group")[axis]
        yield (
            "The calibrated weights have scales of other rows or groups.",
            f"nearest to round-to-nearest's of their own {line}",
            f"nearer to those of the {'last' if number > 0 else 'next'} one",
        )


def figures_of(
    row: Sequence[float], stack: DecodedStack, schema: WeightSchema, *, has_source: bool
) -> Figures:
    """Return one expert's figures from its row of `measure`."""
    error, power, dot, decoded_power, ratio, index, *counts = row
    num_columns = stack.codes.size(2)
    num_groups = num_columns // (schema.weight_scale_group_size or num_columns)
    worst = (math.sqrt(ratio), *divmod(int(index), num_groups)) if ratio > 0 else (0.0, 0, 0)
    num_zero, num_flushed, num_misread = map(int, counts)
    num_scales = stack.scale[0].numel()
    return Figures(
        error,
        power,
        dot,
        worst,
        decoded_power,
        num_zero,
        num_scales,
        num_flushed,
        num_misread,
        has_source=has_source,
    )


def summarize(of_role: Sequence[Figures], *, as_recorded: bool = False) -> dict[str, Any]:
    """JSON document of one projection's figures over all experts; None for values that are not finite.

    relative_error: Frobenius norm of w - d over that of w; sqnr_db: 10 log10 of power over error; cosine between
    w and d; the worst expert, and the worst scale group (or row) of all.
    """
    document = {
        "zero_scale_share": sum(f.num_zero_scales for f in of_role)
        / sum(f.num_scales for f in of_role)
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
        "worst_group": {
            "expert": group_expert,
            "row": row,
            "group": group,
            "relative_error": relative,
        },
        **document,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- figures that the manifest records -----------------------------------------------------------------------


def check_recorded(
    layer: MoeLayer,
    recorded: Mapping[str, ProjectionError],
    figures: Mapping[str, Sequence[Figures]],
    is_coded: bool,
    result: CheckResult,
) -> None:
    """Compare the manifest's error figures with those of the repeated conversion, and with the decoded weights'.

    Only of projections of which every expert was measured. A calibration is not repeated.
    """
    for role in sorted(recorded.keys() | figures.keys()):
        where = f"{MANIFEST}: {layer.name}: quantization_error: {role}"
        of_role = figures.get(role, [])
        error = recorded.get(role)
        if role not in figures or error is None:
            what = "The recorded errors are not those of the layer's projections."
            result.add(where, what, list(figures), error and error.to_dict())
            continue
        sums = [one.quantizer for one in of_role if one.quantizer is not None]
        is_repeated = len(sums) == layer.num_experts
        if len(of_role) < layer.num_experts or not (is_repeated or not sums):
            continue
        expected = error.to_dict()
        what = _NOT_MEASURED
        if is_repeated:
            expected = projection_errors([{role: one} for one in sums], is_coded=is_coded)[role]
            if expected != error.to_dict():
                compare_dicts(where, what, expected, error.to_dict(), result)
                continue
        elif any(one.num_flushed or one.is_folded for one in of_role):
            # the layout has changed what was recorded
            continue
        # Experts that were kept unchanged have no error; the total is of the others.
        changed = [
            one
            for one in of_role
            if not (one.quantizer.is_exact if one.quantizer else is_coded and not one.error)
        ]
        total = summarize(changed, as_recorded=True)["relative_error"] if changed else 0.0
        worst = max(one.recorded_error() for one in of_role)
        for key, found in (("relative_error", total), ("worst_relative_error", worst)):
            if found is None or not math.isclose(
                expected[key], found, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-30
            ):
                result.add(f"{where}: {key}", what, found, expected[key])


def check_search(artifact: Artifact, result: CheckResult) -> None:
    """Check that the search that chose the scales is this hqconv's, and so can be repeated; a calibration cannot be."""
    quantizer = artifact.spec.encoding.quantizer
    if quantizer != MSE or artifact.manifest.quantizer_version == quantizer_version(quantizer):
        return
    result.add(
        f"{MANIFEST}: quantizer_version",
        "The scales were searched for by another version of the search, which cannot be repeated here: "
        "verify against the source with the hqconv that made the artifact, or convert again.",
        f"{quantizer_version(quantizer)} (hqconv {__version__})",
        f"{artifact.manifest.quantizer_version or 'none'} (hqconv {artifact.manifest.hqconv_version})",
    )
