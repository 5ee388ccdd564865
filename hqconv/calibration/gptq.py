"""Quantization of experts by the error of their outputs: GPTQ over all columns, then descent of codes and scales.

H = Σ p² x xᵀ are products of a GEMM's inputs over the tokens of a calibration. A row's error e = w - decoded costs
eᵀ H e. With H = M Mᵀ (M upper triangular) this is Σ_j (Σ_{i≤j} M_ij e_i)²: so column j is rounded as
w_j + Σ_{i<j} M_ij e_i / M_jj, which makes the errors of the columns before it good.

Two starts are tried, and each row takes the one that loses less: columns as they are, with the scales of each group
chosen for what its weights have become; and columns by decreasing diagonal of H, under scales that are searched
beforehand. Then every group is rounded again, with its scales, as the others stand: from the first to the last, and
back.

A GEMM behind a quantized one is given x in place of the source's y: its weights are first solved again, so that their
outputs for x are nearest to the source's outputs for y. How far is decided on tokens that the solution has not seen.

torch alone, on any device. The same bytes for the same inputs, number of experts and type of device, not between types.
Legend: E experts, N output rows, K input columns, G groups along K, S columns of a group, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hqconv.humming_ops.runtime import humming, resident
from hqconv.quantization import quantized
from hqconv.quantization.bit_codec import bits_of
from hqconv.quantization.group_scales import (
    GroupScales,
    nearest_scales,
    scales_of,
    scales_under,
    stored_values,
)
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import QuantizedStack, rotate
from hqconv.quantization.scale_search import (
    candidate_scales,
    ladder_of,
    least_byte,
    magnitude_bytes,
    stepped,
)
from hqconv.schemas.weight_schema import WeightSchema

_DAMPING = 0.01  # of the mean diagonal of H
_RIDGES = (0.01, 0.1, 1.0)  # tried for w2, of the mean diagonal of H
_BLOCK = 128  # columns that are rounded between two products with whole rows
_PASSES = 4  # of the descent, an even number
_MARGIN = 1 - 2.0**-20


@dataclass(frozen=True, eq=False)
class Products:
    """Sums of p² x xᵀ over tokens, float64 [1 or E, K, K]: of most tokens, and of those held back for choices.

    drifts: the same sums of p² (y - x) xᵀ, where the source's weights before the GEMM give y in place of x.
    """

    fit: torch.Tensor
    held: torch.Tensor
    drifts: tuple[torch.Tensor, torch.Tensor] | None = None

    @cached_property
    def factors(self) -> tuple[_Factor, _Factor]:
        """The factors of the columns in their order, and from the last to the first."""
        total = self.fit + self.held
        return _Factor.of(total), _Factor.of(total.flip(1, 2))

    @cached_property
    def order(self) -> torch.Tensor:
        """The columns by decreasing diagonal, int64 [1 or E, K]."""
        diagonal = self.factors[0].h.diagonal(dim1=1, dim2=2)
        return torch.argsort(diagonal, dim=1, descending=True, stable=True)

    @cached_property
    def ordered_factor(self) -> _Factor:
        """The factor of the columns in that order."""
        total = self.fit + self.held
        rows = total.gather(1, self.order.unsqueeze(2).expand_as(total))
        return _Factor.of(rows.gather(2, self.order.unsqueeze(1).expand_as(total)))

    def rotated(self, block: int) -> Products:
        """Return the products of inputs that are rotated in blocks of columns; without drifts."""
        fit, held = (
            rotate(rotate(one, block).transpose(1, 2).contiguous(), block)
            for one in (self.fit, self.held)
        )
        return Products(fit, held)

    def compensated(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights [E, N, K] whose outputs for x are nearest to those of `weights` for y, float32 with drifts.

        W + W (Σ p² (y - x) xᵀ) (Σ p² x xᵀ + ridge)⁻¹, with the ridge of each expert that is the best one for the tokens
        that were held back: W itself where all lose.
        """
        if self.drifts is None:
            return weights
        weights = weights.float()
        ridge = weights.new_full((len(weights), 1, 1), torch.inf, dtype=torch.float64)
        held, pull = self.held.float(), weights @ self.drifts[1].float()
        least = torch.zeros_like(ridge)
        for tried in _RIDGES:
            change = weights @ _solved(self.fit, self.drifts[0], torch.full_like(ridge, tried))
            loss = ((change @ held - 2 * pull) * change).double().sum((1, 2), keepdim=True)
            ridge, least = torch.where(loss < least, tried, ridge), torch.minimum(loss, least)
        return weights + weights @ _solved(
            self.fit + self.held, self.drifts[0] + self.drifts[1], ridge
        )


