"""Every recipe in configs/ loads, means what it says, and can be quantized and laid out for a kernel."""

from __future__ import annotations

import pytest
import torch

from hqconv.kernel_layout.transform import kernel_form
from hqconv.quantization.quantize import quantize
from hqconv.schemas.weight_schema import WeightSchema, load_schema, resolve_schema
from tests.make.conversions import kernel_spec_of
from tests.make.places import CONFIGS

EXPECTED = {
    "int4-g64-zp": WeightSchema("int4-g64-zp", "uint4", weight_scale_group_size=64, has_zero_point=True),
    "w3-g64": WeightSchema("w3-g64", "uint3", weight_scale_group_size=64),
    "fp8-block-64": WeightSchema("fp8-block-64", "float8e4m3", "float32", "block", 64, 64),
    "nvfp4-channel": WeightSchema(
        "nvfp4-channel", "float4e2m1", "float8e4m3", "group", 16, weight_scale_2_type="channel"
    ),
}
BITS_PER_WEIGHT = {"int4-g64-zp": 4.3125, "w3-g64": 3.25, "fp8-block-64": 8.0078125, "nvfp4-channel": 4.5}


def test_every_recipe_is_listed() -> None:
    assert {path.name for path in CONFIGS.iterdir() if path.is_file()} == {f"{name}.toml" for name in EXPECTED}


@pytest.mark.parametrize("name", EXPECTED)
def test_recipe(name: str) -> None:
    path = CONFIGS / f"{name}.toml"
    assert load_schema(path) == EXPECTED[name] == resolve_schema(str(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines) if line.startswith("#")] == [0]
    assert EXPECTED[name].bits_per_weight() == BITS_PER_WEIGHT[name]
    assert name != "int4-g64-zp" or EXPECTED[name] == resolve_schema(name)  # the shorthand
    schema = load_schema(path)
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    (result,) = quantize([matrix], schema, "bfloat16")
    assert result.error_sums.is_finite
    limit = {3: 0.25, 4: 0.12, 8: 0.03}[schema.num_bits]
    assert 0 < (result.error_sums.error / result.error_sums.power) ** 0.5 < limit
    assert "weight" in kernel_form(256, 512, kernel_spec_of(schema, "bfloat16", 90)).tensors
