"""The search for the least squared error: never worse than round-to-nearest, the best of its candidates, one result.

The best candidate has the least error under the scales that codes are chosen under: tests of it leave out the gain.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.make.quant_weight  # noqa: F401 - lets Humming quantize on the CPU
from hqconv.humming_ops.runtime import humming_schema, resident
from hqconv.planning.layer_encoding import SEARCH_VERSION
from hqconv.quantization import scale_search
from hqconv.quantization.group_scales import GroupScales
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import QuantizedStack
from hqconv.quantization.scale_search import Ladder, search, sweep_each
from hqconv.schemas.options import MSE, RTN
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from tests.make.effort import num_examples
from tests.make.matrices import (
    RARE_SCHEMAS,
    SCHEMAS,
    any_schema,
    drawn_matrices,
    gaussian,
    hard_stacks,
)
from tests.make.quantized import assert_gpu_recipe_agrees

CPU = torch.device("cpu")
ALL = (*SCHEMAS, *RARE_SCHEMAS)
SHAPE = (128, 384)
# Of each version of the search, what it makes of `fixed_stacks`. One that is here is not changed: there is a next one.
RESULTS = {
    2: "675933eb6c8f6edddec9b765c7094c6334fe85b547fab3e1e5fdc38ecab4521a",
    3: "f371dcea2e669693860b46a9e36ab8b40668a845e2f898f424284fb684e6f04c",
    4: "9ed6130e5c9be3c7c22f92104708e03b6a70799f74d9d8c0e660c3e8b08e8edf",
}
SEARCHED = (
    *(
        "mxfp4",
        "mxfp8",
        "nvfp4",
        "fp8",
        "fp8-e5m2",
        "fp8-block",
        "fp8-tensor",
        "fp6-e3m2",
        "int8",
        "int8-g128-zp",
    ),
    *(
        "int6-g128",
        "int4",
        "int4-c",
        "int4-g64-zp",
        "int4-g128-fpzp",
        "int3-g64",
        "int2-g32-zp",
        "int1-g64",
    ),
    *("e2m1-row", "uint4-e5m3", "uint4-e8m0"),
)


def decoded(stack: QuantizedStack, schema: WeightSchema) -> np.ndarray:
    """By Humming's own code, which `test_quantize` holds to a decoder of its own."""
    with resident(CPU):
        return humming_schema(schema).dequant_tensors(dict(stack.tensors)).double().numpy()


