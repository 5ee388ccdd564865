"""Measure the errors of several schemas for each MoE layer: the encoding of a conversion, without its files.

A batch of experts is read once and encoded under every candidate, one after the other. Only sums are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hqconv.conversion.encode import (
    EncodedBatch,
    ExpertSource,
    LayerEncoder,
    coupled_roles,
    float_stacks,
    is_asynchronous,
    quantizer_of,
)
from hqconv.conversion.encode_batch import Batch, EncodedRuns, Lane, Measurements, projection_errors
from hqconv.formats.source_matrix import SourceMatrix
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.layer_encoding import LayerEncoding
from hqconv.planning.output_units import MoeLayerPlan, OutputUnit
from hqconv.quantization.quantize import ErrorSums
from hqconv.quantization.torch_ops import weighted_sums
from hqconv.quantization.value_checks import deferring_checks

Encodings = Mapping[str, LayerEncoding]  # name of a candidate → the encoding of one layer
_WEIGHTED_BYTES = 24 << 20  # of terms in float64
_BYTES_PER_WEIGHT = 28  # of one matrix as floats, rotated, decoded, and of its codes; with what the heap keeps


def weighted_bytes(planned: MoeLayerPlan) -> int:
    """Return an upper bound of a CPU lane's memory for weighted errors, beside that of a conversion."""
    if planned.encoding.importance is None:
        return 0
    layer = planned.layer
    return _WEIGHTED_BYTES + _BYTES_PER_WEIGHT * layer.intermediate_size * layer.hidden_size


@dataclass(frozen=True)
class CandidateSums:
    """Error of one matrix under one candidate. weighted: sums of the weighted error and power, with importance only."""

    plain: ErrorSums
    weighted: tuple[float, float] | None = None


class _ReadOnce:
    """An expert source that decodes each projection once, for every candidate."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self._known: dict[tuple[int, tuple[str, ...]], dict[str, SourceMatrix]] = {}

    def read_expert(
        self, layer: MoeLayer, expert: int, roles: Sequence[str], device: torch.device, raw: RawExperts | None = None
    ) -> dict[str, SourceMatrix]:
        key = (expert, tuple(roles))
        if key not in self._known:
            self._known[key] = self._source.read_expert(layer, expert, roles, device, raw)
        return self._known[key]


@dataclass(frozen=True, eq=False)
class _Encoded:
    """One candidate's encoding of some experts, without its tensors."""

    candidate: str
    encoded: EncodedBatch
    weighted: dict[str, torch.Tensor] | None  # role → float64 [E, 2]

    @property
    def measured(self) -> list[torch.Tensor]:
        return [*self.encoded.measured, *(self.weighted or {}).values()]

    def sums(self, measured: Sequence[torch.Tensor]) -> dict[str, list[CandidateSums]]:
        """Return the sums by role, from `measured` on the host. Raises as `EncodedBatch.error_sums`."""
        count = len(self.encoded.measured)
        plain = self.encoded.error_sums(measured[:count])
        if self.weighted is None:
            return {role: [CandidateSums(one) for one in of_role] for role, of_role in plain.items()}
        weighted = {role: of_role.tolist() for role, of_role in zip(self.weighted, measured[count:], strict=True)}
        return {
            role: [
                CandidateSums(one, (error, power)) for one, (error, power) in zip(of_role, weighted[role], strict=True)
            ]
            for role, of_role in plain.items()
        }


