"""The kernel check: the production fused-MoE kernel on every rank, against a plain MoE layer in float64.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from safetensors import safe_open

from hqconv.artifact.load import decoded_experts, entered, linear_weights, load_rank, packed_linear
from hqconv.artifact.manifest import ProjectionError
from hqconv.artifact.reader import Artifact
from hqconv.conversion.hub_prefetch import CachePolicy, fetched_layers
from hqconv.errors import HqconvError, first_few
from hqconv.formats.encoding import SourceMatrix, resized
from hqconv.humming_ops.runtime import compiler_version
from hqconv.io.pipeline import pipeline
from hqconv.kernel_layout.fused_moe import (
    Gemm,
    compile_kernels,
    fused_moe,
    layer_config,
    linear_gemm,
    load_gemm,
)
from hqconv.kernel_layout.transform import needs_cuda
from hqconv.layout_decoder.decode import unrotated
from hqconv.models.linear_layers import LinearGroup
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas.activation import Activation
from hqconv.schemas.artifact_names import CONFIG, GEMMS, text_config
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import tp_slices
from hqconv.schemas.input_schema import A16
from hqconv.schemas.tensors import torch_dtype_of
from hqconv.schemas.untrusted_files import read_json
from hqconv.verification.reference import (
    EXACT,
    Expert,
    Rounding,
    Roundings,
    Routing,
    cover_all_experts,
    moe_forward,
    moe_forwards,
    route,
)
from hqconv.verification.result import CheckResult
from hqconv.verification.tolerances import (
    ErrorStats,
    Tolerances,
    check_figures,
    relative_error,
    worst,
)

T = TypeVar("T")
KNOWN_BY_NAME = "an activation that is known by name only: nothing to hold the kernel to"


def check_kernel(
    artifact: Artifact,
    source: Source | None,
    layers: Iterable[str],
    tokens: Iterable[int],
    device: torch.device,
    num_threads: int = 1,
    cache: CachePolicy | None = None,
) -> CheckResult:
    """Run the kernel on the chosen layers; `num_threads` threads prefetch experts.

    cache: limits for the shards of a source on the Hub.

    `measured[layer]` gets `kernel` (relative error against the decoded weights over all batches: the worst of the
    summed output and each rank's activated intermediate), `channel` (the same for the worst single channel),
    `batch` (for the worst single batch), where activations are quantized the same three after `rounded_` (against the
    decoded weights with activations that the reference rounds), `clipped` for static scales and, with a
    source, `against_source` (decoded weights in the same layer against the source's) and `weights_against_source`
    (per projection). Layers whose activation is known by name only are skipped, with a note; if all
    are, the check is skipped.
    """
    result = CheckResult("kernel")
    of_kind = {
        k.inputs: Tolerances.of(k.inputs, artifact.param_dtype) for k in artifact.spec.kernel_specs
    }
    result.notes += [limits.note() for limits in of_kind.values()]
    of_source = (
        {} if source is None else {layer.name: layer for layer in source.map_experts().layers}
    )
    known = []
    unknown = []
    for layer in layers:
        if artifact.knows_activation(layer):
            known.append(layer)
        else:
            unknown.append(f"{layer}: {artifact.activation_of(layer).describe()}")
    wanted = [of_source[layer] for layer in known if layer in of_source]
    with fetched_layers(source, wanted, cache or CachePolicy()) as fetched:
        for layer in known:
            entry = artifact.layers[layer]
            if layer in of_source:
                fetched.wait_for(layer)
            batches = [make_batch(artifact, layer, count, device) for count in tokens]
            measured = _measure(artifact, layer, batches, source, of_source, num_threads)
            fetched.release(layer)
            result.measured[layer] = measured
            recorded = {p: _recorded(e) for p, e in entry.quantization_error.items()}
            check_figures(
                result, layer, measured, of_kind[artifact.layer_spec_of(layer).inputs], recorded
            )
            result.notes += [
                f"{layer}.{gemm}: its scale cuts off {share:.2%} of these tokens' activations"
                for gemm, share in measured.get("clipped", {}).items()
            ]
    result.notes += [f"skipped: {one}, {KNOWN_BY_NAME}" for one in unknown]
    _check_linear(artifact, tokens, device, result)
    if unknown and not result.measured:
        result.skipped = f"{first_few(unknown)}, {KNOWN_BY_NAME}"
    return result


def _check_linear(
    artifact: Artifact, tokens: Iterable[int], device: torch.device, result: CheckResult
) -> None:
    """Run the dense GEMM of one linear group of each kind, and compare it with the decoded weights."""
    kinds: dict[Any, LinearGroup] = {}
    for name in artifact.manifest.linear_layers or ():
        group = artifact.linear_group(name)
        shapes = [group.shape(role) for role in group.roles]
        kinds.setdefault((artifact.schema_of(name), *shapes), group)
    dtype = torch_dtype_of(artifact.param_dtype)
    limits = Tolerances.of(A16, artifact.param_dtype)
    generator = torch.Generator(device).manual_seed(0)
    for group in kinds.values():
        schema = artifact.schema_of(group.name).of("w13")
        weights = [one.to(device) for one in linear_weights(artifact, group).values()]
        run = linear_gemm(packed_linear(artifact, group, device), schema, artifact.param_dtype)
        stats = ErrorStats()
        for count in tokens:
            x = torch.randn(count, group.hidden_size, generator=generator, device=device).to(dtype)
            stats.add(run(x).double(), x.double() @ torch.cat(weights).double().t())
        measured = worst({"output": stats})
        result.measured[group.name] = measured
        check_figures(result, group.name, measured, limits, {})


def _recorded(error: ProjectionError) -> float:
    """Recorded relative error of a projection's decoded weights; with rounded scales the largest of its experts."""
    return max(error.relative_error or 0.0, error.largest_scale_change or 0.0)


def _measure(
    artifact: Artifact,
    layer: str,
    batches: list[TokenBatch],
    source: Source | None,
    of_source: Mapping[str, MoeLayer],
    num_threads: int,
) -> dict[str, Any]:
    """Measure one layer: all its figures."""
    device = batches[0].x.device
    activation = artifact.activation_of(layer)
    experts = partial(decoded_experts, artifact, artifact.moe_layer(layer), device, num_threads)
    everything = together(batches)
    inputs = LayerInputs.of(artifact, layer, device)
    roundings = [EXACT] if inputs is None else [EXACT, inputs.reference()]
    with closing(experts()) as decoded:
        references = moe_forwards(
            everything.x.double(), everything.routing, in_order(decoded), activation, roundings
        )
    exact, *rounded = _compare_kernel(artifact, layer, batches, references, device)
    measured = exact | {
        f"rounded_{key}": value for figures in rounded for key, value in figures.items()
    }
    if inputs is not None and inputs.static:
        measured["clipped"] = inputs.clipped({"w13": everything.x, "w2": references[0][1]})
    if source is not None and layer in of_source:
        with (
            closing(experts()) as decoded,
            closing(source_experts(source, of_source[layer], device, num_threads)) as original,
        ):
            measured |= _compare_source(
                activation, everything, references[0][0], in_order(decoded), in_order(original)
            )
    return {**measured, "routed_by": batches[0].routed_by}


def source_experts(
    source: Source, layer: MoeLayer, device: torch.device, num_threads: int
) -> Generator[dict[str, SourceMatrix], None, None]:
    """Yield the source's experts in order, as `Source.read_expert` returns them."""

    def read(expert: int) -> dict[str, SourceMatrix]:
        with entered(device):
            return source.read_expert(layer, expert, layer.roles, device)

    return pipeline(
        range(layer.num_experts), read, 2, num_threads, runs_torch=True, name="hqconv-experts"
    )


def in_order(values: Iterator[T]) -> Callable[[int], T]:
    """Return a function that reads values by ascending numbers."""
    numbered = enumerate(values)
    return lambda number: next(value for index, value in numbered if index == number)


# --- the two comparisons -----------------------------------------------------------------------------------


def _compare_kernel(
    artifact: Artifact,
    layer: str,
    batches: list[TokenBatch],
    expected: list[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Compare the kernel with decoded weights: whole output, every rank's intermediate, and the worst channel.

    `expected`: outputs and intermediates of each reference for all batches together; one result for each reference.
    """
    entry = artifact.layers[layer]
    activation = artifact.activation_of(layer)
    counts = [b.x.size(0) for b in batches]
    routes = [count * entry.top_k for count in counts]
    split = [(torch.split(out, counts), torch.split(hidden, routes)) for out, hidden in expected]
    outputs = [torch.zeros_like(reference) for reference in split[0][0]]
    tallies = [{"output": ErrorStats()} for _ in expected]
    schema = artifact.schema_of(layer)
    slices = tp_slices(entry.intermediate_size, artifact.grid, schema)
    stored = (slices[-1].end,)  # the kernel's columns, with zeros that fill the last scale group
    tuned_for_m = _tuned_for_m(artifact, layer, counts)
    compile_kernels(gemm_configs(artifact, layer), tuned_for_m, device)
    for tp_rank, ep_rank in artifact.grid.ranks:
        gemms = _load_rank(artifact, layer, tp_rank, ep_rank, device)
        _, begin, end, _ = slices[tp_rank]
        for index, (batch, out) in enumerate(zip(batches, outputs, strict=True)):
            ids = local_ids(artifact, batch.routing.ids, entry.num_experts, ep_rank)
            part, inner = fused_moe(
                gemms, batch.x, ids, batch.routing.weights, activation, entry.gated, tuned_for_m
            )
            out += part.double()
            mine = (ids >= 0).reshape(-1)
            for tally, (_, hiddens) in zip(tallies, split, strict=True):
                of_rank = tally.setdefault(f"tp{tp_rank}-ep{ep_rank}, intermediate", ErrorStats())
                if mine.any():
                    # w2's inputs are rotated where its weights are; turning back is the same as turning
                    whole = resized(hiddens[index][mine], stored)
                    reference = unrotated(whole[:, begin:end], schema.of("w2").rotation)
                    of_rank.add(inner[mine, : end - begin].double(), reference)
        del gemms
    for tally, (references, _) in zip(tallies, split, strict=True):
        for reference, out in zip(references, outputs, strict=True):
            tally["output"].add(out, reference)
    return [worst(tally) for tally in tallies]


def gemm_configs(artifact: Artifact, layer: str) -> list[Any]:
    """LayerConfigs of both GEMMs from one rank for each number of local experts, which is compiled into the kernel."""
    num_experts = artifact.layers[layer].num_experts
    of_count = {
        len(artifact.grid.local_experts(num_experts, ep)): (0, ep) for ep in range(artifact.grid.ep)
    }
    return [
        layer_config(artifact.rank_file(layer, *rank).configs[gemm])
        for rank in of_count.values()
        for gemm in GEMMS
    ]


def warm_kernels(
    artifact: Artifact, layers: Iterable[str], tokens: Sequence[int], device: torch.device
) -> None:
    """Compile the GEMMs that `check_kernel` needs, once for each kind of layer. Errors are left to the check."""
    seen = set()
    for layer in layers:
        entry = artifact.layers[layer]
        with suppress(HqconvError, OSError):
            configs = artifact.rank_file(layer, 0, 0).configs
            kind = json.dumps(
                [configs, entry.num_experts, entry.top_k, entry.gated], sort_keys=True
            )
            kind += artifact.activation_of(layer).describe()
            if kind not in seen and artifact.knows_activation(layer):
                seen.add(kind)
                with torch.cuda.device(device):
                    both = gemm_configs(artifact, layer)
                compile_kernels(both, _tuned_for_m(artifact, layer, tokens), device)


def other_layout(artifact: Artifact) -> str:
    """Return why a GPU of the artifact's target cannot run its kernels on this machine; "" if it can.

    If the layout depends on the compiler, Humming computes it for the installed one. Raises VerificationError
    for invalid facts.
    """
    firsts = {artifact.layer_spec_of(name): name for name in reversed(artifact.layers)}
    for spec, name in firsts.items():
        if not any(map(needs_cuda, spec.each)):
            continue
        try:
            here = GpuTarget(spec.target.sm_version, compiler_version())
        except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            return f"its layout depends on the CUDA compiler, and Humming finds none here ({error})"
        layer = artifact.moe_layer(name)
        own, found = (artifact.kernel_forms(layer, target) for target in (None, here))
        for gemm, form in own.items():
            if (flags := form.flags) != found[gemm].flags:
                differing = ", ".join(
                    flag for flag in flags if flags[flag] != found[gemm].flags[flag]
                )
                return f"the artifact is for {spec.target}; CUDA {here.cuda_name} here has another layout ({differing})"
    return ""


def _tuned_for_m(artifact: Artifact, layer: str, tokens: Sequence[int]) -> int:
    return math.ceil(max(tokens) * artifact.layers[layer].top_k / artifact.grid.ep)


def _compare_source(
    activation: Activation,
    batch: TokenBatch,
    found: torch.Tensor,
    decoded: Callable[[int], Expert],
    original: Callable[[int], Mapping[str, SourceMatrix]],
) -> dict[str, Any]:
    """Compare decoded weights (`found`: their output) with the source's, and with the projections' errors."""
    sums: dict[str, torch.Tensor] = {}  # squared differences and squares, on the device

    def exact(expert: int) -> Expert:
        stored = original(expert)
        weights = {role: one.values() for role, one in stored.items()}
        for projection, approximate in decoded(expert).items():
            if projection in weights:
                weight = weights[projection].double()
                terms = torch.stack(
                    [(approximate.double() - weight).square().sum(), weight.square().sum()]
                )
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
    artifact: Artifact, layer: str, tp_rank: int, ep_rank: int, device: torch.device
) -> dict[str, Gemm]:
    """Load one rank's kernel tensors to the device, as a server holds them."""
    gemms = load_rank(artifact, layer, tp_rank, ep_rank, str(device))
    return {
        name: load_gemm(gemm.config, gemm.tensors, gemm.hadamard_block_size)
        for name, gemm in gemms.items()
    }


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of the parameter dtype and their routes, on the device."""

    x: torch.Tensor
    routing: Routing
    routed_by: str


def make_batch(artifact: Artifact, layer: str, num_tokens: int, device: torch.device) -> TokenBatch:
    """Make seeded tokens, routed by the layer's own router if the artifact holds it; every expert is hit."""
    entry = artifact.layers[layer]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{layer}/{num_tokens}".encode()))
    x = torch.randn(num_tokens, entry.hidden_size, generator=generator)
    x = x.to(torch_dtype_of(artifact.param_dtype))
    config = text_config(read_json(artifact.root / CONFIG))
    router, bias = _router(artifact, layer)
    if router is None or router.shape != (entry.num_experts, entry.hidden_size):
        logits = torch.randn(num_tokens, entry.num_experts, generator=generator)
        routing = route(logits, entry.top_k, {"norm_topk_prob": True})
        routed_by = "seeded scores"
    else:
        logits = x.float() @ router.float().t()
        routing = route(logits, entry.top_k, config, None if bias is None else bias.float())
        routed_by = "the checkpoint's router"
    routing = cover_all_experts(routing, entry.num_experts)
    moved = Routing(routing.ids.to(device), routing.weights.float().to(device))
    return TokenBatch(x.to(device), moved, routed_by)


def _router(artifact: Artifact, layer: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Router weight [E, H] and correction bias [E], if they have their usual names."""
    parent = layer.rpartition(".")[0]
    found = (_copied(artifact, f"{parent}.{name}") for name in ("gate.weight", "router.weight"))
    weight = next((tensor for tensor in found if tensor is not None), None)
    return weight, _copied(artifact, f"{parent}.gate.e_score_correction_bias")


def _copied(artifact: Artifact, name: str) -> torch.Tensor | None:
    for path in artifact.manifest.files:
        if artifact.is_shard(path) and name in artifact.header(path)[0]:
            with safe_open(artifact.fetched(path), framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None


def together(batches: list[TokenBatch]) -> TokenBatch:
    """Concatenate all batches, so that the reference decodes every expert once."""
    ids = torch.cat([b.routing.ids for b in batches])
    weights = torch.cat([b.routing.weights for b in batches])
    return TokenBatch(
        torch.cat([b.x for b in batches]), Routing(ids, weights), batches[0].routed_by
    )


def local_ids(
    artifact: Artifact, ids: torch.Tensor, num_experts: int, ep_rank: int
) -> torch.Tensor:
    """Map source expert ids to this rank's local indices, -1 elsewhere.

    A redundant expert's routes go to its copies in turn, so that every copy is run.
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


@dataclass(frozen=True)
class LayerInputs:
    """Roundings of both GEMMs, the static scales they need (float32 [1]), and the columns of each TP rank.

    rotations: sizes of the blocks of columns that are rotated before they are rounded; 0 for none.
    """

    roundings: dict[str, Rounding]
    rotations: dict[str, int]
    static: dict[str, torch.Tensor]
    slices: tuple[tuple[int, int], ...]
    param_dtype: torch.dtype

    @classmethod
    def of(cls, artifact: Artifact, layer: str, device: torch.device) -> LayerInputs | None:
        """Read them from an artifact's layer; None for 16-bit activations. Raises the errors of reading a rank file."""
        found = {gemm: Rounding.of(artifact.rank_file(layer, 0, 0).configs[gemm]) for gemm in GEMMS}
        roundings = {gemm: one for gemm, one in found.items() if one is not None}
        if not roundings:
            return None
        static = {
            gemm: torch.tensor([artifact.read_input_scale(layer, gemm, 0, 0)], device=device)
            for gemm, one in roundings.items()
            if one.is_static
        }
        schema = artifact.schema_of(layer)
        slices = tp_slices(artifact.layers[layer].intermediate_size, artifact.grid, schema)
        return cls(
            roundings,
            {gemm: schema.of(gemm).rotation for gemm in GEMMS},
            static,
            tuple((begin, end) for _, begin, end, _ in slices),
            torch_dtype_of(artifact.param_dtype),
        )

    def reference(self) -> Roundings:
        """Roundings for the reference: each TP rank rounds its own columns of the intermediate, as it has no others."""

        def hidden(values: torch.Tensor) -> torch.Tensor:
            stored = resized(values, (self.slices[-1][1],))
            parts = [self._round("w2", stored[:, begin:end]) for begin, end in self.slices]
            return torch.cat(parts, dim=1).to(values.dtype)[:, : values.size(1)]

        def wide(values: torch.Tensor) -> torch.Tensor:
            return values.to(self.param_dtype).to(values.dtype)

        return Roundings(lambda values: self._round("w13", values).to(values.dtype), wide, hidden)

    def clipped(self, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
        """Fraction of input values that the static scale clips, for each GEMM that has one."""
        return {
            gemm: self.roundings[gemm].clipped(inputs[gemm], static)
            for gemm, static in self.static.items()
        }

    def _round(self, gemm: str, values: torch.Tensor) -> torch.Tensor:
        rotated = unrotated(values, self.rotations[gemm])
        rounded = self.roundings[gemm](rotated, self.static.get(gemm))
        return unrotated(rounded, self.rotations[gemm])
