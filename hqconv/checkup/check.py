"""Walks a checkpoint's experts once, beside its original's if there is one, and compares them by layer.

Every expert is decoded in full, one at a time in each thread; of the matrices only facts and sketches stay.
"""

from __future__ import annotations

import errno
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hqconv.checkup.findings import (
    CheckFinding,
    MatrixPlace,
    grouped,
    header_findings,
    value_findings,
)
from hqconv.checkup.matrices import (
    ORDERED,
    Arrangement,
    Comparison,
    Facts,
    Float32Vector,
    Matrix,
    arrangement,
    arrangement_faults,
    compare,
    decoded,
    facts_of,
    own_faults,
    tangent_of,
)
from hqconv.conversion.hub_prefetch import CachePolicy, fetched_layers
from hqconv.conversion.stages import Meter, Progress
from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.io.pipeline import pipeline
from hqconv.models.config_facts import is_draft
from hqconv.models.expert_map import ExpertMap
from hqconv.models.families import BY_NAME
from hqconv.models.moe_layer import MoeLayer, RawExperts, RawLayout
from hqconv.models.source_protocol import Source
from hqconv.schemas.artifact_names import text_config
from hqconv.schemas.options import refuse_unknown_layers

_CPU = torch.device("cpu")
_SYSTEM_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)
_BYTES_PER_WEIGHT = 24  # of a decoded expert at work: values, cells, products
# rms beside the layer's median
_SIZE_NOTICE, _SIZE_DAMAGE = 16.0, 1024.0
# distance beside the median of the layer's others, and how many there must be
_OUTLIER, _NUM_OTHERS = 2.0, 4
_ROUNDED = 0.9  # share of nearest codes in layers that were rounded
_TWICE_AS_NEAR = 0.5  # squared tangent of another expert's matrix, of its own one's
_FAR = 2.5  # distance of the median matrix; calibrations measured have 1.7 at most
_OWNER, _RELATED = 0.6, 0.2  # cosine of sketches of the same matrix; of another version of it


@dataclass(frozen=True)
class CheckOptions:
    """Options of a check. layers: indices, None for all. sample: experts of each layer, None for all."""

    layers: frozenset[int] | None
    sample: int | None
    num_threads: int
    max_memory_bytes: int
    cache: CachePolicy = field(default_factory=CachePolicy)
    progress: Callable[[Progress], None] | None = None


@dataclass(eq=False)
class CheckedMatrix:
    """Figures that stay of one matrix. name: of its tensor. facts: None for NaN, and where all weights are one number.

    original: the sketch of the original's.
    """

    place: MatrixPlace
    shape: tuple[int, int]
    name: str = ""
    facts: Facts | None = None
    comparison: Comparison | None = None
    original: Float32Vector | None = None


@dataclass(eq=False)
class CheckedExpert:
    """Figures that stay of one expert: its projections by role, and findings about them."""

    matrices: dict[str, CheckedMatrix]
    findings: list[CheckFinding] = field(default_factory=list)
    arrangement: Arrangement | None = None


@dataclass(eq=False)
class CheckedLayer:
    """A layer and its experts that were read."""

    layer: MoeLayer
    experts: dict[int, CheckedExpert]

    def matrices(self, role: str) -> list[CheckedMatrix]:
        """Return one projection of every expert."""
        return [expert.matrices[role] for expert in self.experts.values()]

    def comparisons(self, role: str) -> dict[int, Comparison]:
        """Return the comparisons with the original's by expert."""
        return {
            matrix.place.expert: matrix.comparison
            for matrix in self.matrices(role)
            if matrix.comparison is not None
        }


