"""One matrix as codes and scales, its float32 values, and checks of a checkpoint's values.

Legend: N output rows, K input columns, G groups along K. One scale law:
w = ((code - zero) * scale) * scale_2, every product rounded once in float32.

A separate result for each check would wait for the GPU every time. Inside `deferring_checks` a check returns False and
its mask is kept. At the end the caller reads all masks at once; if one is set, it repeats the work without deferring,
and the check raises its own message. Checks that protect the device, such as for an index out of range, are never
deferred.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch

from hqconv.cpu_loops import codes as code_loops
from hqconv.errors import InputError
from hqconv.quantization import bit_codec
from hqconv.schemas.tensors import CodeKind, code_bits, parse_code_type

_LOG = logging.getLogger(__name__)
MANY_LOST = 0.01  # share of weights under scales that underflowed which is worth a warning


@dataclass(frozen=True, eq=False)
class CodedMatrix:
    """One matrix [N, K] in Humming's packing and conventions.

    b_dtype: uintN (offset binary) or a small float such as float4e2m1, float2e0m1 (sign and magnitude).
    packed: int32 [N, K * bits / 32], little-endian along K; codes may straddle words.
    scale: [ceil(N / group_n), ceil(K / group_k)], [1, 1] per tensor; float32, bfloat16, float16, float8_e4m3fn,
    float8_e5m2, float8_e8m0fnu, or uint8 for float8e5m3. A group size of 0 means all rows or columns.
    zero_point: uint8 codes [N, G], or floats [N, G]; None where the code type is symmetric about its midpoint.
    scale_2: float32 [1], or [N] in any float dtype. column_groups: int64 [K], the group of each column.
    """

    b_dtype: str
    packed: torch.Tensor
    scale: torch.Tensor
    group_n: int
    group_k: int
    zero_point: torch.Tensor | None = None
    scale_2: torch.Tensor | None = None
    column_groups: torch.Tensor | None = None

    @property
    def num_bits(self) -> int:
        """Bits of one code."""
        return code_bits(self.b_dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.packed.size(0), self.packed.size(1) * 32 // self.num_bits


def filled(coded: CodedMatrix, shape: tuple[int, int]) -> CodedMatrix:
    """Return codes of another size [N, K]: codes of zero are appended, or codes are cut off.

    New rows and groups repeat the last scale. A code of zero is the zero point; under float zero points, which may
    have none, it is the smallest code.
    """
    assert coded.column_groups is None, "columns grouped by an index have no direct form"
    old_rows, old_columns = coded.shape
    rows, columns = shape
    if (old_rows, old_columns) == shape:
        return coded
    groups = [
        -(-size // group) if group else 1
        for size, group in zip(shape, (coded.group_n, coded.group_k), strict=True)
    ]
    zero = coded.zero_point
    codes = bit_codec.unpack(coded.packed, coded.num_bits)
    new = codes.new_zeros(shape)
    if zero is None and not coded.b_dtype.startswith("float"):
        new.fill_(1 << (coded.num_bits - 1))
    if zero is not None:
        zero = _extended(zero, (rows, groups[1]), repeats=False)
        if not zero.is_floating_point():
            new.copy_(zero.repeat_interleave(coded.group_k or columns, 1)[:, :columns])
    new[:old_rows, :old_columns] = codes[:rows, :columns]
    scale = coded.scale
    scale_2 = coded.scale_2
    return replace(
        coded,
        packed=bit_codec.pack(new, coded.num_bits),
        scale=scale
        if scale.numel() == 1
        else _extended(scale, (groups[0], groups[1]), repeats=True),
        zero_point=zero,
        scale_2=scale_2
        if scale_2 is None or scale_2.numel() == 1
        else _extended(scale_2, (rows,), repeats=True),
    )


def _extended(values: torch.Tensor, sizes: tuple[int, ...], *, repeats: bool) -> torch.Tensor:
    """Cut values along each dimension, or append zeros or the last value."""
    bits = bit_codec.bits_of(values)
    for axis, size in enumerate(sizes):
        num_values = bits.size(axis)
        index = torch.arange(size, device=bits.device).clamp_max(num_values - 1)
        bits = bits.index_select(axis, index)
        if not repeats and size > num_values:
            bits.narrow(axis, num_values, size - num_values).zero_()
    return bits.view(values.dtype)


def group_order(coded: CodedMatrix) -> torch.Tensor | None:
    """Return the order that sorts the columns by group, int64 [K], columns of a group as they were.

    None if `column_groups` is None, or if the groups have other sizes than `group_k`.
    """
    if coded.column_groups is None:
        return None
    order = torch.argsort(coded.column_groups, stable=True)
    implied = torch.arange(len(order), device=order.device) // (coded.group_k or len(order))
    return order if torch.equal(coded.column_groups[order], implied) else None


def with_sorted_columns(coded: CodedMatrix, order: torch.Tensor) -> CodedMatrix:
    """Return the matrix with its columns in the order of `group_order`: every scale and zero point stays."""
    codes = bit_codec.unpack(coded.packed, coded.num_bits).index_select(1, order)
    return replace(coded, packed=bit_codec.pack(codes, coded.num_bits), column_groups=None)


def with_rows(coded: CodedMatrix, order: torch.Tensor) -> CodedMatrix:
    """Return the matrix with its rows in another order, int64 [N], and their scales and zero points with them."""
    assert coded.group_n in (0, 1), "a scale of several rows does not follow them"

    def ordered(values: torch.Tensor) -> torch.Tensor:
        if values.size(0) == 1:  # of all rows
            return values
        return bit_codec.bits_of(values).index_select(0, order).view(values.dtype)

    return replace(
        coded,
        packed=ordered(coded.packed),
        scale=ordered(coded.scale),
        zero_point=None if coded.zero_point is None else ordered(coded.zero_point),
        scale_2=None if coded.scale_2 is None else ordered(coded.scale_2),
    )


@functools.cache
def code_table(b_dtype: str, is_symmetric: bool) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the value of each code before its zero point and scale, float32 [2**bits]."""
    code = parse_code_type(b_dtype)
    codes = torch.arange(2 ** code_bits(b_dtype), dtype=torch.int32)
    half = 2 ** (code.num_bits - 1)
    if code.kind == CodeKind.SYM_INT:
        values = codes.float() - (half if is_symmetric else 0)
    else:
        magnitude = (codes % half).float()
        # as a float32 with exponents that are too small, then moved
        if code.kind == CodeKind.FLOAT:
            factor = 2.0 ** (128 - 2 ** (code.exponent_bits - 1))
            magnitude = ((codes % half) << (23 - code.mantissa_bits)).view(torch.float32) * factor
        values = torch.where(codes < half, magnitude, -magnitude)
    table = values.numpy()
    table.flags.writeable = False
    return table


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Return a stored scale as float32, exactly; uint8 is float8e5m3, and an e8m0 byte of 255 is NaN."""
    if scale.dtype == torch.float8_e8m0fnu:
        exponent = scale.view(torch.uint8).to(torch.int32)
        # 2**-127 is the only subnormal, and 255 the only NaN.
        bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
        return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)
    if scale.dtype == torch.uint8:
        exponent = scale.to(torch.int32) >> 3
        mantissa = scale.to(torch.int32) & 7
        subnormal = mantissa.float() * 2.0**-17
        normal = (((exponent + 112) << 23) | (mantissa << 20)).view(torch.float32)
        values = torch.where(exponent == 0, subnormal, normal)
        return values.masked_fill(scale == 255, float("nan"))
    return scale.float()


@functools.cache
def byte_values(dtype: torch.dtype) -> torch.Tensor:
    """Return the value of each byte as an 8-bit scale, float32 [256] on the CPU."""
    return scale_values(torch.arange(256, dtype=torch.uint8).view(dtype))


def dequantize(
    coded: CodedMatrix, table: np.ndarray[tuple[int], np.dtype[np.float32]] | None = None
) -> torch.Tensor:
    """Decode to float32 [N, K] = ((code - zero) * scale) * scale_2; the same bits on the CPU and on CUDA.

    table: another number for each code, float32 [2**bits]; None for the values of the code type.
    """
    if table is None:
        table = code_table(coded.b_dtype, coded.zero_point is None)
    num_rows, num_columns = coded.shape
    device = coded.packed.device
    group_size = coded.group_k or num_columns
    scale = scale_values(coded.scale)
    if scale.size(0) not in (1, num_rows):
        scale = scale.repeat_interleave(coded.group_n, 0)[:num_rows]
    zero = torch.zeros(1, 1, device=device)
    if coded.zero_point is not None:
        zero = coded.zero_point.float()
    scale_2 = torch.ones(1, device=device)
    if coded.scale_2 is not None:
        scale_2 = coded.scale_2.float()
    if coded.column_groups is not None:
        scale = _of_columns(scale, coded.column_groups)
        zero = _of_columns(zero, coded.column_groups)
        group_size = 1
    if coded.packed.is_cuda:
        codes = bit_codec.unpack(coded.packed, coded.num_bits)
        on_device = torch.from_numpy(table.copy()).to(device)
        values = on_device.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
        columns = torch.arange(num_columns, device=device) // group_size
        values -= _of_columns(zero, columns)
        values *= _of_columns(scale, columns)
        return values.mul_(scale_2.unsqueeze(-1))
    out = np.empty((num_rows, num_columns), np.float32)
    code_loops.dequantize_groups(
        bit_codec.as_bytes(coded.packed).numpy(),
        coded.num_bits,
        table,
        zero.contiguous().numpy(),
        scale.contiguous().numpy(),
        scale_2.contiguous().numpy(),
        group_size,
        out,
    )
    return torch.from_numpy(out)


def _of_columns(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the values of each column's group, or the only ones."""
    return values if values.size(1) == 1 else values[:, columns]


