"""The kernel check: the production fused-MoE kernel on every rank, against a plain block in float64.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hqconv.artifact.load import load_rank
from hqconv.artifact.opened import Artifact
from hqconv.artifact.unrotate import unrotated
from hqconv.backends.moe import (
    Gemm,
    compile_activation,
    compile_kernels,
    fused_moe,
    layer_config,
    load_gemm,
)
from hqconv.decode.matrix import SourceMatrix
from hqconv.experts.block import ExpertBlock
from hqconv.schemas import artifact as names
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.grid import tp_slices
from hqconv.sources.source import Source
from hqconv.verification.batches import Batch, local_ids, make_batch, together
from hqconv.verification.decoded import decoded_experts, source_experts
from hqconv.verification.reference import ACTIVATIONS, Expert, is_known, moe_forward
from hqconv.verification.result import CheckResult
from hqconv.verification.tally import Tally, relative_error, worst

# Relative error of Humming's kernel against its own decoded weights, measured on an H200 (docs/kernels.md), by input
# schema and parameter dtype; three times that fails. One output channel may be noisier than the whole.
KERNEL_ERROR = {("a16", "bfloat16"): 0.0035, ("a16", "float16"): 0.0008}
TOLERANCE_FACTOR, CHANNEL_FACTOR = 3.0, 12.0
# Against the source: the output's error may exceed the recorded errors of the projections in quadrature by the first
# factor; the decoded weights' error, over the experts that were hit, the recorded one by the second.
SOURCE_FACTOR, WEIGHT_FACTOR = 2.0, 1.25
# Or, if that is more, their plain sum by this factor: where errors are not random but of one direction, as rounded
# scales over ternary weights give, they add up so, and an activation may amplify the gate's a little.
SUM_FACTOR = 1.25
# Where scales were rounded, the experts that are hit may have lost more than the average: up to the largest change.
# Codes and scales that were kept decode to the same numbers, but for e8m0 scales that float16 flushes to zero.
DIRECT_ERROR = 1e-6


@dataclass(frozen=True)
class Limits:
    """What decides, for one artifact."""

    kernel: float
    channel: float

    @classmethod
    def of(cls, input_schema: str, param_dtype: str) -> Limits:
        """The limits for activations of an input schema and parameters of a dtype."""
        error = KERNEL_ERROR[input_schema, param_dtype]
        return cls(TOLERANCE_FACTOR * error, CHANNEL_FACTOR * error)


def check_kernel(
    artifact: Artifact,
    source: Source | None,
    blocks: Iterable[str],
    tokens: Iterable[int],
    device: torch.device,
    num_threads: int = 1,
) -> CheckResult:
    """Run the kernel on the chosen blocks; `num_threads` read experts ahead.

    `measured[block]` gets `kernel` (relative error against the decoded weights over all batches: the worst of the
    summed output and each rank's activated intermediate), `channel` (the same for the worst single channel),
    `batch` (for the worst single batch) and, with a source, `against_source` (decoded weights in the same block
    against the source's) and `weights_against_source` (per projection).
    """
    result = CheckResult("kernel")
    limits = Limits.of(artifact.manifest["input_schema"], artifact.param_dtype)
    result.notes.append(
        f"fails above {limits.kernel:.4f} against the decoded weights ({limits.channel:.3f} in one channel or batch)"
    )
    of_source = {} if source is None else {block.name: block for block in source.map_experts().blocks}
    with ThreadPoolExecutor(num_threads, "hqconv-verify", partial(_begin_thread, device)) as pool:
        for block in blocks:
            words = artifact.blocks[block]
            if not is_known(words["activation"], words["gated"]):
                what = "The experts' activation is not known."
                result.add(block, what, ", ".join(ACTIVATIONS), words["activation"])
                continue
            batches = [make_batch(artifact, block, count, device) for count in tokens]
            measured = _measure(artifact, block, batches, source, of_source, pool)
            result.measured[block] = measured
            recorded = {p: _recorded(e) for p, e in words["quantization_error"].items()}
            _judge(result, block, measured, limits, recorded)
    return result


def _recorded(words: Mapping[str, Any]) -> float:
    """How far a projection's decoded weights are off the source's; where scales were rounded, of any of its experts."""
    return max(float(words["relative_error"]), float(words.get("largest_scale_change", 0.0)))


def _begin_thread(device: torch.device) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _measure(
    artifact: Artifact,
    block: str,
    batches: list[Batch],
    source: Source | None,
    of_source: Mapping[str, ExpertBlock],
    pool: ThreadPoolExecutor,
) -> dict[str, Any]:
    """All figures of one block."""
    device, activation = batches[0].x.device, artifact.blocks[block]["activation"]
    decoded = decoded_experts(artifact, artifact.expert_block(block), device, pool)
    everything = together(batches)
    expected = moe_forward(everything.x.double(), everything.routing, decoded, activation)
    measured = _compare_kernel(artifact, block, batches, expected, device)
    if source is not None:
        original = source_experts(source, of_source[block], device, pool)
        measured |= _compare_source(activation, everything, expected[0], decoded, original)
    return {**measured, "routed_by": batches[0].routed_by}


def _judge(
    result: CheckResult, block: str, measured: dict[str, Any], limits: Limits, recorded: dict[str, float]
) -> None:
    """NaN never passes: every comparison is written so that it fails then."""
    if not measured["kernel"] <= limits.kernel:
        what = f"The kernel's output is off (rank {measured['worst_rank']})."
        result.add(block, what, f"relative error <= {limits.kernel:.4f}", f"{measured['kernel']:.4g}")
    if not measured["channel"] <= limits.channel:
        where = f"{block}, {measured['worst_channel']}"
        result.add(
            where,
            "One channel of the kernel's output is off.",
            f"relative error <= {limits.channel:.3f}",
            f"{measured['channel']:.4g}",
        )
    if not measured["batch"] <= limits.channel:
        result.add(
            block,
            "One batch of the kernel's output is off.",
            f"relative error <= {limits.channel:.3f}",
            f"{measured['batch']:.4g}",
        )
    if "against_source" in measured:
        _judge_source(result, block, measured, recorded)


def _judge_source(
    result: CheckResult, block: str, measured: dict[str, Any], recorded: dict[str, float]
) -> None:
    """Hold the decoded weights, and the output they give, to the errors that the conversion measured."""
    errors = list(recorded.values())
    random, alike = SOURCE_FACTOR * math.hypot(*errors), SUM_FACTOR * sum(errors)
    limit = max(random, alike, DIRECT_ERROR)
    measured["limit_against_source"] = limit
    if not measured["against_source"] <= limit:
        found = f"{measured['against_source']:.4g}"
        result.add(block, "The output is off the source's.", f"relative error <= {limit:.4f}", found)
    for projection, error in measured["weights_against_source"].items():
        limit = max(WEIGHT_FACTOR * recorded.get(projection, 0.0), DIRECT_ERROR)
        if not error <= limit:
            where = f"{block}, {projection}"
            expected = f"relative error <= {limit:.4f}"
            result.add(where, "The decoded weights are off the source's.", expected, f"{error:.4g}")


# --- the two comparisons -----------------------------------------------------------------------------------


def _compare_kernel(
    artifact: Artifact,
    block: str,
    batches: list[Batch],
    expected: tuple[torch.Tensor, torch.Tensor],
    device: torch.device,
) -> dict[str, Any]:
    """Kernel against decoded weights: whole output, every rank's intermediate, and the worst channel.

    `expected` are the reference's output and intermediate of all batches together.
    """
    words = artifact.blocks[block]
    counts = [b.x.size(0) for b in batches]
    references = torch.split(expected[0], counts)
    hiddens = torch.split(expected[1], [count * words["top_k"] for count in counts])
    outputs = [torch.zeros_like(reference) for reference in references]
    tallies = {"output": Tally()}
    size, tp, schema = words["intermediate_size"], artifact.grid.tp, artifact.schema_of(block)
    tuned_for_m = _tuned_for_m(artifact, block, counts)
    compile_kernels(
        [config for pair in gemm_configs(artifact, block) for config in pair.values()], tuned_for_m, device
    )
    for tp_rank, ep_rank in artifact.grid.ranks:
        gemms = _load_rank(artifact, block, tp_rank, ep_rank, device)
        tally = tallies.setdefault(f"tp{tp_rank}-ep{ep_rank}, intermediate", Tally())
        for batch, hidden, out in zip(batches, hiddens, outputs, strict=True):
            ids = local_ids(artifact, batch.routing.ids, words["num_experts"], ep_rank)
            weights = batch.routing.weights
            part, inner = fused_moe(
                gemms, batch.x, ids, weights, words["activation"], words["gated"], tuned_for_m
            )
            out += part.double()
            mine = (ids >= 0).reshape(-1)
            if mine.any():
                _, begin, end, _ = tp_slices(size, tp, schema)[tp_rank]
                reference = unrotated(hidden[mine, begin:end], schema.rotation)  # rotated, as w2's inputs are
                tally.add(inner[mine, : end - begin].double(), reference)
        del gemms
    for reference, out in zip(references, outputs, strict=True):
        tallies["output"].add(out, reference)
    return worst(tallies)


def gemm_configs(artifact: Artifact, block: str) -> list[dict[str, Any]]:
    """Both GEMMs' LayerConfigs, of one rank for each number of local experts, which is compiled into the kernel."""
    num_experts = artifact.blocks[block]["num_experts"]
    of_count = {len(artifact.grid.local_experts(num_experts, ep)): (0, ep) for ep in range(artifact.grid.ep)}
    return [
        {gemm: layer_config(artifact.layer_config(block, gemm, *rank)) for gemm in names.GEMMS}
        for rank in of_count.values()
    ]


def compile_ahead(artifact: Artifact, block: str, tokens: Sequence[int], device: torch.device) -> None:
    """Compile what `check_kernel` will need of one block; any thread may. Raises as it would."""
    words, dtype = artifact.blocks[block], torch_dtype_of(artifact.param_dtype)
    with torch.cuda.device(device):
        configs = gemm_configs(artifact, block)
    counts = [count * words["top_k"] for count in tokens]
    rotation = artifact.schema_of(block).rotation
    act = partial(compile_activation, num_routes=counts, dtype=dtype, device=device, rotation=rotation)
    with ThreadPoolExecutor(1) as pool:
        activation = pool.submit(act, *configs[0].values(), words["activation"], words["gated"])
        both = [config for pair in configs for config in pair.values()]
        compile_kernels(both, _tuned_for_m(artifact, block, tokens), device)
        activation.result()


def _tuned_for_m(artifact: Artifact, block: str, tokens: Sequence[int]) -> int:
    top_k: int = artifact.blocks[block]["top_k"]
    return math.ceil(max(tokens) * top_k / artifact.grid.ep)


def _compare_source(
    activation: str,
    batch: Batch,
    found: torch.Tensor,
    decoded: Callable[[int], Expert],
    original: Callable[[int], Mapping[str, SourceMatrix]],
) -> dict[str, Any]:
    """Decoded weights (`found`: their output) against the source's, and what the projections' errors explain."""
    sums: dict[str, torch.Tensor] = {}  # squared differences and squares, on the device

    def exact(expert: int) -> Expert:
        stored = original(expert)
        weights = {role: one.values() for role, one in stored.items()}
        for projection, approximate in decoded(expert).items():
            if projection in weights:
                weight = weights[projection].double()
                terms = torch.stack([(approximate.double() - weight).square().sum(), weight.square().sum()])
                sums[projection] = sums.get(projection, 0.0) + terms
        biases = {f"b{role[1:]}": one.bias for role, one in stored.items() if one.bias is not None}
        return weights | {name: bias.to(batch.x.dtype) for name, bias in biases.items()}

    expected, _ = moe_forward(batch.x.double(), batch.routing, exact, activation)
    totals = {projection: total.tolist() for projection, total in sums.items()}
    return {
        "against_source": relative_error(found, expected),
        "weights_against_source": {
            p: math.sqrt(e / w) if w else math.sqrt(e) for p, (e, w) in totals.items()
        },
    }


def _load_rank(
    artifact: Artifact, block: str, tp_rank: int, ep_rank: int, device: torch.device
) -> dict[str, Gemm]:
    """One rank's kernel tensors on the device, as a server would have them."""
    gemms = load_rank(artifact, block, tp_rank, ep_rank, str(device))
    return {
        name: load_gemm(gemm.config, gemm.tensors, gemm.hadamard_block_size) for name, gemm in gemms.items()
    }
