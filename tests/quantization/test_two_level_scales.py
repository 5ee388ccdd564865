"""8-bit group scales under a second scale: the recipe in numpy, nearest codes by brute force, one result everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hqconv.humming_ops.runtime import humming_schema, resident
from hqconv.layout_decoder.decode import bits_of, decode_packed, decoded_weights
from hqconv.quantization.group_scales import two_level_scales, unrounded_scales
from hqconv.quantization.quantize import quantize_stacks
from hqconv.schemas.options import MSE, RTN
from hqconv.schemas.tensors import code_of_torch, torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from tests.make.matrices import (
    FP8_MAX,
    gaussian,
    hard_matrix,
    hard_stacks,
    unpack_codes,
    values_of_codes,
)
from tests.make.quant_weight import quant_weight
from tests.make.quantized import assert_gpu_recipe_agrees, quantize
from tests.make.tensors import assert_same, same_bits, with_one_nan

CPU = torch.device("cpu")
PARAMS = ("bfloat16", "float16")
CODES = (*(f"int{bits}" for bits in range(1, 9)), "fp4", "fp6-e3m2", "fp6-e2m3", "fp8", "fp8-e5m2")
SCALES = ("g32-e4m3", "g16-e4m3-row", "g64-e5m2", "g32-e5m2-row", "g32-e8m0-row")
# Every code under one kind of scale and under one of the others in turn: each code compiles loops for seconds.
NAMES = tuple(
    f"{c}-{scale}" for n, c in enumerate(CODES) for scale in (SCALES[0], SCALES[1 + n % 4])
)
E0M = tuple(
    WeightSchema(f"{code}-{second}", code, "float8e4m3", "group", 32, 0, second)
    for code, second in (
        ("float2e0m1", "channel"),
        ("float4e0m3", "tensor"),
        ("float8e0m7", "channel"),
    )
)
SCHEMAS = {
    **{name: resolve_schema(name) for name in ("nvfp4", *NAMES)},
    **{schema.name: schema for schema in E0M},
}


def is_row_of_powers(schema: WeightSchema) -> bool:
    return schema.bs_dtype == "float8e8m0"


# --- an independent recipe ---------------------------------------------------------------------------------


def expected_unrounded(matrix: torch.Tensor, schema: WeightSchema) -> np.ndarray:
    """The group scales before they are rounded, float32 [N, G]; Humming's own formula for integers and floats."""
    groups = matrix.float().numpy().reshape(len(matrix), -1, schema.weight_scale_group_size)
    up = np.maximum(groups.max(2), np.float32(1e-30)).astype(np.float64)
    down = np.maximum((-groups).max(2), np.float32(1e-30)).astype(np.float64)
    wide, narrow = np.maximum(up, down), np.minimum(up, down)
    values = values_of_codes(schema)
    if not schema.is_integer:
        return (wide / values.max()).astype(np.float32)
    if schema.num_bits == 1:
        scale = np.maximum((wide / 1.499).astype(np.float32), (narrow / 0.499).astype(np.float32))
    elif is_row_of_powers(schema):  # no sign: what neither end exceeds
        return np.maximum(
            (down / -values.min()).astype(np.float32), (up / values.max()).astype(np.float32)
        )
    else:
        scale = np.maximum(
            (wide / -values.min()).astype(np.float32), (narrow / values.max()).astype(np.float32)
        )
    return scale if is_row_of_powers(schema) else np.where(up > down, -scale, scale)


def rounded(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float32)).to(dtype)


def check_recipe(
    matrix: torch.Tensor, tensors: dict[str, torch.Tensor], schema: WeightSchema, param: str
) -> None:
    """Second scale and group scales of one matrix, its own expert."""
    scale, dtype = expected_unrounded(matrix, schema), torch_dtype_of(param)
    found, second = tensors["weight_scale"], tensors["weight_scale_2"]
    if is_row_of_powers(schema):
        check_powers(scale, found, second, schema, param)
        return
    fp8_max = np.float32(FP8_MAX[schema.bs_dtype or ""])
    if schema.has_row_scale:
        wanted = rounded(np.abs(scale).max(1) / fp8_max, dtype).clamp_min(torch.finfo(dtype).tiny)
        assert_same(second, wanted, "a row's second scale")
    else:
        reach = 0.499 if schema.b_dtype == "uint1" else values_of_codes(schema).max()
        amax = np.float32(max(float(matrix.float().abs().max()), 1e-30))
        assert_same(
            second,
            torch.tensor([amax / np.float32(reach * float(fp8_max))]),
            "the tensor's second scale",
        )
    ratio = scale / second.float().numpy().reshape(-1, 1)
    stored = rounded(np.clip(ratio, -fp8_max, fp8_max), torch_dtype_of(schema.bs_dtype or ""))
    assert_same(found, stored, "group scales")


