"""Types of weight codes: what their bits stand for, before zero point and scale."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple


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
    def largest(self) -> float:
        """Largest finite number, as Humming's `get_data_type_max_num`: of integers the largest positive signed one."""
        if self.kind in (CodeKind.SYM_INT, CodeKind.ASYM_INT):
            return float(2 ** (self.num_bits - 1) - 1)
        if self.kind == CodeKind.SIGN_MAGNITUDE:
            return float(2**self.mantissa_bits - 1)
        top = 2 ** (self.num_bits - 1) - 1
        if (self.num_bits, self.exponent_bits) in ((8, 4), (8, 3)):
            top -= 1  # the all-ones code is NaN ("fn" formats)
        elif (self.num_bits, self.exponent_bits) == (8, 5):
            top -= 4  # IEEE infinity and NaNs
        fraction, exponent = top & (2**self.mantissa_bits - 1), top >> self.mantissa_bits
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
    return CodeType(CodeKind.FLOAT if exponent else CodeKind.SIGN_MAGNITUDE, bits, exponent, mantissa)
