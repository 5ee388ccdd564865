"""One decoded matrix: values, what they tell alone, what a comparison with the original's tells; findings' class.

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

from hqconv.formats.encoding import SourceMatrix
from hqconv.quantization.coded_matrix import (
    MANY_LOST,
    CodedMatrix,
    cell_sizes,
    lost_weights,
    scale_values,
)

Float32Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
_SIDE = 16  # of a sketch
_RUN = 64  # weights, or 32-bit words of codes, that are the same by chance nowhere
_ROUNDING = 1.6  # relative error of formats of b bits without codes, of 2**-b: GGUF's Q4_K and Q6_K
# largest weight, of the median row's largest
_SPIKE_NOTICE = 2.0**10
_SPIKE_DAMAGE = 2.0**16
# rms times sqrt(K): least and most without a notice; damage above
_MIN_GAIN = 2.0**-12
_MAX_GAIN = 2.0**9
_DAMAGED_GAIN = 2.0**16


@dataclass(frozen=True)
class MatrixPlace:
    """A projection of an expert of a layer. Without a role it is the whole expert, with expert -1 the whole layer."""

    layer: str = ""
    expert: int = -1
    role: str = ""

    def seen_from(self, place: MatrixPlace) -> str:
        """Describe the matrix to a reader who knows the other's layer."""
        text = f"{self.role} of expert {self.expert}"
        return text if self.layer == place.layer else f"{text} of {self.layer}"


@dataclass(frozen=True)
class CheckFinding:
    """One observation. kind: its name in docs/check.md. where: a tensor, or what else; "" for the place alone.

    is_damage: the checkpoint is surely wrong; else it is a notice. place: of the matrix, if it is one's.
    """

    kind: str
    what: str
    expected: str = ""
    found: str = ""
    is_damage: bool = True
    where: str = ""
    place: MatrixPlace = MatrixPlace()

    def at(self, place: MatrixPlace, where: str = "") -> CheckFinding:
        """Return the finding with its place; `where` unless it names a tensor itself."""
        return replace(self, place=place, where=self.where or where)


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

    def turned(self) -> Matrix:
        """Return the transposed matrix, without its codes."""
        cells = None if self.cells is None else self.cells.t()
        return replace(self, values=self.values.t(), cells=cells, coded=None)


def decoded(matrix: SourceMatrix, num_bits: float) -> Matrix:
    """Decode a matrix. num_bits: stored bits of a weight, which tell the resolution of formats without codes."""
    values = matrix.values().float()
    if matrix.coded is None:
        return Matrix(matrix.name, values, _ROUNDING * 2.0 ** -min(num_bits, 9), bias=matrix.bias)
    cells = cell_sizes(matrix.coded)[: values.size(0), : values.size(1)]
    power = _sum(values.square())
    rounding = _sum(cells.square()) / 12
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
    return (small / norm if norm > 0 else small).numpy()


@dataclass(frozen=True, eq=False)
class Facts:
    """Figures by which experts are compared: root mean square, and the sketch, which is equal for equal matrices."""

    rms: float
    sketch: Float32Vector


def facts_of(matrix: Matrix) -> Facts:
    """Return the facts of a matrix of finite numbers."""
    rms = math.sqrt(_sum(matrix.values.square()) / max(matrix.values.numel(), 1))
    return Facts(rms, sketch(matrix.values))


def own_faults(matrix: Matrix) -> Iterator[CheckFinding]:
    """Yield what the values of a matrix tell alone."""
    values = matrix.values
    where = matrix.name
    largest = values.abs().amax(1)
    if not bool(largest.isfinite().all()):
        bad = (~values.isfinite()).nonzero()
        yield CheckFinding(
            "nan",
            "Weights are NaN or infinite.",
            found=f"{len(bad)} of {values.numel()}, the first at {bad[0].tolist()}",
            where=where,
        )
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
    codes = values if matrix.coded is None else matrix.coded.packed
    if any(_has_run(axis.flatten()) for axis in (codes, codes.t())):
        yield CheckFinding(
            "hole",
            "A run of weights is stored as the same number: a part of the file may be lost.",
            is_damage=False,
            where=where,
        )
    if (
        matrix.coded is not None
        and (share := float(lost_weights(matrix.coded).float().mean())) > MANY_LOST
    ):
        yield CheckFinding(
            "zero",
            "Scales are zero above codes that are not: every loader takes these weights for zero.",
            "",
            f"{share:.1%} of the weights",
            is_damage=False,
            where=where,
        )
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


