"""Scales, zero points and per-row parameters of a kernel back in rows, checks of their padding, and their values.

Part of `hqconv.layout_decoder.decode`, and like it independent of Humming and of the conversion.

Legend: E experts, N rows, G groups along K, r row of eight, c chunk of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hqconv.layout_decoder.codes import Array, unpack_fields
from hqconv.layout_decoder.layout_form import (
    FUSED_FP8,
    FUSED_INT8,
    PADDED_E5M0,
    LayoutForm,
    parse_weight_dtype,
)

_ONE = 127  # 1.0 in e8m0, which fills up words of scales
# largest fused exponents; the smallest are 1 and 0
_MAX_FUSED_FP8 = 12
_MAX_FUSED_INT8 = 3


# --- checks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fault:
    """A check of decoded values that is evaluated later: `wrong`, bool [E, …], is True for each value that fails.

    tensor: kernel tensor of the values, on TP rank `tp_rank`. describe: expert index → (expected, found), in text.
    """

    tensor: str
    what: str
    wrong: torch.Tensor
    describe: Callable[[int], tuple[str, str]]
    tp_rank: int = 0

    def experts(self) -> torch.Tensor:
        """Experts with a wrong value, bool [E]."""
        return self.wrong.reshape(len(self.wrong), -1).any(1)


class Checks:
    """Collector of the faults of one stack of experts."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def values(
        self, tensor: str, what: str, wrong: torch.Tensor, first: tuple[int, int] = (0, 0)
    ) -> None:
        """Check that no value of `wrong` [E, N, G] is set; `first` is the position of its first value."""

        def describe(expert: int) -> tuple[str, str]:
            places = wrong[expert].nonzero()
            n, k = (int(index) + start for index, start in zip(places[0], first, strict=True))
            return "", f"{what}: first at [{n}, {k}], {len(places)} in all"

        if wrong.numel():
            self.faults.append(Fault(tensor, "A value that no conversion writes.", wrong, describe))

    def padding(
        self,
        tensor: str,
        values: torch.Tensor,
        inner: tuple[int, int],
        expected: int | torch.Tensor,
    ) -> None:
        """Check values [E, N, G] outside `inner` = (N, G) against `expected`: one number, or a tensor [E, N, G]."""
        rows, groups = inner
        text = f"{expected:#x}" if isinstance(expected, int) else "its exponents ask for"
        for part, first in (
            ((slice(None), slice(rows, None)), (rows, 0)),
            ((slice(None), slice(rows), slice(groups, None)), (0, groups)),
        ):
            padding = values[part]
            if padding.numel():
                wrong = padding != (expected if isinstance(expected, int) else expected[part])
                self.values(tensor, f"padding other than {text}", wrong, first)


# --- scales ------------------------------------------------------------------------------------------------


def decode_scale(
    form: LayoutForm, stored: torch.Tensor, scale_2: torch.Tensor | None, checks: Checks
) -> torch.Tensor:
    """Scales [E, N, G] without padding, or [E, 1, 1] of a tensor; `scale_2` is needed for fused exponents."""
    if form.scale_type == "tensor":
        return stored.view(-1, 1, 1)
    rows, groups = form.scale_shape(padded=False)
    scale = _in_rows(form, stored, checks)
    expected = _fused_padding(form, scale, scale_2) if form.is_fused else form.padding_scale
    checks.padding("weight_scale", scale, (rows, groups), expected)
    scale = scale[:, :rows, :groups].contiguous()
    if form.scale_dtype == PADDED_E5M0:
        wrong = (scale & 7 != 0) | (scale >> 3 == 31)
        checks.values("weight_scale", "not a float16 exponent over three zero bits", wrong)
    elif form.is_fused:
        least, largest = (
            (1, _MAX_FUSED_FP8) if form.scale_dtype == FUSED_FP8 else (0, _MAX_FUSED_INT8)
        )
        wrong = (scale < least) | (scale > largest)
        checks.values("weight_scale", f"not a fused exponent, {least} to {largest}", wrong)
    return scale


