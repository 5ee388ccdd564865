"""Memory and threads of a conversion: limits, the needs of an expert, and the staging that fits."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hqconv.errors import RequestError
from hqconv.formats.source_format import QUANTIZED
from hqconv.models.expert_bytes import RawLayout
from hqconv.planning.output_units import MoeLayerPlan
from hqconv.schemas.options import GPTQ, RTN

if TYPE_CHECKING:
    import torch

_ONE = "One expert"
_CUDA_LANES = 3  # one copies in, one computes, one copies out
_CPU_LANES = 4  # with at least twice as many threads; the other threads help the lanes
_SLOTS_PER_LANE = 2
_CPU_BATCH_BYTES, _CUDA_BATCH_BYTES = (
    32 << 20,
    256 << 20,
)  # of 16-bit weights: enough that Python costs little
_PIECE_BYTES = 8 << 20
_MEASURED_BYTES = 1 << 10  # of an expert: sums and flags of checks
_GROUP_BYTES = 80  # ranges, scales and zero points of one scale group during quantization
_SEARCH_GROUP_BYTES = 120  # and during a search
_HEAP_FACTOR = (
    1.75  # the C library keeps freed blocks of up to 32 MiB: measured up to 1.6 times what is live
)
_MODEL_SHARE = 0.9  # of the GPU memory that is free, for a model of transformers
_GPU_FREE_SHARE = 0.8  # of the GPU memory that is free at the start; other processes may start
# Bytes of GPU memory for one weight while its matrix is quantized and its error measured in float64, besides its stored
# form, and the factor for memory that torch's allocator leaves unused between layers.
_GPU_BYTES_PER_WEIGHT, _GPU_HEAP_FACTOR = 48, 1.5
_GPU_SEARCH_BYTES, _GPU_SEARCH_WEIGHTS = (
    64,
    1 << 20,
)  # for each weight that a search handles together

# A calibration's batches, whose size decides bytes: of weights, on each type of device. And memory for a weight of gate
# and up, which are rounded as one matrix, and for an entry of the products of inputs: sums, drifts, H, factors.
_CPU_CALIBRATED_WEIGHTS, _GPU_CALIBRATED_WEIGHTS = 1 << 24, 1 << 28
_CALIBRATED_BYTES, _PRODUCT_BYTES = 64, 96
_CALIBRATED_ROWS = 4096  # of an expert's inputs and intermediate values, which exist at a time (calibration/inputs)
_GPU_ROTATION_BYTES = 24  # for each weight: rotated gate and up, and temporaries


@dataclass(frozen=True)
class Resources:
    """Limits of a conversion. device_name: cpu or cuda:N. max_gpu_bytes: None for most of the free GPU memory."""

    device_name: str
    max_memory_bytes: int
    num_threads: int
    max_gpu_bytes: int | None = None

    def __post_init__(self) -> None:
        if type(self.num_threads) is not int or self.num_threads < 1:
            what, found = "There must be a thread to work.", repr(self.num_threads)
            raise RequestError(what, where="--threads", expected=">= 1", found=found)

    @property
    def device(self) -> torch.device:
        """The device that quantizes experts."""
        import torch

        return torch.device(self.device_name)

    @property
    def is_cuda(self) -> bool:
        """True if experts are quantized on a GPU."""
        return self.device_name != "cpu"

    @property
    def threads_per_lane(self) -> int:
        """Number of threads for one batch: more than a few lanes would wait for Python's lock."""
        return max(1, self.num_threads // _CPU_LANES)

    def gpu_bytes(self) -> int:
        """Return the limit of GPU memory."""
        if self.max_gpu_bytes is not None:
            return self.max_gpu_bytes
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free * _GPU_FREE_SHARE)

    def model_limit(self) -> tuple[int, str]:
        """Return the memory that a model of transformers may take beside the work, and the limit's name."""
        if not self.is_cuda:
            return self.max_memory_bytes, "--max-memory"
        import torch

        return int(torch.cuda.mem_get_info(self.device)[0] * _MODEL_SHARE), "free memory of the GPU"


