"""The `weights` check: rank files decoded, ranks joined, and compared with the source.

The source is quantized once more; codes, scales and zero points must be equal. The error of the
artifact's weights is measured on the decoded weights; the decoder shares no code with the conversion.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch

from hqconv.artifact.expert_reader import ExpertReader
from hqconv.artifact.load import stack_floats
from hqconv.artifact.reader import Artifact
from hqconv.conversion.encode_batch import relative_error
from hqconv.conversion.hub_prefetch import CachePolicy, fetched_layers
from hqconv.conversion.stages import Meter
from hqconv.errors import HqconvError, RequestError, plural
from hqconv.io.pipeline import pipeline
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.layer_encoding import EncodingOptions, encoding_of
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.grid import stored_size
from hqconv.schemas.options import GPTQ, RTN
from hqconv.schemas.weight_schema import LayerSchema
from hqconv.verification.accounting import consistent_layers
from hqconv.verification.against_source import Lineage, other_source
from hqconv.verification.content_sums import against, check_content
from hqconv.verification.experts import (
    Batches,
    LayerCheck,
    Original,
    Outcome,
    plan_staging,
    why_not,
)
from hqconv.verification.figures import check_recorded, check_search, summarize
from hqconv.verification.fused_exponents import folding_bytes
from hqconv.verification.rank_headers import check_source_scales
from hqconv.verification.result import ERRORS_OF_WEIGHTS, NO_EXPERT, CheckResult, Finding

_CLOSE = 0.9  # cosine of weights that were quantized once, to 2 bits or more
_LEAST_COSINE = 0.5  # of weights that were quantized twice; 1 bit alone has 0.8
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
    other_codes = (
        "" if source is None else Lineage.of(artifact, source).why_not_comparable(artifact)
    )
    layers = list(consistent_layers(artifact, result, indices).values())
    sources = _source_layers(artifact, source, result)
    for name in (
        sorted((sources or {}).keys() - artifact.layers.keys() - set(artifact.left))
        if indices is None
        else ()
    ):
        result.add(
            f"layer {name}",
            "An MoE layer of the source is missing in the artifact.",
            "present",
            "absent",
        )
    needs = (
        _working_bytes(b, artifact.schema_of(b.name), artifact.spec.encoding.quantizer)
        + folding_bytes(artifact, b)
        for b in layers
    )
    need = max(needs, default=1)
    _check_memory(need, max_memory_bytes)
    shards = artifact.shards()
    if device is not None and (obstacle := _obstacle(artifact, sources, device)):
        result.notes.append(f"{device} cannot be used: {obstacle}")
        device = None
    staging = None if device is None else plan_staging(device, num_threads, max_memory_bytes - need)
    left_bytes = max_memory_bytes - (0 if staging is None else staging.host_bytes)
    num_workers = max(1, min(num_threads, left_bytes // need))
    of_source = (
        [sources[layer.name] for layer in layers if layer.name in sources] if sources else []
    )
    num_experts = num_wrong = num_again = num_calibrated = 0
    batches = None if staging is None else Batches(staging)
    with (
        batches or nullcontext(),
        fetched_layers(source, of_source, cache or CachePolicy()) as fetched,
    ):

        def checks() -> Iterator[LayerCheck]:
            for layer in layers:
                if sources is not None and source is not None and layer.name in sources:
                    fetched.wait_for(layer.name)
                if sources is not None and source is not None and not other_codes:
                    check_source_scales(artifact, [layer], source, sources, result)
                yield _layer_check(artifact, layer, source, sources, shards)

        # Of a source on the Hub each layer is concluded before the next is awaited: its shards make room.
        is_streamed = source is not None and source.listing is not None
        for group in ([one] for one in checks()) if is_streamed else [checks()]:
            for check, outcomes in _run(group, batches, num_workers, meter):
                num_again += sum(one is None for one in outcomes)
                checked = _named(check, outcomes, num_workers)
                _conclude(check, checked, result)
                fetched.release(check.layer.name)
                num_experts += len(checked)
                num_calibrated += check.original is not None and check.original.is_calibrated
                num_wrong += sum(bool(outcome.findings) for outcome in checked)
    if source is not None:
        _name_other_source(artifact, source, num_experts, num_wrong, result)
        _name_arrangement(artifact, source, of_source, result)
    result.notes += [_note(batches, num_again, num_experts), *_misread_notes(result)]
    looked_at = f"{len(layers)} of {plural(len(artifact.layers), 'layer')}"
    result.notes.insert(
        0, f"{looked_at} {against(artifact, layers, None if other_codes else source)}"
    )
    bounded = f"{plural(num_calibrated, 'layer')} within bounds of the source's weights: a calibration is not repeated"
    result.notes += [f"{bounded}. {ERRORS_OF_WEIGHTS}"] * (num_calibrated > 0)
    result.notes += [f"not compared with the source, whose codes are others: {other_codes}"] * bool(
        other_codes
    )
    return result


def layer_bytes(artifact: Artifact, layer: str) -> int:
    """Approximate bytes of a layer's codes: number of weights times the schema's bits."""
    entry = artifact.layers[layer]
    weights = entry.num_experts * entry.hidden_size * entry.intermediate_size * (2 + entry.gated)
    return int(weights) * max(schema.num_bits for schema in artifact.schema_of(layer).each) // 8


def _run(
    checks: Iterable[LayerCheck], batches: Batches | None, num_workers: int, meter: Meter | None
) -> Iterator[tuple[LayerCheck, list[Outcome | None]]]:
    """Check layers in threads, one expert after the other or in batches; yield each layer with its outcomes.

    None stands for an expert of a batch that must be checked alone.
    """
    num_threads = num_workers if batches is None else batches.staging.num_readers

    def run(task: tuple[LayerCheck, range]) -> tuple[LayerCheck, list[Outcome | None]]:
        check, experts = task
        if batches is not None:
            return check, check.run_batch(experts, batches)
        return check, [check.run(expert) for expert in experts]

    tasks = ((check, experts) for check in checks for experts in check.ranges(batches))
    with closing(pipeline(tasks, run, 2 * num_threads, num_threads, **_THREADS)) as done:
        for check, of_layer in itertools.groupby(done, key=lambda one: one[0]):
            name, outcomes = check.layer.name, list[Outcome | None]()
            for _, found in of_layer:
                outcomes += found
                if meter is not None:
                    meter.advance(
                        name,
                        layer_bytes(check.artifact, name) * len(found) // check.layer.num_experts,
                    )
            if meter is not None:
                meter.finish(name)
            yield check, outcomes


def _named(
    check: LayerCheck, outcomes: Sequence[Outcome | None], num_workers: int
) -> list[Outcome]:
    """Check the experts of a layer that have no outcome yet, alone."""
    experts = [expert for expert, outcome in enumerate(outcomes) if outcome is None]
    if not experts:
        return [outcome for outcome in outcomes if outcome is not None]
    with closing(pipeline(experts, check.run, 2 * num_workers, num_workers, **_THREADS)) as again:
        return [next(again) if outcome is None else outcome for outcome in outcomes]


def _note(batches: Batches | None, num_again: int, num_experts: int) -> str:
    """Describe the device of the checks, and the experts that were checked again."""
    if batches is None:
        return "on the CPU"
    repeated = f"; {num_again} of {num_experts} experts again on the CPU" if num_again else ""
    repeated += f", some after {batches.errors[0]}" if batches.errors else ""
    return f"on {batches.staging.device}{repeated}"


def _name_arrangement(
    artifact: Artifact, source: Source, layers: Sequence[MoeLayer], result: CheckResult
) -> None:
    """Name gate and up that are the source's rows in another arrangement, where down is the source's.

    layers: of the source.
    """
    for layer in layers if artifact.manifest.is_kernel else ():
        measured = result.measured.get(layer.name, {})
        close = {role: (one.get("cosine") or 0.0) >= _CLOSE for role, one in measured.items()}
        if close != {"w1": False, "w3": False, "w2": True}:
            continue
        reader = ExpertReader(artifact, artifact.moe_layer(layer.name), Outcome().note)
        if not (stacks := reader.read("w13", 0, Outcome().note)):
            continue
        ours, theirs = (
            stack_floats(stacks, reader),
            source.read_expert(layer, 0, ("w1", "w3"), torch.device("cpu")),
        )
        ours = {role: one[0] for role, one in ours.items()}
        rows = torch.cat([ours["w1"], ours["w3"]])
        for what, arranged in (
            ("Gate and up are exchanged.", (ours["w3"], ours["w1"])),
            (
                "Gate and up have rows of both in turns: a writer cut alternating rows in halves.",
                (rows[0::2], rows[1::2]),
            ),
        ):
            pairs = zip(arranged, (theirs["w1"].values(), theirs["w3"].values()), strict=True)
            if all(
                torch.cosine_similarity(a.flatten(), b.float().flatten(), 0) >= _CLOSE
                for a, b in pairs
            ):
                result.put_first(
                    Finding(
                        f"layer {layer.name}",
                        what,
                        "the source's gate and up",
                        "another arrangement",
                    )
                )
                return


def _name_other_source(
    artifact: Artifact, source: Source, num_experts: int, num_wrong: int, result: CheckResult
) -> None:
    """Add as first finding that the source is not the artifact's, where its files or all of its experts differ."""
    another = other_source(Lineage.of(artifact, source).made.source, source)
    if another is None and num_wrong == num_experts > 1:
        another = Finding(
            "--source", NO_EXPERT, "the source's weights, quantized", f"{num_wrong} experts differ"
        )
    if another is not None:
        result.put_first(another)


