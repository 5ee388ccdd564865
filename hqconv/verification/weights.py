"""The `weights` check: rank files decoded, ranks joined, and compared with the source.

The source is quantized once more; codes, scales and zero points must be equal. The error of the artifact's weights is
measured on the decoded weights; the decoder shares no code with the conversion.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch

from hqconv.artifact.reader import Artifact
from hqconv.conversion.hub_prefetch import CachePolicy, fetched_layers
from hqconv.conversion.stages import Meter
from hqconv.errors import HqconvError, RequestError, VerificationError, plural
from hqconv.io.pipeline import pipeline
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.layer_encoding import encoding_of
from hqconv.planning.plan import with_dense
from hqconv.schemas.grid import stored_size
from hqconv.schemas.options import GPTQ, RTN
from hqconv.schemas.tensors import torch_dtype
from hqconv.verification.experts import (
    Batches,
    ExpertResult,
    LayerCheck,
    Original,
    plan_staging,
    why_not,
)
from hqconv.verification.figures import check_recorded, check_search, summarize
from hqconv.verification.files import check_source_scales, is_static, other_source
from hqconv.verification.fused_exponents import folding_bytes
from hqconv.verification.result import ERRORS_OF_WEIGHTS, NO_EXPERT, CheckResult, Finding

_THREADS: dict[str, Any] = {"runs_torch": True, "name": "hqconv-verify"}


def check_weights(
    artifact: Artifact,
    source: Source | None,
    indices: Collection[int] | None,
    num_threads: int,
    max_memory_bytes: int,
    device: torch.device | None = None,
    meter: Meter | None = None,
    cache: CachePolicy | None = None,
) -> CheckResult:
    """Decode the MoE layers of `indices` (None: all) and compare them with the source, if it is given.

    cache: limits for the shards of a source on the Hub, which are fetched while other layers are checked.

    With a `device`, experts are checked there in batches, and experts with faults again on the CPU; the findings are
    the same. `measured[layer][projection]` holds the error figures, or without a source figures of the decoded
    weights. Raises RequestError if not even one expert fits into `max_memory_bytes`; every other fault is a finding.
    """
    result = CheckResult("weights")
    layers = consistent_layers(artifact, indices, result)
    originals = _source_layers(artifact, source, indices, result)
    if device is not None and (obstacle := _obstacle(artifact, originals, device)):
        result.notes.append(f"{device} cannot be used: {obstacle}")
        device = None
    batches, num_workers = _plan_work(artifact, layers, num_threads, max_memory_bytes, device)
    compared = [originals[layer.name] for layer in layers if layer.name in originals]
    shards = artifact.shards()
    totals = _Totals()
    with (
        batches or nullcontext(),
        fetched_layers(source, compared, cache or CachePolicy()) as fetched,
    ):

        def checks() -> Iterator[LayerCheck]:
            for layer in layers:
                original = originals.get(layer.name)
                if source is not None and original is not None:
                    fetched.wait_for(layer.name)
                    if is_static(artifact, layer.name):
                        check_source_scales(artifact, layer.name, source, original, result)
                yield _layer_check(artifact, layer, source, original, shards)

        # Of a source on the Hub each layer is concluded before the next is awaited: its shards make room.
        is_streamed = source is not None and source.listing is not None
        for group in ([check] for check in checks()) if is_streamed else [checks()]:
            for check, found in _run(group, batches, num_workers, meter):
                totals.num_again += sum(outcome is None for outcome in found)
                outcomes = _completed(check, found, num_workers)
                _conclude(check, outcomes, result)
                fetched.release(check.layer.name)
                totals.add(check, outcomes)
    if source is not None:
        _name_other_source(artifact, source, totals, result)
    num_all = len(artifact.layers) + len(artifact.manifest.linear_layers or ())
    looked_at = f"{len(layers)} of {plural(num_all, 'layer')}"
    reference = "decoded, not compared" if source is None else "compared"
    result.notes.insert(0, f"{looked_at} {reference} with the source")
    result.notes += _notes(batches, totals)
    result.notes += _misread_notes(result)
    return result


def _plan_work(
    artifact: Artifact,
    layers: Sequence[MoeLayer],
    num_threads: int,
    max_memory_bytes: int,
    device: torch.device | None,
) -> tuple[Batches | None, int]:
    """Return the memory for batches on a device, and the number of threads that check single experts."""
    need_bytes = max((_working_bytes(artifact, layer) for layer in layers), default=1)
    if need_bytes > max_memory_bytes:
        raise RequestError(
            "One expert does not fit into the memory limit.",
            where="--max-memory",
            expected=f"at least {need_bytes / 2**20:.0f} MiB for this artifact",
            found=f"{max_memory_bytes / 2**20:.0f} MiB",
        )
    staging = None
    if device is not None:
        staging = plan_staging(device, num_threads, max_memory_bytes - need_bytes)
    host_bytes = 0 if staging is None else staging.host_bytes
    num_workers = max(1, min(num_threads, (max_memory_bytes - host_bytes) // need_bytes))
    return None if staging is None else Batches(staging), num_workers


class _Totals:
    """Numbers of experts that were checked, wrong, and checked again alone; of calibrated layers."""

    def __init__(self) -> None:
        self.num_experts = self.num_wrong = self.num_again = self.num_calibrated = 0

    def add(self, check: LayerCheck, outcomes: Sequence[ExpertResult]) -> None:
        """Count one layer."""
        self.num_experts += len(outcomes)
        self.num_wrong += sum(bool(outcome.findings) for outcome in outcomes)
        if check.original is not None and check.original.is_calibrated:
            self.num_calibrated += 1


def layer_bytes(artifact: Artifact, layer: MoeLayer) -> int:
    """Approximate bytes of a layer's codes: number of weights times the schema's bits."""
    weights = layer.num_experts * sum(math.prod(layer.shape(role)) for role in layer.roles)
    schemas = artifact.schema_of(layer.name).each
    return weights * max(schema.num_bits for schema in schemas) // 8


def _run(
    checks: Iterable[LayerCheck], batches: Batches | None, num_workers: int, meter: Meter | None
) -> Iterator[tuple[LayerCheck, list[ExpertResult | None]]]:
    """Check layers in threads, one expert after the other or in batches; yield each layer with its outcomes.

    None stands for an expert of a batch that must be checked alone.
    """
    num_threads = num_workers if batches is None else batches.staging.num_readers

    def run(task: tuple[LayerCheck, range]) -> tuple[LayerCheck, list[ExpertResult | None]]:
        check, experts = task
        if batches is not None:
            return check, check.run_batch(experts, batches)
        return check, [check.run(expert) for expert in experts]

    tasks = ((check, experts) for check in checks for experts in check.ranges(batches))
    with closing(pipeline(tasks, run, 2 * num_threads, num_threads, **_THREADS)) as done:
        for check, ranges in itertools.groupby(done, key=lambda task: task[0]):
            name = check.layer.name
            outcomes: list[ExpertResult | None] = []
            for _, of_range in ranges:
                outcomes += of_range
                if meter is not None:
                    num_bytes = layer_bytes(check.artifact, check.layer) * len(of_range)
                    meter.advance(name, num_bytes // check.layer.num_experts)
            if meter is not None:
                meter.finish(name)
            yield check, outcomes


def _completed(
    check: LayerCheck, outcomes: Sequence[ExpertResult | None], num_workers: int
) -> list[ExpertResult]:
    """Check the experts of a layer that have no outcome yet, alone."""
    experts = [expert for expert, outcome in enumerate(outcomes) if outcome is None]
    with closing(
        pipeline(experts, check.run, 2 * num_workers, num_workers, **_THREADS)
    ) as repeated:
        return [next(repeated) if outcome is None else outcome for outcome in outcomes]


def _notes(batches: Batches | None, totals: _Totals) -> list[str]:
    """Describe the device of the check, experts that were checked again, and calibrated layers."""
    place = "on the CPU"
    if batches is not None:
        place = f"on {batches.staging.device}"
        if totals.num_again:
            place += f"; {totals.num_again} of {totals.num_experts} experts again on the CPU"
        if batches.errors:
            place += f", some after {batches.errors[0]}"
    notes = [place]
    if totals.num_calibrated:
        bounded = f"{plural(totals.num_calibrated, 'layer')} within bounds of the source's weights"
        notes.append(f"{bounded}: a calibration is not repeated. {ERRORS_OF_WEIGHTS}")
    return notes


def _name_other_source(
    artifact: Artifact, source: Source, totals: _Totals, result: CheckResult
) -> None:
    """Add as first finding that the source is not the artifact's, where its files or all of its experts differ."""
    another = other_source(artifact.manifest.source, source)
    if another is None and totals.num_wrong == totals.num_experts > 1:
        found = f"{totals.num_wrong} experts differ"
        another = Finding("--source", NO_EXPERT, "the source's weights, quantized", found)
    if another is not None:
        result.put_first(another)


