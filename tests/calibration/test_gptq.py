"""The calibrated quantizer: errors of outputs against round-to-nearest."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from hqconv.calibration.gptq import InputProducts, OutputGradients, quantize_by_outputs
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import QuantizedStack, rotate
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from tests.make.calibrated import SCHEMAS, correlated, decoded, products_of


def output_error(weights: torch.Tensor, values: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    error = (values - weights.float()).double()
    return ((error @ h) * error).sum((1, 2))


def gains(
    weights: torch.Tensor, schema: WeightSchema, products: InputProducts, h: torch.Tensor
) -> tuple[QuantizedStack, torch.Tensor]:
    """A calibrated stack, and what its outputs lose by H, of what rounding to nearest loses."""
    done = quantize_by_outputs([weights], schema, "bfloat16", products)[0]
    rounded = quantize_stacks([weights], schema, "bfloat16")[0]
    shape = (weights.size(0), weights.size(1), weights.size(2))
    losses = [output_error(weights, decoded(one, schema, shape), h) for one in (done, rounded)]
    return done, losses[0] / losses[1]


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_lose_less_than_by_rounding(name: str) -> None:
    """Gate and up, the one ten times as large as the other."""
    schema, generator = resolve_schema(name), torch.Generator().manual_seed(1)
    stacks = [(size * torch.randn(2, 128, 256, generator=generator)).bfloat16() for size in (1, 10)]
    products = products_of([correlated(600, 256, seed) for seed in (2, 3)])
    quantized = quantize_by_outputs(stacks, schema, "bfloat16", products)
    for weights, rounded, done in zip(
        stacks, quantize_stacks(stacks, schema, "bfloat16"), quantized, strict=True
    ):
        forms = [{k: (t.shape, t.dtype) for k, t in one.tensors.items()} for one in (rounded, done)]
        assert forms[0] == forms[1]
        values = [decoded(one, schema, (2, 128, 256)) for one in (rounded, done)]
        losses = [output_error(weights, value, products.fit) for value in values]
        assert (losses[1] < (0.25 if name == "int1-g64" else 0.02) * losses[0]).all()
        error = (values[1] - weights.float()).double().square().sum((1, 2))
        assert torch.allclose(done.error, error, rtol=1e-6)


# Losses of outputs, of those of rounding: every step of the quantizer gains more than a hundredth of one of them.
LOSSES = {"int1-g64": 0.1770, "int2-g32-zp": 0.0685, "int3-g64": 0.0651, "int4-g32": 0.0741}


@pytest.mark.parametrize("name", LOSSES)
def test_no_step_is_left_out(name: str) -> None:
    """All columns are as large: neither start is better for all rows. Tokens that are held back count as others."""
    weights = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    products = products_of([correlated(600, 128, seed, spread=0) for seed in (2, 3)])
    h = products.fit + products.validation
    _, lost = gains(weights, resolve_schema(name), products, h)
    assert float(lost.mean()) < 1.01 * LOSSES[name]


def test_a_rotated_matrix_is_fitted_to_rotated_inputs() -> None:
    schema = WeightSchema("r", "uint3", weight_scale_group_size=64, hadamard_block_size=64)
    bare = WeightSchema("b", "uint3", weight_scale_group_size=64)
    weights = torch.randn(1, 64, 128, generator=torch.Generator().manual_seed(4))
    x = correlated(500, 128, 5)
    q = torch.from_numpy(np.kron(np.eye(2), functools.reduce(np.kron, [[[1, 1], [1, -1]]] * 6) / 8))
    turned = products_of([x.double() @ q])
    done = quantize_by_outputs([weights], schema, "bfloat16", products_of([x]))[0]
    expected, lost = gains(rotate(weights, 64), bare, turned, turned.fit)
    assert (done.tensors["weight"] == expected.tensors["weight"]).double().mean() > 0.99
    assert lost < 0.7


@pytest.mark.parametrize(
    ("num_tokens", "is_lawful"), [(1000, True), (1000, False), (20, True), (20, False)]
)
def test_weights_for_changed_inputs(num_tokens: int, is_lawful: bool) -> None:
    """Inputs x stand for inputs y: by a law that weights can undo, or by chance; measured on other tokens.

    Eight bits change hardly anything. The recorded error is that against the weights as they were.
    """
    generator = torch.Generator().manual_seed(15)
    x = correlated(num_tokens + 1000, 64, 16)
    noise = torch.randn(x.shape, generator=generator) * x.std(0)
    law = torch.eye(64) + 0.1 * torch.randn(64, 64, generator=generator)
    y = x @ law if is_lawful else x + 0.3 * noise
    weights = torch.randn(1, 32, 64, generator=generator)
    schema, sums, drifts = resolve_schema("int8"), [], []
    for part in (slice(0, num_tokens * 3 // 4), slice(num_tokens * 3 // 4, num_tokens)):
        seen = x[part].double()
        sums.append((seen.t() @ seen).unsqueeze(0))
        drifts.append(((y[part].double() - seen).t() @ seen).unsqueeze(0))
    done = quantize_by_outputs([weights], schema, "bfloat16", InputProducts(*sums, *drifts))[0]
    found = decoded(done, schema, (1, 32, 64))
    error = (found - weights).double().square().sum()
    assert done.error.item() == pytest.approx(error.item(), rel=1e-6)
    wanted = y[num_tokens:] @ weights[0].t()
    before, after = ((x[num_tokens:] @ w[0].t() - wanted).square().sum() for w in (weights, found))
    limit = (0.02 if num_tokens == 1000 else 1) if is_lawful else 1.02
    assert after < limit * before


def test_rows_make_good_each_others_errors() -> None:
    """Where the loss depends on a few directions of the output; the plain error of outputs grows then."""
    schema = resolve_schema("int3-g64")
    generator = torch.Generator().manual_seed(21)
    weights = torch.randn(2, 96, 128, generator=generator).bfloat16()
    products = products_of([correlated(600, 128, seed) for seed in (22, 23)])
    gradients = torch.randn(500, 8, generator=generator) @ torch.randn(8, 96, generator=generator)
    gradients = gradients + 0.3 * torch.randn(500, 96, generator=generator)
    g = gradients.t() @ gradients
    coupled = replace(products, gradients=OutputGradients(g))
    losses = []
    for given in (products, coupled):
        done = quantize_by_outputs([weights], schema, "bfloat16", given)[0]
        error = decoded(done, schema, (2, 96, 128)) - weights.double()
        lost = error @ products.fit @ error.mT
        losses.append(((lost * g).sum((1, 2)), lost.diagonal(dim1=1, dim2=2).sum(1)))
        reported = done.outputs
        assert reported is not None
        of_outputs = error @ (products.fit + products.validation)
        torch.testing.assert_close(reported[0], (of_outputs * error).sum((1, 2)), rtol=1e-3, atol=0)
    assert (losses[1][0] < 0.22 * losses[0][0]).all()  # .24 and .29 if the rows before alone count
    assert (losses[1][1] > losses[0][1]).all()


def test_gradients_that_say_nothing_change_nothing() -> None:
    """Errors of outputs count alike in all directions, and for rows that fill the kernel's tile."""
    schema = resolve_schema("mxfp4")
    weights = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(24))
    products = products_of([correlated(300, 64, 25)])
    alike = replace(products, gradients=OutputGradients(torch.eye(48)).resized(64))
    plain, coupled = (
        quantize_by_outputs([weights], schema, "bfloat16", given)[0] for given in (products, alike)
    )
    assert torch.equal(plain.tensors["weight"], coupled.tensors["weight"])