def _check_memory(need: int, max_memory_bytes: int) -> None:
    if need > max_memory_bytes:
        raise RequestError(
            "One expert does not fit into the memory limit.",
            where="--max-memory",
            expected=f"at least {need / 2**20:.0f} MiB for this artifact",
            found=f"{max_memory_bytes / 2**20:.0f} MiB",
        )


# --- selection of the work ----------------------------------------------------------------------------------


def _obstacle(
    artifact: Artifact, sources: Mapping[str, MoeLayer] | None, device: torch.device
) -> str:
    """Return why the source cannot be quantized on the device; "" if it can, or if there is no source."""
    of_source = next(iter((sources or {}).values()), None)
    if of_source is None:
        return ""
    dtype = torch_dtype(of_source.dtype) if of_source.format.is_float else torch.float32
    reasons = (
        why_not(k.schema, artifact.param_dtype, dtype, device) for k in artifact.spec.kernel_specs
    )
    return next(filter(None, reasons), "")


def _source_layers(
    artifact: Artifact, source: Source | None, result: CheckResult
) -> dict[str, MoeLayer] | None:
    if source is None:
        return None
    if Lineage.of(artifact, source).is_own:
        check_search(artifact, result)
    try:
        return {layer.name: layer for layer in source.map_experts().layers}
    except HqconvError as error:
        result.add(
            f"source: {error.where}",
            f"The source cannot be mapped: {error.what}",
            error.expected,
            error.found,
        )
        return None


