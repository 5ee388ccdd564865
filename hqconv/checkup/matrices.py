"""One decoded matrix: values, what they tell alone, and what a comparison with the original's tells.

Legend: N rows, K columns, I intermediate size, d the checkpoint's weights, w the original's. The tangent of the angle
between d and w is the relative error without a common factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch

from hqconv.checkup.findings import CheckFinding, MatrixPlace
from hqconv.formats.encoding import SourceMatrix
from hqconv.quantization.coded_matrix import CodedMatrix, code_table, dequantize, scale_values

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


# a sound matrix's tangent, of that of the formats' rounding: a calibration's is larger
_FURTHER = 8.0
_EXPLAINED = 3.0  # the same of a matrix that a hypothesis about its fault explains
_LEAST = 0.004  # a tangent that counts as one of rounding, whose error may be zero
_CHANCE = 4.0  # standard deviations of the cosine of unrelated numbers
# limit of the logarithm of the gain: by the squared tangent, beside it, at most
_GAIN_BY_TANGENT, _GAIN_BESIDE, _GAIN_MOST = 6.0, 0.004, 0.64
_SUSPECT = 1.8  # tangent, of the formats' rounding, from which an explanation is looked for
_SPREAD = 0.02  # of logarithms of factors, that are not the same number
_SIGNATURE, _NUM_ROWS = 64, 192  # numbers by which a row is found, and rows that are looked for
# share of these rows that must be found; cosine of a row that is the same
_FOUND, _SAME_ROW = 0.9, 0.6
ORDERED = "the original's in another order"


@dataclass(frozen=True, eq=False)
class Gains:
    """Factors of the rows [N] and columns [K] of a matrix, of the median one."""

    rows: torch.Tensor
    columns: torch.Tensor


@dataclass(eq=False)
class Comparison:
    """Figures of one matrix against the original's, and its faults.

    error: Frobenius norm of w - d over that of w; 1 if one of both is zero. rounding: the error that the formats'
    rounding explains. tangent: of the angle between d and w.
    nearest: share of codes that are the nearest to the original's weight, NaN without codes. is_wrong: it is not this
    matrix of the original, and nothing in it explains why. gains: factors of rows and columns, where it is scaled.
    order: the original's number of each row (of down: column), where all are there in another order.
    """

    error: float
    rounding: float
    tangent: float
    nearest: float = math.nan
    faults: list[CheckFinding] = field(default_factory=list)
    is_wrong: bool = False
    gains: Gains | None = None
    order: torch.Tensor | None = None

    @property
    def distance(self) -> float:
        """Tangent, of that of the formats' rounding."""
        return self.tangent / max(self.rounding, _LEAST)


def least_cosine(rounding: float, numel: int, further: float = _FURTHER) -> float:
    """Return the least cosine between d and w, whose formats round with this error."""
    return 1 / math.hypot(1, further * max(rounding, _LEAST)) - _CHANCE / math.sqrt(numel)


def _sum(values: torch.Tensor) -> float:
    return float(values.sum(dtype=torch.float64))


def _cosine(d: torch.Tensor, w: torch.Tensor) -> float:
    powers = _sum(d.square()) * _sum(w.square())
    return _sum(d * w) / math.sqrt(powers) if powers > 0 else 0.0


def tangent_of(cosine: float) -> float:
    """Return the tangent of an angle by its cosine; infinite for right angles and larger ones."""
    return math.sqrt(max(1 - cosine**2, 0)) / cosine if cosine > 0 else math.inf


