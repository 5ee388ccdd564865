"""Encode experts in the target's schema: quantize, requantize, or pass codes through.

The conversion and the weights check of `verify` both encode here, as the plan's `LayerEncoding` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from hqconv.calibration.gptq import quantize_by_outputs
from hqconv.calibration.inputs import ExpertActivations, LinearInputs
from hqconv.errors import InputError
from hqconv.formats.encoding import SourceMatrix, resized
from hqconv.formats.source_format import DIRECT_ROUNDED
from hqconv.models.moe_layer import MoeLayer, RawExperts
from hqconv.planning.layer_encoding import GemmEncoding, LayerEncoding
from hqconv.quantization.coded_matrix import (
    CodedMatrix,
    deferring_checks,
    filled,
    group_order,
    is_any,
    not_finite,
    with_rows,
    with_sorted_columns,
)
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import (
    ErrorSums,
    QuantizedStack,
    decoded,
    express,
    join_stacks,
    round_to_param_dtype,
    share_scale,
    stack_direct,
)
from hqconv.schemas.tensors import torch_dtype_of

_ASYNCHRONOUS = ("cuda",)  # types of devices that run ahead of the host


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """All projections of some experts: role → packed tensors [E, …] of the target's schema, and their error sums.

    measured: float64 tensors on the device; the caller copies them to the host, with the rest, for `error_sums`.
    """

    tensors: dict[str, dict[str, torch.Tensor]]
    measured: list[torch.Tensor]
    _error_sums: Callable[[Sequence[torch.Tensor]], dict[str, list[ErrorSums]]]

    def error_sums(self, measured: Sequence[torch.Tensor]) -> dict[str, list[ErrorSums]]:
        """Return error sums of each matrix by role. Raises InputError for a NaN, or DeferredCheckError."""
        return self._error_sums(measured)


class ExpertSource(Protocol):
    """The part of a source that gives the decoded projections of an expert."""

    def read_expert(
        self,
        layer: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
        /,
    ) -> dict[str, SourceMatrix]: ...


def is_asynchronous(device: torch.device) -> bool:
    """Return whether a device runs ahead of the host, so that experts are encoded as one batch."""
    return device.type in _ASYNCHRONOUS


class DeferredCheckError(Exception):
    """A deferred check failed: the batch must be encoded again with `is_careful`."""


@dataclass(frozen=True, eq=False)
class LayerEncoder:
    """Encoding of one layer's experts, as a plan's `LayerEncoding` says."""

    source: ExpertSource
    layer: MoeLayer
    encoding: LayerEncoding
    device: torch.device
    inputs: ExpertActivations | LinearInputs | None = None  # of a calibration

    def encode(
        self, experts: Sequence[int], raw: RawExperts | None, *, is_careful: bool = False
    ) -> EncodedBatch:
        """Encode some experts. Raises as `encode_expert`.

        On a GPU nothing waits for the device, and checks of values are deferred: `error_sums` of the result may raise
        DeferredCheckError, unless `is_careful`.
        """
        raw = None if raw is None else raw.on(self.device)
        stacks = float_stacks(self.layer, raw)
        if self.inputs is not None and not self.encoding.is_direct:
            return self._encode_calibrated(experts, raw, stacks, self.inputs)
        if stacks is not None:
            return self._check_later(experts, self._quantize_floats(stacks))
        if is_asynchronous(self.device) and not is_careful:
            with deferring_checks() as checks:
                done: dict[str, QuantizedStack] = {}
                for roles in self.layer.coupled_roles:
                    encoding = self.encoding.of(roles[0])
                    done |= _encode_stacks([self.read(e, roles, raw) for e in experts], encoding)
            return self._check_later(experts, done, checks.all())
        return self._encode_each(experts, raw)

    def read(
        self, expert: int, roles: Sequence[str], raw: RawExperts | None
    ) -> dict[str, SourceMatrix]:
        """Decode projections of an expert, with zeros that fill the target's last scale group.

        raw: its bytes, unless the source reads for itself. If codes are kept and w2's columns have an order of groups
        (g_idx), they are sorted by group, and the rows of gate and up, which compute them, are put in the same order:
        the expert is the same function.
        """
        matrices = self.source.read_expert(self.layer, expert, roles, self.device, raw)
        if self.encoding.sorts_columns:
            down = matrices.get("w2")
            down = (
                down or self.source.read_expert(self.layer, expert, ["w2"], self.device, raw)["w2"]
            )
            order = None if down.coded is None else group_order(down.coded)
            if order is not None:
                matrices = {
                    role: _reordered(matrix, role, order) for role, matrix in matrices.items()
                }
        return {
            role: matrix.filled(self.encoding.shapes[role]) for role, matrix in matrices.items()
        }

    def _encode_calibrated(
        self,
        experts: Sequence[int],
        raw: RawExperts | None,
        stacks: Mapping[str, torch.Tensor] | None,
        inputs: ExpertActivations | LinearInputs,
    ) -> EncodedBatch:
        """Quantize by the error of the experts' outputs on a calibration's tokens. stacks: of `float_stacks`."""
        layer = self.layer
        encoding = self.encoding
        each = (
            []
            if stacks is not None
            else [self.read(expert, layer.roles, raw) for expert in experts]
        )
        if stacks is None:
            stacks = {role: _stack([one[role].values() for one in each]) for role in layer.roles}
        values = {role: resized(stacks[role], encoding.shapes[role]) for role in layer.roles}
        done: dict[str, QuantizedStack] = {}
        biases: dict[str, torch.Tensor] = {}
        for role in layer.roles:
            if of_role := [
                one for one in (_bias(e[role], encoding.of(role)) for e in each) if one is not None
            ]:
                biases[role] = torch.stack(of_role)
        quantized: dict[str, torch.Tensor] | None = None
        given = {**values, **{f"b{role[1:]}": bias for role, bias in biases.items()}}
        for roles in layer.coupled_roles:
            of_gemm = encoding.of(roles[0])
            if of_gemm.is_direct:
                done |= _encode_stacks(
                    [{role: one[role] for role in roles} for one in each], of_gemm
                )
                continue
            if isinstance(inputs, ExpertActivations) and roles == ("w2",):
                products = inputs.intermediate_products(experts, given, layer.activation, quantized)
            else:
                products = inputs.hidden_products(experts)
            matrices = [values[role] for role in roles]
            found = quantize_by_outputs(matrices, of_gemm.schema, of_gemm.param_dtype, products)
            done |= dict(zip(roles, found, strict=True))
            quantized = {role: decoded(done[role].tensors, of_gemm.schema) for role in roles}
        for role, bias in biases.items():
            done[role] = replace(done[role], tensors={**done[role].tensors, "bias": bias})
        num_tokens = None
        if isinstance(inputs, ExpertActivations) and not encoding.of("w2").is_direct:
            num_tokens = inputs.num_tokens(experts)
        return self._check_later(experts, done, num_tokens=num_tokens)

    def _quantize_floats(self, stacks: Mapping[str, torch.Tensor]) -> dict[str, QuantizedStack]:
        encoding = self.encoding
        done: dict[str, QuantizedStack] = {}
        for roles in self.layer.coupled_roles:
            of_gemm = encoding.of(roles[0])
            results = quantize_stacks(
                [resized(stacks[role], encoding.shapes[role]) for role in roles],
                of_gemm.schema,
                of_gemm.param_dtype,
                quantizer=of_gemm.plain_quantizer,
            )
            done |= dict(zip(roles, results, strict=True))
        return done

    def _check_later(
        self,
        experts: Sequence[int],
        done: Mapping[str, QuantizedStack],
        failed_checks: torch.Tensor | None = None,
        num_tokens: Sequence[int] | None = None,
    ) -> EncodedBatch:
        """Return a batch whose values and deferred checks are checked in its `error_sums`."""
        sums = [stack.sums() for stack in done.values()]
        # the tensors may be freed before
        bare = {role: replace(stack, tensors={}) for role, stack in done.items()}

        def error_sums(measured: Sequence[torch.Tensor]) -> dict[str, list[ErrorSums]]:
            if len(measured) > len(sums) and bool(measured[-1].any()):
                raise DeferredCheckError
            found = {
                role: stack.error_sums(one)
                for (role, stack), one in zip(bare.items(), measured, strict=False)
            }
            for index, expert in enumerate(experts):
                for roles in self.layer.coupled_roles:
                    sums_of = [(self._name(expert, role), found[role][index]) for role in roles]
                    _check_numbers(sums_of, self.encoding.of(roles[0]))
            if num_tokens is not None:
                pairs = zip(found["w2"], num_tokens, strict=True)
                found["w2"] = [replace(sums, num_tokens=count) for sums, count in pairs]
            return found

        measured = sums if failed_checks is None else [*sums, failed_checks.double()]
        tensors = {role: stack.tensors for role, stack in done.items()}
        return EncodedBatch(tensors, measured, error_sums)

    def _encode_each(self, experts: Sequence[int], raw: RawExperts | None) -> EncodedBatch:
        """Decode and encode expert by expert, with every check at once."""
        each: dict[str, list[QuantizedStack]] = {role: [] for role in self.layer.roles}
        for expert in experts:
            for roles in self.layer.coupled_roles:
                for role, one in encode_expert(
                    self.read(expert, roles, raw), self.encoding.of(roles[0])
                ).items():
                    each[role].append(one)
        found = {role: [one.error_sums()[0] for one in parts] for role, parts in each.items()}
        tensors = {
            role: join_stacks([one.tensors for one in parts]) for role, parts in each.items()
        }
        return EncodedBatch(tensors, [], lambda _: found)

    def _name(self, expert: int, role: str) -> str:
        ref = self.layer.sources[expert][role]["weight"]
        return (
            f"{ref.name}, expert {expert}"
            if self.layer.num_experts > 1 and self.layer.slices[role]["weight"].is_stacked
            else ref.name
        )


def _reordered(matrix: SourceMatrix, role: str, order: torch.Tensor) -> SourceMatrix:
    """Return a projection with the expert's intermediate columns in another order; w2 has codes."""
    if role == "w2":
        assert matrix.coded is not None, f"{matrix.name}: its format has no codes"
        return replace(matrix, coded=with_sorted_columns(matrix.coded, order))
    coded = None if matrix.coded is None else with_rows(matrix.coded, order)
    floats, bias = (
        None if one is None else one.index_select(0, order) for one in (matrix.floats, matrix.bias)
    )
    return replace(matrix, coded=coded, floats=floats, bias=bias)


