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

torch, and one loop for the columns of a group, compiled or a Triton kernel; a GPU multiplies in TF32. The same bytes
for the same inputs, number of experts and type of device, not between types.
Legend: E experts, N output rows, K input columns, G groups along K, S columns of a group, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from hqconv.formats.encoding import resized
from hqconv.humming_ops.runtime import humming, resident
from hqconv.quantization import cpu, quantized
from hqconv.quantization.bit_codec import bits_of
from hqconv.quantization.group_scales import GroupScales, rounded_scales, scales_of, stored_range
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import GroupColumns, QuantizedStack, rotate
from hqconv.quantization.scale_search import (
    MARGIN,
    candidate_scales,
    ladder_of,
    least_byte,
    magnitude_bytes,
    stepped,
)
from hqconv.schemas.weight_schema import WeightSchema

_DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # tried, of the mean diagonal of H
_NEAR_BEST = 1.02  # of the least loss: so much is allowed for more damping
_DIAGONAL_SHARE = 0.2  # of products of gradients, whose other entries a few tokens tell badly
_ROW_BLOCKS = 8  # of a matrix with gradients
_RIDGES = (0.01, 0.1, 1.0)  # tried when weights are compensated, of the mean diagonal of H
_BLOCK = 128  # columns that are rounded between two products with whole rows
_LONGEST_GROUP = 256  # of columns whose scale is chosen with their codes
_DESCENTS = 2  # from the first group to the last, and back


@contextmanager
def in_tf32() -> Iterator[None]:
    """Let a GPU multiply float32 with factors of 11 bits, for sums in which no more of them count."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


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
    _blocks: dict[tuple[int, bool], _Blocks] = field(default_factory=dict)

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

    def blocks(self, size: int, *, are_next_free: bool) -> _Blocks:
        """Return the factors of runs of `size` columns: while those behind them are free, or all others stand."""
        key = size, are_next_free
        if key not in self._blocks:
            diagonal = _diagonal_blocks(self.factor if are_next_free else self.h, size).double()
            factor = diagonal if are_next_free else _upper_factor(diagonal)
            inverse = _inverse(factor)
            if not are_next_free:
                inverse = inverse.mT @ inverse
            blocks = _Blocks(factor.float().contiguous(), inverse.float().contiguous())
            self._blocks[key] = blocks
        return self._blocks[key]


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


@in_tf32()
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
    choice = _ScaleChoice.of(_start_scales(rounded, schema), schema, param_dtype)
    solution = _solve(weights, choice, products)
    losses, powers = (
        (values * (values @ products.h)).double().sum(2)
        for values in (weights - solution.values, weights)
    )
    scales = replace(choice.stored(solution), second=None)  # which are those of the start
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
                tensors |= _rows(scales, rows).tensors(schema, param_dtype)
            error, power = quantized.error_sums(stack, tensors, schema)
            num_exact = torch.zeros_like(rounded_stack.num_exact)
            outputs = torch.stack([losses[:, rows].sum(1), powers[:, rows].sum(1)])
            results.append(QuantizedStack(tensors, error, power, num_exact, outputs=outputs))
    return results


def _start_scales(rounded: Sequence[QuantizedStack], schema: WeightSchema) -> GroupScales:
    """Return the scales of matrices that lie one above the other, of each row: [E, N, G], second ones [E, N, 1]."""
    each = [scales_of(stack.tensors, schema) for stack in rounded]
    num_rows = [stack.tensors["weight"].size(1) for stack in rounded]
    zeros = [scales.zero for scales in each if scales.zero is not None]
    seconds = [scales.second for scales in each if scales.second is not None]

    def of_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(tensors, num_rows, strict=True)
        repeated = [tensor.repeat_interleave(n // tensor.size(1), 1) for tensor, n in pairs]
        return torch.cat(repeated, 1)

    stored = of_rows([bits_of(scales.stored) for scales in each])
    return GroupScales(
        stored.view(each[0].stored.dtype),
        of_rows([scales.scale for scales in each]),
        of_rows(zeros) if zeros else None,
        of_rows(seconds) if seconds else None,
    )


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
    """The scales that rows of matrices may get.

    start: those of round-to-nearest, [E, N, G]. is_free: scales are chosen with the codes; else they are those of the
    start. limits: the least and the largest byte of others, int32 [E, 1, 1], where the parameter dtype has some.
    """

    schema: WeightSchema
    param_dtype: str
    start: GroupScales
    is_free: bool
    limits: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(cls, start: GroupScales, schema: WeightSchema, param_dtype: str) -> _ScaleChoice:
        """Return the choice of all rows."""
        is_grouped = schema.weight_scale_type == "group"
        is_free = is_grouped and schema.weight_scale_group_size <= _LONGEST_GROUP
        floor = least_byte([start.stored], param_dtype, has_row_scale=schema.has_row_scale)
        limits = None
        if floor is not None:
            limits = floor, magnitude_bytes(start.stored).amax((1, 2), keepdim=True)
        return cls(schema, param_dtype, start, is_free, limits)

    def of_rows(self, rows: slice) -> _ScaleChoice:
        """Return the choice of some of the rows."""
        return replace(self, start=_rows(self.start, rows))

    def is_allowed(self, scales: GroupScales) -> torch.Tensor:
        """Return a mask of the scales that the parameter dtype can hold beside the start's largest."""
        if self.limits is None:
            return torch.ones_like(scales.scale, dtype=torch.bool)
        least, most = self.limits
        magnitude = magnitude_bytes(scales.stored)
        return (magnitude >= least) & (magnitude <= most)

    def searched(self, weights: torch.Tensor, importance: torch.Tensor) -> GroupScales:
        """Return the scales of the least squared error of `weights`, each column by its importance [1 or E, K]."""
        if not self.is_free:
            return self.start
        num_groups = self.start.scale.size(2)
        target = weights.view(*weights.shape[:2], num_groups, -1)
        importance = importance.view(len(importance), 1, num_groups, -1)

        def loss_of(scales: GroupScales) -> torch.Tensor:
            numbers, _ = quantized.nearest_numbers(target, scales, self.schema)
            decoded = quantized.decode(numbers.nan_to_num_(0.0), scales)  # where a scale is 0
            return decoded.sub_(target).square_().mul_(importance).sum(-1)

        best, least = self.start, loss_of(self.start) * MARGIN
        for tried, valid in candidate_scales(self.start, self.schema, self.param_dtype):
            loss = loss_of(tried)
            wins = valid & self.is_allowed(tried) & (loss < least)
            best, least = tried.where(wins, best), torch.where(wins, loss, least)
        return best

    def candidates(self, solution: _Solution) -> torch.Tensor:
        """Return scales, and those one step above and below, float32 [C, E, N, G]; these where there is none."""
        tried = [solution.scale]
        if self.is_free and not self.schema.has_zero_point:
            scales, ladder = self.stored(solution), ladder_of(self.schema, self.param_dtype)
            for step in (2, -1):
                steps = torch.full_like(scales.scale, step, dtype=torch.int32)
                beside, _ = stepped(scales, steps, ladder)
                tried.append(beside.where(self.is_allowed(beside), scales).scale)
        return torch.stack(tried)

    def stored(self, solution: _Solution) -> GroupScales:
        """Return the scales of a solution, whose values their dtype holds."""
        stored = rounded_scales(solution.scale, self.start.stored.dtype)
        return GroupScales(stored, solution.scale, solution.zero, self.start.second)


