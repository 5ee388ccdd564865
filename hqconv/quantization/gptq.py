"""Error compensation inside tiles of columns: the quantizer gptq.

The inputs' mean products H = Σ p² x xᵀ / Σ p² say how errors in one column can be made good in others. H is known in
diagonal tiles of at most 128 columns; GPTQ is done inside each. With H = P S Pᵀ (P unit upper triangular, S diagonal)
and errors e = w - decoded, eᵀ H e is the sum of S_j (e_j + Σ_{i<j} P_ij e_i)²: so column j is rounded as
w_j + Σ_{i<j} P_ij e_i, and its own loss counts S_j. This is GPTQ with Cholesky factors of the inverse, in another
writing. Columns with the largest H_jj are rounded first. A tile may have columns of several scale groups.

The result of `mse` with the diagonal of H as importance is kept, unless codes with compensation lose less by a margin.
The same bits on every device: factors by elementwise float64 operations on the CPU, one order of all sums.
A change of results raises `planning.layer_encoding.COMPENSATION_VERSION`.
Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K, T tiles along K, W columns of a
tile, U units of decision: groups, or tiles where these are larger.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hqconv.quantization.group_scales import GroupScales
from hqconv.quantization.hadamard import rotate
from hqconv.quantization.quantized import HessianFactors, TileFactors, fold_sum
from hqconv.quantization.scale_search import least_byte, nearby_scales
from hqconv.schemas.artifact_names import HESSIAN_TILE
from hqconv.schemas.weight_schema import WeightSchema

_DAMPING = 1 + 2.0**-7  # of the diagonal: bounds what a column can be asked to make good
_LEAST_PENALTY = 2.0**-9  # of a diagonal entry; the damped tile of a Gram matrix has more
_MARGIN = 1 - 2.0**-20
_CACHED_FACTORS = 4  # of the layers in progress
_SEARCHED_TYPES = ("group", "channel")  # of scales that belong to one row


@functools.lru_cache(maxsize=_CACHED_FACTORS)
def hessian_factors(hessian: bytes, num_columns: int, group_size: int, rotation: int) -> HessianFactors:
    """Return the factors of float32 tiles [ceil(K / 128), 128, 128] as stored in an importance file.

    group_size: columns that share a scale; 0 for a whole row. rotation: the block size of rotated inputs, at most 128;
    0 for none.
    """
    tiles = torch.frombuffer(bytearray(hessian), dtype=torch.float32).view(-1, HESSIAN_TILE, HESSIAN_TILE)
    if rotation:
        assert rotation <= HESSIAN_TILE, "products of columns in different tiles are not known"
        tiles = rotate(rotate(tiles, rotation).transpose(1, 2).contiguous(), rotation)
    importance = tiles.diagonal(dim1=1, dim2=2).reshape(-1)[:num_columns].contiguous()
    is_narrow = 0 < group_size < HESSIAN_TILE
    narrow = _in_tiles(tiles, num_columns, group_size) if is_narrow else None
    return HessianFactors(_in_tiles(tiles, num_columns, HESSIAN_TILE), narrow, importance)


def _in_tiles(tiles: torch.Tensor, num_columns: int, width: int) -> TileFactors:
    """Return the factors of smaller tiles along the diagonal; the last one of `num_columns` may be a part of one."""
    count, per_tile = -(-num_columns // width), HESSIAN_TILE // width
    cut = tiles.view(-1, per_tile, width, per_tile, width).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    factors = factorized(cut.reshape(-1, width, width)[:count].double().numpy())
    return TileFactors(*(torch.from_numpy(one) for one in factors))


def factorized(tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the order int64 [T, W], P float64 [T, W, W] above its diagonal, and S float64 [T, W].

    tiles: symmetric and positive semidefinite, float64 [T, W, W]; the lower triangle is not read. P and S are in the
    order of rounding. Columns whose diagonal is 0 come last, and neither count nor make anything good. An indefinite
    tile, which is no matrix of products, is taken for its diagonal.
    """
    diagonal = np.maximum(np.einsum("tww->tw", tiles), 0.0)
    order = np.argsort(-diagonal, axis=1, kind="stable")
    upper = np.triu(tiles, 1)
    whole = upper + upper.transpose(0, 2, 1)
    at = np.arange(len(tiles))[:, None]
    sorted_diagonal = diagonal[at, order]
    has_weight = sorted_diagonal > 0
    left = whole[at[:, :, None], order[:, :, None], order[:, None, :]]
    left *= has_weight[:, :, None] & has_weight[:, None, :]
    damped = np.where(has_weight, sorted_diagonal * _DAMPING, 1.0)
    width = tiles.shape[1]
    left[:, np.arange(width), np.arange(width)] = damped
    feedback, penalty, is_sound = np.zeros_like(left), damped.copy(), np.ones(len(tiles), bool)
    for j in range(width - 1, -1, -1):
        is_sound &= left[:, j, j] >= damped[:, j] * _LEAST_PENALTY
        column = np.where(is_sound[:, None], left[:, :j, j], 0.0)
        penalty[is_sound, j] = left[is_sound, j, j]
        feedback[:, :j, j] = column / penalty[:, j, None]
        left[:, :j, :j] -= feedback[:, :j, j, None] * column[:, None, :]
    feedback[~is_sound], penalty[~is_sound] = 0.0, damped[~is_sound]
    return order, feedback, np.where(has_weight, penalty, 0.0)