def _in_rows(form: LayoutForm, stored: torch.Tensor, checks: Checks) -> torch.Tensor:
    """Scales [E, N, G] in logical order, padding included."""
    if form.scale_type == "block":
        return stored.transpose(1, 2)
    if form.scale_type == "channel":
        return unpermute_channels(stored).transpose(1, 2)
    if form.scale_order == "group":
        return _unpermute_groups(stored)
    rows, groups = form.scale_shape(padded=True)
    data = stored.contiguous().view(torch.uint8).view(len(stored), stored.size(1), -1)
    scale = _READ_TILES[form.scale_order](data)
    # Whole words and tiles of tensor memory are filled up with ones, whatever the dtype.
    checks.padding("weight_scale", scale, (rows, groups), _ONE)
    return scale[:, :rows, :groups]


def _from_tensor_memory(stored: torch.Tensor) -> torch.Tensor:
    """Words of four groups; of 128 rows, row r is in word 4 (r % 32) + r / 32 (`mma/umma.cuh`,
    `store_weight_scales`)."""
    num_experts, words, _ = stored.shape
    # E, word, 128 rows, r % 32, r / 32, group
    tiles = stored.view(num_experts, words, -1, 32, 4, 4)
    return tiles.permute(0, 2, 4, 3, 1, 5).reshape(num_experts, -1, words * 4)


def _from_two_rows_a_word(stored: torch.Tensor) -> torch.Tensor:
    """Words of two groups of two rows that are 8 apart (`loader_bs.cuh`, `load_sf`; `mma/mxmma.cuh`,
    `get_byte_id_b`)."""
    num_experts, words, _ = stored.shape
    tiles = stored.view(num_experts, words, -1, 8, 2, 2)  # E, word, 16 rows, r % 8, r / 8, group
    return tiles.permute(0, 2, 4, 3, 1, 5).reshape(num_experts, -1, words * 2)


def _from_four_groups_a_word(stored: torch.Tensor) -> torch.Tensor:
    """Words of four groups of a row."""
    num_experts, words, _ = stored.shape
    return (
        stored.view(num_experts, words, -1, 4).transpose(1, 2).reshape(num_experts, -1, words * 4)
    )


_READ_TILES = {
    "tensor memory": _from_tensor_memory,
    "one a word": _from_two_rows_a_word,
    "four a word": _from_four_groups_a_word,
}


def _fused_padding(
    form: LayoutForm, scale: torch.Tensor, scale_2: torch.Tensor | None
) -> torch.Tensor:
    """Fused exponents of the padding, uint8 [E, N, G]: rows are 1.0 to the second scale, columns their row's largest.

    Padded rows with a second scale each, which is 0, have the least exponents.
    """
    rows, groups = form.scale_shape(padded=False)
    expected = torch.full_like(scale, int(form.scale_dtype == FUSED_FP8))
    if form.scale_2_type == "tensor" and scale_2 is not None:
        # smallest exponent
        power = torch.frexp(float_values(scale_2, "F32"))[1].view(-1, 1, 1) + 127
        expected[:] = ((_ONE - power).clamp(min=0) + 1).byte()
    expected[:, :rows] = scale[:, :rows, :groups].amax(2, keepdim=True)
    return expected


# --- zero points and rows ----------------------------------------------------------------------------------