def _solved(h: torch.Tensor, drift: torch.Tensor, ridge: torch.Tensor) -> torch.Tensor:
    """Return drift (H + ridge)⁻¹, float32 [E, K, K]; 0 for infinite ridges.

    ridge: shares of the mean diagonal of H, float64 [E, 1, 1].
    """
    mean = h.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
    eye = torch.eye(h.size(1), dtype=h.dtype, device=h.device)
    used = torch.where((mean > 0) & torch.isfinite(ridge), ridge * mean, 1.0)
    found = torch.cholesky_solve(drift.mT, torch.linalg.cholesky(h + used * eye)).mT
    return torch.where(torch.isfinite(ridge), found, 0.0).float()


def quantize_by_outputs(
    stacks: Sequence[torch.Tensor], schema: WeightSchema, param_dtype: str, products: Products
) -> list[QuantizedStack]:
    """Quantize stacks [E, N, K] of the experts' matrices that have one input, as `quantize_stacks` does.

    products: of that input, in the columns of the matrices. A matrix with NaN or Inf gets a power of NaN or Inf.
    """
    aims = [products.compensated(one) for one in stacks]
    if schema.rotation:
        products = products.rotated(schema.rotation)
        stacks, aims = ([rotate(one, schema.rotation) for one in ones] for ones in (stacks, aims))
        schema = replace(schema, hadamard_block_size=0)
    rounded = quantize_stacks(aims, schema, param_dtype)
    starts = [scales_of(one.tensors, schema) for one in rounded]
    weights = _by_columns(torch.cat([one.float() for one in aims], 1))
    found = _Matrix(weights, schema, param_dtype, _above(starts, schema)).solve(products)
    done, row, scale_row = [], 0, 0
    with resident(weights.device):
        for stack, start, one in zip(stacks, starts, rounded, strict=True):
            mine = found.numbers[:, row : row + stack.size(1)]
            scales = _rows(found.scales, scale_row, start.scale.size(1), schema)
            row, scale_row = row + stack.size(1), scale_row + start.scale.size(1)
            codes = quantized.codes_of(mine, mine, schema).contiguous()
            weight = humming().ops.pack_weight(codes, schema.num_bits)
            tensors = {**one.tensors, **scales.tensors(schema, param_dtype), "weight": weight}
            error, power = quantized.error_sums(stack, tensors, schema)
            done.append(QuantizedStack(tensors, error, power, torch.zeros_like(one.num_exact)))
    return done


@dataclass(frozen=True, eq=False)
class _Factor:
    """H, damped, float32 [1 or E, K, K], and factors of it."""

    h: torch.Tensor

    @classmethod
    def of(cls, products: torch.Tensor) -> _Factor:
        h = products.clone()
        diagonal = h.diagonal(dim1=1, dim2=2)
        mean = diagonal.mean(1, keepdim=True)
        diagonal += torch.where(mean > 0, _DAMPING * mean, torch.ones_like(mean))
        return cls(h.float())

    @cached_property
    def m(self) -> torch.Tensor:
        """The upper triangular M with H = M Mᵀ, float32 [1 or E, K, K]."""
        return _upper(self.h.double()).float()

    def free(self, size: int) -> _Blocks:
        """Return the factors of runs of `size` columns that are rounded while the columns behind them are free."""
        m = _diagonal_blocks(self.m, size).double()
        return _Blocks(m.float().contiguous(), _inverse(m).float())

    def alone(self, size: int) -> _Blocks:
        """Return the factors of runs of `size` columns that are rounded while all other columns stand."""
        m = _upper(_diagonal_blocks(self.h, size).double())
        inverse = _inverse(m)
        return _Blocks(m.float().contiguous(), (inverse.mT @ inverse).float())