def _layer_check(
    artifact: Artifact,
    layer: MoeLayer,
    source: Source | None,
    sources: Mapping[str, MoeLayer] | None,
    shards: Mapping[str, str],
) -> LayerCheck:
    """Make the check of a layer: against the source's layer, if it exists and the artifact records its conversion."""
    findings: list[Finding] = []
    original = None
    if source is not None and sources is not None:
        original = _original(artifact, layer, source, sources.get(layer.name), findings)
    check = LayerCheck(artifact, layer, original, shards)
    check.findings[:0] = findings
    return check


def _original(
    artifact: Artifact,
    layer: MoeLayer,
    source: Source,
    found: MoeLayer | None,
    findings: list[Finding],
) -> Original | None:
    sizes = ("num_experts", "hidden_size", "intermediate_size", "gated")
    if found is None or any(getattr(found, size) != getattr(layer, size) for size in sizes):
        described = [
            ", ".join(f"{s} {getattr(b, s)}" for s in sizes) if b else "no such layer"
            for b in (found, layer)
        ]
        findings.append(Finding(f"layer {layer.name}", "The source has no such layer.", *described))
        return None
    spec, lineage = artifact.spec, Lineage.of(artifact, source)
    if lineage.why_not_comparable(artifact):
        plain = encoding_of(
            found, artifact.schema_of(layer.name), spec.param_dtype, EncodingOptions()
        )
        return Original(source, found, plain, is_comparable=False)
    try:
        options = EncodingOptions.from_dict(lineage.made.to_dict())
    except HqconvError as error:
        findings.append(Finding(error.where, error.what, str(error.expected), str(error.found)))
        return None
    encoding = encoding_of(found, artifact.schema_of(layer.name), spec.param_dtype, options)
    entry = lineage.made.blocks.get(layer.name)
    conversion = None if entry is None else entry.conversion
    if conversion != encoding.conversion:
        what = "The layer was not converted as its source's format asks for."
        where = f"{names.MANIFEST}: {layer.name}: conversion"
        findings.append(Finding(where, what, str(encoding.conversion), str(conversion)))
        return None
    order = names.G_IDX if encoding.sorts_columns or layer.name in source.sorted_layers else None
    if artifact.layers[layer.name].intermediate_order != order:
        what = "The recorded order of intermediate columns is not that of the conversion."
        where = f"{names.MANIFEST}: {layer.name}: intermediate_order"
        findings.append(
            Finding(where, what, str(order), str(artifact.layers[layer.name].intermediate_order))
        )
    # A calibration cannot be repeated here: its weights must be the source's within bounds.
    may_differ = options.quantizer == GPTQ and not encoding.keeps_codes
    return Original(source, found, encoding, is_comparable=not may_differ, is_calibrated=may_differ)