def decode_zero_point(
    form: LayoutForm, stored: torch.Tensor | None, checks: Checks
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Zero points [E, N, G] without and with padding; the second only for integers."""
    if stored is None:
        return None, None
    if form.zero_kind == "int":
        stored = unpack_fields(stored, 4 if form.num_bits <= 4 else 8)
    zero = _unpermute_groups(stored)
    rows = form.shape[0]
    groups = form.scale_shape(padded=False)[1]
    checks.padding("zero_point", zero, (rows, groups), 0)
    inside = zero[:, :rows, :groups].contiguous()
    if form.zero_kind == "float":
        return inside, None
    # The kernels mask the bits above a zero point's width (`dequant_single_zero_point`).
    mask = (1 << form.num_bits) - 1
    checks.values("zero_point", f"bits set above {form.num_bits}", inside > mask)
    return inside & mask, zero & mask


def _unpermute_groups(stored: torch.Tensor) -> torch.Tensor:
    """Group scales and zero points [E, G, N] in logical order [E, N, G].

    A lane reads 8 values at once, for row lane / 4 of the eight 8-row chunks of its 64 rows
    (`s2r_loader/loader_bs.cuh`, `load_layout1`; `loader_bzp.cuh`).
    """
    num_experts, groups, rows = stored.shape
    blocks = stored.view(num_experts, groups, rows // 64, 8, 8)  # …, block, r, c
    return blocks.permute(0, 2, 4, 3, 1).reshape(num_experts, rows, groups)


def unpermute_channels(stored: torch.Tensor) -> torch.Tensor:
    """Per-row values [E, …, N] that scale the accumulator, in logical order.

    A lane reads 8 values at once: rows 2 * (lane / 8) and the next of the four 8-row chunks of 32 rows
    (`loader_bs.cuh`, `load_layout2`; `loader_bias.cuh`).
    """
    blocks = stored.view(*stored.shape[:-1], -1, 4, 4, 2)  # …, block, row pair, c, row of the pair
    return blocks.transpose(-2, -3).reshape(stored.shape)


# --- number formats ------------------------------------------------------------------------------------------


def code_values(b_dtype: str, *, has_zero_point: bool) -> NDArray[np.float32]:
    """The float32 value of each of 256 codes; bits above the code's width are ignored.

    Integers without a zero point stand for their distance from the middle.
    """
    num_bits, exponent_bits = parse_weight_dtype(b_dtype)
    codes = np.arange(256) & ((1 << num_bits) - 1)
    half = 1 << (num_bits - 1)
    if exponent_bits is None:
        return (codes - (0 if has_zero_point else half)).astype(np.float32)
    magnitude = _small_floats(codes % half, exponent_bits, num_bits - 1 - exponent_bits)
    return np.where(codes >= half, -magnitude, magnitude)


def _small_floats(codes: Array, exponent_bits: int, mantissa_bits: int) -> NDArray[np.float32]:
    """Unsigned small floats, every code finite; without exponent bits the magnitude itself."""
    exponent = codes >> mantissa_bits
    mantissa = codes & ((1 << mantissa_bits) - 1)
    if exponent_bits == 0:
        return codes.astype(np.float32)
    bias = (1 << (exponent_bits - 1)) - 1
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    values: NDArray[np.float32] = np.ldexp(
        significand.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits
    )
    return values


def float_values(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    """The float32 values of raw patterns of a safetensors dtype; `U8` is e5m3, "codes" are plain integers."""
    if dtype == "codes":
        return bits.float()
    if wide := {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(dtype):
        return bits.view(wide).float()
    return look_up(_scale_values(dtype, bits.device), bits)


def look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The table's entry of each code, in the shape of `codes`."""
    return table.index_select(0, codes.int().flatten()).view(codes.shape)


@functools.lru_cache(maxsize=64)
def _scale_values(dtype: str, device: torch.device) -> torch.Tensor:
    """The float32 value of each of 256 8-bit scales."""
    codes = np.arange(256)
    if dtype == "U8":
        table = _small_floats(codes, 5, 3)
    elif dtype == "F8_E8M0":
        table = np.ldexp(np.float32(1), np.minimum(codes, 254) - 127)
        table[255] = np.nan
    elif dtype in (FUSED_FP8, FUSED_INT8):
        table = np.ldexp(np.float32(1), np.minimum(codes, 12) + (dtype == FUSED_INT8))
    elif dtype == PADDED_E5M0:
        # exponent 0 is zero for the kernels: there is no mantissa to be subnormal
        table = np.where(codes >> 3 == 0, np.float32(0), np.ldexp(np.float32(1), (codes >> 3) - 15))
        table[codes >> 3 == 31] = np.inf
    else:
        exponent_bits = {"F8_E4M3": 4, "F8_E5M2": 5}[dtype]
        table = _small_floats(codes % 128, exponent_bits, 7 - exponent_bits)
        table[codes % 128 == 127] = np.nan
        if exponent_bits == 5:
            table[124:128] = table[252:] = [np.inf, np.nan, np.nan, np.nan]
        table[128:] *= -1
    return torch.from_numpy(table.astype(np.float32)).to(device)
