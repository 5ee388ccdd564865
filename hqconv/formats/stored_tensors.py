"""What each source format stores for one projection: parts, their names, dtypes and shapes.

Legend: N output rows, K input columns, G groups along K, b bits of a code. One function a decoder, in `NEEDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hqconv.errors import InputError
from hqconv.formats.source_format import SourceFormat
from hqconv.schemas.dtypes import FLOATS
from hqconv.schemas.tensors import TensorSpec

Shapes = tuple[tuple[int, ...], ...]

SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale", "scale_inv", "scales")
BITSANDBYTES_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
ONE: Shapes = ((), (1,), (1, 1))
# Safetensors dtypes that a scale may be stored in, by Humming's name of its type, where they are not floats.
SCALE_CODES = {
    "float8e8m0": ("U8", "F8_E8M0"),
    "float8e5m3": ("U8",),
    "float8e4m3": ("F8_E4M3",),
    "float8e5m2": ("F8_E5M2",),
}
_E8M0 = SCALE_CODES["float8e8m0"]


@dataclass(frozen=True)
class StoredTensor:
    """A part that a format stores: canonical name, raw names it may have, dtypes and shapes (None: any)."""

    canonical: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: Shapes | None
    is_required: bool = True


def bias_need(n: int) -> StoredTensor:
    """A bias, which every format may have."""
    return StoredTensor("bias", ("bias",), FLOATS, ((n,), (n, 1)), is_required=False)


def grid_shapes(n: int, k: int, group_n: int, group_k: int) -> Shapes:
    """The shapes that a scale per `group_n` x `group_k` weights may have; 0 means all, ragged ends count."""
    rows = math.ceil(n / group_n) if group_n else 1
    columns = math.ceil(k / group_k) if group_k else 1
    if rows * columns == 1:
        return ONE
    return ((rows, columns), (rows,)) if columns == 1 else ((rows, columns),)


def require_multiples(parts: Mapping[str, TensorSpec], sizes: Iterable[tuple[str, int, int]]) -> None:
    """Raise InputError unless every (what, size, divisor) divides."""
    for what, size, divisor in sizes:
        if size % divisor:
            raise InputError(
                f"The matrix has a number of {what} that the format cannot pack.",
                where=next(iter(parts.values())).name if parts else "",
                expected=f"a multiple of {divisor}",
                found=size,
            )


def integer_bits(fmt: SourceFormat) -> int:
    """Bits of a code of an integer format."""
    digits = fmt.b_dtype.removeprefix("uint")
    if not (digits.isdigit() and 1 <= int(digits) <= 8):
        raise InputError(
            "The config names no usable code type.", expected="uint1 … uint8", found=fmt.b_dtype or "nothing"
        )
    return int(digits)


def _float(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    return [StoredTensor("weight", ("weight",), FLOATS, ((n, k),)), bias_need(n)]


def _fp8(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    require_multiples(parts, [("columns", k, 4)])
    scales = grid_shapes(n, k, fmt.group_n, fmt.group_k)
    return [
        StoredTensor("weight", ("weight",), ("F8_E4M3", "F8_E5M2"), ((n, k),)),
        StoredTensor("scale", SCALE_NAMES[:4], (*FLOATS, *_E8M0), scales),
        bias_need(n),
    ]


def _mxfp4(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    require_multiples(parts, [("columns", k, 32)])
    shapes: Shapes = ((n, k // 2), (n, k // 32, 16))
    if any(part.dtype == "F4" for part in parts.values()):
        shapes = (*shapes, (n, k))  # elements, not bytes
    return [
        StoredTensor("weight", ("weight", "weight_packed", "blocks"), ("U8", "I8", "F4"), shapes),
        StoredTensor("scale", SCALE_NAMES, _E8M0, ((n, k // 32),)),
        bias_need(n),
    ]


def _mxfp8(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    require_multiples(parts, [("columns", k, 32)])
    return [
        StoredTensor("weight", ("weight", "weight_packed"), ("F8_E4M3", "U8"), ((n, k),)),
        StoredTensor("scale", SCALE_NAMES, _E8M0, ((n, k // 32),)),
        bias_need(n),
    ]


def _nvfp4(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    require_multiples(parts, [("columns", k, 16)])
    return [
        StoredTensor("weight", ("weight", "weight_packed"), ("U8",), ((n, k // 2),)),
        StoredTensor("scale", ("weight_scale",), ("F8_E4M3", "U8"), ((n, k // 16),)),
        StoredTensor("scale_2", ("weight_scale_2", "weight_global_scale"), ("F32",), ONE),
        bias_need(n),
    ]


def packed_width(size: int, bits: int, is_padded: bool) -> int:
    """int32 words for `size` codes: straddling words, or 32 // bits to a word."""
    return math.ceil(size / (32 // bits)) if is_padded else math.ceil(size * bits / 32)


def _packed_int(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    bits = integer_bits(fmt)
    require_multiples(parts, [("columns", k, math.lcm(8, 32 // math.gcd(bits, 32)))])
    widths = {packed_width(k, bits, is_padded) for is_padded in (False, True)}
    weight = parts.get("weight_packed")
    is_padded = weight is not None and weight.shape != (n, packed_width(k, bits, False))
    needs = [
        StoredTensor("weight", ("weight_packed",), ("I32",), tuple((n, width) for width in sorted(widths))),
        StoredTensor("scale", ("weight_scale",), FLOATS, grid_shapes(n, k, fmt.group_n, fmt.group_k)),
        StoredTensor("g_idx", ("weight_g_idx",), ("I32", "I64"), ((k,),), is_required=fmt.is_permuted),
        bias_need(n),
    ]
    if fmt.has_zero_point:
        groups = math.ceil(k / fmt.group_k) if fmt.group_k else 1
        shape = (packed_width(n, bits, is_padded), groups)
        needs.append(StoredTensor("zero_point", ("weight_zero_point",), ("I32",), (shape,)))
    return needs


def _int8(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    require_multiples(parts, [("columns", k, 4)])
    scales = grid_shapes(n, k, fmt.group_n, fmt.group_k)
    needs = [
        StoredTensor("weight", ("weight",), ("I8",), ((n, k),)),
        StoredTensor("scale", ("weight_scale",), FLOATS, scales),
        bias_need(n),
    ]
    if fmt.has_zero_point:
        needs.append(StoredTensor("zero_point", ("weight_zero_point",), ("I8",), scales))
    if fmt.option("has_offset", False):
        needs.append(StoredTensor("offset", ("weight_offset",), FLOATS, scales))
    return needs


def _gptq(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    bits = integer_bits(fmt)
    if bits not in (2, 3, 4, 8):  # GPTQModel spreads 5, 6 and 7 bits over bit planes
        raise InputError(
            "GPTQ codes of this size cannot be read.", expected="2, 3, 4 or 8 bits", found=f"{bits} bits"
        )
    divisor = 32 // math.gcd(bits, 32)
    require_multiples(parts, [("columns", k, divisor), ("rows", n, divisor)])
    groups = math.ceil(k / fmt.group_k) if fmt.group_k else 1
    zeros = ((groups, n * bits // 32),)
    return [
        StoredTensor("weight", ("qweight",), ("I32",), ((k * bits // 32, n),)),
        StoredTensor("zero_point", ("qzeros",), ("I32",), zeros, is_required=fmt.has_zero_point),
        StoredTensor("scale", ("scales",), FLOATS, ((groups, n),)),
        StoredTensor(
            "g_idx", ("g_idx",), ("I32", "I64"), ((k,),), is_required=bool(fmt.option("desc_act", False))
        ),
        bias_need(n),
    ]


def _awq(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    bits = integer_bits(fmt)
    if bits != 4:
        raise InputError("AWQ weights of this size are not known.", expected="4 bits", found=f"{bits} bits")
    require_multiples(parts, [("columns", k, 8), ("rows", n, 8)])
    groups = math.ceil(k / fmt.group_k) if fmt.group_k else 1
    zeros = ((groups, n // 8),)
    return [
        StoredTensor("weight", ("qweight",), ("I32",), ((k, n // 8),)),
        StoredTensor("zero_point", ("qzeros",), ("I32",), zeros, is_required=fmt.has_zero_point),
        StoredTensor("scale", ("scales",), FLOATS, ((groups, n),)),
        bias_need(n),
    ]


def _bitnet(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    require_multiples(parts, [("columns", k, 16), ("rows", n, 4)])
    return [
        StoredTensor("weight", ("weight",), ("U8",), ((n // 4, k),)),
        StoredTensor("scale", ("weight_scale",), FLOATS, ONE),
        bias_need(n),
    ]


def _bitsandbytes(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    size = math.ceil(n * k / 2)
    nested = "weight.nested_absmax" in parts or "weight.nested_quant_map" in parts
    needs = [
        StoredTensor("weight", ("weight",), ("U8",), ((size, 1), (1, size), (size,))),
        StoredTensor("absmax", ("weight.absmax",), ("U8",) if nested else ("F32",), None),
        StoredTensor("quant_map", ("weight.quant_map",), ("F32",), ((16,),)),
        StoredTensor("quant_state", BITSANDBYTES_STATES, ("U8",), None),
        bias_need(n),
    ]
    if nested:
        needs.append(StoredTensor("nested_absmax", ("weight.nested_absmax",), ("F32",), None))
        needs.append(StoredTensor("nested_quant_map", ("weight.nested_quant_map",), ("F32",), ((256,),)))
    return needs


NEEDS: dict[str, Callable[[SourceFormat, Mapping[str, TensorSpec], int, int], list[StoredTensor]]] = {
    "float": _float,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
    "packed_int": _packed_int,
    "int8": _int8,
    "gptq": _gptq,
    "awq": _awq,
    "bitnet": _bitnet,
    "bnb4": _bitsandbytes,
}
