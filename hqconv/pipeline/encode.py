"""From what a source stores to what the target stores: quantized, requantized, or kept as it is.

The conversion and the weights check both get an expert's packed tensors here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hqconv.backends.quantize import Cost, Quantized, quantize, torch_dtype
from hqconv.decode import Coded, express, share_scale
from hqconv.errors import InputError
from hqconv.formats.format import DIRECT, SourceFormat, conversion_of
from hqconv.schemas.target import TargetSchema

if TYPE_CHECKING:
    from hqconv.plan.plan import Request
    from hqconv.sources.stored import StoredMatrix

COUPLED = (("w1", "w3"), ("w2",))  # projections that share their tensor-level scale


def encode(stored: Mapping[str, StoredMatrix], request: Request) -> dict[str, Quantized]:
    """An expert's projections that share their tensor-level scale, as packed tensors of the request's schema.

    Each is taken alone and at full size. Raises InputError where a weight is no number, cannot be represented, or
    where gate and up of a source to be kept as it is have different tensor-level scales.
    """
    source = next(iter(stored.values())).format
    if conversion_of(source, request.schema, request.param_dtype) == DIRECT:
        coded = {role: one.coded() for role, one in stored.items()}
        if share_scale(list(coded.values()), request.schema):
            results = {role: _direct(one, request) for role, one in coded.items()}
            return _with_biases(stored, results, request)
        if request.must_be_direct:
            raise _not_shared(stored, request)
    results = _quantize(stored, request)
    _check_numbers([one.name for one in stored.values()], list(results.values()), request)
    return _with_biases(stored, results, request)


def _direct(coded: Coded, request: Request) -> Quantized:
    tensors = express(coded, request.schema, request.param_dtype)
    return Quantized(tensors, Cost(is_direct=True))


def _quantize(stored: Mapping[str, StoredMatrix], request: Request) -> dict[str, Quantized]:
    matrices = [one.matrix() for one in stored.values()]
    powers = None
    if takes_powers_of_two(next(iter(stored.values())).format, request.schema):
        powers = [_scales_per(one.coded(), request.schema.weight_scale_group_size) for one in stored.values()]
    is_coded = not next(iter(stored.values())).format.is_float
    done = quantize(matrices, request.schema, request.param_dtype, powers, count_exact=is_coded)
    return dict(zip(stored, done, strict=True))


def takes_powers_of_two(source: SourceFormat, schema: TargetSchema) -> bool:
    """Whether fp8 group scales under a second scale can stand for the source's powers of two: mxfp4 to nvfp4."""
    return (
        source.scale_dtype == "float8e8m0"
        and source.b_dtype == schema.b_dtype
        and schema.bs_dtype == "float8e4m3"
        and schema.weight_scale_2_type == "tensor"
        and source.group_n == 1
        and source.group_k % schema.weight_scale_group_size == 0
    )


def _scales_per(coded: Coded, group_size: int) -> torch.Tensor:
    """The source's scales as float32, one for every `group_size` columns: [N, K / group_size]."""
    return coded.scale.float().repeat_interleave(coded.group_k // group_size, dim=1)


def _with_biases(
    stored: Mapping[str, StoredMatrix], results: Mapping[str, Quantized], request: Request
) -> dict[str, Quantized]:
    """Adds the biases, in the parameter dtype."""
    done = {}
    for role, result in results.items():
        bias = stored[role].bias
        tensors = result.tensors
        if bias is not None:
            kept = bias.to(torch_dtype(request.param_dtype))
            if not bool(torch.isfinite(kept).all()):
                raise InputError(
                    "A bias is NaN or infinite, or too large for the parameter dtype.",
                    where=f"tensor {stored[role].names['bias']}",
                    expected=f"numbers that {request.param_dtype} can hold",
                    remedy="Look at the tensor; for large values try --dtype bfloat16.",
                )
            tensors = {**tensors, "bias": kept.contiguous()}
        done[role] = replace(result, tensors=tensors)
    return done


def _not_shared(stored: Mapping[str, StoredMatrix], request: Request) -> InputError:
    names = [one.name for one in stored.values()]
    return InputError(
        "Gate and up of an expert have different tensor-level scales: the kernel has one for both.",
        where=f"tensor {names[0]} and {names[-1]}",
        expected="equal scales",
        remedy=f"Convert with --schema {request.schema.name}: such experts are quantized anew, and counted.",
    )


def _check_numbers(names: Sequence[str], results: Sequence[Quantized], request: Request) -> None:
    """Refuse what is no number, first of all: under a shared scale a NaN spoils its partner's codes too."""
    for name, result in zip(names, results, strict=True):
        if not result.is_finite:
            raise InputError(
                "A weight is NaN or infinite.",
                where=f"tensor {name}",
                expected="finite numbers",
                remedy="The checkpoint is damaged or was saved from a diverged training; get a good copy.",
            )
    for name, result in zip(names, results, strict=True):
        if not math.isfinite(result.cost.error):
            raise InputError(
                "A weight is too large for the schema: it would decode to infinity or NaN.",
                where=f"tensor {name}, schema {request.schema.name}, {request.param_dtype}",
                remedy="Try --dtype bfloat16, or look at the tensor: such values are rarely meant.",
            )
