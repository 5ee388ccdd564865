"""From what a source means to what the target stores: quantized, requantized, or kept as it is.

The conversion and the weights check both get an expert's packed tensors here. How is decided before: see `Encoding`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hqconv.backends.quantize import Cost, Quantized, quantize
from hqconv.decode.coded import Coded
from hqconv.decode.express import express, share_scale
from hqconv.decode.matrix import SourceMatrix
from hqconv.errors import InputError
from hqconv.planning.encoding import Encoding
from hqconv.schemas.dtypes import torch_dtype_of

COUPLED = (("w1", "w3"), ("w2",))  # projections that share their tensor-level scale


def encode(matrices: Mapping[str, SourceMatrix], encoding: Encoding) -> dict[str, Quantized]:
    """An expert's projections that share their tensor-level scale, as packed tensors of the target's schema.

    Each is taken alone and at full size. Raises InputError where a weight is no number, cannot be represented, or
    where gate and up of a source to be kept as it is have different tensor-level scales.
    """
    results = _kept(matrices, encoding) if encoding.is_direct else None
    if results is None:
        results = _quantized(matrices, encoding)
        _check_numbers([one.name for one in matrices.values()], list(results.values()), encoding)
    return {role: _with_bias(result, matrices[role], encoding) for role, result in results.items()}


def _kept(matrices: Mapping[str, SourceMatrix], encoding: Encoding) -> dict[str, Quantized] | None:
    """The source's own codes and scales; None where gate and up would have to share a scale and do not."""
    coded = {role: _codes(one) for role, one in matrices.items()}
    if share_scale(list(coded.values()), encoding.schema):
        return {
            role: Quantized(express(one, encoding.schema, encoding.param_dtype), Cost(is_direct=True))
            for role, one in coded.items()
        }
    if encoding.must_be_direct:
        names = [one.name for one in matrices.values()]
        raise InputError(
            "Gate and up of an expert have different tensor-level scales: the kernel has one for both.",
            where=f"tensor {names[0]} and {names[-1]}",
            expected="equal scales",
            remedy=f"Convert with --schema {encoding.schema.name}: such experts are quantized anew, and counted.",
        )
    return None


def _codes(matrix: SourceMatrix) -> Coded:
    assert matrix.coded is not None, f"{matrix.name}: planned to be kept, but its format has no codes"
    return matrix.coded


def _quantized(matrices: Mapping[str, SourceMatrix], encoding: Encoding) -> dict[str, Quantized]:
    powers = None
    if encoding.takes_powers_of_two:
        size = encoding.schema.weight_scale_group_size
        powers = [_scales_per(_codes(one), size) for one in matrices.values()]
    done = quantize(
        [one.values() for one in matrices.values()],
        encoding.schema,
        encoding.param_dtype,
        powers,
        count_exact=encoding.is_coded,
    )
    return dict(zip(matrices, done, strict=True))


def _scales_per(coded: Coded, group_size: int) -> torch.Tensor:
    """The source's scales as float32, one for every `group_size` columns: [N, K / group_size]."""
    return coded.scale.float().repeat_interleave(coded.group_k // group_size, dim=1)


def _with_bias(result: Quantized, matrix: SourceMatrix, encoding: Encoding) -> Quantized:
    """Adds the bias, if there is one, in the parameter dtype."""
    if matrix.bias is None:
        return result
    kept = matrix.bias.to(torch_dtype_of(encoding.param_dtype))
    if not bool(torch.isfinite(kept).all()):
        raise InputError(
            "A bias is NaN or infinite, or too large for the parameter dtype.",
            where=f"tensor {matrix.names['bias']}",
            expected=f"numbers that {encoding.param_dtype} can hold",
            remedy="Look at the tensor; for large values try --dtype bfloat16.",
        )
    return replace(result, tensors={**result.tensors, "bias": kept.contiguous()})


def _check_numbers(names: Sequence[str], results: Sequence[Quantized], encoding: Encoding) -> None:
    """Refuse what is no number, first of all: under a shared scale a NaN spoils its partner's codes too."""
    for name, result in zip(names, results, strict=True):
        if not result.cost.is_finite:
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
                where=f"tensor {name}, schema {encoding.schema.name}, {encoding.param_dtype}",
                remedy="Try --dtype bfloat16, or look at the tensor: such values are rarely meant.",
            )