_deferred: ContextVar[list[torch.Tensor] | None] = ContextVar("deferred", default=None)


class DeferredChecks:
    """Masks of the deferred checks."""

    def __init__(self) -> None:
        self.masks: list[torch.Tensor] = []

    def all(self) -> torch.Tensor | None:
        """Return the result of each deferred check: bool [C] on the device; None without any."""
        return torch.stack(self.masks) if self.masks else None


@contextmanager
def deferring_checks() -> Iterator[DeferredChecks]:
    """Defer checks in this thread."""
    checks = DeferredChecks()
    token = _deferred.set(checks.masks)
    try:
        yield checks
    finally:
        _deferred.reset(token)


def is_any(mask: torch.Tensor) -> bool:
    """Return True if an element of a bool tensor is true; inside `deferring_checks` False."""
    deferred = _deferred.get()
    if deferred is None:
        return bool(mask.any())
    deferred.append(mask.any())
    return False


_REMEDY = (
    "Get a good copy of the checkpoint, and check that its quantization config belongs to it. A recipe can leave the "
    'layer as it is: [[override]] with schema = "none".'
)


def refuse(
    what: str, where: str, expected: object, found: object, remedy: str = _REMEDY
) -> NoReturn:
    """Raise InputError about one tensor's values."""
    raise InputError(what, where=where, expected=expected, found=found, remedy=remedy)


