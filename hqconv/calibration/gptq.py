"""Quantization of experts by the error of their outputs: GPTQ over all columns, then descent of codes and scales.

H = Σ p x xᵀ is a sum over the tokens of a calibration: x is what a GEMM is given, p the router's weight. An error e of
a row, the source's weights less the decoded ones, costs eᵀ H e. H is damped as much as tokens that it has not seen
allow. The steps of `quantize_by_outputs`:

1. Compensate. A GEMM behind a quantized one is given x in place of the source's y: its weights are solved again, so
   that their outputs for x are nearest to the source's outputs for y. How far is decided on validation tokens.
2. Rotate weights and H, if the schema says so, and round to nearest for the scales to start from.
3. Round all columns, in two ways; each row takes the one that loses less. With H = M Mᵀ (M upper triangular) the loss
   is Σ_j (Σ_{i≤j} M_ij e_i)²: so column j is rounded as w_j + Σ_{i<j} M_ij e_i / M_jj, which makes good the errors of
   the columns before it. Either columns as they are, with the scales of each group chosen for what its weights have
   become; or columns by decreasing diagonal of H, under scales that are searched beforehand.
4. Descend. Every group is rounded again, with its scales, as all others stand: from the first to the last, and back.

Where gradients by the outputs are known, the errors e_m and e_n of two rows cost G_mn e_mᵀ H e_n, with G = Σ g gᵀ.
Then each step goes from one block of rows to the next: step 3 makes good the errors of the rows before, step 4 those
of all others.

torch, and compiled loops for columns. The same bytes for the same inputs, number of experts and type of device, not
between types.
Legend: E experts, N output rows, K input columns, G groups along K, S columns of a group,
C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from hqconv.formats.encoding import resized
from hqconv.humming_ops.runtime import humming, resident
from hqconv.quantization import cpu, quantized
from hqconv.quantization.bit_codec import bits_of
from hqconv.quantization.group_scales import (
    GroupScales,
    nearest_scales,
    rounded_scales,
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

_DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # tried, of the mean diagonal of H
_NEAR_BEST = 1.02  # of the least loss: so much is allowed for more damping
_DIAGONAL_SHARE = (
    0.2  # of the products of gradients, whose other entries a few tokens do not tell well
)
_ROW_BLOCKS = 8  # of a matrix with gradients
_RIDGES = (0.01, 0.1, 1.0)  # tried when weights are compensated, of the mean diagonal of H
_BLOCK = 128  # columns that are rounded between two products with whole rows
_LONGEST_GROUP = 256  # of columns whose scale is chosen with their codes
_DESCENTS = 2  # from the first group to the last, and back
_MARGIN = 1 - 2.0**-20  # of a loss that must be beaten


# --- what the tokens of a calibration say


@dataclass(frozen=True, eq=False)
class InputProducts:
    """Sums of Σ p x xᵀ over tokens, float64 [1 or E, K, K]: of most tokens, and of validation tokens.

    fit_drift, validation_drift: the same sums of p (y - x) xᵀ, where the source's weights before the GEMM give y in
    place of x. gradients: of the loss by the GEMM's outputs, where they are known. own: H of each expert, float32
    [E, K, K], where it is not the sum. damping: of the mean diagonal of H, float64 [1 or E]; None: by the sums.
    """

    fit: torch.Tensor
    validation: torch.Tensor
    fit_drift: torch.Tensor | None = None
    validation_drift: torch.Tensor | None = None
    gradients: OutputGradients | None = None
    own: torch.Tensor | None = None
    damping: torch.Tensor | None = None

    @cached_property
    def h(self) -> torch.Tensor:
        """H of all tokens, float32 [1 or E, K, K]."""
        return (self.fit + self.validation).float() if self.own is None else self.own

    @cached_property
    def hessian(self) -> _Hessian:
        """H of all tokens, damped."""
        damping = self.best_damping if self.damping is None else self.damping
        return _Hessian(_damped(self.h, damping.float()))

    @cached_property
    def best_damping(self) -> torch.Tensor:
        """The largest damping that loses about the least on validation tokens, float64 [1 or E]."""
        losses = torch.stack([self._validation_loss(damping) for damping in _DAMPINGS])
        is_good = losses <= _NEAR_BEST * losses.amin(0)
        dampings = losses.new_tensor(_DAMPINGS).unsqueeze(1)
        return torch.where(is_good, dampings, _DAMPINGS[0]).amax(0)

    def _validation_loss(self, damping: float) -> torch.Tensor:
        """Return what rounding under H of most tokens loses on validation tokens, float64 [1 or E], up to a factor.

        Columns are rounded by decreasing diagonal of H, each with the same error at first.
        """
        fit = _Hessian(_damped(self.fit, torch.full_like(self.fit[:, 0, 0], damping)))
        factor = _upper_factor(fit.ordered.h)
        inverse = _inverse(factor)
        lost = (inverse @ fit.in_order(self.validation) * inverse).sum(2)
        return (factor.diagonal(dim1=1, dim2=2).square() * lost).sum(1)

    def resized(self, size: int) -> InputProducts:
        """Return the products of inputs with zeros for further columns, as far as `size`; without drifts."""
        return self._changed(lambda products: resized(products, (size, size)))

    def rotated(self, block: int) -> InputProducts:
        """Return the products of inputs that are rotated in blocks of columns; without drifts."""

        def on_both_sides(products: torch.Tensor) -> torch.Tensor:
            return rotate(rotate(products, block).transpose(1, 2).contiguous(), block)

        return self._changed(on_both_sides)

    def _changed(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> InputProducts:
        return InputProducts(
            operation(self.fit),
            operation(self.validation),
            gradients=self.gradients,
            own=None if self.own is None else operation(self.own),
            damping=self.damping,
        )


def _damped(h: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    """Return H with shares of its mean diagonal [1 or E] added; with a unit's, if it is 0."""
    mean = h.diagonal(dim1=1, dim2=2).mean(1)
    added = torch.where(mean > 0, damping * mean, 1.0)
    eye = torch.eye(h.size(1), dtype=h.dtype, device=h.device)
    return h + added.view(-1, 1, 1) * eye


