"""Rounded scales: which value, how far it moved, what is out of range, and the error of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hqconv.errors import InputError
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, deferring_checks, dequantize
from hqconv.quantization.quantized import round_to_param_dtype
from tests.make.coded import cases
from tests.make.effort import num_examples
from tests.make.packing import Draw

DTYPES = ("bfloat16", "float16")
SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-14}
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def nearest(value: np.float32, dtype: str) -> float:
    """The nearest 16-bit number, ties to even, by integers: nothing of torch's."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return float(np.float16(value))
    bits = int(np.frombuffer(np.float32(value).tobytes(), np.uint32)[0])
    sign, size = bits & 0x80000000, bits & 0x7FFFFFFF
    upper, rest = size >> 16, size & 0xFFFF
    upper += rest > 0x8000 or (rest == 0x8000 and upper & 1)
    return float(np.frombuffer(np.uint32(sign | upper << 16).tobytes(), np.float32)[0])


def with_scale(values: list[float]) -> CodedMatrix:
    """int8 codes, a scale a row; one row more, whose scale is 1, so that not all are zero."""
    scale = torch.tensor([*values, 1.0], dtype=torch.float32).reshape(-1, 1)
    codes = Draw(1).integers(0, 256, len(scale), 32).to(torch.uint8)
    return CodedMatrix("uint8", bit_codec.pack(codes, 8), scale, 1, 0)


def edges() -> Iterator[float]:
    """Where rounding changes its mind: about the limits of both dtypes, and halfway between two numbers."""
    for exact in (
        2.0**-24,
        2.0**-14,
        65504.0,
        65520.0,
        2.0**-126,
        2.0**-133,
        3.3895313892515355e38,
    ):
        yield from (
            float(np.nextafter(np.float32(exact), np.float32(to))) for to in (0, np.inf, exact)
        )
    for digits in (7, 10):
        for last in (0, 1):
            middle = 1 + (last + 0.5) * 2.0**-digits
            yield from (
                float(np.nextafter(np.float32(middle), np.float32(to))) for to in (0, 2, middle)
            )


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(list(edges()))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=num_examples(400), deadline=None)
@given(value=FLOATS)
def test_every_scale_is_the_nearest_or_refused(dtype: str, value: float) -> None:
    coded, exact = with_scale([value]), np.float32(value)
    expected = nearest(exact, dtype)
    is_lost = expected != exact and (abs(float(exact)) < SMALLEST[dtype] or np.isinf(expected))
    if is_lost:
        with pytest.raises(InputError, match="A scale is out of range") as caught:
            round_to_param_dtype(coded, dtype, {"scale": "e.scale", "weight": "e.weight"})
        assert caught.value.where == "e.scale"
        assert "at [0, 0]" in caught.value.found
        with deferring_checks() as doubts:
            round_to_param_dtype(coded, dtype, {})
        assert [bool(doubt) for doubt in doubts.masks] == [True]
        return
    rounded = round_to_param_dtype(coded, dtype, {})
    assert rounded.coded.scale.dtype == getattr(torch, dtype)
    assert rounded.coded.scale.float().flatten().tolist() == [expected, 1.0]
    change = abs(expected - float(exact)) / abs(float(exact)) if value else 0.0
    assert rounded.sums[2].item() == change <= HALF_ULP[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(2.0**-13, 60000.0, width=32), min_size=1, max_size=40))
def test_the_largest_change_is_that_of_all_rows(dtype: str, values: list[float]) -> None:
    rounded = round_to_param_dtype(with_scale(values), dtype, {})
    changes = [abs(nearest(np.float32(v), dtype) - v) / v for v in values]
    assert rounded.sums[2].item() == max(changes)


def roundable() -> list[str]:
    """Matrices of `tests.make.coded` whose scales may be rounded."""
    names = []
    for case in cases():
        fmt = case.completed().format
        is_wide = fmt.scale_dtype in ("float32", "bfloat16", "float16")
        if is_wide and fmt.scale_2 == "none" and not fmt.is_permuted and not fmt.is_float:
            names.append(case.name)
    return names


@pytest.mark.parametrize("name", roundable())
def test_the_error_is_that_of_the_decoded_weights(name: str) -> None:
    coded = next(case for case in cases() if case.name == name).coded()
    wide = replace(coded, scale=coded.scale.float() * (1 + 2.0**-9 + 2.0**-13))
    rounded = round_to_param_dtype(wide, "bfloat16", {})
    assert torch.equal(rounded.coded.scale, wide.scale.to(torch.bfloat16))
    weights = dequantize(wide).double()
    scale = wide.scale.to(torch.bfloat16).double() / wide.scale.double()
    assert rounded.sums[1].item() == pytest.approx(float(weights.square().sum()), rel=1e-12)
    if coded.group_n == 1 and scale.size(1) == 1:
        expected = float((weights * (1 - scale)).square().sum())
        assert rounded.sums[0].item() == pytest.approx(expected, rel=1e-3)
    assert 0 < rounded.sums[0].item() <= rounded.sums[1].item() * 2.0**-16 * 1.001


def test_the_same_codes_with_scales_of_zero() -> None:
    coded = with_scale([0.0])
    rounded = round_to_param_dtype(coded, "float16", {})
    assert rounded.coded.scale[0].item() == 0
    assert rounded.coded.packed is coded.packed
    assert rounded.sums[2].item() == 0