def _upper(h: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.cholesky(h.flip(-2, -1)).flip(-2, -1)
    return found


def _inverse(m: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(m.size(-1), dtype=m.dtype, device=m.device).expand_as(m)
    found: torch.Tensor = torch.linalg.solve_triangular(m, eye, upper=True)
    return found


def _diagonal_blocks(h: torch.Tensor, size: int) -> torch.Tensor:
    """Return the blocks on the diagonal of [e, K, K], as [K / size, e, size, size]."""
    blocks = h.view(len(h), h.size(1) // size, size, -1, size)
    return blocks.diagonal(dim1=1, dim2=3).permute(3, 0, 1, 2)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Factors of runs of columns, upper triangular M, float32 [G, 1 or E, S, S].

    inverse: that brings what other columns pull to weights: of M, or of M Mᵀ where these stand.
    """

    m: torch.Tensor
    inverse: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Rounded:
    """Codes of some columns under the best of some scales: losses [E, N], numbers and decoded values [E, N, S].

    index: of the scales that are best, int64 [E, N].
    """

    loss: torch.Tensor
    index: torch.Tensor
    numbers: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Solution:
    """Numbers of codes and decoded values [E, N, K], scales [E, R, G], and the loss of each row [E, N]."""

    numbers: torch.Tensor
    values: torch.Tensor
    scales: GroupScales
    loss: torch.Tensor

    def or_better(self, other: _Solution) -> _Solution:
        """Return the better one of two solutions for each row; their scales are the same where rows share them."""
        wins = (other.loss < self.loss).unsqueeze(2)
        scales = self.scales
        if scales.scale.size(1) == wins.size(1):
            scales = other.scales.where(wins.expand_as(scales.scale), scales)
        return _Solution(
            torch.where(wins, other.numbers, self.numbers),
            torch.where(wins, other.values, self.values),
            scales,
            torch.minimum(self.loss, other.loss),
        )

    def backwards(self) -> _Solution:
        """Return the solution with the columns from the last to the first."""
        return _Solution(
            self.numbers.flip(2), self.values.flip(2), _backwards(self.scales), self.loss
        )


@dataclass(frozen=True, eq=False)
class _Matrix:
    """Matrices of a projection, float32 [E, N, K], and the scales of round-to-nearest."""

    weights: torch.Tensor
    schema: WeightSchema
    param_dtype: str
    start: GroupScales

    @cached_property
    def searches(self) -> bool:
        """True where scales are chosen too: those of groups of columns."""
        return (
            self.schema.weight_scale_type == "group"
            and self.schema.weight_scale_group_size <= _BLOCK * 2
        )

    @cached_property
    def size(self) -> int:
        """Columns that are rounded together, under one scale."""
        return (
            self.schema.weight_scale_group_size
            if self.searches
            else math.gcd(_BLOCK, self.weights.size(2))
        )

    @cached_property
    def floor(self) -> torch.Tensor | None:
        """See `least_byte`."""
        return least_byte(
            [self.start.stored], self.param_dtype, has_row_scale=self.schema.has_row_scale
        )

    def solve(self, products: Products) -> _Solution:
        """Return codes and scales with a small loss."""
        scales = self.start
        if self.searches:
            diagonal = products.factors[0].h.diagonal(dim1=1, dim2=2)
            scales = self.searched(diagonal.view(len(diagonal), 1, -1, self.size))
        found = self.in_order(products, scales).or_better(self.by_diagonal(products, scales))
        sides = self, replace(self, weights=self.weights.flip(2), start=_backwards(self.start))
        alone = [factor.alone(self.size) for factor in products.factors]
        for number in range(_PASSES):
            side, factor, blocks = (
                sides[number % 2],
                products.factors[number % 2],
                alone[number % 2],
            )
            found = side.swept(found, factor.h, blocks, is_first=False).backwards()
        return found

    # --- scales

    def of_rows(self, scales: GroupScales) -> GroupScales:
        """Return scales for each row: those of a block or a tensor repeated."""
        rows, have = self.weights.size(1), scales.scale.size(1)
        if have == rows:
            return scales
        stored = bits_of(scales.stored).repeat_interleave(rows // have, 1).view(scales.stored.dtype)
        return GroupScales(
            stored, scales.scale.repeat_interleave(rows // have, 1), scales.zero, scales.second
        )

    def nearest(self, target: torch.Tensor) -> GroupScales:
        """Return the scales of round-to-nearest of groups [E, N, G, S], under the second scales of the start."""
        highest, lowest = target.amax(-1).clamp_min(1e-30), target.amin(-1).clamp_max(-1e-30)
        if self.start.second is not None:
            return scales_under(self.start.second, highest, lowest, self.schema, self.param_dtype)
        return nearest_scales(highest, lowest, self.schema, self.param_dtype).scales

    def neighbours(self, scales: GroupScales) -> list[GroupScales]:
        """Return the scales of all groups that are next to others [E, N, G], or these where there are none."""
        if self.schema.has_zero_point or not self.searches:
            return []
        ladder = ladder_of(self.schema, self.param_dtype)
        steps = (torch.full_like(scales.scale, step, dtype=torch.int32) for step in (2, -1))
        found = [stepped(scales, step, ladder) for step in steps]
        return [one.where(exists & self.is_allowed(one), scales) for one, exists in found]

    def candidates(
        self, kept: GroupScales, beside: list[GroupScales], group: int, target: torch.Tensor
    ) -> list[GroupScales]:
        """Return scales to try for a group [E, N, S]: the kept ones [E, N, 1], those of the target, and neighbours."""
        if not self.searches:
            return [kept]
        found = self.nearest(target.unsqueeze(2))
        if self.floor is not None:
            found = found.where(self.is_allowed(found), kept)
        return [kept, found, *(_columns(one, slice(group, group + 1)) for one in beside)]

    def is_allowed(self, scales: GroupScales) -> torch.Tensor:
        """Return a mask of the scales that the parameter dtype can hold beside the start's largest."""
        if self.floor is None:
            return torch.ones_like(scales.scale, dtype=torch.bool)
        magnitude, largest = (
            magnitude_bytes(scales.stored),
            magnitude_bytes(self.start.stored).amax((1, 2), keepdim=True),
        )
        return (magnitude >= self.floor) & (magnitude <= largest)

    def searched(self, weight: torch.Tensor) -> GroupScales:
        """Return the scales of the least squared error, weighted by `weight` [1 or E, 1, G, S]."""
        start, target = self.start, self.weights.view(*self.weights.shape[:2], -1, self.size)

        def loss_of(scales: GroupScales) -> torch.Tensor:
            decoded = quantized.decode(_nearest(target, scales, self.schema), scales)
            return decoded.sub_(target).square_().mul_(weight).sum(-1)

        best, least = start, loss_of(start) * _MARGIN
        for tried, valid in candidate_scales(start, self.schema, self.param_dtype, self.floor):
            loss = loss_of(tried)
            wins = valid & self.is_allowed(tried) & (loss < least)
            best, least = tried.where(wins, best), torch.where(wins, loss, least)
        return best

    # --- codes

    def in_order(self, products: Products, scales: GroupScales) -> _Solution:
        """Round columns as they are; scales are chosen for what a group's weights have become."""
        nothing = torch.zeros_like(self.weights)
        rows = nothing.new_full(nothing.shape[:2], torch.inf)
        factor = products.factors[0]
        start = _Solution(nothing, self.weights.clone(), scales, rows)
        return self.swept(start, factor.m, factor.free(self.size), is_first=True)

    def swept(
        self, found: _Solution, pull_of: torch.Tensor, blocks: _Blocks, *, is_first: bool
    ) -> _Solution:
        """Round group after group, each with its scales.

        First under M, with errors of the columns before; then under H, as all other columns stand, where this gains.
        pull_of: M or H, [1 or E, K, K]. The tensors of `found` are overwritten.
        """
        numbers, values, num_columns = found.numbers, found.values, self.weights.size(2)
        error = self.weights - values
        static = self.of_rows(found.scales)
        beside, parts, loss = self.neighbours(static), [], torch.zeros_like(found.loss)
        width = self.size * max(1, _BLOCK // self.size)
        for begin in range(0, num_columns, width):
            end = min(begin + width, num_columns)
            before = begin if is_first else num_columns
            pull = _times(error[:, :, :before], pull_of[:, :before, begin:end])
            for first in range(begin, end, self.size):
                group, last = first // self.size, first + self.size
                m, now, kept = blocks.m[group], values[:, :, first:last], self.at(static, first)
                target = now + _times(
                    pull[:, :, first - begin : last - begin], blocks.inverse[group]
                )
                done, scales = self.rounded(target, self.candidates(kept, beside, group, target), m)
                if is_first:
                    change = done.values - now
                    loss += done.loss
                else:
                    standing = _times(target - now, m).square().sum(2)
                    wins = (done.loss < standing * _MARGIN).unsqueeze(2)
                    change = torch.where(wins, done.values - now, 0.0)
                    scales = scales.where(wins, kept)
                parts.append(scales)
                numbers[:, :, first:last] = (
                    done.numbers
                    if is_first
                    else torch.where(wins, done.numbers, numbers[:, :, first:last])
                )
                values[:, :, first:last] = (
                    done.values if is_first else torch.where(wins, done.values, now)
                )
                error[:, :, first:last] -= change
                pull[:, :, last - begin :] -= _times(change, pull_of[:, first:last, last:end])
        return _Solution(numbers, values, _joined(parts) if self.searches else found.scales, loss)

    def by_diagonal(self, products: Products, scales: GroupScales) -> _Solution:
        """Round columns by decreasing diagonal of H, under scales that are searched beforehand."""
        experts, rows, columns = self.weights.shape
        order = (
            products.order.expand(experts, columns).unsqueeze(2).expand(experts, columns, rows).mT
        )
        error, each = self.weights.mT.gather(1, order.mT).mT, self.of_columns(scales, order)
        m = products.ordered_factor.m
        numbers, values, loss = (
            torch.empty_like(error),
            torch.empty_like(error),
            error.new_zeros(experts, rows),
        )
        size = math.gcd(_BLOCK, columns)
        blocks = products.ordered_factor.free(size)
        for begin in range(0, columns, size):
            part = slice(begin, begin + size)
            carried = _times(error[:, :, :begin], m[:, :begin, part])
            target = error[:, :, part] + _times(carried, blocks.inverse[begin // size])
            done = _round(target, _columns(each, part), blocks.m[begin // size], self.schema)
            numbers[:, :, part], values[:, :, part] = done.numbers, done.values
            error[:, :, part] -= done.values
            loss += done.loss
        back = (
            torch.empty_like(numbers).scatter_(2, order, numbers),
            torch.empty_like(values).scatter_(2, order, values),
        )
        return _Solution(*back, scales, loss)

    def of_columns(self, scales: GroupScales, order: torch.Tensor) -> GroupScales:
        """Return the scales of columns in an order [E, N, K], as one candidate: [1, E, N, K]."""
        scales = self.of_rows(scales)
        group = order // (order.size(2) // scales.scale.size(2))
        zero = None if scales.zero is None else scales.zero.gather(2, group).unsqueeze(0)
        second = None if scales.second is None else scales.second.unsqueeze(0)
        return GroupScales(scales.stored, scales.scale.gather(2, group).unsqueeze(0), zero, second)

    def at(self, scales: GroupScales, column: int) -> GroupScales:
        """Return the scales of the group of a column: [E, N, 1]."""
        group = column // (self.weights.size(2) // scales.scale.size(2))
        return _columns(scales, slice(group, group + 1))

    def rounded(
        self, target: torch.Tensor, scales: list[GroupScales], m: torch.Tensor
    ) -> tuple[_Rounded, GroupScales]:
        """Round columns under the best of some scales [E, N, 1] and of the one that fits its codes; return it too."""
        stacked = _stacked(scales)
        done = _round(target, stacked, m, self.schema)
        found = _picked(stacked, done.index)
        if not self.searches or found.stored.dtype == torch.float8_e8m0fnu:
            return done, found
        fitted = self.fitted(target, done.numbers, found, m)
        again = _round(target, _stacked([fitted]), m, self.schema)
        wins = (again.loss < done.loss).unsqueeze(2)
        numbers, values = (
            torch.where(wins, *both)
            for both in ((again.numbers, done.numbers), (again.values, done.values))
        )
        return _Rounded(
            torch.minimum(again.loss, done.loss), done.index, numbers, values
        ), fitted.where(wins, found)

    def fitted(
        self, target: torch.Tensor, numbers: torch.Tensor, scales: GroupScales, m: torch.Tensor
    ) -> GroupScales:
        """Return the least-squares scales of codes, where they are usable."""
        codes = numbers if scales.zero is None else numbers - scales.zero
        seen = _times(codes, m)
        fit = (_times(target, m) * seen).sum(2, keepdim=True) / seen.square().sum(2, keepdim=True)
        now = scales.effective()
        usable = (fit / now > 0.5) & (fit / now < 2)
        second = scales.second
        stored = torch.where(usable, fit if second is None else fit / second, scales.scale)
        if stored_limit := _LARGEST.get(scales.stored.dtype):
            stored = stored.clamp(-stored_limit, stored_limit)
        stored = stored.to(scales.stored.dtype)
        scale = stored_values(stored)
        found = GroupScales(stored, scale, scales.zero, second)
        return found.where(usable & torch.isfinite(scale) & (scale != 0), scales)


_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def _nearest(target: torch.Tensor, scales: GroupScales, schema: WeightSchema) -> torch.Tensor:
    """Return the numbers of the codes of [..., S] under scales [...]; 0 where a scale is 0."""
    numbers, _ = quantized.nearest_numbers(target, scales, schema)
    return numbers.nan_to_num_(0.0)


def _by_columns(matrices: torch.Tensor) -> torch.Tensor:
    """Return [E, N, K] with the rows of a column next to each other in memory."""
    return matrices.mT.contiguous().mT


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return [E, N, K] times [1 or E, K, S], as `_by_columns`."""
    return (matrix.mT @ rows.mT).mT


def _round(
    target: torch.Tensor, scales: GroupScales, m: torch.Tensor, schema: WeightSchema
) -> _Rounded:
    """Round columns [E, N, S] one after the other; later ones make good what earlier ones lost.

    scales: of C candidates, [C, E, N, 1], or [1, E, N, S] for each column. m: upper triangular, [1 or E, S, S].
    """
    if target.is_cuda:
        from hqconv.calibration.triton_round import round_columns  # loads Triton

        return _Rounded(*round_columns(target, scales, m, schema))
    shape = (len(scales.scale), *target.shape)
    numbers, values, carried = torch.zeros(
        3, *shape[:2], shape[3], shape[2], device=target.device
    ).mT
    loss = torch.zeros(shape[:3], device=target.device)
    for column in range(target.size(2)):
        mine = _columns(scales, slice(column, column + 1)) if scales.scale.size(3) > 1 else scales
        diagonal = m[:, column, column].view(-1, 1)
        wanted = target[:, :, column] + carried[..., column] / diagonal
        number = _nearest(wanted[..., None, None], mine, schema)
        value = quantized.decode(number, mine)[..., 0, 0]
        numbers[..., column], values[..., column] = number[..., 0, 0], value
        loss += ((wanted - value) * diagonal).square_()
        lost = (target[:, :, column] - value).unsqueeze(-1)
        carried[..., column + 1 :] += lost * m[:, column, None, column + 1 :]
    least, index = loss.min(0)
    best = index.expand(1, *index.shape).unsqueeze(-1).expand(1, *target.shape)
    return _Rounded(least, index, numbers.gather(0, best)[0], values.gather(0, best)[0])


def _picked(scales: GroupScales, index: torch.Tensor) -> GroupScales:
    """Return one of the candidates [C, E, N, 1] for each row; index: int64 [E, N]."""

    def pick(values: torch.Tensor) -> torch.Tensor:
        return torch.gather(values, 0, index.view(1, *index.shape, 1))[0]

    stored = pick(bits_of(scales.stored)).view(scales.stored.dtype)
    zero = None if scales.zero is None else pick(scales.zero)
    second = None if scales.second is None else scales.second[0]
    return GroupScales(stored, pick(scales.scale), zero, second)


def _backwards(scales: GroupScales) -> GroupScales:
    """Return scales [E, R, G] with the groups from the last to the first."""
    stored = bits_of(scales.stored).flip(2).view(scales.stored.dtype)
    zero = None if scales.zero is None else scales.zero.flip(2)
    return GroupScales(stored, scales.scale.flip(2), zero, scales.second)


def _columns(scales: GroupScales, part: slice) -> GroupScales:
    """Return the scales of some groups, or columns."""
    zero = None if scales.zero is None else scales.zero[..., part]
    stored = (
        scales.stored if scales.stored.shape != scales.scale.shape else scales.stored[..., part]
    )
    return GroupScales(stored, scales.scale[..., part], zero, scales.second)


def _stacked(scales: list[GroupScales]) -> GroupScales:
    """Return candidates [E, N, 1] as [C, E, N, 1]."""
    stored = torch.stack([bits_of(one.stored) for one in scales]).view(scales[0].stored.dtype)
    zeros = [one.zero for one in scales if one.zero is not None]
    second = scales[0].second
    return GroupScales(
        stored,
        torch.stack([one.scale for one in scales]),
        torch.stack(zeros) if zeros else None,
        None if second is None else second.unsqueeze(0),
    )


def _joined(parts: list[GroupScales]) -> GroupScales:
    """Return the scales [E, N, G] of groups [E, N, 1]."""
    stored = torch.cat([bits_of(one.stored) for one in parts], 2).view(parts[0].stored.dtype)
    zeros = [one.zero for one in parts if one.zero is not None]
    scale = torch.cat([one.scale for one in parts], 2)
    return GroupScales(stored, scale, torch.cat(zeros, 2) if zeros else None, parts[0].second)


def _above(scales: list[GroupScales], schema: WeightSchema) -> GroupScales:
    """Return the scales of matrices that lie one above the other; of a tensor the matrices share them."""
    first = scales[0]
    if len(scales) == 1 or schema.weight_scale_type == "tensor":
        return first
    stored = torch.cat([bits_of(one.stored) for one in scales], 1).view(first.stored.dtype)
    zeros = [one.zero for one in scales if one.zero is not None]
    seconds = (
        [one.second for one in scales if one.second is not None] if schema.has_row_scale else []
    )
    zero, second = (
        torch.cat(ones, 1) if ones else other
        for ones, other in ((zeros, None), (seconds, first.second))
    )
    return GroupScales(stored, torch.cat([one.scale for one in scales], 1), zero, second)


def _rows(scales: GroupScales, begin: int, count: int, schema: WeightSchema) -> GroupScales:
    """Return some rows of the scales of `_above`."""
    if schema.weight_scale_type == "tensor":
        return scales
    rows = slice(begin, begin + count)
    zero, second = scales.zero, scales.second
    if second is not None and schema.has_row_scale:
        second = second[:, rows]
    zero = None if zero is None else zero[:, rows].contiguous()
    return GroupScales(scales.stored[:, rows].contiguous(), scales.scale[:, rows], zero, second)
