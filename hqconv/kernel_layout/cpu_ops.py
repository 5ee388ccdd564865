"""CPU twins of Humming's six weight ops and of its layout of scales: same arguments, same bits, on CPU tensors.

`meta` tensors are accepted too and give empty outputs of the right shape, so that layouts can be planned.
Errors of use are Humming's own concern here: like its ops, the twins assert.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import torch

from hqconv.cpu_loops import arithmetic, bit_fields
from hqconv.cpu_loops import repack as repack_loops
from hqconv.cpu_loops.encoders import encoder
from hqconv.cpu_loops.helper_threads import in_parts
from hqconv.cpu_loops.repack import repack_4bit_a16, repack_8bit_a16

Array = np.ndarray[Any, np.dtype[Any]]
NO_LIMIT = np.float32(0)


def as_bits(tensor: torch.Tensor) -> Array:
    """Bit patterns that the loops read: uint16 for bfloat16, uint32 for everything else (exact in float32)."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy()
    return tensor.float().contiguous().numpy().view(np.uint32)


def parse_dtype(name: str) -> tuple[int, int, int, int]:
    """(kind, bits, exponent bits, mantissa bits) of 'uint4', 'int8', 'float4e2m1'; asymmetry is not in a name."""
    if match := re.fullmatch(r"u?int(\d+)", name):
        return arithmetic.SYM_INT, int(match[1]), 0, 0
    match = re.fullmatch(r"float(\d+)e(\d+)m(\d+)", name)
    assert match, name
    bits, exponent, mantissa = (int(x) for x in match.groups())
    return (arithmetic.FLOAT if exponent else arithmetic.SIGN_MAGNITUDE), bits, exponent, mantissa


# Up to this group size Humming's kernel makes one pass over a float32 group, and nvcc then fuses the product
# `zero * -scale` into the subtraction that follows (seen on an H200 with CUDA 13.0; 16-bit sources never fuse).
FUSED_GROUP_SIZE = 128


@np.errstate(all="ignore")  # extreme ranges overflow, here as on the GPU
def group_scales(
    code: tuple[int, int, int, int],
    highest: Array,
    lowest: Array,
    *,
    e8m0: bool = False,
    negative: bool = True,
    fp_zero: bool = False,
    fused: bool = False,
) -> tuple[Array, Array, Array]:
    """Scale, lower bound and zero point per group from its range, as `quant_weight.cuh` computes them.

    `code` is (kind, bits, exponent bits, mantissa bits); ranges are float32. The lower bound (float64) is what is
    subtracted before encoding; `fused` keeps it unrounded. It and the zero point are 0 for symmetric kinds.
    Humming divides by double constants; a float32 quotient of exact float32 operands is the same number except
    for 1-bit integers, whose constants are not float32.
    """
    kind, bits, _, _ = code
    largest = arithmetic.largest_value(*code)
    widest = np.maximum(highest, np.abs(lowest))
    if kind == arithmetic.ASYM_INT:
        scale = (highest - lowest) / np.float32(largest * 2 + 1)
        zero = -lowest / scale
        if fp_zero:
            return scale, lowest.astype(np.float64), zero
        zero = np.rint(zero)
        bound: Array = zero.astype(np.float64) * -scale.astype(np.float64) if fused else zero * -scale
        return scale, bound.astype(np.float64), zero
    if kind == arithmetic.SYM_INT:
        scale = _symmetric_scale(widest, np.minimum(highest, np.abs(lowest)), bits, largest)
        if negative:
            scale = np.where(highest > np.abs(lowest), -scale, scale)
    else:
        scale = widest / np.float32(largest)
    if e8m0:
        scale = ((scale.view(np.uint32) + np.uint32(0x007FFFFF)) & np.uint32(0x7F800000)).view(np.float32)
    return scale, np.zeros(scale.shape), np.zeros_like(scale)


