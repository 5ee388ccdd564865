"""The kernel check's rounding of activations, against searches among all numbers of a type and torch's own casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hqconv.verification.reference import KNOWN, Rounding, nearest, scale_above
from tests.make.activations import NUMBERS, nearest_by_search, round_by_search

TORCH = {"float8e4m3": torch.float8_e4m3fn, "float8e5m2": torch.float8_e5m2}
SCHEMES = {
    "fp8": Rounding("float8e4m3", "dynamic_token"),
    "fp8-g128": Rounding("float8e4m3", "dynamic_group", 128),
    "fp8-e5m2": Rounding("float8e5m2", "dynamic_token"),
    "int8": Rounding("int8", "dynamic_token"),
    "int4": Rounding("int4", "dynamic_token"),
    "mxfp8": Rounding("float8e4m3", "dynamic_group", 32, "float8e8m0"),
    "mxfp4": Rounding("float4e2m1", "dynamic_group", 32, "float8e8m0"),
    "nvfp4": Rounding("float4e2m1", "dynamic_group_token", 16, "float8e4m3"),
    "nvfp4-static": Rounding("float4e2m1", "static_tensor_dynamic_group", 16, "float8e4m3"),
    "fp8-static": Rounding("float8e4m3", "static_tensor"),
    "int8-static": Rounding("int8", "static_tensor"),
}


def every_decision(dtype: str) -> np.ndarray:
    """All numbers of a type, the middles between neighbours, what lies beside those, and what lies outside."""
    numbers = NUMBERS[dtype]
    middles = (numbers[1:] + numbers[:-1]) / 2
    points = np.concatenate([numbers, middles, [numbers[-1] * 1.01, numbers[0] * 1.01, 1e7, -1e7]])
    points = points.astype(np.float32)
    return np.concatenate(
        [points, np.nextafter(points, np.float32(9e9)), np.nextafter(points, np.float32(-9e9))]
    )


def test_the_types_are_all_tested() -> None:
    assert set(KNOWN) == set(NUMBERS) - {"float8e8m0"}
    assert [
        len(NUMBERS[dtype]) for dtype in ("float8e4m3", "float8e5m2", "float4e2m1", "int4")
    ] == [*(253, 247, 15, 16)]  # both zeros are one number


@pytest.mark.parametrize("dtype", KNOWN)
def test_nearest_is_found_by_search(dtype: str) -> None:
    points = every_decision(dtype)
    found = nearest(torch.from_numpy(points), dtype).numpy()
    assert np.array_equal(found, nearest_by_search(points, dtype))
    assert np.isnan(nearest(torch.tensor([np.nan]), dtype).item())


@pytest.mark.parametrize("dtype", TORCH)
def test_nearest_is_torchs_cast(dtype: str) -> None:
    points = torch.from_numpy(every_decision(dtype))
    inside = points[points.abs() <= NUMBERS[dtype].max()]
    assert torch.equal(nearest(inside, dtype), inside.to(TORCH[dtype]).double())


@pytest.mark.parametrize("dtype", ["float8e4m3", "float8e8m0"])
def test_scales_are_rounded_up(dtype: str) -> None:
    numbers = NUMBERS[dtype][NUMBERS[dtype] > 0].astype(np.float32)
    beside = np.concatenate(
        [np.nextafter(numbers, np.float32(0)), np.nextafter(numbers, np.float32(np.inf))]
    )
    points = np.concatenate([numbers, beside, np.array([1e-30, 3e-5, 1.7], np.float32)])
    points = points[(points >= 1e-30) & np.isfinite(points)]
    wanted = [numbers[min(np.searchsorted(numbers, p), len(numbers) - 1)] for p in points]
    assert scale_above(torch.from_numpy(points), dtype).tolist() == [float(w) for w in wanted]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("columns", [256, 208])
def test_activations_are_those_of_the_search(name: str, columns: int) -> None:
    """Whole tokens: codes, scales and what they stand for, with values of very different sizes and a row of zeros."""
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(24, columns, generator=generator) * torch.logspace(-4, 3, 24)[:, None]
    x[:, ::17] *= 20
    x[3] = 0
    x[4, :130] = 0
    x[5:9] = (
        torch.arange(columns) - 100.5
    ) * 0.37  # ties, but for the way the products are rounded
    static = torch.tensor([0.37]) if scheme.is_static else None
    wanted = round_by_search(x.float().numpy(), scheme, None if static is None else static.item())
    found = scheme(x, static)
    assert found.dtype == torch.float64
    assert np.array_equal(found.numpy(), wanted)
    assert not found[3].any()


def test_clipping_is_counted() -> None:
    x, static = torch.tensor([[1.0, -448.0, 449.0, -500.0]]), torch.tensor([1.0])
    assert SCHEMES["fp8-static"].clipped(x, static) == 0.5
    assert SCHEMES["fp8"].clipped(x, static) == 0.0
    assert SCHEMES["fp8-static"](x, static).tolist() == [[1.0, -448.0, 448.0, -448.0]]


def test_what_a_layer_config_says() -> None:
    words = {
        "a_dtype": "float8e4m3",
        "input_quant_mode": "dynamic_group",
        "input_scale_group_size": 128,
    }
    assert Rounding.of({**words, "as_dtype": "float32"}) == SCHEMES["fp8-g128"]
    assert Rounding.of({"a_dtype": "bfloat16"}) is None
    with pytest.raises(KeyError):
        Rounding.of(words)