def run_check(source: Source, original: Source | None, options: CheckOptions) -> dict[str, Any]:
    """Check a checkpoint and return the document (docs/check.md).

    Raises RequestError for layers that do not exist, an original of another model, and a memory limit that is smaller
    than an expert's needs; InputError where the system refuses to read a file; what reading the original raises.
    """
    started = time.monotonic()
    document: dict[str, Any] = {
        "kind": "checkup",
        "checkpoint": source.repo_id or source.name,
        "revision": source.revision,
        "against": None if original is None else original.repo_id or original.name,
    }
    try:
        experts = source.map_experts()
    except InputError as error:
        return document | _conclusion([_broken(error)], [], started)
    layers = list(experts.layers)
    if options.layers is not None:
        refuse_unknown_layers(options.layers, {layer.index for layer in layers})
        layers = [layer for layer in layers if layer.index in options.layers]
    findings = [*header_findings(source, experts), *value_findings(source, experts, layers)]
    pairs: dict[str, MoeLayer] = {}
    if original is not None:
        with of_original():
            original_experts = original.map_experts()
        pairs = _paired(source, experts, original_experts, layers, findings)
    checked = list(_walk(source, original, layers, pairs, options))
    for layer in checked:
        findings += _layer_findings(layer)
    matrices = [
        matrix
        for layer in checked
        for expert in layer.experts.values()
        for matrix in expert.matrices.values()
    ]
    findings += [*_twins(matrices), *_misplaced(matrices), *_version(matrices)]
    document |= {
        "family": experts.family,
        "source_format": sorted({layer.format.describe() for layer in layers}),
        "num_layers": len(layers),
        "num_all_layers": len(experts.layers),
        "sample": options.sample,
    }
    return document | _conclusion(findings, checked, started)


def broken_checkpoint(name: str, error: InputError) -> dict[str, Any]:
    """Return the document of a checkpoint that cannot be opened. Raises the error if it is the system's."""
    document = {"kind": "checkup", "checkpoint": name, "revision": None, "against": None}
    return document | _conclusion([_broken(error)], [], time.monotonic())


@contextmanager
def of_original() -> Iterator[None]:
    """Name --against in errors about the original."""
    try:
        yield
    except (InputError, RequestError) as error:
        error.where = f"--against, {error.where}" if error.where else "--against"
        error.args = (error.message(),)
        raise