def float_stacks(layer: MoeLayer, raw: RawExperts | None) -> dict[str, torch.Tensor] | None:
    """Return every projection of all experts as [E, N, K], where they are stored as floats; None otherwise."""
    if raw is None or not layer.format.is_float or layer.has_bias:
        return None
    stacks = {role: raw.stack(role) for role in layer.roles}
    return (
        None
        if None in stacks.values()
        else {role: s for role, s in stacks.items() if s is not None}
    )


def encode_expert(
    matrices: Mapping[str, SourceMatrix], encoding: GemmEncoding
) -> dict[str, QuantizedStack]:
    """Encode the projections of an expert that share their tensor-level scale, each at full size, as stacks of one.

    matrices: as `LayerEncoder.read` returns them. Raises InputError where a weight is not finite or cannot be
    represented, and where codes must be kept although gate and up have different tensor-level scales, or columns an
    order of groups.
    """
    stacks = _encode_stacks([matrices], encoding)
    _check_numbers(
        [(matrices[role].name, stack.error_sums()[0]) for role, stack in stacks.items()], encoding
    )
    return stacks


def _encode_stacks(
    each: Sequence[Mapping[str, SourceMatrix]], encoding: GemmEncoding
) -> dict[str, QuantizedStack]:
    """Keep the codes of several experts' projections, or quantize them; their numbers are not checked yet."""
    kept = [_pass_through(matrices, encoding) if encoding.is_direct else None for matrices in each]
    direct = [one for one in kept if one is not None]
    if len(direct) == len(each):
        done = {}
        for role in direct[0]:
            rounding = [sums for one in direct if (sums := one[role][1]) is not None]
            tensors = [one[role][0] for one in direct]
            done[role] = stack_direct(tensors, torch.stack(rounding, 1) if rounding else None)
    else:
        # the orders of columns differ: each expert is encoded alone, when this check fails
        if direct:
            is_any(
                torch.ones(
                    1, dtype=torch.bool, device=next(iter(direct[0].values()))[0]["weight"].device
                )
            )
        done = _quantized_stacks(each, encoding)
    for role in done:
        biases = [_bias(matrices[role], encoding) for matrices in each]
        if bias := [one for one in biases if one is not None]:
            done[role] = replace(
                done[role], tensors={**done[role].tensors, "bias": torch.stack(bias)}
            )
    return done


