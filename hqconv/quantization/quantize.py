"""Quantize expert matrices, with the same bits on every device: on CUDA here, by Humming's and torch's operations.

Legend: E experts, N output rows, K input columns, G groups along K.

Round-to-nearest without a tensor- or second-level scale equals Humming's `HummingWeightSchema.quant_tensor`, matrix by
matrix. With a shared scale (`fp8-tensor`, `nvfp4`) maxima are order-free, the group scale is rounded first, and codes
are chosen for the stored scale. The error of every matrix is measured against its *stored* codes and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hqconv.errors import RequestError
from hqconv.humming_ops.runtime import humming, humming_schema, resident
from hqconv.quantization import cpu, quantized
from hqconv.quantization.group_scales import (
    GivenScales,
    GroupScales,
    nearest_scales,
    scales_of,
    split_powers,
    two_level_scales,
)
from hqconv.quantization.quantized import ErrorSums, QuantizedStack, num_groups, rotate
from hqconv.quantization.scale_search import Ladder, SearchResult, search, sweep_each
from hqconv.schemas.options import QUANTIZERS, RTN
from hqconv.schemas.tensors import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

__all__ = ["ErrorSums", "QuantizedStack", "quantize_stacks"]


def quantize_stacks(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    powers: Sequence[torch.Tensor] | None = None,
    *,
    count_exact: bool = False,
    quantizer: str = RTN,
) -> list[QuantizedStack]:
    """Quantize stacks [E, N, K]; the matrices of one expert share their tensor-level scale, if the schema has one.

    Inputs are bfloat16, float16 or float32 on one device; each matrix is quantized alone and at full size.
    A matrix with NaN or Inf gets a power of NaN or Inf and meaningless codes. powers: group scales to take, powers of
    two, float32 [E, N, G], under a tensor-level second scale; `quantizer`, rtn or mse, is ignored then. Does not
    synchronize with CUDA.

    Under a schema with a rotation, codes, scales and error sums are those of the rotated matrices, in the inputs'
    dtype, as in Humming's `quant_tensor`; `powers` must be None.
    """
    assert quantizer in QUANTIZERS, quantizer
    if schema.rotation:
        assert powers is None, "the group scales of a matrix do not fit the rotated matrix"
        stacks = [rotate(stack, schema.rotation) for stack in stacks]
        schema = replace(schema, hadamard_block_size=0)
    given = None if powers is None else split_powers(stacks, powers, schema)
    if stacks[0].is_cuda:
        with resident(stacks[0].device):
            return quantize_by_operations(
                stacks, schema, param_dtype, given, count_exact, quantizer
            )
    return cpu.quantize_stacks(stacks, schema, param_dtype, given, count_exact, quantizer)


def quantize_by_operations(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    given: Sequence[GivenScales] | None,
    count_exact: bool,
    quantizer: str,
) -> list[QuantizedStack]:
    """Quantize stacks by Humming's and torch's operations: on a GPU, and in tests on the CPU."""
    shared = None
    if schema.is_coupled or schema.weight_scale_2_type != "none":
        amax = torch.stack([stack.abs().amax((1, 2)) for stack in stacks]).amax(0)
        shared = amax.float().clamp_min(1e-30)
    packed = [
        _rounded(stack, schema, param_dtype, shared, given[number] if given else None)
        for number, stack in enumerate(stacks)
    ]
    if given is None and quantizer != RTN:
        meters = [
            _Meter(stack, tensors, schema) for stack, tensors in zip(stacks, packed, strict=True)
        ]
        found = search(meters, schema, param_dtype)
        packed = [
            _replaced(stack, tensors, result, schema, param_dtype)
            for stack, tensors, result in zip(stacks, packed, found, strict=True)
        ]
    return [
        _with_error(stack, tensors, schema, count_exact)
        for stack, tensors in zip(stacks, packed, strict=True)
    ]


def _rounded(
    stack: torch.Tensor,
    schema: WeightSchema,
    param_dtype: str,
    shared: torch.Tensor | None,
    given: GivenScales | None,
) -> dict[str, torch.Tensor]:
    """Return the packed tensors of a stack, rounded to nearest."""
    if shared is not None:
        return _encode_shared(stack, schema, param_dtype, shared, given)
    target = humming_schema(schema)
    dtype = torch_dtype_of(param_dtype)
    packed: dict[str, torch.Tensor] = target.quant_tensor(stack, target, dtype)
    return packed


def _encode_shared(
    stack: torch.Tensor,
    schema: WeightSchema,
    param_dtype: str,
    shared: torch.Tensor,
    given: GivenScales | None,
) -> dict[str, torch.Tensor]:
    """Return codes and scales of a stack [E, N, K] whose experts have the maxima `shared` [E]."""
    values = stack.float()
    amax = shared.view(-1, 1, 1)
    if schema.weight_scale_type == "tensor":
        grouped = values.unsqueeze(2)
        nearest = nearest_scales(amax, -amax, schema, param_dtype)
    else:
        grouped = values.view(*values.shape[:2], -1, schema.weight_scale_group_size)
        bounds = (grouped.amax(-1).clamp_min(1e-30), grouped.amin(-1).clamp_max(-1e-30))
        nearest = two_level_scales(*bounds, schema, param_dtype, amax, given)
    scaled = grouped * nearest.inverse.unsqueeze(-1)
    if nearest.limit:
        scaled = scaled.clamp_(-nearest.limit, nearest.limit)
    codes, _, _ = humming().ops.quant_weight(
        scaled.view_as(values).contiguous(),
        source_dtype_str="float32",
        target_dtype_str=schema.b_dtype,
        group_size=0,
        has_scale=False,
        use_e8m0_scale=False,
        has_zero_point=False,
        is_fp_zero_point=False,
    )
    weight = humming().ops.pack_weight(codes, schema.num_bits)
    return {**nearest.scales.tensors(schema, param_dtype), "weight": weight}


def _with_error(
    stack: torch.Tensor, tensors: dict[str, torch.Tensor], target: WeightSchema, count_exact: bool
) -> QuantizedStack:
    exact = torch.zeros(len(stack), dtype=torch.int64, device=stack.device)
    error, power = quantized.error_sums(
        stack, tensors, target, num_exact=exact if count_exact else None
    )
    counted = num_groups((stack.size(1), stack.size(2)), target) if count_exact else 0
    return QuantizedStack(tensors, error, power, exact, counted)


def _sweep_kernel() -> Any:
    """Import the module of the Triton kernel that sweeps scales; the first import loads Triton."""
    from hqconv.quantization import triton_sweep

    return triton_sweep


def check_kernels(device: torch.device) -> None:
    """Build and run a small Triton kernel on a GPU.

    Raises RequestError where Triton cannot build: its launchers need a C compiler.
    """
    try:
        _sweep_kernel().build_a_kernel(device)
    except Exception as error:
        raise RequestError(
            "Triton cannot build the kernels that quantize on a GPU: it needs a C compiler.",
            where=device,
            expected="gcc or clang on the PATH, or the environment variable CC set to a C compiler",
            found=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
            remedy="Install a C compiler, or use --device cpu: without --calibrate the bytes are the same.",
        ) from error


class _Meter:
    """`scale_search.ScaleMeter` of a stack on CUDA."""

    def __init__(
        self, stack: torch.Tensor, packed: dict[str, torch.Tensor], schema: WeightSchema
    ) -> None:
        self.scales = scales_of(packed, schema)
        self._stack = stack
        self._packed = packed["weight"]
        self._schema = schema

    def start_errors(self) -> torch.Tensor:
        return quantized.row_errors(self._stack, self.scales, self._packed, self._schema)

    def errors(self, scales: GroupScales, stored: GroupScales | None = None) -> torch.Tensor:
        return quantized.row_errors(self._stack, scales, None, self._schema, stored)

    def fits(self, scales: GroupScales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return quantized.row_fits(self._stack, scales, self._schema)

    def sweep(
        self, start: GroupScales, least: torch.Tensor, ladder: Ladder, floor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stack.is_cuda and _sweep_kernel().can_sweep(self._schema):
            with _sweep_kernel().LAUNCHING:
                found: tuple[torch.Tensor, torch.Tensor] = _sweep_kernel().sweep(
                    self._stack, start, least, ladder, floor, self._schema
                )
            return found
        largest = self._stack.view(*least.shape, -1).abs().amax(-1).float().clamp_min(1e-30)
        return sweep_each(start, least, ladder, self.errors, floor, largest)


def _replaced(
    stack: torch.Tensor,
    packed: dict[str, torch.Tensor],
    found: SearchResult,
    schema: WeightSchema,
    param_dtype: str,
) -> dict[str, torch.Tensor]:
    """Return the tensors with the chosen scales; groups that did not change keep their codes."""
    weight = quantized.chosen_codes(stack, found.scales, found.changed, packed["weight"], schema)
    return {**packed, **found.stored.tensors(schema, param_dtype), "weight": weight}