@dataclass(frozen=True, eq=False)
class OutputGradients:
    """Σ g gᵀ over tokens, [N, N]: g is a gradient of the model's loss by the outputs of a GEMM."""

    products: torch.Tensor

    def resized(self, size: int) -> OutputGradients:
        """Return the products with zeros for further outputs, as far as `size`."""
        if size == len(self.products):
            return self
        return OutputGradients(resized(self.products, (size, size)))

    @cached_property
    def coupling(self) -> torch.Tensor:
        """Cost of the errors of two rows together, float64 [N, N]: the products, closer to their diagonal."""
        products = self.products.double()
        products = products / products.diagonal().mean().clamp_min(1e-300)
        eye = torch.eye(len(products), dtype=products.dtype, device=products.device)
        return (1 - _DIAGONAL_SHARE) * products + (_DIAGONAL_SHARE + 0.01) * eye

    @cached_property
    def factor(self) -> torch.Tensor:
        """The upper triangular L with L Lᵀ = `coupling`, float64 [N, N]."""
        return _upper_factor(self.coupling)

    def pull(self, rows: slice, *, are_next_free: bool) -> torch.Tensor:
        """Return the change of n rows by which they make good errors of the others, float32 [n, N].

        L_bb⁻ᵀ L_bᵀ where the next rows are free, whose errors are 0 then; else G_bb⁻¹ G_b, without the rows themselves.
        """
        if are_next_free:
            own, others = self.factor[rows, rows].mT, self.factor[:, rows].mT
            pull: torch.Tensor = torch.linalg.solve_triangular(own, others, upper=False)
            return pull.float()
        others = self.coupling[rows].clone()
        others[:, rows] = 0
        inverse = _inverse(_upper_factor(self.coupling[rows, rows]))
        return (inverse.mT @ (inverse @ others)).float()


