"""The `weights` check: every rank file decoded back, ranks put together, and compared with the source.

The source is quantized once more; codes, scales and zero points must be equal. What the artifact's weights are
off the source is measured on the decoded weights, which share no code with the conversion.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from hqconv.artifact.matrix import Matrix
from hqconv.artifact.opened import Artifact
from hqconv.artifact.packed import read_packed_expert, unpack
from hqconv.artifact.ranks import BlockReader
from hqconv.backends.quantize import Quantized
from hqconv.decode.matrix import SourceMatrix
from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.experts.block import ExpertBlock
from hqconv.pipeline.encode import encode
from hqconv.planning.encoding import Encoding, encoding_of
from hqconv.schemas import artifact as names
from hqconv.schemas.dtypes import code_of_torch
from hqconv.schemas.target import TargetSchema
from hqconv.sources.source import Source
from hqconv.verification.comparison import GemmPlace, compare, fingerprint
from hqconv.verification.figures import Figures, measure, summarize
from hqconv.verification.recorded import check_recorded
from hqconv.verification.result import CheckResult, Finding

_CPU = torch.device("cpu")


def check_weights(
    artifact: Artifact,
    source: Source | None,
    layers: Collection[int] | None,
    num_threads: int,
    max_memory_bytes: int,
) -> CheckResult:
    """Decode the blocks of `layers` (None: all) and compare them with the source, where it is given.

    `measured[block][projection]` holds the error figures, or without a source what can be said of the decoded
    weights. Raises RequestError where not even one expert fits into `max_memory_bytes`; everything else that
    is wrong is a finding.
    """
    result = CheckResult("weights")
    blocks = _blocks(artifact, layers, result)
    sources = _source_blocks(source, result)
    for name in sorted((sources or {}).keys() - artifact.blocks.keys()) if layers is None else ():
        result.add(
            f"block {name}", "A MoE block of the source is missing in the artifact.", "present", "absent"
        )
    need = max((_working_bytes(block, artifact.schema) for block in blocks), default=0)
    if need > max_memory_bytes:
        raise RequestError(
            "One expert does not fit into the memory limit.",
            where="--max-memory",
            expected=f"at least {need / 2**20:.0f} MiB for this artifact",
            found=f"{max_memory_bytes / 2**20:.0f} MiB",
        )
    num_workers = max(1, min(num_threads, max_memory_bytes // max(need, 1)))
    shards = _shards(artifact)
    with ThreadPoolExecutor(
        num_workers, "hqconv-verify", initializer=partial(torch.set_num_threads, 1)
    ) as pool:
        for block in blocks:
            of_source = _comparable(artifact, block, sources, result)
            job = _Job(artifact, block, source if of_source else None, of_source, shards)
            _check_block(job, pool, result)
    against = "compared with the source" if source else "decoded; without a source no value can be wrong"
    result.notes.append(f"{len(blocks)} of {len(artifact.blocks)} blocks {against}")
    return result


# --- what to look at ---------------------------------------------------------------------------------------


def _blocks(artifact: Artifact, layers: Collection[int] | None, result: CheckResult) -> list[ExpertBlock]:
    chosen = [name for name, words in artifact.blocks.items() if layers is None or words["layer"] in layers]
    blocks = []
    for name in chosen:
        try:
            blocks.append(artifact.expert_block(name))
        except VerificationError as error:
            result.add(error.where, error.what, error.expected, error.found)
    return blocks


def _source_blocks(source: Source | None, result: CheckResult) -> dict[str, ExpertBlock] | None:
    if source is None:
        return None
    try:
        return {block.name: block for block in source.map_experts().blocks}
    except HqconvError as error:
        result.add(
            f"source: {error.where}",
            f"The source cannot be mapped: {error.what}",
            error.expected,
            error.found,
        )
        return None


def _comparable(
    artifact: Artifact, block: ExpertBlock, sources: Mapping[str, ExpertBlock] | None, result: CheckResult
) -> ExpertBlock | None:
    """The source's block, if it has this one and the artifact says how it was made."""
    if sources is None:
        return None
    found = sources.get(block.name)
    sizes = ("num_experts", "hidden_size", "intermediate_size", "gated")
    if found is None or any(getattr(found, size) != getattr(block, size) for size in sizes):
        described = [
            ", ".join(f"{s} {getattr(b, s)}" for s in sizes) if b else "no such block" for b in (found, block)
        ]
        result.add(f"block {block.name}", "The source has no such block.", *described)
        return None
    conversion = artifact.blocks[block.name]["conversion"]
    expected = _encoding(artifact, found).conversion
    if conversion != expected:
        what = "The block was not converted as its source's format asks for."
        result.add(f"{names.MANIFEST}: {block.name}: conversion", what, expected, conversion)
        return None
    return found


def _encoding(artifact: Artifact, of_source: ExpertBlock) -> Encoding:
    return encoding_of(of_source.format, artifact.schema, artifact.param_dtype)


def _shards(artifact: Artifact) -> dict[str, str]:
    """Tensor name → ordinary shard; damaged headers are the `files` check's business."""
    shards: dict[str, str] = {}
    if artifact.manifest["layout"] != names.CHECKPOINT:
        return shards
    for path in artifact.manifest["files"]:
        if "/" not in path and path.endswith(".safetensors"):
            try:
                shards |= dict.fromkeys(artifact.header(path)[0], path)
            except VerificationError:
                continue
    return shards


