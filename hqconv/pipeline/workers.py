"""Runs a plan's groups: worker threads read, quantize, cut, lay out and write one expert at a time.

Memory: every worker holds one expert, so `num_workers * working_bytes` is the bound; it is chosen from
`--max-memory` before anything is allocated, and does not depend on the model's size.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hqconv.backends.assemble import gemm_tensors
from hqconv.backends.layout import to_kernel
from hqconv.backends.quantize import Cost, Quantized
from hqconv.checkpoint.folder import Checkpoint, TensorRef
from hqconv.errors import RequestError
from hqconv.experts.block import ExpertBlock
from hqconv.formats.format import DIRECT, QUANTIZED, conversion_of
from hqconv.pipeline.encode import COUPLED, encode
from hqconv.pipeline.writer import GroupWriter
from hqconv.plan.plan import (
    BlockGroup,
    CopyGroup,
    Place,
    Request,
    checkpoint_place,
    gemm_shapes,
    kernel_places,
)
from hqconv.schemas import artifact
from hqconv.sources.stored import read_source

COPY_CHUNK_BYTES = 8 << 20
_MAX_CUDA_WORKERS = 4
_HEAP_FACTOR = 1.75  # the C library keeps freed blocks of up to 32 MiB: measured up to 1.6 times what is live

Report = Callable[[str, int], None]  # group name, source bytes dealt with


@dataclass(frozen=True)
class Resources:
    """What the conversion may use."""

    device: torch.device
    max_memory_bytes: int
    num_threads: int


class CancelledError(Exception):
    """Another worker failed, or the user interrupted; this one stops without a message of its own."""


class Workers:
    """Worker threads for one conversion, as many as memory allows."""

    def __init__(
        self, checkpoint: Checkpoint, request: Request, resources: Resources, num_workers: int
    ) -> None:
        self.checkpoint, self.request, self.resources = checkpoint, request, resources
        self._is_cancelled = False
        self._num_at_work = 0
        self._idle = threading.Condition()
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(num_workers, "hqconv", initializer=self._prepare_thread)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_cancelled = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _prepare_thread(self) -> None:
        torch.set_num_threads(1)
        device = self.resources.device
        self._local.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def run_block(self, group: BlockGroup, writer: GroupWriter, report: Report) -> dict[str, Any]:
        """Convert every expert of a block. Returns its quantization error per projection."""

        def one(expert: int) -> dict[str, Cost]:
            stream = self._local.stream
            with self._at_work(), torch.cuda.stream(stream) if stream else nullcontext():
                costs = convert_expert(self, group, writer, expert)
            report(group.name, sum(ref.num_bytes for ref in group.block.refs(expert)))
            return costs

        costs = self._all(self._pool.submit(one, e) for e in range(group.block.num_experts))
        return block_errors(costs, is_coded=not group.block.format.is_float)

    def run_copy(self, group: CopyGroup, writer: GroupWriter, report: Report) -> dict[str, Any]:
        """Copy a shard's tensors, byte for byte."""
        tensors = group.files[0].tensors

        def one(ref: TensorRef, start: int) -> None:
            size = min(COPY_CHUNK_BYTES, ref.num_bytes - start)
            buffer = bytearray(size)
            with self._at_work():
                self.checkpoint.read_into(ref, buffer, start)
                writer.write(Place(0, tensors[ref.name].offset_bytes + start, size), buffer)
            report(group.name, size)

        self._all(
            self._pool.submit(one, ref, start)
            for ref in group.refs
            for start in range(0, ref.num_bytes, COPY_CHUNK_BYTES)
        )
        return {}

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Counts who may still write. Raises CancelledError where nobody may begin any more."""
        with self._idle:
            if self._is_cancelled:
                raise CancelledError
            self._num_at_work += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_at_work -= 1
                self._idle.notify_all()

    def _all(self, submitted: Iterable[Future[Any]]) -> list[Any]:
        """Results in order; on the first failure the rest is cancelled and that failure is raised."""
        futures: list[Future[Any]] = []
        try:
            futures.extend(submitted)
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # interrupted: nobody may still write when the caller closes the files
            self._stop(futures)
            raise
        failures = [f.exception() for f in futures if f.done() and not f.cancelled() and f.exception()]
        if failures:
            self._stop(futures)
            raise next((e for e in failures if e and not isinstance(e, CancelledError)), CancelledError())
        return [future.result() for future in futures]

    def _stop(self, futures: list[Future[Any]]) -> None:
        """Let nobody begin, and wait until nobody is at work, whatever else is interrupted meanwhile.

        A future may be missing here, where the interrupt came while it was handed in: those at work are counted.
        """
        is_idle = False
        while not is_idle:
            try:
                with self._idle:
                    self._is_cancelled = True
                    for future in futures:
                        future.cancel()
                    is_idle = self._idle.wait_for(lambda: self._num_at_work == 0)
            except KeyboardInterrupt:
                continue


def convert_expert(workers: Workers, group: BlockGroup, writer: GroupWriter, expert: int) -> dict[str, Cost]:
    """Read, encode, lay out and write one expert. Returns what each projection lost."""
    block, request = group.block, workers.request
    encoded: dict[str, Quantized] = {}
    for names in COUPLED:
        roles = [role for role in names if role in block.roles]
        stored = read_source(workers.checkpoint, block, expert, roles, workers.resources.device)
        encoded |= encode(stored, request)
        del stored
    if request.layout == artifact.KERNEL:
        _write_kernel(group, request, writer, expert, encoded)
    else:
        for role, result in encoded.items():
            for tensor, value in result.tensors.items():
                writer.write(checkpoint_place(group, expert, role, tensor), _bytes(value))
    return {role: result.cost for role, result in encoded.items()}


def _write_kernel(
    group: BlockGroup, request: Request, writer: GroupWriter, expert: int, quantized: dict[str, Quantized]
) -> None:
    projections = {name: result.tensors for name, result in quantized.items()}
    shapes = gemm_shapes(group.block, request.grid.tp, request.schema)
    for tp_rank in range(request.grid.tp):
        packed = gemm_tensors(projections, request.schema, request.grid.tp, tp_rank)
        places = kernel_places(group, request.grid, tp_rank, expert)
        for gemm, (n, k) in shapes.items():
            _, kernel = to_kernel(packed[gemm], n, k, request.schema, request.param_dtype, request.sm_version)
            for name, value in kernel.items():
                data = _bytes(value)
                for place in places.pop(f"{gemm}_{name}"):
                    writer.write(place, data)
        assert not places, f"{group.name}: planned but not produced: {sorted(places)}"


def _bytes(tensor: torch.Tensor) -> Any:
    """A tensor's bytes as a flat uint8 array on the host."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()


