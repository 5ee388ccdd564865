"""The inverse of the kernel layout: codes, scales and zero points back from a rank file's tensors.

Independent of the forward path on purpose: this follows how Humming's GEMM kernels *read* the tensors
(`include/humming/memory/s2r_loader`, `datatype/dequant*.cuh`, `mma/wgmma.cuh`), shares no code with
`hqconv.backends`, and needs neither Humming nor torch. So `verify` can trust it, on any machine.

Shape legend: E experts, N rows, K columns, G groups along K, r row of an 8-row chunk, c chunk of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hqconv.artifact.unlayout import loops
from hqconv.artifact.unlayout.form import (
    PADDED_E5M0,
    Array,
    KernelTensors,
    checked_bits,
    read_config,
    to_float32,
)
from hqconv.errors import VerificationError


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A stack of experts of one GEMM in logical order, padding removed; floats as unsigned bit patterns.

    codes: uint8 [E, N, K], Humming's codes (integers offset binary); a view where K or N was padded.
    weight_scale: [E, N, G] (group), [E, N, 1] (channel), [E, N/bn, K/bk] (block) or [E] (tensor).
    zero_point: uint8 codes or 16-bit float patterns, [E, N, G], G = 1 for channel scales.
    weight_scale_2: float32 patterns [E], or 16-bit ones [E, N]. bias: 16-bit patterns [E, N].
    scale_dtype: safetensors dtype of `weight_scale` (`U8` is e5m3), or `PADDED_E5M0`, see `e8m0_exponents`.
    param_dtype: safetensors dtype of the 16-bit patterns. problems: one line per tensor and expert.
    """

    codes: Array
    weight_scale: Array
    zero_point: Array | None
    weight_scale_2: Array | None
    bias: Array | None
    scale_dtype: str
    param_dtype: str
    problems: tuple[str, ...]


def unlayout(
    config: Mapping[str, Any], tensors: Mapping[str, Array], flags: Mapping[str, Any] | None = None
) -> Unpacked:
    """Read kernel tensors [E, …] as the GEMM kernels do and return what they mean.

    `config`: Humming's LayerConfig as JSON words; its `num_experts` is not looked at, so that any slice of a
    rank's experts may be passed. `tensors`: `weight`, `weight_scale`, … as raw bits, unsigned integers as wide as the
    dtype. `flags`: the manifest's layout flags.

    Raises RequestError for layouts it does not know yet (8-bit activations, native dequantization), and
    VerificationError where config and tensors contradict each other. Values that padding or unused bits
    should not have are listed in `problems`.
    """
    form = read_config(config, flags or {})
    bits = checked_bits(form, tensors)
    problems: list[str] = []
    zero, zero_padded = _unpack_zero_point(form, bits.get("zero_point"), problems)
    codes = _unpack_codes(form, bits["weight"], zero_padded)
    _check_padding("weight", codes, form.shape, 0, problems)
    rows = form.shape[0]
    channels = {}
    for name in ("bias", "weight_scale_2"):
        if name in bits and bits[name].ndim == 2:
            channels[name] = _unpermute_channels(bits[name])
            _check_padding(name, channels[name][:, :, None], (rows, 1), 0, problems)
            channels[name] = channels[name][:, :rows]
    return Unpacked(
        codes=codes[:, :rows, : form.shape[1]],
        weight_scale=_unpack_scale(form, bits["weight_scale"], problems),
        zero_point=zero,
        weight_scale_2=channels.get("weight_scale_2", bits.get("weight_scale_2")),
        bias=channels.get("bias"),
        scale_dtype=form.scale_dtype,
        param_dtype=form.param_dtype,
        problems=tuple(problems),
    )


# --- from stored to logical order --------------------------------------------------------------------------


