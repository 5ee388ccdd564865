"""Checks of a checkpoint's values: of scales and codes, at once or, on a GPU, deferred and read together.

A separate result for each check would wait for the GPU every time. Inside `deferring_checks` a check returns False and
its mask is kept. At the end the caller reads all masks at once; if one is set, it repeats the work without deferring,
and the check raises its own message. Checks that protect the device, such as for an index out of range, are never
deferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import NoReturn

import torch

from hqconv.errors import InputError
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, code_table, dequantize, scale_values

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
    if scale.numel() > 1 and is_any(scale == 0) and (not is_narrow or bool((scale == 0).all())):
        _check_zero_scales(coded, scale == 0, where)
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


def _check_zero_scales(coded: CodedMatrix, is_zero: torch.Tensor, where: str) -> None:
    """Refuse a zero scale over nonzero codes, whose weights are lost. All-zero groups often have a zero scale."""
    is_lost = dequantize(replace(coded, scale=is_zero.float(), scale_2=None)) != 0
    if bool(is_lost.any()):
        refuse(
            "A scale is zero, but its codes are not.",
            where,
            "a scale that is not zero, or codes that all mean zero",
            _count(is_lost),
        )
