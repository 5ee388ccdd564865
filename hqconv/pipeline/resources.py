"""What a conversion may use, and how much of it one expert needs: how many experts may be worked on at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hqconv.errors import RequestError
from hqconv.formats.format import QUANTIZED
from hqconv.planning.groups import PlannedBlock

_MAX_CUDA_WORKERS = 4
_HEAP_FACTOR = 1.75  # the C library keeps freed blocks of up to 32 MiB: measured up to 1.6 times what is live
_GPU_FREE_SHARE = 0.8  # of the GPU memory that is free at the start; other processes may come
# Bytes of GPU memory for one weight while its matrix is quantized and its error measured in float64, besides what is
# stored of it, and how much of it torch's allocator leaves unused between blocks.
_GPU_BYTES_PER_WEIGHT, _GPU_HEAP_FACTOR = 48, 1.5


@dataclass(frozen=True)
class Resources:
    """What the conversion may use. `max_gpu_bytes` counts on a CUDA device only; None: most of what is free there."""

    device: torch.device
    max_memory_bytes: int
    num_threads: int
    max_gpu_bytes: int | None = None

    def __post_init__(self) -> None:
        if type(self.num_threads) is not int or self.num_threads < 1:
            what, found = "There must be a thread to work.", repr(self.num_threads)
            raise RequestError(what, where="--threads", expected=">= 1", found=found)

    @property
    def is_cuda(self) -> bool:
        """Whether experts are quantized on a GPU."""
        return self.device.type == "cuda"

    def gpu_bytes(self) -> int:
        """The bound on the GPU's memory."""
        if self.max_gpu_bytes is not None:
            return self.max_gpu_bytes
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free * _GPU_FREE_SHARE)


def default_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def working_bytes(planned: PlannedBlock) -> int:
    """Upper bound of the host memory that one worker needs for one expert of this block."""
    block, encoding = planned.block, planned.encoding
    numbers = block.intermediate_size * block.hidden_size
    stored = _stored_bytes(planned)
    is_viewed = any(p.is_stacked and not p.is_run for parts in block.parts.values() for p in parts.values())
    if encoding.conversion == QUANTIZED:
        widened = 0 if block.dtype == "BF16" else numbers * 4
    elif encoding.is_direct and not encoding.schema.is_coupled:
        widened = stored + numbers  # codes in Humming's packing, maybe unpacked before
    else:  # and floats, since they are quantized anew, or may be where gate and up must share a scale
        widened = stored + numbers * 5
    packed = numbers * encoding.schema.bits_per_weight() / 8
    # Two matrices in flight; three packed; a TP slice cut, stacked, padded and permuted; scale temporaries.
    live = 2 * (stored * (2 if is_viewed else 1) + widened) + 3 * packed + 8 * packed / planned.grid.tp
    return int(_HEAP_FACTOR * (live + 0.5 * numbers)) + (6 << 20)


def gpu_working_bytes(planned: PlannedBlock) -> int:
    """Upper bound of the GPU memory that one worker needs for one expert of this block."""
    block = planned.block
    numbers = block.intermediate_size * block.hidden_size
    live = 3 * _stored_bytes(planned) + _GPU_BYTES_PER_WEIGHT * numbers
    return int(_GPU_HEAP_FACTOR * live) + (16 << 20)


def _stored_bytes(planned: PlannedBlock) -> int:
    """What the source stores for the largest projection of an expert."""
    return max(sum(ref.num_bytes for ref in parts.values()) for parts in planned.block.sources[0].values())


def count_workers(blocks: Iterable[PlannedBlock], resources: Resources) -> int:
    """How many experts may be worked on at once. Raises RequestError if not even one fits."""
    blocks = list(blocks)
    need = max(map(working_bytes, blocks))
    fit = _fitting("--max-memory", need, resources.max_memory_bytes, "memory")
    limit = resources.num_threads
    if resources.is_cuda:
        gpu_need = max(map(gpu_working_bytes, blocks))
        gpu_fit = _fitting("--max-gpu-memory", gpu_need, resources.gpu_bytes(), "GPU memory")
        limit = min(gpu_fit, _MAX_CUDA_WORKERS)
    return max(1, min(fit, limit))


def _fitting(option: str, need: int, limit: int, what: str) -> int:
    if need > limit:
        raise RequestError(
            f"One expert does not fit into the {what} limit.",
            where=option,
            expected=f"at least {need / 2**20:.0f} MiB for this model",
            found=f"{limit / 2**20:.0f} MiB",
            remedy="Allow more, free some, or use --device cpu: the bytes are the same."
            if "GPU" in what
            else f"Allow more with {option}.",
        )
    return limit // need


@contextmanager
def bounded_gpu(resources: Resources) -> Iterator[None]:
    """Hold torch to the bound on a GPU's memory, and say in plain words where it is not enough.

    What torch has already taken in this process, such as a caller's own model, does not count. Raises
    RequestError instead of torch's OutOfMemoryError.
    """
    if not resources.is_cuda:
        yield
        return
    _, total = torch.cuda.mem_get_info(resources.device)
    bound, before = resources.gpu_bytes(), torch.cuda.get_per_process_memory_fraction(resources.device)
    allowed = torch.cuda.memory_reserved(resources.device) + bound
    torch.cuda.set_per_process_memory_fraction(min(before, allowed / total), resources.device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(resources.device)
        raise RequestError(
            "The GPU's memory is not enough.",
            where=str(resources.device),
            expected=f"{bound / 2**20:.0f} MiB for the conversion",
            found=f"{free / 2**20:.0f} MiB free",
            remedy="Free the GPU, or use --device cpu: the bytes are the same. Go on with --resume.",
        ) from error
    finally:
        torch.cuda.set_per_process_memory_fraction(before, resources.device)
