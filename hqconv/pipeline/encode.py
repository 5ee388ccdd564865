"""From what a source means to what the target stores: quantized, requantized, or kept as it is.

The conversion and the weights check both get an expert's packed tensors here. How is decided before: see `Encoding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hqconv.backends.encoded import stack_tensors
from hqconv.backends.quantize import Cost, Quantized, QuantizedStack, quantize, quantize_stacks
from hqconv.decode.coded import Coded
from hqconv.decode.express import express, share_scale
from hqconv.decode.matrix import SourceMatrix
from hqconv.errors import InputError
from hqconv.experts.block import ExpertBlock
from hqconv.planning.encoding import Encoding
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.sources.raw import RawExperts
from hqconv.sources.source import Source

COUPLED = (("w1", "w3"), ("w2",))  # projections that share their tensor-level scale


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """All projections of some experts: role → packed tensors [E, …] of the target's schema, and what they cost."""

    tensors: dict[str, dict[str, torch.Tensor]]
    _costs: Callable[[], dict[str, list[Cost]]]

    def costs(self) -> dict[str, list[Cost]]:
        """What each matrix lost, by role; waits for the device. Raises InputError where a weight is no number."""
        return self._costs()


def encode_batch(
    source: Source,
    block: ExpertBlock,
    experts: Sequence[int],
    raw: RawExperts | None,
    encoding: Encoding,
    device: torch.device,
) -> EncodedBatch:
    """Encode some experts. `raw` holds their bytes, unless the source reads for itself. Raises as `encode`."""
    stacks = _float_stacks(block, raw)
    if stacks is None:
        return _encode_each(source, block, experts, raw, encoding, device)
    done: dict[str, QuantizedStack] = {}
    for roles in _coupled(block):
        floats = [stacks[role].to(device, non_blocking=True) for role in roles]
        results = quantize_stacks(floats, encoding.schema, encoding.param_dtype)
        done |= dict(zip(roles, results, strict=True))

    def costs() -> dict[str, list[Cost]]:
        found = {role: stack.costs() for role, stack in done.items()}
        for index, expert in enumerate(experts):
            for roles in _coupled(block):
                _check_numbers({_name(block, expert, role): found[role][index] for role in roles}, encoding)
        return found

    return EncodedBatch({role: stack.tensors for role, stack in done.items()}, costs)


def _name(block: ExpertBlock, expert: int, role: str) -> str:
    ref = block.sources[expert][role]["weight"]
    return f"{ref.name}, expert {expert}" if block.parts[role]["weight"].is_stacked else ref.name


def _coupled(block: ExpertBlock) -> Iterator[list[str]]:
    """The block's roles, those together that share their tensor-level scale."""
    for coupled in COUPLED:
        yield [role for role in coupled if role in block.roles]


def _float_stacks(block: ExpertBlock, raw: RawExperts | None) -> dict[str, torch.Tensor] | None:
    """Every projection of all experts as [E, N, K], where they are plain numbers; None otherwise."""
    if raw is None or not block.format.is_float or block.has_bias:
        return None
    stacks = {role: raw.stack(role, "weight") for role in block.roles}
    return None if None in stacks.values() else {role: s for role, s in stacks.items() if s is not None}


def _encode_each(
    source: Source,
    block: ExpertBlock,
    experts: Sequence[int],
    raw: RawExperts | None,
    encoding: Encoding,
    device: torch.device,
) -> EncodedBatch:
    """Expert by expert, where decoding is needed."""
    each: dict[str, list[Quantized]] = {role: [] for role in block.roles}
    for expert in experts:
        for roles in _coupled(block):
            matrices = source.read_expert(block, expert, roles, device, raw)
            for role, one in encode(matrices, encoding).items():
                each[role].append(one)
    return EncodedBatch(
        {role: stack_tensors([one.tensors for one in parts]) for role, parts in each.items()},
        lambda: {role: [one.cost for one in parts] for role, parts in each.items()},
    )


def encode(matrices: Mapping[str, SourceMatrix], encoding: Encoding) -> dict[str, Quantized]:
    """An expert's projections that share their tensor-level scale, as packed tensors of the target's schema.

    Each is taken alone and at full size. Raises InputError where a weight is no number, cannot be represented, or
    where gate and up of a source to be kept as it is have different tensor-level scales.
    """
    results = _kept(matrices, encoding) if encoding.is_direct else None
    if results is None:
        results = _quantized(matrices, encoding)
        _check_numbers({matrices[role].name: one.cost for role, one in results.items()}, encoding)
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


def _check_numbers(costs: Mapping[str, Cost], encoding: Encoding) -> None:
    """Refuse what is no number, first of all: under a shared scale a NaN spoils its partner's codes too.

    `costs`: tensor name → cost, of matrices that share their scale.
    """
    for name, cost in costs.items():
        if not cost.is_finite:
            raise InputError(
                "A weight is NaN or infinite.",
                where=f"tensor {name}",
                expected="finite numbers",
                remedy="The checkpoint is damaged or was saved from a diverged training; get a good copy.",
            )
    for name, cost in costs.items():
        if not math.isfinite(cost.error):
            raise InputError(
                "A weight is too large for the schema: it would decode to infinity or NaN.",
                where=f"tensor {name}, schema {encoding.schema.name}, {encoding.param_dtype}",
                remedy="Try --dtype bfloat16, or look at the tensor: such values are rarely meant.",
            )