def _symmetric_scale(widest: Array, narrowest: Array, bits: int, largest: float) -> Array:
    wide: Array
    narrow: Array
    if bits == 1:
        wide = (widest.astype(np.float64) / (largest + 1.499)).astype(np.float32)
        narrow = (narrowest.astype(np.float64) / (largest + 0.499)).astype(np.float32)
    else:
        wide, narrow = widest / np.float32(largest + 1), narrowest / np.float32(largest)
    return np.maximum(wide, narrow)


def quant_weight(
    inputs: torch.Tensor,
    source_dtype_str: str,
    target_dtype_str: str,
    group_size: int,
    has_scale: bool,
    use_e8m0_scale: bool,
    has_zero_point: bool,
    is_fp_zero_point: bool,
    allow_negative_scale: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twin of `humming.ops.quant_weight`: int32 codes, float32 (or e8m0) scales, zero points, unpacked."""
    group_size = inputs.size(-1) if group_size <= 0 else group_size
    kind, bits, exponent, mantissa = parse_dtype(target_dtype_str)
    kind = arithmetic.ASYM_INT if kind == arithmetic.SYM_INT and has_zero_point else kind
    code = (kind, bits, exponent, mantissa)
    source = as_bits(inputs).reshape(-1, group_size)
    num_groups = source.shape[0]
    ones, zeros = np.ones((num_groups, 1), np.float32), np.zeros((num_groups, 1), np.float32)
    scale, lowest, zero = ones, zeros.astype(np.float64), zeros
    if has_scale:
        bounds = np.empty((2, num_groups, 1), np.float32)
        arithmetic.group_ranges(source, group_size, bounds[0], bounds[1])
        scale, lowest, zero = group_scales(
            code,
            *bounds,
            e8m0=use_e8m0_scale,
            negative=allow_negative_scale,
            fp_zero=is_fp_zero_point,
            fused=source_dtype_str == "float32" and group_size <= FUSED_GROUP_SIZE,
        )
    packed, sums = np.empty((num_groups, group_size * bits // 8), np.uint8), np.empty((2, num_groups))
    groups = (np.float32(1) / scale, lowest, scale, zero, ones[:, 0])
    encoder(code)(source, NO_LIMIT, groups, (packed, *sums, np.zeros(0, np.int64)))
    codes = torch.from_numpy(_unpack(packed, bits).view(np.int32)).reshape(inputs.shape)
    if not has_scale:
        return codes, torch.empty(0), torch.empty(0)
    shape = (*inputs.shape[:-1], inputs.size(-1) // group_size)
    scales, zero_point = torch.from_numpy(scale).reshape(shape), torch.empty(0)
    if use_e8m0_scale:
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
    if has_zero_point:
        zero_point = torch.from_numpy(zero).reshape(shape)
        zero_point = zero_point if is_fp_zero_point else zero_point.to(torch.int32)
    return codes, scales, zero_point


def _unpack(packed: Array, num_bits: int) -> Array:
    """uint32 codes of a [rows, bytes] array."""
    codes = np.empty((packed.shape[0], packed.shape[1] * 8 // num_bits), np.uint32)
    bit_fields.unpack_rows(packed, num_bits, codes)
    return codes


def pack_weight(inputs: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Twin of `humming.ops.pack_weight`: int32 codes [..., K] to int32 words [..., K * num_bits / 32]."""
    assert inputs.dtype == torch.int32
    assert inputs.size(-1) % 32 == 0
    shape = (*inputs.shape[:-1], inputs.size(-1) * num_bits // 32)
    if inputs.is_meta:
        return inputs.new_empty(shape)
    codes = (inputs.contiguous().reshape(-1, inputs.size(-1)).numpy() & ((1 << num_bits) - 1)).astype(np.uint8)
    packed = np.empty((codes.shape[0], shape[-1] * 4), np.uint8)
    bit_fields.pack_rows(codes, num_bits, packed)
    return torch.from_numpy(packed.view(np.int32)).reshape(shape)


def unpack_weight(inputs: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Twin of `humming.ops.unpack_weight`: the inverse of `pack_weight`."""
    assert inputs.dtype == torch.int32
    assert inputs.size(-1) % num_bits == 0
    shape = (*inputs.shape[:-1], inputs.size(-1) // num_bits * 32)
    if inputs.is_meta:
        return inputs.new_empty(shape)
    packed = inputs.contiguous().reshape(-1, inputs.size(-1)).numpy().view(np.uint8)
    return torch.from_numpy(_unpack(packed, num_bits).view(np.int32)).reshape(shape)


def dequant_weight(inputs: torch.Tensor, exponent_bits: int, mantissa_bits: int, is_signed: bool) -> torch.Tensor:
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
        zeros = zero_point.contiguous().reshape(len(words), -1, zero_point.size(-1)).numpy().view(np.uint32)
    is_plain = is_weight_packed and not use_native_dequant and (activation_bits, interleave_mode) == (16, 3)
    centre = should_preprocess_for_int2fp
    if is_plain and weight_bits == 4 and not centre:
        in_parts(lambda e: _repack_4bit(words[e], out[e]), len(words))
    elif is_plain and weight_bits == 8 and not should_preprocess_with_zp:
        in_parts(lambda e: _repack_8bit(words[e], centre, out[e]), len(words))
    else:
        group = (group_size_zp or shape_k) if should_preprocess_with_zp else 0
        transposed = use_packed_k_layout and not use_fused_e8m0_scale
        facts = (is_weight_packed, weight_bits, activation_bits, centre, group)
        order = (transposed, use_packed_k_layout, use_native_dequant, interleave_mode)
        in_parts(lambda e: _repack(words[e], zeros[e], (*facts, *order), out[e]), len(words))
    return torch.from_numpy(out.view(np.int32)).reshape(shape)


def _repack_4bit(words: Array, out: Array) -> None:
    for one, result in zip(words, out, strict=True):
        repack_4bit_a16(one.view(np.uint64), result.view(np.uint64))


def _repack_8bit(words: Array, centre: bool, out: Array) -> None:
    for one, result in zip(words, out, strict=True):
        repack_8bit_a16(one.view(np.uint64), centre, result.view(np.uint64))


def _repack(words: Array, zeros: Array, facts: tuple[int, ...], out: Array) -> None:
    for one, zero, result in zip(words, zeros, out, strict=True):
        repack_loops.repack(one, zero, *facts, result)


_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


_LEAST_SCALE_BYTES = 1 << 20  # of one helper thread's part: some 0.5 ms


def transpose_scales(scale: torch.Tensor, on_results: bool) -> torch.Tensor:
    """Twin of `humming.transform.transform_humming_weight_scale` without block scales, of a contiguous [..., N, G].

    on_results: its `to_apply_on_c`. One pass instead of a transposition and a permutation by torch.
    """
    shape_n, num_groups = scale.shape[-2:]
    order = (np.arange(32).reshape(4, 4, 2).swapaxes(0, 1) if on_results else np.arange(64).reshape(8, 8).T).flatten()
    assert shape_n % order.size == 0
    # Flat first: of a single column torch calls any stride contiguous, and then refuses another dtype.
    bits = scale.contiguous().flatten().view(torch.uint8).numpy().view(_UNSIGNED[scale.element_size()])
    source = bits.reshape(-1, shape_n, num_groups)
    out = np.empty((len(source), num_groups, shape_n), source.dtype)
    least = -(-_LEAST_SCALE_BYTES // max(1, source[:1].nbytes))
    in_parts(lambda e: repack_loops.transpose_scales(source[e], order, out[e]), len(source), least)
    values = torch.from_numpy(out.reshape(-1).view(np.uint8)).view(scale.dtype)
    return values.view(*scale.shape[:-2], num_groups, shape_n)


_shift_table = functools.cache(repack_loops.shift_table)


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
    repack_loops.shift_mxfp4(words, np.repeat(shifts, repeat), _shift_table(), out)
    result = torch.from_numpy(out.view(np.int32)).reshape(inputs.shape)
    return inputs.copy_(result) if inplace else result
