"""Quantization on CUDA: Humming's operations, torch's for shared scales, errors and the search, a kernel for sweeps.

Legend: E experts, N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hqconv.errors import RequestError
from hqconv.humming_ops.runtime import humming, humming_schema
from hqconv.quantization import torch_ops
from hqconv.quantization.group_scales import (
    GivenScales,
    GroupScales,
    nearest_scales,
    scales_of,
    two_level_scales,
)
from hqconv.quantization.quantized import QuantizedStack, num_groups
from hqconv.quantization.scale_search import Ladder, SearchResult, search, sweep_each
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.options import RTN
from hqconv.schemas.weight_schema import WeightSchema


def quantize_stacks(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    given: Sequence[GivenScales] | None,
    count_exact: bool,
    quantizer: str = RTN,
) -> list[QuantizedStack]:
    """Quantize stacks on a CUDA device; see `hqconv.quantization.quantize.quantize_stacks`."""
    shared = None
    if schema.is_coupled or schema.weight_scale_2_type != "none":
        shared = (
            torch.stack([s.abs().amax((1, 2)) for s in stacks]).amax(0).float().clamp_min(1e-30)
        )
    if given is None and quantizer != RTN:
        return _quantize_best(stacks, schema, param_dtype, shared, count_exact)
    each: Sequence[GivenScales | None] = given or [None] * len(stacks)
    return [
        _quantize(s, schema, param_dtype, shared, g, count_exact)
        for s, g in zip(stacks, each, strict=True)
    ]


def _quantize(
    stack: torch.Tensor,
    schema: WeightSchema,
    param_dtype: str,
    shared: torch.Tensor | None,
    given: GivenScales | None,
    count_exact: bool,
) -> QuantizedStack:
    packed = _rounded(stack, schema, param_dtype, shared, given)
    return _with_error(stack, packed, schema, count_exact)


def _quantize_best(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    shared: torch.Tensor | None,
    count_exact: bool,
) -> list[QuantizedStack]:
    """Quantize with the scales of the least squared error."""
    packed = [_rounded(stack, schema, param_dtype, shared, None) for stack in stacks]
    meters = [_Meter(stack, one, schema) for stack, one in zip(stacks, packed, strict=True)]
    found = search(meters, schema, param_dtype)
    best = [
        _replaced(stack, one, choice, schema, param_dtype)
        for stack, one, choice in zip(stacks, packed, found, strict=True)
    ]
    return [
        _with_error(stack, one, schema, count_exact)
        for stack, one in zip(stacks, best, strict=True)
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
    packed: dict[str, torch.Tensor] = target.quant_tensor(
        stack, target, torch_dtype_of(param_dtype)
    )
    return packed


def _encode_shared(
    stack: torch.Tensor,
    schema: WeightSchema,
    param_dtype: str,
    shared: torch.Tensor,
    given: GivenScales | None,
) -> dict[str, torch.Tensor]:
    """Return codes and scales of a stack [E, N, K] whose experts have the maxima `shared` [E]."""
    values, amax = stack.float(), shared.view(-1, 1, 1)
    if schema.weight_scale_type == "tensor":
        grouped, nearest = values.unsqueeze(2), nearest_scales(amax, -amax, schema, param_dtype)
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
    error, power = torch_ops.error_sums(
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
            where=str(device),
            expected="gcc or clang on the PATH, or the environment variable CC set to a C compiler",
            found=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
            remedy="Install a C compiler, or use --device cpu: without --calibrate the bytes are the same.",
        ) from error


class _Meter:
    """`scale_search.ScaleMeter` of a stack on CUDA."""

    def __init__(
        self, stack: torch.Tensor, packed: dict[str, torch.Tensor], schema: WeightSchema
    ) -> None:
        self.scales, self._stack, self._words, self._schema = (
            scales_of(packed, schema),
            stack,
            packed["weight"],
            schema,
        )

    def start_errors(self) -> torch.Tensor:
        return torch_ops.row_errors(self._stack, self.scales, self._words, self._schema)

    def errors(self, scales: GroupScales, stored: GroupScales | None = None) -> torch.Tensor:
        return torch_ops.row_errors(self._stack, scales, None, self._schema, stored)

    def fits(self, scales: GroupScales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch_ops.row_fits(self._stack, scales, self._schema)

    def sweep(
        self, start: GroupScales, least: torch.Tensor, ladder: Ladder, floor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stack.is_cuda and _sweep_kernel().can_sweep(self._schema):
            with _sweep_kernel().LAUNCHING:
                done: tuple[torch.Tensor, torch.Tensor] = _sweep_kernel().sweep(
                    self._stack, start, least, ladder, floor, self._schema
                )
            return done
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
    weight = torch_ops.chosen_codes(stack, found.scales, found.changed, packed["weight"], schema)
    return {**packed, **found.stored.tensors(schema, param_dtype), "weight": weight}