def _by_steps(values: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return values [C, E, N, G] for each of some equal steps through the columns, [steps, C, E, G / steps or 1, N]."""
    values = values.repeat_interleave(max(1, num_steps // values.size(3)), 3)
    by_step = values.view(*values.shape[:3], num_steps, -1)
    return by_step.permute(3, 0, 1, 4, 2).contiguous()


def _rows(scales: GroupScales, rows: slice) -> GroupScales:
    zero, second = (
        None if tensor is None else tensor[:, rows].contiguous()
        for tensor in (scales.zero, scales.second)
    )
    stored, scale = (tensor[:, rows].contiguous() for tensor in (scales.stored, scales.scale))
    return GroupScales(stored, scale, zero, second)


# --- codes


@dataclass(frozen=True, eq=False)
class _Solution:
    """Numbers of codes and decoded values [E, N, K], scales and zero points [E, N, G], and the loss of each row [E, N].

    All float32.
    """

    numbers: torch.Tensor
    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    loss: torch.Tensor

    def or_better(self, rival: _Solution) -> _Solution:
        """Return the better one of two solutions for each row, which have the same zero points."""
        wins = (rival.loss < self.loss).unsqueeze(2)
        return _Solution(
            torch.where(wins, rival.numbers, self.numbers),
            torch.where(wins, rival.values, self.values),
            torch.where(wins, rival.scale, self.scale),
            self.zero,
            torch.minimum(self.loss, rival.loss),
        )

    def backwards(self) -> _Solution:
        """Return the solution with the columns from the last to the first."""
        zero = None if self.zero is None else self.zero.flip(2)
        return _Solution(
            self.numbers.flip(2), self.values.flip(2), self.scale.flip(2), zero, self.loss
        )


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
    zeros = [solution.zero for solution in each if solution.zero is not None]
    return _Solution(
        torch.cat([solution.numbers for solution in each], 1),
        torch.cat([solution.values for solution in each], 1),
        torch.cat([solution.scale for solution in each], 1),
        torch.cat(zeros, 1) if zeros else None,
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
        solution = one.swept(solution, way).backwards()
    return solution


def _by_diagonal(sweep: _Sweep, hessian: _Hessian, scales: GroupScales) -> _Solution:
    """Round columns by decreasing diagonal of H, each under the scales of its group."""
    num_experts, num_rows, num_columns = sweep.weights.shape
    order = hessian.order.expand(num_experts, num_columns)
    order = order.unsqueeze(2).expand(num_experts, num_columns, num_rows).mT
    group = order // (num_columns // scales.scale.size(2))
    zero = None if scales.zero is None else scales.zero.gather(2, group)
    of_columns = replace(scales, scale=scales.scale.gather(2, group), zero=zero)
    weights = sweep.weights.mT.gather(1, order.mT).mT
    ordered = replace(sweep, weights=weights).first(hessian.ordered, of_columns)
    return replace(
        ordered,
        numbers=torch.empty_like(weights).scatter_(2, order, ordered.numbers),
        values=torch.empty_like(weights).scatter_(2, order, ordered.values),
        scale=scales.scale,
        zero=scales.zero,
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
        start = _Solution(numbers, self.weights.clone(), scales.scale, scales.zero, loss)
        return self.swept(start, hessian, is_first=True)

    def swept(self, solution: _Solution, hessian: _Hessian, *, is_first: bool = False) -> _Solution:
        """Round group after group, each with its scales. Overwrites the tensors of `solution`.

        First with the errors of the columns before; then as all other columns stand, where this gains.
        """
        matrix = hessian.factor if is_first else hessian.h
        blocks = hessian.blocks(self.size, are_next_free=is_first)
        choice, num_columns = self.choice, self.weights.size(2)
        dtype = choice.start.stored.dtype
        scale_range = 0, math.inf, 0.0  # no scale is fitted to codes
        if choice.is_free and dtype != torch.float8_e8m0fnu:
            scale_range = stored_range(dtype)
        numbers, values, scale = solution.numbers, solution.values, solution.scale
        num_steps = num_columns // self.size
        tried = _by_steps(choice.candidates(solution), num_steps)
        chosen = tried[:, 0].clone()
        zero = torch.zeros_like(scale) if solution.zero is None else solution.zero
        zeros = _by_steps(zero[None], num_steps)
        loss = torch.zeros_like(solution.loss)
        second = choice.start.second
        second = torch.ones_like(loss) if second is None else second.squeeze(2)
        error = self.weights - values
        for begin in range(0, num_columns, self.width):
            end = min(begin + self.width, num_columns)
            before = begin if is_first else num_columns
            pull = matrix[:, :before, begin:end].mT @ error[:, :, :before].mT
            for first in range(begin, end, self.size):
                step, last = first // self.size, first + self.size
                group = GroupColumns(
                    pull=pull[:, first - begin : last - begin],
                    inverse=blocks.inverse[step],
                    factor=blocks.factor[step],
                    scales=tried[step],
                    zero=zeros[step, 0],
                    scale_2=second,
                    number=numbers.mT[:, first:last],
                    value=values.mT[:, first:last],
                    scale=chosen[step, :, 0],
                    loss=loss,
                )
                change = _round_columns(group, choice.schema, scale_range, is_first=is_first)
                pull[:, last - begin :].sub_(matrix[:, first:last, last:end].mT @ change)
            error[:, :, begin:end] = self.weights[:, :, begin:end] - values[:, :, begin:end]
        if choice.is_free:
            scale = chosen[:, :, 0].permute(1, 2, 0).contiguous()
        return _Solution(numbers, values, scale, solution.zero, loss)


def _by_columns(matrices: torch.Tensor) -> torch.Tensor:
    """Return [E, N, K] with the rows of a column next to each other in memory."""
    return matrices.mT.contiguous().mT


def _round_columns(
    group: GroupColumns,
    schema: WeightSchema,
    scale_range: tuple[int, float, float],
    *,
    is_first: bool,
) -> torch.Tensor:
    """Call `round_columns` of the group's device."""
    if not group.pull.is_cuda:
        return cpu.round_columns(group, schema, scale_range, is_first=is_first)
    from hqconv.quantization import triton_sweep  # loads Triton

    return triton_sweep.round_columns(group, schema, scale_range, is_first=is_first)
