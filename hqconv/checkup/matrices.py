"""One decoded matrix: values, the resolution of its format, and what its values tell without another checkpoint.

Legend: N rows, K columns, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from hqconv.checkup.findings import CheckFinding, MatrixPlace
from hqconv.formats.encoding import SourceMatrix
from hqconv.quantization.coded_matrix import CodedMatrix, code_table, dequantize

Float32Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
_SIDE = 16  # of a sketch
_ROUNDING = 1.6  # relative error of formats of b bits without codes, of 2**-b: GGUF's Q4_K and Q6_K
# largest weight, of the median row's largest
_SPIKE_NOTICE, _SPIKE_DAMAGE = 2.0**10, 2.0**16
# rms times sqrt(K): least and most without a notice; damage above
_MIN_GAIN, _MAX_GAIN, _DAMAGED_GAIN = 2.0**-12, 2.0**9, 2.0**16


@dataclass(frozen=True, eq=False)
class Matrix:
    """One projection of one expert, decoded.

    values: float32 [N, K]. resolution: relative error that rounding to its codes gives, if all are in range. cells:
    distance of each weight's code to the farther neighbour, float32 [N, K]; None for formats without codes and scales.
    """

    name: str
    values: torch.Tensor
    resolution: float
    cells: torch.Tensor | None = None
    coded: CodedMatrix | None = None
    bias: torch.Tensor | None = None


@cache
def _cells(b_dtype: str, is_symmetric: bool) -> Float32Vector:
    """Return the distance of each code's value to the farther neighbouring value, float32 [2**bits]."""
    table = code_table(b_dtype, is_symmetric)
    ordered = np.unique(table)
    gaps = np.diff(ordered)
    wide = np.maximum(np.append(gaps, gaps[-1]), np.insert(gaps, 0, gaps[0]))
    found: Float32Vector = wide[np.searchsorted(ordered, table)].astype(np.float32)
    return found


def decoded(matrix: SourceMatrix, num_bits: float) -> Matrix:
    """Decode a matrix. num_bits: stored bits of a weight, which tell the resolution of formats without codes."""
    values = matrix.values().float()
    if matrix.coded is None:
        return Matrix(matrix.name, values, _ROUNDING * 2.0 ** -min(num_bits, 9), bias=matrix.bias)
    coded = replace(matrix.coded, zero_point=None)
    cells = dequantize(coded, _cells(coded.b_dtype, matrix.coded.zero_point is None)).abs_()
    cells = cells[: values.size(0), : values.size(1)]
    power = float(values.square().sum(dtype=torch.float64))
    rounding = float(cells.square().sum(dtype=torch.float64)) / 12
    resolution = math.sqrt(rounding / power) if power else 0.0
    return Matrix(matrix.name, values, resolution, cells, matrix.coded, matrix.bias)


@cache
def _signs(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size * 2 + seed)
    return torch.randint(0, 2, (size, _SIDE), generator=generator).float().mul_(2).sub_(1)


def sketch(values: torch.Tensor) -> Float32Vector:
    """Return a random projection of a matrix to 256 numbers of norm 1, float32; zeros of zeros.

    Cosines of sketches are those of the matrices, with a standard deviation of 1/16 times their sine.
    """
    small = (_signs(values.size(0), 0).T @ values @ _signs(values.size(1), 1)).flatten()
    norm = small.norm()
    found: Float32Vector = (small / norm if norm > 0 else small).numpy()
    return found


@dataclass(frozen=True, eq=False)
class Facts:
    """Figures by which experts are compared: root mean square, and the sketch, which is equal for equal matrices."""

    rms: float
    sketch: Float32Vector


def facts_of(matrix: Matrix) -> Facts:
    """Return the facts of a matrix of finite numbers."""
    rms = math.sqrt(
        float(matrix.values.square().sum(dtype=torch.float64)) / max(matrix.values.numel(), 1)
    )
    return Facts(rms, sketch(matrix.values))


