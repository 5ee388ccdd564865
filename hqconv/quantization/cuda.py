"""Quantization on CUDA: Humming's operations, torch where matrices share a scale, Triton kernels for errors.

Legend: E experts, N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from hqconv.cpu_loops import arithmetic
from hqconv.errors import RequestError
from hqconv.kernel_layout import cpu_ops
from hqconv.kernel_layout.runtime import humming
from hqconv.kernel_layout.transform import humming_schema
from hqconv.quantization import torch_ops
from hqconv.quantization.gptq import CompensationStart, compensate
from hqconv.quantization.quantized import RTN, HessianFactors, QuantizedStack, Quantizer, TileFactors, num_groups
from hqconv.quantization.scale_search import (
    CandidateScales,
    Ladder,
    SearchResult,
    SearchStart,
    scales_of,
    search,
    tensors_of,
)
from hqconv.quantization.two_level_scales import GivenScales, constant, group_scales, two_level
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

# Which operations are Triton kernels, of: sums, sweep, search (errors, fits and codes of the search). The others are
# torch's operations.
TRITON = frozenset(os.environ.get("HQCONV_TRITON", "sums,sweep,search").split(","))
_LAUNCHING = threading.Lock()  # one thread builds a kernel on its first launch; the others wait and reuse it


def quantize_stacks(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    given: Sequence[GivenScales] | None,
    count_exact: bool,
    quantizer: Quantizer = RTN,
) -> list[QuantizedStack]:
    """Quantize stacks on a CUDA device; see `hqconv.quantization.quantize.quantize_stacks`."""
    shared = None
    if schema.is_coupled or schema.weight_scale_2_type != "none":
        shared = torch.stack([s.abs().amax((1, 2)) for s in stacks]).amax(0).float().clamp_min(1e-30)
    if given is None and quantizer.name != RTN.name:
        return _quantize_best(stacks, schema, param_dtype, shared, count_exact, quantizer)
    if given is None and (joined := _joined(stacks)) is not None:
        repeated = None if shared is None else shared.repeat(len(stacks))
        return _quantize(joined, schema, param_dtype, repeated, None, count_exact).cut(len(stacks))
    each: Sequence[GivenScales | None] = given or [None] * len(stacks)
    return [_quantize(s, schema, param_dtype, shared, g, count_exact) for s, g in zip(stacks, each, strict=True)]


def _joined(stacks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return stacks that are adjacent in memory, as gate and up often are, as one view: half as many launches."""
    first = stacks[0]
    for number, stack in enumerate(stacks):
        place = first.storage_offset() + number * first.numel()
        is_next = stack.storage_offset() == place and stack.is_contiguous() and stack.shape == first.shape
        if not is_next or stack.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    if len(stacks) < 2:
        return None
    return first.as_strided((len(stacks) * len(first), *first.shape[1:]), first.stride())


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
    quantizer: Quantizer,
) -> list[QuantizedStack]:
    """Quantize with the scales of the least squared error, and with error compensation for gptq."""
    packed = [_rounded(stack, schema, param_dtype, shared, None) for stack in stacks]
    best = search_scales(stacks, packed, schema, param_dtype, quantizer.importance)
    if quantizer.factors is not None:
        best = _compensated(stacks, packed, best, schema, param_dtype, quantizer.factors)
    return [_with_error(stack, one, schema, count_exact) for stack, one in zip(stacks, best, strict=True)]


def _rounded(
    stack: torch.Tensor, schema: WeightSchema, param_dtype: str, shared: torch.Tensor | None, given: GivenScales | None
) -> dict[str, torch.Tensor]:
    """Return the packed tensors of a stack, rounded to nearest."""
    if shared is not None:
        return _encode_shared(stack, schema, param_dtype, shared, given)
    target = humming_schema(schema)
    packed: dict[str, torch.Tensor] = target.quant_tensor(stack, target, torch_dtype_of(param_dtype))
    return packed