def not_finite(name: str) -> InputError:
    """Return the error for a tensor of weights with a NaN or infinity."""
    return InputError(
        "A weight is NaN or infinite.",
        where=f"tensor {name}",
        expected="finite numbers",
        remedy="The checkpoint is damaged or was saved from a diverged training; get a good copy.",
    )


def checked(coded: CodedMatrix, names: Mapping[str, str]) -> CodedMatrix:
    """Return `coded` after checks of its scales, second scales and codes.

    Raises InputError for a NaN or infinite scale, a negative one under a float type, a zero one of a part of the matrix
    under codes that are not zero, a second scale that is negative or not finite, and NaN or infinite fp8 codes.
    """
    scale = scale_values(coded.scale)
    where = names.get("scale") or names.get("weight", "")
    is_infinite = ~scale.isfinite()
    if is_any(is_infinite):
        refuse("A scale is NaN or infinite.", where, "finite scales", _count(is_infinite))
    if not coded.b_dtype.startswith("uint") and is_any(scale < 0):
        refuse(
            "A scale is negative.", where, f"positive scales for {coded.b_dtype}", _count(scale < 0)
        )
    # In a narrow dtype a group's scale may have underflowed; every loader decodes its weights to 0.
    is_narrow = coded.scale.dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    # One scale of 0 for the matrix says that all its weights are 0: an expert that was never used.
    if scale.numel() > 1 and is_any(scale == 0):
        is_refused = not is_narrow or bool((scale == 0).all())
        _check_zero_scales(coded, where, is_refused=is_refused)
    largest = float(code_table(coded.b_dtype, True).max())
    if is_any(scale.abs().max().double() * largest > torch.finfo(torch.float32).max):
        refuse(
            "A scale is too large: weights would be infinite.",
            where,
            "finite weights",
            scale.max().item(),
        )
    if coded.scale_2 is not None:
        second = coded.scale_2.float()
        is_bad = ~(second.isfinite() & (second >= 0))
        if is_any(is_bad):
            at = names.get("scale_2", where)
            refuse(
                "A second scale is not usable.",
                at,
                "a finite number, not below 0",
                second[is_bad][0].item(),
            )
    _check_codes(coded, names)
    return coded


