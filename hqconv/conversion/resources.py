"""Memory and threads of a conversion: limits, the needs of an expert, and the staging that fits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hqconv.errors import RequestError, plural
from hqconv.models.moe_layer import RawLayout
from hqconv.planning.output_units import MoeLayerPlan
from hqconv.schemas.options import GPTQ

if TYPE_CHECKING:
    import torch

_CUDA_LANES = 3  # one copies in, one computes, one copies out
_CPU_LANES = 4  # with at least twice as many threads; the other threads help the lanes
_SLOTS_PER_LANE = 2
_CPU_BATCH_BYTES = 32 << 20  # of 16-bit weights: enough that Python costs little
_CUDA_BATCH_BYTES = 256 << 20
_CALIBRATED_WEIGHTS = {"cpu": 1 << 24, "cuda": 1 << 29}  # of a batch, whose size decides bytes
_PIECE_BYTES = 8 << 20
_GPU_FREE_SHARE = 0.8  # of the GPU memory that is free at the start; other processes may start
_MODEL_SHARE = 0.9  # of the GPU memory that is free, for a model of transformers

# Bytes of a lane, whose heap keeps up to 1.6 times what is live: at any time, and for a weight of a matrix (two of an
# expert are widened, quantized and measured, three are packed, sliced and padded). Then those of a calibration.
_CPU_FIXED = 6 << 20
_CPU_PER_WEIGHT = 32
_GPU_FIXED = 112 << 20
_GPU_PER_WEIGHT = 72
_PER_ROTATED_WEIGHT = 36
_PER_CALIBRATED_WEIGHT = {"cpu": 200, "cuda": 48}  # gate and up are rounded as one matrix
_PER_PRODUCT = 150  # of two columns of inputs: sums, drifts, H, factors
_PER_DOWN_PRODUCT = 100  # of the same of w2, whose weights take less than those of w13
_PER_OWN_PRODUCT = 40  # of the same of an expert's w13: H, factors
_PER_COLUMN = 6 << 12  # of 4096 tokens' inputs and intermediate values, which exist at a time


# Seconds of processors and of one GPU: for a byte of source that is rounded (docs/performance.md); calibrated, for a
# weight and column, with 65,536 tokens (two busy cores, 31M and 25M weights; one H200, docs/examples/models.md), and on
# a GPU, where launches of kernels count, for an expert.
_CPU_BYTE_S = 1.6e-9
_GPU_BYTE_S = 1.3e-10
_CPU_CALIBRATED_S = 1.0e-8
_GPU_CALIBRATED_S = 1.1e-12
_GPU_EXPERT_S = 0.04


@dataclass(frozen=True)
class Resources:
    """Limits of a conversion. device_name: cpu or cuda:N. max_gpu_bytes: None for most of the free GPU memory."""

    device_name: str
    max_memory_bytes: int
    num_threads: int
    max_gpu_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise RequestError(
                "There must be a thread to work.", where="--threads", found=self.num_threads
            )

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

    def estimate_s(self, layers: Iterable[MoeLayerPlan], *, on_gpu: bool | None = None) -> float:
        """Return roughly how long a conversion takes, in seconds, without downloads. on_gpu: None for this device."""
        is_cuda = self.is_cuda if on_gpu is None else on_gpu
        total = 0.0
        for planned in layers:
            layer = planned.layer
            encoding = planned.encoding
            byte_s = _GPU_BYTE_S if is_cuda else _CPU_BYTE_S / self.num_threads
            total += layer.num_bytes * byte_s
            if encoding.quantizer != GPTQ or encoding.is_direct:
                continue
            gate_up = (len(layer.roles) - 1) * layer.hidden_size
            size = layer.num_experts * layer.hidden_size * layer.intermediate_size
            columns = gate_up + layer.intermediate_size
            weight_s = _GPU_CALIBRATED_S if is_cuda else _CPU_CALIBRATED_S / self.num_threads
            total += size * columns * weight_s
            if is_cuda:
                total += layer.num_experts * _GPU_EXPERT_S
        return total

    @property
    def max_lanes(self) -> int:
        """Number of batches that are encoded at once on the CPU if memory allows."""
        return self.num_threads // self.threads_per_lane

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
        return asdict(self)


def time_text(layers: Sequence[MoeLayerPlan], resources: Resources) -> str:
    """Return an estimate of a conversion's time for people; where a calibration runs on the CPU, a GPU's beside it."""
    place = plural(resources.num_threads, "thread") if not resources.is_cuda else "one GPU"
    text = f"about {_rough(resources.estimate_s(layers))} on {place}"
    if not resources.is_cuda and any(layer.encoding.quantizer == GPTQ for layer in layers):
        text += f", {_rough(resources.estimate_s(layers, on_gpu=True))} on an H200"
    return f"{text}, without downloads"


def _rough(seconds: float) -> str:
    """Format `a minute`, `12 minutes`, `27 hours` or `3 days`."""
    for name, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}s"
    return "a minute"


def plan_staging(
    layers: Sequence[MoeLayerPlan],
    resources: Resources,
    *,
    reads_ahead: bool = True,
    has_model_limit: bool = False,
) -> Staging:
    """Choose the number of experts in a batch: as many lanes as threads allow shall fit, then as many experts.

    Raises RequestError if not even one batch fits. has_model_limit: of a calibration on the CPU this is left to
    `StreamedModel.check_memory`, which knows what the model needs as well.
    """
    is_calibrated = any(map(_is_calibrated, layers))
    num_lanes = resources.max_lanes
    host = pinned_need if resources.is_cuda and reads_ahead else cpu_need
    limits = [("--max-memory", resources.max_memory_bytes, _largest(map(host, layers)))]
    if resources.is_cuda:
        num_lanes = 1 if is_calibrated else _CUDA_LANES
        limits.append(("--max-gpu-memory", resources.gpu_bytes(), _largest(map(gpu_need, layers))))
    moe_layers = [planned for planned in layers if not planned.layer.is_linear]
    num_weights = max(
        len(planned.layer.roles) * math.prod(planned.encoding.shapes["w2"])
        for planned in moe_layers
    )
    if is_calibrated:
        fitting = [_CALIBRATED_WEIGHTS["cuda" if resources.is_cuda else "cpu"] // num_weights]
    else:
        target = _CUDA_BATCH_BYTES
        if not resources.is_cuda:  # every batch makes helper threads wait for Python's lock
            num_helpers = resources.threads_per_lane
            target = _CPU_BATCH_BYTES * (1 if num_helpers == 1 else min(16, 4 * num_helpers))
        fitting = [target // max(2 * num_weights, *map(_expert_bytes, moe_layers))]
        fitting += [need.num_experts(limit // num_lanes) for _, limit, need in limits]
    num_experts = max(_largest_batch(planned, max(1, min(fitting))) for planned in layers)
    for option, limit, need in limits:
        num_lanes = min(num_lanes, limit // need.num_bytes(num_experts))
        if has_model_limit and is_calibrated and not resources.is_cuda:
            num_lanes = max(1, num_lanes)
        if not num_lanes:
            raise RequestError(
                f"A batch of {plural(num_experts, 'expert')} does not fit into the memory limit.",
                where=option,
                expected=f"at least {need.num_bytes(num_experts) / 2**20:.0f} MiB for this model",
                found=f"{limit / 2**20:.0f} MiB",
                remedy=f"Allow more with {option}; without a GPU (--device cpu) none of its memory is needed.",
            )
    slot_bytes = max(_largest_batch(layer, num_experts) * _expert_bytes(layer) for layer in layers)
    if not reads_ahead:
        slot_bytes = min(slot_bytes, _PIECE_BYTES)
    out_bytes = 0
    if resources.is_cuda:
        out_bytes = max(_largest_batch(layer, num_experts) * _bytes_out(layer) for layer in layers)
    lane_bytes = limits[0][2].num_bytes(num_experts)
    return Staging(num_lanes, num_experts, slot_bytes, out_bytes, lane_bytes)


def _largest_batch(planned: MoeLayerPlan, num_experts: int) -> int:
    """Return the number of experts in the largest of a layer's equal batches of at most `num_experts`."""
    count = planned.layer.num_experts
    return -(-count // -(-count // num_experts))


@dataclass(frozen=True)
class Need:
    """Memory of one lane in bytes: of a batch, and for each of its experts."""

    fixed: int
    per_expert: int

    def num_bytes(self, num_experts: int) -> int:
        """Return the memory for a batch of experts."""
        return self.fixed + self.per_expert * num_experts

    def num_experts(self, num_bytes: int) -> int:
        """Return how many experts fit."""
        return (num_bytes - self.fixed) // max(self.per_expert, 1)


def _largest(needs: Iterable[Need]) -> Need:
    """Return a bound of all needs."""
    each = list(needs)
    return Need(max(need.fixed for need in each), max(need.per_expert for need in each))


def cpu_need(planned: MoeLayerPlan) -> Need:
    """Return an upper bound of the host memory of a lane that encodes a layer's experts there, slots included."""
    return _need(planned, _CPU_FIXED, _CPU_PER_WEIGHT, "cpu")


def gpu_need(planned: MoeLayerPlan) -> Need:
    """Return an upper bound of a lane's GPU memory."""
    return _need(planned, _GPU_FIXED, _GPU_PER_WEIGHT, "cuda")


def pinned_need(planned: MoeLayerPlan) -> Need:
    """Return the pinned host memory of one GPU lane's slots."""
    expert_bytes = _SLOTS_PER_LANE * (_expert_bytes(planned) + _bytes_out(planned))
    return _of_batches(planned, Need(1 << 20, expert_bytes))


def _need(planned: MoeLayerPlan, fixed: int, per_weight: int, device: str) -> Need:
    hidden = planned.layer.hidden_size
    inner = planned.layer.intermediate_size
    if not planned.layer.is_linear:
        hidden, inner = planned.encoding.shapes["w2"]
    if any(schema.rotation for schema in planned.encoding.schema.each):
        per_weight += _PER_ROTATED_WEIGHT
    per_expert = _SLOTS_PER_LANE * _expert_bytes(planned)
    if _is_calibrated(planned):
        fixed += _PER_PRODUCT * hidden**2 + _PER_COLUMN * 2 * hidden
        if not planned.layer.is_linear:
            fixed += _PER_COLUMN * 6 * inner
            per_expert += _PER_DOWN_PRODUCT * inner**2 + _PER_OWN_PRODUCT * hidden**2
        per_weight += _PER_CALIBRATED_WEIGHT[device]
    return _of_batches(planned, Need(fixed, per_expert + per_weight * hidden * inner))


def _of_batches(planned: MoeLayerPlan, need: Need) -> Need:
    """Return the need of a layer's batches. Linear groups come one by one, however large batches of experts are."""
    return Need(need.num_bytes(1), 0) if planned.layer.is_linear else need


def _expert_bytes(planned: MoeLayerPlan) -> int:
    """Return the source bytes of an expert."""
    return RawLayout(planned.layer, range(1)).num_bytes


def _bytes_out(planned: MoeLayerPlan) -> int:
    """Return the bytes that a GPU sends back for an expert, with sums and flags of checks."""
    return planned.expert_bytes_out + 1024


def _is_calibrated(planned: MoeLayerPlan) -> bool:
    return planned.encoding.quantizer == GPTQ and not planned.encoding.is_direct


@contextmanager
def bounded_gpu(resources: Resources, go_on: str) -> Iterator[None]:
    """Limit torch's memory on a GPU, and raise as `explained_gpu_memory`.

    Memory that torch holds already in this process, such as a caller's own model, does not count.
    """
    if not resources.is_cuda:
        yield
        return
    import torch

    device = resources.device
    bound = resources.gpu_bytes()
    before = torch.cuda.get_per_process_memory_fraction(device)
    allowed = torch.cuda.memory_reserved(device) + bound
    share = allowed / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(before, share), device)
    remedy = f"Free the GPU, or use --device cpu from the beginning. {go_on}"
    expected = f"{bound / 2**20:.0f} MiB for the conversion"
    try:
        with explained_gpu_memory(device, remedy, expected):
            yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


@contextmanager
def explained_gpu_memory(
    device: torch.device | str, remedy: str, expected: str = ""
) -> Iterator[None]:
    """Raise RequestError instead of torch's OutOfMemoryError. device: the GPU. expected: memory that is needed."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RequestError(
            "The GPU's memory is not enough.",
            where=device,
            expected=expected,
            found=f"{torch.cuda.mem_get_info(device)[0] / 2**20:.0f} MiB free",
            remedy=remedy,
        ) from error