def scope_errors(
    stacks: list[torch.Tensor], done: list[QuantizedStack], schema: WeightSchema
) -> list[np.ndarray]:
    """What is lost under each scale, summed by numpy in its own order: [E, R, G] of each stack, or of all."""
    rows, columns = schema.scale_group()
    every = []
    for stack, result in zip(stacks, done, strict=True):
        squares = (stack.double().numpy() - decoded(result, schema)) ** 2
        e, n, k = squares.shape
        r, c = rows or n, columns or k
        every.append(squares.reshape(e, n // r, r, k // c, c).sum((2, 4)))
    return [sum(every)] if schema.weight_scale_type == "tensor" else every  # type: ignore[list-item]


@pytest.fixture
def no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches store the scales that codes are chosen under."""
    monkeypatch.setattr(scale_search, "_with_gain", lambda meters, schema, scales: scales)


def assert_never_worse(stacks: list[torch.Tensor], schema: WeightSchema, param_dtype: str) -> None:
    plain = quantize_stacks(stacks, schema, param_dtype)
    best = quantize_stacks(stacks, schema, param_dtype, quantizer=MSE)
    with np.errstate(all="ignore"):
        pairs = [scope_errors(stacks, done, schema) for done in (plain, best)]
    for before, after in zip(*pairs, strict=True):
        known = np.isfinite(before)
        assert (after[known] <= before[known]).all(), (schema.name, param_dtype)
    for before, after in zip(plain, best, strict=True):
        assert before.tensors.keys() == after.tensors.keys()
        for name, tensor in before.tensors.items():
            assert (tensor.dtype, tensor.shape) == (
                after.tensors[name].dtype,
                after.tensors[name].shape,
            )
            if name.startswith("weight_scale") and torch.isfinite(tensor.float()).all():
                assert torch.isfinite(after.tensors[name].float()).all()


@pytest.mark.full
@settings(
    max_examples=num_examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    drawn_matrices(2, (128, 256)), st.sampled_from(ALL), st.sampled_from(["bfloat16", "float16"])
)
def test_no_scale_loses_more_than_round_to_nearest(
    pair: list[torch.Tensor], name: str, param_dtype: str
) -> None:
    stacks = [matrix.unsqueeze(0) for matrix in pair]
    assert_never_worse(stacks, any_schema(name), param_dtype)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", [*SEARCHED, "int4-g32-e4m3", "fp4-g32-e8m0-row"])
def test_hard_matrices_lose_no_more_either_and_something_is_gained(name: str) -> None:
    schema = any_schema(name)
    assert_never_worse(hard_stacks(torch.bfloat16, *SHAPE), schema, "bfloat16")
    stacks = [gaussian(1, 128, 512, seed=seed) for seed in range(2)]
    plain, best = (quantize_stacks(stacks, schema, "bfloat16", quantizer=q) for q in (RTN, MSE))
    gain = 1 - sum(float(s.error) for s in best) / sum(float(s.error) for s in plain)
    least = {
        "mxfp4": 0.1,
        "int4": 0.13,
        "nvfp4": 0.17,
        "mxfp8": 0.0,
        "fp8-tensor": 0.0,
        "fp8-block": 0.0,
    }
    assert gain >= least.get(name, 0.005)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", ALL)
def test_the_search_for_gpus_chooses_what_the_loops_choose(name: str) -> None:
    """The code for GPUs, run on the CPU over the twins of Humming's operations and of the Triton kernels.

    Every other schema has float16 parameters and a float32 source.
    """
    param_dtype, dtype = ("bfloat16", torch.bfloat16)
    if [*ALL].index(name) % 2:
        param_dtype, dtype = ("float16", torch.float32)
    schema = any_schema(name)
    rows = SHAPE[0] if schema.weight_scale_type == "block" else 32  # with every hard row
    stacks = [stack[:, :rows].contiguous() for stack in hard_stacks(dtype, *SHAPE)]
    assert_gpu_recipe_agrees(stacks, schema, param_dtype, MSE)


def test_scales_that_are_all_rounded_to_zero_are_found_by_both() -> None:
    """The first step, the scale itself, exists nowhere then; larger ones do."""
    schema, stacks = any_schema("uint4-e4m3"), [gaussian(1, 32, 256) / 16]
    [plain] = quantize_stacks(stacks, schema, "bfloat16")
    assert not plain.tensors["weight_scale"].float().any()
    [best] = assert_gpu_recipe_agrees(stacks, schema, "bfloat16", MSE)
    assert best.tensors["weight_scale"].float().any()


def test_e8m0_scales_stay_in_what_float16_leaves_of_them() -> None:
    """Humming cuts the range to 30 powers of two; a scale below would be raised, and its weights with it."""
    schema = resolve_schema("mxfp4")
    rows = torch.exp2(torch.linspace(0, -40, 128)).view(1, 128, 1)
    stack = gaussian(1, 128, 256) * 60 * rows
    for param_dtype, reaches in (("bfloat16", True), ("float16", False)):
        plain, best = (
            quantize_stacks([stack], schema, param_dtype, quantizer=q)[0]
            .tensors["weight_scale"]
            .view(torch.uint8)
            .int()
            for q in (RTN, MSE)
        )
        floor = int(plain.max()) - 29
        moved = best < plain
        assert moved.any()
        assert bool((best[moved] < floor).any()) is reaches


# --- brute force -------------------------------------------------------------------------------------------


def nearest(weights: np.ndarray, scale: float, codes: np.ndarray) -> float:
    """The least squared error of a group under a scale, every code tried on every weight."""
    values = codes * np.float64(scale)
    return float((np.abs(weights[:, None] - values[None, :]).min(1) ** 2).sum())


E2M1 = np.array([s * v for s, v in itertools.product((-1, 1), (0, 0.5, 1, 1.5, 2, 3, 4, 6))])
INT4 = np.arange(-8, 8).astype(np.float64)


CODES_OF = {"mxfp4": E2M1, "int4-g32": INT4, "nvfp4": E2M1, "e2m1-e5m2": E2M1, "uint4-e4m3": INT4}


def rounded_bfloat16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).bfloat16())


def scales_to_try(name: str, stored: float) -> list[float]:
    """All scales that can be stored, and for a wider scale the multiples that are tried."""
    if name == "int4-g32":
        multiples = [*(1 - i / 32 for i in range(12)), 17 / 16, 18 / 16, 19 / 16, 20 / 16]
        return [rounded_bfloat16(np.float32(stored) * np.float32(m)) for m in multiples]
    if name == "mxfp4":
        return [2.0**power for power in range(-126, 100)]
    dtype = torch.float8_e5m2 if "e5m2" in name else torch.float8_e4m3fn
    table = torch.arange(1, 127, dtype=torch.uint8).view(dtype).double()
    return [float(np.copysign(s, stored)) for s in table[torch.isfinite(table)].tolist()]


def hard_groups(size: int) -> torch.Tensor:
    """Rows for scales far from round-to-nearest's: even, heavy tails, tiny beside others, few large numbers."""
    generator = np.random.default_rng(1)
    rows = [generator.standard_normal((12, 128)) * 0.02, generator.standard_t(3, (8, 128))]
    rows.append(
        generator.standard_normal((8, 128)) * np.exp2(generator.integers(-16, -8, (8, 1))) * 0.02
    )
    spread = generator.choice([0.4, 0.41, 0.7, 0.83], (4, 128))
    spread[:, ::size] = 1
    return torch.from_numpy(np.concatenate([*rows, spread])).float().unsqueeze(0)


@pytest.mark.usefixtures("no_gain")
@pytest.mark.parametrize("name", CODES_OF)
def test_no_scale_that_can_be_stored_loses_less(name: str) -> None:
    """Brute force over every 8-bit scale: the search leaves out only scales that cannot be the best."""
    few = {
        "e2m1-e5m2": WeightSchema(
            name, "float4e2m1", bs_dtype="float8e5m2", weight_scale_group_size=16
        )
    }
    schema, codes = few.get(name) or any_schema(name), CODES_OF[name]
    size, num_moved = schema.weight_scale_group_size, 0
    stack = hard_groups(size)
    plain, best = (quantize_stacks([stack], schema, "bfloat16", quantizer=q)[0] for q in (RTN, MSE))
    [found], [before] = (scope_errors([stack], [done], schema) for done in (best, plain))
    second = float(plain.tensors.get("weight_scale_2", torch.ones(1)))
    for n, g in np.ndindex(32, 128 // size):
        columns = slice(g * size, (g + 1) * size)
        weights = stack[0, n, columns].double().numpy()
        stored = float(plain.tensors["weight_scale"][0, n, g].float())
        tried = scales_to_try(name, stored)
        least = min(nearest(weights, s * second, codes) for s in tried)
        assert found[0, n, g] <= max(least, 0) * (1 + 1e-5) + 2**-20 * before[0, n, g]
        assert name == "int4-g32" or found[0, n, g] >= least * (
            1 - 1e-5
        )  # this one is fitted besides
        num_moved += found[0, n, g] < before[0, n, g]
    assert num_moved > 24


class GivenErrors:
    """A meter of one group with errors as said, of one candidate after the other, and fits of 1.5."""

    def __init__(self, scales: GroupScales, errors: tuple[float, ...]) -> None:
        self.scales, self.given = scales, errors
        self.tried: list[GroupScales] = []
        self.gain, self.with_gain = 1.0, 0.9

    def start_errors(self) -> torch.Tensor:
        return torch.ones(1, 1, 1, dtype=torch.float64)

    def errors(self, scales: GroupScales, stored: GroupScales | None = None) -> torch.Tensor:
        if stored is not None:
            return self.start_errors() * self.with_gain
        self.tried.append(scales)
        return self.start_errors() * self.given[len(self.tried) - 1]

    def fits(self, scales: GroupScales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.start_errors() * 1.5, self.start_errors(), self.start_errors() * 1.5 * self.gain

    def sweep(
        self, start: GroupScales, least: torch.Tensor, ladder: Ladder, floor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sweep_each(start, least, ladder, self.errors)


def test_another_scale_must_be_better_by_the_margin_and_of_equals_the_first_is_taken() -> None:
    """Errors as said here, whatever the weights: of rtn 1, of the candidates one after the other."""
    schema = resolve_schema(
        "int8-g128"
    )  # the same scale, 129/128, 130/128, 127/128 and 126/128 of it, and two fits
    stored = torch.full((1, 1, 1), 1.0, dtype=torch.bfloat16)
    start = GroupScales(stored, stored.float(), None, None)
    for errors, chosen in (
        ((1.0, 1 - 2.0**-21, 1.0, 2.0, 1.0, 1.0, 1.0), None),
        ((1.0, 1 - 2.0**-19, 1.0, 2.0, 1.0, 1.0, 1.0), 1),
        ((1.0, 0.5, 0.25, 0.25, 0.3, 0.5, 0.25), 2),
        ((np.nan, np.inf, np.nan, 0.9, 0.9, np.nan, 0.9), 3),
        ((1.0, 0.5, 0.6, 0.7, 0.8, 0.4, 0.4), 5),
    ):
        meter = GivenErrors(start, errors)
        [found] = search([meter], schema, "bfloat16")
        tried = meter.tried
        assert len(tried) == len(errors)
        assert bool(found.changed) is (chosen is not None)
        expected = start if chosen is None else tried[chosen]
        assert float(found.scales.scale) == float(expected.scale)
    assert float(tried[5].scale) == 1.5


@pytest.mark.parametrize(
    ("gain", "with_gain", "stored"),
    [
        (1.0, 0.6, 1.5),
        (1.25, 0.9, 1.875),
        (1.25, 1 - 2.0**-21, 1.0),
        (1.25, 1.1, 1.0),
        (np.nan, 0.5, 1.5),
    ],
)
def test_a_scale_is_kept_if_it_loses_less_with_its_gain_too(
    gain: float, with_gain: float, stored: float
) -> None:
    """Rtn's scale is 1 and loses 1; the fitted one, 1.5, loses 0.5 before the gain."""
    schema, scale = resolve_schema("int8-g128"), torch.full((1, 1, 1), 1.0, dtype=torch.bfloat16)
    meter = GivenErrors(GroupScales(scale, scale.float(), None, None), (2.0,) * 5 + (0.5,) * 2)
    meter.gain, meter.with_gain = gain * 1.5, with_gain
    [found] = search([meter], schema, "bfloat16")
    assert float(found.stored.scale) == stored
    assert bool(found.changed) is (stored != 1.0)


def in_groups(values: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    size = schema.weight_scale_group_size or values.size(2)
    return values.view(*values.shape[:2], -1, size).double()


@pytest.mark.parametrize(
    ("name", "tolerance", "share"),
    [
        *(("int2-g32-zp", 2**-8, 0.06), ("int3-g64", 2**-8, 0.05), ("int4-c", 2**-8, 0.05)),
        *(("int3-g32-e4m3", 2**-4, 0.6), ("nvfp4", 2**-4, 0.95)),
    ],
)
def test_the_gain_of_each_group_is_kept_with_its_codes(
    name: str, tolerance: float, share: float
) -> None:
    """As near to 1 as a stored scale can be; of a matrix nearer than without: e4m3 has few steps.

    But for groups that rtn loses less in.
    """
    schema, stack = any_schema(name), gaussian(1, 128, 512)
    results = [quantize_stacks([stack], schema, "bfloat16", quantizer=q) for q in (RTN, MSE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_search, "_with_gain", lambda meters, schema, scales: scales)
        results.append(quantize_stacks([stack], schema, "bfloat16", quantizer=MSE))
    weights = in_groups(stack, schema)
    values = [
        in_groups(torch.from_numpy(decoded(result, schema)).view_as(stack), schema)
        for [result] in results
    ]
    is_rtn = (values[1] == values[0]).all(3)
    gains = [(value * weights).sum(3) / weights.square().sum(3) - 1 for value in values]
    assert is_rtn.double().mean() < 0.35
    assert gains[1][~is_rtn].abs().max() <= tolerance
    power = weights.square().sum(3)
    of_matrix = [abs(float((gain * power).sum() / power.sum())) for gain in gains]
    assert of_matrix[1] < share * of_matrix[2]


def fixed_stacks() -> list[torch.Tensor]:
    """Gate and up of two experts, by integers alone: the same on every machine, with any version of any library."""
    number = (
        np.arange(2 * 2 * 128 * 256, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(1 << 32)
    )
    values = (
        number.astype(np.float64) / 2**32 - 0.5
    ) ** 3  # heavier tails than a uniform distribution has
    return list(torch.from_numpy(values.astype(np.float32)).bfloat16().view(2, 2, 128, 256))


def test_what_the_search_finds_is_that_of_its_version() -> None:
    """A change here makes artifacts that an older hqconv cannot verify, and the other way round: it needs a number."""
    digest = hashlib.sha256()
    for name in SEARCHED:
        for param_dtype in ("bfloat16", "float16"):
            stacks = fixed_stacks()
            for result in quantize_stacks(stacks, any_schema(name), param_dtype, quantizer=MSE):
                for _, tensor in sorted(result.tensors.items()):
                    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == RESULTS[SEARCH_VERSION]