def compare(role: str, matrix: Matrix, originals: Mapping[str, Matrix]) -> Comparison:
    """Compare a projection of one expert with the original's; originals: this expert's projections, by role."""
    original = originals[role]
    d, w = matrix.values, original.values
    result = Comparison(0.0, math.hypot(matrix.resolution, original.resolution), 0.0)
    result.faults += _bias_faults(matrix, original)
    rows = RowSums(
        w.square().sum(1, dtype=torch.float64),
        d.square().sum(1, dtype=torch.float64),
        (w * d).sum(1, dtype=torch.float64),
    )
    power, decoded, dot = (float(sums.sum()) for sums in (rows.power, rows.decoded, rows.dot))
    if not power and not decoded:
        return result
    if not power or not decoded:
        result.error, result.tangent = 1.0, math.inf
        fault = CheckFinding("stale", "The original's weights are zero.")
        if power:
            fault = CheckFinding("zero", "All weights are zero, and the original's are not.")
        result.faults.append(fault)
        return result
    cosine = dot / math.sqrt(power * decoded)
    difference = w - d
    result.error = math.sqrt(_sum(difference.square()) / power)
    result.tangent = tangent_of(cosine)
    if matrix.cells is not None:
        result.nearest = float((difference.abs() <= 0.51 * matrix.cells).float().mean())
    is_near = cosine >= least_cosine(result.rounding, d.numel())
    gain, limit = dot / power, _gain_limit(result)
    is_scaled = is_near and abs(math.log(gain)) > limit
    explained = None
    if is_scaled or result.distance > _SUSPECT:
        explained = next(_explanations(result, role, matrix, originals), None)
    if explained is not None:
        if explained.kind != "column-scales":
            result.faults.append(explained)
    elif is_scaled:
        result.faults.append(_factor(matrix, gain, limit))
    elif (bad := _bad_rows(result, matrix, original, rows, is_near=is_near)) is not None:
        text = f"{len(bad)} of {len(d)}, the first is row {int(bad[0])}"
        order = _order_of(d, originals, role, bad)
        what = "not the original's" if order is None else order.text
        result.faults.append(
            CheckFinding("rows", f"Some rows are {what}.", "the original's rows", text)
        )
    else:
        result.is_wrong = not is_near
    return result


def _bias_faults(matrix: Matrix, original: Matrix) -> Iterator[CheckFinding]:
    given, expected = matrix.bias, original.bias
    if given is None and expected is None:
        return
    if given is None or expected is None:
        yield CheckFinding("bias", "One of the checkpoint and the original has biases.")
    elif not torch.allclose(given.float(), expected.float(), rtol=2.0**-6, atol=1e-6):
        row = int((given.float() - expected.float()).abs().argmax())
        texts = f"{float(expected[row]):.4g} in row {row}", f"{float(given[row]):.4g}"
        yield CheckFinding("bias", "The bias is not the original's.", *texts)


def _gain_limit(result: Comparison) -> float:
    tangent = max(result.tangent, result.rounding)
    return min(_GAIN_BY_TANGENT * tangent**2 + _GAIN_BESIDE, _GAIN_MOST)


def _factor(matrix: Matrix, gain: float, limit: float) -> CheckFinding:
    """Return the finding about a matrix that is the original's times a factor."""
    found, power = f"{gain:.4g}", math.log2(gain)
    if abs(power - round(power)) < 0.01:
        found += f" (2**{round(power)})"
    coded = matrix.coded
    for number in () if coded is None else (coded.scale_2, coded.scale):
        if number is not None and number.numel() == 1:
            scale = float(scale_values(number.reshape(1)))
            if scale > 0 and abs(math.log(gain / scale**2)) < max(limit, 0.02):
                found += f": the scale {scale:.4g} is inverted"
    what = "The weights are the original's times a constant factor."
    return CheckFinding("factor", what, f"within a factor of {math.exp(limit):.3f}", found)


@dataclass(frozen=True, eq=False)
class RowSums:
    """Sums over each row, float64 [N]: power of w², decoded of d², dot of w·d."""

    power: torch.Tensor
    decoded: torch.Tensor
    dot: torch.Tensor


def _bad_rows(
    result: Comparison, matrix: Matrix, original: Matrix, rows: RowSums, *, is_near: bool
) -> torch.Tensor | None:
    """Return the rows that are not the original's; None if there are none, or hardly any others."""
    power = rows.power
    cosines = (rows.dot / (power * rows.decoded).sqrt()).nan_to_num(1.0)
    tangent = max(result.tangent if is_near else 0.0, result.rounding, _LEAST)
    own = torch.zeros_like(power)  # squared error by the cells of both
    for cells in (matrix.cells, original.cells):
        if cells is not None:
            own += cells.square().sum(1).double() / 12
    own /= power
    error = own.sqrt().nan_to_num(0.0, 0.0, 0.0).clamp_min(tangent)
    limit = (1 + (_FURTHER * error).square()).rsqrt()
    chance = _CHANCE * tangent**2 / (1 + tangent**2) / math.sqrt(matrix.values.size(1))
    is_lost = (rows.decoded == 0) & (power > 1e-3 * power.mean())
    bad = ((cosines < limit - chance) | is_lost).nonzero().flatten()
    return bad if 0 < len(bad) < 0.9 * len(power) else None