def _has_run(numbers: torch.Tensor) -> bool:
    """Return whether an aligned run of numbers is the same one."""
    runs = numbers[: len(numbers) // _RUN * _RUN].view(-1, _RUN)
    return bool((runs == runs[:, :1]).all(1).any())


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
_EXPLAINED = 3.0  # the same of a matrix that a hypothesis explains
_LEAST = 0.004  # a tangent that counts as one of rounding, whose error may be zero
_CHANCE = 4.0  # standard deviations of a cosine
# limit of the logarithm of the gain: by the squared tangent, beside it, at most
_GAIN_BY_TANGENT = 6.0
_GAIN_BESIDE = 0.004
_GAIN_MOST = 0.64
_NEAREST = 1.15  # tangent of a matrix rounded to nearest, at most
_SUSPECT = 1.8  # tangent, of the rounding's, that is to be explained
_COARSE = 0.5  # logarithm of a gain that rounding of few levels explains
_SPREAD = 0.02  # of logarithms of factors, that are not the same number
_SIGNATURE = 64  # numbers by which a row is found
_NUM_ROWS = 192  # looked for
_LEAST_SIZE = 16  # of a row: shorter ones are alike by chance
# share of these rows to be found; cosine of a row that is the same
_FOUND = 0.9
_SAME_ROW = 0.6


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Order of rows, or columns, in words, and the original's number of each: none where some are another matrix's."""

    text: str
    numbers: torch.Tensor


@dataclass(frozen=True, eq=False)
class Change:
    """Change that makes this matrix of the original's: its rows and columns are put in order, then scaled.

    rows, columns: factors, [N] and [K]; the columns' median is 1. limit: of the logarithm of the
    gain that rounding explains.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    row_order: RowOrder | None = None
    column_order: RowOrder | None = None
    limit: float = 0.0

    def of(self, w: torch.Tensor) -> torch.Tensor:
        """Apply the change."""
        for order, axis in ((self.row_order, 0), (self.column_order, 1)):
            if order is not None:
                w = w.index_select(axis, order.numbers)
        return w * self.rows[:, None] * self.columns

    def turned(self) -> Change:
        """Return the change of the transposed matrix."""
        return Change(self.columns, self.rows, self.column_order, self.row_order, self.limit)


@dataclass(eq=False)
class Comparison:
    """Figures of one matrix against the original's, and its faults.

    error: Frobenius norm of w - d over that of w; 1 if one of both is zero. rounding: the error that the formats'
    rounding explains. tangent: of the angle between d and w. power: Σ w².
    nearest: share of codes that are the nearest to the original's weight, NaN without codes. is_wrong: it is not this
    matrix of the original, and nothing in it explains why. change: what explains it, which another projection may make
    up for; change_fault: it in words, if none does.
    """

    error: float
    rounding: float
    tangent: float
    power: float = 0.0
    nearest: float = math.nan
    faults: list[CheckFinding] = field(default_factory=list)
    is_wrong: bool = False
    change: Change | None = None
    change_fault: CheckFinding | None = None

    @property
    def is_sound(self) -> bool:
        """Return whether nothing but rounding, or a calibration, was found."""
        return not (self.faults or self.is_wrong or self.change)

    @property
    def distance(self) -> float:
        """Tangent, of that of the formats' rounding."""
        return self.tangent / max(self.rounding, _LEAST)


def least_cosine(rounding: float, numel: int, further: float = _FURTHER) -> float:
    """Return the least cosine between d and w, whose formats round with this error."""
    return 1 / math.hypot(1, further * max(rounding, _LEAST)) - _CHANCE / math.sqrt(numel)


def _sum(values: torch.Tensor) -> float:
    return float(values.sum(dtype=torch.float64))


def cosine(d: torch.Tensor, w: torch.Tensor) -> float:
    """Return the cosine of the angle between two tensors; 0 if one is zero."""
    powers = _sum(d.square()) * _sum(w.square())
    return _sum(d * w) / math.sqrt(powers) if powers > 0 else 0.0


def tangent_of(cosine: float) -> float:
    """Return the tangent of an angle by its cosine; infinite for right angles and larger ones."""
    return math.sqrt(max(1 - cosine**2, 0)) / cosine if cosine > 0 else math.inf


def compare(role: str, matrix: Matrix, originals: Mapping[str, Matrix]) -> Comparison:
    """Compare a projection of one expert with the original's; originals: this expert's projections, by role."""
    original = originals[role]
    d = matrix.values
    w = original.values
    result = Comparison(0.0, math.hypot(matrix.resolution, original.resolution), 0.0)
    result.faults += _bias_faults(matrix, original)
    power, decoded, dot = (_sum(products) for products in (w.square(), d.square(), w * d))
    result.power = power
    if not power and not decoded:
        return result
    if not power or not decoded:
        result.error = 1.0
        result.tangent = math.inf
        fault = CheckFinding("stale", "The original's weights are zero.")
        if power:
            fault = CheckFinding("zero", "All weights are zero, and the original's are not.")
        result.faults.append(fault)
        return result
    angle = dot / math.sqrt(power * decoded)
    difference = w - d
    result.error = math.sqrt(_sum(difference.square()) / power)
    result.tangent = tangent_of(angle)
    if matrix.cells is not None:
        result.nearest = float((difference.abs() <= 0.51 * matrix.cells).float().mean())
    is_near = angle >= least_cosine(result.rounding, d.numel())
    gain = dot / power
    limit = _gain_limit(max(result.tangent, result.rounding))
    is_scaled = is_near and abs(math.log(gain)) > limit
    if (is_scaled or result.distance > _SUSPECT) and _explain(
        result, role, matrix, originals, is_scaled=is_scaled
    ):
        return result
    for unit, given, theirs in (
        ("row", matrix, original),
        ("column", matrix.turned(), original.turned()),
    ):
        bad = _bad_rows(result, given, theirs, is_near=is_near)
        if bad is None or (unit == "column" and not _is_rounded_beside(bad, result, given, theirs)):
            continue
        order = _order_of(d, originals, role, bad) if unit == "row" else None
        what = "not the original's" if order is None else order.text
        text = f"{len(bad)} of {len(given.values)}, the first is {unit} {int(bad[0])}"
        texts = f"{unit}s", f"Some {unit}s are {what}.", f"the original's {unit}s", text
        result.faults.append(CheckFinding(*texts))
        return result
    result.is_wrong = not is_near
    return result


def _bias_faults(matrix: Matrix, original: Matrix) -> Iterator[CheckFinding]:
    given = matrix.bias
    expected = original.bias
    is_same = given is expected  # none
    if given is not None and expected is not None:
        is_same = torch.allclose(given.float(), expected.float(), rtol=2.0**-6, atol=1e-6)
    if not is_same:
        yield CheckFinding("bias", "The bias is not the original's.")


def _gain_limit(tangent: float) -> float:
    return min(_GAIN_BY_TANGENT * tangent**2 + _GAIN_BESIDE, _GAIN_MOST)


def _factor(matrix: Matrix, gain: float, limit: float) -> CheckFinding:
    """Return the finding about a matrix that is the original's times a factor."""
    found = f"{gain:.4g}"
    power = math.log2(gain)
    if abs(power - round(power)) < 0.01:
        found += f" (2**{round(power)})"
    coded = matrix.coded
    for number in () if coded is None else (coded.scale_2, coded.scale):
        if number is not None and number.numel() == 1:
            scale = float(scale_values(number.reshape(1)))
            if scale > 0 and abs(math.log(gain / scale**2)) < max(limit, 0.02):
                found += f": the scale {scale:.4g} is inverted"
    return CheckFinding(
        "factor",
        "The weights are the original's times a constant factor.",
        f"within a factor of {math.exp(limit):.3f}",
        found,
    )


def _bad_rows(
    result: Comparison, matrix: Matrix, original: Matrix, *, is_near: bool
) -> torch.Tensor | None:
    """Return the rows that are not the original's; None if there are none, or hardly any others."""
    d = matrix.values
    w = original.values
    power, decoded, dots = (
        products.sum(1, dtype=torch.float64) for products in (w.square(), d.square(), w * d)
    )
    cosines = (dots / (power * decoded).sqrt()).nan_to_num(1.0)
    tangent = max(result.tangent if is_near else 0.0, result.rounding, _LEAST)
    own = torch.zeros_like(power)  # squared error by the cells of both
    for cells in (matrix.cells, original.cells):
        if cells is not None:
            own += cells.square().sum(1).double() / 12
    own /= power
    error = own.sqrt().nan_to_num(0, 0, 0).clamp_min(tangent)
    # Rows of calibrations: up to 8.4 times.
    limit = (16 * error).clamp_max(4).atan().cos()
    chance = _CHANCE * tangent**2 / (1 + tangent**2) / math.sqrt(d.size(1))
    is_lost = (decoded == 0) & (power > 1e-3 * power.mean())
    bad = ((cosines < limit - chance) | is_lost).nonzero().flatten()
    return bad if 0 < len(bad) < 0.75 * len(power) else None


def _is_rounded_beside(
    bad: torch.Tensor, result: Comparison, matrix: Matrix, original: Matrix
) -> bool:
    """Return whether the rows that are not bad were rounded to nearest: calibrations treat some far worse."""
    is_good = ~torch.isin(torch.arange(len(matrix.values)), bad)
    near = cosine(matrix.values[is_good], original.values[is_good])
    return tangent_of(near) < _NEAREST * max(result.rounding, _LEAST)


# --- explanations --------------------------------------------------------------------------------------------


def _explain(
    result: Comparison,
    role: str,
    matrix: Matrix,
    originals: Mapping[str, Matrix],
    *,
    is_scaled: bool,
) -> bool:
    """Find what explains a matrix that is further from the original than rounding; return whether anything does.

    It must bring the matrix near, and to half the tangent that it had or to that of rounding.
    """
    d = matrix.values
    w = originals[role].values
    limit = max(0.5 * result.tangent, min(1.3 * result.rounding, 0.8 * result.tangent), _LEAST)
    least = least_cosine(result.rounding, d.numel(), _EXPLAINED)

    def are_near(decoded: torch.Tensor, original: torch.Tensor) -> bool:
        found = cosine(decoded, original)
        return found >= least and tangent_of(found) < limit

    changes = _changes(role, d, originals, result.rounding)
    change = next((change for change in changes if are_near(d, change.of(w))), None)
    if change is None and is_scaled:
        gain = _sum(d * w) / _sum(w.square())
        change = Change(torch.full((len(d),), gain), torch.ones(d.size(1)))
    faults = []
    if matrix.coded is not None and matrix.coded.column_groups is None:
        faults = [fault for fault, *pair in _scale_faults(matrix, w) if are_near(*pair)]
    if change is not None:
        is_even = spread(change.rows) == spread(change.columns) == 0
        is_named = faults and not is_even and not change.row_order and not change.column_order
        tangent = tangent_of(cosine(d, change.of(w)))
        result.change = replace(change, limit=_gain_limit(max(tangent, result.rounding)))
        result.change_fault = faults[0] if is_named else _change_fault(result.change, matrix)
    elif faults:
        result.faults.append(faults[0])
    elif are_near(d, w.t().reshape(d.shape)) or are_near(d, w.reshape(d.shape[::-1]).t()):
        result.faults.append(
            CheckFinding(
                "transposed", "The matrix is the original's, transposed.", "[out, in]", "[in, out]"
            )
        )
    elif (order := _order_of(d, originals, role, torch.arange(len(d)))) is not None:
        kind = "rows" if len(order.numbers) else "gate-up-rows"
        result.faults.append(CheckFinding(kind, f"The rows are {order.text}."))
    else:
        return False
    return True


def _changes(
    role: str, d: torch.Tensor, originals: Mapping[str, Matrix], rounding: float
) -> Iterator[Change]:
    """Yield changes that may explain a matrix, the likeliest first."""
    w = originals[role].values
    yield _scaled(d, w, rounding)
    order = _order_of(d, originals, role, torch.arange(len(d)))
    if order is not None and len(order.numbers):
        yield replace(_scaled(d, w[order.numbers], rounding), row_order=order)
    turned = {role: originals[role].turned()}
    order = _order_of(d.t().contiguous(), turned, role, torch.arange(d.size(1)))
    if order is not None and len(order.numbers):
        yield replace(_scaled(d, w[:, order.numbers], rounding), column_order=order)


def spread(factors: torch.Tensor) -> float:
    """Return the standard deviation of the logarithms of factors."""
    found = float(factors.abs().clamp_min(1e-30).log().std(correction=0))
    return found if found > 1e-3 else 0.0


def is_one(product: torch.Tensor, factors: torch.Tensor, limit: float = 0.1) -> bool:
    """Return whether a product of factors is 1, but for errors of their estimates.

    limit: of the logarithm of its median; where it is so large, rounding may hide factors of one of the matrices.
    """
    if bool((product <= 0).any()):
        return False
    is_near = abs(float(product.log().median())) < limit
    return is_near and (limit > _COARSE or spread(product) < max(0.06, 0.5 * spread(factors)))


def _scaled(d: torch.Tensor, w: torch.Tensor, rounding: float) -> Change:
    """Return factors of rows and columns by which w is nearest to d; one number where they differ by chance."""
    products = d * w
    squares = w.square()
    columns = torch.ones(d.size(1))
    if products.sum(0).abs().sum() > products.sum(1).abs().sum():  # columns of both signs
        columns = products.sum(0).sign()
    for _ in range(2):
        rows = (products @ columns) / (squares @ columns.square()).clamp_min(1e-30)
        columns = (rows @ products) / (rows.square() @ squares).clamp_min(1e-30)
    rows = rows * columns.abs().median()
    columns = columns / columns.abs().median()
    if spread(rows) < max(_SPREAD, 3 * rounding / math.sqrt(d.size(1))):
        rows = rows.abs().median() * rows.sign()
    if spread(columns) < max(_SPREAD, 3 * rounding / math.sqrt(len(d))):
        columns = columns.sign()
    return Change(rows, columns)


def _change_fault(change: Change, matrix: Matrix) -> CheckFinding:
    """Describe a change that nothing makes up for."""
    for kind, order in (("rows", change.row_order), ("columns", change.column_order)):
        if order is not None:
            return CheckFinding(kind, f"The {kind} are {order.text}.")
    if float(change.rows.min()) < 0 or float(change.columns.min()) < 0:
        return CheckFinding("sign", "The weights are the original's with the other sign.")
    if spread(change.rows) == spread(change.columns) == 0:
        return _factor(matrix, float(change.rows.median()), change.limit)
    if spread(change.rows) >= spread(change.columns):
        return _scale_fault(change.rows, "rows")
    return _scale_fault(change.columns * change.rows.median(), "columns")


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
    coded = matrix.coded
    d = matrix.values
    assert coded is not None
    num_rows, num_columns = d.shape
    group_n = coded.group_n or num_rows
    group_k = coded.group_k or num_columns

    def sums(values: torch.Tensor) -> torch.Tensor:
        """Sum up each scale group: [groups along N, groups along K]."""
        padded = torch.nn.functional.pad(
            values, (0, -num_columns % group_k, 0, -num_rows % group_n)
        )
        rows = padded.size(0) // group_n
        columns = padded.size(1) // group_k
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


def _order_of(
    d: torch.Tensor, originals: Mapping[str, Matrix], role: str, chosen: torch.Tensor
) -> RowOrder | None:
    """Find chosen rows of d elsewhere in the original's gate and up, or down; None if they are not there."""
    roles = ["w1", "w3"] if role != "w2" and {"w1", "w3"} <= originals.keys() else [role]
    pool = torch.cat([originals[role].values for role in roles])
    num_rows = len(originals[role].values)
    index = roles.index(role)
    start = index * num_rows
    steps = np.linspace(0, len(chosen) - 1, min(_NUM_ROWS, len(chosen)))
    picked = chosen[np.unique(steps.astype(int))]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (d.size(1), _SIGNATURE), generator=generator).float() * 2 - 1
    signatures = torch.nn.functional.normalize(pool @ signs)

    def owners(rows: torch.Tensor) -> torch.Tensor:
        return (d[rows] @ signs @ signatures.t()).abs().argmax(1)

    owner = owners(picked)
    cosines, own_cosines = (
        torch.nn.functional.cosine_similarity(d[picked], pool[rows]).abs()
        for rows in (owner, picked + start)
    )
    is_found = cosines > _SAME_ROW
    # and clearly nearer there
    is_elsewhere = is_found & (1 - cosines < 0.5 * (1 - own_cosines))
    if len(picked) < 2 or d.size(1) < _LEAST_SIZE or float(is_elsewhere.float().mean()) < _FOUND:
        return None
    owner = owner[is_found]
    picked = picked[is_found]
    place = picked + start
    if len(roles) == 2 and torch.equal(owner, place // 2 + place % 2 * num_rows):
        return RowOrder("gate and up in turns: alternating rows were cut in halves", owner[:0])
    if len(roles) == 2 and torch.equal(owner, picked * 2 + index):
        return RowOrder(
            "every second one of gate and up: halves were cut as alternating rows", owner[:0]
        )
    if not bool(((owner >= start) & (owner < start + num_rows)).all()):
        return None
    shift = (owner - place) % num_rows
    numbers = torch.arange(len(d))
    if bool((shift == shift[0]).all()):
        by = int(shift[0])
        return RowOrder(
            f"shifted by {by if by <= num_rows // 2 else by - num_rows}", (numbers + by) % num_rows
        )
    if torch.equal(owner - start, picked ^ 1):
        return RowOrder("exchanged in pairs, as by the other order of codes in a byte", numbers ^ 1)
    rows = torch.cat([owners(rows) for rows in torch.split(numbers, 256)])
    return RowOrder("the original's in another order", (rows - start).clamp(0, num_rows - 1))
