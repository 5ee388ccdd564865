"""Quantization of experts by the error of their outputs: GPTQ over all columns, then descent of codes and scales.

H = Σ p² x xᵀ are products of a GEMM's inputs over the tokens of a calibration. A row's error e = w - decoded costs
eᵀ H e. With H = M Mᵀ (M upper triangular) this is Σ_j (Σ_{i≤j} M_ij e_i)²: so column j is rounded as
w_j + Σ_{i<j} M_ij e_i / M_jj, which makes the errors of the columns before it good.

Two starts are tried for each matrix, and that one is taken which loses less on tokens that H has not seen: columns as
they are, with the scales of each group searched on what its weights have become; and columns by decreasing diagonal of
H, under scales that are searched beforehand. Then every group is rounded again, with its scales, as the others stand,
until nothing is gained, by the products of all tokens.

torch alone, on any device. The same bytes for the same inputs, number of experts and type of device, not between types.
Legend: E experts, N output rows, K input columns, G groups along K, S columns of a group, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hqconv.humming_ops.runtime import humming, resident
from hqconv.quantization import torch_ops
from hqconv.quantization.group_scales import (
    GroupScales,
    bits_of,
    nearest_scales,
    scales_of,
    scales_under,
    stored_values,
)
from hqconv.quantization.hadamard import rotate
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import QuantizedStack
from hqconv.quantization.scale_search import candidate_scales, ladder_of, least_byte, magnitude_bytes, stepped
from hqconv.schemas.weight_schema import WeightSchema

_DAMPING = 0.01  # of the mean diagonal of H
_BLOCK = 128  # columns that are rounded between two products with whole rows
_PASSES = 3  # of the descent, at most
_LEAST_GAIN = 1e-3  # of the loss, that a further pass must bring
_MARGIN = 1 - 2.0**-20


@dataclass(frozen=True, eq=False)
class Products:
    """Sums of p² x xᵀ over tokens, float64 [1 or E, K, K]: of most tokens, and of others that only choices see."""

    fit: torch.Tensor
    held: torch.Tensor

    @cached_property
    def factor(self) -> _Factor:
        """The factor of the columns as they are."""
        return _Factor.of(self.fit)

    @cached_property
    def whole_factor(self) -> _Factor:
        """The factor of all tokens."""
        return _Factor.of(self.fit + self.held)

    @cached_property
    def order(self) -> torch.Tensor:
        """The columns by decreasing diagonal, int64 [1 or E, K]."""
        return torch.argsort(self.fit.diagonal(dim1=1, dim2=2), dim=1, descending=True, stable=True)

    @cached_property
    def ordered_factor(self) -> _Factor:
        """The factor of the columns in that order."""
        rows = self.fit.gather(1, self.order.unsqueeze(2).expand_as(self.fit))
        return _Factor.of(rows.gather(2, self.order.unsqueeze(1).expand_as(self.fit)))

    def rotated(self, block: int) -> Products:
        """Return the products of inputs that are rotated in blocks of columns."""
        return Products(
            *(rotate(rotate(one, block).transpose(1, 2).contiguous(), block) for one in (self.fit, self.held))
        )


def quantize_by_outputs(
    stacks: Sequence[torch.Tensor], schema: WeightSchema, param_dtype: str, products: Products
) -> list[QuantizedStack]:
    """Quantize stacks [E, N, K] of the experts' matrices that have one input, as `quantize_stacks` does.

    products: of that input, in the columns of the matrices. A matrix with NaN or Inf gets a power of NaN or Inf.
    """
    if schema.rotation:
        stacks, products = [rotate(one, schema.rotation) for one in stacks], products.rotated(schema.rotation)
        schema = replace(schema, hadamard_block_size=0)
    rounded = quantize_stacks(stacks, schema, param_dtype)
    starts = [scales_of(one.tensors, schema) for one in rounded]
    weights = torch.cat([one.float() for one in stacks], 1)
    numbers, scales = _Matrix(weights, schema, param_dtype, _above(starts, schema)).solve(products)
    done, row, scale_row = [], 0, 0
    with resident(weights.device):
        for stack, start, one in zip(stacks, starts, rounded, strict=True):
            mine = numbers[:, row : row + stack.size(1)]
            found = _rows(scales, scale_row, start.scale.size(1), schema)
            row, scale_row = row + stack.size(1), scale_row + start.scale.size(1)
            codes = torch_ops.codes_of(mine, mine, schema).contiguous()
            weight = humming().ops.pack_weight(codes, schema.num_bits)
            tensors = {**one.tensors, **found.tensors(schema, param_dtype), "weight": weight}
            error, power = torch_ops.error_sums(stack, tensors, schema)
            done.append(QuantizedStack(tensors, error, power, torch.zeros_like(one.num_exact)))
    return done


@dataclass(frozen=True, eq=False)
class _Factor:
    """H, damped, and its upper triangular factor M, H = M Mᵀ: float32 [1 or E, K, K]."""

    h: torch.Tensor
    m: torch.Tensor

    @classmethod
    def of(cls, products: torch.Tensor) -> _Factor:
        h = products.double().clone()
        diagonal = h.diagonal(dim1=1, dim2=2)
        mean = diagonal.mean(1, keepdim=True)
        diagonal += torch.where(mean > 0, _DAMPING * mean, torch.ones_like(mean))
        return cls(h.float(), _upper(h).float())

    def block(self, columns: slice) -> _Block:
        """Return the factor for columns that are rounded while those behind them are free."""
        return _Block.of(self.m[:, columns, columns])

    def alone(self, columns: slice) -> _Block:
        """Return the factor for columns that are rounded while all others stand."""
        return _Block.of(_upper(self.h[:, columns, columns].double()).float())


def _upper(h: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.cholesky(h.flip(1, 2)).flip(1, 2)
    return found


@dataclass(frozen=True, eq=False)
class _Block:
    """Some columns' part of M, float32 [1 or E, S, S]; its inverse; and its diagonal [1 or E, 1, S]."""

    m: torch.Tensor
    inverse: torch.Tensor
    diagonal: torch.Tensor

    @classmethod
    def of(cls, m: torch.Tensor) -> _Block:
        eye = torch.eye(m.size(1), dtype=torch.float64, device=m.device).expand_as(m)
        inverse = torch.linalg.solve_triangular(m.double(), eye, upper=True).float()
        return cls(m, inverse, m.diagonal(dim1=1, dim2=2).unsqueeze(1))


