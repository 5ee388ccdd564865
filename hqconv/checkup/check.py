"""Walks a checkpoint's experts once, beside its original's if there is one, and compares them by layer.

Every expert is decoded in full, one at a time in each thread; of the matrices only facts and sketches stay.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hqconv.checkup.findings import (
    Beside,
    compare_dense,
    config_findings,
    grouped,
    header_findings,
    own_findings,
)
from hqconv.checkup.matrices import (
    Arrangement,
    Change,
    CheckFinding,
    Comparison,
    Facts,
    Float32Vector,
    Matrix,
    MatrixPlace,
    arrangement,
    arrangement_faults,
    compare,
    cosine,
    decoded,
    facts_of,
    is_one,
    own_faults,
    spread,
    tangent_of,
)
from hqconv.conversion.encode_batch import relative_error
from hqconv.conversion.hub_prefetch import CachePolicy, fetched_layers
from hqconv.conversion.stages import Meter, Progress
from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.io.pipeline import pipeline
from hqconv.models.config_facts import is_draft
from hqconv.models.expert_map import ExpertMap
from hqconv.models.families import BY_NAME
from hqconv.models.moe_layer import MoeLayer, RawExperts, RawLayout
from hqconv.models.source_protocol import DenseTensors, Source
from hqconv.models.tensor_names import decoder_layer
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
_SIZE_NOTICE = 16.0
_SIZE_DAMAGE = 1024.0
# distance beside the median of the layer's others, and how many there must be
_OUTLIER = 2.0
_FAR_FROM_ALL = 3.0
_NUM_OTHERS = 4
_ROUNDED = 0.9  # share of nearest codes in layers that were rounded
_TWICE_AS_NEAR = 0.5  # squared tangent of another expert's matrix, of its own one's
_FAR = 2.5  # distance of the median matrix; calibrations measured have 1.7 at most
_OWNER = 0.6  # cosine of sketches of the same matrix
_RELATED = 0.2  # of another version of it


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
    max_weights = options.max_memory_bytes // _BYTES_PER_WEIGHT if options.sample is None else 0
    dense = DenseTensors(source, experts, layers if options.layers else None, max_weights)
    findings = [*header_findings(source, experts), *own_findings(dense)]
    pairs: dict[str, MoeLayer] = {}
    beside = Beside()
    if original is not None:
        with of_original():
            originals = original.map_experts().without(experts.left, original.tensors)
        pairs = _paired(source, experts, originals, layers, findings)
        with of_original():
            beside = compare_dense(dense, DenseTensors(original, originals, None, max_weights))
        findings += config_findings(source, original)
    checked = list(_walk(source, original, layers, pairs, options, beside))
    for layer in checked:
        findings += _layer_findings(layer)
    findings += beside.findings()
    matrices = [
        matrix
        for layer in checked
        for expert in layer.experts.values()
        for matrix in expert.matrices.values()
    ]
    for look in (_outliers, _twins, _misplaced, _version):
        findings += look(matrices)
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
    """Return a layer's errors against the original by projection, as `verify` does, and its worst expert's."""
    errors = {}
    for role in checked.layer.roles:
        comparisons = {m.place.expert: m.comparison for m in checked.matrices(role) if m.comparison}
        if not comparisons:
            continue
        worst = max(comparisons, key=lambda expert: comparisons[expert].error)
        figures = comparisons.values()
        nearest = [figure.nearest for figure in figures if not math.isnan(figure.nearest)]
        errors[role] = {
            "relative_error": relative_error(
                sum(figure.error**2 * figure.power for figure in figures),
                sum(figure.power for figure in figures),
            ),
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
    family = BY_NAME[experts.family]
    text = text_config(source.config)
    by_index = {layer.index: layer for layer in originals.layers}
    for index in sorted(by_index.keys() - {layer.index for layer in experts.layers}):
        is_extra = is_draft(family, index, text)
        findings.append(
            CheckFinding(
                "missing",
                "The original has an MoE layer that the checkpoint lacks.",
                is_damage=not is_extra,
                where=by_index[index].name,
            )
        )
    pairs = {}
    for layer in layers:
        original = by_index.get(layer.index)
        if original is None:
            findings.append(
                CheckFinding(
                    "extra",
                    "The original has no such layer: it is checked alone.",
                    is_damage=False,
                    where=layer.name,
                )
            )
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
    beside: Beside,
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
            examine = partial(_examine, source, layer, original, paired_layer, beside)
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

    def decode(role: str) -> Matrix:
        matrix = source.read_expert(layer, expert, (role,), _CPU, raw)[role]
        return decoded(matrix, layer.bits_of_weight(expert))

    return decode


def _examine(
    source: Source,
    layer: MoeLayer,
    original: Source | None,
    original_layer: MoeLayer | None,
    beside: Beside,
    number: int,
) -> CheckedExpert:
    """Decode an expert, and compare it with the original's: of the same number, or where its router's row was."""
    expert = CheckedExpert({})
    for role in layer.roles:
        place = MatrixPlace(layer.name, number, role)
        expert.matrices[role] = CheckedMatrix(place, layer.shape(role))
    ours = _own_matrices(source, layer, number, expert)
    expert.arrangement = arrangement(ours)
    if original is None or original_layer is None:
        return expert
    theirs: dict[str, Matrix] = {}
    originals = dict[str, Matrix]()
    chosen = number
    around = decoder_layer(layer.name)
    _, order = beside.routers.get(around, ("", torch.empty(0)))
    moved = int(order[number]) if len(order) == layer.num_experts else number
    for candidate in dict.fromkeys((number, moved)):
        with of_original():
            decode = _decoder(original, original_layer, candidate)
            matrices = {role: decode(role) for role in layer.roles}
        if not originals or _likeness(ours, matrices) > _likeness(ours, originals):
            originals = matrices
            chosen = candidate
    if chosen != moved:
        beside.unmoved.add(around)
    for role, matrix in originals.items():
        checked = expert.matrices[role]
        facts = facts_of(matrix)
        if math.isfinite(facts.rms):
            theirs[role] = matrix
            checked.original = facts.sketch
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
    _settle(expert, beside, around)
    return expert


def _likeness(ours: Mapping[str, Matrix], originals: Mapping[str, Matrix]) -> float:
    return sum(cosine(ours[role].values, originals[role].values) for role in ours)


def _own_matrices(
    source: Source, layer: MoeLayer, number: int, expert: CheckedExpert
) -> dict[str, Matrix]:
    """Decode an expert's matrices, and note what each tells alone; those that hold NaN are left out."""
    matrices = {}
    role = layer.roles[0]
    try:
        decode = _decoder(source, layer, number)
        for role in layer.roles:
            matrix = decode(role)
            checked = expert.matrices[role]
            faults = list(own_faults(matrix))
            expert.findings += [fault.at(checked.place) for fault in faults]
            checked.name = matrix.name
            kinds = {fault.kind for fault in faults}
            if "nan" not in kinds:
                matrices[role] = matrix
            if kinds.isdisjoint(("nan", "zero", "constant")):
                checked.facts = facts_of(matrix)
    except InputError as error:
        expert.findings.append(_broken(error).at(expert.matrices[role].place))
    coded = [matrices[role].coded for role in ("w1", "w3") if role in matrices]
    seconds = [given.scale_2 for given in coded if given and given.scale_2 is not None]
    if len(seconds) == 2 and seconds[0].numel() == 1 and not torch.equal(*seconds):
        place = MatrixPlace(layer.name, number)
        expert.findings.append(
            CheckFinding(
                "loader",
                "Gate and up have second scales of their own, and servers take one for both.",
                is_damage=False,
                place=place,
            )
        )
    return matrices