def _working_bytes(layer: MoeLayer, schema: LayerSchema, quantizer: str) -> int:
    """Upper bound of the memory that one worker needs for one expert."""
    numbers = stored_size(layer.intermediate_size, schema) * layer.hidden_size
    # Read, and widened to float32; a fused tensor's part is read as a whole, codes are unpacked on the way.
    source = 2 if layer.dtype == "BF16" else 8 if layer.dtype == "F32" else 6
    weights = [parts["weight"] for parts in layer.parts.values()]
    source += (
        6 if not layer.format.is_float or any(w.is_stacked or not w.is_run for w in weights) else 0
    )
    source += (
        8 if any(one.rotation for one in schema.each) else 0
    )  # twice: to be quantized, and to be measured
    packed = max(one.num_bits for one in schema.each) / 8
    group_bytes = 56 if quantizer == RTN else 176
    scales = group_bytes / min(
        one.weight_scale_group_size or layer.hidden_size for one in schema.each
    )
    # Gate and up together: sources, codes decoded (padded, then joined) and expected, packed codes on both sides.
    return int(numbers * 2 * (source + 3 + 3 * packed + scales) + numbers) + (16 << 20)


# --- findings -----------------------------------------------------------------------------------------------


def _conclude(check: LayerCheck, outcomes: Sequence[Outcome], result: CheckResult) -> None:
    """Combine the outcomes of a layer's experts into the result. InputError if the source is bad."""
    for finding in (*check.findings, *(f for outcome in outcomes for f in outcome.findings)):
        result.add(finding.where, finding.what, finding.expected, finding.found)
    is_good = not check.findings and not any(outcome.findings for outcome in outcomes)
    if not check.is_compared or is_good:  # the comparison with the source names faults better
        check_content(check.artifact, check.layer.name, [one.content for one in outcomes], result)
    _name_swapped(check.layer, outcomes, result)
    _name_nearer(check.layer, outcomes, result)
    figures = {
        role: [outcome.figures[role] for outcome in outcomes if role in outcome.figures]
        for role in check.layer.roles
    }
    result.measured[check.layer.name] = {
        role: summarize(of_role) for role, of_role in figures.items() if of_role
    }
    if check.original is not None:
        result.of_experts[check.layer.name] = {
            role: [relative_error(one.error, one.power) for one in of_role]
            for role, of_role in figures.items()
            if len(of_role) == check.layer.num_experts  # otherwise experts cannot be identified
        }
    if check.original is not None and not check.is_compared:
        for role, one in result.measured[check.layer.name].items():
            if not (one["cosine"] or 0.0) >= _LEAST_COSINE:
                where, what = (
                    f"layer {check.layer.name}, {role}",
                    "The weights are not the source's in any format.",
                )
                result.add(where, what, f"cosine >= {_LEAST_COSINE}", one["cosine"])
    if check.original is not None and Lineage.of(check.artifact, check.original.source).is_own:
        recorded = check.artifact.layers[check.layer.name].quantization_error
        check_recorded(check.layer, recorded, figures, not check.layer.format.is_float, result)


