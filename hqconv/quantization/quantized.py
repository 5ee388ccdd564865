"""Stacks of quantized matrices: results and their errors, torch's operations on them, and codes that a source keeps.

torch's operations are the implementation for GPUs. The bits are those of the CPU's compiled loops: weights are decoded
in float32, each operation is rounded once, differences are squared in float64, and terms are folded in halves
(`fold_sum`). Chunks of rows bound the memory. A source's codes are expressed in a target schema, with scales widened
exactly or rounded.
Legend: E experts, N output rows, K input columns, R rows of scales, G groups along K, S columns of a group, C rows of a
chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from hqconv.errors import RequestError
from hqconv.humming_ops.runtime import humming
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, dequantize, is_any, refuse, scale_values
from hqconv.quantization.group_scales import GroupScales, scales_of
from hqconv.schemas.tensors import CodeKind, CodeType, torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

# of a chunk; each has some 60 bytes of temporary tensors
_CUDA_WEIGHTS = 1 << 23
_CPU_WEIGHTS = 1 << 18
# rotated at once, on the CPU to stay in the cache
_CUDA_ROTATED = 1 << 26
_CPU_ROTATED = 1 << 18


@dataclass(frozen=True)
class ErrorSums:
    """Error of an encoded matrix.

    error, power: float64 sums of (w - decoded)**2 and of w**2, in one folding order on every device.
    num_exact: scale groups without any error, of `num_groups` (per row), if they were counted. is_direct: the
    source's codes were kept without a measurement. scale_change: for kept codes with rounded scales (and a measured
    error), the largest relative change of a scale. num_tokens: of a calibration, that chose the expert; of w2 alone.
    output_error, output_power: of a calibration, sums of squares over the matrix's outputs.
    """

    error: float = 0.0
    power: float = 0.0
    num_exact: int = 0
    num_groups: int = 0
    is_direct: bool = False
    scale_change: float | None = None
    num_tokens: int | None = None
    output_error: float | None = None
    output_power: float | None = None

    @property
    def is_exact(self) -> bool:
        """True if the matrix has the codes and scales of the source."""
        return self.is_direct and self.scale_change is None

    @property
    def is_finite(self) -> bool:
        """True if the source's weights are finite."""
        return math.isfinite(self.power)


@dataclass(frozen=True)
class QuantizedStack:
    """E matrices of one projection in Humming's packed form, and their errors, on one device.

    `tensors`: `weight` int32 [E, N, K * bits / 32], `weight_scale`, `zero_point`, `weight_scale_2` as
    `HummingWeightSchema.get_tensors_attrs` describes them; tensor-level scales are [E], all others [E, …].
    `error`, `power`: float64 [E]; `num_exact`: int64 [E]; `scale_change`: float64 [E]; as in `ErrorSums`, and so is
    `is_direct`. `outputs`: of a calibration, float64 [2, E], output_error and output_power.
    """

    tensors: dict[str, torch.Tensor]
    error: torch.Tensor
    power: torch.Tensor
    num_exact: torch.Tensor
    num_groups: int = 0
    is_direct: bool = False
    scale_change: torch.Tensor | None = None
    outputs: torch.Tensor | None = None

    def sums(self) -> torch.Tensor:
        """Return the input of `error_sums`: float64 [3 or 5, E] on the device."""
        last = self.num_exact.double() if self.scale_change is None else self.scale_change
        sums = torch.stack([self.error, self.power, last])
        return sums if self.outputs is None else torch.cat([sums, self.outputs])

    def error_sums(self, sums: torch.Tensor | None = None) -> list[ErrorSums]:
        """Return each matrix's error sums, from `sums` if they are on the host; else wait for the device."""
        if self.is_direct and self.scale_change is None:
            return [ErrorSums(is_direct=True)] * len(self.error)
        each = (self.sums() if sums is None else sums).tolist()
        if self.is_direct:
            return [
                ErrorSums(error, power, is_direct=True, scale_change=change)
                for error, power, change in zip(*each, strict=True)
            ]
        return [
            ErrorSums(
                error,
                power,
                int(exact),
                self.num_groups,
                output_error=outputs[0] if outputs else None,
                output_power=outputs[1] if outputs else None,
            )
            for error, power, exact, *outputs in zip(*each, strict=True)
        ]


