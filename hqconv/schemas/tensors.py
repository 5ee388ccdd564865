"""Element types of tensors, types of weight codes, and positions of tensors in files. No tensor is touched here.

The types have safetensors', torch's and Humming's names.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without a position: its name, its safetensors dtype (or a name of another format), its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements; KeyError for a dtype that safetensors does not have."""
        return math.prod(self.shape) * num_bits(self.dtype) // 8


class TensorRef(NamedTuple):
    """A tensor, or a part of one, and its position: `num_bytes` at `offset_bytes` of file number `file` of its owner.

    A tuple, since there may be a million of them: built in a third of a frozen dataclass's time, and not walked by the
    collector of cycles again and again.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset_bytes: int
    num_bytes: int

    def entry(self, index: int) -> TensorRef:
        """Return the position of one entry of the first dimension."""
        size = self.num_bytes // self.shape[0]
        offset = self.offset_bytes + index * size
        return self._replace(shape=self.shape[1:], offset_bytes=offset, num_bytes=size)


class Dtype(NamedTuple):
    """One element type. `torch`: torch's name for its bytes; `humming`: Humming's name of the type."""

    code: str
    num_bits: int
    torch: str = ""
    humming: str = ""


# Codes and widths: `Dtype` and `Dtype::bitsize` in safetensors 0.8 (safetensors/src/tensor.rs).
_TABLE = (
    Dtype("F4", 4, "uint8"),  # two to a byte
    Dtype("F6_E2M3", 6),
    Dtype("F6_E3M2", 6),
    Dtype("BOOL", 8),
    Dtype("U8", 8, "uint8"),
    Dtype("I8", 8, "int8"),
    Dtype("F8_E5M2", 8, "float8_e5m2", "float8e5m2"),
    Dtype("F8_E4M3", 8, "float8_e4m3fn", "float8e4m3"),
    Dtype("F8_E8M0", 8, "float8_e8m0fnu", "float8e8m0"),
    Dtype("F8_E4M3FNUZ", 8),
    Dtype("F8_E5M2FNUZ", 8),
    Dtype("I16", 16, "int16"),
    Dtype("U16", 16),
    Dtype("F16", 16, "float16", "float16"),
    Dtype("BF16", 16, "bfloat16", "bfloat16"),
    Dtype("I32", 32, "int32"),
    Dtype("U32", 32),
    Dtype("F32", 32, "float32", "float32"),
    Dtype("C64", 64),
    Dtype("F64", 64, "float64"),
    Dtype("I64", 64, "int64"),
    Dtype("U64", 64),
)
DTYPES = {dtype.code: dtype for dtype in _TABLE}
FLOATS = ("BF16", "F16", "F32")  # of unquantized experts, scales and biases

# Types of Humming that files hold as plain bytes.
_OF_HUMMING = {dtype.humming: dtype.code for dtype in _TABLE if dtype.humming} | {
    "float8e5m3": "U8"
}
_OF_TORCH = {dtype.torch: dtype.code for dtype in _TABLE if dtype.torch and dtype.code != "F4"}


def num_bits(code: str) -> int:
    """Return the bits of one element of the safetensors dtype `code`; KeyError for a code that does not exist."""
    return DTYPES[code].num_bits


def code_bits(humming_name: str) -> int:
    """Return the bits of one code of Humming's type: 4 for `uint4`, 6 for `float6e3m2`. ValueError for other names."""
    found = re.match(r"(?:u?int|float)([1-9]\d*)(?:e\d+m\d+)?$", humming_name)
    if not found:
        raise ValueError(f"no type of Humming's: {humming_name!r}")
    return int(found[1])


def code_of(humming_name: str) -> str:
    """Return the safetensors dtype of Humming's type in files: `float8e8m0` is F8_E8M0, `float8e5m3` U8."""
    return _OF_HUMMING[humming_name]


def humming_name(code: str) -> str:
    """Return Humming's name of a safetensors dtype; KeyError where it has none."""
    name = DTYPES[code].humming
    if not name:
        raise KeyError(code)
    return name


def torch_dtype(code: str) -> torch.dtype:
    """Return the torch dtype that a tensor of the safetensors dtype `code` is read as; KeyError where there is none."""
    import torch

    name = DTYPES[code].torch
    if not name:
        raise KeyError(code)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def torch_dtype_of(humming_name: str) -> torch.dtype:
    """Return the torch dtype of Humming's type; KeyError where it has none."""
    return torch_dtype(code_of(humming_name))


def is_stored(dtype: torch.dtype) -> bool:
    """Return whether files can hold a torch dtype."""
    return str(dtype).removeprefix("torch.") in _OF_TORCH


def code_of_torch(dtype: torch.dtype) -> str:
    """Return the safetensors dtype of a torch dtype; KeyError where files cannot hold it."""
    return _OF_TORCH[str(dtype).removeprefix("torch.")]


class CodeKind(IntEnum):
    """Kind of codes: small floats, or integers of one of three forms."""

    FLOAT = 0
    SYM_INT = 1  # offset binary, symmetric about the midpoint
    ASYM_INT = 2  # from 0 up, with a zero point
    SIGN_MAGNITUDE = 3


class CodeType(NamedTuple):
    """Type of codes."""

    kind: CodeKind
    num_bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def is_integer(self) -> bool:
        """True for integers; False for small floats, also those without an exponent."""
        return self.kind in (CodeKind.SYM_INT, CodeKind.ASYM_INT)

    @property
    def largest(self) -> float:
        """Largest finite number, as Humming's `get_data_type_max_num`: of integers the largest positive signed one."""
        if self.is_integer:
            return float(2 ** (self.num_bits - 1) - 1)
        if self.kind == CodeKind.SIGN_MAGNITUDE:
            return float(2**self.mantissa_bits - 1)
        top = 2 ** (self.num_bits - 1) - 1
        if (self.num_bits, self.exponent_bits) in ((8, 4), (8, 3)):
            top -= 1  # the all-ones code is NaN ("fn" formats)
        elif (self.num_bits, self.exponent_bits) == (8, 5):
            top -= 4  # IEEE infinity and NaNs
        fraction = top & (2**self.mantissa_bits - 1)
        exponent = top >> self.mantissa_bits
        bias = 2 ** (self.exponent_bits - 1) - 1
        return float((1 + fraction / 2**self.mantissa_bits) * 2.0 ** (exponent - bias))

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest number of a code."""
        if self.kind == CodeKind.ASYM_INT:
            return 0.0, float(2**self.num_bits - 1)
        return (-self.largest - 1 if self.kind == CodeKind.SYM_INT else -self.largest), self.largest


def parse_code_type(name: str, *, has_zero_point: bool = False) -> CodeType:
    """Return the type of Humming's name: `uint4`, `int8`, `float4e2m1`. ValueError for other names."""
    if found := re.fullmatch(r"u?int(\d+)", name):
        return CodeType(CodeKind.ASYM_INT if has_zero_point else CodeKind.SYM_INT, int(found[1]))
    found = re.fullmatch(r"float(\d+)e(\d+)m(\d+)", name)
    if not found:
        raise ValueError(f"no type of codes: {name!r}")
    bits, exponent, mantissa = (int(number) for number in found.groups())
    return CodeType(
        CodeKind.FLOAT if exponent else CodeKind.SIGN_MAGNITUDE, bits, exponent, mantissa
    )
