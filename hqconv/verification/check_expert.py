"""One expert of the `weights` check: decoded, compared with the source and measured, with words for what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from hqconv.artifact.expert_reader import ExpertMatrix, ExpertReader
from hqconv.artifact.packed_reader import read_packed_expert, unpack
from hqconv.artifact.reader import Artifact
from hqconv.conversion.encode import encode
from hqconv.errors import HqconvError
from hqconv.formats.decode_matrix import SourceMatrix
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.encoding import Encoding
from hqconv.quantization.hadamard import rotate
from hqconv.quantization.quantize import Quantized
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import code_of_torch
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.verification.comparison import GemmPosition, compare, fingerprint
from hqconv.verification.content_sums import Totals, totals_of
from hqconv.verification.figures import Figures, measure
from hqconv.verification.fused_exponents import FusedExponents, folding_of, misread_code
from hqconv.verification.result import Finding

_CPU = torch.device("cpu")


@dataclass
class Outcome:
    """What was found of one expert.

    `expected`, `found`: fingerprints by role, `found` of what is not as expected. `content`: by role what the tensors
    come to.
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
    """A block as the source has it, and how it becomes the artifact's."""

    source: Source
    block: MoeLayer
    encoding: Encoding


class Job:
    """One block's check: `run` is called once per expert, from any thread. `findings` are of the block as a whole."""

    def __init__(
        self, artifact: Artifact, block: MoeLayer, original: Original | None, shards: Mapping[str, str]
    ) -> None:
        """`shards`: tensor name → file, of the checkpoint layout. Looks at the headers of all ranks."""
        self.artifact, self.block, self.original = artifact, block, original
        self.shards, self.schema = shards, artifact.schema_of(block.name)
        self.findings: list[Finding] = []
        is_kernel = artifact.spec.layout == names.KERNEL
        self.reader = ExpertReader(artifact, block, self._note) if is_kernel else None
        self.folding = self._folding()
        self.misread = misread_code(artifact, block.name)

    def _folding(self) -> FusedExponents | None:
        """How exponents are fused into the codes; without headers that are good there is nothing to compare."""
        if self.original is None or self.reader is None or not self.reader.good:
            return None
        try:
            return folding_of(self.artifact, self.block)
        except (HqconvError, KeyError, OSError):  # noted by the reader
            return None

    def _note(self, where: str, what: str, expected: object, found: object) -> None:
        self.findings.append(Finding(where, what, str(expected), str(found)))

    def run(self, expert: int) -> Outcome:
        """Everything about one expert."""
        outcome = Outcome()
        for gemm in names.GEMMS:
            roles = [r for r in (("w1", "w3") if gemm == "w13" else ("w2",)) if r in self.block.roles]
            found = self._read(gemm, roles, expert, outcome)
            outcome.content |= {role: totals_of(matrix, self.schema) for role, matrix in found.items()}
            try:
                stored = self._read_source(roles, expert)
                results = encode(stored, self.original.encoding) if self.original is not None else {}
            except HqconvError as error:
                outcome.note(f"source: {error.where}", error.what, error.expected, error.found)
                continue
            for role, matrix in found.items():
                source = _rotated(stored[role].values(), self.schema) if stored else None
                figures = measure(matrix, source, self.schema, self.artifact.param_dtype, self.misread)
                outcome.figures[role] = figures
                if not math.isfinite(figures.decoded_power):
                    where = f"block {self.block.name}, {role} of expert {expert}"
                    outcome.note(where, "Decoded weights are not finite.", "numbers", "NaN or infinity")
                if role in results:
                    figures.quantizer = results[role].error_sums
                    figures.is_folded = self.folding is not None
            self._compare(found, results, gemm, expert, outcome)
        return outcome

    def _read(
        self, gemm: str, roles: Sequence[str], expert: int, outcome: Outcome
    ) -> dict[str, ExpertMatrix]:
        if self.reader is not None:
            return self.reader.read(gemm, expert, outcome.note)
        read = partial(read_packed_expert, self.artifact, self.block, shards=self.shards, note=outcome.note)
        found = {role: read(role, expert) for role in roles}
        return {role: matrix for role, matrix in found.items() if matrix is not None}

    def _read_source(self, roles: Sequence[str], expert: int) -> dict[str, SourceMatrix]:
        if self.original is None:
            return {}
        return self.original.source.read_expert(self.original.block, expert, roles, _CPU)

    def _compare(
        self,
        found: Mapping[str, ExpertMatrix],
        results: Mapping[str, Quantized],
        gemm: str,
        expert: int,
        outcome: Outcome,
    ) -> None:
        expected = {role: as_matrix(one, self.schema) for role, one in results.items()}
        expected = expected if self.folding is None else self.folding.matrices(expected)
        place = GemmPosition(self.artifact, self.block, gemm, expert, self.shards)
        for role, matrix in expected.items():
            outcome.expected[role] = fingerprint(matrix.codes)
            if role in found and not compare(found, expected, role, place, outcome.note):
                outcome.found[role] = fingerprint(found[role].codes)


def _rotated(values: torch.Tensor, schema: WeightSchema) -> torch.Tensor:
    """What is quantized of a source's weights."""
    return rotate(values, schema.rotation) if schema.rotation else values


def as_matrix(quantized: Quantized, schema: WeightSchema) -> ExpertMatrix:
    """What the quantizer made, unpacked by code of this side's own."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    bits = {
        name: tensor.contiguous()
        .view(integers[tensor.element_size()])
        .numpy()
        .view(f"u{tensor.element_size()}")
        for name, tensor in quantized.tensors.items()
    }
    scale = quantized.tensors["weight_scale"].dtype
    return unpack(bits, schema, code_of_torch(scale))
