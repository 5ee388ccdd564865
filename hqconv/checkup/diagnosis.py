"""Comparison of a decoded matrix with the original's, and what a wrong one looks like.

Legend: N rows, K columns, d the checkpoint's weights, w the original's. The tangent of the angle between d and w is the
relative error without a common factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hqconv.checkup.findings import Finding
from hqconv.checkup.matrices import Matrix
from hqconv.quantization.coded_matrix import scale_values

_FURTHER = (
    8.0  # a sound matrix's tangent, of that of the formats' rounding: a calibration's is larger
)
_EXPLAINED = 3.0  # the same of a matrix that a hypothesis about its fault explains
_LEAST = 0.004  # a tangent that counts as one of rounding, whose error may be zero
_CHANCE = 4.0  # standard deviations of the cosine of unrelated numbers
_GAIN = (6.0, 0.004, 0.64)  # logarithm of the gain: of the squared tangent, beside it, at most
_SUSPECT = 1.8  # tangent, of the formats' rounding, from which an explanation is looked for
_SPREAD = 0.02  # of logarithms of factors, that are not the same number
_SIGNATURE, _NUM_ROWS = 64, 192  # numbers by which a row is found, and rows that are looked for
_FOUND, _SAME_ROW = (
    0.9,
    0.6,
)  # share of these rows that must be found; cosine of a row that is the same
ORDERED = "the original's in another order"


@dataclass(eq=False)
class Comparison:
    """Figures of one matrix against the original's, and its faults.

    error: Frobenius norm of w - d over that of w; 1 if one of both is zero. rounding: the error that the formats'
    rounding explains. tangent: of the angle between d and w.
    nearest: share of codes that are the nearest to the original's weight, NaN without codes. is_wrong: it is not this
    matrix of the original, and nothing in it explains why. gains: factors of rows and of columns, where it is scaled.
    order: the original's number of each row (of down: column), where all are there in another order.
    """

    error: float
    rounding: float
    tangent: float
    nearest: float = math.nan
    faults: list[Finding] = field(default_factory=list)
    is_wrong: bool = False
    gains: tuple[torch.Tensor, torch.Tensor] | None = None
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


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    dot, powers = _sum(one * other), _sum(one.square()) * _sum(other.square())
    return dot / math.sqrt(powers) if powers > 0 else 0.0


def tangent_of(cosine: float) -> float:
    """Return the tangent of an angle by its cosine; infinite for right angles and larger ones."""
    return math.sqrt(max(1 - cosine**2, 0)) / cosine if cosine > 0 else math.inf


def compare(role: str, matrix: Matrix, originals: Mapping[str, Matrix]) -> Comparison:
    """Compare a projection of one expert with the original's; originals: this expert's projections, by role."""
    theirs = originals[role]
    d, w = matrix.values, theirs.values
    sums = torch.stack(
        [x.sum(1, dtype=torch.float64) for x in (w.square(), d.square(), w * d)]
    )  # [3, N]
    power, decoded, dot = sums.sum(1).tolist()
    found = Comparison(0.0, math.hypot(matrix.resolution, theirs.resolution), 0.0)
    found.faults += _bias_faults(matrix, theirs)
    if not (power and decoded):
        if power or decoded:
            found.error, found.tangent = 1.0, math.inf
            what = (
                "All weights are zero, and the original's are not."
                if power
                else "The original's weights are zero."
            )
            found.faults.append(Finding("zero" if power else "stale", what))
        return found
    cosine = dot / math.sqrt(power * decoded)
    difference = w - d
    found.error, found.tangent = math.sqrt(_sum(difference.square()) / power), tangent_of(cosine)
    if matrix.cells is not None:
        found.nearest = float((difference.abs() <= 0.51 * matrix.cells).float().mean())
    is_near = cosine >= least_cosine(found.rounding, d.numel())
    gain, limit = dot / power, _gain_limit(found)
    is_scaled = is_near and abs(math.log(gain)) > limit
    is_suspect = is_scaled or found.distance > _SUSPECT
    explained = next(_explanations(found, role, matrix, originals), None) if is_suspect else None
    if explained is not None:
        found.faults += [] if explained.kind == "column-scales" else [explained]
    elif is_scaled:
        found.faults.append(_factor(matrix, gain, limit))
    elif (bad := _bad_rows(found, matrix, theirs, sums, is_near=is_near)) is not None:
        found.faults.append(_rows(bad, role, d, originals))
    else:
        found.is_wrong = not is_near
    return found


def _bias_faults(matrix: Matrix, theirs: Matrix) -> Iterator[Finding]:
    if (matrix.bias is None) != (theirs.bias is None):
        expected, given = ("no bias" if one.bias is None else "a bias" for one in (theirs, matrix))
        yield Finding("bias", "One of the checkpoint and the original has biases.", expected, given)
    elif matrix.bias is not None and theirs.bias is not None:
        w, d = theirs.bias.float(), matrix.bias.float()
        excess = (d - w).abs() - 2.0**-6 * w.abs() - 1e-6
        if bool((excess > 0).any()):
            row = int(excess.argmax())
            what = "The bias is not the original's."
            yield Finding("bias", what, f"{float(w[row]):.4g} in row {row}", f"{float(d[row]):.4g}")


def _gain_limit(found: Comparison) -> float:
    return min(_GAIN[0] * max(found.tangent, found.rounding) ** 2 + _GAIN[1], _GAIN[2])


def _factor(matrix: Matrix, gain: float, limit: float) -> Finding:
    """Return the finding about a matrix that is the original's times a factor."""
    coded, power = matrix.coded, math.log2(gain)
    found = f"{gain:.4g}" + f" (2**{round(power)})" * (abs(power - round(power)) < 0.01)
    for number in () if coded is None else (coded.scale_2, coded.scale):
        if number is not None and number.numel() == 1:
            scale = float(scale_values(number.reshape(1)))
            if scale > 0 and abs(math.log(gain / scale**2)) < max(limit, 0.02):
                found += f": the scale {scale:.4g} is inverted"
    return Finding(
        "factor",
        "The weights are the original's times a constant factor.",
        f"within a factor of {math.exp(limit):.3f}",
        found,
    )