# --- selection of the work ----------------------------------------------------------------------------------


def consistent_layers(
    artifact: Artifact, indices: Collection[int] | None, result: CheckResult
) -> list[MoeLayer]:
    """Return layers and linear groups of `indices` (None: all), without those whose entries contradict each other."""
    layers: list[MoeLayer] = []
    for name, entry in artifact.layers.items():
        if indices is None or entry.layer in indices:
            try:
                layers.append(artifact.moe_layer(name))
            except VerificationError as error:
                result.add_error(error)
    for name in artifact.manifest.linear_layers or ():
        try:
            group = artifact.linear_group(name)
        except VerificationError as error:
            result.add_error(error)
            continue
        if indices is None or group.index in indices:
            layers.append(group)
    return layers


def _source_layers(
    artifact: Artifact, source: Source | None, indices: Collection[int] | None, result: CheckResult
) -> dict[str, MoeLayer]:
    """Return the source's layers by name; none without a source, or where it cannot be mapped."""
    if source is None:
        return {}
    check_search(artifact, result)
    try:
        experts = source.map_experts()
        layers = {layer.name: layer for layer in experts.layers}
        linear = with_dense(experts, source.tensors, artifact.spec).linear
    except HqconvError as error:
        result.add(
            f"source: {error.where}",
            f"The source cannot be mapped: {error.what}",
            error.expected,
            error.found,
        )
        return {}
    if indices is None:
        for name in sorted(layers.keys() - artifact.layers.keys() - set(artifact.left)):
            result.add(
                f"layer {name}",
                "An MoE layer of the source is missing in the artifact.",
                "present",
                "absent",
            )
    return layers | {group.name: group for group in linear}


