"""The `weights` check of one expert: decode it, compare it with the source, measure it, and list what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from hqconv.artifact.expert_reader import ExpertReader, read_packed_expert, roles_of
from hqconv.artifact.reader import Artifact
from hqconv.conversion.encode import encode, read_matrices
from hqconv.errors import HqconvError
from hqconv.formats.source_matrix import SourceMatrix
from hqconv.layout_decoder.decode import DecodedStack, bits_of, decode_packed
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.layer_encoding import LayerEncoding
from hqconv.quantization.hadamard import rotate
from hqconv.quantization.quantize import Quantized
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import code_of_torch
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.verification.comparison import GemmPosition, compare, fingerprints
from hqconv.verification.figures import Figures, measure
from hqconv.verification.fused_exponents import FusedExponents, folding_of, misread_code
from hqconv.verification.recomputed_sums import Totals, expert_totals, stack_totals
from hqconv.verification.result import Finding

_CPU = torch.device("cpu")


@dataclass
class Outcome:
    """Result of the check of one expert.

    expected, found: fingerprints by role; `found` only of projections that are not as expected. content: content sums
    by role.
    """

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=dict)
    expected: dict[str, bytes] = field(default_factory=dict)
    found: dict[str, bytes] = field(default_factory=dict)
    content: dict[str, Totals] = field(default_factory=dict)

    def note(self, where: str, what: str, expected: object, found: object) -> None:
        """Note one thing that is wrong."""
        self.findings.append(Finding(where, what, str(expected), str(found)))


@dataclass(frozen=True, eq=False)
class Original:
    """A layer of the source, and the encoding that turns it into the artifact's layer."""

    source: Source
    layer: MoeLayer
    encoding: LayerEncoding


class Job:
    """Check of one layer: `run` is called once per expert, from any thread. `findings` concern the layer as a whole."""

    def __init__(
        self, artifact: Artifact, layer: MoeLayer, original: Original | None, shards: Mapping[str, str]
    ) -> None:
        """Check the headers of all ranks. shards: tensor name → file, of the checkpoint layout."""
        self.artifact, self.layer, self.original = artifact, layer, original
        self.shards, self.schema = shards, artifact.schema_of(layer.name)
        self.findings: list[Finding] = []
        is_kernel = artifact.spec.layout == names.KERNEL
        self.reader = ExpertReader(artifact, layer, self._note) if is_kernel else None
        self.folding = self._folding()
        self.misread = misread_code(artifact, layer.name)

    def _folding(self) -> FusedExponents | None:
        """Fusion of exponents into codes; None without good headers, since nothing is compared then."""
        if self.original is None or self.reader is None or not self.reader.forms:
            return None
        try:
            return folding_of(self.artifact, self.layer)
        except (HqconvError, KeyError, OSError):  # noted by the reader
            return None

    def _note(self, where: str, what: str, expected: object, found: object) -> None:
        self.findings.append(Finding(where, what, str(expected), str(found)))

    def run(self, expert: int) -> Outcome:
        """Check one expert."""
        outcome = Outcome()
        for gemm in names.GEMMS:
            roles = roles_of(self.layer, gemm)
            found = self._read(gemm, roles, expert, outcome)
            for role, matrix in found.items():
                is_flushed = matrix.flushed is not None and bool(matrix.flushed.any())
                totals = stack_totals(matrix, self.schema)
                outcome.content[role] = expert_totals(totals, 0, is_flushed=is_flushed)
            try:
                stored = self._read_source(roles, expert)
                results = encode(expert, stored, self.original.encoding) if self.original is not None else {}
            except HqconvError as error:
                outcome.note(f"source: {error.where}", error.what, error.expected, error.found)
                continue
            for role, matrix in found.items():
                source = _rotated(stored[role].values(), self.schema) if stored else None
                figures = measure(matrix, source, self.schema, self.artifact.param_dtype, self.misread)
                outcome.figures[role] = figures
                if not math.isfinite(figures.decoded_power):
                    where = f"layer {self.layer.name}, {role} of expert {expert}"
                    outcome.note(where, "Decoded weights are not finite.", "numbers", "NaN or infinity")
                if role in results:
                    figures.quantizer = results[role].error_sums
                    figures.is_folded = self.folding is not None
            self._compare(found, results, gemm, expert, outcome)
        return outcome

    def _read(self, gemm: str, roles: Sequence[str], expert: int, outcome: Outcome) -> dict[str, DecodedStack]:
        if self.reader is not None:
            return self.reader.read(gemm, expert, outcome.note)
        read = partial(read_packed_expert, self.artifact, self.layer, shards=self.shards, note=outcome.note)
        found = {role: read(role, expert) for role in roles}
        return {role: matrix for role, matrix in found.items() if matrix is not None}

    def _read_source(self, roles: Sequence[str], expert: int) -> dict[str, SourceMatrix]:
        if self.original is None:
            return {}
        original = self.original
        return read_matrices(original.source, original.layer, expert, roles, _CPU, None, original.encoding)

    def _compare(
        self,
        found: Mapping[str, DecodedStack],
        results: Mapping[str, Quantized],
        gemm: str,
        expert: int,
        outcome: Outcome,
    ) -> None:
        quantized = {
            role: {name: tensor.unsqueeze(0) for name, tensor in one.tensors.items()} for role, one in results.items()
        }
        expected = self.expected(quantized)
        position = GemmPosition(self.artifact, self.layer, gemm, expert, self.shards)
        for role, matrix in expected.items():
            [outcome.expected[role]] = fingerprints(matrix.codes)
            if role in found and not compare(found, expected, role, position, outcome.note):
                [outcome.found[role]] = fingerprints(found[role].codes)

    def expected(self, quantized: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, DecodedStack]:
        """Expected projections of the artifact, by role, from the quantizer's tensors [E, …]."""
        expected = {}
        for role, tensors in quantized.items():
            bits = {name: bits_of(tensor) for name, tensor in tensors.items()}
            scale_dtype = code_of_torch(tensors["weight_scale"].dtype)
            expected[role] = decode_packed(bits, self.schema, scale_dtype)
        return expected if self.folding is None else self.folding.fold(expected)


def _rotated(values: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """Source weights, rotated if the schema rotates them before quantization."""
    return rotate(values, schema.rotation) if schema.rotation else values
