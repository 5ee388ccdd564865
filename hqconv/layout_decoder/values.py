"""Decoded weights as float32: ((value of the code - zero point) * scale) * second scale, rounded after every step.

Legend: E experts, N rows, K columns, G groups along K.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hqconv.layout_decoder import loops
from hqconv.layout_decoder.codes import has_loops
from hqconv.layout_decoder.decode import DecodedStack
from hqconv.layout_decoder.scales import code_values, float_values, look_up
from hqconv.schemas.dtypes import code_of
from hqconv.schemas.weight_schema import WeightSchema

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
    codes, values = stack.codes[expert : expert + 1].numpy(), code_table(schema)
    scale = stack.scale_value[expert : expert + 1].numpy()
    scale = np.repeat(scale, num_rows // scale.shape[1], axis=1)
    zero, scale_2 = np.zeros((1, num_rows, 1), np.float32), np.ones((1, num_rows), np.float32)
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
