"""Walks a checkpoint's experts once, beside its original's if there is one, and judges them by layer.

Every expert is decoded in full, one at a time in each thread; of the others only facts and sketches are kept.
"""

from __future__ import annotations

import errno
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hqconv.checkup.diagnosis import ORDERED, Comparison, compare, tangent_of
from hqconv.checkup.findings import Finding, grouped
from hqconv.checkup.headers import header_findings, unmapped_stacks, value_findings
from hqconv.checkup.matrices import (
    Facts,
    Matrix,
    arrangement,
    arrangement_faults,
    decoded,
    facts_of,
    own_faults,
)
from hqconv.conversion.hub_prefetch import CachePolicy, HubPrefetch, fetched_layers
from hqconv.conversion.stages import Meter, Progress
from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.formats.source_format import LAID_OUT
from hqconv.io.pipeline import pipeline
from hqconv.models.config_facts import is_draft
from hqconv.models.expert_bytes import RawExperts, RawLayout
from hqconv.models.expert_map import ExpertMap
from hqconv.models.families import BY_NAME
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas.model_config import text_config
from hqconv.schemas.options import GPTQ, refuse_unknown_layers

_CPU = torch.device("cpu")
_OF_SYSTEM = (
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)
_BYTES_PER_WEIGHT = 24  # of a decoded expert at work: values, cells, products
_NEIGHBOURS = (16.0, 1024.0)  # rms beside the layer's median: a notice, damage if larger
_OUTLIER, _NUM_OTHERS = (
    2.0,
    4,
)  # distance beside the median of the layer's others, and how many there must be
_ROUNDED, _ALL_NEAREST = (
    0.9,
    0.998,
)  # share of nearest codes in layers that were rounded; without any calibration
_TWICE_AS_NEAR = 0.5  # squared tangent of another expert's matrix, of its own one's
_FAR = 2.5  # distance of the median matrix; calibrations measured have 1.7 at most
_OWNER, _RELATED = 0.6, 0.2  # cosine of sketches of the same matrix; of another version of it
Place = tuple[str, int, str]  # layer, expert, role


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
class Outcome:
    """Findings and figures of one expert. theirs: sketches of the original's matrices."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Facts] = field(default_factory=dict)
    arrangement: tuple[str, float, float] | None = None
    compared: dict[str, Comparison] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Checked:
    """A layer and the outcomes of its experts."""

    layer: MoeLayer
    outcomes: dict[int, Outcome]


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
    except (InputError, RequestError) as error:
        finding = unmapped_stacks(source)
        if finding is None and isinstance(error, RequestError):
            raise
        return document | _conclusion([finding or _broken(error)], [], started)
    layers = _chosen(experts, options.layers)
    findings = [*header_findings(source, experts), *value_findings(source, experts, layers)]
    pairs: dict[str, MoeLayer] = {}
    if original is not None:
        with of_original():
            others = original.map_experts()
        pairs = _paired(layers, others, findings, source, experts)
    checked = list(_walk(source, original, layers, pairs, options))
    for one in checked:
        findings += _of_layer(one, source)
    findings += _twins(checked)
    if original is not None:
        findings += [*_owners(checked), *_version(checked)]
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
        where = f"--against, {error.where}" if error.where else "--against"
        raise type(error)(
            error.what, where=where, expected=error.expected, found=error.found, remedy=error.remedy
        ) from error


def _broken(error: HqconvError) -> Finding:
    """Return the finding for a checkpoint that contradicts itself, or a tensor that its format cannot hold.

    Raises the error if the system refused to read, e.g. for missing permissions: of the checkpoint it tells nothing.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _OF_SYSTEM:
            raise error
        cause = cause.__cause__
    return Finding("broken", error.what, error.expected, error.found, where=error.where)


def _conclusion(
    findings: Sequence[Finding], checked: Sequence[Checked], started: float
) -> dict[str, Any]:
    damage = grouped(one for one in findings if one.is_damage)
    return {
        "passed": not damage,
        "damage": damage,
        "notices": grouped(one for one in findings if not one.is_damage),
        "num_experts": sum(len(one.outcomes) for one in checked),
        "errors": {one.layer.name: errors for one in checked if (errors := _errors(one))},
        "seconds": round(time.monotonic() - started, 3),
    }