def _broken(error: HqconvError) -> CheckFinding:
    """Return the finding for a checkpoint that contradicts itself, or a tensor that its format cannot hold.

    Raises the error if the system refused to read, e.g. for missing permissions: of the checkpoint it tells nothing.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _SYSTEM_ERRORS:
            raise error
        cause = cause.__cause__
    return CheckFinding("broken", error.what, error.expected, error.found, where=error.where)


def _conclusion(
    findings: Sequence[CheckFinding], checked: Sequence[CheckedLayer], started: float
) -> dict[str, Any]:
    damage = grouped(finding for finding in findings if finding.is_damage)
    return {
        "passed": not damage,
        "damage": damage,
        "notices": grouped(finding for finding in findings if not finding.is_damage),
        "num_experts": sum(len(layer.experts) for layer in checked),
        "errors": {layer.layer.name: errors for layer in checked if (errors := _errors(layer))},
        "seconds": round(time.monotonic() - started, 3),
    }


def _errors(checked: CheckedLayer) -> dict[str, dict[str, Any]]:
    """Return a layer's errors against the original by projection, and its worst expert's."""
    errors = {}
    for role in checked.layer.roles:
        comparisons = checked.comparisons(role)
        if not comparisons:
            continue
        worst = max(comparisons, key=lambda expert: comparisons[expert].error)
        figures = comparisons.values()
        nearest = [figure.nearest for figure in figures if not math.isnan(figure.nearest)]
        errors[role] = {
            "relative_error": float(np.median([figure.error for figure in figures])),
            "rounding_error": float(np.median([figure.rounding for figure in figures])),
            "nearest_codes": float(np.median(nearest)) if nearest else None,
            "worst_expert": worst,
            "worst_relative_error": comparisons[worst].error,
        }
    return errors


def _paired(
    source: Source,
    experts: ExpertMap,
    originals: ExpertMap,
    layers: Sequence[MoeLayer],
    findings: list[CheckFinding],
) -> dict[str, MoeLayer]:
    """Return the original's layer of each layer, by name, and note layers that one of both lacks.

    Raises RequestError for layers of other sizes.
    """
    family, text = BY_NAME.get(experts.family), text_config(source.config)
    by_index = {layer.index: layer for layer in originals.layers}
    for index in sorted(by_index.keys() - {layer.index for layer in experts.layers}):
        is_extra = family is not None and is_draft(family, index, text)
        what = "The original has an MoE layer that the checkpoint lacks."
        where = by_index[index].name
        findings.append(CheckFinding("missing", what, is_damage=not is_extra, where=where))
    pairs = {}
    for layer in layers:
        original = by_index.get(layer.index)
        if original is None:
            what = "The original has no such layer: it is checked alone."
            findings.append(CheckFinding("extra", what, is_damage=False, where=layer.name))
            continue
        if _sizes(layer) != _sizes(original):
            raise RequestError(
                "The original is another model: its experts have other sizes.",
                where=f"--against, {layer.name}",
                expected=_sizes(layer),
                found=_sizes(original),
            )
        pairs[layer.name] = original
    return pairs


def _sizes(layer: MoeLayer) -> str:
    sizes = f"[{layer.intermediate_size}, {layer.hidden_size}]"
    return f"{layer.num_experts} experts of {sizes}, {', '.join(layer.roles)}"


# --- the walk ------------------------------------------------------------------------------------------------


def _walk(
    source: Source,
    original: Source | None,
    layers: Sequence[MoeLayer],
    pairs: Mapping[str, MoeLayer],
    options: CheckOptions,
) -> Iterator[CheckedLayer]:
    """Read and compare the experts layer by layer, in threads."""
    num_weights = max((b.hidden_size * b.intermediate_size for b in layers), default=1)
    need = _BYTES_PER_WEIGHT * 6 * num_weights
    if need > options.max_memory_bytes:
        raise RequestError(
            f"One expert does not fit into the {options.max_memory_bytes} bytes limit.",
            where="--max-memory",
            expected=f"{need} bytes",
            remedy="Raise --max-memory.",
        )
    num_threads = max(1, min(options.num_threads, options.max_memory_bytes // need))
    meter = Meter(sum(layer.num_bytes for layer in layers), len(layers), options.progress)
    # Of a sample only byte ranges are read from the Hub; else whole shards, ahead of the work.
    whole = (source, original) if options.sample is None else (None, None)
    paired = [pairs[layer.name] for layer in layers if layer.name in pairs]
    with (
        fetched_layers(whole[0], layers, options.cache) as fetched,
        fetched_layers(whole[1], paired, options.cache) as fetched_originals,
    ):
        for layer in layers:
            paired_layer = pairs.get(layer.name)
            original_name = "" if paired_layer is None else paired_layer.name
            fetched.wait_for(layer.name)
            fetched_originals.wait_for(original_name)
            examine = partial(_examine, source, layer, original, paired_layer)
            chosen = _sample(layer.num_experts, options.sample)
            experts = {}
            with closing(
                pipeline(
                    chosen, examine, num_threads, num_threads, runs_torch=True, name="hqconv-check"
                )
            ) as results:
                for number, expert in zip(chosen, results, strict=True):
                    experts[number] = expert
                    meter.advance(layer.name, layer.num_bytes // len(chosen))
            meter.finish(layer.name)
            fetched.release(layer.name)
            fetched_originals.release(original_name)
            yield CheckedLayer(layer, experts)


def _sample(num_experts: int, sample: int | None) -> list[int]:
    num = min(sample or num_experts, num_experts)
    return [round(number) for number in np.linspace(0, num_experts - 1, num)]


def _decoder(source: Source, layer: MoeLayer, expert: int) -> Callable[[str], Matrix]:
    """Read an expert; return the function that decodes a projection. Both raise InputError."""
    raw = None
    if source.reads_ahead:
        layout = RawLayout(layer, [expert])
        raw = RawExperts(layout, torch.empty(layout.num_bytes, dtype=torch.uint8))
        source.read_all_into(raw.views(layout.ranges))
    # stored bits of a weight; a tensor of several projections counts in shares, and some may be padded
    tensors = layer.sources[expert].values()
    shares = Counter((ref.file, ref.offset_bytes) for refs in tensors for ref in refs.values())
    least_bytes = min(
        sum(ref.num_bytes / shares[ref.file, ref.offset_bytes] for ref in refs.values())
        for refs in tensors
    )
    num_bits = 8 * least_bytes / (layer.hidden_size * layer.intermediate_size)

    def decode(role: str) -> Matrix:
        matrix = source.read_expert(layer, expert, (role,), _CPU, raw)[role]
        return decoded(matrix, num_bits)

    return decode


def _examine(
    source: Source,
    layer: MoeLayer,
    original: Source | None,
    original_layer: MoeLayer | None,
    number: int,
) -> CheckedExpert:
    """Decode an expert, and compare it with the original's."""
    expert = CheckedExpert({})
    for role in layer.roles:
        place = MatrixPlace(layer.name, number, role)
        expert.matrices[role] = CheckedMatrix(place, layer.shape(role))
    ours = _own_matrices(source, layer, number, expert)
    expert.arrangement = arrangement(ours)
    if original is None or original_layer is None:
        return expert
    theirs: dict[str, Matrix] = {}
    with of_original():
        decode = _decoder(original, original_layer, number)
        originals = {role: decode(role) for role in layer.roles}
    for role, matrix in originals.items():
        checked, facts = expert.matrices[role], facts_of(matrix)
        if math.isfinite(facts.rms):
            theirs[role], checked.original = matrix, facts.sketch
        else:
            what = "The original's weights are NaN, infinite or too large: the matrix is checked alone."
            finding = CheckFinding("nan", what, is_damage=False)
            expert.findings.append(finding.at(checked.place, matrix.name))
    for role, matrix in ours.items():
        if role in theirs:
            checked = expert.matrices[role]
            checked.comparison = compare(role, matrix, theirs)
            faults = checked.comparison.faults
            expert.findings += [fault.at(checked.place, checked.name) for fault in faults]
    _settle(expert)
    return expert