def _count(mask: torch.Tensor) -> str:
    first = tuple(int(i) for i in mask.nonzero()[0])
    return f"{int(mask.sum())} of {mask.numel()}, the first at {list(first)}"


def _check_codes(coded: CodedMatrix, names: Mapping[str, str]) -> None:
    """Refuse fp8 codes that are not a number: e4m3 has one NaN magnitude, e5m2 infinity and three NaNs."""
    mask = {"float8e4m3": 0x7F, "float8e5m2": 0x7C}.get(coded.b_dtype)
    if mask is None:
        return
    is_bad = (bit_codec.as_bytes(coded.packed) & mask) == mask
    if is_any(is_bad):
        refuse(
            "A quantized weight is NaN or infinite.",
            names.get("weight", ""),
            f"finite {coded.b_dtype} codes",
            _count(is_bad),
        )


@functools.cache
def _cells(b_dtype: str, is_symmetric: bool) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the distance of each code's value to the farther neighbouring value, float32 [2**bits]."""
    table = code_table(b_dtype, is_symmetric)
    ordered = np.unique(table)
    gaps = np.diff(ordered)
    wide = np.maximum(np.append(gaps, gaps[-1]), np.insert(gaps, 0, gaps[0]))
    found: np.ndarray[tuple[int], np.dtype[np.float32]] = wide[np.searchsorted(ordered, table)]
    return found.astype(np.float32)


def cell_sizes(coded: CodedMatrix) -> torch.Tensor:
    """Return the distance of each weight's code to the farther neighbouring one, float32 [N, K]."""
    table = _cells(coded.b_dtype, coded.zero_point is None)
    return dequantize(replace(coded, zero_point=None), table).abs_()


def lost_weights(coded: CodedMatrix) -> torch.Tensor:
    """Return where codes are not zero under a scale that is, bool [N, K]. All-zero groups often have such a scale."""
    is_zero = (scale_values(coded.scale) == 0).float()
    return dequantize(replace(coded, scale=is_zero, scale_2=None)) != 0


def _check_zero_scales(coded: CodedMatrix, where: str, *, is_refused: bool) -> None:
    """Refuse scales of zero over nonzero codes, whose weights are lost; else log that there are many."""
    is_lost = lost_weights(coded)
    share = float(is_lost.float().mean())
    if share > MANY_LOST and not is_refused:
        what = "scales are 0 above codes that are not, and every loader takes these weights for 0"
        _LOG.warning("%s: %s (%.1f %% of the matrix).", where, what, 100 * share)
    elif share and is_refused:
        refuse(
            "A scale is zero, but its codes are not.",
            where,
            "a scale that is not zero, or codes that all mean zero",
            _count(is_lost),
        )
