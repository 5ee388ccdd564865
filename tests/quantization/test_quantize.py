"""The CPU quantizer against Humming's own schema code, and against brute force in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.make.quant_weight  # noqa: F401 - lets Humming quantize on the CPU
from hqconv.humming_ops.runtime import humming, humming_schema, resident
from hqconv.quantization.quantized import fold_sum
from hqconv.schemas.tensors import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from tests.make.matrices import (
    SCHEMAS,
    SOURCES,
    drawn_matrices,
    hard_matrix,
    unpack_codes,
    values_of_codes,
)
from tests.make.quantized import Quantized, quantize
from tests.make.tensors import assert_same

CPU = torch.device("cpu")
PLAIN = [s for s in SCHEMAS if not resolve_schema(s).is_coupled]
few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --- an independent decoder --------------------------------------------------------------------------------


def spread_over(small: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Group, channel, block or tensor values repeated to the matrix's shape."""
    small = small.reshape(1, 1) if small.ndim == 1 and small.size == 1 else small
    small = small[:, None] if small.ndim == 1 else small
    return small.repeat(shape[0] // small.shape[0], 0).repeat(shape[1] // small.shape[1], 1)


def decode(tensors: dict[str, torch.Tensor], schema: WeightSchema) -> np.ndarray:
    """float32 (code - zero) * scale * scale_2, computed without Humming and without hqconv."""
    codes = unpack_codes(tensors["weight"], schema.num_bits)
    scale = tensors["weight_scale"].float().numpy()
    scale_2 = (
        tensors["weight_scale_2"].numpy() if "weight_scale_2" in tensors else np.ones(1, np.float32)
    )
    zero: Any = 0.0
    if schema.is_integer:
        values = codes.astype(np.float32)
        zero = np.full((1, 1), 2.0 ** (schema.num_bits - 1), np.float32)
        if schema.is_fp_zero_point:
            zero = tensors["zero_point"].float().numpy()
        elif schema.has_zero_point:
            zero = unpack_codes(tensors["zero_point"].t().contiguous(), schema.num_bits).T.astype(
                np.float32
            )
        values = values - spread_over(zero, codes.shape)
    else:
        values = values_of_codes(schema)[codes].astype(np.float32)
    with np.errstate(all="ignore"):
        return (
            values
            * spread_over(scale, codes.shape)
            * spread_over(scale_2.astype(np.float32), codes.shape)
        )


def humming_quant_tensor(
    matrix: torch.Tensor, schema: WeightSchema, param_dtype: str
) -> dict[str, torch.Tensor]:
    """Humming's own schema code, which runs over our CPU twins of its six ops."""
    target = humming_schema(schema)
    with resident(CPU):
        return dict(target.quant_tensor(matrix, target, torch_dtype_of(param_dtype)))


def check_sums(matrix: torch.Tensor, result: Quantized, schema: WeightSchema) -> None:
    """The error against ours, in float64: exact sums, and once more in the GPU's own folding order."""
    values, decoded = matrix.double().numpy(), decode(result.tensors, schema).astype(np.float64)
    for found, terms in (
        (result.error_sums.error, values - decoded),
        (result.error_sums.power, values),
    ):
        squares = (terms * terms).ravel()
        if np.isfinite(squares).all():
            assert found == pytest.approx(math.fsum(squares), rel=1e-12)
        folded = fold_sum(fold_sum(torch.from_numpy(terms * terms))).item()
        assert found == folded or (math.isnan(found) and math.isnan(folded))


# --- schemas that Humming decides --------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PLAIN)
@few
@given(given_matrices=drawn_matrices(), param_dtype=st.sampled_from(["bfloat16", "float16"]))
def test_quantize_is_hummings_quant_tensor(
    name: str, given_matrices: list[torch.Tensor], param_dtype: str
) -> None:
    schema = resolve_schema(name)
    [matrix] = given_matrices
    [result] = quantize([matrix], schema, param_dtype)
    theirs = humming_quant_tensor(matrix, schema, param_dtype)
    assert result.error_sums.is_finite
    assert result.tensors.keys() == theirs.keys()
    for key, value in theirs.items():
        assert_same(result.tensors[key], value, key)
    check_sums(matrix, result, schema)


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("name", SCHEMAS)
def test_hard_rows(name: str, source: torch.dtype) -> None:
    schema = resolve_schema(name)
    matrix = hard_matrix(128, 384, source, 3)
    [result] = quantize([matrix], schema, "bfloat16")
    check_sums(matrix, result, schema)
    if not schema.is_coupled:
        for key, value in humming_quant_tensor(matrix, schema, "bfloat16").items():
            assert_same(result.tensors[key], value, key)


@pytest.mark.parametrize("name", PLAIN)
def test_a_partner_changes_nothing_where_no_scale_is_shared(name: str) -> None:
    schema = resolve_schema(name)
    matrix = hard_matrix(128, 256, torch.bfloat16, 1)
    partner = hard_matrix(128, 256, torch.bfloat16, 2) * 50
    [alone] = quantize([matrix], schema, "bfloat16")
    for pair, index in (([matrix, partner], 0), ([partner, matrix], 1)):
        result = quantize(pair, schema, "bfloat16")[index]
        assert repr(result.error_sums) == repr(alone.error_sums)  # NaN too
        for key, value in alone.tensors.items():
            assert_same(result.tensors[key], value, key)


# --- schemas with a shared scale: see also `test_two_level_scales` -------------------------------------------


@few
@given(
    pair=drawn_matrices(count=2, shape=(32, 128)),
    param_dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_fp8_tensor_is_the_contracts_recipe(pair: list[torch.Tensor], param_dtype: str) -> None:
    """One scale for gate and up; each code is the nearest to the float32 quotient, but below the least normal number.

    There Humming has the quotient as a float32 subnormal, with 2**-23 of that number as its resolution.
    """
    values = values_of_codes(resolve_schema("fp8-tensor"))
    scale = np.float32(max(1e-30, *(m.abs().max().item() for m in pair)) / np.float32(448))
    for matrix, result in zip(
        pair, quantize(pair, resolve_schema("fp8-tensor"), param_dtype), strict=True
    ):
        assert result.tensors["weight_scale"].tolist() == [scale]
        x = np.clip(
            (matrix.float().numpy() * (np.float32(1) / scale)).astype(np.float64), -448, 448
        )
        x = np.where(np.abs(x) < 2.0**-6, np.round(x * 2.0**29) / 2.0**29, x)
        distance = np.abs(values[unpack_codes(result.tensors["weight"], 8)] - x)
        ladder = np.unique(values)
        place = np.clip(np.searchsorted(ladder, x), 1, len(ladder) - 1)
        np.testing.assert_array_equal(
            distance, np.minimum(np.abs(ladder[place] - x), np.abs(ladder[place - 1] - x))
        )
        check_sums(matrix, result, resolve_schema("fp8-tensor"))


# --- every schema ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_number_that_is_none_is_noticed(name: str, source: torch.dtype, value: float) -> None:
    good, bad = (torch.full((128, 128), 0.5, dtype=source) for _ in range(2))
    bad[127, 127] = value
    results = quantize([good, bad], resolve_schema(name), "bfloat16")
    assert [r.error_sums.is_finite for r in results] == [True, False]


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("name", SCHEMAS)
def test_zeros_stay_zeros(name: str, zero: float) -> None:
    schema = resolve_schema(name)
    for result in quantize(
        [torch.full((128, 128), zero, dtype=torch.bfloat16)] * 2, schema, "bfloat16"
    ):
        assert result.error_sums.is_finite
        assert result.error_sums.power == 0
        assert np.abs(decode(result.tensors, schema)).max() <= 1e-30
        assert result.error_sums.error <= 128 * 128 * 1e-60


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_decoder_of_this_file_is_hummings(name: str) -> None:
    """Two decoders that were written apart: a mistake in the oracle would show here."""
    schema = resolve_schema(name)
    [result] = quantize([hard_matrix(128, 256, torch.bfloat16, 4)], schema, "bfloat16")
    target = humming_schema(schema)
    with resident(CPU):
        theirs = target.dequant_tensors(dict(result.tensors))
    np.testing.assert_array_equal(decode(result.tensors, schema), theirs.numpy())
    assert humming().schema.HummingWeightSchema is type(target)
