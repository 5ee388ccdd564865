"""Matrices whose codes the target keeps, with their scales or those rounded to the parameter dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hqconv.errors import InputError
from hqconv.formats.decode_matrix import SourceMatrix
from hqconv.planning.encoding import Encoding
from hqconv.quantization.coded_matrix import CodedMatrix
from hqconv.quantization.direct_tensors import express, share_scale
from hqconv.quantization.quantized import ErrorSums, Quantized, QuantizedStack, stack_direct
from hqconv.quantization.scale_rounding import round_scales


@dataclass(frozen=True, eq=False)
class PassedThrough:
    """One matrix in Humming's packed form, as `express` gives it.

    rounding: float64 [3] where scales were rounded: error, power and scale change, as of `ErrorSums`.
    """

    tensors: dict[str, torch.Tensor]
    rounding: torch.Tensor | None = None

    def quantized(self) -> Quantized:
        """With its cost on the host: waits for the device."""
        if self.rounding is None:
            return Quantized(self.tensors, ErrorSums(is_direct=True))
        error, power, change = self.rounding.tolist()
        return Quantized(self.tensors, ErrorSums(error, power, is_direct=True, scale_change=change))


def pass_through(matrices: Mapping[str, SourceMatrix], encoding: Encoding) -> dict[str, PassedThrough] | None:
    """The source's own codes; None where gate and up would have to share a scale and do not.

    Raises InputError where they must be kept all the same, or where a scale to be rounded is out of range.
    """
    coded = {role: codes_of(one) for role, one in matrices.items()}
    if share_scale(list(coded.values()), encoding.schema):
        return {role: _kept(one, matrices[role], encoding) for role, one in coded.items()}
    if encoding.must_be_direct:
        names = [one.name for one in matrices.values()]
        raise InputError(
            "Gate and up of an expert have different tensor-level scales: the kernel has one for both.",
            where=f"tensor {names[0]} and {names[-1]}",
            expected="equal scales",
            remedy=f"Convert with --schema {encoding.schema.name}: such experts are quantized anew, and counted.",
        )
    return None


def _kept(coded: CodedMatrix, matrix: SourceMatrix, encoding: Encoding) -> PassedThrough:
    if not encoding.rounds_scales:
        return PassedThrough(express(coded, encoding.schema, encoding.param_dtype))
    rounded = round_scales(coded, encoding.param_dtype, matrix.names)
    return PassedThrough(express(rounded.coded, encoding.schema, encoding.param_dtype), rounded.sums)


def codes_of(matrix: SourceMatrix) -> CodedMatrix:
    """The codes of a matrix whose format has some."""
    assert matrix.coded is not None, f"{matrix.name}: planned to be kept, but its format has no codes"
    return matrix.coded


def stack_kept(kept: Sequence[PassedThrough]) -> QuantizedStack:
    """One projection of several experts."""
    rounding = [one.rounding for one in kept if one.rounding is not None]
    return stack_direct([one.tensors for one in kept], torch.stack(rounding, 1) if rounding else None)