def _obstacle(artifact: Artifact, originals: Mapping[str, MoeLayer], device: torch.device) -> str:
    """Return why the source cannot be quantized on the device; "" if it can, or if there is no source."""
    layer = next(iter(originals.values()), None)
    if layer is None:
        return ""
    dtype = torch_dtype(layer.dtype) if layer.format.is_float else torch.float32
    for kernel_spec in artifact.spec.kernel_specs:
        reason = why_not(kernel_spec.schema, artifact.param_dtype, dtype, device)
        if reason:
            return reason
    return ""


def _layer_check(
    artifact: Artifact,
    layer: MoeLayer,
    source: Source | None,
    found: MoeLayer | None,
    shards: Mapping[str, str],
) -> LayerCheck:
    """Make the check of a layer. found: the source's layer of the same name, if there is one."""
    if source is None:
        return LayerCheck(artifact, layer, None, shards)
    sizes = ("num_experts", "hidden_size", "intermediate_size", "gated")
    if found is None or any(getattr(found, size) != getattr(layer, size) for size in sizes):
        check = LayerCheck(artifact, layer, None, shards)
        texts = []
        for described in (found, layer):
            values = [f"{size} {getattr(described, size)}" for size in sizes if described]
            texts.append(", ".join(values) or "no such layer")
        what = "The source has no such layer."
        check.whole.findings.insert(0, Finding(f"layer {layer.name}", what, *texts))
        return check
    options = artifact.spec.encoding
    schema = artifact.schema_of(layer.name)
    encoding = encoding_of(found, schema, artifact.param_dtype, options)
    # A calibration cannot be repeated here: its weights must be the source's within bounds.
    is_calibrated = encoding.quantizer == GPTQ and not encoding.keeps_codes
    original = Original(source, found, encoding, is_calibrated)
    return LayerCheck(artifact, layer, original, shards)