# --- explanations --------------------------------------------------------------------------------------------


def _explanations(
    result: Comparison, role: str, matrix: Matrix, originals: Mapping[str, Matrix]
) -> Iterator[CheckFinding]:
    """Yield what explains a matrix that is further from the original than rounding, the likeliest first.

    An explanation must bring it near, and to half the tangent that it had or to that of rounding.
    """
    d, w = matrix.values, originals[role].values
    tangent = result.tangent
    limit = max(0.5 * tangent, min(1.3 * result.rounding, 0.8 * tangent), _LEAST)
    least = least_cosine(result.rounding, d.numel(), _EXPLAINED)

    def are_near(decoded: torch.Tensor, original: torch.Tensor) -> bool:
        cosine = _cosine(decoded, original)
        return cosine >= least and tangent_of(cosine) < limit

    if are_near(d, -w):
        yield CheckFinding("sign", "The weights are the original's with the other sign.")
    rows, columns = _rank_one(d, w)
    is_positive = min(float(rows.min()), float(columns.min())) > 0
    row_spread, column_spread = (
        float(factors.clamp_min(1e-30).log().std()) for factors in (rows, columns)
    )
    is_spread = max(row_spread, column_spread) > _SPREAD
    if is_positive and is_spread and are_near(d, w * rows * columns):
        result.gains = Gains(rows.flatten() / rows.median(), columns / columns.median())
        if column_spread > max(_SPREAD, 0.25 * row_spread):
            yield CheckFinding("column-scales", "The columns are scaled.")
    if matrix.coded is not None and matrix.coded.column_groups is None:
        for fault, decoded, original in _scale_faults(matrix, w):
            if are_near(decoded, original):
                yield fault
    if result.gains is not None:
        yield _scale_fault(rows, "rows")
    if are_near(d, w.t().reshape(d.shape)) or are_near(d, w.reshape(d.shape[::-1]).t()):
        what = "The matrix is the original's, transposed."
        yield CheckFinding("transposed", what, "[out, in]", "[in, out]")
    yield from _order_faults(result, role, d, originals)


def _order_faults(
    result: Comparison, role: str, d: torch.Tensor, originals: Mapping[str, Matrix]
) -> Iterator[CheckFinding]:
    if order := _order_of(d, originals, role, torch.arange(len(d))):
        result.order = order.rows
        kind = "gate-up-rows" if "gate and up" in order.text else "rows"
        yield CheckFinding(kind, f"The rows are {order.text}.")
    turned = {role: replace(originals[role], values=originals[role].values.t().contiguous())}
    if order := _order_of(d.t().contiguous(), turned, role, torch.arange(d.size(1))):
        result.order = order.rows
        yield CheckFinding("columns", f"The columns are {order.text}.")