def _settle(expert: CheckedExpert, beside: Beside, place: str) -> None:
    """Tell changes that make up for each other, so that no output changes, from faults.

    Neurons may be in any order that is the same in all projections, up's rows have any factors whose inverses down's
    columns have, and gate's and up's columns those whose inverses the norm before them has.
    """
    sides = {role: _neuron_side(matrix, role) for role, matrix in expert.matrices.items()}
    first = next(iter(sides.values()))
    up = sides["w3"]
    down = sides["w2"]
    limit = 0.02 + sum(side.limit for side in sides.values())
    inputs = first.columns * first.rows.median()
    shared = up.columns / inputs
    neurons = up.rows * shared.median() * down.rows * down.columns.median()
    are_neurons_sound = is_one(neurons, down.rows, limit)
    is_side_sound = {
        "w1": is_one(first.rows / first.rows.median(), torch.ones(1)),
        "w3": are_neurons_sound and is_one(shared / shared.median(), up.columns, limit),
        "w2": are_neurons_sound and is_one(down.columns / down.columns.median(), down.columns),
    }
    is_inverse = is_one(inputs, torch.ones(1), limit) or beside.balances(place, inputs)
    if place not in beside.norms and spread(inputs):  # nobody knows what comes before
        is_inverse = is_inverse or 0.25 < float(inputs.median()) < 4
    orders = [side.row_order.numbers for side in sides.values() if side.row_order is not None]
    is_ordered = not orders or (
        len(orders) == len(sides)  # but for a few that rounding confuses
        and all(float((order == orders[0]).float().mean()) > 0.9 for order in orders)
    )
    for role, side in sides.items():
        matrix = expert.matrices[role]
        fault = None if matrix.comparison is None else matrix.comparison.change_fault
        is_sound = is_ordered and side.column_order is None and (is_inverse or role == "w2")
        if fault is not None and not (is_sound and is_side_sound[role]):
            expert.findings.append(fault.at(matrix.place, matrix.name))
    if any(finding.is_damage for finding in expert.findings):
        return
    around = replace(next(iter(expert.matrices.values())).place, role="")
    if first.row_order is not None:
        expert.findings.append(
            CheckFinding(
                "neuron-order",
                "The neurons are in another order, the same in all projections: no output changes.",
                is_damage=False,
                place=around,
            )
        )
    if spread(inputs) or spread(up.rows) or spread(down.rows):
        expert.findings.append(
            CheckFinding(
                "column-scales",
                "Columns are scaled, as AWQ and SmoothQuant do: what comes before is scaled by the inverse, or must "
                "be.",
                is_damage=False,
                place=around,
            )
        )


