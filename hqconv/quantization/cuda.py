"""Quantization on CUDA: Humming's own ops, and the contract's recipe where matrices share a scale.

Legend: E experts, N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from hqconv.cpu_loops import arithmetic
from hqconv.humming_layout import cpu_ops
from hqconv.humming_layout.runtime import humming
from hqconv.humming_layout.transform import humming_schema
from hqconv.quantization.cuda_search import improved
from hqconv.quantization.quantized import RTN, QuantizedStack, Quantizer, fold_sum, num_groups
from hqconv.quantization.two_level_scales import GivenScales, two_level
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

_BUILDING = threading.Lock()  # one lane builds a kernel, the others find it
_CANNOT_BUILD = threading.Event()


def quantize_stacks(
    stacks: Sequence[torch.Tensor],
    schema: WeightSchema,
    param_dtype: str,
    given: Sequence[GivenScales] | None,
    count_exact: bool,
    quantizer: Quantizer = RTN,
) -> list[QuantizedStack]:
    """`hqconv.quantization.quantize.quantize_stacks` on a CUDA device."""
    shared = None
    if schema.is_coupled or schema.weight_scale_2_type != "none":
        shared = torch.stack([s.abs().amax((1, 2)) for s in stacks]).amax(0).float().clamp_min(1e-30)
    if given is None and quantizer.name != RTN.name:
        return _quantize_best(stacks, schema, param_dtype, shared, count_exact, quantizer.importance)
    if given is None and (joined := _joined(stacks)) is not None:
        repeated = None if shared is None else shared.repeat(len(stacks))
        return _quantize(joined, schema, param_dtype, repeated, None, count_exact).cut(len(stacks))
    each: Sequence[GivenScales | None] = given or [None] * len(stacks)
    return [
        _quantize(s, schema, param_dtype, shared, g, count_exact) for s, g in zip(stacks, each, strict=True)
    ]


def _joined(stacks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Stacks that lie one after the other in memory, as gate's and up's often do, as one: half as many launches."""
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
    importance: torch.Tensor | None,
) -> list[QuantizedStack]:
    """With the scales of the least squared error."""
    packed = [_rounded(stack, schema, param_dtype, shared, None) for stack in stacks]
    best = improved(stacks, packed, schema, param_dtype, importance)
    return [_with_error(stack, one, schema, count_exact) for stack, one in zip(stacks, best, strict=True)]


def _rounded(
    stack: torch.Tensor,
    schema: WeightSchema,
    param_dtype: str,
    shared: torch.Tensor | None,
    given: GivenScales | None,
) -> dict[str, torch.Tensor]:
    """The packed tensors of a stack, rounded to nearest."""
    if shared is not None:
        return _encode_shared(stack, schema, param_dtype, shared, given)
    target = humming_schema(schema)
    packed: dict[str, torch.Tensor] = target.quant_tensor(stack, target, torch_dtype_of(param_dtype))
    return packed


def _encode_shared(
    stack: torch.Tensor,
    schema: WeightSchema,
    param_dtype: str,
    shared: torch.Tensor,
    given: GivenScales | None,
) -> dict[str, torch.Tensor]:
    """Codes and scales of a stack [E, N, K] whose experts have the maxima `shared` [E]."""
    kind, bits, exponent, mantissa = cpu_ops.parse_dtype(schema.b_dtype)
    largest = shared.new_tensor(arithmetic.largest_value(kind, bits, exponent, mantissa))
    values, amax = stack.float(), shared.view(-1, 1, 1)
    if schema.weight_scale_type == "tensor":
        scale = amax / largest
        tensors = {"weight_scale": scale.flatten()}
        scaled = values * scale.reciprocal()
    else:
        grouped = values.view(*values.shape[:2], -1, schema.weight_scale_group_size)
        group_scale = grouped.abs().amax(-1).clamp_min(1e-30) / largest
        second = amax if schema.weight_scale_2_type == "tensor" else None
        stored, stored_2, scale_2, limit = two_level(group_scale, schema, param_dtype, second, given)
        tensors = {"weight_scale": stored, "weight_scale_2": stored_2}
        effective = stored.float() * scale_2
        inverse = torch.where(effective > 0, effective.reciprocal(), torch.zeros_like(effective))
        scaled = (grouped * inverse.unsqueeze(-1)).clamp(-limit, limit).view_as(values)
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
    num_experts, schema = len(stack), humming_schema(target)
    counted = num_groups((stack.size(1), stack.size(2)), target) if count_exact else 0
    exact = torch.zeros(num_experts, dtype=torch.int64, device=stack.device)
    sums = None if counted else _sums_at_once(stack, tensors, schema)
    if sums is None:
        values = stack.double()
        difference = values - schema.dequant_tensors(dict(tensors)).double()
        if counted:
            exact = (difference.view(num_experts, counted, -1) == 0).all(-1).sum(-1)
        sums = fold_sum(fold_sum(difference.square_())), fold_sum(fold_sum(values.square_()))
    return QuantizedStack(tensors, *sums, exact, counted)


def _sums_at_once(
    stack: torch.Tensor, tensors: dict[str, torch.Tensor], schema: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The sums by a kernel of our own, on a GPU; None where none can be built: without a C compiler, say."""
    if not stack.is_cuda or _CANNOT_BUILD.is_set():
        return None
    with _BUILDING:
        try:
            from hqconv.quantization.triton_sums import error_sums  # loads Triton

            return error_sums(stack, tensors, schema)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - whatever keeps Triton from building; torch gives the same sums
            _CANNOT_BUILD.set()
            return None