def default_threads() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Staging:
    """Batches of `num_experts` experts, `num_lanes` of them encoded at once, and the sizes of their buffers.

    slot_bytes: of the buffer for one batch's source bytes, and the limit of a copied piece. out_bytes: of the buffer
    for a GPU's results. lane_bytes: the largest host memory of a lane with its slots.
    """

    num_lanes: int
    num_experts: int
    slot_bytes: int
    out_bytes: int
    lane_bytes: int

    @property
    def num_slots(self) -> int:
        """Number of batches in flight: one per lane, and half as many, at least two, that are read or written."""
        return min(self.num_lanes * _SLOTS_PER_LANE, self.num_lanes + max(2, self.num_lanes // 2))

    @property
    def num_outputs(self) -> int:
        """Number of buffers for a GPU's results, which also wait to be written."""
        return self.num_lanes * _SLOTS_PER_LANE

    def to_dict(self) -> dict[str, int]:
        """Return the staging as a JSON document."""
        return {**asdict(self), "num_slots": self.num_slots}


def plan_staging(
    layers: Sequence[MoeLayerPlan], resources: Resources, *, reads_ahead: bool = True
) -> Staging:
    """Choose the number of lanes that memory and threads allow, and then the number of experts in a batch.

    Raises RequestError if not even one expert fits.
    """

    def host(planned: MoeLayerPlan, num_experts: int) -> int:
        decoded = 0
        if not (resources.is_cuda and reads_ahead):
            decoded = working_bytes(planned, num_experts)
        return decoded + (gpu_staging_bytes(planned, num_experts) if resources.is_cuda else 0)

    needs = {"--max-memory": (resources.max_memory_bytes, host, "memory")}
    wanted = resources.num_threads // resources.threads_per_lane
    if resources.is_cuda:
        needs["--max-gpu-memory"] = (resources.gpu_bytes(), gpu_working_bytes, "GPU memory")
        wanted = 1 if any(map(_is_calibrated, layers)) else _CUDA_LANES

    def num_fitting(num_experts: int) -> int:
        return min(
            limit // max(need(b, num_experts) for b in layers) for limit, need, _ in needs.values()
        )

    for option, (limit, need, what) in needs.items():
        _check_fits(option, max(need(layer, 1) for layer in layers), limit, what)
    target = _CUDA_BATCH_BYTES
    if (
        not resources.is_cuda
    ):  # larger with helper threads, as every batch makes them wait for Python's lock
        num_helpers = resources.threads_per_lane
        target = _CPU_BATCH_BYTES * (1 if num_helpers == 1 else min(16, 4 * num_helpers))
    num_weights = [len(b.layer.roles) * math.prod(b.encoding.shapes["w2"]) for b in layers]
    largest = max(
        max(_expert_bytes(b), 2 * weights) for b, weights in zip(layers, num_weights, strict=True)
    )
    sizes = range(1, 1 + max(1, min(target // largest, max(b.layer.num_experts for b in layers))))
    # The largest batch of which as many as wanted fit; of one expert, if there is none.
    num_experts = max(1, bisect_left(sizes, True, key=lambda count: num_fitting(count) < wanted))
    if any(map(_is_calibrated, layers)):
        at_once = _GPU_CALIBRATED_WEIGHTS if resources.is_cuda else _CPU_CALIBRATED_WEIGHTS
        num_experts = max(1, at_once // max(num_weights))
        for option, (limit, need, what) in needs.items():
            _check_fits(
                option,
                max(need(layer, num_experts) for layer in layers),
                limit,
                what,
                "A batch of experts",
            )
    num_experts = max(
        _largest_batch(b, num_experts) for b in layers
    )  # batches of a layer are equal
    slot_bytes = max(
        RawLayout(b.layer, range(_largest_batch(b, num_experts))).num_bytes for b in layers
    )
    num_lanes = max(1, min(num_fitting(num_experts), wanted))
    out_bytes = (
        max(_bytes_out(b, _largest_batch(b, num_experts)) for b in layers)
        if resources.is_cuda
        else 0
    )
    slot_bytes = slot_bytes if reads_ahead else min(slot_bytes, _PIECE_BYTES)
    lane_bytes = max(host(b, num_experts) for b in layers)
    return Staging(num_lanes, num_experts, slot_bytes, out_bytes, lane_bytes)


def _largest_batch(planned: MoeLayerPlan, num_experts: int) -> int:
    """Return the number of experts in the largest of a layer's equal batches of at most `num_experts`."""
    count = planned.layer.num_experts
    return -(-count // -(-count // num_experts))


def gpu_staging_bytes(planned: MoeLayerPlan, num_experts: int = 1) -> int:
    """Return the pinned host memory of one GPU lane's slots for batches of this layer."""
    num_batched = _largest_batch(planned, num_experts)
    return _SLOTS_PER_LANE * (
        _expert_bytes(planned) * num_batched + _bytes_out(planned, num_batched)
    ) + (1 << 20)


def working_bytes(planned: MoeLayerPlan, num_experts: int = 1) -> int:
    """Return an upper bound of one lane's host memory for batches of this layer: slots and temporaries."""
    layer, encoding, num_experts = (
        planned.layer,
        planned.encoding,
        _largest_batch(planned, num_experts),
    )
    numbers = math.prod(encoding.shapes["w2"])
    stored = _stored_bytes(planned)
    is_viewed = any(not p.is_run for parts in layer.slices.values() for p in parts.values())
    schemas = encoding.schema.each
    if encoding.conversion == QUANTIZED:
        widened = 0 if layer.dtype == "BF16" else numbers * 4
    elif encoding.keeps_codes:
        widened = stored + numbers  # codes in Humming's packing, maybe unpacked before
    else:  # and floats: quantized anew, or maybe so, where gate and up must share a scale or columns have an order
        widened = stored + numbers * 5
    if any(schema.rotation for schema in schemas):
        widened += numbers * (
            2 if encoding.conversion == QUANTIZED and layer.dtype == "BF16" else 4
        )
    group_bytes = _GROUP_BYTES + _SEARCH_GROUP_BYTES * (encoding.quantizer != RTN)
    groups = (
        group_bytes
        / min(schema.weight_scale_group_size or layer.hidden_size for schema in schemas)
        * numbers
    )
    num_decoded = (
        1 if encoding.is_coded else num_experts
    )  # at a time: only floats are taken as a stack
    packed = numbers * max(schema.bits_per_weight() for schema in schemas) / 8 * num_experts
    # Two matrices in flight, and one more that was widened and is not freed yet; three packed; a TP slice cut, joined,
    # padded and permuted; tensors that wait to be written.
    live = (
        num_decoded * (2 * stored * is_viewed + 3 * widened + groups)
        + 6 * packed
        + 8 * packed / planned.grid.tp
    )
    live += _calibrated_bytes(planned, num_experts)
    return int(_HEAP_FACTOR * live + _SLOTS_PER_LANE * _expert_bytes(planned) * num_experts) + (
        6 << 20
    )


def gpu_working_bytes(planned: MoeLayerPlan, num_experts: int = 1) -> int:
    """Return an upper bound of one lane's GPU memory for a batch of this layer."""
    layer, num_experts = planned.layer, _largest_batch(planned, num_experts)
    numbers = math.prod(planned.encoding.shapes["w2"]) * num_experts
    live = 3 * _stored_bytes(planned) * num_experts + _GPU_BYTES_PER_WEIGHT * numbers
    if planned.encoding.quantizer != RTN:
        live += _GPU_SEARCH_BYTES * min(numbers, max(_GPU_SEARCH_WEIGHTS, layer.hidden_size))
    if any(schema.rotation for schema in planned.encoding.schema.each):
        live += _GPU_ROTATION_BYTES * numbers
    live += _calibrated_bytes(planned, num_experts)
    return int(_GPU_HEAP_FACTOR * live) + (16 << 20)


def _stored_bytes(planned: MoeLayerPlan) -> int:
    """Return the source bytes of an expert's largest projection."""
    return max(
        sum(ref.num_bytes for ref in parts.values()) for parts in planned.layer.sources[0].values()
    )


def _bytes_out(planned: MoeLayerPlan, num_experts: int) -> int:
    """Return the bytes that a GPU sends back for a batch, measurements included."""
    return (planned.expert_bytes_out + _MEASURED_BYTES) * num_experts


def _expert_bytes(planned: MoeLayerPlan) -> int:
    """Return the source bytes of an expert."""
    return RawLayout(planned.layer, range(1)).num_bytes


def _is_calibrated(planned: MoeLayerPlan) -> bool:
    return planned.encoding.quantizer == GPTQ and not planned.encoding.is_direct


def _calibrated_bytes(planned: MoeLayerPlan, num_experts: int) -> int:
    """Return the memory for a calibrated batch beside that of any other."""
    if not _is_calibrated(planned):
        return 0
    hidden, inner = planned.encoding.shapes["w2"]
    products = _PRODUCT_BYTES * (hidden**2 + num_experts * inner**2)
    rows = 4 * _CALIBRATED_ROWS * (2 * hidden + 6 * inner)
    return 2 * _CALIBRATED_BYTES * num_experts * hidden * inner + products + rows


def _check_fits(option: str, need: int, limit: int, what: str, subject: str = _ONE) -> None:
    if need > limit:
        raise RequestError(
            f"{subject} does not fit into the {what} limit.",
            where=option,
            expected=f"at least {need / 2**20:.0f} MiB for this model",
            found=f"{limit / 2**20:.0f} MiB",
            remedy="Allow more, free some, or use --device cpu"
            + (": the bytes are the same." if subject == _ONE else ".")
            if "GPU" in what
            else f"Allow more with {option}.",
        )


@contextmanager
def bounded_gpu(resources: Resources, go_on: str, *, is_calibrated: bool = False) -> Iterator[None]:
    """Limit torch's memory on a GPU, and raise as `explained_gpu_memory`.

    Memory that torch holds already in this process, such as a caller's own model, does not count.
    """
    if not resources.is_cuda:
        yield
        return
    import torch

    _, total = torch.cuda.mem_get_info(resources.device)
    bound, before = (
        resources.gpu_bytes(),
        torch.cuda.get_per_process_memory_fraction(resources.device),
    )
    allowed = torch.cuda.memory_reserved(resources.device) + bound
    torch.cuda.set_per_process_memory_fraction(min(before, allowed / total), resources.device)
    try:
        elsewhere = (
            "or use --device cpu from the beginning"
            if is_calibrated
            else "or use --device cpu: the bytes are the same"
        )
        remedy = f"Free the GPU, {elsewhere}. {go_on}"
        with explained_gpu_memory(
            resources.device, remedy, f"{bound / 2**20:.0f} MiB for the conversion"
        ):
            yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, resources.device)


@contextmanager
def explained_gpu_memory(
    device: torch.device | str, remedy: str, expected: str = ""
) -> Iterator[None]:
    """Raise RequestError instead of torch's OutOfMemoryError. device: the GPU. expected: memory that is needed."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        found = f"{torch.cuda.mem_get_info(device)[0] / 2**20:.0f} MiB free"
        raise RequestError(
            "The GPU's memory is not enough.",
            where=str(device),
            expected=expected,
            found=found,
            remedy=remedy,
        ) from error
