"""Matrices on which quantizers disagree: zeros, ties, -0, subnormals, extreme exponents, equal groups."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from tests.make.packing import small_float

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
FP8_MAX = {"float8e4m3": 448.0, "float8e5m2": 57344.0}
SCHEMAS = (
    "mxfp4",
    "nvfp4",
    "mxfp8",
    "fp8",
    "fp8-e5m2",
    "fp8-block",
    "fp8-tensor",
    "fp6-e3m2",
    "fp6-e2m3",
    "int8",
    "int4",
    "int4-g64-zp",
    "int3-g64",
    "int4-g128-fpzp",
    "int7-c",
    "int4-c-zp",
    "int8-g128-zp",
    "int7-g64-zp",
    "int5-c-fpzp",
    "int1-g64",
    "int2-g32-zp",
    "int6-g128",
)


def hard_matrix(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A matrix [num_rows, num_columns] of weights with heavy channels and, in its first rows, every hard case."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = normal(num_rows, num_columns) * 0.02
    weights *= torch.exp(normal(1, num_columns) * 0.7)
    info = torch.finfo(dtype)
    columns = torch.arange(num_columns)
    ramp = (columns % 97 - 48).float()
    rows = [
        torch.zeros(num_columns),
        torch.full((num_columns,), -0.0),
        torch.full((num_columns,), 0.03125),
        torch.full((num_columns,), -0.0437),
        ramp * (info.smallest_normal / 64),  # subnormals of the source type
        normal(num_columns).clamp(-1, 1) * info.max * 0.999,
        torch.where(columns % 64 < 32, info.max, info.smallest_normal)
        * torch.where(columns % 2 == 0, 1.0, -1.0),
        (columns % 25 - 12).float() * 0.25,  # e2m1 ties, with the group maximum 6 or 5.75 or …
        torch.where(
            columns % 32 == 0, 6.0, (columns % 13).float() * 0.25
        ),  # exact ties under scale 1
        (columns % 33 - 16).float() * 0.5,  # integer ties
        -normal(num_columns).abs(),
        normal(num_columns).abs(),
        torch.where(columns % 50 == 7, 3.0, 0.0),
        torch.exp2((columns % 29 - 14).float()) * torch.where(columns % 3 == 0, -1.0, 1.0),
        torch.where(columns % 128 < 64, torch.zeros(()), normal(num_columns) * 1e-4),
        torch.where(columns % 16 == 0, 448.0, (columns % 17 - 8).float() * 26.0),
    ]
    for index, row in enumerate(rows[:num_rows]):
        weights[index] = row
    return weights.to(dtype)


def hard_stacks(
    dtype: torch.dtype, num_rows: int, num_columns: int, num_experts: int = 2
) -> list[torch.Tensor]:
    """Gate and up of some experts."""
    return [
        torch.stack(
            [hard_matrix(num_rows, num_columns, dtype, 10 * i + e) for e in range(num_experts)]
        )
        for i in range(2)
    ]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


@st.composite
def drawn_matrices(
    draw: st.DrawFn, count: int = 1, shape: tuple[int, int] | None = None
) -> list[torch.Tensor]:
    """Matrices made of a few drawn numbers, dealt over rows of very different sizes, some of them all zero."""
    rows, columns = shape or (draw(st.sampled_from([128, 256])), draw(st.sampled_from([128, 384])))
    dtype = draw(st.sampled_from(SOURCES))
    finite_bits = st.integers(-0x7BFF, 0x7BFF).map(
        lambda bits: abs(bits) | (0x8000 if bits < 0 else 0)
    )
    bits = draw(st.lists(finite_bits, min_size=1, max_size=24))
    pool = np.array(bits, np.uint16).view(np.float16).astype(np.float32)
    spread = draw(st.integers(0, 14))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    result = []
    for _ in range(count):
        values = generator.choice(pool, (rows, columns))
        noisy = generator.random((rows, 1)) < 0.5
        values = np.where(noisy, values * generator.standard_normal((rows, columns)), values)
        values *= np.exp2(-generator.integers(0, spread + 1, (rows, 1))) / 8
        values[generator.random(rows) < 0.05] = 0
        result.append(torch.from_numpy(values.astype(np.float32)).clamp(-60000, 60000).to(dtype))
    return result


# --- codes, by an independent decoder


def unpack_codes(packed: torch.Tensor, bits: int) -> np.ndarray:
    """Codes [rows, columns] from little-endian bit strings of each row."""
    rows = np.unpackbits(packed.numpy().view(np.uint8), axis=1, bitorder="little")
    codes: np.ndarray = (rows.reshape(rows.shape[0], -1, bits) << np.arange(bits)).sum(axis=2)
    return codes


def values_of_codes(schema: WeightSchema) -> np.ndarray:
    """The value of every symmetric code, float64; NaN and infinite fp8 codes are 0."""
    codes = np.arange(2**schema.num_bits)
    half = 2 ** (schema.num_bits - 1)
    if schema.is_integer:
        integers: np.ndarray = (codes - half).astype(np.float64)
        return integers
    exponent_bits, mantissa_bits = int(schema.b_dtype[-3]), int(schema.b_dtype[-1])
    magnitude = codes % half
    if exponent_bits:
        values = small_float(torch.from_numpy(magnitude), exponent_bits, mantissa_bits).numpy()
    else:
        values = magnitude.astype(np.float64)
    if schema.b_dtype in FP8_MAX:
        values[values > FP8_MAX[schema.b_dtype]] = 0
    signed: np.ndarray = np.where(codes >= half, -values, values)
    return signed


# Second scales above 8-bit ones, of every kind of code and scale; the first ones have recordings.
SECOND_SCALES = ("int4-g32-e4m3", "int4-g16-e4m3-row", "fp4-g32-e4m3", "fp4-g32-e8m0-row")
TWO_LEVELS = (
    *SECOND_SCALES,
    "int3-g64-e5m2",
    "int1-g32-e4m3",
    "fp8-g128-e5m2",
    "int8-g32-e8m0-row",
)
# Schemas that no preset names, each with another way of storing scales.
RARE_SCHEMAS = {
    schema.name: schema
    for schema in (
        *map(resolve_schema, TWO_LEVELS),
        WeightSchema(
            "e0m3-e4m3",
            "float4e0m3",
            bs_dtype="float8e4m3",
            weight_scale_group_size=16,
            weight_scale_2_type="tensor",
        ),
        WeightSchema(
            "e2m1-row",
            "float4e2m1",
            bs_dtype="float8e4m3",
            weight_scale_group_size=16,
            weight_scale_2_type="channel",
        ),
        WeightSchema("uint4-e5m3", "uint4", bs_dtype="float8e5m3", weight_scale_group_size=32),
        WeightSchema("uint4-e4m3", "uint4", bs_dtype="float8e4m3", weight_scale_group_size=32),
        WeightSchema("uint4-e8m0", "uint4", bs_dtype="float8e8m0", weight_scale_group_size=32),
        WeightSchema("e4m3-e5m2", "float8e4m3", bs_dtype="float8e5m2", weight_scale_group_size=32),
        WeightSchema("e0m3", "float4e0m3", weight_scale_group_size=32),
    )
}


def any_schema(name: str) -> WeightSchema:
    """A schema by the name that a test is called after."""
    return RARE_SCHEMAS.get(name) or resolve_schema(name)