def _own_matrices(
    source: Source, layer: MoeLayer, number: int, expert: CheckedExpert
) -> dict[str, Matrix]:
    """Decode an expert's matrices, and note what each tells alone; those that hold NaN are left out."""
    matrices = {}
    role = layer.roles[0]
    try:
        decode = _decoder(source, layer, number)
        for role in layer.roles:
            matrix, checked = decode(role), expert.matrices[role]
            faults = list(own_faults(matrix))
            expert.findings += [fault.at(checked.place) for fault in faults]
            checked.name, kinds = matrix.name, {fault.kind for fault in faults}
            if "nan" not in kinds:
                matrices[role] = matrix
            if kinds.isdisjoint(("nan", "zero", "constant")):
                checked.facts = facts_of(matrix)
    except InputError as error:
        expert.findings.append(_broken(error).at(expert.matrices[role].place))
    return matrices


def _settle(expert: CheckedExpert) -> None:
    """Tell neurons in another order and scaled columns, which change no output if projections agree, from faults."""
    matrices = expert.matrices
    orders, gains = [], {}
    for role, matrix in matrices.items():
        comparison = matrix.comparison
        if comparison is not None and comparison.order is not None:
            orders.append(comparison.order)
        if comparison is not None and comparison.gains is not None:
            gains[role] = comparison.gains
    if len(orders) == len(matrices) and all(torch.equal(orders[0], order) for order in orders):
        expert.findings = [finding for finding in expert.findings if ORDERED not in finding.what]
        what = "The neurons are in another order, the same in all projections: no output changes."
        place = replace(next(iter(matrices.values())).place, role="")
        expert.findings.append(CheckFinding("neuron-order", what, is_damage=False, place=place))
    is_inverse = False  # the rows of up, of the columns of down
    if "w2" in gains and "w3" in gains:
        logs = torch.stack([gains["w2"].columns.log(), -gains["w3"].rows.log()])
        is_inverse = float(torch.corrcoef(logs)[0, 1]) > 0.8
    if is_inverse:
        expert.findings = [
            finding
            for finding in expert.findings
            if (finding.kind, finding.place.role) != ("scales", "w3")
        ]
    for role, factors in gains.items():
        if float(factors.columns.log().std()) > 0.02:
            least, most = float(factors.columns.min()), float(factors.columns.max())
            finding = CheckFinding(
                "column-scales",
                "The columns are scaled, as AWQ and SmoothQuant do: what comes before must be scaled by the inverse.",
                "factors near 1",
                f"factors from {least:.3g} to {most:.3g}",
                is_damage=False,
            )
            expert.findings.append(finding.at(matrices[role].place, matrices[role].name))