def own_faults(matrix: Matrix) -> Iterator[CheckFinding]:
    """Yield what the values of a matrix tell alone."""
    values, where = matrix.values, matrix.name
    largest = values.abs().amax(1)
    if not bool(largest.isfinite().all()):
        bad = (~values.isfinite()).nonzero()
        found = f"{len(bad)} of {values.numel()}, the first at {bad[0].tolist()}"
        yield CheckFinding("nan", "Weights are NaN or infinite.", found=found, where=where)
        return
    if matrix.bias is not None and not bool(matrix.bias.isfinite().all()):
        yield CheckFinding("nan", "A bias is NaN or infinite.", where=where)
    if not bool(largest.any()):
        yield CheckFinding("zero", "All weights are zero.", is_damage=False, where=where)
        return
    if values.numel() > 1 and bool((values == values[0, 0]).all()):
        found = f"{float(values[0, 0]):.4g}"
        yield CheckFinding("constant", "All weights are the same number.", "", found, where=where)
        return
    typical = float(largest[largest > 0].median())
    spike = float(largest.max()) / typical
    if spike >= _SPIKE_NOTICE:
        row = int(largest.argmax())
        yield CheckFinding(
            "magnitude",
            "A row's largest weight is of another magnitude than the other rows'.",
            f"less than {_SPIKE_NOTICE:.0f} times it",
            f"{float(largest.max()):.4g} in row {row}, the median row's is {typical:.4g}",
            spike >= _SPIKE_DAMAGE,
            where,
        )
    gain = float(values.norm()) / math.sqrt(values.size(0))  # of unit inputs
    if not _MIN_GAIN <= gain <= _MAX_GAIN:
        yield CheckFinding(
            "magnitude",
            "The matrix has a magnitude that trained ones do not have: a scale may be inverted or missing.",
            f"outputs of {_MIN_GAIN:.2g} to {_MAX_GAIN:.0f} times random inputs",
            f"{gain:.4g}",
            gain > _DAMAGED_GAIN,
            where,
        )


# --- gate and up ---------------------------------------------------------------------------------------------

_FAR = 6.0  # standard errors of a correlation
_CLEAR = 0.3  # by which another arrangement's correlation is larger
_ARRANGEMENTS = {
    "swapped": "gate and up look exchanged",
    "halves": "alternating rows of gate and up look cut in halves",
    "alternating": "halves of gate and up look cut as alternating rows",
}


@dataclass(frozen=True)
class Arrangement:
    """An arrangement of gate and up that the norms of their rows show; the name is "" for the stored one.

    correlation: of the norms in this arrangement with those of down's columns. stored: the same as stored.
    """

    name: str
    correlation: float
    stored: float


def arrangement(matrices: Mapping[str, Matrix]) -> Arrangement | None:
    """Return the arrangement of gate and up that the norms of their rows show; None where they show nothing.

    An up row may be scaled by any number and the down column by its inverse; training makes their norms alike, and the
    gate's row has no such partner.
    """
    if matrices.keys() < {"w1", "w3", "w2"}:
        return None
    gate, up = (matrices[role].values.norm(dim=1) for role in ("w1", "w3"))
    down = matrices["w2"].values.norm(dim=0)
    ups = {"": up, "swapped": gate}
    if len(up) % 2 == 0:
        ups["halves"] = torch.cat([gate, up])[1::2]
        ups["alternating"] = torch.stack([gate, up], 1).flatten()[len(up) :]
    found = {
        name: float(torch.corrcoef(torch.stack([norms.log(), down.log()]))[0, 1])
        for name, norms in ups.items()
    }
    if not all(map(math.isfinite, found.values())):
        return None
    best = max(found, key=found.__getitem__)
    error = _FAR / math.sqrt(len(up))
    if found[best] < error or (best and found[best] - found[""] < max(error, _CLEAR)):
        return None
    return Arrangement(best, found[best], found[""])


def arrangement_faults(
    layer: str, arrangements: Mapping[int, Arrangement | None]
) -> Iterator[CheckFinding]:
    """Yield the experts of a layer whose gate and up look arranged otherwise; damage where most others do not."""
    num_right = sum(shown is not None and not shown.name for shown in arrangements.values())
    is_mostly_right = num_right >= 3 and num_right >= 0.75 * len(arrangements)
    for expert, shown in arrangements.items():
        if shown is not None and shown.name:
            yield CheckFinding(
                f"gate-up-{shown.name}",
                f"By their rows' norms {_ARRANGEMENTS[shown.name]}.",
                "the larger one as stored",
                f"correlation of the row norms with down's columns {shown.stored:.2f}, "
                f"arranged otherwise {shown.correlation:.2f}",
                is_mostly_right and shown.stored < shown.correlation / 3,
                place=MatrixPlace(layer, expert),
            )