def _errors(checked: Checked) -> dict[str, dict[str, Any]]:
    """Return a layer's errors against the original by projection, and its worst expert's."""
    found = {}
    for role in checked.layer.roles:
        of_role = {
            e: one.compared[role] for e, one in checked.outcomes.items() if role in one.compared
        }
        if not of_role:
            continue
        worst = max(of_role, key=lambda e: of_role[e].error)
        nearest = [one.nearest for one in of_role.values() if not math.isnan(one.nearest)]
        found[role] = {
            "relative_error": float(np.median([one.error for one in of_role.values()])),
            "rounding_error": float(np.median([one.rounding for one in of_role.values()])),
            "nearest_codes": float(np.median(nearest)) if nearest else None,
            "worst_expert": worst,
            "worst_relative_error": of_role[worst].error,
        }
    return found


def _chosen(experts: ExpertMap, indices: frozenset[int] | None) -> list[MoeLayer]:
    if indices is None:
        return list(experts.layers)
    refuse_unknown_layers(indices, {layer.index for layer in experts.layers})
    return [layer for layer in experts.layers if layer.index in indices]


def _paired(
    layers: Sequence[MoeLayer],
    others: ExpertMap,
    findings: list[Finding],
    source: Source,
    experts: ExpertMap,
) -> dict[str, MoeLayer]:
    """Return the original's layer of each layer, by name. Raises RequestError for those of other sizes."""
    theirs = {layer.index: layer for layer in others.layers}
    family, text = BY_NAME.get(experts.family), text_config(source.config)
    for index in sorted(theirs.keys() - {layer.index for layer in experts.layers}):
        is_extra = family is not None and is_draft(family, index, text)
        what = "The original has an MoE layer that the checkpoint lacks."
        findings.append(Finding("missing", what, is_damage=not is_extra, where=theirs[index].name))
    pairs = {}
    for layer in layers:
        other = theirs.get(layer.index)
        if other is None:
            what = "The original has no such layer: it is checked alone."
            findings.append(Finding("extra", what, is_damage=False, where=layer.name))
            continue
        sizes = [
            (x.num_experts, x.intermediate_size, x.hidden_size, x.roles) for x in (layer, other)
        ]
        if sizes[0] != sizes[1]:
            texts = [f"{n} experts of [{i}, {h}]" for n, i, h, _ in sizes]
            what = "The original is another model: its experts have other sizes."
            raise RequestError(
                what, where=f"--against, {layer.name}", expected=texts[0], found=texts[1]
            )
        pairs[layer.name] = other
    return pairs


# --- the walk ------------------------------------------------------------------------------------------------