class MeasureCandidates:
    """The encoding step of the executor: `layers` maps the name of a layer to its candidates' encodings."""

    def __init__(self, layers: Mapping[str, Encodings]) -> None:
        self._layers = layers

    def __call__(
        self,
        source: Source,
        batch: Batch,
        raw: RawExperts | None,
        lane: Lane,
        out: torch.Tensor | None,
        *,
        is_careful: bool = False,
    ) -> EncodedRuns:
        """Encode a batch under every candidate of its layer, as `encode_to_runs` does under one schema."""
        layer, raw = batch.planned.layer, None if raw is None else raw.on(lane.device)
        is_stacked = is_asynchronous(lane.device) or float_stacks(layer, raw) is not None
        parts = []
        # Experts that are decoded one by one are decoded once for all candidates.
        for experts in [batch.experts] if is_stacked else [range(e, e + 1) for e in batch.experts]:
            reader: ExpertSource = source if is_stacked else _ReadOnce(source)
            for name, encoding in self._layers[layer.name].items():
                encoder = LayerEncoder(reader, layer, encoding, lane.device)
                done = encoder.encode(experts, raw, is_careful=is_careful)
                weighted = None
                if encoding.importance is not None:
                    weighted = _weighted(encoder, experts, raw, done)
                parts.append(_Encoded(name, replace(done, tensors={}), weighted))
        each = [one.flatten() for part in parts for one in part.measured]
        joined = torch.cat(each) if each else torch.empty(0, dtype=torch.float64)
        (bits,) = lane.to_host([joined], out)
        wait = lane.arrive()

        def error_sums() -> dict[str, dict[str, list[CandidateSums]]]:
            """Return candidate → role → sums of each expert."""
            if wait is not None:
                wait()
            host = iter(torch.split(bits.view(torch.float64), [one.numel() for one in each]))
            found: dict[str, dict[str, list[CandidateSums]]] = {}
            for part in parts:
                for role, sums in part.sums([next(host).view(one.shape) for one in part.measured]).items():
                    found.setdefault(part.candidate, {}).setdefault(role, []).extend(sums)
            return found

        return EncodedRuns([], wait, error_sums, dict)


def _weighted(
    encoder: LayerEncoder, experts: Sequence[int], raw: RawExperts | None, done: EncodedBatch
) -> dict[str, torch.Tensor]:
    """Return role → sums of the weighted error and power of each expert, float64 [E, 2] on the device."""
    layer, encoding = encoder.layer, encoder.encoding
    found: dict[str, list[torch.Tensor]] = {role: [] for role in layer.roles}
    for roles in coupled_roles(layer):
        weights = quantizer_of(encoding, roles, experts).importance
        assert weights is not None
        weights = weights.to(encoder.device, non_blocking=True)
        for index, expert in enumerate(experts):
            with deferring_checks():  # the encoding has checked these values
                matrices = encoder.read(expert, roles, raw)
            for role in roles:
                tensors = {name: tensor[index] for name, tensor in done.tensors[role].items() if name != "bias"}
                columns = weights if weights.ndim == 1 else weights[index]
                if (order := matrices[role].order) is not None:
                    columns = torch.cat([columns[order], columns[len(order) :]])
                found[role].append(weighted_sums(matrices[role].values(), tensors, encoding.schema, columns))
    return {role: torch.stack(sums) for role, sums in found.items()}


class CandidateMeasurements(Measurements):
    """Error sums of a layer under every candidate, added batch by batch in any order."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, dict[int, dict[str, CandidateSums]]] = {}

    def add(self, experts: Sequence[int], error_sums: Mapping[str, Any], sums: object) -> None:
        """Add a batch: candidate → role → sums of each expert."""
        for candidate, of_roles in error_sums.items():
            of_expert = self._found.setdefault(candidate, {})
            for index, expert in enumerate(experts):
                of_expert[expert] = {role: of_role[index] for role, of_role in of_roles.items()}

    def errors(self, unit: OutputUnit) -> dict[str, Any]:
        """Return candidate → projection → figures of a manifest, with the exact sums they come from.

        `error`, `power`: sums of squares over all experts that were quantized. `weighted_error`, `weighted_power`: with
        importance, over all experts. `math.fsum` is exact: the order of experts does not matter.
        """
        assert isinstance(unit, MoeLayerPlan)
        found = {}
        for candidate, of_expert in self._found.items():
            each = [of_expert[expert] for expert in range(unit.layer.num_experts)]
            plain = [{role: sums.plain for role, sums in one.items()} for one in each]
            errors = projection_errors(plain, is_coded=unit.encoding.is_coded)
            for role, figures in errors.items():
                figures["error"] = math.fsum(one[role].error for one in plain)
                figures["power"] = math.fsum(one[role].power for one in plain)
                weighted = [pair for one in each if (pair := one[role].weighted) is not None]
                if weighted:
                    figures["weighted_error"] = math.fsum(pair[0] for pair in weighted)
                    figures["weighted_power"] = math.fsum(pair[1] for pair in weighted)
            found[candidate] = errors
        return found

    def sums(self, unit: OutputUnit) -> dict[str, dict[str, str]]:
        """Return no content sums."""
        return {}
