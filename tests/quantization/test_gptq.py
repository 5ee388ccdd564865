"""Error compensation: never worse than `mse` under its own measure, one result everywhere, and a plain reference."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.make.quant_weight  # noqa: F401 - lets Humming quantize on the CPU
from hqconv.cpu_loops.helper_threads import Helpers
from hqconv.humming_ops.runtime import humming_schema, resident
from hqconv.planning.layer_encoding import COMPENSATION_VERSION
from hqconv.quantization import cpu, cuda, gptq
from hqconv.quantization.gptq import factorized, hessian_factors
from hqconv.quantization.hadamard import rotate
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import MSE, RTN, HessianFactors, QuantizedStack, Quantizer
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from tests.make import torch_kernels
from tests.make.effort import num_examples
from tests.make.matrices import RARE_SCHEMAS, SCHEMAS, any_schema, hard_matrix
from tests.make.structured_inputs import as_tiles, gaussian_rows, structured_inputs
from tests.make.tensors import assert_same, same_bits, with_one_nan

CPU = torch.device("cpu")
ALL = (*SCHEMAS, *RARE_SCHEMAS)
# Of each version of the compensation, the digest of its results. One that is here is not changed: there is a next one.
RESULTS = {1: "d92b7b73b929691bac8c85253e5bda861326a9eac4fd8c60e8d645c0ed185253"}
FEW = (
    "mxfp4",
    "nvfp4",
    "fp8",
    "fp8-block",
    "fp8-tensor",
    "int4",
    "int4-c",
    "int4-g64-zp",
    "int4-g128-fpzp",
    "int3-g64",
)


def gram(num_columns: int, seed: int = 0, num_tokens: int = 400) -> torch.Tensor:
    """Mean products of structured inputs, float32 [K, K]."""
    x = structured_inputs(num_tokens, num_columns, seed)
    return (x.T @ x / len(x)).float()


def gptq_of(hessian: torch.Tensor, schema: WeightSchema) -> Quantizer:
    """The quantizer by a matrix of products [K, K]."""
    tiles = as_tiles(hessian).numpy().tobytes()
    factors = hessian_factors(tiles, len(hessian), schema.weight_scale_group_size, schema.rotation)
    return Quantizer("gptq", factors.importance, factors)


def by_diagonal(quantizer: Quantizer) -> Quantizer:
    """`mse` with the diagonal of the same products."""
    return Quantizer("mse", quantizer.importance)


def decoded(stack: QuantizedStack, schema: WeightSchema) -> np.ndarray:
    """By Humming's own code."""
    with resident(CPU):
        return humming_schema(schema).dequant_tensors(dict(stack.tensors)).double().numpy()


def damped(hessian: torch.Tensor, begin: int, end: int) -> np.ndarray:
    """The products that the compensation measures by, of some columns."""
    tile = hessian[begin:end, begin:end].double().numpy().copy()
    tile[np.diag_indices(len(tile))] *= 1 + 2.0**-7
    return tile