def _bad_rows(
    found: Comparison, matrix: Matrix, theirs: Matrix, sums: torch.Tensor, *, is_near: bool
) -> torch.Tensor | None:
    """Return the rows that are not the original's; None if there are none, or hardly any others."""
    power, decoded, dot = sums
    cosines = (dot / (power * decoded).sqrt()).nan_to_num(1.0)
    tangent = max(found.tangent if is_near else 0.0, found.rounding, _LEAST)
    cells = [one.cells for one in (matrix, theirs) if one.cells is not None]
    own = sum((one.square().sum(1).double() / 12 for one in cells), torch.zeros_like(power)) / power
    limit = (
        1 + (_FURTHER * own.sqrt().nan_to_num(0.0, 0.0, 0.0).clamp_min(tangent)).square()
    ).rsqrt()
    chance = _CHANCE * tangent**2 / (1 + tangent**2) / math.sqrt(matrix.values.size(1))
    is_lost = (decoded == 0) & (power > 1e-3 * power.mean())
    bad = ((cosines < limit - chance) | is_lost).nonzero().flatten()
    return bad if 0 < len(bad) < 0.9 * len(power) else None


def _rows(
    bad: torch.Tensor, role: str, d: torch.Tensor, originals: Mapping[str, Matrix]
) -> Finding:
    text = f"{len(bad)} of {len(d)}, the first is row {int(bad[0])}"
    if order := _order_of(d, originals, role, bad):
        return Finding("rows", f"Some rows are {order[0]}.", "the original's rows", text)
    return Finding("rows", "Some rows are not the original's.", "the original's rows", text)


# --- explanations --------------------------------------------------------------------------------------------


