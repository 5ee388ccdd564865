"""Measure the errors of several schemas for each MoE layer: the encoding of a conversion, without its files.

A batch of experts is read once and encoded under every candidate, one after the other. Only sums are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hqconv.conversion.encode import EncodedBatch, ExpertSource, LayerEncoder, float_stacks, is_asynchronous
from hqconv.conversion.encode_batch import Batch, EncodedRuns, Lane, Measurements, projection_errors
from hqconv.formats.source_matrix import SourceMatrix
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.layer_encoding import LayerEncoding
from hqconv.planning.output_units import MoeLayerPlan, OutputUnit
from hqconv.quantization.quantize import ErrorSums

Encodings = Mapping[str, LayerEncoding]  # name of a candidate → the encoding of one layer


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
        parts: list[tuple[str, EncodedBatch]] = []  # candidate, and its encoding without tensors
        # Experts that are decoded one by one are decoded once for all candidates.
        for experts in [batch.experts] if is_stacked else [range(e, e + 1) for e in batch.experts]:
            reader: ExpertSource = source if is_stacked else _ReadOnce(source)
            for name, encoding in self._layers[layer.name].items():
                encoder = LayerEncoder(reader, layer, encoding, lane.device)
                parts.append((name, replace(encoder.encode(experts, raw, is_careful=is_careful), tensors={})))
        each = [one.flatten() for _, encoded in parts for one in encoded.measured]
        joined = torch.cat(each) if each else torch.empty(0, dtype=torch.float64)
        (bits,) = lane.to_host([joined], out)
        wait = lane.arrive()

        def error_sums() -> dict[str, dict[str, list[ErrorSums]]]:
            """Return candidate → role → sums of each expert."""
            if wait is not None:
                wait()
            host = iter(torch.split(bits.view(torch.float64), [one.numel() for one in each]))
            found: dict[str, dict[str, list[ErrorSums]]] = {}
            for name, encoded in parts:
                measured = [next(host).view(one.shape) for one in encoded.measured]
                for role, sums in encoded.error_sums(measured).items():
                    found.setdefault(name, {}).setdefault(role, []).extend(sums)
            return found

        return EncodedRuns([], wait, error_sums, dict)


class CandidateMeasurements(Measurements):
    """Error sums of a layer under every candidate, added batch by batch in any order."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, dict[int, dict[str, ErrorSums]]] = {}

    def add(self, experts: Sequence[int], error_sums: Mapping[str, Any], sums: object) -> None:
        """Add a batch: candidate → role → sums of each expert."""
        for candidate, of_roles in error_sums.items():
            of_expert = self._found.setdefault(candidate, {})
            for index, expert in enumerate(experts):
                of_expert[expert] = {role: of_role[index] for role, of_role in of_roles.items()}

    def errors(self, unit: OutputUnit) -> dict[str, Any]:
        """Return candidate → projection → figures of a manifest, with the exact sums they come from.

        `error`, `power`: sums of squares over all experts that were quantized. `math.fsum` is exact: the order of
        experts does not matter.
        """
        assert isinstance(unit, MoeLayerPlan)
        found = {}
        for candidate, of_expert in self._found.items():
            each = [of_expert[expert] for expert in range(unit.layer.num_experts)]
            errors = projection_errors(each, is_coded=unit.encoding.is_coded)
            for role, figures in errors.items():
                figures["error"] = math.fsum(one[role].error for one in each)
                figures["power"] = math.fsum(one[role].power for one in each)
            found[candidate] = errors
        return found

    def sums(self, unit: OutputUnit) -> dict[str, dict[str, str]]:
        """Return no content sums."""
        return {}
