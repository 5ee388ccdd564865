"""Rotated columns against the definition, and against Humming where it rotates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hqconv.humming_ops.runtime import humming
from hqconv.layout_decoder.decode import unrotated
from hqconv.quantization.quantized import rotate
from hqconv.schemas.options import QUANTIZERS
from hqconv.schemas.weight_schema import ROTATIONS, WeightSchema, resolve_schema
from tests.make.matrices import hard_matrix
from tests.make.quantized import quantize
from tests.make.tensors import assert_same, raw

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def hadamard(block: int) -> np.ndarray:
    """Sylvester's doubling."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(block)


def one_by_one(row: np.ndarray, block: int) -> np.ndarray:
    """Humming's kernel in scalars: `hadamard.cuh`, stage by stage, each step rounded to float32."""
    row = row.astype(np.float32).copy()
    for begin in range(0, len(row), block):
        apart = 1
        while apart < block:
            for low in range(block):
                if not low & apart:
                    left, right = row[begin + low], row[begin + low + apart]
                    row[begin + low], row[begin + low + apart] = left + right, left - right
            apart *= 2
    return row * np.float32(1 / np.sqrt(np.float64(block)))


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors whose bytes are not equal."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if raw(ours[name].cpu()) != raw(theirs[name].cpu())]


def rotated_schema(name: str, block: int) -> WeightSchema:
    return replace(resolve_schema(name), name=f"{name}-rotated", hadamard_block_size=block)


@pytest.mark.parametrize("block", ROTATIONS)
def test_it_is_the_hadamard_matrix_and_its_own_inverse(block: int) -> None:
    values = torch.randn(3, 5, 1024, generator=torch.Generator().manual_seed(block))
    found = rotate(values, block)
    expected = values.double().numpy().reshape(-1, block) @ hadamard(block)
    np.testing.assert_allclose(found.numpy().reshape(-1, block), expected, rtol=0, atol=3e-6)
    np.testing.assert_allclose(unrotated(found, block).numpy(), values.numpy(), rtol=0, atol=3e-6)
    np.testing.assert_allclose(
        unrotated(values, block).numpy().reshape(-1, block), expected, atol=1e-6
    )
    exact = values.double()
    columns = torch.cat([exact, exact], -1)[..., : exact.size(-1)]  # of a TP rank: not contiguous
    assert torch.equal(unrotated(columns, block), unrotated(exact, block))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [16, 128, 512])
def test_every_step_is_the_kernels(block: int, dtype: torch.dtype) -> None:
    matrix = hard_matrix(64, 1024, dtype, block)
    matrix[torch.isinf(matrix)] = 3
    found = rotate(matrix, block)
    assert found.dtype == dtype
    for row, values in zip(found[::7], matrix[::7], strict=True):
        assert_same(
            row, torch.from_numpy(one_by_one(values.float().numpy(), block)).to(dtype), "a row"
        )


def test_bits_depend_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how much is rotated at once, what lies beside it, or how it lies; the source stays."""
    matrix = torch.randn(40, 1024, generator=torch.Generator().manual_seed(1))
    before, whole = matrix.clone(), rotate(matrix, 128)
    monkeypatch.setattr("hqconv.quantization.quantized._CPU_ROTATED", 3 * 128)
    assert_same(rotate(matrix, 128), whole, "a few at a time")
    assert_same(rotate(matrix[7:8], 128), whole[7:8], "one row")
    assert_same(rotate(matrix.t().contiguous().t(), 128), whole, "columns first")
    assert_same(matrix, before, "the source")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["mxfp4", "nvfp4", "int4-g64-zp", "fp8-tensor", "fp8-block", "int8"]
)
def test_quantizing_is_of_the_rotated_matrix(name: str, source: torch.dtype) -> None:
    """As `quant_tensor`, which rotates in the matrix's dtype and then quantizes."""
    pair = [hard_matrix(128, 384, source, seed).clamp(-1e4, 1e4) for seed in (1, 2)]
    for quantizer in QUANTIZERS:
        found = quantize(pair, rotated_schema(name, 128), "bfloat16", quantizer=quantizer)
        rotated = [rotate(matrix, 128) for matrix in pair]
        expected = quantize(rotated, resolve_schema(name), "bfloat16", quantizer=quantizer)
        plain = quantize(pair, resolve_schema(name), "bfloat16", quantizer=quantizer)
        for ours, theirs, unlike in zip(found, expected, plain, strict=True):
            assert not differences(ours.tensors, theirs.tensors)
            assert ours.error_sums == theirs.error_sums
            assert differences(ours.tensors, unlike.tensors)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", ROTATIONS)
def test_it_is_hummings_on_the_gpu(block: int, dtype: torch.dtype) -> None:
    matrix = hard_matrix(256, 1024, dtype, block).clamp(-1e4, 1e4)
    theirs = humming().ops.process_input(matrix.cuda(), hadamard_block_size=block)[0]
    assert_same(rotate(matrix, block), theirs.cpu(), "the CPU's")
    assert_same(rotate(matrix.cuda(), block).cpu(), theirs.cpu(), "the GPU's")