@pytest.mark.parametrize("depends", [False, True])
def test_products_by_chance_are_damped(depends: bool) -> None:
    """A few tokens of columns that do not depend on each other; many tokens of columns that do."""
    inputs = torch.randn(2, 80, 64, generator=torch.Generator().manual_seed(26)).double()
    if depends:
        inputs = torch.stack([correlated(40_000, 64, seed, spread=0).double() for seed in (27, 28)])
    seen, held = inputs.chunk(2, 1)
    products = InputProducts(seen.mT @ seen, held.mT @ held)
    added = (products.hessian.h - products.h).diagonal(dim1=1, dim2=2).mean(1)
    damping = added / products.h.diagonal(dim1=1, dim2=2).mean(1)
    assert (damping < 0.02 if depends else damping > 0.2).all()


def test_experts_do_not_depend_on_each_other() -> None:
    schema = resolve_schema("int4-g32-e4m3")
    weights = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(7)).bfloat16()
    products = products_of([correlated(300, 128, seed) for seed in (8, 9, 10)])
    again = quantize_by_outputs(
        [weights], schema, "bfloat16", InputProducts(products.validation, products.fit)
    )[0]
    done = quantize_by_outputs([weights], schema, "bfloat16", products)[0]
    assert all(
        torch.equal(done.tensors[name], again.tensors[name]) for name in ("weight", "weight_scale")
    )
    changed = weights.clone()
    changed[1] = 0
    other = quantize_by_outputs([changed], schema, "bfloat16", products)[0]
    for expert in (0, 2):
        assert torch.equal(other.tensors["weight"][expert], done.tensors["weight"][expert])
    assert not other.error[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_seen(bad: float) -> None:
    weights = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(11))
    weights[1, 3, 5] = bad
    done = quantize_by_outputs(
        [weights], resolve_schema("mxfp4"), "bfloat16", products_of([correlated(99, 64, 1)] * 2)
    )
    assert not done[0].error_sums()[1].is_finite
    assert done[0].error_sums()[0].is_finite


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_inputs_without_information(value: float) -> None:
    """Inputs that are all zero, or all equal: the result is not worse than rounding by its own measure."""
    weights = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(12))
    products = products_of([torch.full((40, 64), value)])
    h = products.fit + 1e-12 * torch.eye(64)
    done, lost = gains(weights, resolve_schema("int4-g32"), products, h)
    assert torch.isfinite(done.error).all()
    assert lost <= 1 + 1e-9 if value else lost < 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", ["mxfp4", "nvfp4", "int4-g32-e4m3", "int2-g32-zp", "int4-g128-fpzp", "fp8", "fp8-block"]
)
def test_a_gpu_loses_as_little(name: str) -> None:
    schema = resolve_schema(name)
    weights = torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(13)).bfloat16()
    products = products_of([correlated(600, 256, seed) for seed in (14, 15)])
    on_cpu = quantize_by_outputs([weights], schema, "bfloat16", products)[0]
    there = InputProducts(products.fit.cuda(), products.validation.cuda())
    on_gpu, again = (
        quantize_by_outputs([weights.cuda()], schema, "bfloat16", there)[0] for _ in range(2)
    )
    assert all(
        torch.equal(one.view(torch.uint8), again.tensors[key].view(torch.uint8))
        for key, one in on_gpu.tensors.items()
    )
    error = on_gpu.error.cpu()
    here = QuantizedStack(
        {key: one.cpu() for key, one in on_gpu.tensors.items()}, error, error, error
    )
    losses = [
        output_error(weights, decoded(one, schema, (2, 128, 256)), products.fit)
        for one in (on_cpu, here)
    ]
    assert (losses[1] < 1.02 * losses[0]).all()