def block_errors(costs: list[dict[str, Cost]], *, is_coded: bool) -> dict[str, Any]:
    """Relative Frobenius error of each projection over all experts that were quantized, and of the worst expert.

    Where the source `is_coded`, also how many experts were quantized anew, and how many of their scale groups came
    out without any error. `math.fsum` is exact, so the order of the experts does not matter.
    """
    errors: dict[str, Any] = {}
    for role in costs[0]:
        of_role = [cost[role] for cost in costs]
        each = [_relative(cost.error, cost.power) for cost in of_role]
        worst = max(range(len(each)), key=each.__getitem__)
        errors[role] = {
            "relative_error": _relative(
                math.fsum(cost.error for cost in of_role), math.fsum(cost.power for cost in of_role)
            ),
            "worst_expert": worst,
            "worst_relative_error": each[worst],
        }
        errors[role] |= requantized_counts(of_role) if is_coded else {}
    return errors


def requantized_counts(costs: Sequence[Cost]) -> dict[str, int]:
    """Of one projection: the experts that were quantized anew, their scale groups, and those without any error."""
    anew = [cost for cost in costs if not cost.is_direct]
    return {
        "num_experts_requantized": len(anew),
        "num_groups": sum(cost.num_groups for cost in anew),
        "num_exact_groups": sum(cost.num_exact for cost in anew),
    }


def _relative(error: float, power: float) -> float:
    return math.sqrt(error / power) if power else 0.0


def working_bytes(block: ExpertBlock, request: Request) -> int:
    """Upper bound of the host memory that one worker needs for one expert of this block."""
    numbers = block.intermediate_size * block.hidden_size
    stored = max(sum(ref.num_bytes for ref in parts.values()) for parts in block.sources[0].values())
    is_viewed = any(p.is_stacked and not p.is_run for parts in block.parts.values() for p in parts.values())
    conversion = conversion_of(block.format, request.schema, request.param_dtype)
    if conversion == QUANTIZED:
        widened = 0 if block.dtype == "BF16" else numbers * 4
    elif (
        conversion == DIRECT and not request.schema.is_coupled
    ):  # codes in Humming's packing, maybe unpacked before
        widened = stored + numbers
    else:  # and floats, since they are quantized anew, or may be where gate and up must share a scale
        widened = stored + numbers * 5
    packed = numbers * request.schema.bits_per_weight() / 8
    # Two matrices in flight; three packed; a TP slice cut, stacked, padded and permuted; scale temporaries.
    live = 2 * (stored * (2 if is_viewed else 1) + widened) + 3 * packed + 8 * packed / request.grid.tp
    return int(_HEAP_FACTOR * (live + 0.5 * numbers)) + (6 << 20)


def count_workers(blocks: Iterable[ExpertBlock], request: Request, resources: Resources) -> int:
    """How many experts may be worked on at once. Raises RequestError if not even one fits."""
    need = max(working_bytes(block, request) for block in blocks)
    fit = resources.max_memory_bytes // need
    if fit < 1:
        raise RequestError(
            "One expert does not fit into the memory limit.",
            where="--max-memory",
            expected=f"at least {need / 2**20:.0f} MiB for this model",
            found=f"{resources.max_memory_bytes / 2**20:.0f} MiB",
        )
    limit = _MAX_CUDA_WORKERS if resources.device.type == "cuda" else resources.num_threads
    return max(1, min(fit, limit))


def default_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