Measure = Callable[[GroupScales, TileFactors], torch.Tensor]  # losses of compensated codes, float64 [E, N, T]


@dataclass(frozen=True, eq=False)
class CompensationStart:
    """A stack after `mse`.

    rounded: its round-to-nearest scales, from which candidates come. best: those of `mse`. kept: the function of the
    losses of the codes of `mse`, float64 [E, N, T]; measure: of compensated codes under given scales.
    """

    rounded: GroupScales
    best: GroupScales
    kept: Callable[[TileFactors], torch.Tensor]
    measure: Measure


@dataclass(frozen=True, eq=False)
class Compensation:
    """The chosen scales, and a mask of each row's units whose codes are compensated in wide tiles: bool [E, N, U].

    groups_per_unit: scale groups of a unit; the last unit may have fewer.
    """

    scales: GroupScales
    changed: torch.Tensor
    groups_per_unit: int

    def of_groups(self) -> torch.Tensor:
        """Return the mask for each group, bool [E, N, G]."""
        return _spread(self.changed, self.scales.scale.size(-1), self.groups_per_unit)


def inverse_of(scales: GroupScales) -> torch.Tensor:
    """Return the factor from corrected weights to codes; 0 where a scale is 0: carried errors change no code there."""
    inverse = scales.inverse()
    return torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(inverse))


def compensate(
    starts: Sequence[CompensationStart], factors: HessianFactors, schema: WeightSchema, param_dtype: str
) -> list[Compensation]:
    """Choose scales and compensated codes, or the scales and codes of `mse`, for each row's part of every unit.

    Scales that belong to one row and have no zero point are searched again, under compensation inside the group; others
    stay.
    """
    stored = [one.rounded.stored for one in starts]
    floor = least_byte(stored, param_dtype, has_row_scale=schema.has_row_scale)
    return [_choose(one, factors, schema, param_dtype, floor) for one in starts]


def _choose(
    start: CompensationStart,
    factors: HessianFactors,
    schema: WeightSchema,
    param_dtype: str,
    floor: torch.Tensor | None,
) -> Compensation:
    found = [start.best]
    if schema.weight_scale_type in _SEARCHED_TYPES and not schema.has_zero_point:
        found.append(_searched(start, factors.narrow or factors.wide, schema, param_dtype, floor))
    num_groups, size = start.best.scale.size(-1), schema.weight_scale_group_size
    per_unit = max(1, HESSIAN_TILE // size) if size else 1
    least = _of_units(start.kept(factors.wide), num_groups) * _MARGIN
    scales, changed = start.best, torch.zeros_like(least, dtype=torch.bool)
    for tried in found:
        loss = _of_units(start.measure(tried, factors.wide), num_groups)
        wins = loss < least
        changed |= wins
        least = torch.where(wins, loss, least)
        if tried is not start.best:
            scales = tried.where(_spread(wins, num_groups, per_unit), scales)
    return Compensation(scales, changed, per_unit)


def _searched(
    start: CompensationStart, factors: TileFactors, schema: WeightSchema, param_dtype: str, floor: torch.Tensor | None
) -> GroupScales:
    """Return the scales with the least loss of each row's groups, compensated inside the group."""
    num_groups = start.best.scale.size(-1)
    scales, least = start.best, _of_units(start.measure(start.best, factors), num_groups) * _MARGIN
    everywhere = torch.ones_like(least, dtype=torch.bool)
    for tried, valid in ((start.rounded, everywhere), *nearby_scales(start.rounded, schema, param_dtype, floor)):
        loss = _of_units(start.measure(tried, factors), num_groups)
        wins = valid & (loss < least)
        scales, least = tried.where(wins, scales), torch.where(wins, loss, least)
    return scales


def _of_units(loss: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Sum the losses of tiles [E, N, T] over each group where groups are larger: [E, N, U]."""
    if loss.size(-1) <= num_groups:
        return loss
    return fold_sum(loss.clone().view(*loss.shape[:2], num_groups, -1))


def _spread(of_units: torch.Tensor, num_groups: int, per_unit: int) -> torch.Tensor:
    """Repeat [E, N, U] for each group of a unit: [E, N, G]."""
    return of_units.repeat_interleave(per_unit, dim=-1)[..., :num_groups]
