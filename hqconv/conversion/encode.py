"""From what a source means to what the target stores: quantized, requantized, or kept as it is.

The conversion and the weights check both get an expert's packed tensors here. How is decided before: see `Encoding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hqconv.conversion.passthrough import codes_of, pass_through, stack_kept
from hqconv.errors import InputError
from hqconv.formats.decode_matrix import SourceMatrix
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.protocols import Source
from hqconv.planning.encoding import Encoding
from hqconv.quantization.coded_matrix import CodedMatrix
from hqconv.quantization.deferred_checks import deferring_checks, is_any
from hqconv.quantization.quantize import ErrorSums, Quantized, QuantizedStack, quantize_stacks
from hqconv.quantization.quantized import Quantizer, stack_tensors
from hqconv.schemas.dtypes import torch_dtype_of

_ASYNCHRONOUS = ("cuda",)  # devices that should not be waited for
COUPLED = (("w1", "w3"), ("w2",))  # projections that share their tensor-level scale


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """All projections of some experts: role → packed tensors [E, …] of the target's schema, and what they cost.

    measured: float64 tensors on the device, which `costs` wants on the host: a caller brings them along with the rest.
    """

    tensors: dict[str, dict[str, torch.Tensor]]
    measured: list[torch.Tensor]
    _costs: Callable[[Sequence[torch.Tensor]], dict[str, list[ErrorSums]]]

    def costs(self, measured: Sequence[torch.Tensor]) -> dict[str, list[ErrorSums]]:
        """What each matrix lost, by role. Raises InputError where a weight is no number, Doubtful as `encode_batch`."""
        return self._costs(measured)


class DeferredCheckError(Exception):
    """A check that was put down would have found something: the batch is to be encoded with `is_careful`."""


def encode_batch(
    source: Source,
    block: MoeLayer,
    experts: Sequence[int],
    raw: RawExperts | None,
    encoding: Encoding,
    device: torch.device,
    *,
    is_careful: bool = False,
) -> EncodedBatch:
    """Encode some experts. `raw` holds their bytes, unless the source reads for itself. Raises as `encode`.

    On a GPU nothing is waited for, and values are looked at in the end: its costs may raise DoubtfulError, unless
    `is_careful`.
    """
    raw = None if raw is None else raw.on(device)
    stacks = _float_stacks(block, raw)
    if stacks is not None:
        done: dict[str, QuantizedStack] = {}
        for roles in _coupled(block):
            floats = [stacks[role] for role in roles]
            quantizer = _quantizer(encoding, roles)
            results = quantize_stacks(floats, encoding.schema, encoding.param_dtype, quantizer=quantizer)
            done |= dict(zip(roles, results, strict=True))
        return _judged_later(block, experts, done, encoding)
    if device.type in _ASYNCHRONOUS and not is_careful:
        with deferring_checks() as doubts:
            done = _encode_together(source, block, experts, raw, encoding, device)
        return _judged_later(block, experts, done, encoding, doubts.all())
    return _encode_each(source, block, experts, raw, encoding, device)


def _judged_later(
    block: MoeLayer,
    experts: Sequence[int],
    done: Mapping[str, QuantizedStack],
    encoding: Encoding,
    doubts: torch.Tensor | None = None,
) -> EncodedBatch:
    """A batch whose numbers, and what was doubted of them, are looked at when its costs are asked for."""
    sums = [stack.sums() for stack in done.values()]

    def costs(measured: Sequence[torch.Tensor]) -> dict[str, list[ErrorSums]]:
        if len(measured) > len(sums) and bool(measured[-1].any()):
            raise DeferredCheckError
        found = {role: stack.costs(one) for (role, stack), one in zip(done.items(), measured, strict=False)}
        for index, expert in enumerate(experts):
            for roles in _coupled(block):
                _check_numbers({_name(block, expert, role): found[role][index] for role in roles}, encoding)
        return found

    measured = sums if doubts is None else [*sums, doubts.double()]
    return EncodedBatch({role: stack.tensors for role, stack in done.items()}, measured, costs)


def _name(block: MoeLayer, expert: int, role: str) -> str:
    ref = block.sources[expert][role]["weight"]
    return f"{ref.name}, expert {expert}" if block.parts[role]["weight"].is_stacked else ref.name


def _coupled(block: MoeLayer) -> Iterator[list[str]]:
    """The block's roles, those together that share their tensor-level scale."""
    for coupled in COUPLED:
        yield [role for role in coupled if role in block.roles]


def _float_stacks(block: MoeLayer, raw: RawExperts | None) -> dict[str, torch.Tensor] | None:
    """Every projection of all experts as [E, N, K], where they are plain numbers; None otherwise."""
    if raw is None or not block.format.is_float or block.has_bias:
        return None
    stacks = {role: raw.stack(role, "weight") for role in block.roles}
    return None if None in stacks.values() else {role: s for role, s in stacks.items() if s is not None}


