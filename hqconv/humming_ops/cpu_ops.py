"""CPU twins of Humming's weight ops: same arguments, same bits, on CPU tensors.

Not of `quant_weight`: on the CPU `quantization` has loops of its own.

`meta` tensors are accepted too and give empty outputs of the right shape, so that layouts can be planned.
Errors of use are Humming's own concern here: like its ops, the twins assert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hqconv.cpu_loops import codes as code_loops
from hqconv.cpu_loops.helper_threads import in_parts
from hqconv.humming_ops.repack import (
    repack,
    repack_4bit_a16,
    repack_8bit_a16,
    shift_mxfp4,
    shift_table,
)

Array = np.ndarray[Any, np.dtype[Any]]


def pack_weight(inputs: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Twin of `humming.ops.pack_weight`: int32 codes [..., K] to int32 words [..., K * num_bits / 32]."""
    assert inputs.dtype == torch.int32
    assert inputs.size(-1) % 32 == 0
    shape = (*inputs.shape[:-1], inputs.size(-1) * num_bits // 32)
    if inputs.is_meta:
        return inputs.new_empty(shape)
    codes = (
        inputs.contiguous().reshape(-1, inputs.size(-1)).numpy() & ((1 << num_bits) - 1)
    ).astype(np.uint8)
    packed = np.empty((codes.shape[0], shape[-1] * 4), np.uint8)
    code_loops.pack_rows(codes, num_bits, packed)
    return torch.from_numpy(packed.view(np.int32)).reshape(shape)


def unpack_weight(inputs: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Twin of `humming.ops.unpack_weight`: the inverse of `pack_weight`."""
    assert inputs.dtype == torch.int32
    assert inputs.size(-1) % num_bits == 0
    shape = (*inputs.shape[:-1], inputs.size(-1) // num_bits * 32)
    if inputs.is_meta:
        return inputs.new_empty(shape)
    packed = inputs.contiguous().reshape(-1, inputs.size(-1)).numpy().view(np.uint8)
    codes = np.empty((len(packed), shape[-1]), np.int32)
    code_loops.unpack_rows(packed, num_bits, codes)
    return torch.from_numpy(codes).reshape(shape)


def dequant_weight(
    inputs: torch.Tensor, exponent_bits: int, mantissa_bits: int, is_signed: bool
) -> torch.Tensor:
    """Twin of `humming.ops.dequant_weight`: unpacked small-float codes to their float32 values."""
    assert inputs.dtype == torch.int32
    if inputs.is_meta:
        return inputs.new_empty(inputs.shape, dtype=torch.float32)
    num_bits = exponent_bits + mantissa_bits
    magnitude, sign = inputs & ((1 << num_bits) - 1), inputs & ((1 << num_bits) if is_signed else 0)
    if exponent_bits == 0:
        value = magnitude.float()
    else:
        factor = 2.0 ** (128 - 2 ** (exponent_bits - 1))
        value = (magnitude << (23 - mantissa_bits)).view(torch.float32) * factor
    return torch.where(sign != 0, -value, value)


def repack_weight(
    inputs: torch.Tensor,
    weight_bits: int,
    activation_bits: int,
    is_weight_packed: bool,
    should_preprocess_for_int2fp: bool = False,
    should_preprocess_with_zp: bool = False,
    use_fused_e8m0_scale: bool = False,
    interleave_mode: int = 3,
    group_size_zp: int = 0,
    zero_point: torch.Tensor | None = None,
    use_packed_k_layout: bool = False,
    use_native_dequant: bool = False,
) -> torch.Tensor:
    """Twin of `humming.ops.repack_weight`: codes [(E,) N, K] into the kernel's own order."""
    assert inputs.dtype == torch.int32
    shape_n = inputs.size(-2)
    shape_k = inputs.size(-1) * 32 // weight_bits if is_weight_packed else inputs.size(-1)
    assert (shape_n % 64, shape_k % 64) == (0, 0)
    k_per_row = 64 if use_packed_k_layout else 256 // activation_bits
    shape = (*inputs.shape[:-2], shape_k // k_per_row, shape_n * k_per_row * weight_bits // 32)
    if inputs.is_meta:
        return inputs.new_empty(shape)
    words = inputs.contiguous().reshape(-1, *inputs.shape[-2:]).numpy().view(np.uint32)
    out = np.empty((words.shape[0], shape[-2] * shape[-1]), np.uint32)
    zeros = np.empty((words.shape[0], 0, 0), np.uint32)
    if should_preprocess_with_zp:
        assert zero_point is not None
        zeros = (
            zero_point.contiguous()
            .reshape(len(words), -1, zero_point.size(-1))
            .numpy()
            .view(np.uint32)
        )
    is_plain = (
        is_weight_packed
        and not use_native_dequant
        and (activation_bits, interleave_mode) == (16, 3)
    )
    centre = should_preprocess_for_int2fp
    if is_plain and weight_bits == 4 and not centre:
        _each(repack_4bit_a16, words.view(np.uint64), out.view(np.uint64))
    elif is_plain and weight_bits == 8 and not should_preprocess_with_zp:
        _each(
            lambda one, tiles: repack_8bit_a16(one, centre, tiles),
            words.view(np.uint64),
            out.view(np.uint64),
        )
    else:
        group = (group_size_zp or shape_k) if should_preprocess_with_zp else 0
        transposed = use_packed_k_layout and not use_fused_e8m0_scale
        facts = (is_weight_packed, weight_bits, activation_bits, centre, group)
        order = (transposed, use_packed_k_layout, use_native_dequant, interleave_mode)
        _each(lambda one, zero, tiles: repack(one, zero, *facts, *order, tiles), words, zeros, out)
    return torch.from_numpy(out.view(np.int32)).reshape(shape)


def _each(loop: Callable[..., None], *stacks: Array) -> None:
    """Run a loop over the experts of arrays, in helper threads."""

    def run(part: slice) -> None:
        for arguments in zip(*(stack[part] for stack in stacks), strict=True):
            loop(*arguments)

    in_parts(run, len(stacks[0]))


_shift_table = functools.cache(shift_table)


def process_mxfp4_w4a8_weight(
    inputs: torch.Tensor, delta_scale_offsets: torch.Tensor, inplace: bool = False
) -> torch.Tensor:
    """Twin of `humming.ops.process_mxfp4_w4a8_weight`: divide packed e2m1 codes by 2**offset per group."""
    if inputs.is_meta:
        return inputs if inplace else torch.empty_like(inputs)
    words = inputs.contiguous().reshape(-1).numpy().view(np.uint32)
    shifts = delta_scale_offsets.contiguous().reshape(-1).numpy()
    repeat = words.size // shifts.size // 4
    out = np.empty_like(words)
    shift_mxfp4(words, np.repeat(shifts, repeat), _shift_table(), out)
    result = torch.from_numpy(out.view(np.int32)).reshape(inputs.shape)
    return inputs.copy_(result) if inplace else result