def _quantized_stacks(
    each: Sequence[Mapping[str, SourceMatrix]], encoding: GemmEncoding
) -> dict[str, QuantizedStack]:
    """Quantize the projections of several experts that share their tensor-level scale."""
    roles = list(each[0])
    powers = None
    if encoding.takes_powers_of_two:
        size = encoding.schema.weight_scale_group_size
        coded = {role: [coded_of(matrices[role]) for matrices in each] for role in roles}
        powers = [
            _stack(
                [
                    one.scale.float().repeat_interleave(one.group_k // size, dim=1)
                    for one in coded[role]
                ]
            )
            for role in roles
        ]
    values = [_stack([matrices[role].values() for matrices in each]) for role in roles]
    done = quantize_stacks(
        values,
        encoding.schema,
        encoding.param_dtype,
        powers,
        count_exact=encoding.is_coded,
        quantizer=encoding.plain_quantizer,
    )
    return dict(zip(roles, done, strict=True))


def _stack(matrices: list[torch.Tensor]) -> torch.Tensor:
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)


def _bias(matrix: SourceMatrix, encoding: GemmEncoding) -> torch.Tensor | None:
    """Return the bias in the parameter dtype, if there is one. Raises InputError where it is not finite there."""
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


def _check_numbers(error_sums: Sequence[tuple[str, ErrorSums]], encoding: GemmEncoding) -> None:
    """Refuse weights that are not finite, before all else: under a shared scale a NaN spoils the partner's codes too.

    error_sums: of matrices that share their scale, each with its tensor's name, which gate and up may share.
    """
    for name, sums in error_sums:
        if not sums.is_finite:
            raise not_finite(name)
    for name, sums in error_sums:
        if not math.isfinite(sums.error):
            raise InputError(
                "A weight is too large for the schema: it would decode to infinity or NaN.",
                where=f"tensor {name}, schema {encoding.schema.name}, {encoding.param_dtype}",
                remedy="Try --dtype bfloat16, or look at the tensor: such values are rarely meant.",
            )