def _encode_together(
    source: Source,
    block: MoeLayer,
    experts: Sequence[int],
    raw: RawExperts | None,
    encoding: Encoding,
    device: torch.device,
) -> dict[str, QuantizedStack]:
    """Decoded one by one, quantized as stacks: nothing waits for the device, inside `deferring_checks`."""
    done: dict[str, QuantizedStack] = {}
    for roles in _coupled(block):
        each = [source.read_expert(block, expert, roles, device, raw) for expert in experts]
        kept = [pass_through(matrices, encoding) if encoding.is_direct else None for matrices in each]
        direct = [one for one in kept if one is not None]
        if len(direct) == len(each):
            done |= {role: stack_kept([one[role] for one in direct]) for role in roles}
        else:  # none of them, while checks are put down
            done |= _quantized_stacks(each, encoding)
        for role in roles:
            biases = [_bias(matrices[role], encoding) for matrices in each]
            if bias := [one for one in biases if one is not None]:
                done[role] = replace(done[role], tensors={**done[role].tensors, "bias": torch.stack(bias)})
    return done


def _encode_each(
    source: Source,
    block: MoeLayer,
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
        [],
        lambda _: {role: [one.cost for one in parts] for role, parts in each.items()},
    )


def encode(matrices: Mapping[str, SourceMatrix], encoding: Encoding) -> dict[str, Quantized]:
    """An expert's projections that share their tensor-level scale, as packed tensors of the target's schema.

    Each is taken alone and at full size. Raises InputError where a weight is no number, cannot be represented, or
    where gate and up of a source to be kept as it is have different tensor-level scales.
    """
    kept = pass_through(matrices, encoding) if encoding.is_direct else None
    if kept is not None:
        results = {role: one.quantized() for role, one in kept.items()}
    else:
        results = _quantized(matrices, encoding)
    _check_numbers({matrices[role].name: one.cost for role, one in results.items()}, encoding)
    return {role: _with_bias(result, matrices[role], encoding) for role, result in results.items()}


def _quantized(matrices: Mapping[str, SourceMatrix], encoding: Encoding) -> dict[str, Quantized]:
    return {role: stack.split()[0] for role, stack in _quantized_stacks([matrices], encoding).items()}


def _quantized_stacks(
    each: Sequence[Mapping[str, SourceMatrix]], encoding: Encoding
) -> dict[str, QuantizedStack]:
    """Of several experts, those projections that share their tensor-level scale."""
    roles, powers = list(each[0]), None
    if encoding.takes_powers_of_two:
        size = encoding.schema.weight_scale_group_size
        powers = [
            _stack([_scales_per(codes_of(matrices[role]), size) for matrices in each]) for role in roles
        ]
    values = [_stack([matrices[role].values() for matrices in each]) for role in roles]
    done = quantize_stacks(
        values,
        encoding.schema,
        encoding.param_dtype,
        powers,
        count_exact=encoding.is_coded,
        quantizer=_quantizer(encoding, roles),
    )
    return dict(zip(roles, done, strict=True))


def _quantizer(encoding: Encoding, roles: Sequence[str]) -> Quantizer:
    """How projections with the same input are quantized."""
    if encoding.importance is None:
        return Quantizer(encoding.quantizer)
    values = bytearray(encoding.importance["w2" if "w2" in roles else "w13"])
    return Quantizer(encoding.quantizer, torch.frombuffer(values, dtype=torch.float32))


def _stack(matrices: list[torch.Tensor]) -> torch.Tensor:
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)


def _scales_per(coded: CodedMatrix, group_size: int) -> torch.Tensor:
    """The source's scales as float32, one for every `group_size` columns: [N, K / group_size]."""
    return coded.scale.float().repeat_interleave(coded.group_k // group_size, dim=1)


def _with_bias(result: Quantized, matrix: SourceMatrix, encoding: Encoding) -> Quantized:
    """Adds the bias, if there is one, in the parameter dtype."""
    bias = _bias(matrix, encoding)
    return result if bias is None else replace(result, tensors={**result.tensors, "bias": bias})


def _bias(matrix: SourceMatrix, encoding: Encoding) -> torch.Tensor | None:
    """The bias in the parameter dtype, if there is one. Raises InputError where it is no number there."""
    if matrix.bias is None:
        return None
    kept = matrix.bias.to(torch_dtype_of(encoding.param_dtype))
    if is_any(~torch.isfinite(kept)):
        raise InputError(
            "A bias is NaN or infinite, or too large for the parameter dtype.",
            where=f"tensor {matrix.names['bias']}",
            expected=f"numbers that {encoding.param_dtype} can hold",
            remedy="Look at the tensor; for large values try --dtype bfloat16.",
        )
    return kept.contiguous()


def _check_numbers(costs: Mapping[str, ErrorSums], encoding: Encoding) -> None:
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