class GroupColumns(NamedTuple):
    """Columns of a group of E experts' matrices, to be rounded one after the other; float32.

    pull: of the errors of other columns, [E, S, N]; may be overwritten. Times `inverse` it is the change of values that
    they ask for. factor: upper triangular M, [1 or E, S, S]: an error e of the group costs |Mᵀ e|². scales: to be
    tried, [C, E, L, N], with L = 1, or S for one scale of each column. zero: [E, L, N]. scale_2: [E, N].
    Results of rows whose loss falls: number, value: of codes, [E, S, N]. scale: the best one, or the one that fits its
    codes, [E, N]. loss: [E, N], to which that of the group is added.
    """

    pull: torch.Tensor
    inverse: torch.Tensor
    factor: torch.Tensor
    scales: torch.Tensor
    zero: torch.Tensor
    scale_2: torch.Tensor
    number: torch.Tensor
    value: torch.Tensor
    scale: torch.Tensor
    loss: torch.Tensor


def stack_direct(
    matrices: Sequence[Mapping[str, torch.Tensor]], rounding: torch.Tensor | None
) -> QuantizedStack:
    """Stack the packed tensors of one projection of E experts whose codes were kept.

    rounding: where scales were rounded, float64 [3, E]: error, power and scale change of each.
    """
    tensors = stack_tensors(matrices)
    if rounding is not None:
        error, power, change = rounding
        exact = torch.zeros_like(error, dtype=torch.int64)
        return QuantizedStack(tensors, error, power, exact, is_direct=True, scale_change=change)
    nothing = torch.zeros(len(matrices), dtype=torch.float64, device=tensors["weight"].device)
    return QuantizedStack(tensors, nothing, nothing, nothing.long(), is_direct=True)