def _unpack_codes(form: KernelTensors, words: Array, zero: Array | None) -> Array:
    num_experts, (n, k) = words.shape[0], form.padded_shape
    codes = np.empty((num_experts, n, k), np.uint8)
    loops.unpack_pairs(words, form.num_bits, loops.fragment_pieces(form.num_bits), codes.view(np.uint16))
    if form.is_centred:
        if zero is None:
            zero = np.full((num_experts, n, 1), 1 << (form.num_bits - 1), np.uint8)
        loops.restore_centred(codes, zero, k // zero.shape[2], (1 << form.num_bits) - 1)
    return codes


def _unpack_scale(form: KernelTensors, stored: Array, problems: list[str]) -> Array:
    if form.scale_type == "tensor":
        return stored
    if form.scale_type == "block":
        scale = stored.transpose(0, 2, 1)
    elif form.scale_type == "channel":
        scale = _unpermute_channels(stored).transpose(0, 2, 1)
    else:
        scale = _unpermute_groups(stored)
    rows, groups = form.scale_shape(padded=False)
    _check_padding("weight_scale", scale, (rows, groups), form.padding_scale, problems)
    scale = np.ascontiguousarray(scale[:, :rows, :groups])
    if form.scale_dtype == PADDED_E5M0:
        unused = np.where((scale & 7 != 0) | (scale >> 3 == 31), scale, 0)
        _report("weight_scale", "not a float16 exponent over three zero bits", unused, (0, 0), problems)
    return scale


def _unpack_zero_point(
    form: KernelTensors, stored: Array | None, problems: list[str]
) -> tuple[Array | None, Array | None]:
    """The zero points [E, N, G] without and with padding; the second only for integers."""
    if stored is None:
        return None, None
    if form.zero_kind == "int":
        stored = _unpack_zero_codes(stored, 4 if form.num_bits <= 4 else 8)
    zero = _unpermute_groups(stored)
    rows, groups = form.shape[0], form.scale_shape(padded=False)[1]
    _check_padding("zero_point", zero, (rows, groups), 0, problems)
    inside = np.ascontiguousarray(zero[:, :rows, :groups])
    if form.zero_kind == "float":
        return inside, None
    # The kernels mask the bits above a zero point's width (`dequant_single_zero_point`).
    mask = np.uint8((1 << form.num_bits) - 1)
    _report("zero_point", f"bits set above {form.num_bits}", inside & ~mask, (0, 0), problems)
    return inside & mask, zero & mask


def _check_padding(
    name: str, values: Array, inner: tuple[int, int], expected: int, problems: list[str]
) -> None:
    """Report, per expert, values [E, N, G] outside `inner` = (N, G) that differ from `expected`."""
    rows, groups = inner
    for first, padding in (((rows, 0), values[:, rows:]), ((0, groups), values[:, :rows, groups:])):
        if padding.size:
            wrong = padding ^ padding.dtype.type(expected)
            _report(name, f"padding other than {expected:#x}", wrong, first, problems)


def _report(name: str, what: str, wrong: Array, first: tuple[int, int], problems: list[str]) -> None:
    """One line for each expert of `wrong` [E, N, G] that is not all zero; `first` is where `wrong` starts."""
    for expert in np.flatnonzero(wrong.any(axis=(1, 2))):
        places = np.argwhere(wrong[expert])
        n, k = places[0] + first
        problems.append(f"{name}: {what}: expert {expert}, first at [{n}, {k}], {len(places)} in all")


def _unpermute_groups(stored_EGN: Array) -> Array:
    """Group scales and zero points in logical order [E, N, G].

    A lane reads 8 values at once, for row lane / 4 of the eight 8-row chunks of its 64 rows
    (`s2r_loader/loader_bs.cuh`, `load_layout1`; `loader_bzp.cuh`).
    """
    num_experts, groups, rows = stored_EGN.shape
    blocks = stored_EGN.reshape(num_experts, groups, rows // 64, 8, 8)  # …, block, r, c
    return blocks.transpose(0, 2, 4, 3, 1).reshape(num_experts, rows, groups)


def _unpermute_channels(stored: Array) -> Array:
    """Per-row values [E, …, N] that scale the accumulator, in logical order.

    A lane reads 8 values at once: rows 2 * (lane / 8) and the next of the four 8-row chunks of 32 rows
    (`loader_bs.cuh`, `load_layout2`; `loader_bias.cuh`).
    """
    blocks = stored.reshape(*stored.shape[:-1], -1, 4, 4, 2)  # …, block, row pair, c, row of the pair
    return blocks.swapaxes(-2, -3).reshape(stored.shape)


def _unpack_zero_codes(stored_EGW: Array, num_bits: int) -> Array:
    """Zero points uint8 [E, G, N] out of words of 4- or 8-bit fields, lowest first."""
    stored = stored_EGW.view(np.uint8)
    if num_bits == 8:
        return stored
    return np.stack((stored & 15, stored >> 4), axis=-1).reshape(*stored.shape[:2], -1)


# --- float16's e8m0 scales ----------------------------------------------------------------------------------


def e8m0_exponents(unpacked: Unpacked) -> tuple[Array, NDArray[np.bool_]]:
    """The e8m0 bytes [E, N, G] that float16 scales were made from, and where they cannot be known.

    The forward path subtracts log2(weight_scale_2) from an expert's exponents and rebiases them for float16;
    those that fall below 2^-14 are flushed. Where the mask is set, the original byte was at most the one
    returned, and the kernels take the scale for zero. Largest exponents are never lost.
    Raises VerificationError where a second scale is not a power of two.
    """
    shift = np.zeros(unpacked.weight_scale.shape[0], np.int64)
    if unpacked.weight_scale_2 is not None:
        fraction, shift = np.frexp(to_float32(unpacked.weight_scale_2, "F32"))
        shift = shift.astype(np.int64) - 1
        if (fraction != 0.5).any():
            raise VerificationError(
                "An e8m0 scale's second scale is not a power of two.",
                where=f"weight_scale_2, expert {np.flatnonzero(fraction != 0.5)[0]}",
            )
    exponent = unpacked.weight_scale.astype(np.int64) >> 3
    original = np.clip(exponent + (127 - 15) + shift[:, None, None], 0, 255).astype(np.uint8)
    return original, exponent == 0