# Packed tensors of a matrix whose codes were kept, and float64 [3] where scales were rounded: error, power and scale
# change, as in `ErrorSums`.
_Kept = tuple[dict[str, torch.Tensor], torch.Tensor | None]


def _pass_through(
    matrices: Mapping[str, SourceMatrix], encoding: GemmEncoding
) -> dict[str, _Kept] | None:
    """Keep the source's codes; None where gate and up must share a scale and have different ones.

    And None where the groups' columns are not adjacent: of gate and up with an order (g_idx), since the kernel has one
    input for all experts, and of w2 if its groups are not of equal size.
    Raises InputError where such codes must be kept, or where a scale to be rounded is out of range.
    """
    scattered = next(
        (
            one
            for one in matrices.values()
            if one.coded is not None and one.coded.column_groups is not None
        ),
        None,
    )
    if scattered is not None:
        if encoding.must_be_direct:
            raise InputError(
                "The columns of a matrix are grouped by g_idx in an order that the kernel does not have.",
                where=f"tensor {scattered.names.get('g_idx', scattered.name)}",
                expected="column // group size; for w2 any order of groups of equal size",
                found="another order",
                remedy=f"Convert with --schema {encoding.schema.name}: such matrices are quantized anew, and counted; "
                "the codes of all others are kept.",
            )
        return None
    coded = {role: coded_of(one) for role, one in matrices.items()}
    if share_scale(list(coded.values()), encoding.schema):
        return {
            role: _pass_through_one(one, matrices[role], encoding) for role, one in coded.items()
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


def _pass_through_one(coded: CodedMatrix, matrix: SourceMatrix, encoding: GemmEncoding) -> _Kept:
    if encoding.conversion != DIRECT_ROUNDED:
        return express(coded, encoding.schema, encoding.param_dtype), None
    rounded = round_to_param_dtype(coded, encoding.param_dtype, matrix.names)
    return express(rounded.coded, encoding.schema, encoding.param_dtype), rounded.sums


def coded_of(matrix: SourceMatrix) -> CodedMatrix:
    """Return the codes of a matrix whose format stores codes, at the size that the target stores."""
    assert matrix.coded is not None, (
        f"{matrix.name}: planned to be kept, but its format has no codes"
    )
    return matrix.coded if matrix.stored is None else filled(matrix.coded, matrix.stored)