def _working_bytes(block: ExpertBlock, schema: TargetSchema) -> int:
    """Upper bound of the memory that one worker needs for one expert."""
    numbers = block.intermediate_size * block.hidden_size
    # Read, and widened to float32; a fused share is read as a whole, codes are unpacked on the way.
    source = 2 if block.dtype == "BF16" else 8 if block.dtype == "F32" else 6
    source += (
        6 if not block.format.is_float or any(p["weight"].is_stacked for p in block.parts.values()) else 0
    )
    packed = schema.num_bits / 8
    scales = 56 / (schema.weight_scale_group_size or block.hidden_size)
    # Gate and up together: sources, codes decoded (padded, then joined) and expected, packed codes on both sides.
    return int(numbers * 2 * (source + 3 + 3 * packed + scales) + numbers) + (16 << 20)


# --- one block, one expert ---------------------------------------------------------------------------------


@dataclass
class _Outcome:
    """What one expert's worker found."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=dict)
    expected: dict[str, bytes] = field(default_factory=dict)  # fingerprints
    found: dict[str, bytes] = field(default_factory=dict)  # of matrices that are not as expected

    def note(self, where: str, what: str, expected: object, found: object) -> None:
        self.findings.append(Finding(where, what, str(expected), str(found)))


class _Job:
    """One block's check: `run` is called once per expert, from any thread."""

    def __init__(
        self,
        artifact: Artifact,
        block: ExpertBlock,
        source: Source | None,
        of_source: ExpertBlock | None,
        shards: Mapping[str, str],
    ) -> None:
        self.artifact, self.block, self.source, self.of_source = artifact, block, source, of_source
        self.shards = shards
        self.findings: list[Finding] = []
        self._encoding = None if of_source is None else _encoding(artifact, of_source)
        is_kernel = artifact.request.layout == names.KERNEL
        self._reader = BlockReader(artifact, block, self._note) if is_kernel else None

    def _note(self, where: str, what: str, expected: object, found: object) -> None:
        self.findings.append(Finding(where, what, str(expected), str(found)))

    def run(self, expert: int) -> _Outcome:
        outcome = _Outcome()
        for gemm in names.GEMMS:
            roles = [r for r in (("w1", "w3") if gemm == "w13" else ("w2",)) if r in self.block.roles]
            found = self._read(gemm, roles, expert, outcome)
            try:
                stored = self._read_source(roles, expert)
                results = encode(stored, self._encoding) if self._encoding is not None else {}
            except HqconvError as error:
                outcome.note(f"source: {error.where}", error.what, error.expected, error.found)
                continue
            for role, matrix in found.items():
                source = stored[role].values() if stored else None
                figures = measure(matrix, source, self.artifact.schema, self.artifact.param_dtype)
                outcome.figures[role] = figures
                if not math.isfinite(figures.decoded_power):
                    where = f"block {self.block.name}, {role} of expert {expert}"
                    outcome.note(where, "Decoded weights are not finite.", "numbers", "NaN or infinity")
                if role in results:
                    figures.quantizer = results[role].cost
            self._compare(found, results, gemm, expert, outcome)
        return outcome

    def _read(self, gemm: str, roles: Sequence[str], expert: int, outcome: _Outcome) -> dict[str, Matrix]:
        if self._reader is not None:
            return self._reader.read(gemm, expert, outcome.note)
        read = partial(read_packed_expert, self.artifact, self.block, shards=self.shards, note=outcome.note)
        found = {role: read(role, expert) for role in roles}
        return {role: matrix for role, matrix in found.items() if matrix is not None}

    def _read_source(self, roles: Sequence[str], expert: int) -> dict[str, SourceMatrix]:
        if self.source is None or self.of_source is None:
            return {}
        return self.source.read_expert(self.of_source, expert, roles, _CPU)

    def _compare(
        self,
        found: Mapping[str, Matrix],
        results: Mapping[str, Quantized],
        gemm: str,
        expert: int,
        outcome: _Outcome,
    ) -> None:
        expected = {role: _as_matrix(one, self.artifact.schema) for role, one in results.items()}
        place = GemmPlace(self.artifact, self.block, gemm, expert, self.shards)
        for role, matrix in expected.items():
            outcome.expected[role] = fingerprint(matrix)
            if role in found and not compare(found, expected, role, place, outcome.note):
                outcome.found[role] = fingerprint(found[role])


def _as_matrix(quantized: Quantized, schema: TargetSchema) -> Matrix:
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


def _check_block(job: _Job, pool: ThreadPoolExecutor, result: CheckResult) -> None:
    """Run a block's experts and bring what they found together."""
    outcomes = list(pool.map(job.run, range(job.block.num_experts)))
    for finding in (*job.findings, *(f for outcome in outcomes for f in outcome.findings)):
        result.add(finding.where, finding.what, finding.expected, finding.found)
    _name_swapped(job.block, outcomes, result)
    figures = {
        role: [outcome.figures[role] for outcome in outcomes if role in outcome.figures]
        for role in job.block.roles
    }
    result.measured[job.block.name] = {
        role: summarize(of_role) for role, of_role in figures.items() if of_role
    }
    if job.source is not None:
        recorded = job.artifact.blocks[job.block.name]["quantization_error"]
        check_recorded(job.block, recorded, figures, not job.block.format.is_float, result)


def _name_swapped(block: ExpertBlock, outcomes: Sequence[_Outcome], result: CheckResult) -> None:
    """Name the expert whose weights another one has."""
    owners = {(role, print_): e for e, o in enumerate(outcomes) for role, print_ in o.expected.items()}
    for expert, outcome in enumerate(outcomes):
        for role, print_ in outcome.found.items():
            owner = owners.get((role, print_), expert)
            if owner != expert:
                where = f"block {block.name}, {role} of expert {expert}"
                what = "An expert has another one's weights: experts are swapped."
                result.add(where, what, f"expert {expert}'s", f"expert {owner}'s")