# --- layers --------------------------------------------------------------------------------------------------


def _layer_findings(checked: CheckedLayer) -> Iterator[CheckFinding]:
    """Yield the findings of a layer's experts, and those that experts show beside one another."""
    for expert in checked.experts.values():
        yield from expert.findings
    arrangements = {number: expert.arrangement for number, expert in checked.experts.items()}
    yield from arrangement_faults(checked.layer.name, arrangements)
    for role in checked.layer.roles:
        yield from _odd_sizes(checked.matrices(role))
        yield from _outliers(checked, role)


def _odd_sizes(matrices: Sequence[CheckedMatrix]) -> Iterator[CheckFinding]:
    """Yield matrices of another magnitude than the same projection of other experts."""
    sizes = {matrix.place: matrix.facts.rms for matrix in matrices if matrix.facts}
    sizes = {place: size for place, size in sizes.items() if size}
    typical = float(np.median(list(sizes.values()) or [0.0]))
    for place, size in sizes.items():
        if max(size / typical, typical / size) >= _SIZE_NOTICE:
            what = "The weights are of another magnitude than the other experts'."
            found = f"root mean square {size:.4g}, the median expert's is {typical:.4g}"
            is_damage = size / typical >= _SIZE_DAMAGE
            yield CheckFinding("magnitude", what, "", found, is_damage, place=place)


def _outliers(checked: CheckedLayer, role: str) -> Iterator[CheckFinding]:
    """Yield experts that are further from the original than the layer's others."""
    sound = {
        expert: comparison
        for expert, comparison in checked.comparisons(role).items()
        if not (comparison.faults or comparison.is_wrong or comparison.gains)
    }
    if len(sound) <= _NUM_OTHERS:
        return
    typical = float(np.median([comparison.distance for comparison in sound.values()]))
    is_rounded = float(np.median([figure.nearest for figure in sound.values()])) >= _ROUNDED
    for expert, comparison in sound.items():
        place, distance = MatrixPlace(checked.layer.name, expert, role), comparison.distance
        if distance > max(_OUTLIER * typical, 1.5) and comparison.error > 0.01:
            what = "The weights are further from the original's than the layer's others: another version of them?"
            expected = f"about {typical:.2f} times the rounding of the format"
            found = f"{distance:.2f} times it"
            yield CheckFinding("stale", what, expected, found, is_rounded, place=place)


# --- matrices at another place ---------------------------------------------------------------------------------


def _twins(matrices: Sequence[CheckedMatrix]) -> Iterator[CheckFinding]:
    """Yield matrices that the checkpoint has twice, and the original not."""
    sketches: dict[MatrixPlace, bytes] = {}
    groups: dict[bytes, list[CheckedMatrix]] = {}
    for matrix in matrices:
        if matrix.facts is not None:
            sketch = sketches[matrix.place] = matrix.facts.sketch.tobytes()
            groups.setdefault(sketch, []).append(matrix)
    roles = {matrix.place.role for matrix in matrices}

    def sketches_of(place: MatrixPlace) -> list[bytes | None]:
        return [sketches.get(replace(place, role=role)) for role in sorted(roles)]

    for first, *copies in groups.values():
        for copy in copies:
            if first.original is not None and np.array_equal(first.original, copy.original):  # type: ignore[arg-type]
                continue
            is_same_expert = replace(first.place, role=copy.place.role) == copy.place
            expert_sketches = sketches_of(copy.place)
            is_whole = not is_same_expert and expert_sketches == sketches_of(first.place)
            what = "Two projections have the same weights, and the rest of their experts has not."
            if is_whole:
                what = "An expert is in the checkpoint twice: it was copied, or merged."
            found = first.place.seen_from(copy.place)
            yield CheckFinding("twin", what, "", found, is_damage=not is_whole, place=copy.place)


