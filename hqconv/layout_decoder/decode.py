"""The inverse of the kernel layout: codes, scales and zero points of stacks of experts, on the device of their bytes.

Independent of the forward path on purpose: this follows how Humming's GEMM kernels *read* the tensors
(`include/humming/memory/s2r_loader`, `datatype/dequant*.cuh`, `mma/wgmma.cuh`), shares no code with the conversion,
and needs no Humming. So `verify` can trust it, on any machine.

The weight that a kernel computes with is ((value of its code - zero point) * value of its scale) * second scale, in
float32, rounded after every step. That holds where exponents are fused into the codes as well, with `scale_value`.

Legend: E experts, N rows, K columns, G groups along K. Floats are bit patterns: uint8, int16 or int32 by their width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from hqconv.layout_decoder import loops
from hqconv.layout_decoder.codes import Array, decode_codes, has_loops, unpack_fields
from hqconv.layout_decoder.layout_form import FUSED_INT8, PADDED_E5M0, LayoutForm, check_tensors
from hqconv.layout_decoder.scales import (
    Checks,
    Fault,
    code_values,
    decode_scale,
    decode_zero_point,
    float_values,
    look_up,
    unpermute_channels,
)
from hqconv.schemas.tensors import code_of, torch_dtype
from hqconv.schemas.weight_schema import WeightSchema

_FLUSHED_POWER = -25  # of half of the least float16: second scales up to it are rounded to 0


@dataclass(frozen=True, eq=False)
class DecodedStack:
    """Matrices of E experts, or slices of them, in logical order without padding.

    codes: uint8 [E, N, K], Humming's codes (integers offset binary). scale: [E, N, G], [E, N, 1] (channel),
    [E, N/bn, K/bk] (block) or [E, 1, 1] (tensor), of the safetensors dtype `scale_dtype` (`U8` is e5m3).
    scale_value: what the kernels take the scale for, float32; of e8m0 scales that were adapted to float16 or fused
    into the codes with the second scale multiplied in, which is not the source's then and left out.
    zero_point: uint8 codes or int16 patterns [E, N, G | 1]. scale_2: [E, 1] or [E, N]. bias: [E, N].
    flushed: bool [E, N, G], the kernels take this e8m0 scale for zero, and the original was at most `scale`.
    faults: checks of the values, evaluated by `wrong`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    scale_dtype: str
    scale_value: torch.Tensor
    zero_point: torch.Tensor | None
    scale_2: torch.Tensor | None
    bias: torch.Tensor | None
    flushed: torch.Tensor | None = None
    faults: tuple[Fault, ...] = ()

    @functools.cached_property
    def wrong(self) -> torch.Tensor:
        """Experts with values that no conversion writes, bool [E]."""
        wrong = torch.zeros(len(self.codes), dtype=torch.bool, device=self.codes.device)
        return functools.reduce(torch.logical_or, (fault.experts() for fault in self.faults), wrong)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bit patterns."""
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    )


def bits_of_arrays(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Bit patterns of numpy arrays of unsigned integers, without a copy."""
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
    return {
        name: torch.from_numpy(array.view(signed[array.itemsize])) for name, array in arrays.items()
    }


# --- kernel layout -----------------------------------------------------------------------------------------


def decode_layout(form: LayoutForm, bits: Mapping[str, torch.Tensor]) -> DecodedStack:
    """Decode kernel tensors `weight`, `weight_scale`, … [E, …], bit patterns, as the GEMM kernels read them.

    Any slice of a rank's experts may be given. Raises VerificationError where a tensor is missing, extra or of another
    shape or width than the form's. Values that padding or unused bits should not have are `faults`.
    """
    check_tensors(form, bits)
    checks = Checks()
    zero, zero_padded = decode_zero_point(form, bits.get("zero_point"), checks)
    codes = decode_codes(form, bits["weight"], zero_padded)
    checks.padding("weight", codes, form.shape, 0)
    rows, columns = form.shape
    channels: dict[str, torch.Tensor] = {}
    for name in ("bias", "weight_scale_2"):
        if name in bits and bits[name].ndim == 2:
            values = unpermute_channels(bits[name])
            checks.padding(name, values.unsqueeze(2), (rows, 1), 0)
            channels[name] = values[:, :rows]
    scale_2 = channels.get("weight_scale_2", bits.get("weight_scale_2"))
    scale = decode_scale(form, bits["weight_scale"], scale_2, checks)
    stack = DecodedStack(
        codes=codes[:, :rows, :columns],
        scale=scale,
        scale_dtype=form.scale_dtype,
        scale_value=float_values(scale, form.scale_dtype),
        zero_point=zero,
        scale_2=None if scale_2 is None else scale_2.view(len(codes), -1),
        bias=channels.get("bias"),
    )
    if form.is_fused or form.scale_dtype == PADDED_E5M0:
        stack = _restore_e8m0(stack, form, checks)
    return replace(stack, faults=tuple(checks.faults))