def _working_bytes(artifact: Artifact, layer: MoeLayer) -> int:
    """Upper bound of the memory that one worker needs for one expert."""
    schema = artifact.schema_of(layer.name)
    numbers = stored_size(layer.intermediate_size, schema) * layer.hidden_size
    # Read, and widened to float32; a fused tensor's part is read as a whole, codes are unpacked on the way.
    source_bytes = 2 if layer.dtype == "BF16" else 8 if layer.dtype == "F32" else 6
    weights = [parts["weight"] for parts in layer.slices.values()]
    is_unpacked = not layer.format.is_float
    if is_unpacked or any(part.is_stacked or not part.is_run for part in weights):
        source_bytes += 6
    if any(of_gemm.rotation for of_gemm in schema.each):
        source_bytes += 8  # twice: to be quantized, and to be measured
    packed_bytes = max(of_gemm.num_bits for of_gemm in schema.each) / 8
    group_bytes = 56 if artifact.spec.encoding.quantizer == RTN else 176
    group_size = min(
        of_gemm.weight_scale_group_size or layer.hidden_size for of_gemm in schema.each
    )
    # Gate and up together: sources, codes decoded (padded, then joined) and expected, packed codes on both sides.
    weight_bytes = 2 * (source_bytes + 3 + 3 * packed_bytes + group_bytes / group_size) + 1
    return int(numbers * weight_bytes) + (16 << 20) + folding_bytes(artifact, layer)


# --- findings -----------------------------------------------------------------------------------------------


def _conclude(check: LayerCheck, outcomes: Sequence[ExpertResult], result: CheckResult) -> None:
    """Combine the outcomes of a layer's experts into the result. InputError if the source is bad."""
    original = check.original
    findings = [*check.whole.findings]
    for outcome in outcomes:
        findings += outcome.findings
    for finding in findings:
        result.add(finding.where, finding.what, finding.expected, finding.found)
    _name_exchanged(check.layer, outcomes, result)
    _name_nearer(check.layer, outcomes, result)
    figures = {}
    for role in check.layer.roles:
        measured = [outcome.figures[role] for outcome in outcomes if role in outcome.figures]
        if measured:
            figures[role] = measured
    name = check.layer.name
    result.measured[name] = {role: summarize(measured) for role, measured in figures.items()}
    if original is None:
        return
    recorded = check.artifact.manifest.projection_errors()[name]
    check_recorded(check.layer, recorded, figures, not check.layer.format.is_float, result)


def _misread_notes(result: CheckResult) -> list[str]:
    """Notes about codes that the kernels are known to misread; the bytes are Humming's own."""
    count = 0
    for projections in result.measured.values():
        count += sum(figures.get("num_misread_codes", 0) for figures in projections.values())
    if not count:
        return []
    return [
        f"{count} codes are minus zero, which Humming's kernels for mxfp4 under int8 activations misread "
        "(docs/kernels.md)"
    ]


def _name_exchanged(layer: MoeLayer, outcomes: Sequence[ExpertResult], result: CheckResult) -> None:
    """Name experts that have another one's weights, and experts whose gate and up are exchanged."""
    owners: dict[bytes, tuple[str, int]] = {}
    for expert, outcome in enumerate(outcomes):
        for role, fingerprint in outcome.expected.items():
            owners[fingerprint] = (role, expert)
    for expert, outcome in enumerate(outcomes):
        for role, fingerprint in outcome.found.items():
            owner = owners.get(fingerprint, (role, expert))
            if owner == (role, expert):
                continue
            what = "An expert has another one's weights: experts are swapped."
            if owner[1] == expert:
                what = "Gate and up are exchanged."
            texts = [f"{of_role} of expert {number}" for of_role, number in ((role, expert), owner)]
            result.add(f"layer {layer.name}, {texts[0]}", what, *texts)


def _name_nearer(layer: MoeLayer, outcomes: Sequence[ExpertResult], result: CheckResult) -> None:
    """Add findings for calibrated matrices that are much nearer to another matrix of the source than to their own."""
    for roles in () if layer.is_linear else layer.coupled_roles:
        places = []
        theirs = []
        ours = []
        for expert, outcome in enumerate(outcomes):
            for role in roles:
                if role in outcome.sketches:
                    places.append(f"{role} of expert {expert}")
                    theirs.append(outcome.sketches[role].source)
                    ours.append(outcome.sketches[role].decoded)
        if len(places) < 2:
            continue
        unit_ours = torch.nn.functional.normalize(torch.stack(ours).double())
        unit_theirs = torch.nn.functional.normalize(torch.stack(theirs).double())
        cosines = unit_ours @ unit_theirs.T
        squares = 1 / cosines.square().clamp_max(1) - 1  # of tangents
        squares[cosines <= 0] = torch.inf
        least, nearest = squares.min(1)
        is_another = least < squares.diagonal() / 2
        for index in is_another.nonzero().flatten().tolist():
            result.add(
                f"layer {layer.name}, {places[index]}",
                "An expert has another one's weights, or another projection's.",
                places[index],
                places[int(nearest[index])],
            )
