"""The `weights` check of many experts at once, on a device.

An expert without any fault gets its outcome here. Every other expert gets None and is checked again by `Job.run`, the
one place that names faults. Decoder and comparison are the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from hqconv.artifact.expert_reader import ExpertReader
from hqconv.conversion.encode import EncodedBatch, encode_batch, read_matrices
from hqconv.errors import HqconvError
from hqconv.formats.source_matrix import resized
from hqconv.io.host_buffers import host_buffer
from hqconv.layout_decoder.decode import DecodedStack
from hqconv.models.expert_bytes import RawExperts, RawLayout
from hqconv.quantization.hadamard import rotate
from hqconv.quantization.quantize import ErrorSums, quantize_stacks
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.verification.check_expert import Job, Original, Outcome
from hqconv.verification.comparison import differs, fingerprints
from hqconv.verification.figures import figures_of, measure_stack
from hqconv.verification.recomputed_sums import expert_totals, stack_totals

_BATCH_BYTES = 256 << 20  # of the source and the artifact: enough that Python costs little
_MAX_READERS = 8
_SLACK_BYTES = 1 << 12  # of a slot, between aligned tensors
_GPU_FREE_SHARE = 0.5  # of the GPU memory that is free: the kernels are next
_NUM_ON_DEVICE = 2  # batches on the device: one is computed, while work on the next one is launched
_GPU_BYTES_PER_WEIGHT = 64  # of one expert's weights, while codes and float64 sums of its projections are computed
_NUM_COLUMNS = 10  # of one projection: `measure_stack`, and 1 if it is wrong


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


def entered(device: torch.device) -> AbstractContextManager[object]:
    """Context in which kernels are launched on the device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def plan_staging(device: torch.device, num_threads: int, max_host_bytes: int) -> BatchStaging | None:
    """Plan as many readers as there are threads and memory for; None if there is no memory for one."""
    slot_bytes = 1 << max(0, min(_BATCH_BYTES, max_host_bytes).bit_length() - 1)  # pinned memory comes in such sizes
    if slot_bytes < 1 << 16:
        return None
    gpu_bytes = 1 << 62
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        gpu_bytes = int(free * _GPU_FREE_SHARE) // _NUM_ON_DEVICE
    num_readers = max(1, min(num_threads, _MAX_READERS, max_host_bytes // slot_bytes))
    return BatchStaging(device, num_readers, slot_bytes, gpu_bytes)


def why_not(schema: WeightSchema, param_dtype: str, dtype: torch.dtype, device: torch.device) -> str:
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


@dataclass
class SharedState:
    """State shared by the layers of one check.

    on_device: of the batches that may be on the device. slots: memory of each thread. errors: of failed batches.
    """

    on_device: threading.Semaphore = field(default_factory=lambda: threading.BoundedSemaphore(_NUM_ON_DEVICE))
    slots: threading.local = field(default_factory=threading.local)
    errors: list[str] = field(default_factory=list)


class BatchedJob:
    """Check of one layer in batches. `run` may be called from any thread; the device has few batches at a time."""

    def __init__(self, job: Job, staging: BatchStaging, shared: SharedState) -> None:
        """shared: one object for all layers of a check."""
        self.job, self._staging, self._shared = job, staging, shared
        self._reader = _batch_reader(job)
        self._batch = self._num_experts_at_once()

    def batches(self) -> Iterator[range]:
        """The layer's experts."""
        total, size = self.job.layer.num_experts, self._batch or self.job.layer.num_experts
        for begin in range(0, total, size):
            yield range(begin, min(begin + size, total))

    def _num_experts_at_once(self) -> int:
        """Experts in a batch, 0 if not even one fits. The first expert has as many copies as any."""
        if self._reader is None:
            return 0
        layer, original = self.job.layer, self.job.original
        expert_bytes = self._reader.plan(range(1)).num_bytes
        if original is not None:
            expert_bytes += RawLayout(original.layer, range(1)).num_bytes
        weights = len(layer.roles) * layer.hidden_size * layer.intermediate_size
        gpu_bytes = self._staging.gpu_bytes // (_GPU_BYTES_PER_WEIGHT * weights)
        return max(0, min((self._staging.slot_bytes - _SLACK_BYTES) // expert_bytes, gpu_bytes))

    def run(self, experts: range) -> list[Outcome | None]:
        """Check some experts: the outcome of each, or None for an expert that must be checked again."""
        unknown: list[Outcome | None] = [None] * len(experts)
        if self._reader is None or not self._batch:
            return unknown
        try:
            with entered(self._staging.device):
                return self._check(self._reader, experts)
        except Exception as error:  # noqa: BLE001 - `Job.run` reports errors that matter
            self._shared.errors.append(_in_short(error))
            return unknown

    def _check(self, reader: ExpertReader, experts: range) -> list[Outcome | None]:
        original, device = self.job.original, self._staging.device
        stored = reader.plan(experts)
        raw_layout = None if original is None else RawLayout(original.layer, experts)
        begin = 0 if raw_layout is None else -(-raw_layout.num_bytes // 64) * 64
        host = self._slot(begin + stored.num_bytes)
        reader.fill(stored, host.numpy().data[begin:])
        if original is not None and raw_layout is not None:
            original.source.read_raw(RawExperts(raw_layout, host[: raw_layout.num_bytes]), raw_layout.ranges)
        try:
            with self._shared.on_device:
                buffer = host.to(device, non_blocking=True)
                raw = None if raw_layout is None else RawExperts(raw_layout, buffer[: raw_layout.num_bytes])
                return self._compare(experts, raw, reader.decode(stored, buffer[begin:]))
        except BaseException:  # the slot is used again, and may still be copied
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            raise

    def _slot(self, num_bytes: int) -> torch.Tensor:
        """This thread's memory on the host."""
        slots, staging = self._shared.slots, self._staging
        if getattr(slots, "slot", None) is None or slots.slot.numel() < num_bytes:
            slots.slot = None
            slots.slot = host_buffer(max(num_bytes, staging.slot_bytes), staging.device)
        slot: torch.Tensor = slots.slot[:num_bytes]
        return slot

    def _compare(self, experts: range, raw: RawExperts | None, stacks: dict[str, DecodedStack]) -> list[Outcome | None]:
        """Launch all the work of a batch, and wait once for its sums."""
        job, original = self.job, self.job.original
        schema, param = job.artifact.schema_of(job.layer.name), job.artifact.param_dtype
        done: EncodedBatch | None = None
        if original is not None:
            device = self._staging.device
            done = encode_batch(original.source, original.layer, experts, raw, original.encoding, device)
        expected = {} if done is None else job.expected(done.tensors)
        columns, totals = [], {}
        for role, stack in stacks.items():
            wrong, values = stack.wrong, None
            if original is not None and raw is not None:
                wrong = differs(stack, expected[role])
                values = _values(original, experts, role, raw)
                values = rotate(values, schema.rotation) if schema.rotation else values
            figures = measure_stack(stack, values, schema, param, job.misread)
            columns += [figures, wrong.double().unsqueeze(1)]
            totals[role] = stack_totals(stack, schema)
        rows = torch.cat(columns, 1).tolist()
        costs = {} if done is None else done.error_sums([one.cpu() for one in done.measured])
        hashes = {role: fingerprints(one.codes) for role, one in expected.items()}
        sums = {role: {name: one.cpu() for name, one in of_role.items()} for role, of_role in totals.items()}
        outcomes = [self._outcome(i, rows[i], stacks, costs, hashes) for i in range(len(experts))]
        for index, outcome in enumerate(outcomes):
            if outcome is not None:
                outcome.content = {
                    role: expert_totals(sums[role], index, is_flushed=one.num_flushed > 0)
                    for role, one in outcome.figures.items()
                }
        return outcomes

    def _outcome(
        self,
        index: int,
        row: Sequence[float],
        stacks: dict[str, DecodedStack],
        costs: dict[str, list[ErrorSums]],
        hashes: dict[str, list[bytes]],
    ) -> Outcome | None:
        """Outcome of one expert, None if anything is wrong; `row` holds `_NUM_COLUMNS` values of each role."""
        if not all(map(math.isfinite, row)):
            return None
        outcome = Outcome(expected={role: of_role[index] for role, of_role in hashes.items()})
        group = self.job.artifact.schema_of(self.job.layer.name).weight_scale_group_size
        for number, (role, stack) in enumerate(stacks.items()):
            *sums, wrong = row[number * _NUM_COLUMNS : (number + 1) * _NUM_COLUMNS]
            if wrong:
                return None
            num_columns = stack.codes.size(2)
            outcome.figures[role] = figures_of(
                sums,
                stack.scale[0].numel(),
                num_columns // (group or num_columns),
                has_source=self.job.original is not None,
                quantizer=costs[role][index] if costs else None,
            )
            outcome.figures[role].is_folded = self.job.folding is not None
        return outcome


def _batch_reader(job: Job) -> ExpertReader | None:
    """The job's reader, if its experts can be read in batches and nothing is known to be wrong with the headers."""
    is_read_ahead = job.original is None or job.original.source.reads_ahead
    if job.reader is None or job.findings or not is_read_ahead:
        return None
    try:
        return job.reader if job.reader.batch_forms else None
    except (HqconvError, OSError):
        return None


def _values(original: Original, experts: range, role: str, raw: RawExperts) -> torch.Tensor:
    """The source's weights [E, N, K] as numbers."""
    stack = raw.stack(role, "weight") if original.layer.format.is_float else None
    shape = original.encoding.shapes[role]
    if stack is not None:
        return resized(stack, shape)
    source, layer, device = original.source, original.layer, raw.buffer.device
    each = (read_matrices(source, layer, e, [role], device, raw, original.encoding)[role] for e in experts)
    return torch.stack([matrix.values() for matrix in each])
