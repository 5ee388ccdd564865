"""The cases that `scripts/record.py golden` records on a GPU and `test_golden.py` repeats on the CPU."""

from __future__ import annotations

import hashlib

import torch

from hqconv.kernel_layout.transform import kernel_form, to_kernel
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.conversions import kernel_spec_of
from tests.make.matrices import hard_matrix
from tests.make.quantized import quantize

SHAPES = ((128, 128), (384, 1152))


def case_name(schema: str, param_dtype: str, shape: tuple[int, int]) -> str:
    return f"{schema}/{param_dtype}/{shape[0]}x{shape[1]}"


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(str((tuple(tensor.shape), str(tensor.dtype))).encode() + raw).hexdigest()


def outputs(
    name: str, param_dtype: str, shape: tuple[int, int], device: str
) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Inputs, packed and kernel tensors of one case, and the error sums as hexadecimal floats."""
    schema = resolve_schema(name)
    pair = [hard_matrix(*shape, torch.bfloat16, seed) for seed in (100, 101)]
    quantized = quantize([m.to(device) for m in pair], schema, param_dtype)
    tensors = {f"input.{i}": m for i, m in enumerate(pair)}
    for i, q in enumerate(quantized):
        tensors |= {f"packed.{i}.{key}": value for key, value in q.tensors.items()}
    first = quantized[0].tensors
    one = {
        key: value if value.shape == (1,) else value.unsqueeze(0) for key, value in first.items()
    }
    kernel = to_kernel(kernel_form(*shape, kernel_spec_of(schema, param_dtype, 90)), one)
    tensors |= {f"kernel.{key}": value for key, value in kernel.items()}
    return tensors, [[q.error_sums.error.hex(), q.error_sums.power.hex()] for q in quantized]