def _misplaced(matrices: Sequence[CheckedMatrix]) -> Iterator[CheckFinding]:
    """Yield matrices that are another one of the original, and those that are none."""
    places: dict[tuple[int, int], list[MatrixPlace]] = {}
    originals: dict[tuple[int, int], list[Float32Vector]] = {}
    for matrix in matrices:
        if matrix.original is not None:
            places.setdefault(matrix.shape, []).append(matrix.place)
            originals.setdefault(matrix.shape, []).append(matrix.original)
    pools = {shape: np.stack(sketches) for shape, sketches in originals.items()}
    for matrix in matrices:
        comparison, facts = matrix.comparison, matrix.facts
        if comparison is None or facts is None or comparison.distance < _OUTLIER:
            continue
        if any(fault.kind != "bias" for fault in comparison.faults):
            continue
        cosines = pools[matrix.shape] @ facts.sketch
        owner = _owner(matrix.place, comparison, places[matrix.shape], cosines)
        if owner is not None:
            yield _misplacement(matrix.place, owner)
        elif comparison.is_wrong:
            yield _unrelated(matrix.place, comparison)


def _misplacement(place: MatrixPlace, owner: MatrixPlace) -> CheckFinding:
    kind, what = "swapped", "The matrix is that of another expert."
    if replace(owner, role=place.role) == place:
        kind, what = "gate-up-swapped", "The matrix is that of another projection."
    return CheckFinding(kind, what, place.seen_from(place), owner.seen_from(place), place=place)


def _owner(
    place: MatrixPlace, comparison: Comparison, places: Sequence[MatrixPlace], cosines: Any
) -> MatrixPlace | None:
    """Return the original's matrix that this one clearly is instead of its own; None if there is none.

    cosines: of its sketch with those of the original's matrices at `places`. The owner of one near its own is in its
    layer.
    """
    least = _OWNER
    own = tangent_of(float(cosines[places.index(place)]))
    if not comparison.is_wrong:
        cosines[[candidate.layer != place.layer for candidate in places]] = 0
        least = max(least, 1 / math.hypot(1, 2 * comparison.rounding))
    best = int(cosines.argmax())
    is_nearer = tangent_of(float(cosines[best])) ** 2 < _TWICE_AS_NEAR * own**2
    return places[best] if cosines[best] >= least and is_nearer else None


def _unrelated(place: MatrixPlace, comparison: Comparison) -> CheckFinding:
    cosine = 1 / math.hypot(1, comparison.tangent)
    kind = "unrelated"
    what = "The weights are not the original's, nor those of another expert that was read."
    if cosine > _RELATED:
        kind = "stale"
        what = (
            "The weights are near the original's, and not their rounding: another version of them?"
        )
    expected = f"a relative error near {comparison.rounding:.3g}"
    found = f"{comparison.error:.3g}, a cosine of {cosine:.3f}"
    return CheckFinding(kind, what, expected, found, place=place)


def _version(matrices: Sequence[CheckedMatrix]) -> Iterator[CheckFinding]:
    """Yield a notice if most matrices are further from the original than formats and calibrations make them."""
    comparisons = [matrix.comparison for matrix in matrices if matrix.comparison is not None]
    distances = [comparison.distance for comparison in comparisons if not comparison.is_wrong]
    if distances and (typical := float(np.median(distances))) > _FAR:
        what = "Most weights are further from the original's than rounding and calibrations make them: another version?"
        expected, found = f"less than {_FAR} times the rounding error", f"{typical:.1f} times it"
        yield CheckFinding("stale", what, expected, found, is_damage=False)
