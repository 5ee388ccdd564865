"""Packed tensors at random, their kernel form, and what the inverse of the kernel layout must give back of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from hqconv.kernel_layout.transform import packed_form
from hqconv.layout_decoder import codes, decode
from hqconv.layout_decoder.decode import (
    DecodedStack,
    bits_of_arrays,
    decode_layout,
    decoded_weights,
)
from hqconv.layout_decoder.layout_form import read_config
from hqconv.schemas.tensors import torch_dtype
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.verification import figures


def random_packed(
    n: int, k: int, schema: WeightSchema, param_dtype: str, num_experts: int, seed: int
) -> dict[str, torch.Tensor]:
    """Every code, scales of every size that float16 holds beside a second one, zero points, biases."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, spec in packed_form(n, k, schema, param_dtype, True).items():
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
    flat = tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
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


def decoded(
    config: dict[str, Any],
    kernel: dict[str, np.ndarray],
    flags: Any = None,
    *,
    has_row_scale: bool = False,
) -> DecodedStack:
    """The inverse of the kernel layout, of raw bits."""
    form = read_config(config, flags or {}, has_row_scale=has_row_scale)
    return decode_layout(form, bits_of_arrays(kernel))


@contextmanager
def array_operations() -> Iterator[None]:
    """Run on the CPU the array operations that decode on a GPU, instead of compiled loops."""
    with ExitStack() as stack:
        for module in (codes, decode, figures):
            stack.enter_context(mock.patch.object(module, "has_loops", return_value=False))
        yield


def values_of(stack: DecodedStack, schema: WeightSchema, param_dtype: str) -> np.ndarray:
    """The decoded weights [E, N, K] of a stack; loops and array operations agree."""
    found = decoded_weights(stack, schema, param_dtype)
    with array_operations():
        again = decoded_weights(stack, schema, param_dtype)
    assert found.numpy().tobytes() == again.numpy().tobytes()
    return found.numpy()


def problems(stack: DecodedStack) -> list[str]:
    """One line for every fault and expert."""
    return [
        f"{fault.tensor}: expert {expert}: {fault.describe(expert)[1]}"
        for fault in stack.faults
        for expert in fault.experts().nonzero().flatten().tolist()
    ]


def assert_is_packed(
    stack: DecodedStack, packed: dict[str, torch.Tensor], schema: WeightSchema
) -> None:
    """Every array equals the packed tensor it came from, and nothing was left over."""
    assert problems(stack) == []
    assert np.array_equal(stack.codes, field_codes(packed["weight"].numpy(), schema.num_bits))
    expected = raw(packed["weight_scale"])
    if stack.flushed is not None:
        original, is_flushed = stack.scale.numpy(), stack.flushed.numpy()
        assert np.array_equal(original[~is_flushed], expected[~is_flushed])
        assert (expected <= original)[is_flushed].all()
    else:
        assert np.array_equal(raw(stack.scale).reshape(expected.shape), expected)
        assert (stack.scale_2 is None) == ("weight_scale_2" not in packed)
        if stack.scale_2 is not None:
            second = raw(packed["weight_scale_2"])
            assert np.array_equal(raw(stack.scale_2).reshape(second.shape), second)
    assert (stack.zero_point is None) == ("zero_point" not in packed)
    if stack.zero_point is not None:
        expected = raw(packed["zero_point"])
        if not schema.is_fp_zero_point:
            expected = field_codes(expected.swapaxes(-1, -2), schema.num_bits).swapaxes(-1, -2)
        assert np.array_equal(raw(stack.zero_point), expected)
    assert (stack.bias is None) == ("bias" not in packed)
    if stack.bias is not None:
        assert np.array_equal(raw(stack.bias), raw(packed["bias"]))


def assert_same_stack(ours: DecodedStack, theirs: DecodedStack) -> None:
    """Equal bit for bit, and the same faults."""
    assert ours.scale_dtype == theirs.scale_dtype
    assert problems(ours) == problems(theirs)
    for field in ("codes", "scale", "scale_value", "zero_point", "scale_2", "bias", "flushed"):
        left, right = getattr(ours, field), getattr(theirs, field)
        assert (left is None) == (right is None), field
        if left is not None:
            assert (left.shape, left.dtype) == (right.shape, right.dtype), field
            assert left.numpy().tobytes() == right.numpy().tobytes(), field


def decoded_both_ways(
    config: dict[str, Any],
    kernel: dict[str, np.ndarray],
    flags: Any = None,
    *,
    has_row_scale: bool = False,
) -> DecodedStack:
    """`decoded`, by compiled loops, once array operations have given the same."""
    found = decoded(config, kernel, flags, has_row_scale=has_row_scale)
    with array_operations():
        assert_same_stack(decoded(config, kernel, flags, has_row_scale=has_row_scale), found)
    return found