def _encode_shared(
    stack: torch.Tensor, schema: WeightSchema, param_dtype: str, shared: torch.Tensor, given: GivenScales | None
) -> dict[str, torch.Tensor]:
    """Return codes and scales of a stack [E, N, K] whose experts have the maxima `shared` [E]."""
    kind, bits, exponent, mantissa = cpu_ops.parse_dtype(schema.b_dtype)
    values, amax = stack.float(), shared.view(-1, 1, 1)
    if schema.weight_scale_type == "tensor":
        scale = amax / constant(arithmetic.largest_value(kind, bits, exponent, mantissa), shared)
        tensors = {"weight_scale": scale.flatten()}
        scaled = values * scale.reciprocal()
    else:
        grouped = values.view(*values.shape[:2], -1, schema.weight_scale_group_size)
        bounds = (grouped.amax(-1).clamp_min(1e-30), grouped.amin(-1).clamp_max(-1e-30))
        second = amax if schema.weight_scale_2_type == "tensor" else None
        scales = two_level(group_scales(*bounds, schema), schema, param_dtype, second, given)
        tensors = {"weight_scale": scales.group, "weight_scale_2": scales.second}
        scaled = grouped * scales.inverse().unsqueeze(-1)
        if scales.limit:
            scaled = scaled.clamp(-scales.limit, scales.limit)
        scaled = scaled.view_as(values)
    codes, _, _ = humming().ops.quant_weight(
        scaled.contiguous(),
        source_dtype_str="float32",
        target_dtype_str=schema.b_dtype,
        group_size=0,
        has_scale=False,
        use_e8m0_scale=False,
        has_zero_point=False,
        is_fp_zero_point=False,
    )
    tensors["weight"] = humming().ops.pack_weight(codes, bits)
    return tensors


def _with_error(
    stack: torch.Tensor, tensors: dict[str, torch.Tensor], target: WeightSchema, count_exact: bool
) -> QuantizedStack:
    exact = torch.zeros(len(stack), dtype=torch.int64, device=stack.device)
    if not count_exact and "sums" in TRITON:
        with _LAUNCHING:
            error, power = _kernels().error_sums(stack, tensors, humming_schema(target))
        return QuantizedStack(tensors, error, power, exact)
    error, power = torch_ops.error_sums(stack, tensors, target, exact if count_exact else None)
    counted = num_groups((stack.size(1), stack.size(2)), target) if count_exact else 0
    return QuantizedStack(tensors, error, power, exact, counted)


def _kernels() -> Any:
    """Import the module of Triton kernels; the first import loads Triton."""
    from hqconv.quantization import triton_kernels

    return triton_kernels


def _compensation_kernels() -> Any:
    """Import the module of the Triton kernels of error compensation."""
    from hqconv.quantization import triton_compensation

    return triton_compensation


def check_kernels(device: torch.device) -> None:
    """Build and run a small Triton kernel on a GPU.

    Raises RequestError where Triton cannot build: its launchers need a C compiler.
    """
    try:
        _kernels().folded(torch.ones(1, 2, dtype=torch.float64, device=device))
    except Exception as error:
        raise RequestError(
            "Triton cannot build the kernels that quantize on a GPU: it needs a C compiler.",
            where=str(device),
            expected="gcc or clang on the PATH, or the environment variable CC set to a C compiler",
            found=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
            remedy="Install a C compiler, or use --device cpu: the bytes are the same.",
        ) from error


def search_scales(
    stacks: Sequence[torch.Tensor],
    packed: Sequence[dict[str, torch.Tensor]],
    schema: WeightSchema,
    param_dtype: str,
    importance: torch.Tensor | None,
) -> list[dict[str, torch.Tensor]]:
    """Replace scales and codes of `packed`, the round-to-nearest tensors of stacks [E, N, K], by the best ones."""
    starts = [_search_start(s, p, schema, importance) for s, p in zip(stacks, packed, strict=True)]
    found = search(starts, schema, param_dtype)
    return [
        _replaced(stack, one, choice, schema, param_dtype)
        for stack, one, choice in zip(stacks, packed, found, strict=True)
    ]


