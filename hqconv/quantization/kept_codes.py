"""Codes of the source that are kept: expressed in a target schema, with scales widened exactly or rounded.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hqconv.errors import RequestError
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, dequantize, scale_values
from hqconv.quantization.quantized import fold_sum
from hqconv.quantization.value_checks import is_any, refuse
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

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
    rows, columns = group_n or num_rows, group_k or num_columns
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
    source_groups, groups = (coded.group_n, coded.group_k), (rows, columns)
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
    errors, powers = [], []
    pairs = zip(
        torch.split(dequantize(coded), _ROWS), torch.split(dequantize(rounded), _ROWS), strict=True
    )
    for exact, inexact in pairs:
        weights = exact.double()
        errors.append(fold_sum((weights - inexact).square_()))
        powers.append(fold_sum(weights.square_()))
    return fold_sum(torch.cat(errors)), fold_sum(torch.cat(powers))