def _restore_e8m0(stack: DecodedStack, form: LayoutForm, checks: Checks) -> DecodedStack:
    """Exponents adapted to float16, or fused into the codes, as the e8m0 scales [E, N, G] that they stand for.

    For float16, the forward path subtracts log2(weight_scale_2) from an expert's exponents and rebiases them; those
    that fall below 2^-14 are flushed. Where `flushed` is set, the original byte was at most the one returned, and the
    kernels take the scale for zero. Largest exponents are never lost.
    Fused exponents are what the codes were shifted for; a row whose second scale is below float16 is flushed.
    A schema's own scale per row is beside float16's exponents as it is; of fused exponents it is the second scale's
    fraction, from 1 to 2.
    """
    value = stack.scale_value
    if form.scale_dtype == PADDED_E5M0 and form.has_row_scale:
        scale = (stack.scale >> 3) + (127 - 15)
        flushed = stack.scale >> 3 == 0
        return replace(stack, scale=scale, scale_dtype="F8_E8M0", flushed=flushed)
    if form.scale_dtype == PADDED_E5M0:
        exponent = (stack.scale.int() >> 3) - 15
        flushed = stack.scale >> 3 == 0
    else:
        exponent = stack.scale.int() + (form.scale_dtype == FUSED_INT8)
        flushed = torch.zeros_like(stack.scale, dtype=torch.bool)
    rows = None
    if stack.scale_2 is not None:
        second = float_values(
            stack.scale_2, "F32" if form.scale_2_type == "tensor" else form.param_dtype
        )
        second = second.unsqueeze(2)
        is_lost = (second == 0) & ((form.scale_dtype, form.param_dtype) == (FUSED_INT8, "F16"))
        fraction, power = torch.frexp(second)
        if form.has_row_scale:
            wrong = fraction <= 0
            rows = bits_of((2 * fraction.squeeze(2)).to(torch_dtype(form.param_dtype)))
            second = torch.ldexp(torch.ones_like(second), power - 1)
        else:
            wrong = (fraction != 0.5) & ~is_lost
        checks.values(
            "weight_scale_2",
            f"a second scale of e8m0 scales that is {_WRONG[form.has_row_scale]}",
            wrong,
        )
        exponent = exponent + torch.where(is_lost, _FLUSHED_POWER, power - 1)
        value = value * second
        flushed = flushed | is_lost
    scale = (exponent + 127).clamp(0, 255).to(torch.uint8)
    return replace(
        stack, scale=scale, scale_dtype="F8_E8M0", scale_value=value, scale_2=rows, flushed=flushed
    )


_WRONG = ("no power of two", "not positive")


# --- packed tensors ----------------------------------------------------------------------------------------


