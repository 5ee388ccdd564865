"""The `weights` check of one layer's experts: decode, compare with the source, measure, and name what is wrong.

A check of one expert on the CPU names every fault. On a device many experts are checked at once, by the same code; an
expert with any fault, or of a batch that failed, is checked once more, alone.

Legend: E experts, N rows, K columns.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from hqconv.artifact.expert_reader import (
    TENSOR_OF,
    ExpertReader,
    hex_bits,
    read_packed_expert,
    roles_of,
)
from hqconv.artifact.load import entered
from hqconv.artifact.reader import Artifact, Note
from hqconv.conversion.encode import LayerEncoder, encode_expert
from hqconv.errors import HqconvError
from hqconv.formats.encoding import resized
from hqconv.io.pipeline import HostBuffers
from hqconv.layout_decoder.decode import DecodedStack, bits_of, decode_packed
from hqconv.models.moe_layer import MoeLayer, RawExperts, RawLayout
from hqconv.models.source_protocol import Source
from hqconv.planning.layer_encoding import LayerEncoding
from hqconv.quantization.quantize import ErrorSums, quantize_stacks
from hqconv.quantization.quantized import rotate
from hqconv.schemas.artifact_names import GEMM_OF, GEMMS, KERNEL, rank_file
from hqconv.schemas.grid import tp_slices
from hqconv.schemas.tensors import code_of_torch
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.verification.figures import (
    NUM_FIGURES,
    Figures,
    figures_of,
    measure,
    sketch,
    strays,
    strays_of_scales,
    sums_and_sketch,
)
from hqconv.verification.fused_exponents import FusedExponents, folding_of, misread_code
from hqconv.verification.result import Finding

_CPU = torch.device("cpu")
_BATCH_BYTES = 256 << 20  # of the source and the artifact: enough that Python costs little
_MAX_READERS = 8
_SLACK_BYTES = 1 << 12  # of a buffer, between aligned tensors
_GPU_FREE_SHARE = 0.5  # of the GPU memory that is free: the kernels are next
_NUM_ON_DEVICE = 2  # batches on the device: one is computed, while work on the next one is launched
# of one expert's weights, while codes and float64 sums of its projections are computed
_GPU_BYTES_PER_WEIGHT = 64

# tensor, shape and index of a value → where it lies
Place = Callable[[str, Sequence[int], Sequence[int]], str]


@dataclass(frozen=True)
class Sketches:
    """Some weights of one matrix, of the source and of the artifact, float32 [n]."""

    source: torch.Tensor
    decoded: torch.Tensor


@dataclass
class ExpertResult:
    """Result of the check of one expert.

    expected, found: fingerprints by role; `found` only of projections that are not as expected. is_wrong: some value
    differs, or is none that a conversion writes. sketches: by role, of a calibrated artifact.
    """

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=dict)
    expected: dict[str, bytes] = field(default_factory=dict)
    found: dict[str, bytes] = field(default_factory=dict)
    sketches: dict[str, Sketches] = field(default_factory=dict)
    is_wrong: bool = False

    def note(self, where: str, what: str, expected: object, found: object) -> None:
        """Note one thing that is wrong."""
        self.findings.append(Finding(where, what, str(expected), str(found)))


@dataclass(frozen=True, eq=False)
class Original:
    """A layer of the source, and the encoding that turns it into the artifact's layer.

    is_calibrated: codes and scales are a calibration's, which cannot be repeated; the weights must be within bounds.
    """

    source: Source
    layer: MoeLayer
    encoding: LayerEncoding
    is_calibrated: bool


@dataclass(frozen=True, eq=False)
class QuantizedSource:
    """Projections of some experts by role: the source's weights [E, N, K], and what a decoder should find of them.

    error_sums: by role of each expert, as the conversion measures them; waits for the device.
    """

    weights: Mapping[str, torch.Tensor]
    stacks: Mapping[str, DecodedStack]
    error_sums: Callable[[], Mapping[str, Sequence[ErrorSums]]]


class LayerCheck:
    """Check of one layer, for any thread. whole: what concerns the layer as a whole."""

    def __init__(
        self,
        artifact: Artifact,
        layer: MoeLayer,
        original: Original | None,
        shards: Mapping[str, str],
    ) -> None:
        """Check the headers of all ranks. shards: tensor name → file, of the checkpoint layout."""
        self.artifact = artifact
        self.layer = layer
        self.original = original
        self.shards = shards
        self.schema = artifact.schema_of(layer.name)
        self.whole = ExpertResult()
        is_kernel = artifact.spec.layout == KERNEL and not layer.is_linear
        self.reader = ExpertReader(artifact, layer, self.whole.note) if is_kernel else None
        self.folding = self._folding()
        self.misread = {gemm: misread_code(artifact, layer.name, gemm) for gemm in GEMMS}

    @property
    def is_compared(self) -> bool:
        """True if codes must be those of the source, quantized."""
        return self.original is not None and not self.original.is_calibrated

    def _folding(self) -> FusedExponents | None:
        """Fusion of exponents into codes; None without good headers, since nothing is compared then."""
        if self.original is None or self.reader is None or not self.reader.forms:
            return None
        try:
            return folding_of(self.artifact, self.layer)
        except (HqconvError, KeyError, OSError):  # noted by the reader
            return None

    # --- one expert

    def run(self, expert: int) -> ExpertResult:
        """Check one expert on the CPU, and name everything that is wrong with it."""
        total = ExpertResult()
        for gemm in GEMMS:
            roles = roles_of(self.layer, gemm)
            if not roles:
                continue
            decoded = self._read(gemm, expert, total)
            try:
                expected = self._expected_alone(expert, roles)
            except HqconvError as error:
                total.note(f"source: {error.where}", error.what, error.expected, error.found)
                continue
            [measured] = self._measure(decoded, expected, range(expert, expert + 1))
            total.figures |= measured.figures
            total.expected |= measured.expected
            total.sketches |= measured.sketches
            total.findings += measured.findings
            if measured.is_wrong:
                compared = expected if self.is_compared else None
                self._name(gemm, expert, decoded, compared, total)
        return total

    def _read(self, gemm: str, expert: int, outcome: ExpertResult) -> dict[str, DecodedStack]:
        """Decode one expert's projections; without those that cannot be read, which are noted."""
        if self.reader is not None:
            return self.reader.read(gemm, expert, outcome.note)
        found = {
            role: read_packed_expert(
                self.artifact, self.layer, role, expert, self.shards, outcome.note
            )
            for role in roles_of(self.layer, gemm)
        }
        return {role: stack for role, stack in found.items() if stack is not None}

    def _name(
        self,
        gemm: str,
        expert: int,
        found: dict[str, DecodedStack],
        expected: QuantizedSource | None,
        outcome: ExpertResult,
    ) -> None:
        for role in found:
            if not math.isfinite(outcome.figures[role].decoded_power):
                outcome.note(
                    f"layer {self.layer.name}, {role} of expert {expert}",
                    "Decoded weights are not finite.",
                    "numbers",
                    "NaN or infinity",
                )
        if expected is None:
            return
        for role in found:
            place = partial(self._where, gemm, expert, role)
            if not compare(found[role], expected.stacks[role], place, outcome.note):
                [outcome.found[role]] = fingerprints(found[role].codes)

    def _add_strays(
        self,
        decoded: Mapping[str, DecodedStack],
        expected: QuantizedSource,
        experts: range,
        results: Sequence[ExpertResult],
    ) -> None:
        """Note where calibrated matrices are not the source's, and add their sketches."""
        dtype = self.artifact.param_dtype
        for role, stack in decoded.items():
            weights = expected.weights[role]
            schema = self.schema.of(role)
            rounded = expected.stacks[role]
            found_sums, found_sketch = sums_and_sketch(stack, weights, schema, dtype)
            rounded_sums, _ = sums_and_sketch(rounded, weights, schema, dtype)
            decoded_sketch = found_sketch.cpu()
            source_sketch = sketch(weights).cpu()
            for index, result in enumerate(results):
                result.sketches[role] = Sketches(source_sketch[index], decoded_sketch[index])
                where = f"layer {self.layer.name}, {role} of expert {experts[index]}"
                for stray in (
                    *strays(found_sums[index], rounded_sums[index]),
                    *strays_of_scales(stack.scale_value[index], rounded.scale_value[index]),
                ):
                    result.note(where, *stray)
                    result.is_wrong = True

    def _where(
        self,
        gemm: str,
        expert: int,
        role: str,
        tensor: str,
        shape: Sequence[int],
        index: Sequence[int],
    ) -> str:
        """Name file, tensor and expert of one value of a whole matrix."""
        base = self.layer.module(expert, role) + "."
        if self.reader is None:
            return f"{self.shards.get(base + tensor, 'no file')}, tensor {base}{tensor}"
        slices = tp_slices(self.layer.intermediate_size, self.artifact.grid, self.schema)
        axis = 1 if gemm == "w2" else 0
        # A value's index in its tensor, as a row or column of the matrix.
        is_cut = axis < len(shape) and shape[axis] > 1
        place = index[axis] * slices[-1].end // shape[axis] if is_cut else 0
        tp_rank = next(part.rank for part in slices if place < part.end)
        ep_rank, local = self.artifact.grid.homes(self.layer.num_experts)[expert][0]
        path = rank_file(self.layer.name, tp_rank, ep_rank)
        return f"{path}, tensor {self.layer.name}.{gemm}_{tensor}, {role} of expert {expert} (local {local})"

    def _expected_alone(self, expert: int, roles: Sequence[str]) -> QuantizedSource | None:
        if self.original is None:
            return None
        encoding = self.original.encoding
        stored = LayerEncoder(self.original.source, self.original.layer, encoding, _CPU).read(
            expert, roles, None
        )
        stacks = encode_expert(stored, encoding.of(roles[0]))
        tensors = {role: stack.tensors for role, stack in stacks.items()}
        weights = {role: matrix.values().unsqueeze(0) for role, matrix in stored.items()}
        return self._expected(
            weights, tensors, lambda: {role: one.error_sums() for role, one in stacks.items()}
        )

    # --- experts as stacks

    def _expected(
        self,
        weights: Mapping[str, torch.Tensor],
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        error_sums: Callable[[], Mapping[str, Sequence[ErrorSums]]],
    ) -> QuantizedSource:
        """weights: of the source by role. tensors: of the quantizer by role, packed [E, …]."""
        rotations = {role: self.schema.of(role).rotation for role in weights}
        weights = {
            role: rotate(one, rotations[role]) if rotations[role] else one
            for role, one in weights.items()
        }
        stacks = {}
        for role, of_role in tensors.items():
            bits = {name: bits_of(tensor) for name, tensor in of_role.items()}
            stacks[role] = decode_packed(
                bits, self.schema.of(role), code_of_torch(of_role["weight_scale"].dtype)
            )
        return QuantizedSource(
            weights, stacks if self.folding is None else self.folding.fold(stacks), error_sums
        )

    def _measure(
        self, decoded: Mapping[str, DecodedStack], expected: QuantizedSource | None, experts: range
    ) -> list[ExpertResult]:
        """Measure projections of some experts, and compare them with the expected ones; waits once for the device."""
        columns = []
        for role, stack in decoded.items():
            weights = None
            wrong = stack.wrong
            if expected is not None:
                weights = expected.weights[role]
                if self.is_compared:
                    wrong = differs(stack, expected.stacks[role])
            misread = self.misread[GEMM_OF.get(role, "w13")]
            columns.append(
                measure(stack, weights, self.schema.of(role), self.artifact.param_dtype, misread)
            )
            columns.append(wrong.double().unsqueeze(1))
        rows = torch.cat(columns, 1).tolist() if columns else [[] for _ in experts]
        quantizer = {} if expected is None else expected.error_sums()
        prints = {}
        if expected is not None:
            prints = {role: fingerprints(stack.codes) for role, stack in expected.stacks.items()}
        results = []
        for index, row in enumerate(rows):
            result = ExpertResult(expected={role: texts[index] for role, texts in prints.items()})
            result.is_wrong = not all(map(math.isfinite, row))
            for number, (role, stack) in enumerate(decoded.items()):
                start = number * (NUM_FIGURES + 1)
                numbers = row[start : start + NUM_FIGURES]
                is_wrong = row[start + NUM_FIGURES]
                schema = self.schema.of(role)
                figures = figures_of(numbers, stack, schema, has_source=expected is not None)
                if quantizer and self.is_compared:
                    figures.quantizer = quantizer[role][index]
                figures.is_folded = self.folding is not None and self.folding.folds(role)
                result.is_wrong |= bool(is_wrong)
                result.figures[role] = figures
            results.append(result)
        if expected is not None and not self.is_compared:
            self._add_strays(decoded, expected, experts, results)
        return results

    # --- batches on a device

    def ranges(self, batches: Batches | None) -> Iterator[range]:
        """Yield the layer's experts as they are checked: one by one, or in batches."""
        total = self.layer.num_experts
        size = 1 if batches is None else self._batch_size(batches.staging) or total
        for begin in range(0, total, size):
            yield range(begin, min(begin + size, total))

    def run_batch(self, experts: range, batches: Batches) -> list[ExpertResult | None]:
        """Check some experts at once: the outcome of each, or None for an expert that must be checked alone."""
        if not self._batch_size(batches.staging):
            return [None] * len(experts)
        try:
            with entered(batches.staging.device):
                outcomes = self._check_batch(experts, batches)
        except Exception as error:  # noqa: BLE001 - `run` reports errors that matter
            batches.errors.append(_in_short(error))
            return [None] * len(experts)
        return [None if outcome.is_wrong else outcome for outcome in outcomes]

    def _batch_size(self, staging: BatchStaging) -> int:
        """Experts in a batch: 0 if not even one fits, if a header is wrong, or if the source reads for itself."""
        layer = self.layer
        original = self.original
        if (
            self.reader is None
            or self.whole.findings
            or not (original is None or original.source.reads_ahead)
        ):
            return 0
        try:
            # the first expert has as many copies as any
            expert_bytes = self.reader.plan(range(1)).num_bytes
        except (HqconvError, OSError):
            return 0
        if original is not None:
            expert_bytes += RawLayout(original.layer, range(1)).num_bytes
        weights = len(layer.roles) * layer.hidden_size * layer.intermediate_size
        gpu_bytes = staging.gpu_bytes // (_GPU_BYTES_PER_WEIGHT * weights)
        return max(0, min((staging.slot_bytes - _SLACK_BYTES) // expert_bytes, gpu_bytes))

    def _check_batch(self, experts: range, batches: Batches) -> list[ExpertResult]:
        original = self.original
        reader = self.reader
        assert reader is not None
        stored = reader.plan(experts)
        raw_layout = None if original is None else RawLayout(original.layer, experts)
        begin = 0 if raw_layout is None else -(-raw_layout.num_bytes // 64) * 64
        with batches.host_buffer() as host:
            reader.fill(stored, host.numpy().data[begin:])
            if original is not None and raw_layout is not None:
                raw = RawExperts(raw_layout, host[: raw_layout.num_bytes])
                original.source.read_all_into(raw.views(raw_layout.ranges))
            with batches.on_device:
                buffer = host[: begin + stored.num_bytes].to(
                    batches.staging.device, non_blocking=True
                )
                found = reader.decode(stored, buffer[begin:])
                expected = None
                if original is not None and raw_layout is not None:
                    raw = RawExperts(raw_layout, buffer[: raw_layout.num_bytes])
                    expected = self._expected_batch(original, experts, raw)
                return self._measure(found, expected, experts)

    def _expected_batch(
        self, original: Original, experts: range, raw: RawExperts
    ) -> QuantizedSource:
        encoder = LayerEncoder(
            original.source, original.layer, original.encoding, raw.buffer.device
        )
        done = encoder.encode(experts, raw)

        def weights(role: str) -> torch.Tensor:
            stack = raw.stack(role) if original.layer.format.is_float else None
            if stack is not None:
                return resized(stack, original.encoding.shapes[role])
            return torch.stack(
                [encoder.read(expert, [role], raw)[role].values() for expert in experts]
            )

        return self._expected(
            {role: weights(role) for role in done.tensors},
            done.tensors,
            lambda: done.error_sums([one.cpu() for one in done.measured]),
        )


@dataclass(frozen=True)
class BatchStaging:
    """Number of batches that are read at once, and the host memory of each; memory of the device for one batch."""

    device: torch.device
    num_readers: int
    slot_bytes: int
    gpu_bytes: int

    @property
    def host_bytes(self) -> int:
        """Host memory for all batches."""
        return self.num_readers * self.slot_bytes


class Batches:
    """Memory of the batches of all layers, a context manager. errors: of failed batches."""

    def __init__(self, staging: BatchStaging) -> None:
        self.staging = staging
        self.on_device = threading.BoundedSemaphore(_NUM_ON_DEVICE)
        self.errors: list[str] = []
        self._buffers = HostBuffers(staging.slot_bytes, staging.device, staging.num_readers)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.release()

    @contextmanager
    def host_buffer(self) -> Iterator[torch.Tensor]:
        """Lend the memory for one batch."""
        buffer = self._buffers.take()
        assert buffer is not None
        try:
            yield buffer
        except BaseException:  # the memory is used again, and may still be copied
            if self.staging.device.type == "cuda":
                torch.cuda.current_stream(self.staging.device).synchronize()
            raise
        finally:
            self._buffers.give(buffer)


def plan_staging(
    device: torch.device, num_threads: int, max_host_bytes: int
) -> BatchStaging | None:
    """Plan as many readers as there are threads and memory for; None if there is no memory for one."""
    slot_bytes = min(_BATCH_BYTES, max_host_bytes) >> 16 << 16
    if not slot_bytes:
        return None
    gpu_bytes = 1 << 62
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        gpu_bytes = int(free * _GPU_FREE_SHARE) // _NUM_ON_DEVICE
    num_readers = max(1, min(num_threads, _MAX_READERS, max_host_bytes // slot_bytes))
    return BatchStaging(device, num_readers, slot_bytes, gpu_bytes)


def why_not(
    schema: WeightSchema, param_dtype: str, dtype: torch.dtype, device: torch.device
) -> str:
    """Quantize a small matrix on the device, which compiles Humming's ops; return "" or the reason for the failure."""
    n = max(64, schema.weight_scale_group_size_n)
    k = max(128, schema.weight_scale_group_size, schema.rotation)
    try:
        with entered(device):
            tiny = torch.ones(1, n, k, dtype=dtype, device=device)
            quantize_stacks([tiny], schema, param_dtype)[0].error_sums()
    except Exception as error:  # noqa: BLE001 - of Humming, its compiler or the driver: the CPU does it as well
        return _in_short(error)
    return ""


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- comparison -----------------------------------------------------------------------------------------------


def unequal_fields(found: DecodedStack, expected: DecodedStack) -> dict[str, torch.Tensor | None]:
    """Map each field that may differ to its unequal values, bool [E, …]; None for another shape or dtype.

    A flushed scale may be any value up to the decoded one.
    """
    unequal: dict[str, torch.Tensor | None] = {}
    if found.scale_dtype != expected.scale_dtype:
        unequal["scale_dtype"] = None
    for name in TENSOR_OF:
        left = getattr(found, name)
        right = getattr(expected, name)
        if left is None and right is None:
            continue
        if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
            unequal[name] = None
        elif not _are_same_bytes(left, right):
            wrong = left != right
            if name == "scale" and found.flushed is not None:
                wrong = torch.where(found.flushed, right > left, wrong)
            unequal[name] = wrong
    return unequal


def differs(found: DecodedStack, expected: DecodedStack) -> torch.Tensor:
    """Experts whose values are wrong or not equal, bool [E]."""
    wrong = found.wrong
    for values in unequal_fields(found, expected).values():
        wrong = torch.ones_like(wrong) if values is None else wrong | values.flatten(1).any(1)
    return wrong


def _are_same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True for equal contiguous CPU tensors; compared 8 bytes at a time, 20 times as fast as values.

    False for tensors on another device: an answer would wait for all its work.
    """
    is_one_piece = left.is_contiguous() and right.is_contiguous()
    if left.device.type != "cpu" or not is_one_piece or left.nbytes % 8:
        return False
    ours, theirs = (one.numpy().reshape(-1).view(np.uint64) for one in (left, right))
    return np.array_equal(ours, theirs)


def compare(found: DecodedStack, expected: DecodedStack, where: Place, note: Note) -> bool:
    """Note every kind of value in which one expert's projection (E = 1) is not as expected; True if none is."""
    is_equal = True
    for name, wrong in unequal_fields(found, expected).items():
        left = getattr(found, name)
        right = getattr(expected, name)
        if name == "scale_dtype":
            what = "Scales are of another dtype than the schema's."
            note(where("weight_scale", (1,), (0,)), what, right, left)
            is_equal = False
            continue
        verb = "are" if name == "codes" else "is"
        what = f"The {name.replace('_', ' ')} of the source, quantized, {verb} not in the artifact."
        if wrong is None:
            texts = [None if x is None else list(x.shape[1:]) for x in (right, left)]
            note(where(TENSOR_OF[name], (1,), (0,)), what, *texts)
            is_equal = False
        elif wrong.any():
            is_equal = False
            places = wrong[0].nonzero()
            first = tuple(places[0].tolist())
            found_text = f"{hex_bits(left[0][first])}; {len(places)} of {wrong.numel()} differ"
            note(
                where(TENSOR_OF[name], left.shape[1:], first),
                what,
                f"{hex_bits(right[0][first])} at {list(first)}",
                found_text,
            )
    return is_equal


def fingerprints(codes: torch.Tensor) -> list[bytes]:
    """Hash of eight rows of each expert's codes [E, N, K]: enough to tell one expert's matrix from another's."""
    rows = codes[:, [int(row) for row in np.linspace(0, codes.size(1) - 1, 8)]].cpu().numpy()
    return [hashlib.blake2b(one.tobytes(), digest_size=16).digest() for one in rows]