def _search_start(
    stack: torch.Tensor, packed: dict[str, torch.Tensor], schema: WeightSchema, importance: torch.Tensor | None
) -> SearchStart:
    weights = None
    if importance is not None:
        weights = importance.to(stack.device, non_blocking=True).double().view(-1, stack.size(2))
    scales = scales_of(packed, schema)

    def errors(tried: CandidateScales, words: torch.Tensor | None = None) -> torch.Tensor:
        if "search" not in TRITON:
            return torch_ops.row_errors(stack, tried, words, schema, weights)
        with _LAUNCHING:
            kernels = _kernels()
            table = None if words is None else kernels.code_values(humming_schema(schema), stack.device)
            done: torch.Tensor = kernels.row_errors(stack, tried, words, table, schema, weights)
        return done

    def fit(tried: CandidateScales) -> tuple[torch.Tensor, torch.Tensor]:
        if "search" not in TRITON:
            return torch_ops.row_fits(stack, tried, schema, weights)
        with _LAUNCHING:
            done: tuple[torch.Tensor, torch.Tensor] = _kernels().row_fits(stack, tried, schema, weights)
        return done

    def sweep(
        start: CandidateScales, least: torch.Tensor, ladder: Ladder, floor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if "sweep" not in TRITON or not _kernels().can_sweep(schema):
            return torch_ops.sweep(stack, start, least, ladder, floor, schema, weights)
        with _LAUNCHING:
            done: tuple[torch.Tensor, torch.Tensor] = _kernels().sweep(
                stack, start, least, ladder, floor, schema, weights
            )
        return done

    def amax() -> torch.Tensor:
        runs = stack.shape[1] // scales.scale.size(1), stack.shape[2] // scales.scale.size(2)
        blocks = stack.view(len(stack), scales.scale.size(1), runs[0], scales.scale.size(2), runs[1])
        return torch.maximum(blocks.amax((2, 4)), -blocks.amin((2, 4))).float().clamp_min(1e-30)

    is_of_rows = schema.weight_scale_type in ("group", "channel")
    return SearchStart(scales, errors(scales, packed["weight"]), errors, fit, amax, sweep if is_of_rows else None)


def _replaced(
    stack: torch.Tensor, packed: dict[str, torch.Tensor], found: SearchResult, schema: WeightSchema, param_dtype: str
) -> dict[str, torch.Tensor]:
    """Return the tensors with the chosen scales; groups that did not change keep their codes."""
    if "search" in TRITON:
        with _LAUNCHING:
            codes = _kernels().chosen_codes(stack, found.scales, found.changed, packed["weight"], schema)
        weight = humming().ops.pack_weight(codes, schema.num_bits)
    else:
        weight = torch_ops.chosen_codes(stack, found.scales, found.changed, packed["weight"], schema)
    return {**packed, **tensors_of(found.scales, schema, param_dtype), "weight": weight}


def _compensated(
    stacks: Sequence[torch.Tensor],
    packed: Sequence[dict[str, torch.Tensor]],
    best: Sequence[dict[str, torch.Tensor]],
    schema: WeightSchema,
    param_dtype: str,
    factors: HessianFactors,
) -> list[dict[str, torch.Tensor]]:
    """Compensate errors, starting from the tensors of `mse`; `packed` are those of round-to-nearest."""
    device = stacks[0].device
    wide = _on_device(factors.wide, device)
    here = HessianFactors(wide, factors.narrow and _on_device(factors.narrow, device), factors.importance)
    by_columns = [_by_columns(stack) for stack in stacks]
    starts = [_compensation_start(*one, schema) for one in zip(by_columns, packed, best, strict=True)]
    done = []
    for stack, one, choice in zip(by_columns, best, compensate(starts, here, schema, param_dtype), strict=True):
        with _LAUNCHING:
            kernels = _compensation_kernels()
            codes = kernels.compensated_codes(stack, choice.scales, choice.changed, one["weight"], schema, wide)
        weight = humming().ops.pack_weight(codes, schema.num_bits)
        done.append({**one, **tensors_of(choice.scales, schema, param_dtype), "weight": weight})
    return done


def _compensation_start(
    stack: torch.Tensor, packed: dict[str, torch.Tensor], best: dict[str, torch.Tensor], schema: WeightSchema
) -> CompensationStart:
    scales = scales_of(best, schema)

    def losses(tried: CandidateScales, factors: TileFactors, words: torch.Tensor | None = None) -> torch.Tensor:
        with _LAUNCHING:
            table = None if words is None else _kernels().code_values(humming_schema(schema), stack.device)
            kernels = _compensation_kernels()
            done: torch.Tensor = kernels.tile_losses(stack, tried, words, table, schema, factors)
        return done

    return CompensationStart(
        scales_of(packed, schema), scales, lambda factors: losses(scales, factors, best["weight"]), losses
    )


def _by_columns(stack: torch.Tensor) -> torch.Tensor:
    """Copy a stack [E, N, K] so that a column's rows are adjacent in memory: every launch reads columns."""
    return stack.flatten(0, 1).t().contiguous().t().view(stack.shape)


def _on_device(factors: TileFactors, device: torch.device) -> TileFactors:
    each = (factors.order, factors.feedback, factors.penalty)
    return TileFactors(*(one.to(device, non_blocking=True) for one in each))
