"""The kernel check: the production fused-MoE kernel on every rank, against a plain block in float64.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from hqconv.artifact.experts import whole_expert
from hqconv.artifact.opened import Artifact
from hqconv.backends.moe import Gemm, compile_kernels, fused_moe, load_gemm
from hqconv.backends.quantize import torch_dtype
from hqconv.checkpoint.folder import Checkpoint
from hqconv.experts.block import ExpertBlock
from hqconv.schemas import artifact as names
from hqconv.schemas.families import text_config
from hqconv.schemas.grid import tp_range
from hqconv.sources.stored import read_source
from hqconv.verification.reference import (
    ACTIVATIONS,
    Expert,
    Routing,
    cover_all_experts,
    is_known,
    moe_forward,
    route,
)
from hqconv.verification.result import CheckResult

DEFAULT_TOKENS = (1, 17, 256)
# Relative error of Humming's kernel against its own decoded weights, measured on an H200 with 16-bit activations
# (contract, section Verify); three times that fails. One output channel may be noisier than the whole.
KERNEL_ERROR = {"a16": 0.0035}
TOLERANCE_FACTOR, CHANNEL_FACTOR = 3.0, 12.0
# Against the source: the output's error may exceed the recorded errors of the projections in quadrature by the first
# factor; the decoded weights' error, over the experts that were hit, the recorded one by the second.
SOURCE_FACTOR, WEIGHT_FACTOR = 2.0, 1.25
# Or, if that is more, their plain sum by this factor: where errors are not random but of one direction, as rounded
# scales over ternary weights give, they add up so, and an activation may amplify the gate's a little.
SUM_FACTOR = 1.25
# Codes and scales that were kept decode to the same numbers, but for e8m0 scales that float16 flushes to zero.
DIRECT_ERROR = 1e-6
MIN_ROWS_PER_CHANNEL = 16


@dataclass(frozen=True)
class Limits:
    """What decides, for one artifact."""

    kernel: float
    channel: float

    @classmethod
    def of(cls, input_schema: str) -> Limits:
        error = KERNEL_ERROR[input_schema]
        return cls(TOLERANCE_FACTOR * error, CHANNEL_FACTOR * error)


@dataclass(frozen=True)
class Batch:
    """Tokens of the parameter dtype and their routes, on the device."""

    x: torch.Tensor
    routing: Routing
    routed_by: str


def check_kernel(
    artifact: Artifact,
    source: dict[str, ExpertBlock] | None,
    checkpoint: Checkpoint | None,
    blocks: Iterable[str],
    tokens: Iterable[int],
    device: torch.device,
) -> CheckResult:
    """Run the kernel on the chosen blocks. `source` maps block names to the source's experts, if it is given.

    `measured[block]` gets `kernel` (relative error against the decoded weights over all batches: the worst of the
    summed output and each rank's activated intermediate), `channel` (the same for the worst single channel),
    `batch` (for the worst single batch) and, with a source, `against_source` (decoded weights in the same block
    against the source's) and `weights_against_source` (per projection).
    """
    result = CheckResult("kernel")
    limits = Limits.of(artifact.manifest["input_schema"])
    result.notes.append(
        f"fails above {limits.kernel:.4f} against the decoded weights ({limits.channel:.3f} in one channel or batch)"
    )
    for block in blocks:
        words = artifact.blocks[block]
        if not is_known(words["activation"], words["gated"]):
            result.add(block, "unknown activation", ", ".join(ACTIVATIONS), words["activation"])
            continue
        batches = [make_batch(artifact, block, count, device) for count in tokens]
        decoded = functools.partial(_decoded, artifact, block, device)
        together = _together(batches)
        expected = moe_forward(together.x.double(), together.routing, decoded, words["activation"])
        measured = _compare_kernel(artifact, block, batches, expected, device)
        if source is not None and checkpoint is not None:
            original = source[block]
            measured |= _compare_source(
                words["activation"], together, expected[0], decoded, checkpoint, original
            )
        measured["routed_by"] = batches[0].routed_by
        result.measured[block] = measured
        recorded = {p: e["relative_error"] for p, e in words["quantization_error"].items()}
        _judge(result, block, measured, limits, recorded)
    return result


def _judge(
    result: CheckResult, block: str, measured: dict[str, Any], limits: Limits, recorded: dict[str, float]
) -> None:
    """NaN never passes: every comparison is written so that it fails then."""
    if not measured["kernel"] <= limits.kernel:
        what = f"the kernel's output is off (rank {measured['worst_rank']})"
        result.add(block, what, f"relative error <= {limits.kernel:.4f}", f"{measured['kernel']:.4g}")
    if not measured["channel"] <= limits.channel:
        where = f"{block}, {measured['worst_channel']}"
        result.add(
            where,
            "one channel is off",
            f"relative error <= {limits.channel:.3f}",
            f"{measured['channel']:.4g}",
        )
    if not measured["batch"] <= limits.channel:
        result.add(
            block,
            "one batch is off",
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
        result.add(block, "the output is off the source's", f"relative error <= {limit:.4f}", found)
    for projection, error in measured["weights_against_source"].items():
        limit = max(WEIGHT_FACTOR * recorded.get(projection, 0.0), DIRECT_ERROR)
        if not error <= limit:
            where = f"{block}, {projection}"
            expected = f"relative error <= {limit:.4f}"
            result.add(where, "the decoded weights are off the source's", expected, f"{error:.4g}")


def _decoded(artifact: Artifact, block: str, device: torch.device, expert: int) -> Expert:
    return {
        name: torch.from_numpy(np.ascontiguousarray(v)).to(device)
        for name, v in whole_expert(artifact, block, expert).items()
    }


# --- tokens and routes -------------------------------------------------------------------------------------


def make_batch(artifact: Artifact, block: str, num_tokens: int, device: torch.device) -> Batch:
    """Seeded tokens, routed by the block's own router where the artifact holds it, and every expert hit."""
    words = artifact.blocks[block]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{block}/{num_tokens}".encode()))
    x = torch.randn(num_tokens, words["hidden_size"], generator=generator)
    x = x.to(torch_dtype(artifact.param_dtype))
    config = _config(artifact)
    router, bias = _router(artifact, block)
    if router is None or router.shape != (words["num_experts"], words["hidden_size"]):
        logits = torch.randn(num_tokens, words["num_experts"], generator=generator)
        routing, routed_by = route(logits, words["top_k"], {"norm_topk_prob": True}), "seeded scores"
    else:
        logits = x.float() @ router.float().t()
        routing = route(logits, words["top_k"], config, None if bias is None else bias.float())
        routed_by = "the checkpoint's router"
    routing = cover_all_experts(routing, words["num_experts"])
    moved = Routing(routing.ids.to(device), routing.weights.float().to(device))
    return Batch(x.to(device), moved, routed_by)


def _config(artifact: Artifact) -> dict[str, Any]:
    words = json.loads((artifact.root / names.CONFIG).read_text(encoding="utf-8"))
    return dict(text_config(words))


def _router(artifact: Artifact, block: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The router's weight [E, H] and its correction bias [E], where they lie under their usual names."""
    parent = block.rpartition(".")[0]
    found = [_copied(artifact, f"{parent}.{name}") for name in ("gate.weight", "router.weight")]
    biases = [_copied(artifact, f"{parent}.{name}") for name in ("gate.e_score_correction_bias",)]
    return next((t for t in found if t is not None), None), next((t for t in biases if t is not None), None)


def _copied(artifact: Artifact, name: str) -> torch.Tensor | None:
    for path in artifact.manifest["files"]:
        if "/" not in path and path.endswith(".safetensors") and name in artifact.header(path)[0]:
            with safe_open(artifact.root / path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None


# --- the two comparisons -----------------------------------------------------------------------------------


def _together(batches: list[Batch]) -> Batch:
    """All batches as one, so that the reference decodes every expert once."""
    ids = torch.cat([b.routing.ids for b in batches])
    weights = torch.cat([b.routing.weights for b in batches])
    return Batch(torch.cat([b.x for b in batches]), Routing(ids, weights), batches[0].routed_by)


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
    size, tp = words["intermediate_size"], artifact.grid.tp
    tuned_for_m = math.ceil(max(counts) * words["top_k"] / artifact.grid.ep)
    ranks = {rank: _load_rank(artifact, block, *rank, device) for rank in _one_per_shape(artifact, block)}
    compile_kernels([gemm for gemms in ranks.values() for gemm in gemms.values()], tuned_for_m, device)
    ranks.clear()
    for tp_rank, ep_rank in artifact.grid.ranks:
        gemms = _load_rank(artifact, block, tp_rank, ep_rank, device)
        tally = tallies.setdefault(f"tp{tp_rank}-ep{ep_rank}, intermediate", Tally())
        for batch, hidden, out in zip(batches, hiddens, outputs, strict=True):
            ids = _local_ids(artifact, batch.routing.ids, words["num_experts"], ep_rank)
            weights = batch.routing.weights
            part, inner = fused_moe(
                gemms, batch.x, ids, weights, words["activation"], words["gated"], tuned_for_m
            )
            out += part.double()
            mine = (ids >= 0).reshape(-1)
            if mine.any():
                begin, end = tp_range(size, tp, tp_rank, artifact.schema)
                tally.add(inner[mine, : end - begin].double(), hidden[mine, begin:end])
        del gemms
    for reference, out in zip(references, outputs, strict=True):
        tallies["output"].add(out, reference)
    return _worst(tallies)


def _one_per_shape(artifact: Artifact, block: str) -> list[tuple[int, int]]:
    """One rank for each number of local experts, which is compiled into the kernel."""
    num_experts = artifact.blocks[block]["num_experts"]
    of_count = {len(artifact.grid.local_experts(num_experts, ep)): (0, ep) for ep in range(artifact.grid.ep)}
    return list(of_count.values())


class Tally:
    """Squared differences and squares per column over several batches of rows."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.differences: torch.Tensor | float = 0.0
        self.squares: torch.Tensor | float = 0.0
        self.worst_batch = 0.0

    def add(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Count rows [t, C] of one batch."""
        self.num_rows += expected.size(0)
        self.differences = self.differences + (found - expected).square().sum(0)
        self.squares = self.squares + expected.square().sum(0)
        error = relative_error(found, expected)
        self.worst_batch = error if not error <= self.worst_batch else self.worst_batch

    def error(self) -> float:
        """Relative error over all rows and columns."""
        if not self.num_rows:
            return 0.0
        assert isinstance(self.differences, torch.Tensor)
        assert isinstance(self.squares, torch.Tensor)
        return math.sqrt(float(self.differences.sum()) / max(float(self.squares.sum()), 1e-300))

    def worst_channel(self) -> tuple[float, int]:
        """The largest relative error of one column, and which; (0, -1) where too few rows tell about a column."""
        if self.num_rows < MIN_ROWS_PER_CHANNEL:
            return 0.0, -1
        assert isinstance(self.differences, torch.Tensor)
        assert isinstance(self.squares, torch.Tensor)
        floor = float(self.squares.mean()) * 1e-6 + 1e-300  # columns that are all but zero say nothing
        errors = (self.differences / self.squares.clamp_min(floor)).sqrt().nan_to_num(nan=math.inf)
        column = int(errors.argmax())
        return float(errors[column]), column


def _worst(tallies: dict[str, Tally]) -> dict[str, Any]:
    """The worst error over output and ranks, the worst single channel and the worst single batch."""

    def key(error: float) -> float:
        return math.inf if math.isnan(error) else error

    rank = max(tallies, key=lambda name: key(tallies[name].error()))
    channels = {name: tally.worst_channel() for name, tally in tallies.items()}
    channel = max(channels, key=lambda name: key(channels[name][0]))
    return {
        "kernel": tallies[rank].error(),
        "worst_rank": rank,
        "channel": channels[channel][0],
        "worst_channel": f"{channel} channel {channels[channel][1]}",
        "batch": max((t.worst_batch for t in tallies.values()), key=key),
    }


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; NaN where anything is NaN."""
    norm = float(expected.norm())
    difference = float((found - expected).norm())
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def _compare_source(
    activation: str,
    batch: Batch,
    found: torch.Tensor,
    decoded: Callable[[int], Expert],
    checkpoint: Checkpoint,
    original: ExpertBlock,
) -> dict[str, Any]:
    """Decoded weights (`found`: their output) against the source's, and what the projections' errors explain."""
    sums = {projection: [0.0, 0.0] for projection in original.roles}

    def exact(expert: int) -> Expert:
        stored = read_source(checkpoint, original, expert, original.roles, batch.x.device)
        weights = {role: one.matrix() for role, one in stored.items()}
        for projection, approximate in decoded(expert).items():
            if projection in weights:
                weight = weights[projection].double()
                sums[projection][0] += float((approximate.double() - weight).square().sum())
                sums[projection][1] += float(weight.square().sum())
        biases = {f"b{role[1:]}": one.bias for role, one in stored.items() if one.bias is not None}
        return weights | {name: bias.to(batch.x.dtype) for name, bias in biases.items()}

    expected, _ = moe_forward(batch.x.double(), batch.routing, exact, activation)
    return {
        "against_source": relative_error(found, expected),
        "weights_against_source": {p: math.sqrt(e / w) if w else math.sqrt(e) for p, (e, w) in sums.items()},
    }


def _load_rank(
    artifact: Artifact, block: str, tp_rank: int, ep_rank: int, device: torch.device
) -> dict[str, Gemm]:
    """One rank's kernel tensors, read as a server would: straight from the file, unchanged."""
    path = names.rank_file(block, tp_rank, ep_rank)
    gemms = {}
    with safe_open(artifact.root / path, framework="pt", device=str(device)) as file:
        for gemm in names.GEMMS:
            prefix = f"{block}.{gemm}_"
            stored = [name for name in artifact.header(path)[0] if name.startswith(prefix)]
            tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in stored}
            gemms[gemm] = load_gemm(artifact.layer_config(block, gemm, tp_rank, ep_rank), tensors)
    return gemms


def _local_ids(artifact: Artifact, ids: torch.Tensor, num_experts: int, ep_rank: int) -> torch.Tensor:
    """Source expert ids to this rank's local indices, -1 elsewhere.

    A redundant expert's routes are dealt over its copies in turn, so that every copy is run.
    """
    homes = artifact.grid.homes(num_experts)
    table = torch.full((num_experts, max(len(h) for h in homes)), -1, dtype=torch.long)
    count = torch.tensor([len(h) for h in homes])
    for expert, places in enumerate(homes):
        for copy, (rank, index) in enumerate(places):
            if rank == ep_rank:
                table[expert, copy] = index
    flat = ids.reshape(-1).cpu()
    turn = torch.arange(flat.numel()) % count[flat]
    return table[flat, turn].view_as(ids.cpu()).to(ids.device)