def _misread_notes(result: CheckResult) -> list[str]:
    """Notes about codes that the kernels are known to misread; the bytes are Humming's own."""
    figures = [one for of_layer in result.measured.values() for one in of_layer.values()]
    count = sum(one.get("num_misread_codes", 0) for one in figures)
    what = "codes are minus zero, which Humming's kernels for mxfp4 under int8 activations misread (docs/kernels.md)"
    return [f"{count} {what}"] if count else []


def _name_swapped(layer: MoeLayer, outcomes: Sequence[Outcome], result: CheckResult) -> None:
    """Add findings that name the expert whose weights another expert has."""
    owners = {
        (role, print_): e for e, o in enumerate(outcomes) for role, print_ in o.expected.items()
    }
    for expert, outcome in enumerate(outcomes):
        for role, print_ in outcome.found.items():
            owner = owners.get((role, print_), expert)
            if owner != expert:
                where = f"layer {layer.name}, {role} of expert {expert}"
                what = "An expert has another one's weights: experts are swapped."
                result.add(where, what, f"expert {expert}'s", f"expert {owner}'s")


def _name_nearer(layer: MoeLayer, outcomes: Sequence[Outcome], result: CheckResult) -> None:
    """Add findings for calibrated matrices that are much nearer to another matrix of the source than to their own."""
    for roles in (("w1", "w3"), ("w2",)):
        places = [
            (role, e) for e, one in enumerate(outcomes) for role in roles if role in one.sketches
        ]
        if len(places) < 2:
            continue
        theirs, ours = (
            torch.stack([outcomes[e].sketches[role][n] for role, e in places]).double()
            for n in (0, 1)
        )
        cosines = torch.nn.functional.normalize(ours) @ torch.nn.functional.normalize(theirs).T
        squares = torch.where(
            cosines > 0, 1 / cosines.square().clamp_max(1) - 1, torch.inf
        )  # of tangents
        least, nearest = squares.min(1)
        for (role, expert), own, other, place in zip(
            places, squares.diagonal().tolist(), least.tolist(), nearest.tolist(), strict=True
        ):
            if other < own / 2:
                what = "An expert has another one's weights, or another projection's."
                texts = (f"{r} of expert {e}" for r, e in ((role, expert), places[place]))
                result.add(f"layer {layer.name}, {role} of expert {expert}", what, *texts)