@dataclass(frozen=True, eq=False)
class _Hessian:
    """H, damped, [1 or E, K, K], and what is derived from it, float32."""

    h: torch.Tensor
    _blocks: dict[tuple[str, int], _Blocks] = field(default_factory=dict)

    @property
    def diagonal(self) -> torch.Tensor:
        """The diagonal, float32 [1 or E, K]."""
        return self.h.diagonal(dim1=1, dim2=2)

    @cached_property
    def factor(self) -> torch.Tensor:
        """The upper triangular M with H = M Mᵀ, float32 [1 or E, K, K]."""
        return _upper_factor(self.h.double()).float()

    @cached_property
    def backwards(self) -> _Hessian:
        """H of the columns from the last to the first."""
        return _Hessian(self.h.flip(1, 2))

    @cached_property
    def order(self) -> torch.Tensor:
        """The columns by decreasing diagonal, int64 [1 or E, K]."""
        return torch.argsort(self.diagonal, dim=1, descending=True, stable=True)

    @cached_property
    def ordered(self) -> _Hessian:
        """H of the columns in `order`."""
        return _Hessian(self.in_order(self.h))

    def in_order(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return matrices of H's shape with rows and columns in `order`."""
        rows = matrices.gather(1, self.order.unsqueeze(2).expand_as(matrices))
        return rows.gather(2, self.order.unsqueeze(1).expand_as(matrices))

    def free_blocks(self, size: int) -> _Blocks:
        """Return the factors of runs of `size` columns that are rounded while the columns behind them are free."""
        if ("free", size) not in self._blocks:
            factor = _diagonal_blocks(self.factor, size).double()
            blocks = _Blocks(factor.float().contiguous(), _inverse(factor).float())
            self._blocks["free", size] = blocks
        return self._blocks["free", size]

    def fixed_blocks(self, size: int) -> _Blocks:
        """Return the factors of runs of `size` columns that are rounded while all other columns stand."""
        if ("fixed", size) not in self._blocks:
            factor = _upper_factor(_diagonal_blocks(self.h, size).double())
            inverse = _inverse(factor)
            blocks = _Blocks(factor.float().contiguous(), (inverse.mT @ inverse).float())
            self._blocks["fixed", size] = blocks
        return self._blocks["fixed", size]


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Factors of runs of columns, float32 [K / S, 1 or E, S, S].

    factor: upper triangular M. inverse: from the pull of other columns to a change of weights: the inverse of M where
    the columns behind are free, of M Mᵀ where they stand.
    """

    factor: torch.Tensor
    inverse: torch.Tensor


def _upper_factor(h: torch.Tensor) -> torch.Tensor:
    factor: torch.Tensor = torch.linalg.cholesky(h.flip(-2, -1)).flip(-2, -1)
    return factor


def _inverse(factor: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(factor.size(-1), dtype=factor.dtype, device=factor.device).expand_as(factor)
    inverse: torch.Tensor = torch.linalg.solve_triangular(factor, eye, upper=True)
    return inverse


def _diagonal_blocks(h: torch.Tensor, size: int) -> torch.Tensor:
    """Return the blocks on the diagonal of [e, K, K], as [K / size, e, size, size]."""
    blocks = h.view(len(h), h.size(1) // size, size, -1, size)
    return blocks.diagonal(dim1=1, dim2=3).permute(3, 0, 1, 2)


# --- the steps


def quantize_by_outputs(
    stacks: Sequence[torch.Tensor], schema: WeightSchema, param_dtype: str, products: InputProducts
) -> list[QuantizedStack]:
    """Quantize stacks [E, N, K] of the experts' matrices that have one input, as `quantize_stacks` does.

    products: of that input, in the columns of the matrices. A matrix with NaN or Inf gets a power of NaN or Inf.
    """
    targets = [_compensated(stack, products) for stack in stacks]
    if block := schema.rotation:
        products = products.rotated(block)
        stacks = [rotate(stack, block) for stack in stacks]
        targets = [rotate(target, block) for target in targets]
        schema = replace(schema, hadamard_block_size=0)
    rounded = quantize_stacks(targets, schema, param_dtype)
    weights = _by_columns(torch.cat([target.float() for target in targets], 1))
    is_grouped = schema.weight_scale_type == "group"
    is_free = is_grouped and schema.weight_scale_group_size <= _LONGEST_GROUP
    start = _start_scales(rounded, schema)
    choice = _ScaleChoice(schema, param_dtype, start, start, is_free)
    solution = _solve(weights, choice, products)
    losses, powers = (
        (values * _times(values, products.h)).double().sum(2)
        for values in (weights - solution.values, weights)
    )
    results, begin = list[QuantizedStack](), 0
    with resident(weights.device):
        for stack, rounded_stack in zip(stacks, rounded, strict=True):
            rows = slice(begin, begin + stack.size(1))
            begin = rows.stop
            numbers = solution.numbers[:, rows]
            codes = quantized.codes_of(numbers, numbers, schema).contiguous()
            weight = humming().ops.pack_weight(codes, schema.num_bits)
            tensors = {**rounded_stack.tensors, "weight": weight}
            if choice.is_free:
                tensors |= _rows(solution.scales, rows).tensors(schema, param_dtype)
            error, power = quantized.error_sums(stack, tensors, schema)
            num_exact = torch.zeros_like(rounded_stack.num_exact)
            outputs = torch.stack([losses[:, rows].sum(1), powers[:, rows].sum(1)])
            results.append(QuantizedStack(tensors, error, power, num_exact, outputs=outputs))
    return results


def _start_scales(rounded: Sequence[QuantizedStack], schema: WeightSchema) -> GroupScales:
    """Return the scales of matrices that lie one above the other, [E, N, G]: those of a block or a tensor repeated."""
    each = []
    for stack in rounded:
        scales = scales_of(stack.tensors, schema)
        repeats = stack.tensors["weight"].size(1) // scales.scale.size(1)
        each.append(_mapped(scales, lambda tensor, n=repeats: tensor.repeat_interleave(n, 1)))  # type: ignore[misc]
    start = _joined(each, 1)
    seconds = [scales.second for scales in each if scales.second is not None]
    return replace(start, second=torch.cat(seconds, 1)) if schema.has_row_scale else start


def _compensated(weights: torch.Tensor, products: InputProducts) -> torch.Tensor:
    """Return weights [E, N, K] whose outputs for x are nearest to those of `weights` for y, float32 with drifts.

    W + W (Σ p² (y - x) xᵀ) (Σ p² x xᵀ + ridge)⁻¹, with the ridge of each expert that is the best one for the validation
    tokens: W itself where all lose.
    """
    fit_drift, validation_drift = products.fit_drift, products.validation_drift
    if fit_drift is None or validation_drift is None:
        return weights
    weights = weights.float()
    validation = products.validation.float()
    pull = weights @ validation_drift.float()
    ridge = weights.new_full((len(weights), 1, 1), torch.inf, dtype=torch.float64)
    least = torch.zeros_like(ridge)
    for tried in _RIDGES:
        change = weights @ _regression(products.fit, fit_drift, torch.full_like(ridge, tried))
        loss = ((change @ validation - 2 * pull) * change).double().sum((1, 2), keepdim=True)
        ridge = torch.where(loss < least, tried, ridge)
        least = torch.minimum(loss, least)
    drift = fit_drift + validation_drift
    return weights + weights @ _regression(products.fit + products.validation, drift, ridge)


def _regression(h: torch.Tensor, drift: torch.Tensor, ridge: torch.Tensor) -> torch.Tensor:
    """Return drift (H + ridge)⁻¹, float32 [E, K, K]; 0 for infinite ridges.

    ridge: shares of the mean diagonal of H, float64 [E, 1, 1].
    """
    mean = h.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
    eye = torch.eye(h.size(1), dtype=h.dtype, device=h.device)
    added = torch.where((mean > 0) & torch.isfinite(ridge), ridge * mean, 1.0)
    solved = torch.cholesky_solve(drift.mT, torch.linalg.cholesky(h + added * eye)).mT
    return torch.where(torch.isfinite(ridge), solved, 0.0).float()


# --- scales


@dataclass(frozen=True, eq=False)
class _ScaleChoice:
    """The scales that rows of matrices may get. start: those of round-to-nearest, [E, N, G].

    of_all_rows: the same of all rows. is_free: scales are chosen with the codes; else they are those of the start.
    """

    schema: WeightSchema
    param_dtype: str
    start: GroupScales
    of_all_rows: GroupScales
    is_free: bool

    def of_rows(self, rows: slice) -> _ScaleChoice:
        """Return the choice of some of the rows."""
        start, second = _rows(self.start, rows), self.start.second
        if second is not None and second.size(1) > 1:
            second = second[:, rows].contiguous()
        return replace(self, start=replace(start, second=second))

    @cached_property
    def floor(self) -> torch.Tensor | None:
        """See `least_byte`."""
        has_row_scale = self.schema.has_row_scale
        return least_byte([self.of_all_rows.stored], self.param_dtype, has_row_scale=has_row_scale)

    def is_allowed(self, scales: GroupScales) -> torch.Tensor:
        """Return a mask of the scales that the parameter dtype can hold beside the start's largest."""
        if self.floor is None:
            return torch.ones_like(scales.scale, dtype=torch.bool)
        magnitude = magnitude_bytes(scales.stored)
        largest = magnitude_bytes(self.of_all_rows.stored).amax((1, 2), keepdim=True)
        return (magnitude >= self.floor) & (magnitude <= largest)

    def searched(self, weights: torch.Tensor, importance: torch.Tensor) -> GroupScales:
        """Return the scales of the least squared error of `weights`, each column by its importance [1 or E, K]."""
        if not self.is_free:
            return self.start
        num_groups = self.start.scale.size(2)
        target = weights.view(*weights.shape[:2], num_groups, -1)
        importance = importance.view(len(importance), 1, num_groups, -1)

        def loss_of(scales: GroupScales) -> torch.Tensor:
            decoded = quantized.decode(_nearest_numbers(target, scales, self.schema), scales)
            return decoded.sub_(target).square_().mul_(importance).sum(-1)

        best, least = self.start, loss_of(self.start) * _MARGIN
        for tried, valid in candidate_scales(self.start, self.schema, self.param_dtype, self.floor):
            loss = loss_of(tried)
            wins = valid & self.is_allowed(tried) & (loss < least)
            best, least = tried.where(wins, best), torch.where(wins, loss, least)
        return best

    def nearest(self, target: torch.Tensor) -> GroupScales:
        """Return the scales of round-to-nearest of a group [E, N, S], under the second scales of the start."""
        highest = target.amax(-1, keepdim=True).clamp_min(1e-30)
        lowest = target.amin(-1, keepdim=True).clamp_max(-1e-30)
        if self.start.second is not None:
            return scales_under(self.start.second, highest, lowest, self.schema, self.param_dtype)
        return nearest_scales(highest, lowest, self.schema, self.param_dtype).scales

    def neighbours(self, scales: GroupScales) -> list[GroupScales]:
        """Return the scales one step above and below others [E, N, G]; these where there are none."""
        if self.schema.has_zero_point or not self.is_free:
            return []
        ladder = ladder_of(self.schema, self.param_dtype)
        neighbours = []
        for step in (2, -1):
            steps = torch.full_like(scales.scale, step, dtype=torch.int32)
            tried, exists = stepped(scales, steps, ladder)
            neighbours.append(tried.where(exists & self.is_allowed(tried), scales))
        return neighbours

    def candidates(
        self, present: GroupScales, neighbours: list[GroupScales], target: torch.Tensor
    ) -> GroupScales:
        """Return the scales to try for a group [E, N, S] as [C, E, N, 1]: the present ones, its own, and neighbours."""
        candidates = [present]
        if self.is_free:
            own = self.nearest(target)
            candidates += [own.where(self.is_allowed(own), present), *neighbours]
        return _stacked(candidates)

    def fitted(
        self, target: torch.Tensor, numbers: torch.Tensor, scales: GroupScales, factor: torch.Tensor
    ) -> GroupScales:
        """Return the least-squares scales of codes, where they are usable."""
        codes = numbers if scales.zero is None else numbers - scales.zero
        outputs = _times(codes, factor)
        wanted = _times(target, factor)
        fit = (wanted * outputs).sum(2, keepdim=True) / outputs.square().sum(2, keepdim=True)
        change = fit / scales.effective()
        is_usable = (change > 0.5) & (change < 2)
        if scales.second is not None:
            fit = fit / scales.second
        stored = rounded_scales(torch.where(is_usable, fit, scales.scale), scales.stored.dtype)
        values = stored_values(stored)
        fitted = GroupScales(stored, values, scales.zero, scales.second)
        return fitted.where(is_usable & torch.isfinite(values) & (values != 0), scales)


def _combined(
    each: Sequence[GroupScales], operation: Callable[[list[torch.Tensor]], torch.Tensor]
) -> GroupScales:
    """Combine stored scales, their values and zero points by an operation; second scales are the first's."""
    stored = operation([bits_of(scales.stored) for scales in each]).view(each[0].stored.dtype)
    values = operation([scales.scale for scales in each])
    zeros = [scales.zero for scales in each if scales.zero is not None]
    return GroupScales(stored, values, operation(zeros) if zeros else None, each[0].second)


def _joined(each: Sequence[GroupScales], dim: int) -> GroupScales:
    """Return scales that lie beside each other."""
    return _combined(each, lambda tensors: torch.cat(tensors, dim))


def _stacked(each: Sequence[GroupScales]) -> GroupScales:
    """Return candidates [E, N, 1] as [C, E, N, 1]."""
    return _combined(each, torch.stack)


def _mapped(scales: GroupScales, operation: Callable[[torch.Tensor], torch.Tensor]) -> GroupScales:
    """Apply an operation to stored scales, their values and zero points; second scales stay."""
    return _combined([scales], lambda tensors: operation(tensors[0]))


def _group(scales: GroupScales, group: int, count: int = 1) -> GroupScales:
    """Return the scales of some groups, or columns, the last dimension."""
    return _mapped(scales, lambda tensor: tensor.narrow(-1, group, count))


def _rows(scales: GroupScales, rows: slice) -> GroupScales:
    """Return the scales of some rows, without second scales, which are those of the start."""
    part = _mapped(scales, lambda tensor: tensor[:, rows].contiguous())
    return replace(part, second=None)


# --- codes


@dataclass(frozen=True, eq=False)
class _Solution:
    """Numbers of codes and decoded values [E, N, K], scales [E, N, G], and the loss of each row [E, N]."""

    numbers: torch.Tensor
    values: torch.Tensor
    scales: GroupScales
    loss: torch.Tensor

    def or_better(self, rival: _Solution) -> _Solution:
        """Return the better one of two solutions for each row."""
        wins = (rival.loss < self.loss).unsqueeze(2)
        return _Solution(
            torch.where(wins, rival.numbers, self.numbers),
            torch.where(wins, rival.values, self.values),
            rival.scales.where(wins, self.scales),
            torch.minimum(self.loss, rival.loss),
        )

    def backwards(self) -> _Solution:
        """Return the solution with the columns from the last to the first."""
        scales = _mapped(self.scales, lambda tensor: tensor.flip(2))
        return _Solution(self.numbers.flip(2), self.values.flip(2), scales, self.loss)


@dataclass(frozen=True, eq=False)
class _RoundedColumns:
    """Codes of some columns under the best of some scales.

    loss: [E, N]. best: index of the scales, int64 [E, N]. numbers, values: of codes, and decoded, [E, N, S].
    """

    loss: torch.Tensor
    best: torch.Tensor
    numbers: torch.Tensor
    values: torch.Tensor


def _solve(weights: torch.Tensor, choice: _ScaleChoice, products: InputProducts) -> _Solution:
    """Return codes and scales of weights [E, N, K] with a small loss; with gradients, block after block of rows."""
    gradients, hessian, num_rows = products.gradients, products.hessian, weights.size(1)
    size = num_rows if gradients is None else -(-num_rows // _ROW_BLOCKS)
    error = torch.zeros_like(weights)
    solutions: dict[int, _Solution] = {}
    for _ in range(1 + _DESCENTS):
        for begin in range(0, num_rows, size):
            rows = slice(begin, begin + size)
            target, present = weights[:, rows], solutions.get(begin)
            if gradients is not None:
                pull = gradients.pull(rows, are_next_free=present is None)
                target = _by_columns(target + pull.to(weights.device) @ error)
            sweep = _sweep_of(target, choice.of_rows(rows))
            solutions[begin] = (
                _start(sweep, hessian) if present is None else _descended(sweep, present, hessian)
            )
            error[:, rows] = weights[:, rows] - solutions[begin].values
    each = [*solutions.values()]
    return _Solution(
        torch.cat([solution.numbers for solution in each], 1),
        torch.cat([solution.values for solution in each], 1),
        _joined([solution.scales for solution in each], 1),
        torch.cat([solution.loss for solution in each], 1),
    )


def _sweep_of(weights: torch.Tensor, choice: _ScaleChoice) -> _Sweep:
    size = math.gcd(_BLOCK, weights.size(2))
    if choice.is_free:
        size = choice.schema.weight_scale_group_size
    return _Sweep(weights, choice, size, size * max(1, _BLOCK // size))


def _start(sweep: _Sweep, hessian: _Hessian) -> _Solution:
    """Round all columns in two ways; each row takes the one that loses less."""
    scales = sweep.choice.searched(sweep.weights, hessian.diagonal)
    ordered = _sweep_of(sweep.weights, replace(sweep.choice, is_free=False))
    return sweep.first(hessian, scales).or_better(_by_diagonal(ordered, hessian, scales))


def _descended(sweep: _Sweep, solution: _Solution, hessian: _Hessian) -> _Solution:
    """Round each group again as all others stand, from the first to the last, and back. Overwrites `solution`."""
    for one, way in ((sweep, hessian), (sweep.backwards(), hessian.backwards)):
        solution = one.swept(solution, way.h, way.fixed_blocks(sweep.size)).backwards()
    return solution


def _by_diagonal(sweep: _Sweep, hessian: _Hessian, scales: GroupScales) -> _Solution:
    """Round columns by decreasing diagonal of H, each under the scales of its group."""
    num_experts, num_rows, num_columns = sweep.weights.shape
    order = hessian.order.expand(num_experts, num_columns)
    order = order.unsqueeze(2).expand(num_experts, num_columns, num_rows).mT
    group = order // (num_columns // scales.scale.size(2))
    column_scales = _mapped(scales, lambda tensor: tensor.gather(2, group))
    weights = sweep.weights.mT.gather(1, order.mT).mT
    ordered = replace(sweep, weights=weights).first(hessian.ordered, column_scales)
    return _Solution(
        torch.empty_like(weights).scatter_(2, order, ordered.numbers),
        torch.empty_like(weights).scatter_(2, order, ordered.values),
        scales,
        ordered.loss,
    )


@dataclass(frozen=True, eq=False)
class _Sweep:
    """A way through the columns of matrices, float32 [E, N, K] `_by_columns`, and the choice of their scales.

    size: columns that are rounded together, under one scale. width: columns between two products with whole rows.
    """

    weights: torch.Tensor
    choice: _ScaleChoice
    size: int
    width: int

    def backwards(self) -> _Sweep:
        """Return the way from the last column to the first."""
        return replace(self, weights=self.weights.flip(2))

    def first(self, hessian: _Hessian, scales: GroupScales) -> _Solution:
        """Round columns; scales are chosen for what a group's weights have become."""
        numbers = torch.zeros_like(self.weights)
        loss = numbers.new_zeros(numbers.shape[:2])
        start = _Solution(numbers, self.weights.clone(), scales, loss)
        blocks = hessian.free_blocks(self.size)
        return self.swept(start, hessian.factor, blocks, is_first=True)

    def swept(
        self, solution: _Solution, matrix: torch.Tensor, blocks: _Blocks, *, is_first: bool = False
    ) -> _Solution:
        """Round group after group, each with its scales.

        First under M, with errors of the columns before; then under H, as all other columns stand, where this gains.
        matrix: M or H, [1 or E, K, K]. The tensors of `solution` are overwritten.
        """
        choice, num_columns = self.choice, self.weights.size(2)
        numbers, values, scales = solution.numbers, solution.values, solution.scales
        error = self.weights - values
        num_scales = scales.scale.size(2)
        neighbours = choice.neighbours(scales)
        swept_scales = []
        loss = torch.zeros_like(solution.loss)
        for begin in range(0, num_columns, self.width):
            end = min(begin + self.width, num_columns)
            before = begin if is_first else num_columns
            pull = _times(error[:, :, :before], matrix[:, :before, begin:end])
            for first in range(begin, end, self.size):
                last, group = first + self.size, first // self.size
                columns = slice(first, last)
                factor = blocks.factor[group]
                present = values[:, :, columns]
                present_scales = _group(
                    scales,
                    first * num_scales // num_columns,
                    max(1, self.size * num_scales // num_columns),
                )
                pulled = _times(pull[:, :, first - begin : last - begin], blocks.inverse[group])
                target = present + pulled
                beside = [_group(neighbour, group) for neighbour in neighbours]
                candidates = choice.candidates(present_scales, beside, target)
                rounded, rounded_scales = self._rounded(target, candidates, factor)
                if is_first:
                    wins = torch.ones_like(rounded.loss, dtype=torch.bool).unsqueeze(2)
                else:
                    present_loss = _times(target - present, factor).square().sum(2)
                    wins = (rounded.loss < present_loss * _MARGIN).unsqueeze(2)
                change = torch.where(wins, rounded.values - present, 0.0)
                swept_scales.append(rounded_scales.where(wins, present_scales))
                numbers[:, :, columns] = torch.where(wins, rounded.numbers, numbers[:, :, columns])
                values[:, :, columns] = torch.where(wins, rounded.values, present)
                loss += rounded.loss
                error[:, :, columns] -= change
                pull[:, :, last - begin :] -= _times(change, matrix[:, columns, last:end])
        if choice.is_free:
            scales = _joined(swept_scales, 2)
        return _Solution(numbers, values, scales, loss)

    def _rounded(
        self, target: torch.Tensor, candidates: GroupScales, factor: torch.Tensor
    ) -> tuple[_RoundedColumns, GroupScales]:
        """Round columns under the best of some scales [C, E, N, 1], or the one that fits its codes; return it, too."""
        schema = self.choice.schema
        rounded = _round(target, candidates, factor, schema)
        index = rounded.best.view(1, *rounded.best.shape, 1)
        scales = _mapped(candidates, lambda tensor: tensor.gather(0, index)[0])
        if not self.choice.is_free or scales.stored.dtype == torch.float8_e8m0fnu:
            return rounded, scales
        fitted = self.choice.fitted(target, rounded.numbers, scales, factor)
        again = _round(target, _stacked([fitted]), factor, schema)
        wins = (again.loss < rounded.loss).unsqueeze(2)
        better = _RoundedColumns(
            torch.minimum(again.loss, rounded.loss),
            rounded.best,
            torch.where(wins, again.numbers, rounded.numbers),
            torch.where(wins, again.values, rounded.values),
        )
        return better, fitted.where(wins, scales)


def _round(
    target: torch.Tensor, scales: GroupScales, factor: torch.Tensor, schema: WeightSchema
) -> _RoundedColumns:
    """Round columns [E, N, S] one after the other; later ones make good what earlier ones lost.

    scales: of C candidates, [C, E, N, 1], or [1, E, N, S] for each column. factor: upper triangular, [1 or E, S, S].
    """
    if target.is_cuda:
        from hqconv.quantization import triton_sweep  # loads Triton

        return _RoundedColumns(*triton_sweep.round_columns(target, scales, factor, schema))
    return _RoundedColumns(*cpu.round_columns(target, scales, factor, schema))


def _nearest_numbers(
    target: torch.Tensor, scales: GroupScales, schema: WeightSchema
) -> torch.Tensor:
    """Return the numbers of the codes of [..., S] under scales [...]; 0 where a scale is 0."""
    numbers, _ = quantized.nearest_numbers(target, scales, schema)
    return numbers.nan_to_num_(0.0)


def _by_columns(matrices: torch.Tensor) -> torch.Tensor:
    """Return [E, N, K] with the rows of a column next to each other in memory."""
    return matrices.mT.contiguous().mT


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return [E, N, K] times [1 or E, K, S], as `_by_columns`."""
    return (matrix.mT @ rows.mT).mT