def _rank_one(d: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors of rows [N, 1] and of columns [K] by which w is nearest to d."""
    products, squares = d * w, w.square()
    rows = torch.ones(len(d))
    for _ in range(2):
        columns = (rows @ products) / (rows.square() @ squares).clamp_min(1e-30)
        rows = (products @ columns) / (squares @ columns.square()).clamp_min(1e-30)
    return rows[:, None], columns


def _scale_fault(gains: torch.Tensor, unit: str, more: str = "") -> CheckFinding:
    what = (
        "The codes are the original's, and the scales are not: each group has a factor of its own."
    )
    found = f"factors from {float(gains.min()):.3g} to {float(gains.max()):.3g} of {unit}"
    return CheckFinding("scales", what + more, "factors near 1", found)


def _scale_faults(
    matrix: Matrix, w: torch.Tensor
) -> Iterator[tuple[CheckFinding, torch.Tensor, torch.Tensor]]:
    """Yield faults of scales and zero points, each with what d and w then are, which are near if it is one."""
    coded, d = matrix.coded, matrix.values
    assert coded is not None
    num_rows, num_columns = d.shape
    group_n, group_k = coded.group_n or num_rows, coded.group_k or num_columns

    def sums(values: torch.Tensor) -> torch.Tensor:
        """Sum up each scale group: [groups along N, groups along K]."""
        padded = torch.nn.functional.pad(
            values, (0, -num_columns % group_k, 0, -num_rows % group_n)
        )
        rows, columns = padded.size(0) // group_n, padded.size(1) // group_k
        blocks = padded.view(rows, group_n, columns, group_k)
        return blocks.sum((1, 3), dtype=torch.float64)

    def spread(groups: torch.Tensor) -> torch.Tensor:
        whole = groups.float().repeat_interleave(group_n, 0).repeat_interleave(group_k, 1)
        return whole[:num_rows, :num_columns]

    gains = sums(d * w) / sums(w.square()).clamp_min(1e-30)
    scales = scale_values(coded.scale).double().abs().broadcast_to(gains.shape)
    is_usable = (gains > 0) & (scales > 0)
    if int(is_usable.sum()) > 2:
        logs = torch.stack([gains[is_usable].log(), scales[is_usable].log()])
        gain_spread, scale_spread = logs.std(1).tolist()
        more = ""
        if scale_spread > _SPREAD:
            slope = float(torch.corrcoef(logs)[0, 1]) * gain_spread / scale_spread
            if abs(slope - 2) < 0.3:
                more = " The scales are inverted."
        yield _scale_fault(gains[is_usable], "groups", more), d, w * spread(gains)
    offsets = sums(d - w) / sums(torch.ones_like(d))
    what = "Each group of weights is the original's and an offset: the zero points are wrong."
    yield CheckFinding("zero-points", what), d - spread(offsets), w


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Order of rows, in words, and where no rule describes it, the original's number of each row."""

    text: str
    rows: torch.Tensor | None = None


def _order_of(
    d: torch.Tensor, originals: Mapping[str, Matrix], role: str, chosen: torch.Tensor
) -> RowOrder | None:
    """Find chosen rows of d elsewhere in the original's gate and up, or down; None if they are not there."""
    roles = ["w1", "w3"] if role != "w2" and {"w1", "w3"} <= originals.keys() else [role]
    pool = torch.cat([originals[role].values for role in roles])
    num_rows, index = len(originals[role].values), roles.index(role)
    start = index * num_rows
    steps = np.linspace(0, len(chosen) - 1, min(_NUM_ROWS, len(chosen)))
    picked = chosen[np.unique(steps.astype(int))]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (d.size(1), _SIGNATURE), generator=generator).float() * 2 - 1
    signatures = torch.nn.functional.normalize(pool @ signs)

    def owners(rows: torch.Tensor) -> torch.Tensor:
        return (d[rows] @ signs @ signatures.t()).argmax(1)

    owner = owners(picked)
    cosines, own_cosines = (
        torch.nn.functional.cosine_similarity(d[picked], pool[rows])
        for rows in (owner, picked + start)
    )
    is_found = cosines > _SAME_ROW
    # and clearly nearer there
    is_elsewhere = is_found & (1 - cosines < 0.5 * (1 - own_cosines))
    if len(picked) < 2 or float(is_elsewhere.float().mean()) < _FOUND:
        return None
    owner, picked = owner[is_found], picked[is_found]
    place = picked + start
    if len(roles) == 2 and torch.equal(owner, place // 2 + place % 2 * num_rows):
        return RowOrder("gate and up in turns: alternating rows were cut in halves")
    if len(roles) == 2 and torch.equal(owner, picked * 2 + index):
        return RowOrder("every second one of gate and up: halves were cut as alternating rows")
    if not bool(((owner >= start) & (owner < start + num_rows)).all()):
        return None
    shift = (owner - place) % num_rows
    if bool((shift == shift[0]).all()):
        by = int(shift[0])
        return RowOrder(f"shifted by {by if by <= num_rows // 2 else by - num_rows}")
    if torch.equal(owner - start, picked ^ 1):
        return RowOrder("exchanged in pairs, as by the other order of codes in a byte")
    rows = torch.cat([owners(rows) for rows in torch.split(torch.arange(len(d)), 256)])
    return RowOrder(ORDERED, rows - start)