def stack_tensors(matrices: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack the packed tensors of one projection of E experts, as in `QuantizedStack`; of one expert as views."""

    def in_front(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_tensor_level = name.startswith("weight_scale") and tensor.shape == (1,)
        return tensor if is_tensor_level else tensor.unsqueeze(0)

    return join_stacks(
        [{name: in_front(name, tensor) for name, tensor in matrix.items()} for matrix in matrices]
    )


def join_stacks(stacks: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the tensors of several `QuantizedStack`s of one projection."""
    if len(stacks) == 1:
        return stacks[0]
    return {name: bit_codec.join([stack[name] for stack in stacks]) for name in stacks[0]}


def num_groups(shape: tuple[int, int], schema: WeightSchema) -> int:
    """Return the number of scale groups of a matrix [N, K], counted per row."""
    return shape[0] * (shape[1] // (schema.weight_scale_group_size or shape[1]))


def fold_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension in the order of `arithmetic.fold_sum`; overwrites `terms`."""
    length = terms.size(-1)
    while length > 1:
        half = (length + 1) // 2
        terms[..., : length - half] += terms[..., half:length]
        length = half
    return terms[..., 0]


# --- operations


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some rows of a stack: float32 weights [C, G, S], their scales [C, G], and second scales [C, 1].

    rows: positions among all rows of the stack. scales: but for `stored`, which is of all rows.
    """

    rows: slice
    weights: torch.Tensor
    scales: GroupScales


def _chunks(stack: torch.Tensor, scales: GroupScales) -> Iterator[_Chunk]:
    """Yield a stack in chunks."""
    num_experts, num_rows, num_columns = stack.shape
    total = num_experts * num_rows
    num_groups = scales.scale.size(2)
    size = max(1, (_CUDA_WEIGHTS if stack.is_cuda else _CPU_WEIGHTS) // num_columns)
    weights = stack.reshape(total, num_groups, num_columns // num_groups)
    scale = per_row(scales.scale, total)
    zero = None if scales.zero is None else per_row(scales.zero, total)
    second = None if scales.second is None else per_row(scales.second, total)
    for begin in range(0, total, size):
        rows = slice(begin, begin + size)
        of_rows = GroupScales(
            scales.stored,
            scale[rows],
            None if zero is None else zero[rows],
            None if second is None else second[rows],
        )
        yield _Chunk(rows, weights[rows].float(), of_rows)


def per_row(values: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Repeat [E, R, G] so that each of `num_rows` rows of all experts has its own."""
    flat = values.flatten(0, 1)
    return flat.repeat_interleave(num_rows // len(flat), 0)


def error_sums(
    stack: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    schema: WeightSchema,
    num_exact: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of (w - decoded)**2 and of w**2 of each matrix, float64 [E] each.

    `stack`: [E, N, K]; `tensors`: its packed tensors, as `QuantizedStack.tensors`. num_exact: int64 [E], gets the
    number of scale groups without any error. Does not synchronize.
    """
    num_experts, num_rows, _ = stack.shape
    sums = torch.empty(2, num_experts * num_rows, dtype=torch.float64, device=stack.device)
    exact = torch.empty(num_experts * num_rows, dtype=torch.int64, device=stack.device)
    packed = tensors["weight"].flatten(0, 1)
    for chunk in _chunks(stack, scales_of(tensors, schema)):
        numbers = stored_numbers(packed[chunk.rows], schema).view(chunk.weights.shape)
        difference = _differences(chunk, chunk.scales, numbers)
        if num_exact is not None:
            exact[chunk.rows] = (difference == 0).all(-1).sum(-1)
        for number, terms in enumerate((difference, chunk.weights.double())):
            sums[number, chunk.rows] = fold_sum(terms.square_().flatten(1))
    if num_exact is not None:
        num_exact.copy_(exact.view(num_experts, num_rows).sum(1))
    error, power = fold_sum(sums.view(2, num_experts, num_rows))
    return error, power


def decoded(tensors: Mapping[str, torch.Tensor], schema: WeightSchema) -> torch.Tensor:
    """Return the values of packed tensors of a stack, as `QuantizedStack.tensors`: float32 [E, N, K]."""
    packed = tensors["weight"]
    numbers = stored_numbers(packed.flatten(0, 1), schema).view(*packed.shape[:2], -1)
    found = torch.empty_like(numbers)
    for chunk in _chunks(numbers, scales_of(tensors, schema)):
        found.flatten(0, 1)[chunk.rows] = decode(chunk.weights, chunk.scales).flatten(1)
    return rotate(found, schema.rotation) if schema.rotation else found


def row_errors(
    stack: torch.Tensor,
    scales: GroupScales,
    packed: torch.Tensor | None,
    schema: WeightSchema,
    stored: GroupScales | None = None,
) -> torch.Tensor:
    """Return the squared error of each row's part of each group of a stack [E, N, K], float64 [E, N, G].

    packed: codes; None to choose codes for the scales. stored: the scales that they are decoded with, if others.
    """
    out = torch.empty(
        *stack.shape[:2], scales.scale.size(2), dtype=torch.float64, device=stack.device
    )
    decoded_with = None if stored is None else per_row(stored.scale, stack.size(0) * stack.size(1))
    for chunk in _chunks(stack, scales):
        if packed is None:
            numbers, _ = nearest_numbers(chunk.weights, chunk.scales, schema)
        else:
            numbers = stored_numbers(packed.flatten(0, 1)[chunk.rows], schema)
            numbers = numbers.view(chunk.weights.shape)
        under = chunk.scales
        if decoded_with is not None:
            under = replace(under, scale=decoded_with[chunk.rows])
        out.flatten(0, 1)[chunk.rows] = fold_sum(_differences(chunk, under, numbers).square_())
    return out


def row_fits(
    stack: torch.Tensor, scales: GroupScales, schema: WeightSchema
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sums of w * v, of v * v and of w * w of each row and group, float64 [E, N, G] each.

    v: the number of the code that a weight w gets under `scales`, less the zero point.
    """
    out = torch.empty(
        3, *stack.shape[:2], scales.scale.size(2), dtype=torch.float64, device=stack.device
    )
    for chunk in _chunks(stack, scales):
        numbers, _ = nearest_numbers(chunk.weights, chunk.scales, schema)
        if chunk.scales.zero is not None:
            numbers = numbers - chunk.scales.zero.unsqueeze(-1)
        values = numbers.double()
        weights = chunk.weights.double()
        for number, terms in enumerate((values * weights, values * values, weights * weights)):
            out[number].flatten(0, 1)[chunk.rows] = fold_sum(terms)
    return out[0], out[1], out[2]


def chosen_codes(
    stack: torch.Tensor,
    scales: GroupScales,
    changed: torch.Tensor,
    packed: torch.Tensor,
    schema: WeightSchema,
) -> torch.Tensor:
    """Return codes int32 [E, N, K * bits / 32]: new ones in groups that `changed` [E, R, G], else those of `packed`."""
    out = torch.empty_like(packed)
    is_new = per_row(changed, stack.size(0) * stack.size(1)).unsqueeze(-1)
    before = packed.flatten(0, 1)
    for chunk in _chunks(stack, scales):
        numbers, x = nearest_numbers(chunk.weights, chunk.scales, schema)
        codes = humming().ops.unpack_weight(before[chunk.rows].contiguous(), schema.num_bits)
        codes = codes.view(numbers.shape)
        codes = torch.where(is_new[chunk.rows], codes_of(numbers, x, schema), codes).flatten(1)
        out.flatten(0, 1)[chunk.rows] = humming().ops.pack_weight(codes, schema.num_bits)
    return out


def _differences(chunk: _Chunk, scales: GroupScales, numbers: torch.Tensor) -> torch.Tensor:
    """Return weights less the decoded ones, float64 [C, G, S]."""
    return chunk.weights.double().sub_(decode(numbers, scales))


def decode(numbers: torch.Tensor, scales: GroupScales) -> torch.Tensor:
    """Decode numbers of codes [C, G, S] under scales [C, G]; every product is rounded once in float32."""
    if scales.zero is not None:
        numbers = numbers - scales.zero.unsqueeze(-1)
    decoded = numbers * scales.scale.unsqueeze(-1)
    return decoded if scales.second is None else decoded.mul_(scales.second.unsqueeze(-1))


def stored_numbers(packed: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """Return the numbers of packed codes, before zero point and scale: float32 [C, K] of int32 [C, K * bits / 32]."""
    _, bits, exponent, mantissa = schema.code_type
    codes: torch.Tensor = humming().ops.unpack_weight(packed.contiguous(), bits)
    if schema.is_integer:
        return (codes if schema.has_zero_point else codes.sub_(1 << (bits - 1))).float()
    numbers: torch.Tensor = humming().ops.dequant_weight(codes, exponent, mantissa, True)
    return numbers


def nearest_numbers(
    weights: torch.Tensor, scales: GroupScales, schema: WeightSchema
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the codes that weights [C, G, S] get under scales [C, G], and the scaled weights.

    Numbers are those before zero point and scale.
    """
    code = schema.code_type
    lowest = scales.lowest()
    above = weights if lowest is None else weights - lowest.unsqueeze(-1)
    x = above * scales.inverse().unsqueeze(-1)
    if code.kind == CodeKind.FLOAT:
        return _round_float(x, code), x
    return torch.round(x).clamp_(*code.bounds), x


def _round_float(x: torch.Tensor, code: CodeType) -> torch.Tensor:
    """Return the nearest small float, ties to the truncated one, saturated: as `cpu_loops.encoders`."""
    shift = 128 - (1 << (code.exponent_bits - 1))
    drop = 23 - code.mantissa_bits
    bias = shift << 23
    threshold_bits = (shift + 1) << 23
    threshold = 2.0 ** (shift - 126)
    magnitude = x.abs().clamp_(max=code.largest)
    bits = magnitude.view(torch.int32)
    subnormal = (magnitude + threshold).view(torch.int32).sub_(threshold_bits)
    scaled = torch.where(bits < threshold_bits, subnormal, bits - bias)
    rounded = ((scaled + ((1 << (drop - 1)) - 1)) >> drop) << drop
    small = (rounded + threshold_bits).view(torch.float32).sub_(threshold)
    is_normal = rounded >= 1 << 23
    return torch.where(is_normal, (rounded + bias).view(torch.float32), small).copysign_(x)


def codes_of(numbers: torch.Tensor, x: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """Return the codes of numbers, int32; `x` gives the sign of a small float's zero."""
    kind, bits, exponent, mantissa = schema.code_type
    sign_bit = 1 << (bits - 1)
    if kind == CodeKind.ASYM_INT:
        return numbers.int()
    if kind == CodeKind.SYM_INT:
        return numbers.int() + sign_bit
    magnitude = numbers.abs()
    if kind == CodeKind.SIGN_MAGNITUDE:
        return magnitude.int() | ((numbers < 0).int() * sign_bit)
    shift = 128 - (1 << (exponent - 1))
    drop = 23 - mantissa
    threshold = 2.0 ** (shift - 126)
    subnormal = (magnitude + threshold).view(torch.int32) - ((shift + 1) << 23)
    normal = magnitude.view(torch.int32) - (shift << 23)
    return (torch.where(magnitude < threshold, subnormal, normal) >> drop) | (
        torch.signbit(x).int() * sign_bit
    )


# --- Hadamard rotation of columns, bit-equal to Humming's `process_input` for a GEMM's inputs


def rotate(matrices: torch.Tensor, block: int) -> torch.Tensor:
    """Rotate [..., K] in blocks of `block` columns, a power of two that divides K; the dtype and device stay.

    Every run of `block` columns is multiplied by the Hadamard matrix in Sylvester's order over sqrt(block): symmetric,
    and its own inverse. Rotated weights times rotated inputs equal the product without rotation.

    Sums and differences in float32, of columns 1, 2, 4 … apart, then one product, rounded once more to the dtype where
    that is narrower: Humming's order (process_input/hadamard.cuh), so that bits depend on nothing else. float64 is
    rotated in float64.
    """
    assert block > 1
    assert block & (block - 1) == 0
    assert matrices.size(-1) % block == 0, (matrices.shape, block)
    runs = matrices.reshape(-1, block)
    out = torch.empty(runs.shape, dtype=runs.dtype, device=runs.device)
    wide = torch.promote_types(runs.dtype, torch.float32)
    at_once = max(1, (_CUDA_ROTATED if runs.is_cuda else _CPU_ROTATED) // block)
    for begin in range(0, len(runs), at_once):
        some = slice(begin, begin + at_once)
        side_by_side = runs[some].t().to(wide, copy=True).contiguous()
        out[some] = _rotated(side_by_side).t()
    return out.view(matrices.shape)


def _rotated(runs: torch.Tensor) -> torch.Tensor:
    """Rotate float [block, runs] along its first dimension, in place; runs side by side make long loops."""
    block = len(runs)
    apart = 1
    while apart < block:
        pairs = runs.view(block // (2 * apart), 2, apart, -1)
        low = pairs[:, 0]
        high = pairs[:, 1]
        total = low + high
        torch.sub(low, high, out=high)
        low.copy_(total)
        apart *= 2
    root = 1 / math.sqrt(block)
    return runs.mul_(root if runs.dtype == torch.float64 else float(np.float32(root)))


_ROWS = 256  # whose squares in float64 are in memory at a time


def express(coded: CodedMatrix, schema: WeightSchema, param_dtype: str) -> dict[str, torch.Tensor]:
    """Return Humming's packed tensors of one matrix, if `hqconv.formats.source_format.why_not_direct` returns "".

    `weight` int32 [N, K * bits / 32]; `weight_scale` [N, G], [N, 1], [N / bn, K / bk] or [1]; `zero_point` int32
    [N * bits / 32, G], or floats [N, G] of `param_dtype`; `weight_scale_2` float32 [1] or [N] of `param_dtype`: as
    `get_tensors_attrs` gives them.
    Raises RequestError where the schema's groups do not divide N or K, a dtype would lose digits, or float16 the range.
    """
    assert coded.column_groups is None, "columns grouped by an index have no direct form"
    num_rows, num_columns = coded.shape
    group_n, group_k = schema.scale_group()
    rows = group_n or num_rows
    columns = group_k or num_columns
    if num_rows % rows or num_columns % columns:
        raise RequestError(
            f"The schema '{schema.name}' does not fit the matrix.",
            expected=f"rows in multiples of {rows} and columns in multiples of {columns}",
            found=f"{num_rows} x {num_columns}",
            remedy="Requantize to a schema with smaller groups.",
        )
    scale = _spread(coded.scale, coded, rows, columns)
    scale = _cast(scale, schema.scale_dtype(param_dtype))
    if schema.bs_dtype == "float8e8m0" and schema.has_row_scale and param_dtype == "float16":
        _check_range(scale)
    tensors = {"weight": coded.packed.contiguous()}
    tensors["weight_scale"] = scale.reshape(1) if schema.weight_scale_type == "tensor" else scale
    if coded.zero_point is not None:
        zeros = _spread(coded.zero_point, coded, 1, columns)
        if zeros.is_floating_point():
            tensors["zero_point"] = _cast(zeros, param_dtype)
        else:
            tensors["zero_point"] = bit_codec.pack_along_rows(zeros, coded.num_bits)
    if coded.scale_2 is not None:
        dtype = "float32" if schema.weight_scale_2_type == "tensor" else param_dtype
        tensors["weight_scale_2"] = _cast(coded.scale_2, dtype)
    return tensors


def _spread(values: torch.Tensor, coded: CodedMatrix, rows: int, columns: int) -> torch.Tensor:
    """Repeat values [source rows, source groups] so that each serves `rows` x `columns` weights."""
    bits = bit_codec.bits_of(values)
    source_groups = (coded.group_n, coded.group_k)
    groups = (rows, columns)
    for dim, size in enumerate(coded.shape):
        count = size // groups[dim]
        if bits.size(dim) != count:
            positions = torch.arange(count, device=bits.device) * groups[dim]
            bits = bits.index_select(dim, positions // (source_groups[dim] or size))
    return bits.contiguous().view(values.dtype)


def _cast(scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Cast `scale`, or a float zero point, to a dtype that holds it; RequestError if the dtype loses digits."""
    if dtype in ("float8e8m0", "float8e5m3"):
        expected = torch.float8_e8m0fnu if dtype == "float8e8m0" else torch.uint8
        assert scale.dtype == expected, (scale.dtype, dtype)
        return scale
    target = torch_dtype_of(dtype)
    if scale.dtype == target:
        return scale
    exact = scale_values(scale)
    cast = exact.to(target)
    if is_any(cast.float() != exact):
        raise RequestError(
            "A scale would be rounded.",
            where="--dtype",
            expected=f"scales that {dtype} holds exactly",
            found=str(scale.dtype).removeprefix("torch."),
        )
    return cast


def _check_range(scale: torch.Tensor) -> None:
    """Raise RequestError for e8m0 scales above 2^15: under row scales nothing moves them into float16's range."""
    exponent = scale.view(torch.uint8)
    if is_any(exponent > 127 + 15):
        raise RequestError(
            "A power-of-two scale is too large for float16: the kernel would saturate it.",
            where="--dtype",
            expected="exponents up to 15 under a scale per row",
            found=int(exponent.max()) - 127,
            remedy="Use --dtype bfloat16, or requantize to another schema.",
        )


def share_scale(coded: Sequence[CodedMatrix], schema: WeightSchema) -> bool:
    """Return True if matrices can share the schema's tensor-level scale: all their scales are equal bit for bit."""
    if not schema.is_coupled:
        return True
    is_first_level = schema.weight_scale_type == "tensor"
    scales = []
    for matrix in coded:
        scale = matrix.scale if is_first_level else matrix.scale_2
        if scale is None or scale.numel() != 1:
            return False
        scales.append(scale_values(scale).view(-1))
    return not any(is_any(scale != scales[0]) for scale in scales[1:])


@dataclass(frozen=True, eq=False)
class Rounded:
    """One matrix with rounded scales, and the error of the rounding, on its device; does not synchronize.

    sums: float64 [3]: the sums of (w - rounded)**2 and of w**2, both in the folding order of `fold_sum`, and the
    largest relative change of a scale.
    """

    coded: CodedMatrix
    sums: torch.Tensor


def round_to_param_dtype(coded: CodedMatrix, param_dtype: str, names: Mapping[str, str]) -> Rounded:
    """Return the same codes with scales in `param_dtype`, to the nearest, ties to even. `names`: part → tensor name.

    A scale changes by half a unit in the last place at most. Raises InputError naming the tensor for a scale that would
    be infinite, or changed and below the smallest normal number. Zero stays zero.
    """
    assert coded.scale_2 is None, "scales under a second scale have 8 bits: they are not rounded"
    assert coded.column_groups is None, "columns grouped by an index have no direct form"
    target = torch_dtype_of(param_dtype)
    exact = scale_values(coded.scale)
    scale = exact.to(target)
    limits = torch.finfo(target)
    change = (scale.double() - exact.double()).abs()
    is_lost = (change > 0) & ((exact.abs() < limits.tiny) | scale.isinf())
    if is_any(is_lost):
        first = tuple(int(i) for i in is_lost.nonzero()[0])
        remedy = "Name another schema: the weights are then quantized anew."
        if param_dtype == "float16":
            remedy = f"Use --dtype bfloat16, whose range is float32's. {remedy}"
        refuse(
            "A scale is out of range: it cannot be rounded to the parameter dtype.",
            names.get("scale") or names.get("weight", ""),
            f"scales from {limits.tiny:.4g} to {limits.max:.4g}, or which {param_dtype} holds exactly",
            f"{exact[first].item():.4g} at {list(first)}",
            remedy,
        )
    relative = torch.where(exact != 0, change / exact.double().abs(), 0.0).max()
    rounded = replace(coded, scale=scale)
    return Rounded(rounded, torch.stack([*_error_and_power(coded, rounded), relative]))


def _error_and_power(coded: CodedMatrix, rounded: CodedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum (w - rounded)**2 and w**2 of a matrix, some rows at a time."""
    errors = []
    powers = []
    pairs = zip(
        torch.split(dequantize(coded), _ROWS), torch.split(dequantize(rounded), _ROWS), strict=True
    )
    for exact, inexact in pairs:
        weights = exact.double()
        errors.append(fold_sum((weights - inexact).square_()))
        powers.append(fold_sum(weights.square_()))
    return fold_sum(torch.cat(errors)), fold_sum(torch.cat(powers))