def unit_losses(stack: torch.Tensor, done: QuantizedStack, schema: WeightSchema, hessian: torch.Tensor) -> np.ndarray:
    """The sum of e H e over tiles of 128 columns, of each unit of decision: [E, N, U]."""
    errors = stack.double().numpy() - decoded(done, schema)
    num_columns = errors.shape[2]
    tiles = []
    for begin in range(0, num_columns, 128):
        part = errors[:, :, begin : begin + 128]
        tiles.append(np.einsum("eni,ij,enj->en", part, damped(hessian, begin, begin + 128), part))
    losses = np.stack(tiles, 2)
    size = schema.weight_scale_group_size or num_columns
    return losses if size <= 128 else losses.reshape(*losses.shape[:2], num_columns // size, -1).sum(3)


# --- what is promised --------------------------------------------------------------------------------------


@pytest.mark.full
@settings(max_examples=num_examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(FEW),
    st.sampled_from(["bfloat16", "float16"]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(0, 10**6),
    st.sampled_from([1, 3, 40, 400]),
    st.sampled_from([0.0, 1e-12, 1.0, 1e9]),
    st.sampled_from([192, 256, 320]),
)
def test_no_unit_loses_more_than_mse(
    name: str, param_dtype: str, dtype: torch.dtype, seed: int, num_tokens: int, size: float, columns: int
) -> None:
    """Products of few tokens are singular; some columns are zero, some inputs tiny or huge, the last tile a part."""
    schema = any_schema(name)
    columns = columns if 0 < schema.weight_scale_group_size <= 64 else 256
    stacks = [torch.stack([hard_matrix(128, columns, dtype, seed % 97 + 7 * i)]) for i in range(2)]
    hessian = gram(columns, seed, num_tokens) * size
    dead = torch.from_numpy(np.random.default_rng(seed).random(columns) < 0.1)
    hessian[dead] = 0
    hessian[:, dead] = 0
    quantizer = gptq_of(hessian, schema)
    before, after = (
        quantize_stacks(stacks, schema, param_dtype, quantizer=q) for q in (by_diagonal(quantizer), quantizer)
    )
    with np.errstate(all="ignore"):
        for stack, one, other in zip(stacks, before, after, strict=True):
            losses = [unit_losses(stack, done, schema, hessian) for done in (one, other)]
            known = np.isfinite(losses[0])
            slack = 1e-9 * np.abs(losses[0][known]) + 1e-30 * size
            assert (losses[1][known] <= losses[0][known] + slack).all(), (name, param_dtype)
            for key, tensor in one.tensors.items():
                assert (tensor.dtype, tensor.shape) == (other.tensors[key].dtype, other.tensors[key].shape)


@pytest.mark.parametrize("name", FEW)
def test_without_correlations_there_is_nothing_to_compensate(name: str) -> None:
    """Products with a diagonal only: the codes, scales and zero points of `mse` with that importance."""
    schema = any_schema(name)
    stacks = [gaussian_rows(128, 384, seed).unsqueeze(0) for seed in (1, 2)]
    for diagonal in (torch.ones(384), torch.from_numpy(np.random.default_rng(3).lognormal(0, 2, 384)).float()):
        quantizer = gptq_of(torch.diag(diagonal), schema)
        plain, ours = (
            quantize_stacks(stacks, schema, "bfloat16", quantizer=q) for q in (by_diagonal(quantizer), quantizer)
        )
        for one, other in zip(plain, ours, strict=True):
            for key, tensor in one.tensors.items():
                assert_same(other.tensors[key], tensor, key)
            assert same_bits(one.error, other.error)
    assert_same(quantizer.importance, diagonal, "importance")


def test_codes_that_are_kept_are_those_of_mse_even_where_they_overflow() -> None:
    """Scales of float16 reach 2**30 here, and weights 2**128: a code's 32-bit integer overflows."""
    schema = any_schema("int8-g32-e8m0-row")
    stacks = [hard_matrix(128, 256, torch.float32, 7).unsqueeze(0)]
    quantizer = gptq_of(torch.eye(256), schema)
    [plain], [ours] = (
        quantize_stacks(stacks, schema, "float16", quantizer=q) for q in (by_diagonal(quantizer), quantizer)
    )
    for key, tensor in plain.tensors.items():
        assert_same(ours.tensors[key], tensor, key)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4", "int8", "fp8", "fp8-block"])
def test_what_is_exact_keeps_its_bytes(name: str) -> None:
    schema = any_schema(name)
    if schema.is_integer:
        half = 2 ** (schema.num_bits - 1)
        numbers = torch.randint(-half, half, (1, 128, 256), generator=torch.Generator().manual_seed(3)).float()
        numbers[..., ::16] = -half
    else:
        largest = {"float4e2m1": 6.0, "float8e4m3": 448.0}[schema.b_dtype]
        numbers = gaussian_rows(128, 256, 1).float().unsqueeze(0).sign() * largest
        numbers[..., 1::2] /= 4
    stack = numbers * 2.0**-6 * (448 if name == "nvfp4" else 1)
    plain, best = (
        quantize_stacks([stack], schema, "bfloat16", quantizer=q)[0] for q in (RTN, gptq_of(gram(256), schema))
    )
    assert float(plain.error) == 0
    for key, tensor in plain.tensors.items():
        assert_same(best.tensors[key], tensor, key)


@pytest.mark.parametrize(
    ("name", "less"),
    [("mxfp4", 0.6), ("nvfp4", 0.7), ("int4", 0.65), ("int4-g32", 0.65), ("int4-g128-zp", 0.65), ("fp8", 0.65)],
)
def test_held_out_products_are_closer_with_each_step(name: str, less: float) -> None:
    """Correlated inputs with outlier channels: the error of x · Wᵀ on other tokens than those that were measured."""
    schema, num_columns = resolve_schema(name), 512
    weights = gaussian_rows(128, num_columns, 7)
    others = structured_inputs(1024, num_columns, 5, first=4096)
    gptq_quantizer = gptq_of(gram(num_columns, 5, 2048), schema)
    errors = []
    for quantizer in (RTN, MSE, by_diagonal(gptq_quantizer), gptq_quantizer):
        [done] = quantize_stacks([weights.unsqueeze(0)], schema, "bfloat16", quantizer=quantizer)
        exact = others @ weights.double().T
        lost = others @ torch.from_numpy(decoded(done, schema)[0]).T - exact
        errors.append(float(lost.norm() / exact.norm()))
    rtn, mse, weighted, compensated = errors
    assert mse < 0.985 * rtn
    assert weighted < 0.985 * mse
    assert compensated < less * weighted, errors


# --- one result --------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*FEW, "fp8-e5m2", "fp6-e3m2", "int8-g128-zp", "int4-g32-e4m3-row"])
def test_the_recipe_for_gpus_gives_the_bits_of_the_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for GPUs, run on the CPU over the twins of Humming's operations and of the Triton kernels."""
    monkeypatch.setattr(cuda, "_sweep_kernel", lambda: torch_kernels)
    monkeypatch.setattr(cuda, "_compensation_kernels", lambda: torch_kernels)
    schema = any_schema(name)
    num_columns = 256 if schema.weight_scale_group_size > 64 else 192  # the last tile may be a part of one
    quantizer = gptq_of(gram(num_columns, 1), schema)
    is_float32 = len(name) % 2 == 1
    param_dtype, dtype = ("float16", torch.float32) if is_float32 else ("bfloat16", torch.bfloat16)
    stacks = [hard_matrix(128, num_columns, dtype, 7 * i).unsqueeze(0) for i in range(2)]
    loops = cpu.quantize_stacks(stacks, schema, param_dtype, None, True, quantizer)
    plain = cpu.quantize_stacks(stacks, schema, param_dtype, None, True, by_diagonal(quantizer))
    with resident(CPU):
        recipe = cuda.quantize_stacks(stacks, schema, param_dtype, None, True, quantizer)
    for ours, theirs, one in zip(loops, recipe, plain, strict=True):
        for key, tensor in ours.tensors.items():
            assert_same(theirs.tensors[key], tensor, key)
        assert str(ours.error.tolist()) == str(theirs.error.tolist())  # NaN equals NaN
        # Under huge weights of the matrix or the row, codes of all others are 0, and there is nothing to compensate.
        assert is_float32 or schema.is_coupled or not torch.equal(ours.tensors["weight"], one.tensors["weight"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "dtype", "param_dtype"),
    [
        ("nvfp4", torch.float32, "float16"),  # floats under two scales, tiles of one group
        ("int4-c", torch.bfloat16, "bfloat16"),  # integers, a scale of all tiles
        ("int4-g64-zp", torch.bfloat16, "bfloat16"),  # zero points
        ("fp8-block", torch.bfloat16, "bfloat16"),  # a scale of several rows
        ("e0m3-e4m3", torch.float32, "float16"),  # signs and magnitudes
    ],
)
def test_a_gpu_gives_the_bits_of_the_loops(name: str, dtype: torch.dtype, param_dtype: str) -> None:
    """One format of each kind of code and of scale: every one compiles some five kernels for half a minute."""
    schema = any_schema(name)
    quantizer = gptq_of(gram(768, 1), schema)
    stacks = [torch.stack([hard_matrix(128, 768, dtype, 7 * i + e) for e in range(3)]) for i in range(2)]
    loops = quantize_stacks(stacks, schema, param_dtype, quantizer=quantizer)
    theirs = quantize_stacks([one.cuda() for one in stacks], schema, param_dtype, quantizer=quantizer)
    for ours, other in zip(loops, theirs, strict=True):
        for key, tensor in ours.tensors.items():
            assert_same(with_one_nan(other.tensors[key].cpu()), with_one_nan(tensor), key)
        assert same_bits(with_one_nan(ours.error), with_one_nan(other.error.cpu()))


@pytest.mark.parametrize("name", ["nvfp4", "int4-c", "fp8-tensor", "int4-g64-zp"])
def test_experts_and_helpers_change_nothing(name: str) -> None:
    schema = any_schema(name)
    quantizer = gptq_of(gram(256, 2), schema)
    stacks = [torch.stack([hard_matrix(128, 256, torch.bfloat16, 7 * i + e) for e in range(2)]) for i in range(2)]
    whole = quantize_stacks(stacks, schema, "bfloat16", quantizer=quantizer)
    helpers = Helpers(2)
    helpers.use(2)
    try:
        in_parts = quantize_stacks(stacks, schema, "bfloat16", quantizer=quantizer)
    finally:
        Helpers(0).use(0)
        helpers.stop()
    for e in range(2):
        alone = quantize_stacks([s[e : e + 1] for s in stacks], schema, "bfloat16", quantizer=quantizer)
        for one, parts, own in zip(whole, in_parts, alone, strict=True):
            for key, tensor in one.tensors.items():
                assert_same(own.tensors[key], tensor[e : e + 1], key)
                assert_same(parts.tensors[key], tensor, key)


def test_what_the_compensation_finds_is_that_of_its_version() -> None:
    """A change here makes artifacts that an older hqconv cannot verify, and the other way round: it needs a number."""
    number = np.arange(2 * 2 * 128 * 256, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(1 << 32)
    values = (number.astype(np.float64) / 2**32 - 0.5) ** 3
    stacks = list(torch.from_numpy(values.astype(np.float32)).bfloat16().view(2, 2, 128, 256))
    inputs = (number[: 512 * 256].reshape(512, 256) % 1009).astype(np.int64) - 504
    inputs[:, 1:] += inputs[:, :-1] // 2
    hessian = torch.from_numpy((inputs.T @ inputs).astype(np.float32))
    digest = hashlib.sha256()
    for name in FEW:
        quantizer = gptq_of(hessian, any_schema(name))
        for one in quantize_stacks(stacks, any_schema(name), "bfloat16", quantizer=quantizer):
            for part in sorted(one.tensors):
                digest.update(one.tensors[part].contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == RESULTS[COMPENSATION_VERSION]


# --- references --------------------------------------------------------------------------------------------


def test_factors_are_those_of_the_products() -> None:
    """H = P S Pᵀ in the order of rounding, for matrices of full rank, of low rank, and with dead columns."""
    for num_tokens in (400, 20):
        hessian = gram(128, 3, num_tokens).double().numpy().copy()
        hessian[5] = hessian[:, 5] = 0
        order, feedback, penalty = (one[0] for one in factorized(hessian[None]))
        diagonal = np.diag(hessian)
        assert sorted(order) == list(range(128))
        assert (np.diff(diagonal[order]) <= 0).all()
        assert (order[-1], penalty[-1]) == (5, 0.0)
        assert not np.tril(feedback).any()
        whole = feedback + np.eye(128)
        expected = hessian[np.ix_(order, order)]
        expected[np.diag_indices(128)] *= 1 + 2.0**-7
        np.testing.assert_allclose(whole @ np.diag(penalty) @ whole.T, expected, rtol=1e-9, atol=1e-12 * diagonal.max())


def test_what_is_no_matrix_of_products_gives_finite_factors() -> None:
    """Such a tile is taken for its diagonal; others beside it are not touched."""
    tiles = np.full((2, 16, 16), -3.0)
    tiles[1] = gram(16).double().numpy()
    tiles[0, np.arange(16), np.arange(16)] = 1.0
    _, feedback, penalty = factorized(tiles)
    assert not feedback[0].any()
    assert (penalty[0] == 1 + 2.0**-7).all()
    np.testing.assert_array_equal(feedback[1], factorized(tiles[1:])[1][0])
    assert feedback[1].any()


def plain_gptq(weights: np.ndarray, scale: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """Codes -8 … 7 by GPTQ as published, with LAPACK: the Cholesky factor of the inverse, largest inputs first."""
    order = np.argsort(-np.diag(hessian), kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(hessian[np.ix_(order, order)])).T
    left, scale, codes = weights[:, order].copy(), scale[:, order], np.zeros(weights.shape)
    for j in range(len(order)):
        codes[:, j] = np.clip(np.rint(left[:, j] / scale[:, j]), -8, 7)
        error = (left[:, j] - codes[:, j] * scale[:, j]) / upper[j, j]
        left[:, j:] -= np.outer(error, upper[j, j:])
    return codes[:, np.argsort(order)]


@pytest.mark.parametrize(("name", "size"), [("int4", 128), ("int4-g32", 32)])
def test_codes_are_those_of_the_published_method(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the scales that were chosen: where codes are compensated, they are those of a plain GPTQ."""
    schema, weights, hessian = resolve_schema(name), gaussian_rows(64, 256, 4).float(), gram(256, 4)
    masks: list[torch.Tensor] = []
    right = gptq._choose

    def noted(*arguments: object) -> gptq.Compensation:
        choice = right(*arguments)  # type: ignore[arg-type]
        masks.append(choice.changed)
        return choice

    monkeypatch.setattr(gptq, "_choose", noted)
    [done] = quantize_stacks([weights.unsqueeze(0)], schema, "bfloat16", quantizer=gptq_of(hessian, schema))
    scale = done.tensors["weight_scale"][0].float().double().repeat_interleave(size, 1).numpy()
    ours = np.rint(decoded(done, schema)[0] / scale)
    reference = np.concatenate(
        [
            plain_gptq(weights[:, b : b + 128].double().numpy(), scale[:, b : b + 128], damped(hessian, b, b + 128))
            for b in (0, 128)
        ],
        axis=1,
    )
    changed = masks[0][0].repeat_interleave(128, 1).numpy()
    assert changed.mean() > 0.95
    assert (ours == reference)[changed].mean() > 0.9999


def test_rotated_weights_are_compensated_by_rotated_inputs() -> None:
    """With a rotation in the schema, the result is that of rotated weights and inputs without one."""
    plain = resolve_schema("int4")
    rotated = WeightSchema(**{**plain.humming_fields(), "name": plain.name, "hadamard_block_size": 64})
    weights, x = gaussian_rows(64, 256, 4).float(), structured_inputs(400, 256, 6).float()
    hessian, turned = (((one.T @ one) / len(one)).float() for one in (x.double(), rotate(x, 64).double()))
    [ours] = quantize_stacks([weights.unsqueeze(0)], rotated, "bfloat16", quantizer=gptq_of(hessian, rotated))
    [theirs] = quantize_stacks([rotate(weights, 64).unsqueeze(0)], plain, "bfloat16", quantizer=gptq_of(turned, plain))
    same = (decoded(ours, plain) == decoded(theirs, plain)).mean()
    assert same > 0.999


def test_factors_are_computed_once_for_a_layer() -> None:
    tiles = as_tiles(gram(256)).numpy().tobytes()
    first: HessianFactors = hessian_factors(tiles, 256, 32, 0)
    assert hessian_factors(tiles, 256, 32, 0) is first
    assert hessian_factors(tiles, 256, 64, 0) is not first
    assert first.narrow is not None
    assert first.narrow.order.shape == (8, 32)
    assert hessian_factors(tiles, 256, 0, 0).narrow is None