def _explanations(
    found: Comparison, role: str, matrix: Matrix, originals: Mapping[str, Matrix]
) -> Iterator[Finding]:
    """Yield what explains a matrix that is further from the original than rounding, the likeliest first.

    An explanation must bring it near, and to half the tangent that it had or to that of rounding.
    """
    d, w = matrix.values, originals[role].values
    limit = max(0.5 * found.tangent, min(1.3 * found.rounding, 0.8 * found.tangent), _LEAST)

    def explains(values: torch.Tensor, of: torch.Tensor = d) -> bool:
        cosine = _cosine(values, of)
        return (
            cosine >= least_cosine(found.rounding, d.numel(), _EXPLAINED)
            and tangent_of(cosine) < limit
        )

    if explains(-w):
        yield Finding("sign", "The weights are the original's with the other sign.")
    rows, columns = _rank_one(d, w)
    spreads = [float(x.clamp_min(1e-30).log().std()) for x in (rows, columns)]
    if (
        min(float(rows.min()), float(columns.min())) > 0
        and max(spreads) > _SPREAD
        and explains(w * rows * columns)
    ):
        found.gains = (rows.flatten() / rows.median(), columns / columns.median())
        if spreads[1] > max(_SPREAD, 0.25 * spreads[0]):
            yield Finding("column-scales", "The columns are scaled.")
    if matrix.coded is not None and matrix.coded.column_groups is None:
        yield from (one for one, values, of in _scale_faults(matrix, w) if explains(values, of))
    if found.gains is not None:
        yield _of_scales(rows, "rows")
    if explains(w.t().reshape(d.shape)) or explains(w.reshape(d.shape[::-1]).t()):
        yield Finding(
            "transposed", "The matrix is the original's, transposed.", "[out, in]", "[in, out]"
        )
    if order := _order_of(d, originals, role, torch.arange(len(d))):
        text, found.order = order
        yield Finding("gate-up-rows" if "gate and up" in text else "rows", f"The rows are {text}.")
    turned = {role: replace(originals[role], values=w.t().contiguous())}
    if order := _order_of(d.t().contiguous(), turned, role, torch.arange(d.size(1))):
        text, found.order = order
        yield Finding("columns", f"The columns are {text}.")


