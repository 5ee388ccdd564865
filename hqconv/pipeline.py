"""Runs a plan's groups: worker threads read, quantize, cut, lay out and write one expert at a time.

Memory: every worker holds one expert, so `num_workers * working_bytes` is the bound; it is chosen from
`--max-memory` before anything is allocated, and does not depend on the model's size.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hqconv.backends.assemble import gemm_tensors
from hqconv.backends.layout import to_kernel
from hqconv.backends.quantize import Quantized, quantize
from hqconv.checkpoint import Checkpoint, TensorRef
from hqconv.errors import InputError, RequestError
from hqconv.experts import ExpertBlock
from hqconv.plan import BlockGroup, CopyGroup, Place, Request, checkpoint_place, gemm_shapes, kernel_places
from hqconv.schemas import artifact
from hqconv.writer import GroupWriter

COPY_CHUNK_BYTES = 8 << 20
_COUPLED = ("w1", "w3")
_SOURCE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
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
        self._cancelled = threading.Event()
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(num_workers, "hqconv", initializer=self._prepare_thread)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancelled.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _prepare_thread(self) -> None:
        torch.set_num_threads(1)
        device = self.resources.device
        self._local.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def run_block(self, group: BlockGroup, writer: GroupWriter, report: Report) -> dict[str, Any]:
        """Convert every expert of a block. Returns its quantization error per projection."""

        def one(expert: int) -> dict[str, tuple[float, float]]:
            self._check()
            stream = self._local.stream
            with torch.cuda.stream(stream) if stream else nullcontext():
                sums = convert_expert(self, group, writer, expert)
            report(group.name, _expert_bytes(group.block, expert))
            return sums

        return _block_errors(self._all(self._pool.submit(one, e) for e in range(group.block.num_experts)))

    def run_copy(self, group: CopyGroup, writer: GroupWriter, report: Report) -> dict[str, Any]:
        """Copy a shard's tensors, byte for byte."""
        tensors = group.files[0].tensors

        def one(ref: TensorRef, start: int) -> None:
            self._check()
            size = min(COPY_CHUNK_BYTES, ref.num_bytes - start)
            buffer = bytearray(size)
            self.checkpoint.read_into(ref, buffer, start)
            writer.write(Place(0, tensors[ref.name].offset_bytes + start, size), buffer)
            report(group.name, size)

        self._all(
            self._pool.submit(one, ref, start)
            for ref in group.refs
            for start in range(0, ref.num_bytes, COPY_CHUNK_BYTES)
        )
        return {}

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError

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
        self._cancelled.set()
        for future in futures:
            future.cancel()
        wait(futures)


def convert_expert(
    workers: Workers, group: BlockGroup, writer: GroupWriter, expert: int
) -> dict[str, tuple[float, float]]:
    """Read, quantize, lay out and write one expert. Returns (error, power) sums per projection."""
    block, request = group.block, workers.request
    quantized: dict[str, Quantized] = {}
    for names in (_COUPLED, ("w2",)):
        present = [name for name in names if name in block.sources[expert]]
        matrices = [
            read_matrix(workers.checkpoint, block.sources[expert][name]["weight"], workers.resources.device)
            for name in present
        ]
        results = quantize(matrices, request.schema, request.param_dtype)
        refs = [block.sources[expert][name]["weight"] for name in present]
        _check_numbers(refs, results, request)
        quantized |= dict(zip(present, results, strict=True))
        del matrices
    if request.layout == artifact.KERNEL:
        _write_kernel(group, request, writer, expert, quantized)
    else:
        for name, result in quantized.items():
            for tensor, value in result.tensors.items():
                writer.write(checkpoint_place(group, expert, name, tensor), _bytes(value))
    return {name: (result.error, result.power) for name, result in quantized.items()}


def _write_kernel(
    group: BlockGroup, request: Request, writer: GroupWriter, expert: int, quantized: dict[str, Quantized]
) -> None:
    projections = {name: result.tensors for name, result in quantized.items()}
    shapes = gemm_shapes(group.block, request.grid.tp)
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


def read_matrix(checkpoint: Checkpoint, ref: TensorRef, device: torch.device) -> torch.Tensor:
    """A float tensor of the source, in its own dtype, on `device` (through pinned memory for CUDA)."""
    host = torch.empty(ref.shape, dtype=_SOURCE_DTYPES[ref.dtype], pin_memory=device.type == "cuda")
    checkpoint.read_into(ref, host.view(torch.uint8).numpy().data)
    return host if device.type == "cpu" else host.to(device, non_blocking=True)


def _bytes(tensor: torch.Tensor) -> Any:
    """A tensor's bytes as a flat uint8 array on the host."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()


def _check_numbers(refs: Sequence[TensorRef], results: Sequence[Quantized], request: Request) -> None:
    """Refuse what is no number, first of all: under a shared scale a NaN spoils its partner's codes too."""
    for ref, result in zip(refs, results, strict=True):
        if not result.is_finite:
            raise InputError(
                "A weight is NaN or infinite.",
                where=f"tensor {ref.name}",
                expected="finite numbers",
                remedy="The checkpoint is damaged or was saved from a diverged training; get a good copy.",
            )
    for ref, result in zip(refs, results, strict=True):
        if not math.isfinite(result.error):
            raise InputError(
                "A weight is too large for the schema: it would decode to infinity or NaN.",
                where=f"tensor {ref.name}, schema {request.schema.name}, {request.param_dtype}",
                remedy="Try --dtype bfloat16, or look at the tensor: such values are rarely meant.",
            )


def _block_errors(sums: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Relative Frobenius error of each projection over all experts, and of the worst expert.

    `math.fsum` is exact, so the order of the experts does not matter.
    """
    errors: dict[str, Any] = {}
    for name in sums[0]:
        error, power = (math.fsum(s[name][i] for s in sums) for i in (0, 1))
        each = [_relative(*s[name]) for s in sums]
        worst = max(range(len(each)), key=each.__getitem__)
        errors[name] = {
            "relative_error": _relative(error, power),
            "worst_expert": worst,
            "worst_relative_error": each[worst],
        }
    return errors


def _relative(error: float, power: float) -> float:
    return math.sqrt(error / power) if power else 0.0


def _expert_bytes(block: ExpertBlock, expert: int) -> int:
    return sum(ref.num_bytes for roles in block.sources[expert].values() for ref in roles.values())


def working_bytes(block: ExpertBlock, request: Request) -> int:
    """Upper bound of the host memory that one worker needs for one expert of this block."""
    numbers = block.intermediate_size * block.hidden_size
    source = numbers * 4 if block.dtype != "BF16" else numbers * 2
    widened = 0 if block.dtype == "BF16" else numbers * 4
    packed = numbers * request.schema.bits_per_weight() / 8
    # Two matrices in flight; three packed; a TP slice cut, stacked, padded and permuted; scale temporaries.
    live = 2 * (source + widened) + 3 * packed + 8 * packed / request.grid.tp + 0.5 * numbers
    return int(_HEAP_FACTOR * live) + (6 << 20)


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
