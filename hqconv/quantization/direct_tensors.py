"""Expression of a coded matrix in a target schema: codes kept, scales repeated and widened exactly.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hqconv.errors import RequestError
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, scale_values
from hqconv.quantization.deferred_checks import is_any
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema


def express(coded: CodedMatrix, schema: WeightSchema, param_dtype: str) -> dict[str, torch.Tensor]:
    """Return Humming's packed tensors of one matrix, if `hqconv.formats.source_format.why_not_direct` returns "".

    `weight` int32 [N, K * bits / 32]; `weight_scale` [N, G], [N, 1], [N / bn, K / bk] or [1]; `zero_point` int32
    [N * bits / 32, G], or floats [N, G] of `param_dtype`; `weight_scale_2` float32 [1] or [N] of `param_dtype`: as
    `get_tensors_attrs` gives them.
    Raises RequestError where the schema's groups do not divide N or K, a dtype would lose digits, or float16 the range.
    """
    assert coded.column_groups is None, "columns grouped by an index have no direct form"
    num_rows, num_columns = coded.shape
    group = schema.scale_group()
    rows, columns = (size or whole for size, whole in zip(group, coded.shape, strict=True))
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
        is_float = zeros.dtype != torch.uint8
        tensors["zero_point"] = (
            _cast(zeros, param_dtype) if is_float else bit_codec.pack_along_rows(zeros, coded.num_bits)
        )
    if coded.scale_2 is not None:
        dtype = "float32" if schema.weight_scale_2_type == "tensor" else param_dtype
        tensors["weight_scale_2"] = _cast(coded.scale_2, dtype)
    return tensors


def _spread(values: torch.Tensor, coded: CodedMatrix, rows: int, columns: int) -> torch.Tensor:
    """Repeat values [source rows, source groups] so that each serves `rows` x `columns` weights."""
    num_rows, num_columns = coded.shape
    bits = values.view(torch.uint8) if values.element_size() == 1 else values
    for dim, (size, have, want) in enumerate(((num_rows, coded.group_n, rows), (num_columns, coded.group_k, columns))):
        count = size // want
        if bits.size(dim) == count:
            continue
        index = torch.arange(count, device=bits.device) * want // (have or size)
        bits = bits.index_select(dim, index)
    return bits.contiguous().view(values.dtype)


def _cast(scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Cast `scale`, or a float zero point, to a dtype that holds it; RequestError if the dtype loses digits."""
    if dtype in ("float8e8m0", "float8e5m3"):
        wanted = torch.float8_e8m0fnu if dtype == "float8e8m0" else torch.uint8
        assert scale.dtype == wanted, (scale.dtype, dtype)
        return scale
    target = torch_dtype_of(dtype)
    if scale.dtype == target:
        return scale
    exact = scale_values(scale)
    kept = exact.to(target)
    if is_any(kept.float() != exact):
        raise RequestError(
            "A scale would be rounded.",
            where="--dtype",
            expected=f"scales that {dtype} holds exactly",
            found=str(scale.dtype).removeprefix("torch."),
        )
    return kept


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
    scales = []
    for one in coded:
        if schema.weight_scale_type == "tensor":
            scales.append(scale_values(one.scale))
        elif one.scale_2 is not None:
            scales.append(one.scale_2.float())
    if len(scales) < len(coded) or any(scale.numel() != 1 for scale in scales):
        return False
    return not any(is_any(scale.view(-1) != scales[0].view(-1)) for scale in scales[1:])