def _rank_one(d: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors of rows [N, 1] and of columns [K] by which w is nearest to d."""
    products, squares = d * w, w.square()
    rows = torch.ones(len(d))
    for _ in range(2):
        columns = (rows @ products) / (rows.square() @ squares).clamp_min(1e-30)
        rows = (products @ columns) / (squares @ columns.square()).clamp_min(1e-30)
    return rows[:, None], columns


def _of_scales(gains: torch.Tensor, of: str) -> Finding:
    what = (
        "The codes are the original's, and the scales are not: each group has a factor of its own."
    )
    least, most = float(gains.min()), float(gains.max())
    return Finding(
        "scales", what, "factors near 1", f"factors from {least:.3g} to {most:.3g} of {of}"
    )


def _scale_faults(
    matrix: Matrix, w: torch.Tensor
) -> Iterator[tuple[Finding, torch.Tensor, torch.Tensor]]:
    """Yield faults of scales and zero points, each with two matrices that are near if it is one."""
    coded, cells, d = matrix.coded, matrix.cells, matrix.values
    assert coded is not None
    assert cells is not None
    sides = [
        group or size for group, size in zip((coded.group_n, coded.group_k), d.shape, strict=True)
    ]

    def sums(values: torch.Tensor) -> torch.Tensor:
        """Sum up each scale group: [groups along N, groups along K]."""
        ends = [-size % side for size, side in zip(d.shape, sides, strict=True)]
        padded = torch.nn.functional.pad(values, (0, ends[1], 0, ends[0]))
        num_rows, num_columns = (
            size // side for size, side in zip(padded.shape, sides, strict=True)
        )
        return padded.view(num_rows, sides[0], num_columns, sides[1]).sum(
            (1, 3), dtype=torch.float64
        )

    def spread(groups: torch.Tensor) -> torch.Tensor:
        whole = groups.float().repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1)
        return whole[: d.size(0), : d.size(1)]

    gains = sums(d * w) / sums(w.square()).clamp_min(1e-30)
    scales = scale_values(coded.scale).double().abs().broadcast_to(gains.shape)
    kept = (gains > 0) & (scales > 0)
    if int(kept.sum()) > 2:
        finding, more = _of_scales(gains[kept], "groups"), ""
        logs = torch.stack([gains[kept].log(), scales[kept].log()])
        of_gains, of_scales = (float(x.std()) for x in logs)
        if of_scales < _SPREAD < of_gains:
            more = " All scales are the same number."
        elif (
            of_scales > _SPREAD
            and abs(float(torch.corrcoef(logs)[0, 1]) * of_gains / of_scales - 2) < 0.3
        ):
            more = " The scales are inverted."
        yield replace(finding, what=finding.what + more), w * spread(gains), d
    offsets = sums(d - w) / sums(torch.ones_like(d))
    steps = float((offsets * sums(torch.ones_like(d)) / sums(cells).clamp_min(1e-30)).median())
    what = "Each group of weights is the original's and an offset: the zero points are wrong."
    yield (
        Finding("zero-points", what, "no offset", f"{steps:+.2f} steps in the median group"),
        d - spread(offsets),
        w,
    )


def _order_of(
    d: torch.Tensor, originals: Mapping[str, Matrix], role: str, chosen: torch.Tensor
) -> tuple[str, torch.Tensor | None] | None:
    """Find chosen rows of d elsewhere in the original's gate and up, or down; None if they are not there.

    Returns their order in words, and in the one that is no rule the original's number of each row.
    """
    roles = ["w1", "w3"] if role != "w2" and {"w1", "w3"} <= originals.keys() else [role]
    pool = torch.cat([originals[one].values for one in roles])
    num_rows, index = len(originals[role].values), roles.index(role)
    start = index * num_rows
    picked = chosen[
        np.unique(np.linspace(0, len(chosen) - 1, min(_NUM_ROWS, len(chosen))).astype(int))
    ]
    signs = (
        torch.randint(
            0, 2, (d.size(1), _SIGNATURE), generator=torch.Generator().manual_seed(0)
        ).float()
        * 2
        - 1
    )
    signatures = torch.nn.functional.normalize(pool @ signs)

    def owners(rows: torch.Tensor) -> torch.Tensor:
        return (d[rows] @ signs @ signatures.t()).argmax(1)

    owner = owners(picked)
    cosines, own = (
        torch.nn.functional.cosine_similarity(d[picked], pool[of]) for of in (owner, picked + start)
    )
    is_found = cosines > _SAME_ROW
    is_elsewhere = is_found & (1 - cosines < 0.5 * (1 - own))  # and clearly nearer there
    if len(picked) < 2 or float(is_elsewhere.float().mean()) < _FOUND:
        return None
    owner, picked = owner[is_found], picked[is_found]
    place = picked + start
    if len(roles) == 2 and bool((owner == place // 2 + place % 2 * num_rows).all()):
        return "gate and up in turns: alternating rows were cut in halves", None
    if len(roles) == 2 and bool((owner == picked * 2 + index).all()):
        return "every second one of gate and up: halves were cut as alternating rows", None
    if not bool(((owner >= start) & (owner < start + num_rows)).all()):
        return None
    shift = (owner - place) % num_rows
    if bool((shift == shift[0]).all()):
        by = int(shift[0])
        return f"shifted by {by if by <= num_rows // 2 else by - num_rows}", None
    if bool((owner - start == picked ^ 1).all()):
        return "exchanged in pairs, as by the other order of codes in a byte", None
    whole = [
        owners(torch.arange(begin, min(begin + 256, len(d)))) for begin in range(0, len(d), 256)
    ]
    return ORDERED, torch.cat(whole) - start
