"""Scales, zero points and biases of a kernel back in rows, and what their padding must hold.

Part of `hqconv.layout_decoder.read`, and like it independent of Humming and of `hqconv.backends`.
"""

from __future__ import annotations

import numpy as np

from hqconv.layout_decoder.layout_form import LayoutForm
from hqconv.layout_decoder.numbers import FUSED_FP8, PADDED_E5M0, Array, to_float32

_ONE = 127  # 1.0 in e8m0, which fills up words of scales
LARGEST_FUSED = {True: 12, False: 3}  # by whether it is fp8's; the least is 1 and 0


def read_scale(form: LayoutForm, stored: Array, second: Array | None, problems: list[str]) -> Array:
    """Scales [E, N, G] without padding, or [E] of a tensor; `second` are fused layouts' second scales."""
    if form.scale_type == "tensor":
        return stored
    rows, groups = form.scale_shape(padded=False)
    scale = _in_rows(form, stored, problems)
    if form.is_fused:
        check_padding("weight_scale", scale, (rows, groups), _fused_padding(form, scale, second), problems)
    else:
        check_padding("weight_scale", scale, (rows, groups), form.padding_scale, problems)
    scale = np.ascontiguousarray(scale[:, :rows, :groups])
    if form.scale_dtype == PADDED_E5M0:
        unused = np.where((scale & 7 != 0) | (scale >> 3 == 31), scale, 0)
        report("weight_scale", "not a float16 exponent over three zero bits", unused, (0, 0), problems)
    elif form.is_fused:
        is_fp8 = form.scale_dtype == FUSED_FP8
        largest = LARGEST_FUSED[is_fp8]
        unused = (scale > largest) | (scale < is_fp8)
        what = f"not a fused exponent, {int(is_fp8)} to {largest}"
        report("weight_scale", what, unused.astype(np.uint8), (0, 0), problems)
    return scale


def _in_rows(form: LayoutForm, stored: Array, problems: list[str]) -> Array:
    """Scales [E, N, G] in logical order, padding included."""
    if form.scale_type == "block":
        return stored.transpose(0, 2, 1)
    if form.scale_type == "channel":
        return unpermute_channels(stored).transpose(0, 2, 1)
    if form.scale_order == "group":
        return _unpermute_groups(stored)
    rows, groups = form.scale_shape(padded=True)
    scale = _READ_TILES[form.scale_order](stored.view(np.uint8).reshape(len(stored), len(stored[0]), -1))
    # Whole words and tiles of tensor memory are filled up with ones, whatever the dtype.
    check_padding("weight_scale", scale, (rows, groups), _ONE, problems)
    return scale[:, :rows, :groups]


def _from_tensor_memory(stored: Array) -> Array:
    """Words of four groups; of 128 rows, row r is in word 4 (r % 32) + r / 32 (`mma/umma.cuh`,
    `store_weight_scales`)."""
    num_experts, words, _ = stored.shape
    tiles = stored.reshape(num_experts, words, -1, 32, 4, 4)  # E, word, 128 rows, r % 32, r / 32, group
    return tiles.transpose(0, 2, 4, 3, 1, 5).reshape(num_experts, -1, words * 4)


def _from_two_rows_a_word(stored: Array) -> Array:
    """Words of two groups of two rows that are 8 apart (`loader_bs.cuh`, `load_sf`; `mma/mxmma.cuh`,
    `get_byte_id_b`)."""
    num_experts, words, _ = stored.shape
    tiles = stored.reshape(num_experts, words, -1, 8, 2, 2)  # E, word, 16 rows, r % 8, r / 8, group
    return tiles.transpose(0, 2, 4, 3, 1, 5).reshape(num_experts, -1, words * 2)


def _from_four_groups_a_word(stored: Array) -> Array:
    """Words of four groups of a row."""
    num_experts, words, _ = stored.shape
    tiles = stored.reshape(num_experts, words, -1, 4)
    return tiles.transpose(0, 2, 1, 3).reshape(num_experts, -1, words * 4)


_READ_TILES = {
    "tensor memory": _from_tensor_memory,
    "one a word": _from_two_rows_a_word,
    "four a word": _from_four_groups_a_word,
}


def _fused_padding(form: LayoutForm, scale: Array, second: Array | None) -> Array:
    """What padded scales are: rows are 1.0 to the second scale, columns as their row's largest; uint8 [E, N, G].

    Rows of int8 have a second scale each, and it is 0 there.
    """
    rows, groups = form.scale_shape(padded=False)
    expected = np.zeros(scale.shape, np.uint8)
    if form.scale_dtype == FUSED_FP8 and second is not None:
        _, power = np.frexp(to_float32(second, "F32"))  # 2 ** (smallest exponent - 128), in halves
        least = power.astype(np.int64) - 1 + 128
        expected[:] = (np.maximum(_ONE, least) - least + 1).astype(np.uint8)[:, None, None]
    expected[:, :rows] = scale[:, :rows, :groups].max(axis=2, keepdims=True)
    return expected


def read_zero_point(
    form: LayoutForm, stored: Array | None, problems: list[str]
) -> tuple[Array | None, Array | None]:
    """The zero points [E, N, G] without and with padding; the second only for integers."""
    if stored is None:
        return None, None
    if form.zero_kind == "int":
        stored = _unpack_zero_codes(stored, 4 if form.num_bits <= 4 else 8)
    zero = _unpermute_groups(stored)
    rows, groups = form.shape[0], form.scale_shape(padded=False)[1]
    check_padding("zero_point", zero, (rows, groups), 0, problems)
    inside = np.ascontiguousarray(zero[:, :rows, :groups])
    if form.zero_kind == "float":
        return inside, None
    # The kernels mask the bits above a zero point's width (`dequant_single_zero_point`).
    mask = np.uint8((1 << form.num_bits) - 1)
    report("zero_point", f"bits set above {form.num_bits}", inside & ~mask, (0, 0), problems)
    return inside & mask, zero & mask


def check_padding(
    name: str, values: Array, inner: tuple[int, int], expected: int | Array, problems: list[str]
) -> None:
    """Report, per expert, values [E, N, G] outside `inner` = (N, G) that differ from `expected`: one, or of each."""
    rows, groups = inner
    of_each = np.broadcast_to(np.asarray(expected, values.dtype), values.shape)
    for first in ((rows, 0), (0, groups)):
        part = np.s_[:, rows:] if first[0] else np.s_[:, :rows, groups:]
        padding, right = values[part], of_each[part]
        if padding.size:
            text = f"{expected:#x}" if isinstance(expected, int) else "its exponents ask for"
            report(name, f"padding other than {text}", padding ^ right, first, problems)


def report(name: str, what: str, wrong: Array, first: tuple[int, int], problems: list[str]) -> None:
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


def unpermute_channels(stored: Array) -> Array:
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