def check_powers(
    scale: np.ndarray, found: torch.Tensor, second: torch.Tensor, schema: WeightSchema, param: str
) -> None:
    """Row scales and powers of two: no scale is smaller than needed, the largest of a row hardly larger."""
    exponent = found.view(torch.uint8).numpy().astype(np.int64) - 127
    rows = second.double().numpy()
    if param == "bfloat16":
        assert ((rows >= 1) & (rows < 2)).all()
    else:
        assert ((exponent >= -14) & (exponent <= 15)).all()
        assert ((rows >= 2.0**-14) & np.isfinite(rows)).all()
    whole = rows[:, None] * 2.0**exponent
    place = scale.argmax(1)
    is_in_range = scale.max(1) < 2.0**15  # of float16
    top = np.take_along_axis(whole, place[:, None], 1)[:, 0] / scale.max(1)
    unit = 2.0**-7 if param == "bfloat16" else 2.0**-10
    is_held = (
        is_in_range & (scale.max(1) > 2.0**-20) if param == "float16" else np.full(len(scale), True)
    )
    assert ((top >= 1) & (top <= 1 + unit))[is_held].all()
    assert (whole >= scale * (1 - 2.0**-23))[is_held].all()
    is_least = (whole / 2 < scale) | (exponent == (-14 if param == "float16" else -126))
    assert is_least[is_held].all()


def check_codes(
    matrix: torch.Tensor, tensors: dict[str, torch.Tensor], schema: WeightSchema
) -> None:
    """Every code is the nearest of all codes under the stored scales, but for a float32's rounding."""
    codes = unpack_codes(tensors["weight"], schema.num_bits)
    size = schema.weight_scale_group_size
    scale = tensors["weight_scale"].float().numpy() * tensors[
        "weight_scale_2"
    ].float().numpy().reshape(-1, 1)
    scale = scale.astype(np.float64).repeat(size, 1)
    weights, values = matrix.double().numpy(), values_of_codes(schema)
    known = scale != 0
    assert (values[codes] == 0)[~known].all()
    x = np.divide(weights, scale, out=np.zeros_like(weights), where=known)
    x = np.clip(x, values.min(), values.max())
    ladder = np.unique(values)
    place = np.clip(np.searchsorted(ladder, x), 1, len(ladder) - 1)
    nearest = np.minimum(np.abs(ladder[place] - x), np.abs(ladder[place - 1] - x))
    excess = np.abs(values[codes] - x) - nearest
    assert (excess <= np.maximum(np.abs(x), 1.0) * 2.0**-20).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_recipe_and_the_nearest_codes(name: str) -> None:
    schema = SCHEMAS[name]
    heavy = torch.from_numpy(np.random.default_rng(3).standard_t(2, (32, 128))).float() * 0.01
    uneven = gaussian(32, 128, seed=2)
    uneven[:, :64], uneven[::2, 64:] = 0, uneven[::2, 64:] * 2.0**-24
    uneven[1] *= 2.0**8
    even = (gaussian(32, 128), gaussian(32, 128, seed=1).bfloat16().abs())
    matrices = (*even, -heavy.bfloat16().abs(), heavy, uneven)
    for matrix, param in itertools.product(matrices, PARAMS):
        [done] = quantize([matrix], schema, param)
        check_recipe(matrix, done.tensors, schema, param)
        check_codes(matrix, done.tensors, schema)


@pytest.mark.parametrize("bits", range(1, 9))
def test_unrounded_scales_of_integers_are_hummings(bits: int) -> None:
    """Those of the op `quant_weight`, whose twin on the CPU is held to it by golden recordings."""
    schema, matrix = resolve_schema(f"int{bits}-g32-e4m3"), hard_matrix(64, 256, torch.float32, 3)
    groups = matrix.view(64, -1, 32)
    found = unrounded_scales(
        groups.amax(2).clamp_min(1e-30), groups.amin(2).clamp_max(-1e-30), schema
    )
    _, expected, _ = quant_weight(matrix, "float32", f"uint{bits}", 32, True, False, False, False)
    assert_same(found, expected, "scales")
    assert bool((found < 0).any())


def test_gate_and_up_share_a_tensors_second_scale() -> None:
    pair = [gaussian(64, 128), gaussian(64, 128, seed=1) * 30]
    for name in ("int4-g32-e4m3", "fp8-g32-e5m2"):
        done = quantize(pair, resolve_schema(name), "bfloat16")
        assert_same(done[0].tensors["weight_scale_2"], done[1].tensors["weight_scale_2"], name)
        alone = quantize(pair[1:], resolve_schema(name), "bfloat16")
        assert_same(done[1].tensors["weight_scale_2"], alone[0].tensors["weight_scale_2"], name)
    rows = [
        quantize(some, resolve_schema("int4-g32-e4m3-row"), "bfloat16")[0]
        for some in (pair, pair[:1])
    ]
    assert_same(
        rows[0].tensors["weight_scale_2"], rows[1].tensors["weight_scale_2"], "rows share nothing"
    )