@dataclass(frozen=True, eq=False)
class _Rounded:
    """Codes of some columns: losses [C, E, N], numbers and decoded values [C, E, N, S]."""

    loss: torch.Tensor
    numbers: torch.Tensor
    values: torch.Tensor

    def best(self, scales: GroupScales) -> tuple[_Rounded, GroupScales]:
        """Return the candidate of the least loss of each row, and its scales out of [C, E, N, 1]."""
        least, index = self.loss.min(0, keepdim=True)

        def pick(values: torch.Tensor) -> torch.Tensor:
            return torch.gather(values, 0, index.unsqueeze(-1).expand(1, *values.shape[1:]))[0]

        stored = pick(bits_of(scales.stored)).view(scales.stored.dtype)
        zero = None if scales.zero is None else pick(scales.zero)
        second = None if scales.second is None else scales.second[0]
        found = GroupScales(stored, pick(scales.scale), zero, second)
        return _Rounded(least[0], pick(self.numbers), pick(self.values)), found


@dataclass(frozen=True, eq=False)
class _Solution:
    """Numbers of codes and decoded values [E, N, K], and scales [E, R, G]."""

    numbers: torch.Tensor
    values: torch.Tensor
    scales: GroupScales

    def where(self, condition: torch.Tensor, other: _Solution) -> _Solution:
        """Return this solution for the experts where `condition` [E, 1, 1] holds, the other one for the rest."""
        return _Solution(
            torch.where(condition, self.numbers, other.numbers),
            torch.where(condition, self.values, other.values),
            self.scales.where(condition.expand_as(self.scales.scale), other.scales),
        )


