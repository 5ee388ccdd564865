"""Rounding of a kernel's activations in independent arithmetic: a reference, like `reference`. Knows no Humming.

Legend: T tokens, K columns. Steps that decide a rounding are float32 operations, each rounded once, as a GPU does them
without fast math; a number's nearest code is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_TINY = 1e-30  # the least scale before it is rounded
# Floats: bits of the mantissa, the exponent of the smallest normal number, the largest number.
_FLOATS = {"float8e4m3": (3, -6, 448.0), "float8e5m2": (2, -14, 57344.0), "float4e2m1": (1, 0, 6.0)}
_SCALES = {"float8e4m3": (3, -6, 448.0)}
_INTEGERS = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0)}
KNOWN = (*_FLOATS, *_INTEGERS)


@dataclass(frozen=True)
class Rounding:
    """One way to quantize activations, with Humming's field names.

    dtype: one of `KNOWN`. mode: static_tensor, dynamic_token, dynamic_group, static_tensor_dynamic_group or
    dynamic_group_token. group_size: columns that share a scale, if there are groups. scale_dtype: of group scales.
    """

    dtype: str
    mode: str
    group_size: int = 0
    scale_dtype: str = "float32"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rounding | None:
        """Read the fields of a LayerConfig; None for 16-bit activations. KeyError if a field is missing."""
        mode = config.get("input_quant_mode") or "none"
        if mode == "none":
            return None
        return cls(config["a_dtype"], mode, config.get("input_scale_group_size") or 0, config["as_dtype"])

    @property
    def is_static(self) -> bool:
        """True if the mode needs a static scale, which was measured beforehand."""
        return self.mode in ("static_tensor", "static_tensor_dynamic_group")

    @property
    def largest(self) -> float:
        """Largest absolute value of the codes: a scale maps the largest input to it."""
        return _FLOATS[self.dtype][2] if self.dtype in _FLOATS else _INTEGERS[self.dtype][1]

    def __call__(self, x: torch.Tensor, static: torch.Tensor | None = None) -> torch.Tensor:
        """Round values [T, K] to the kernel's operands, float64 [T, K]. `static`: the static modes' scale, float32.

        KeyError for a dtype that is not known.
        """
        values = x.float()
        if self.mode == "static_tensor":
            assert static is not None
            return nearest(values * (1 / static), self.dtype) * static.double()
        size = self.group_size or values.size(1)
        padding = -values.size(1) % size
        groups = torch.nn.functional.pad(values, (0, padding)).view(len(values), -1, size)
        rounded = self._groups(groups, static).flatten(1)
        return rounded[:, : values.size(1)]

    def _groups(self, groups: torch.Tensor, static: torch.Tensor | None) -> torch.Tensor:
        """Round groups [T, G, size] float32; returns float64."""
        raw = (groups.abs().amax(-1, keepdim=True) / self.largest).clamp_min(_TINY)
        if self.mode == "static_tensor_dynamic_group":
            assert static is not None
            scale = scale_above(raw / static, self.scale_dtype)
            used = scale * static
            return nearest(groups * _inverse(used), self.dtype) * scale.double() * static.double()
        if self.mode == "dynamic_group_token":
            scale = _three_bits_above(raw)
            token = _token_scale(scale.amax(1, keepdim=True))
            stored = scale_above(scale / token, self.scale_dtype)
            return nearest(groups * _inverse(scale), self.dtype) * stored.double() * token.double()
        scale = scale_above(raw, self.scale_dtype)
        return nearest(groups * _inverse(scale), self.dtype) * scale.double()

    def clipped(self, x: torch.Tensor, static: torch.Tensor) -> float:
        """Fraction of values that a static scale of the whole tensor clips; 0.0 for other modes."""
        if self.mode != "static_tensor" or not x.numel():
            return 0.0
        return float((x.float().abs() > static * self.largest).double().mean())


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1 / scale, 0.0)


def nearest(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round to a type's nearest numbers, ties to even codes; float64, clipped to its range. KeyError if unknown."""
    exact = values.double()
    if dtype in _INTEGERS:
        low, high = _INTEGERS[dtype]
        return exact.clamp(low, high).round()
    mantissa, least, largest = _FLOATS[dtype]
    step = _steps(exact, mantissa, least)
    return ((exact / step).round() * step).clamp(-largest, largest)


def _steps(values: torch.Tensor, mantissa: int, least: int) -> torch.Tensor:
    """Distance between neighbours of a float type at the values: a power of two."""
    exponent = torch.frexp(values.abs().clamp(2.0**least, 2.0**120)).exponent - 1
    return _power(exponent - mantissa)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Powers of two with integer exponents from -1022 to 1023, exact, as float64 from bit patterns."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def scale_above(scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round up to a number of a scale's type, as float32; float32 stays, too large values become the largest.

    `scale` is positive. KeyError for another type.
    """
    if dtype == "float32":
        return scale
    exact = scale.double()
    if dtype == "float8e8m0":
        fraction, exponent = torch.frexp(exact)
        exponent = exponent - (fraction == 0.5).int()
        return _power(exponent.clamp(-127, 127)).float()
    mantissa, least, largest = _SCALES[dtype]
    step = _steps(exact, mantissa, least)
    return ((exact / step).ceil() * step).clamp_max(largest).float()


def _three_bits_above(scale: torch.Tensor) -> torch.Tensor:
    """Round up to a number with three bits of mantissa and float32's exponents."""
    exact = scale.double()
    step = _steps(exact, 3, -126)
    return ((exact / step).ceil() * step).float()


def _token_scale(largest: torch.Tensor) -> torch.Tensor:
    """Least power of two that scales a token's largest group scale to 448 or less."""
    fraction, exponent = torch.frexp(largest.double() / 448)
    exponent = exponent - (fraction == 0.5).int()
    return _power(exponent.clamp(-126, 127)).float()