def _walk(
    source: Source,
    original: Source | None,
    layers: Sequence[MoeLayer],
    pairs: Mapping[str, MoeLayer],
    options: CheckOptions,
) -> Iterator[Checked]:
    """Read and judge the experts layer by layer, in threads."""
    need = max(
        (_BYTES_PER_WEIGHT * 6 * b.hidden_size * b.intermediate_size for b in layers), default=1
    )
    if need > options.max_memory_bytes:
        what, expected = (
            f"One expert does not fit into the {options.max_memory_bytes} bytes limit.",
            f"{need} bytes",
        )
        raise RequestError(
            what, where="--max-memory", expected=expected, remedy="Raise --max-memory."
        )
    num_threads = max(1, min(options.num_threads, options.max_memory_bytes // need))
    meter = Meter(sum(layer.num_bytes for layer in layers), len(layers), options.progress)
    # Of a sample only byte ranges are read from the Hub; else whole shards, ahead of the work.
    is_whole = options.sample is None
    theirs = [pairs[layer.name] for layer in layers if layer.name in pairs]

    def fetching(one: Source | None, of: Sequence[MoeLayer]) -> AbstractContextManager[HubPrefetch]:
        return fetched_layers(one if is_whole else None, of, options.cache)

    with fetching(source, layers) as ours_fetched, fetching(original, theirs) as theirs_fetched:
        for layer in layers:
            other = pairs.get(layer.name)
            waits = (
                (ours_fetched, layer.name),
                (theirs_fetched, "" if other is None else other.name),
            )
            for fetched, name in waits:
                fetched.wait_for(name)
            work = partial(_examine, source, layer, original, other)
            chosen = _sample(layer.num_experts, options.sample)
            outcomes = {}
            with closing(
                pipeline(
                    chosen, work, num_threads, num_threads, runs_torch=True, name="hqconv-check"
                )
            ) as results:
                for expert, outcome in zip(chosen, results, strict=True):
                    outcomes[expert] = outcome
                    meter.advance(layer.name, layer.num_bytes // len(chosen))
            meter.finish(layer.name)
            for fetched, name in waits:
                fetched.release(name)
            yield Checked(layer, outcomes)


def _sample(num_experts: int, sample: int | None) -> list[int]:
    if sample is None or sample >= num_experts:
        return list(range(num_experts))
    return sorted({round(x) for x in np.linspace(0, num_experts - 1, sample)})


def _read(
    source: Source, layer: MoeLayer, expert: int
) -> Iterator[tuple[str, Matrix | InputError]]:
    """Yield the projections of an expert, decoded, or why one cannot be."""
    raw = None
    if source.reads_ahead:
        layout = RawLayout(layer, [expert])
        raw = RawExperts(layout, torch.empty(layout.num_bytes, dtype=torch.uint8))
        try:
            source.read_all_into(raw.views(layout.ranges))
        except InputError as error:  # of a file that was cut
            yield layer.roles[0], error
            return
    parts = layer.sources[expert]
    shared = Counter(
        (ref.file, ref.offset_bytes) for of_role in parts.values() for ref in of_role.values()
    )
    bits = {
        role: sum(
            8 * ref.num_bytes / shared[ref.file, ref.offset_bytes] for ref in parts[role].values()
        )
        / (layer.hidden_size * layer.intermediate_size)
        for role in layer.roles
    }
    if layer.format.encoding == LAID_OUT:  # which may be padded
        bits = dict.fromkeys(bits, min(bits.values()))
    for role in layer.roles:
        try:
            yield (
                role,
                decoded(source.read_expert(layer, expert, (role,), _CPU, raw)[role], bits[role]),
            )
        except InputError as error:
            yield role, error


def _examine(
    source: Source, layer: MoeLayer, original: Source | None, other: MoeLayer | None, expert: int
) -> Outcome:
    """Decode an expert, and compare it with the original's."""
    outcome, ours = Outcome(), dict[str, Matrix]()
    for role, matrix in _read(source, layer, expert):
        if isinstance(matrix, InputError):
            found = [_broken(matrix)]
        else:
            found = list(own_faults(matrix))
            if not any(one.kind == "nan" for one in found):
                ours[role], outcome.facts[role] = matrix, facts_of(matrix)
        outcome.findings += [_at(one, (layer.name, expert, role)) for one in found]
    outcome.arrangement = arrangement(ours)
    if original is None or other is None:
        return outcome
    theirs = {}
    for role, matrix in _read(original, other, expert):
        if isinstance(matrix, InputError):
            with of_original():
                raise matrix
        facts = facts_of(matrix)
        if math.isfinite(facts.rms):
            theirs[role], outcome.theirs[role] = matrix, facts.sketch
        else:
            what = "The original's weights are NaN, infinite or too large: the matrix is checked alone."
            outcome.findings.append(
                _at(Finding("nan", what, is_damage=False), (layer.name, expert, role), matrix.name)
            )
    for role, matrix in ours.items():
        if role not in theirs:
            continue
        compared = outcome.compared[role] = compare(role, matrix, theirs)
        outcome.findings += [
            _at(one, (layer.name, expert, role), matrix.name) for one in compared.faults
        ]
    _settle(outcome, layer, expert, {role: matrix.name for role, matrix in ours.items()})
    return outcome


def _at(finding: Finding, place: Place, where: str = "") -> Finding:
    layer, expert, role = place
    return replace(finding, where=finding.where or where, layer=layer, role=role, expert=expert)


def _settle(outcome: Outcome, layer: MoeLayer, expert: int, names: Mapping[str, str]) -> None:
    """Tell neurons in another order and scaled columns, which change no output if projections agree, from faults."""

    def say(finding: Finding, role: str = "") -> None:
        outcome.findings.append(_at(finding, (layer.name, expert, role), names.get(role, "")))

    compared = outcome.compared
    orders = [one.order for one in compared.values() if one.order is not None]
    if len(orders) == len(layer.roles) and all(torch.equal(orders[0], one) for one in orders):
        outcome.findings = [one for one in outcome.findings if ORDERED not in one.what]
        what = "The neurons are in another order, the same in all projections: no output changes."
        say(Finding("neuron-order", what, is_damage=False))
    gains = {
        role: [x.log() for x in one.gains]
        for role, one in compared.items()
        if one.gains is not None
    }
    columns = {role: of[1] for role, of in gains.items() if float(of[1].std()) > 0.02}
    inputs = [columns[role] for role in ("w1", "w3") if role in columns]
    is_common = len(inputs) == len(layer.roles) - 1 and _correlation(inputs[0], inputs[-1]) > 0.9
    is_inverse = (
        "w2" in columns and "w3" in gains and _correlation(columns["w2"], -gains["w3"][0]) > 0.8
    )
    if is_inverse:
        outcome.findings = [
            one for one in outcome.findings if (one.kind, one.role) != ("scales", "w3")
        ]
    for role, of_columns in columns.items():
        is_smoothed = is_inverse if role == "w2" else is_common
        what = "The columns are scaled" + (
            ", as AWQ and SmoothQuant do: what comes before must be scaled by the inverse."
            if is_smoothed
            else ": no other projection of the expert makes up for it."
        )
        found = f"factors from {math.exp(float(of_columns.min())):.3g} to {math.exp(float(of_columns.max())):.3g}"
        say(Finding("column-scales", what, "factors near 1", found, is_damage=False), role)


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


# --- layers --------------------------------------------------------------------------------------------------


def _of_layer(checked: Checked, source: Source) -> Iterator[Finding]:
    """Yield the findings of a layer's experts, and those that experts show beside one another."""
    layer, outcomes = checked.layer, checked.outcomes
    for outcome in outcomes.values():
        yield from outcome.findings
    yield from arrangement_faults(layer.name, {e: one.arrangement for e, one in outcomes.items()})
    for role in layer.roles:
        sizes = {e: one.facts[role].rms for e, one in outcomes.items() if role in one.facts}
        typical = float(np.median([size for size in sizes.values() if size] or [0.0]))
        for expert, size in sizes.items():
            if size and typical and max(size / typical, typical / size) >= _NEIGHBOURS[0]:
                what = "The weights are of another magnitude than the other experts'."
                found = f"root mean square {size:.4g}, the median expert's is {typical:.4g}"
                finding = Finding("magnitude", what, "", found, size / typical >= _NEIGHBOURS[1])
                yield _at(finding, (layer.name, expert, role))
        yield from _outliers(
            checked, role, is_gptq=(source.quantization or {}).get("quant_method") == GPTQ
        )


def _outliers(checked: Checked, role: str, *, is_gptq: bool) -> Iterator[Finding]:
    """Yield experts that are further from the original than the layer's others, and those that were not calibrated."""
    compared = {
        e: one.compared[role] for e, one in checked.outcomes.items() if role in one.compared
    }
    sound = {e: one for e, one in compared.items() if not (one.faults or one.is_wrong or one.gains)}
    typical = float(np.median([one.distance for one in sound.values()] or [0.0]))
    is_rounded = (
        bool(sound) and float(np.median([one.nearest for one in sound.values()])) >= _ROUNDED
    )
    for expert, one in sound.items():
        place = (checked.layer.name, expert, role)
        if (
            len(sound) > _NUM_OTHERS
            and one.distance > max(_OUTLIER * typical, 1.5)
            and one.error > 0.01
        ):
            what = "The weights are further from the original's than the layer's others: another version of them?"
            texts = (
                f"about {typical:.2f} times the rounding of the format",
                f"{one.distance:.2f} times it",
            )
            yield _at(Finding("stale", what, *texts, is_rounded), place)
        if is_gptq and one.nearest >= _ALL_NEAREST:
            what = "The config says GPTQ, and the codes are those of rounding to nearest: no text calibrated them."
            found = f"{one.nearest:.2%} of the codes are the nearest"
            yield _at(Finding("uncalibrated", what, "", found, is_damage=False), place)


# --- matrices at another place ---------------------------------------------------------------------------------


def _twins(checked: Sequence[Checked]) -> Iterator[Finding]:
    """Yield matrices that the checkpoint has twice, and the original not."""
    places: dict[bytes, list[Place]] = {}
    sketches: dict[Place, bytes] = {}
    theirs: dict[Place, bytes] = {}
    for one, expert, outcome in _each(checked):
        same = {
            finding.role for finding in outcome.findings if finding.kind in ("zero", "constant")
        }
        for role, facts in outcome.facts.items():
            if role in same:
                continue
            place = (one.layer.name, expert, role)
            sketches[place] = facts.sketch.tobytes()
            places.setdefault(sketches[place], []).append(place)
            if role in outcome.theirs:
                theirs[place] = outcome.theirs[role].tobytes()
    roles = {one.layer.name: one.layer.roles for one in checked}
    for first, *others in places.values():
        for other in others:
            if first in theirs and theirs[first] == theirs.get(other):
                continue
            is_whole = first[:2] != other[:2] and all(
                sketches.get((*first[:2], role), b"1") == sketches.get((*other[:2], role), b"2")
                for role in roles[other[0]]
            )
            found = f"{first[2]} of expert {first[1]}" + f" of {first[0]}" * (first[0] != other[0])
            what = "Two projections have the same weights, and the rest of their experts has not."
            if is_whole:
                what = "An expert is in the checkpoint twice: it was copied, or merged."
            yield _at(Finding("twin", what, "", found, is_damage=not is_whole), other)


def _owners(checked: Sequence[Checked]) -> Iterator[Finding]:
    """Yield matrices that are another one of the original, and those that are none."""
    places: dict[tuple[int, int], list[Place]] = {}
    pools: dict[tuple[int, int], list[Any]] = {}
    for one, expert, outcome in _each(checked):
        for role, sketch in outcome.theirs.items():
            places.setdefault(one.layer.shape(role), []).append((one.layer.name, expert, role))
            pools.setdefault(one.layer.shape(role), []).append(sketch)
    pool = {shape: np.stack(rows) for shape, rows in pools.items()}
    owner_of: dict[Place, Place] = {}
    others: list[tuple[Place, Comparison]] = []
    for one, expert, outcome in _each(checked):
        for role, compared in outcome.compared.items():
            place, shape = (one.layer.name, expert, role), one.layer.shape(role)
            if compared.distance < _OUTLIER or any(one.kind != "bias" for one in compared.faults):
                continue
            owner = _owner(place, compared, outcome.facts[role].sketch, pool[shape], places[shape])
            if owner is not None:
                owner_of[place] = owner
            elif compared.is_wrong:
                others.append((place, compared))
    yield from (
        _misplaced(place, owner, owner_of.get(owner) == place) for place, owner in owner_of.items()
    )
    yield from (_unrelated(place, compared) for place, compared in others)


def _version(checked: Sequence[Checked]) -> Iterator[Finding]:
    """Yield a notice if most matrices are further from the original than formats and calibrations make them."""
    of_all = [
        one.distance
        for _, _, outcome in _each(checked)
        for one in outcome.compared.values()
        if not one.is_wrong
    ]
    if of_all and (typical := float(np.median(of_all))) > _FAR:
        what = "Most weights are further from the original's than rounding and calibrations make them: another version?"
        expected, found = f"less than {_FAR} times the rounding error", f"{typical:.1f} times it"
        yield Finding("stale", what, expected, found, is_damage=False)


def _each(checked: Sequence[Checked]) -> Iterator[tuple[Checked, int, Outcome]]:
    return ((one, expert, outcome) for one in checked for expert, outcome in one.outcomes.items())


def _owner(
    place: Place, compared: Comparison, sketch: Any, pool: Any, places: Sequence[Place]
) -> Place | None:
    """Return the original's matrix that this one clearly is instead of its own; None if there is none.

    pool: sketches of the original's matrices at `places`, [M, 256]. The owner of one near its own is in its layer.
    """
    cosines, least = pool @ sketch, _OWNER
    own = tangent_of(float(cosines[places.index(place)]))
    if not compared.is_wrong:
        cosines[[layer != place[0] for layer, *_ in places]] = 0
        least = max(least, 1 / math.hypot(1, 2 * compared.rounding))
    best = int(cosines.argmax())
    is_nearer = tangent_of(float(cosines[best])) ** 2 < _TWICE_AS_NEAR * own**2
    return places[best] if cosines[best] >= least and is_nearer else None


def _unrelated(place: Place, compared: Comparison) -> Finding:
    cosine = 1 / math.hypot(1, compared.tangent)
    expected = f"a relative error near {compared.rounding:.3g}"
    found = f"{compared.error:.3g}, a cosine of {cosine:.3f}"
    kind, what = (
        "unrelated",
        "The weights are not the original's, nor those of another expert that was read.",
    )
    if cosine > _RELATED:
        kind, what = (
            "stale",
            "The weights are near the original's, and not their rounding: another version of them?",
        )
    return _at(Finding(kind, what, expected, found), place)


def _misplaced(place: Place, owner: Place, is_exchange: bool) -> Finding:
    if owner[:2] == place[:2]:
        kind = "gate-up-swapped"
        what = (
            "Gate and up are exchanged."
            if is_exchange
            else "The matrix is that of another projection."
        )
    else:
        kind = "swapped"
        what = (
            "Two experts' matrices are exchanged."
            if is_exchange
            else "The matrix is that of another expert."
        )
    found = f"{owner[2]} of expert {owner[1]}" + f" of {owner[0]}" * (owner[0] != place[0])
    return _at(Finding(kind, what, f"{place[2]} of expert {place[1]}", found), place)