# --- one result --------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_recipe_for_gpus_gives_the_bits_of_the_loops(name: str) -> None:
    """The code for GPUs, run on the CPU over the twins of Humming's operations."""
    schema, number = SCHEMAS[name], [*SCHEMAS].index(name)
    dtype = (torch.bfloat16, torch.float32, torch.float16)[number % 3]
    for param in PARAMS:
        stacks = hard_stacks(dtype, 64, 256)
        assert_gpu_recipe_agrees(stacks, schema, param, RTN)


def test_where_32_bit_integers_overflow_codes_are_the_kernels() -> None:
    """Scales of float16 reach 2**30 here, and weights 2**128."""
    stacks = [hard_matrix(128, 256, torch.float32, 7).unsqueeze(0)]
    assert_gpu_recipe_agrees(stacks, SCHEMAS["int8-g32-e8m0-row"], "float16", RTN)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCHEMAS)
def test_three_decoders_agree(name: str) -> None:
    """Humming's own, the independent one of `verify`, and the sums of the quantizer."""
    schema = SCHEMAS[name]
    [stack] = hard_stacks(torch.bfloat16, 64, 256)[:1]
    for param in PARAMS:
        [done] = quantize_stacks([stack], schema, param)
        with resident(CPU):
            theirs = humming_schema(schema).dequant_tensors(dict(done.tensors))
        bits = {key: bits_of(tensor) for key, tensor in done.tensors.items()}
        packed = decode_packed(bits, schema, code_of_torch(done.tensors["weight_scale"].dtype))
        ours = decoded_weights(packed, schema, param)
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
        lost = ((stack.double() - theirs.double()) ** 2).sum((1, 2))
        torch.testing.assert_close(
            done.error, lost, rtol=1e-12, atol=0, equal_nan=True
        )  # infinite in float16


@pytest.mark.parametrize(
    ("name", "param"), [("int3-g64-e5m2-row", "float16"), ("fp4-g32-e8m0-row", "bfloat16")]
)
def test_a_search_keeps_the_second_scale(name: str, param: str) -> None:
    schema, stack = resolve_schema(name), gaussian(1, 64, 256, seed=4)
    plain, best = (quantize_stacks([stack], schema, param, quantizer=q)[0] for q in (RTN, MSE))
    assert_same(best.tensors["weight_scale_2"], plain.tensors["weight_scale_2"], "second scales")
    assert float(best.error) < float(plain.error)


@pytest.mark.parametrize("name", ["fp4-g32-e8m0-row", "int8-g32-e8m0-row"])
def test_a_search_keeps_to_the_powers_of_float16(name: str) -> None:
    """A power of two beyond 2**15 or below 2**-14 is another number in the kernel."""
    for done in quantize_stacks(
        hard_stacks(torch.float32, 64, 256), resolve_schema(name), "float16", quantizer=MSE
    ):
        powers = done.tensors["weight_scale"].view(torch.uint8)
        assert powers.min() == 127 - 14
        assert powers.max() == 127 + 15


def test_a_row_scale_of_two_is_one() -> None:
    """A fraction that rounds up to 2 is 1 under the next exponents, so that exponents can be told from fractions."""
    widest = (
        torch.tensor([[[1.999, 0.7]], [[1.0, 0.25]], [[1.0039, 0.5]]]) * 6
    )  # e2m1's largest number
    found = two_level_scales(
        widest, -widest, resolve_schema("fp4-g32-e8m0-row"), "bfloat16", None
    ).scales
    assert found.second is not None
    assert found.second.flatten().tolist() == [1.0, 1.0, 1.0078125]
    assert (found.stored.view(torch.uint8).int() - 127).tolist() == [[[1, 0]], [[0, -2]], [[0, -1]]]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*SCHEMAS][::2])
def test_a_gpu_gives_the_same_bits(name: str) -> None:
    """Every kind of code and of scale. Dtypes take turns."""
    schema, turn = SCHEMAS[name], [*SCHEMAS].index(name)
    dtype, param = ((torch.bfloat16, "bfloat16"), (torch.float32, "float16"))[turn // 2 % 2]
    stacks = hard_stacks(dtype, 64, 256)
    here = quantize_stacks(stacks, schema, param, quantizer=MSE)
    there = quantize_stacks([s.cuda() for s in stacks], schema, param, quantizer=MSE)
    for ours, theirs in zip(here, there, strict=True):
        for key, tensor in ours.tensors.items():
            assert_same(with_one_nan(theirs.tensors[key].cpu()), with_one_nan(tensor), key)
        assert same_bits(with_one_nan(ours.error), with_one_nan(theirs.error.cpu()))