@dataclass(eq=False)
class _Matrix:
    """Matrices of a projection, float32 [E, N, K], and the scales of round-to-nearest."""

    weights: torch.Tensor
    schema: WeightSchema
    param_dtype: str
    start: GroupScales

    def __post_init__(self) -> None:
        size = self.schema.weight_scale_group_size
        self.searches = self.schema.weight_scale_type == "group" and size <= _BLOCK * 2
        self.size = size if self.searches else min(_BLOCK, self.weights.size(2))
        self.floor = least_byte([self.start.stored], self.param_dtype, has_row_scale=self.schema.has_row_scale)

    def solve(self, products: Products) -> tuple[torch.Tensor, GroupScales]:
        """Return the numbers of codes [E, N, K], and the scales [E, R, G]."""
        scales = self.start
        if self.searches:
            diagonal = products.fit.diagonal(dim1=1, dim2=2)
            scales = self.searched(diagonal.float().view(len(diagonal), 1, -1, self.size))
        starts = [self.in_order(products, scales), self.by_diagonal(products, scales)]
        losses = [self.loss(start.values, products.held).sum(1) for start in starts]
        return self.descend(starts[1].where((losses[1] < losses[0]).view(-1, 1, 1), starts[0]), products.whole_factor)

    def loss(self, values: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Return eᵀ H e of each row, float64 [E, N]."""
        error = (values - self.weights).double()
        return ((error @ h.double()) * error).sum(2)

    # --- scales

    def of_rows(self, scales: GroupScales) -> GroupScales:
        """Return scales for each row: those of a block or a tensor repeated."""
        rows, have = self.weights.size(1), scales.scale.size(1)
        if have == rows:
            return scales
        stored = bits_of(scales.stored).repeat_interleave(rows // have, 1).view(scales.stored.dtype)
        return GroupScales(stored, scales.scale.repeat_interleave(rows // have, 1), scales.zero, scales.second)

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
            decoded = torch_ops.decode(_nearest(target, scales, self.schema), scales)
            return decoded.sub_(target).square_().mul_(weight).sum(-1)

        best, least = start, loss_of(start) * _MARGIN
        for tried, valid in candidate_scales(start, self.schema, self.param_dtype, self.floor):
            loss = loss_of(tried)
            wins = valid & self.is_allowed(tried) & (loss < least)
            best, least = tried.where(wins, best), torch.where(wins, loss, least)
        return best

    # --- starts

    def in_order(self, products: Products, start: GroupScales) -> _Solution:
        """Round columns as they are; scales are searched on what a group's weights have become."""
        w, numbers, values, factor = (
            self.weights,
            torch.empty_like(self.weights),
            torch.empty_like(self.weights),
            products.factor,
        )
        parts = []
        static = self.of_rows(start)
        beside = self.neighbours(static)
        for begin in range(0, w.size(2), self.size):
            columns = slice(begin, begin + self.size)
            block = factor.block(columns)
            carried = (w[:, :, :begin] - values[:, :, :begin]) @ factor.m[:, :begin, columns]
            target = w[:, :, columns] + carried @ block.inverse
            scales = self.candidates(self.at(static, columns), beside, begin // self.size, target)
            done, found = self.tried(target, scales, block)
            numbers[:, :, columns], values[:, :, columns] = done.numbers, done.values
            parts.append(found)
        return _Solution(numbers, values, _joined(parts) if self.searches else start)

    def by_diagonal(self, products: Products, scales: GroupScales) -> _Solution:
        """Round columns by decreasing diagonal of H, under scales that are searched beforehand."""
        experts, rows, columns = self.weights.shape
        order = products.order.expand(experts, columns).unsqueeze(1).expand(experts, rows, columns)
        w = self.weights.gather(2, order)
        each = self.of_columns(scales, order)
        numbers, values = torch.empty_like(w), torch.empty_like(w)
        for begin in range(0, columns, _BLOCK):
            part = slice(begin, min(begin + _BLOCK, columns))
            block = products.ordered_factor.block(part)
            carried = (w[:, :, :begin] - values[:, :, :begin]) @ products.ordered_factor.m[:, :begin, part]
            done = _round(w[:, :, part] + carried @ block.inverse, _columns(each, part), block, self.schema)
            numbers[:, :, part], values[:, :, part] = done.numbers[0], done.values[0]
        back = torch.empty_like(numbers), torch.empty_like(values)
        return _Solution(back[0].scatter_(2, order, numbers), back[1].scatter_(2, order, values), scales)

    def of_columns(self, scales: GroupScales, order: torch.Tensor) -> GroupScales:
        """Return the scales of columns in an order [E, N, K], as one candidate: [1, E, N, K]."""
        scales = self.of_rows(scales)
        group = order // (order.size(2) // scales.scale.size(2))
        zero = None if scales.zero is None else scales.zero.gather(2, group).unsqueeze(0)
        second = None if scales.second is None else scales.second.unsqueeze(0)
        return GroupScales(scales.stored, scales.scale.gather(2, group).unsqueeze(0), zero, second)

    def at(self, scales: GroupScales, columns: slice) -> GroupScales:
        """Return the scales of columns that lie in one group: [E, N, 1]."""
        group = columns.start // (self.weights.size(2) // scales.scale.size(2))
        return _columns(scales, slice(group, group + 1))

    # --- descent

    def tried(self, target: torch.Tensor, scales: list[GroupScales], block: _Block) -> tuple[_Rounded, GroupScales]:
        """Round columns under each of some scales [E, N, 1]; return the best of each row."""
        stacked = _stacked(scales)
        return _round(target, stacked, block, self.schema).best(stacked)

    def descend(self, start: _Solution, factor: _Factor) -> tuple[torch.Tensor, GroupScales]:
        """Round groups again, each as the others stand, until nothing is gained."""
        numbers, values, scales = start.numbers, start.values, start.scales
        w, h = self.weights, factor.h
        groups = [slice(begin, begin + self.size) for begin in range(0, w.size(2), self.size)]
        alone = [factor.alone(columns) for columns in groups]
        parts = [self.at(self.of_rows(scales), columns) for columns in groups]
        loss = self.loss(values, h).sum()
        for _ in range(_PASSES):
            gradient, beside = (values - w) @ h, self.neighbours(_joined(parts))
            for number, (columns, block) in enumerate(zip(groups, alone, strict=True)):
                now, kept = values[:, :, columns], parts[number]
                target = now - gradient[:, :, columns] @ block.inverse.transpose(1, 2) @ block.inverse
                standing = ((target - now) @ block.m).square().sum(2)
                done, found = self.tried(target, self.candidates(kept, beside, number, target), block)
                if self.searches and found.stored.dtype != torch.float8_e8m0fnu:
                    done, found = self.tried(target, [found, self.fitted(target, done.numbers, found, block)], block)
                wins = (done.loss < standing * _MARGIN).unsqueeze(2)
                change = torch.where(wins, done.values - now, 0.0)
                numbers[:, :, columns] = torch.where(wins, done.numbers, numbers[:, :, columns])
                values[:, :, columns] = torch.where(wins, done.values, now)
                parts[number] = found.where(wins, kept)
                gradient += change @ h[:, columns, :]
            before, loss = loss, self.loss(values, h).sum()
            if float(before - loss) < _LEAST_GAIN * float(before):
                break
        return numbers, _joined(parts) if self.searches else scales

    def fitted(self, target: torch.Tensor, numbers: torch.Tensor, scales: GroupScales, block: _Block) -> GroupScales:
        """Return the least-squares scales of codes, where they are usable."""
        codes = numbers if scales.zero is None else numbers - scales.zero
        seen = codes @ block.m
        fit = ((target @ block.m) * seen).sum(2, keepdim=True) / seen.square().sum(2, keepdim=True)
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
    numbers, _ = torch_ops.nearest_numbers(target, scales, schema)
    return numbers.nan_to_num_(0.0)


def _round(target: torch.Tensor, scales: GroupScales, block: _Block, schema: WeightSchema) -> _Rounded:
    """Round columns [E, N, S] one after the other; later ones make good what earlier ones lost.

    scales: of C candidates, [C, E, N, 1], or [C, E, N, S] for each column.
    """
    if target.is_cuda:
        from hqconv.calibration.triton_round import round_columns  # loads Triton

        return _Rounded(*round_columns(target, scales, block.m, schema))
    shape = (len(scales.scale), *target.shape)
    numbers, values = torch.empty(2, *shape, device=target.device)
    carried = torch.zeros(shape, device=target.device)
    loss = torch.zeros(shape[:3], device=target.device)
    for column in range(target.size(2)):
        mine = _columns(scales, slice(column, column + 1)) if scales.scale.size(3) > 1 else scales
        diagonal = block.m[:, column, column].view(-1, 1)
        wanted = target[:, :, column] + carried[..., column] / diagonal
        number = _nearest(wanted[..., None, None], mine, schema)
        value = torch_ops.decode(number, mine)[..., 0, 0]
        numbers[..., column], values[..., column] = number[..., 0, 0], value
        loss += ((wanted - value) * diagonal).square_()
        if column + 1 < target.size(2):
            carried[..., column + 1 :] += (target[:, :, column] - value).unsqueeze(-1) * block.m[
                :, column, None, column + 1 :
            ]
    return _Rounded(loss, numbers, values)


def _columns(scales: GroupScales, part: slice) -> GroupScales:
    """Return the scales of some groups, or columns."""
    zero = None if scales.zero is None else scales.zero[..., part]
    stored = scales.stored if scales.stored.shape != scales.scale.shape else scales.stored[..., part]
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
    seconds = [one.second for one in scales if one.second is not None] if schema.has_row_scale else []
    zero, second = (torch.cat(ones, 1) if ones else other for ones, other in ((zeros, None), (seconds, first.second)))
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
