"""What a kernel's activations are rounded to, in arithmetic of its own: a judge, like `reference`. Knows no Humming.

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
    """One way to quantize activations, in Humming's words.

    dtype: one of `KNOWN`. mode: static_tensor, dynamic_token, dynamic_group, static_tensor_dynamic_group or
    dynamic_group_token. group_size: columns that share a scale, where there are groups. scale_dtype: of group scales.
    """

    dtype: str
    mode: str
    group_size: int = 0
    scale_dtype: str = "float32"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rounding | None:
        """What the words of a LayerConfig say; None for 16-bit activations. KeyError where they say too little."""
        mode = config.get("input_quant_mode") or "none"
        if mode == "none":
            return None
        return cls(config["a_dtype"], mode, config.get("input_scale_group_size") or 0, config["as_dtype"])

    @property
    def is_static(self) -> bool:
        """Whether it needs a scale that was measured beforehand."""
        return self.mode in ("static_tensor", "static_tensor_dynamic_group")

    @property
    def largest(self) -> float:
        """What a scale is chosen for: the largest absolute value before scaling."""
        return _FLOATS[self.dtype][2] if self.dtype in _FLOATS else _INTEGERS[self.dtype][1]

    def __call__(self, x: torch.Tensor, static: torch.Tensor | None = None) -> torch.Tensor:
        """Values [T, K] → what the kernel multiplies with, float64 [T, K]. `static`: the static modes' scale, float32.

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
        """Groups [T, G, size] float32 → rounded, float64."""
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
        """The share of values that a static scale of the whole tensor cuts off; 0.0 for other modes."""
        if self.mode != "static_tensor" or not x.numel():
            return 0.0
        return float((x.float().abs() > static * self.largest).double().mean())


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1 / scale, 0.0)


def nearest(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """The nearest numbers of a type, ties to even codes, float64; beyond its range its end. KeyError if unknown."""
    exact = values.double()
    if dtype in _INTEGERS:
        low, high = _INTEGERS[dtype]
        return exact.clamp(low, high).round()
    mantissa, least, largest = _FLOATS[dtype]
    step = _steps(exact, mantissa, least)
    return ((exact / step).round() * step).clamp(-largest, largest)


def _steps(values: torch.Tensor, mantissa: int, least: int) -> torch.Tensor:
    """The distance between neighbours in a float type where the values lie: a power of two."""
    exponent = torch.frexp(values.abs().clamp(2.0**least, 2.0**120)).exponent - 1
    return _power(exponent - mantissa)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Two to whole numbers from -1022 to 1023, exactly, as float64: made of bits."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def scale_above(scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """The least number of a scale's type that is not below, as float32; float32 stays, too large becomes the largest.

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
    """The least number with three bits of mantissa, and float32's exponents, that is not below."""
    exact = scale.double()
    step = _steps(exact, 3, -126)
    return ((exact / step).ceil() * step).float()


def _token_scale(largest: torch.Tensor) -> torch.Tensor:
    """The least power of two by which a token's largest group scale becomes 448 or less."""
    fraction, exponent = torch.frexp(largest.double() / 448)
    exponent = exponent - (fraction == 0.5).int()
    return _power(exponent.clamp(-126, 127)).float()
