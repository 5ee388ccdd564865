"""Packed tensors at random, their kernel form, and what the inverse of the kernel layout must give back of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from hqconv.artifact.expert_reader import floats, to_matrix
from hqconv.humming_layout.gemm_forms import planned_packed_form
from hqconv.layout_decoder.layout_form import read_config
from hqconv.layout_decoder.numbers import PADDED_E5M0
from hqconv.layout_decoder.read import DecodedStack, e8m0_exponents
from hqconv.layout_decoder.stacks import MatrixStack, read_stack
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.weight_schema import WeightSchema


def random_packed(
    n: int, k: int, schema: WeightSchema, param_dtype: str, num_experts: int, seed: int
) -> dict[str, torch.Tensor]:
    """Every code, scales of every size that float16 holds beside a second one, zero points, biases."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, spec in planned_packed_form(n, k, schema, param_dtype, True).items():
        shape = (num_experts,) if spec.shape == (1,) else (num_experts, *spec.shape)
        if spec.dtype == "I32":
            words = random.integers(-(1 << 31), 1 << 31, shape)
            tensors[name] = torch.from_numpy(words.astype(np.int32))
        elif spec.dtype in ("F8_E8M0", "F8_E4M3", "F8_E5M2", "U8"):
            low, high = (108, 138) if spec.dtype == "F8_E8M0" else (1, 120)
            data = torch.from_numpy(random.integers(low, high, shape, np.uint8))
            tensors[name] = data.view(torch_dtype(spec.dtype))
        else:
            values = torch.from_numpy(random.standard_normal(shape)).float()
            values = values if name in ("bias", "zero_point") else values.abs() + 0.01
            tensors[name] = values.to(torch_dtype(spec.dtype))
    return tensors


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Bit patterns; written apart from the inverse's own."""
    tensor = tensor.contiguous()
    flat = tensor.flatten().view(torch.uint8).numpy()
    return flat.view(f"u{tensor.element_size()}").reshape(tensor.shape)


def field_codes(words: np.ndarray, num_bits: int) -> np.ndarray:
    """Little-endian bit fields along the last dimension, any width."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    bits = bits.reshape(*words.shape[:-1], -1, num_bits)
    return (bits << np.arange(num_bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)


def flipped(kernel: dict[str, np.ndarray], name: str, bit: int) -> dict[str, np.ndarray]:
    """The tensors with one bit of one of them changed."""
    arrays = {key: array.copy() for key, array in kernel.items()}
    arrays[name].reshape(-1).view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
    return arrays


def stack_of(config: dict[str, Any], kernel: dict[str, np.ndarray], flags: Any = None) -> MatrixStack:
    """The inverse for stacks, of raw bits."""
    signed = {
        key: array.view(f"i{array.itemsize}") if array.itemsize > 1 else array
        for key, array in kernel.items()
    }
    return read_stack(read_config(config, flags or {}), {k: torch.from_numpy(v) for k, v in signed.items()})


def one_of(unpacked: DecodedStack, expert: int) -> DecodedStack:
    """One expert's part."""
    arrays = ("codes", "weight_scale", "zero_point", "weight_scale_2", "bias")
    parts = {
        key: array[expert : expert + 1] for key in arrays if (array := getattr(unpacked, key)) is not None
    }
    return dataclasses.replace(unpacked, **parts)


def values_of(unpacked: DecodedStack, schema: WeightSchema, param_dtype: str) -> np.ndarray:
    """The decoded weights [E, N, K] of a stack."""
    each = [to_matrix(one_of(unpacked, e)) for e in range(len(unpacked.codes))]
    return np.stack([floats(matrix, schema, param_dtype) for matrix in each])


def assert_is_packed(unpacked: DecodedStack, packed: dict[str, torch.Tensor], schema: WeightSchema) -> None:
    """Every array equals the packed tensor it came from, and nothing was left over."""
    assert unpacked.problems == ()
    assert np.array_equal(unpacked.codes, field_codes(packed["weight"].numpy(), schema.num_bits))
    if unpacked.scale_dtype == PADDED_E5M0:
        original, is_flushed = e8m0_exponents(unpacked)
        expected = raw(packed["weight_scale"])
        assert np.array_equal(original[~is_flushed], expected[~is_flushed])
        assert (expected <= original)[is_flushed].all()
    else:
        assert np.array_equal(unpacked.weight_scale, raw(packed["weight_scale"]))
        assert (unpacked.weight_scale_2 is None) == ("weight_scale_2" not in packed)
        if unpacked.weight_scale_2 is not None:
            assert np.array_equal(unpacked.weight_scale_2, raw(packed["weight_scale_2"]))
    assert (unpacked.zero_point is None) == ("zero_point" not in packed)
    if unpacked.zero_point is not None:
        expected = raw(packed["zero_point"])
        if not schema.is_fp_zero_point:
            expected = field_codes(expected.swapaxes(-1, -2), schema.num_bits).swapaxes(-1, -2)
        assert np.array_equal(unpacked.zero_point, expected)
    assert (unpacked.bias is None) == ("bias" not in packed)
    if unpacked.bias is not None:
        assert np.array_equal(unpacked.bias, raw(packed["bias"]))


def assert_is_twin(stack: MatrixStack, unpacked: DecodedStack) -> None:
    """Every expert's matrix, bit for bit."""
    for e in range(len(unpacked.codes)):
        matrix = to_matrix(one_of(unpacked, e))
        assert matrix.scale_dtype == stack.scale_dtype
        for field in ("codes", "scale", "scale_value", "zero_point", "scale_2", "bias", "flushed"):
            ours, theirs = getattr(stack, field), getattr(matrix, field)
            assert (ours is None) == (theirs is None), field
            if ours is not None:
                array = ours[e].contiguous().numpy()
                assert array.shape == theirs.shape, field
                assert array.tobytes() == theirs.tobytes(), field