def packed_shapes(
    shape: tuple[int, int], schema: WeightSchema, param_dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of one matrix's tensors in Humming's packing, worked out from the schema alone."""
    n, k = shape
    param = code_of(param_dtype)
    group = schema.weight_scale_group_size or k
    rows = n // (schema.weight_scale_group_size_n or 1)
    dtype = code_of(schema.scale_dtype(param_dtype))
    scale: tuple[int, ...] = (1,) if schema.weight_scale_type == "tensor" else (rows, k // group)
    shapes = {"weight": ("I32", (n, k * schema.num_bits // 32)), "weight_scale": (dtype, scale)}
    if schema.has_zero_point:
        is_float = schema.is_fp_zero_point
        packed_rows = n if is_float else n * schema.num_bits // 32
        shapes["zero_point"] = (param if is_float else "I32", (packed_rows, k // group))
    if schema.weight_scale_2_type == "tensor":
        shapes["weight_scale_2"] = ("F32", (1,))
    elif schema.weight_scale_2_type == "channel":
        shapes["weight_scale_2"] = (param, (n,))
    return shapes


def decode_packed(
    bits: Mapping[str, torch.Tensor], schema: WeightSchema, scale_dtype: str
) -> DecodedStack:
    """Decode tensors in Humming's packing [E, …], bit patterns; shares no code with the packer."""
    scale = bits["weight_scale"]
    zero = bits.get("zero_point")
    scale_2 = bits.get("weight_scale_2")
    if zero is not None and not schema.is_fp_zero_point:
        zero = unpack_fields(zero.mT, schema.num_bits).mT
    scale = scale.reshape(len(scale), 1, 1) if scale.ndim < 3 else scale
    return DecodedStack(
        codes=unpack_fields(bits["weight"], schema.num_bits),
        scale=scale,
        scale_dtype=scale_dtype,
        scale_value=float_values(scale, scale_dtype),
        zero_point=zero,
        scale_2=None if scale_2 is None else scale_2.view(len(scale), -1),
        bias=bits.get("bias"),
    )


_CHUNK_NUMBERS = 1 << 18  # decoded at once by `decoded_rows`: the caller finds them in the cache


def decoded_weights(stack: DecodedStack, schema: WeightSchema, param_dtype: str) -> torch.Tensor:
    """The weights that the kernels compute with, float32 [E, N, K]."""
    num_experts, num_rows, num_columns = stack.codes.shape
    if has_loops(stack.codes.device):
        out = torch.empty(stack.codes.shape, dtype=torch.float32)
        for expert in range(num_experts):
            for begin, rows in decoded_rows(stack, schema, param_dtype, expert):
                out[expert, begin : begin + len(rows)] = torch.from_numpy(rows)
        return out
    _, runs, groups = stack.scale_value.shape
    values = look_up(_code_table_on(schema, stack.codes.device), stack.codes)
    values = values.view(num_experts, runs, num_rows // runs, groups, num_columns // groups)
    zero, scale_2 = _zero_and_scale_2(stack, schema, param_dtype)
    if zero is not None:
        values = values - zero.reshape(num_experts, runs, num_rows // runs, -1, 1)
    values = values * stack.scale_value.reshape(num_experts, runs, 1, groups, 1)
    values = values.view(num_experts, num_rows, num_columns)
    return values if scale_2 is None else values * scale_2.unsqueeze(2)


def decoded_rows(
    stack: DecodedStack, schema: WeightSchema, param_dtype: str, expert: int = 0
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first row, float32 rows) of one expert on the CPU, some rows at a time; the array is used again."""
    num_rows, num_columns = stack.codes.shape[1:]
    codes = stack.codes[expert : expert + 1].numpy()
    values = code_table(schema)
    scale = stack.scale_value[expert : expert + 1].numpy()
    scale = np.repeat(scale, num_rows // scale.shape[1], axis=1)
    zero = np.zeros((1, num_rows, 1), np.float32)
    scale_2 = np.ones((1, num_rows), np.float32)
    found_zero, found_scale_2 = _zero_and_scale_2(stack, schema, param_dtype)
    if found_zero is not None:
        zero = found_zero[expert : expert + 1].contiguous().numpy()
    if found_scale_2 is not None:
        scale_2[:] = found_scale_2[expert : expert + 1].numpy()
    step = max(1, _CHUNK_NUMBERS // num_columns)
    out = np.empty((1, min(step, num_rows), num_columns), np.float32)
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        part = out[:, : rows.stop - begin]
        loops.decode_codes(
            codes[:, rows], values, zero[:, rows], scale[:, rows], scale_2[:, rows], part
        )
        yield begin, part[0]


def _zero_and_scale_2(
    stack: DecodedStack, schema: WeightSchema, param_dtype: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Values of zero points [E, N, G | 1] and second scales [E, 1 | N], float32."""
    zero = scale_2 = None
    if stack.zero_point is not None:
        zero = float_values(
            stack.zero_point, code_of(param_dtype) if schema.is_fp_zero_point else "codes"
        )
    if stack.scale_2 is not None:
        is_tensor = schema.weight_scale_2_type == "tensor"
        scale_2 = float_values(stack.scale_2, "F32" if is_tensor else code_of(param_dtype))
    return zero, scale_2


def code_table(schema: WeightSchema) -> NDArray[np.float32]:
    """The value of each of 256 codes of the schema."""
    return code_values(schema.b_dtype, has_zero_point=schema.has_zero_point)


@functools.lru_cache(maxsize=64)
def _code_table_on(schema: WeightSchema, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(code_table(schema)).to(device)


def unrotated(values: torch.Tensor, block: int) -> torch.Tensor:
    """Columns [..., K] turned back in blocks of `block`, computed in float64, in the dtype of `values`; 0: as they are.

    The matrix is its own inverse, so this turns forth as well.
    """
    if not block:
        return values
    out = values.double().reshape(-1, block) @ _matrix(block, values.device)
    return out.view(values.shape).to(values.dtype)


@functools.lru_cache(maxsize=16)
def _matrix(block: int, device: torch.device) -> torch.Tensor:
    """Sylvester's Hadamard matrix over sqrt(block): negative where row and column share an odd number of bits."""
    signs = [
        [1 - 2 * ((row & column).bit_count() % 2) for column in range(block)]
        for row in range(block)
    ]
    return torch.tensor(signs, dtype=torch.float64, device=device) / math.sqrt(block)