def _neuron_side(matrix: CheckedMatrix, role: str) -> Change:
    """Return how a projection was changed, its neurons as the rows."""
    change = None if matrix.comparison is None else matrix.comparison.change
    if change is None:
        change = Change(torch.ones(matrix.shape[0]), torch.ones(matrix.shape[1]))
    return change.turned() if role == "w2" else change


# --- layers --------------------------------------------------------------------------------------------------


def _layer_findings(checked: CheckedLayer) -> Iterator[CheckFinding]:
    """Yield the findings of a layer's experts, and those that experts show beside one another."""
    for expert in checked.experts.values():
        yield from expert.findings
    arrangements = {number: expert.arrangement for number, expert in checked.experts.items()}
    yield from arrangement_faults(checked.layer.name, arrangements)
    for role in checked.layer.roles:
        yield from _odd_sizes(checked.matrices(role))


def _odd_sizes(matrices: Sequence[CheckedMatrix]) -> Iterator[CheckFinding]:
    """Yield matrices of another magnitude than the same projection of other experts."""
    sizes = {matrix.place: matrix.facts.rms for matrix in matrices if matrix.facts}
    sizes = {place: size for place, size in sizes.items() if size}
    typical = float(np.median(list(sizes.values()) or [0.0]))
    for place, size in sizes.items():
        if max(size / typical, typical / size) >= _SIZE_NOTICE:
            found = f"root mean square {size:.4g}, the median expert's is {typical:.4g}"
            is_damage = size / typical >= _SIZE_DAMAGE
            yield CheckFinding(
                "magnitude",
                "The weights are of another magnitude than the other experts'.",
                "",
                found,
                is_damage,
                place=place,
            )


def _outliers(matrices: Sequence[CheckedMatrix]) -> Iterator[CheckFinding]:
    """Yield matrices that are further from the original than others: of their layer, and of all layers."""
    sound = [(m.place, m.comparison) for m in matrices if m.comparison and m.comparison.is_sound]
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for place, comparison in sound:
        for key in ((place.layer, place.role), ("", place.role), ("", "")):
            groups.setdefault(key, []).append(comparison)
    typical = {
        key: float(np.quantile([figure.distance for figure in group], 0.25))
        for key, group in groups.items()
        if len(group) > _NUM_OTHERS
    }
    for place, comparison in sound:
        least = typical.get(("", place.role), typical.get(("", ""), math.inf))
        usual = typical.get((place.layer, place.role), math.inf)
        far = _FAR_FROM_ALL * max(least, 0.25 if math.isnan(comparison.nearest) else 1)
        if comparison.distance > min(far, max(_OUTLIER * usual, 1.5)):
            expected = f"about {min(usual, least):.2f} times the rounding of the format"
            found = f"{comparison.distance:.2f} times it"
            others = [figure.nearest for figure in groups[place.layer, place.role]]
            is_damage = comparison.distance > far or float(np.median(others)) >= _ROUNDED
            yield CheckFinding(
                "stale",
                "The weights are further from the original's than the others: another version of them?",
                expected,
                found,
                is_damage,
                place=place,
            )


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
            layers = {(matrix.place.layer, matrix.place.role) for matrix in (first, *copies)}
            is_shared = len(copies) > 1 and len(layers) == 1
            what = "Two projections have the same weights, and the rest of their experts has not."
            if is_whole:
                what = "An expert is in the checkpoint twice: it was copied, or merged."
            found = first.place.seen_from(copy.place)
            is_damage = not (is_whole or is_shared)
            yield CheckFinding("twin", what, "", found, is_damage, place=copy.place)


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
        comparison = matrix.comparison
        facts = matrix.facts
        if comparison is None or facts is None or comparison.distance < _OUTLIER:
            continue
        if comparison.change or any(fault.kind != "bias" for fault in comparison.faults):
            continue
        cosines = pools[matrix.shape] @ facts.sketch
        owner = _owner(matrix.place, comparison, places[matrix.shape], cosines)
        if owner is not None:
            yield _misplacement(matrix.place, owner)
        elif comparison.is_wrong:
            yield _unrelated(matrix.place, comparison)


def _misplacement(place: MatrixPlace, owner: MatrixPlace) -> CheckFinding:
    kind = "swapped"
    what = "The matrix is that of another expert."
    if replace(owner, role=place.role) == place:
        kind = "gate-up-swapped"
        what = "The matrix is that of another projection."
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
        expected = f"less than {_FAR} times the rounding error"
        found = f"{typical:.1f} times it"
        yield CheckFinding(
            "stale",
            "Most weights are further from the original's than rounding and calibrations make them: another version?",
            expected,
            found,
            is_damage=False,
        )
